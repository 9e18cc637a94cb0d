"""`stop.py` on real processes: who is ended, how, and who is never touched."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftproof.machine import probe
from draftproof.machine.stop import same_command
from stopping import (
    IGNORE,
    NOBODY,
    PYTHON,
    SLEEP,
    STOP,
    Family,
    begin,
    detail,
    document,
    is_alive,
    outcomes,
    packed,
    plan,
    sealed,
    stat_field,
    stop,
    target,
    until,
)

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="Only root may act as another user or make a namespace.")


@pytest.fixture
def family() -> Iterator[Family]:
    made = Family()
    yield made
    made.end()


# How


def test_one_that_obeys_is_terminated(family: Family) -> None:
    child = family.start("import signal, sys", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", SLEEP)
    said = stop(plan(child.pid))
    assert outcomes(said) == {child.pid: "terminated"}
    assert child.wait(1) == 7  # it had its own way to end
    assert said["outcomes"][0]["seconds"] <= said["seconds"] < 2


def test_those_that_ignore_term_share_one_deadline_and_are_killed(family: Family) -> None:
    stubborn = [family.start(IGNORE, SLEEP) for _ in range(3)]
    willing = family.start(SLEEP)
    said = stop(plan(willing.pid, *(child.pid for child in stubborn), deadline_s=0.5))
    assert outcomes(said) == {willing.pid: "terminated", **{child.pid: "killed" for child in stubborn}}
    assert [child.wait(1) for child in (willing, *stubborn)] == [-signal.SIGTERM, *[-signal.SIGKILL] * 3]
    assert 0.5 <= said["seconds"] < 1.3
    assert [one["pid"] for one in said["outcomes"]] == [willing.pid, *(child.pid for child in stubborn)]


def test_a_stopped_process_still_runs_its_own_end(family: Family) -> None:
    child = family.start("import signal, sys", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", SLEEP)
    stubborn = family.start(IGNORE, SLEEP)
    for held in (child, stubborn):
        os.kill(held.pid, signal.SIGSTOP)
        assert until(lambda pid=held.pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    said = stop(plan(child.pid, stubborn.pid, deadline_s=0.3))
    assert outcomes(said) == {child.pid: "terminated", stubborn.pid: "killed"}
    assert child.wait(1) == 7


def test_a_daemon_that_left_its_parent_and_session(family: Family) -> None:
    """Double-forked: its parent is init or a subreaper, its session its own."""
    parent = family.start(
        "import os, time",
        "if os.fork() == 0:",
        "    os.setsid()",
        "    if os.fork() == 0: print('ready', flush=True); time.sleep(300)",
        "    os._exit(0)",
        "os.wait(); time.sleep(300)",
    )
    assert until(lambda: len(family.alive()) == 2)
    daemon = next(pid for pid in family.alive() if pid != parent.pid)
    assert outcomes(stop(plan(daemon))) == {daemon: "terminated"}
    assert until(lambda: not is_alive(daemon))
    assert parent.poll() is None


def test_a_process_whose_first_thread_has_ended_is_no_zombie(family: Family) -> None:
    """Its state is Z, yet its other threads live, and would hold the memory."""
    child = family.start(
        "import ctypes, signal, threading, time",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "def work():",
        "    print('ready', flush=True)",
        "    time.sleep(300)",
        "threading.Thread(target=work).start()",
        "ctypes.CDLL(None).syscall(60 if ctypes.sizeof(ctypes.c_long) == 8 and __import__('os').uname().machine == 'x86_64' else 93, 0)",
    )
    assert until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
    assert len(os.listdir(f"/proc/{child.pid}/task")) == 2
    said = stop(plan(child.pid, deadline_s=0.2))
    assert outcomes(said) == {child.pid: "killed"}
    assert child.wait(1) == -signal.SIGKILL


def test_a_zombie_counts_as_ended_and_is_called_one(family: Family) -> None:
    child = family.start("print('ready', flush=True)")
    assert until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
    said = stop(plan(child.pid))
    assert outcomes(said) == {child.pid: "gone"}
    assert detail(said, child.pid).startswith(f"a zombie: it holds nothing, but its parent {os.getpid()} ")


# Children born since


def test_children_that_are_born_all_the_time_are_ended_too(family: Family) -> None:
    """A child every millisecond, none of which obeys: they would live on as nobody's when their parent obeys TERM."""
    parent = family.start(
        "import os, signal, sys, time",
        "print('ready', flush=True)",
        "sys.stdin.readline()",
        "while True:",
        "    if os.fork() == 0:",
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)",
        "    time.sleep(0.0005)",
        stdin=subprocess.PIPE,
    )
    made = plan(parent.pid, deadline_s=0.3)
    go(parent)
    assert until(lambda: len(family.alive()) > 5)
    said = stop(made)
    ended = outcomes(said)
    assert ended.pop(parent.pid) == "terminated"
    assert len(ended) > 5
    assert set(ended.values()) <= {"killed", "terminated"}  # a newborn may get TERM before it ignores it
    assert all(detail(said, pid).startswith(f"born of {parent.pid} since the plan") for pid in ended)
    assert family.alive() == []


