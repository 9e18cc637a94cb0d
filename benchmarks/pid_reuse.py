"""Can a process be hit that got the number of one that was to be stopped?

    python benchmarks/pid_reuse.py [--trials 1000] [--by-number]

In a pid namespace of its own, so that numbers can be given out again at will (`ns_last_pid`), a victim is planned, and
dies in another way at some moment of its being stopped; a bystander gets the same number at once, with the same command
and user. In the last two rows nobody interferes: a supervisor starts its process again the moment it ends, under the same
number or the next. A wrong kill is any signal that reaches the bystander, or what was started again.

Some moments are hit by racing (the two run on different cores), some for certain: the look is held up at one file of
/proc, which is a pipe then and shows what was true of the victim, or the stopping process is held by SIGSTOP.

`stop.py` stands beside the usual way: look once whether it is the right one, TERM by number, wait, KILL by number.
`--by-number` runs that alone. Exit code 1 if `stop.py` did anything wrong; 2, and why, where there can be no namespace.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftproof.machine import stop

DEADLINE_S = 0.03
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PLAN_AGE_S = 2.5 * TICK_S
"""Between the victim's start and its end: within one tick two processes look the same (see `stop.py`)."""

MOMENTS: dict[str, tuple[float, float] | str | None] = {
    "before anything is done": None,
    "while it is looked at (race)": (0.0, 0.0008),
    "while it is looked at: at its stat": "stat",
    "while it is looked at: at its status": "status",
    "while it is looked at: at its command": "cmdline",
    "between TERM and KILL (race)": (0.001, DEADLINE_S),
    "around KILL (race)": (DEADLINE_S - 0.002, DEADLINE_S + 0.006),
    "between TERM and KILL: held": "held",
    "restarted under the same number": "same",
    "restarted under the next number": "next",
}
"""What happens when: seconds after the start, a file of /proc, or something of its own."""

