"""What ends a load and what does not: looks written by hand, and a watch on real processes over the fake NVML."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.helpers.snapshots import BOB, CUDA, MIB, gpu, host, listed, process, seen, viewer

from draftproof.machine.look import QUICK, Look, Needs, look_at
from draftproof.machine.remote import Reach
from draftproof.machine.unreachable import Unreachable
from draftproof.machine.watch import GROWTH_MIB, SIGNAL, LoadTurnedBad, Watch, what_changed
from fake_gpus import FakeGpus, wait_for

RUN = process(800, "draftproof", fds=CUDA)
"""The run that loads: the probe's parent."""


def look(used: int, lists: list[dict[str, Any]], *others: dict[str, Any], **changes: Any) -> Look:
    return Look(Reach(), Needs(), seen(host(gpus=[gpu(0, used, lists)], processes=[RUN, *others], **changes)))


QUIET = look(0, [])


def test_the_run_itself_may_take_what_it_wants() -> None:
    assert what_changed(QUIET, look(90_000, [listed(800, 90_000)])) is None
    # Its memory is read after the whole: it may already be more.
    assert what_changed(QUIET, look(90_000, [listed(800, 95_000)])) is None


def test_a_new_holder_is_the_cause() -> None:
    came = look(5000, [listed(800, 4000), listed(4000, 1000)], process(4000, uid=BOB, fds=None))
    cause = what_changed(QUIET, came)
    assert cause is not None
    assert cause.startswith("a new holder on GPU 0: pid 4000")
    assert "holds 1,000 MiB" in cause


def test_a_holder_that_was_waived_before_may_stay_but_not_grow() -> None:
    known = process(4000, uid=BOB, fds=None)
    before = look(1000, [listed(4000, 1000)], known)
    assert what_changed(before, look(9000 + GROWTH_MIB, [listed(800, 8000), listed(4000, 1000 + GROWTH_MIB)], known)) is None
    grown = what_changed(before, look(9001 + GROWTH_MIB, [listed(800, 8000), listed(4000, 1001 + GROWTH_MIB)], known))
    assert grown is not None
    assert grown.startswith(f"others took {GROWTH_MIB + 1} MiB on GPU 0: pid 4000")


def test_memory_that_nobody_shows() -> None:
    cause = what_changed(QUIET, look(4400, [listed(800, 4000)]))
    assert cause is not None
    assert cause.startswith("others took 400 MiB on GPU 0: 400 MiB are in use that no process owns: the driver holds them")


def test_a_look_that_fails_is_no_cause() -> None:
    assert what_changed(QUIET, replace(QUIET, snapshot=None, error=Unreachable("no answer", remedy="wait"))) is None


def test_in_a_container_the_runs_own_memory_is_no_cause() -> None:
    """NVML lists the host's number of the run, which nobody here has."""
    inside = viewer(initial_namespace=False)
    assert what_changed(look(0, [], viewer=inside), look(90_000, [listed(70_123, 90_000)], viewer=inside)) is None


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with FakeGpus(tmp_path, count=1) as gpus:
        for name, value in gpus.environment.items():
            monkeypatch.setenv(name, value)
        yield gpus


def _now() -> Look:
    return look_at([Reach()], Needs(), parts=QUICK, samples=1)[0]


def _no_exit(cause: str) -> None:
    raise AssertionError(cause)


def test_a_wait_in_the_main_thread_ends_at_once(fake: FakeGpus) -> None:
    watch = Watch(_now(), every_s=0.2, give_up=_no_exit)
    threading.Timer(0.5, fake.holder, ([0], 700)).start()
    began = time.monotonic()
    watch.start()
    with pytest.raises(LoadTurnedBad, match="a new holder on GPU 0"):
        subprocess.run([sys.executable, "-c", "import time; time.sleep(30)"], check=True)
    assert time.monotonic() - began < 5
    assert (watch.stop() or "").startswith("a new holder on GPU 0")
    assert signal.getsignal(SIGNAL) is signal.SIG_DFL


def test_a_watch_that_saw_nothing_tells_nothing(fake: FakeGpus) -> None:
    watch = Watch(_now(), every_s=0.1, give_up=_no_exit)
    watch.start()
    time.sleep(1.0)
    assert watch.stop() is None


def test_a_look_that_cannot_be_made_does_not_end_the_watch(fake: FakeGpus) -> None:
    """No file can be opened for a while: the watch outlives that, and sees who came."""
    watch = Watch(_now(), every_s=0.1, give_up=_no_exit)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    watch.start()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        time.sleep(0.6)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with pytest.raises(LoadTurnedBad, match="a new holder on GPU 0"):  # noqa: PT012  (it may come while the holder starts)
        fake.holder([0], 700)
        time.sleep(10)
    watch.stop()


def test_the_end_of_a_load_and_the_cause_at_the_same_moment() -> None:
    """Nothing but LoadTurnedBad leaves, `stop` itself raises nothing, and the signal is the default's again afterwards."""
    before = replace(QUIET, needs=Needs(gpus=(), host_bytes=2**60))
    first = time.monotonic()
    watch = Watch(before, every_s=0.001, give_up=_no_exit)
    watch.start()
    with pytest.raises(LoadTurnedBad):
        time.sleep(30)
    watch.stop()
    look_s = time.monotonic() - first
    causes = []
    for number in range(40):
        watch = Watch(before, every_s=0.001, give_up=_no_exit)
        watch.start()
        with contextlib.suppress(LoadTurnedBad):
            time.sleep(look_s * number / 25)  # ends before the look, with it, and after it
        causes.append(watch.stop())
        assert watch.stop() == causes[-1]
        assert signal.getsignal(SIGNAL) is signal.SIG_DFL
    assert causes[0] is None
    assert causes[-1] is not None


def test_outside_the_main_thread_it_tells_at_the_end(fake: FakeGpus) -> None:
    told: list[str | None] = []

    def load() -> None:
        watch = Watch(_now(), every_s=0.1, give_up=_no_exit)
        watch.start()
        fake.holder([0], 700)
        wait_for(lambda: watch.cause is not None)
        told.append(watch.stop())

    thread = threading.Thread(target=load)
    thread.start()
    thread.join(30)
    assert told[0] is not None
    assert told[0].startswith("a new holder on GPU 0")


def test_host_memory_that_no_longer_suffices() -> None:
    """On a CPU: twice of what there is for this run is expected, so that half of it is just missed."""
    there = psutil.virtual_memory()
    before = replace(QUIET, needs=Needs(gpus=(), host_bytes=2 * there.total + MIB))
    watch = Watch(before, every_s=0.05, give_up=_no_exit)
    watch.start()
    with pytest.raises(LoadTurnedBad, match=r"host memory shrank: [\d,]+ MiB for this run, about [\d,]+ MiB expected; the largest other"):
        time.sleep(30)
    watch.stop()