def test_children_born_while_their_parent_resists_are_ended_too(family: Family) -> None:
    """The parent ignores TERM, and its children have children."""
    parent = family.start(
        IGNORE,
        "import os, sys, time",
        "print('ready', flush=True)",
        "sys.stdin.readline()",
        "while True:",
        "    if os.fork() == 0:",
        "        if os.fork() == 0: time.sleep(300)",
        "        time.sleep(300)",
        "    time.sleep(0.0005)",
        stdin=subprocess.PIPE,
    )
    made = plan(parent.pid, deadline_s=0.3)
    go(parent)
    said = stop(made)
    assert outcomes(said)[parent.pid] == "killed"
    assert len(said["outcomes"]) > 20
    assert set(outcomes(said).values()) == {"killed"}
    assert family.alive() == []


def go(waiting: subprocess.Popen[str]) -> None:
    """What waits for a line gets it."""
    assert waiting.stdin is not None
    waiting.stdin.write("\n")
    waiting.stdin.close()


def test_a_child_that_was_there_before_the_plan_is_left_alone(family: Family) -> None:
    parent = family.start("import os, time", "if os.fork() == 0:", "    print('ready', flush=True); time.sleep(300)", "time.sleep(300)")
    child = next(pid for pid in family.alive() if pid != parent.pid)
    time.sleep(0.05)
    assert outcomes(stop(plan(parent.pid))) == {parent.pid: "terminated"}
    assert family.alive() == [child]


def test_a_child_of_another_user_is_left_alone(family: Family) -> None:
    if os.getuid() != 0:
        pytest.skip("Only root may have children of other users.")
    parent = family.start(
        "import os, signal, time",
        "def bear(*_):",
        "    if os.fork() == 0: os.setuid(65534)",
        "signal.signal(signal.SIGUSR1, bear)",
        "print('ready', flush=True)",
        "while True: time.sleep(300)",
    )
    made = plan(parent.pid)
    os.kill(parent.pid, signal.SIGUSR1)
    assert until(lambda: {psutil.Process(pid).uids().real for pid in family.alive()} == {0, NOBODY})
    child = next(pid for pid in family.alive() if pid != parent.pid)
    assert outcomes(stop(made)) == {parent.pid: "terminated"}
    assert family.alive() == [child]


def test_what_a_supervisor_starts_anew_is_not_hit(family: Family) -> None:
    supervisor = family.start(
        "import subprocess, sys",
        "print('ready', flush=True)",
        f"while True: subprocess.Popen([{PYTHON!r}, '-I', '-S', '-c', 'import time; time.sleep(300)']).wait()",
    )
    assert until(lambda: len(family.alive()) == 2)
    first = next(pid for pid in family.alive() if pid != supervisor.pid)
    assert until(lambda: "sleep(300)" in " ".join(psutil.Process(first).cmdline()))
    assert outcomes(stop(plan(first))) == {first: "terminated"}
    assert until(lambda: len(family.alive()) == 2)
    assert supervisor.pid in family.alive()
    assert first not in family.alive()


# Who is not touched


def test_one_that_is_gone(family: Family) -> None:
    child = family.start(SLEEP)
    made = plan(child.pid)
    child.kill()
    child.wait()
    said = stop(made)
    assert outcomes(said) == {child.pid: "gone"}
    assert detail(said, child.pid) == "no process has this number"