Way = Callable[[stop.Job], Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--by-number", action="store_true", help="only the usual way, without stop.py")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        return enter_namespace()
    ways: dict[str, Way] = {"by number": by_number} if options.by_number else {"stop.py": stop.apply, "by number": by_number}
    results = {name: run_trials(way, options.trials, random.Random(options.seed)) for name, way in ways.items()}
    print(f"{'':38}" + "".join(f"{name:>32}" for name in ways))
    print(f"{'the number changes hands':38}" + f"{'trials':>10}{'reused':>10}{'wrong kills':>12}" * len(ways))
    for moment in (*MOMENTS, "all"):
        cells = [f"{counts[moment, what]:{width},}" for counts in results.values() for what, width in COLUMNS]
        print(f"{moment:38}" + "".join(cells))
    return int(results.get("stop.py", Counter())["all", "wrong kills"] > 0)


COLUMNS = (("trials", 10), ("reused", 10), ("wrong kills", 12))


def enter_namespace() -> int:
    """Run this again as the first process of a new pid namespace; as root of a user namespace where we are not root."""
    words = ["unshare", *([] if os.getuid() == 0 else ["--user", "--map-root-user"]), "--pid", "--fork", "--kill-child", "--mount-proc"]
    try:
        tried = subprocess.run([*words, "sh", "-c", "echo 100 >/proc/sys/kernel/ns_last_pid"], capture_output=True, text=True, check=False)
        why = tried.stderr.strip() if tried.returncode else ""
    except FileNotFoundError:
        why = "unshare is not installed"
    if why:
        print(f"There can be no pid namespace with numbers of our choice here: {why}", file=sys.stderr)
        return 2
    return subprocess.run([*words, sys.executable, __file__, "--inside", *sys.argv[1:]], check=False).returncode


def by_number(job: stop.Job) -> None:
    """How it is usually done, and with more care than usual: the start time is compared first."""
    looks = {target["pid"]: (stop.see(job.proc, target["pid"]), target["start_ticks"]) for target in job.plan["targets"]}
    pids = [pid for pid, (seen, ticks) in looks.items() if seen is not None and seen.start_ticks == ticks]
    until = time.monotonic() + job.plan["deadline_s"]
    for pid in pids:
        kill(pid, signal.SIGTERM)
    while pids and time.monotonic() < until:
        pids = [pid for pid in pids if kill(pid, 0)]
        time.sleep(0.005)
    for pid in pids:
        kill(pid, signal.SIGKILL)


def kill(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def run_trials(way: Way, trials: int, chance: random.Random) -> Counter[tuple[str, str]]:
    """Counts by moment and column."""
    counts: Counter[tuple[str, str]] = Counter()
    names = list(MOMENTS)
    for number in range(trials):
        moment = names[number % len(names)]
        reused, hit = run_trial(way, MOMENTS[moment], chance)
        for row in (moment, "all"):
            counts[row, "trials"] += 1
            counts[row, "reused"] += reused
            counts[row, "wrong kills"] += hit
    return counts


def run_trial(way: Way, moment: tuple[float, float] | str | None, chance: random.Random) -> tuple[bool, bool]:
    """One victim and its bystander: whether the number was reused, and whether the bystander was hit."""
    restarts = moment in ("same", "next")
    victim, told = start_victim(obeys=restarts and chance.random() < 0.5)
    plan = plan_of(victim)
    others: dict[int, int] = {}
    if restarts:  # somebody who keeps the stopping process busy until after KILL
        stubborn, others[stubborn] = start_victim(obeys=False)
        plan["targets"] += plan_of(stubborn)["targets"]
    time.sleep(PLAN_AGE_S)
    with proc_with_pipe(victim, moment if moment in ("stat", "status", "cmdline") else None) as (proc, pipe):
        if moment is None:
            bystander = swap(victim)
        go_read, go_write = os.pipe()
        stopper = fork(lambda: (os.read(go_read, 1), signal.alarm(20), way(stop.make_job(plan, time.time(), proc, "/nonexistent", 2.0))))
        os.write(go_write, b"x")
        began = time.monotonic()
        if isinstance(moment, tuple):
            until = began + chance.uniform(*moment)
            while time.monotonic() < until:
                pass
            bystander = swap(victim)
        elif pipe is not None:
            truth = Path(f"/proc/{victim}/{moment}").read_bytes()
            with pipe.open("wb") as stream:  # opens once the stopping process does
                bystander = swap(victim)
                os.symlink(f"/proc/{victim}/{moment}", f"{pipe}.next")
                os.rename(f"{pipe}.next", pipe)
                stream.write(truth)
        elif moment == "held":
            os.read(told, 1)  # TERM has come
            os.kill(stopper, signal.SIGSTOP)
            os.waitpid(stopper, os.WUNTRACED)
            bystander = swap(victim)
            time.sleep(max(0.0, began + DEADLINE_S - time.monotonic()))
            os.kill(stopper, signal.SIGCONT)
        elif restarts:
            _, status = os.waitpid(victim, 0)
            bystander = start_bystander(victim - 1 if moment == "same" else None)
            assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 7, "it was stopped, not ended otherwise"
        _, status = os.waitpid(stopper, 0)
        assert status == 0, f"the stopping process failed: {status}"
    hit = not is_untouched(bystander)
    for other in others:
        kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    for fd in (told, go_read, go_write, *others.values()):
        os.close(fd)
    return bystander == victim, hit


# Processes


def fork(work: Callable[[], Any]) -> int:
    """A child that does this and ends well, or ends with 1."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def start_victim(*, obeys: bool) -> tuple[int, int]:
    """A process in a session of its own that ignores TERM or ends by it; and a pipe on which it says that TERM came."""
    read, write = os.pipe()

    def work() -> None:
        def on_term(*_: object) -> None:
            os.write(write, b"t")
            if obeys:
                os._exit(7)

        os.setsid()
        signal.signal(signal.SIGTERM, on_term)
        os.write(write, b"r")
        while True:
            time.sleep(60)

    pid = fork(work)
    os.close(write)
    assert os.read(read, 1) == b"r"
    return pid, read


def start_bystander(after: int | None) -> int:
    """A process that says whether any signal came before SIGRTMAX. `after`: the number before the one it gets."""
    every = signal.valid_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, every)  # none is lost while it is not ready
    if after is not None:
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(after))

    def work() -> None:
        os.closerange(3, 64)  # a pipe that it held would have no end
        os.setsid()
        os._exit(0 if signal.sigwait(every) == signal.SIGRTMAX else 1)  # the lowest number first

    pid = fork(work)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return pid


def is_untouched(bystander: int) -> bool:
    """Asks a bystander, and ends it."""
    os.kill(bystander, signal.SIGRTMAX)
    _, status = os.waitpid(bystander, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(bystander, signal.SIGKILL)
        os.waitpid(bystander, 0)
    return status == 0


def swap(victim: int) -> int:
    """The victim dies, and a bystander gets its number."""
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    return start_bystander(victim - 1)


def plan_of(pid: int) -> dict[str, Any]:
    """As much of a plan as is carried out."""
    seen = stop.see("/proc", pid)
    assert seen is not None
    target = {"pid": pid, "start_ticks": seen.start_ticks, "uid": seen.uid, "command": seen.command, "cgroup": None, "unit": None}
    return {"deadline_s": DEADLINE_S, "uid": os.getuid(), "any_user": False, "units": [], "cgroups": [], "targets": [target]}


@contextmanager
def proc_with_pipe(pid: int, name: str | None) -> Iterator[tuple[str, Path | None]]:
    """A /proc in which one file of a process is a pipe; /proc itself without a name."""
    if name is None:
        yield "/proc", None
        return
    folder = Path(tempfile.mkdtemp())
    try:
        for entry in os.listdir("/proc"):
            if entry != str(pid):
                (folder / entry).symlink_to(f"/proc/{entry}")
        (folder / str(pid)).mkdir()
        for entry in ("stat", "status", "cmdline", "exe", "cgroup"):
            if entry != name:
                (folder / str(pid) / entry).symlink_to(f"/proc/{pid}/{entry}")
        pipe = folder / str(pid) / name
        os.mkfifo(pipe)
        yield str(folder), pipe
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    raise SystemExit(main())
