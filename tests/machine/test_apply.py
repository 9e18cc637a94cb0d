"""Carrying out a plan when the world has moved on: blind looks, holders that let go, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftproof.errors import Undecided
from draftproof.machine.apply import Applied, apply, apply_all
from draftproof.machine.look import QUICK, Look, Needs, look_at
from draftproof.machine.reclaim import HostPlan, ReclaimPlan, Selection, plan_host
from draftproof.machine.remote import Reach
from fake_gpus import FakeGpus, ended, wait_for


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpus]:
    with FakeGpus(tmp_path, count=2) as fake:
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        yield fake


def look() -> Look:
    return look_at([Reach()], Needs(gpus=(0, 1)), parts=QUICK, samples=1)[0]


def plan(grace_s: float = 0.5) -> HostPlan:
    return plan_host(look(), Selection(gpus=(0, 1), grace_s=grace_s))


@pytest.mark.parametrize(
    "fault",
    [
        "fail nvmlInit_v2 -1 9",
        "fail nvmlDeviceGetHandleByIndex_v2 0 15",
        "fail nvmlDeviceGetMemoryInfo_v2 0 15",
        "fail nvmlDeviceGetComputeRunningProcesses_v3 0 15",
    ],
)
def test_who_sees_nothing_does_nothing_and_says_so(gpus: FakeGpus, fault: str) -> None:
    pid = gpus.holder([0], 500)
    made = plan()
    gpus.say(fault)
    with pytest.raises(Undecided, match="Nothing was done, for who holds the GPUs cannot be told now"):
        apply(made, Reach())
    assert not ended(pid)


def test_a_look_afterwards_that_does_not_tell_is_no_freedom(gpus: FakeGpus) -> None:
    """The driver is lost in the moment in which the process ends."""
    pid = gpus.holder([0], 500, ignore_term=True)
    made = plan(grace_s=1.0)
    threading.Timer(0.7, gpus.say, ("fail nvmlDeviceGetMemoryInfo_v2 0 15",)).start()
    done = apply(made, Reach())
    assert ended(pid)
    assert [outcome.outcome for outcome in done.outcomes] == ["killed"]
    assert not done.free
    assert "did not tell" in done.blockers[-1]


def test_one_that_let_everything_go_is_left_alone(gpus: FakeGpus) -> None:
    """It has closed its devices as well, so that no look shows it any more."""
    script = f"exec 5<{gpus.dev}/nvidia0 6<{gpus.dev}/nvidia-uvm; echo up; read line; exec 5<&- 6<&-; echo closed; read line"
    command = ["setsid", "--fork", "bash", "-c", f"echo $$; {script}"]
    shell = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"DRAFTPROOF_FAKE": gpus.token, **os.environ}
    )
    assert shell.stdin is not None
    assert shell.stdout is not None
    pid = int(shell.stdout.readline())
    assert shell.stdout.readline() == "up\n"
    start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    gpus.say(f"hold 0 {pid} {500 * 2**20} compute {pid}:{start}")
    made = plan()
    assert [target.pid for target in made.targets] == [pid]
    shell.stdin.write("go\n")
    shell.stdin.flush()
    assert shell.stdout.readline() == "closed\n"
    gpus.unsay("hold")
    assert look().seen.process(pid) is None
    done = apply(made, Reach())
    assert not ended(pid)
    assert [(outcome.pid, outcome.outcome) for outcome in done.outcomes] == [(pid, "changed")]
    shell.stdin.close()


def test_ctrl_c_ends_the_killing_and_not_the_answer(gpus: FakeGpus) -> None:
    pid = gpus.holder([0], 500, ignore_term=True)
    made, told = ReclaimPlan(hosts=(plan(grace_s=20),)), []
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        apply_all(made, announce=told.append)
    assert time.monotonic() - began < 8
    (one,) = told
    assert isinstance(one, Applied)
    assert [(outcome.pid, outcome.outcome) for outcome in one.outcomes] == [(pid, "survives")]
    assert not one.free
    time.sleep(0.5)
    assert not ended(pid)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: ended(pid))