@pytest.mark.parametrize("ticks", [-1, 1])
def test_another_start_time_is_another_process(family: Family, ticks: int) -> None:
    child = family.start(SLEEP)
    said = stop(plan(target(child.pid, start_ticks=stat_field(child.pid, 22) + ticks)))
    assert outcomes(said) == {child.pid: "changed"}
    assert child.poll() is None


def test_another_user_than_planned_is_a_change(family: Family) -> None:
    child = family.start(SLEEP)
    said = stop(plan(target(child.pid, uid=os.getuid() + 1), any_user=True))
    assert outcomes(said) == {child.pid: "changed"}
    assert child.poll() is None


def test_another_command_than_planned_is_a_change(family: Family) -> None:
    """The same process in the kernel's eyes: it only called exec."""
    child = family.start(
        "import os, signal, time",
        "signal.signal(signal.SIGUSR1, lambda *_: os.execv('/bin/sleep', ['sleep', '300']))",
        "print('ready', flush=True)",
        "while True: time.sleep(300)",
    )
    made = plan(child.pid)
    os.kill(child.pid, signal.SIGUSR1)
    assert until(lambda: psutil.Process(child.pid).cmdline() == ["sleep", "300"])
    said = stop(made)
    assert outcomes(said) == {child.pid: "changed"}
    assert detail(said, child.pid) == "it runs another command now"
    assert child.poll() is None


def test_a_number_that_is_a_threads_now(family: Family) -> None:
    child = family.start("import threading, time", "threading.Thread(target=time.sleep, args=(300,)).start()", SLEEP)
    thread = max(int(name) for name in os.listdir(f"/proc/{child.pid}/task"))
    assert thread != child.pid
    said = stop(plan(target(child.pid, pid=thread)))
    assert outcomes(said) == {thread: "changed"}
    assert child.poll() is None


@needs_root
def test_another_users_process_only_with_any_user(family: Family) -> None:
    child = family.start(SLEEP, user=NOBODY)
    said = stop(plan(child.pid))
    assert outcomes(said) == {child.pid: "forbidden"}
    assert detail(said, child.pid) == "it belongs to uid 65534, the plan to uid 0, and it is not for any user"
    assert child.poll() is None
    assert outcomes(stop(plan(child.pid, any_user=True))) == {child.pid: "terminated"}


@needs_root
def test_what_the_kernel_forbids_is_said_and_the_others_are_ended(family: Family) -> None:
    of_root, own = family.start(SLEEP), family.start(SLEEP, user=NOBODY)
    made = plan(of_root.pid, own.pid, uid=NOBODY, any_user=True)
    said = document(begin(packed(json.dumps({"plan": made})), user=NOBODY, cwd="/"))
    assert outcomes(said) == {of_root.pid: "forbidden", own.pid: "terminated"}
    assert detail(said, of_root.pid) == "the kernel did not take the signal: Operation not permitted"
    assert of_root.poll() is None


def test_ancestors_are_spared_and_a_stale_worker_in_their_session_is_not(family: Family) -> None:
    """pytest is an ancestor; the other was left in the session in which pytest runs, as by a server started from this shell."""
    neighbour = family.start(SLEEP, session=False)
    said = stop(plan(os.getpid(), neighbour.pid))
    assert outcomes(said) == {os.getpid(): "protected", neighbour.pid: "terminated"}
    assert detail(said, os.getpid()) == "this runs below it"


def test_not_itself() -> None:
    """The plan names the process that then becomes `stop.py`."""
    becomes = (
        f"import os, sys; sys.path[:0] = {[str(Path(__file__).parents[1] / 'helpers'), *sys.path]!r}\n"
        "import json, stopping\n"
        "own = stopping.packed(json.dumps({'plan': stopping.plan(os.getpid())}))\n"
        f"os.execv({PYTHON!r}, [{PYTHON!r}, '-I', '-', own])"
    )
    with STOP.open("rb") as script:
        child = subprocess.Popen([sys.executable, "-c", becomes], stdin=script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = document(child)
    assert outcomes(said) == {child.pid: "protected"}
    assert detail(said, child.pid) == "it is this very process"


@pytest.mark.parametrize(
    "name", ["nvidia-persistenced", "nv-hostengine", "Xorg", "Xwayland", "dbus-daemon", "systemd-logind", "sshd-session"]
)
def test_no_service_of_the_system(name: str) -> None:
    """A program of such a name, whoever runs it: persistenced and dbus have users of their own."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    program = folder / name
    shutil.copy("/bin/sleep", program)
    child = subprocess.Popen([program, "300"], start_new_session=True, user=NOBODY if os.getuid() == 0 else None)
    try:
        assert until(lambda: os.readlink(f"/proc/{child.pid}/exe") == str(program))
        said = stop(plan(child.pid, any_user=True))
        assert outcomes(said) == {child.pid: "protected"}
        assert detail(said, child.pid) == f"it is a service of the system, {name}"
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
        shutil.rmtree(folder)


@needs_root
@pytest.mark.parametrize(("uid", "outcome"), [(0, "protected"), (NOBODY, "terminated")])
def test_a_name_that_a_process_gave_itself_counts_only_for_root(family: Family, uid: int, outcome: str) -> None:
    child = family.start("from pathlib import Path", "Path('/proc/self/comm').write_text('nv-hostengine')", SLEEP, user=uid)
    assert outcomes(stop(plan(child.pid, any_user=True))) == {child.pid: outcome}


@needs_root
def test_no_kernel_thread() -> None:
    if Path("/proc/2/comm").read_text().strip() != "kthreadd":
        pytest.skip("Kernel threads are not seen from here.")
    said = stop(plan(target(2, command="", session=0)))
    assert outcomes(said) == {2: "protected"}
    assert detail(said, 2) == "it is a thread of the kernel"


# Refused whole


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hash": "0" * 64}, "The plan is not what its hash says: it was changed after it was made."),
        ({"host": "node7"}, f"The plan is for 'node7', this is {os.uname().nodename!r}."),
        ({"boot_id": "00000000-0000-0000-0000-000000000000"}, "The machine was started anew since the plan was made."),
        ({"pid_namespace": 4}, "The plan was made in another pid namespace: its numbers mean other processes here."),
        ({"pid_namespace": None}, "The plan was made in another pid namespace: its numbers mean other processes here."),
        ({"version": 2}, "The plan has version 2; this carries out version 1."),
    ],
)
def test_a_plan_for_another_place_or_time_is_refused(family: Family, changes: dict[str, Any], sentence: str) -> None:
    child = family.start(SLEEP)
    made = plan(child.pid)
    assert stop({**made, **changes} if "hash" in changes else sealed({**made, **changes})) == {
        "schema": 1,
        "refused": sentence,
        "units": [],
        "outcomes": [],
        "seconds": pytest.approx(0, abs=1),
    }
    assert child.poll() is None


def test_a_plan_that_was_changed_after_it_was_made_is_refused(family: Family) -> None:
    child, other = family.start(SLEEP), family.start(SLEEP)
    made = plan(child.pid)
    made["targets"] = [target(other.pid)]
    assert stop(made)["refused"] == "The plan is not what its hash says: it was changed after it was made."
    assert (child.poll(), other.poll()) == (None, None)


@needs_root
def test_in_another_pid_namespace_it_is_refused(family: Family) -> None:
    child = family.start(SLEEP)
    said = stop(plan(child.pid), before=["unshare", "--pid", "--fork", "--mount-proc"])
    assert said["refused"] == "The plan was made in another pid namespace: its numbers mean other processes here."
    assert child.poll() is None


@needs_root
def test_where_proc_shows_another_namespace_it_is_refused(family: Family) -> None:
    """Its own namespace is the plan's, yet /proc shows the one outside: start times would be those of other processes."""
    child = family.start(SLEEP)
    inside = (
        f"import os, sys; sys.path[:0] = {[str(Path(__file__).parents[1] / 'helpers'), *sys.path]!r}\n"
        "import json, stopping\n"
        f"made = stopping.plan(stopping.target({child.pid}))\n"
        "os.execv(stopping.PYTHON, [stopping.PYTHON, '-I', '-', stopping.packed(json.dumps({'plan': made}))])"
    )
    with STOP.open("rb") as script:
        outside = subprocess.Popen(
            ["unshare", "--pid", "--fork", sys.executable, "-c", inside],
            stdin=script,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert document(outside)["refused"] == "/proc shows another pid namespace than the one this runs in."
    assert child.poll() is None


def test_without_pidfds_it_is_refused(family: Family) -> None:
    """A seccomp filter makes the kernel one that does not know pidfd_open (434 everywhere)."""
    child = family.start(SLEEP)
    no_pidfd = (
        "import ctypes, os, struct, sys\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        # load the number; if it is 434 then ENOSYS, else allow
        "words = [(0x20, 0, 0, 0), (0x15, 0, 1, 434), (0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7FFF0000)]\n"
        "code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *word) for word in words))\n"
        "program = struct.pack('HxxxxxxP', len(words), ctypes.addressof(code))\n"
        "assert libc.prctl(38, 1, 0, 0, 0) == 0\n"
        "assert libc.prctl(22, 2, program, 0, 0) == 0\n"
        f"os.execv({PYTHON!r}, [{PYTHON!r}, '-I', '-', sys.argv[1]])"
    )
    with STOP.open("rb") as script:
        refusing = subprocess.Popen(
            [PYTHON, "-c", no_pidfd, packed(json.dumps({"plan": plan(child.pid)}))],
            stdin=script,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    expected = "This kernel gives no pidfd (Function not implemented), and a signal to a bare pid could hit another process."
    assert document(refusing)["refused"] == expected
    assert child.poll() is None


# Interrupted


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_it_sends_no_kill_and_says_every_outcome(family: Family, number: int) -> None:
    stubborn, willing = family.start(IGNORE, SLEEP), family.start(SLEEP)
    at_work = begin(packed(json.dumps({"plan": plan(stubborn.pid, willing.pid, deadline_s=30)})))
    assert willing.wait(5) == -signal.SIGTERM
    began = time.monotonic()
    at_work.send_signal(number)
    said = document(at_work)
    assert time.monotonic() - began < 2
    assert outcomes(said) == {stubborn.pid: "survives", willing.pid: "terminated"}
    assert detail(said, stubborn.pid) == "interrupted: TERM was sent, KILL was not"
    assert stubborn.poll() is None


def test_a_lost_connection_does_not_leave_the_plan_half_done(family: Family) -> None:
    stubborn, willing = family.start(IGNORE, SLEEP), family.start(SLEEP)
    at_work = begin(packed(json.dumps({"plan": plan(stubborn.pid, willing.pid, deadline_s=0.7)})))
    assert willing.wait(5) == -signal.SIGTERM
    at_work.send_signal(signal.SIGHUP)
    assert at_work.stdout is not None
    assert at_work.stderr is not None
    at_work.stdout.close()
    assert at_work.wait(10) == 1
    assert at_work.stderr.read() == ""
    at_work.stderr.close()
    assert stubborn.wait(1) == -signal.SIGKILL


# What cannot be ended


@needs_root
def test_one_that_even_kill_does_not_end_is_named_with_what_it_hangs_on(family: Family) -> None:
    """A frozen control group of version 1 holds its processes in state D: KILL waits until it thaws."""
    freezer = Path("/sys/fs/cgroup/freezer")
    if not (freezer / "cgroup.procs").exists():
        pytest.skip("There is no freezer of control groups version 1.")
    group = freezer / f"draftproof-test-{os.getpid()}"
    child, other = family.start(IGNORE, SLEEP), family.start(SLEEP)
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(child.pid))
        (group / "freezer.state").write_text("FROZEN")
        assert until(lambda: (group / "freezer.state").read_text() == "FROZEN\n")
        said = stop(plan(child.pid, other.pid, deadline_s=0.2), kill_wait_s=0.3)
        assert outcomes(said) == {child.pid: "survives", other.pid: "terminated"}
        assert re.fullmatch(r"KILL has been pending for 0.3 s; state D \(uninterruptible\), wchan \w+", detail(said, child.pid))
        assert said["seconds"] < 2
    finally:
        (group / "freezer.state").write_text("THAWED")
        ended_by = child.wait(5)
        group.rmdir()
    assert ended_by == -signal.SIGKILL


# Control groups


def test_a_control_group_is_killed_whole_only_if_all_its_members_are_targets(family: Family, tmp_path: Path) -> None:
    child, bystander = family.start(IGNORE, SLEEP), family.start(SLEEP)
    for name, members in {"ours": [child.pid], "shared": [child.pid, bystander.pid], "empty": []}.items():
        (tmp_path / name / "below").mkdir(parents=True)
        (tmp_path / name / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in members[:1]))
        (tmp_path / name / "below" / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in members[1:]))
        (tmp_path / name / "cgroup.kill").touch()
    made = plan(child.pid, cgroups=["/ours", "/shared", "/empty", "/missing"], deadline_s=0.1)
    assert outcomes(stop(made, roots={"cgroup": str(tmp_path)})) == {child.pid: "killed"}
    assert {name: (tmp_path / name / "cgroup.kill").read_text() for name in ("ours", "shared", "empty")} == {
        "ours": "1",
        "shared": "",
        "empty": "",
    }
    assert bystander.poll() is None


@needs_root
def test_a_real_control_group_is_killed_with_those_born_this_moment(family: Family) -> None:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    root = next((Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"), None)
    if root is None or not os.access(root, os.W_OK):
        pytest.skip("There is no control group file system of version 2.")
    group = root / f"draftproof-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"No control group can be made: {error}.")
    parent = family.start(
        IGNORE,
        "import os, sys, time",
        "print('ready', flush=True)",
        "sys.stdin.readline()",
        "while True:",
        "    if os.fork() == 0: time.sleep(300)",
        "    time.sleep(0.0005)",
        stdin=subprocess.PIPE,
    )
    try:
        (group / "cgroup.procs").write_text(str(parent.pid))
        made = plan(parent.pid, cgroups=[f"/{group.name}"], deadline_s=0.3)
        go(parent)
        said = stop(made, roots={"cgroup": str(root)})
        assert set(outcomes(said).values()) == {"killed"}
        assert (group / "cgroup.procs").read_text() == ""
    finally:
        family.end()
        group.rmdir()


# The file itself


def test_it_is_python_3_9_and_the_standard_library_alone() -> None:
    tree = ast.parse(STOP.read_text(), feature_version=(3, 9))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or ".").split(".")[0])
    assert imported <= sys.stdlib_module_names
    assert isinstance(tree.body[-1], ast.If)


@pytest.mark.parametrize(
    ("planned", "now", "same"),
    [
        ("python serve.py", "python serve.py", True),
        ("python serve.py", "python serve.py --port 1", False),
        ("python serve.py", "python", False),
        ("serve --api-key *** --port 1", "serve --api-key secret --port 1", True),
        ("serve --api-key *** --port 1", "serve --api-key secret --port 2", False),
        ("serve --token ***", "serve --token s p a c e", True),
        ("a *** b *** c", "a 1 b 2 c", True),
        ("a *** b *** c", "a 1 c", False),
        ("a *** b", "a b", False),
        ("x" * 299 + "…", "x" * 4000, True),
        ("x" * 299 + "…", "x" * 298, False),
        ("x" * 297 + "**…", "x" * 297 + "secret and more", True),
        ("x" * 300, "x" * 300, True),
        ("x" * 300, "x" * 4000, False),
        ("anything", "", True),
    ],
)
def test_a_command_is_the_planned_one_but_for_secrets_and_length(planned: str, now: str, same: bool) -> None:
    assert same_command(planned, now) is same


def test_the_time_of_the_plan_decides_who_was_born_since(family: Family) -> None:
    """The same child, and a plan that was made before it was born."""
    before = datetime.now(UTC).isoformat()
    time.sleep(0.03)
    parent = family.start("import os, time", "if os.fork() == 0:", "    print('ready', flush=True); time.sleep(300)", "time.sleep(300)")
    said = stop(plan(parent.pid, made=before))
    assert set(outcomes(said).values()) == {"terminated"}
    assert len(said["outcomes"]) == 2
    assert family.alive() == []


@given(
    st.lists(
        st.sampled_from(["--api-key", "k e y", "HF_TOKEN=abc", "--token=x", "***", "*", "", "é", "serve", "Bearer s3cret", "x" * 150])
        | st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=9),
        max_size=12,
    )
)
def test_a_command_as_the_probe_writes_it_is_known_again(words: list[str]) -> None:
    masked = probe.mask(words)
    assert same_command(masked if len(masked) <= 300 else masked[:299] + "…", " ".join(words))


def test_a_long_command_with_a_secret_seen_by_the_probe(family: Family) -> None:
    """Longer than the probe reads, with what it masks and what it cuts off."""
    child = family.start(SLEEP, f"# --api-key s3cret {'long ' * 2000}")
    seen = probe.command_of("/proc", child.pid)
    assert len(seen) == 300
    assert "s3cret" not in seen
    assert outcomes(stop(plan(target(child.pid, command=seen)))) == {child.pid: "terminated"}
