"""`stop.py` and units: stopped before any of their processes is signalled, verified, and never one of the system's.

There is no systemd here. `stubs/systemctl` and `stubs/docker` take their places on PATH; the processes are real. Which unit
a process belongs to is read from a /proc of links in which only the control groups are made up, or, as root, from real ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftproof.machine.stop import never_stopped
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
    stop,
    target,
    unit,
    until,
)

STUBS = Path(__file__).parent / "stubs"
GROUP = "/system.slice/vllm.service"
CONTAINER = "0123456789ab" * 5 + "cdef"

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="Only root may act as another user or make a control group.")


class Machine:
    """A folder for the stubs, and a /proc of links."""

    def __init__(self, folder: Path) -> None:
        self.stub, self.proc = folder / "stub", folder / "proc"
        self.stub.mkdir()
        self.proc.mkdir()
        (self.proc / "self").symlink_to("/proc/self")
        (self.proc / "sys").symlink_to("/proc/sys")
        self.env = {"PATH": f"{STUBS}:{os.environ['PATH']}", "STUB": str(self.stub)}
        self.roots = {"proc": str(self.proc)}

    def unit(self, name: str, behaviour: str, *members: int, state: str = "active") -> None:
        """How a unit behaves, and who belongs to it."""
        (self.stub / name).write_text(behaviour)
        (self.stub / f"{name}.state").write_text(f"{state}\n")
        (self.stub / f"{name}.pids").write_text(" ".join(map(str, members)))

    def put(self, pid: int, group: str) -> int:
        """A real process, seen in a made-up control group."""
        folder = self.proc / str(pid)
        folder.mkdir()
        for name in ("stat", "status", "cmdline", "exe", "task"):
            (folder / name).symlink_to(f"/proc/{pid}/{name}")
        (folder / "cgroup").write_text(f"0::{group}\n")
        return pid

    @property
    def calls(self) -> list[str]:
        """What the stubs were asked, in order."""
        path = self.stub / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def family() -> Iterator[Family]:
    made = Family()
    yield made
    made.end()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for name in ("hanging", "respawned"):
        if (made.stub / name).exists():
            pid = int((made.stub / name).read_text())
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_unit_is_stopped_and_its_process_is_not_signalled(machine: Machine, family: Family) -> None:
    main = machine.put(family.start(SLEEP).pid, GROUP)
    worker = machine.put(family.start(SLEEP).pid, f"{GROUP}/workers")
    machine.unit("vllm.service", "stops", main, worker)
    targets = [target(pid, unit="vllm.service", cgroup=GROUP) for pid in (main, worker)]
    said = stop(plan(*targets, units=[unit("vllm.service", cgroup=GROUP)]), env=machine.env, roots=machine.roots)
    assert machine.calls == ["systemctl stop --no-ask-password --job-mode=replace -- vllm.service", "systemctl is-active -- vllm.service"]
    assert said["units"] == [{"name": "vllm.service", "scope": "system", "stopped": True, "detail": "is-active: inactive"}]
    assert outcomes(said) == {main: "terminated", worker: "terminated"}
    assert detail(said, main).startswith("with its unit vllm.service")


@pytest.mark.parametrize(("behaviour", "state"), [("fails", "active"), ("forgets", "active"), ("forgets", "unknown")])
def test_what_outlives_its_unit_is_signalled_then(machine: Machine, family: Family, behaviour: str, state: str) -> None:
    survivor = machine.put(family.start(IGNORE, SLEEP).pid, GROUP)
    other = machine.put(family.start(SLEEP).pid, GROUP)
    machine.unit("vllm.service", behaviour, other, state=state)
    targets = [target(pid, unit="vllm.service", cgroup=GROUP) for pid in (survivor, other)]
    made = plan(*targets, units=[unit("vllm.service", cgroup=GROUP)], deadline_s=0.3)
    said = stop(made, env=machine.env, roots=machine.roots)
    assert said["units"][0]["stopped"]
    assert outcomes(said) == {survivor: "killed", other: "terminated"}
    assert ("with its unit" in detail(said, other)) == (behaviour == "fails")


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        ("resists", "is-active: active; stop: Job for [31mvllm.service canceled."),
        ("asks", "is-active: active; stop: Failed to stop vllm.service: Interactive authentication required."),
    ],
)
def test_the_processes_of_a_unit_that_stays_are_left(machine: Machine, family: Family, behaviour: str, sentence: str) -> None:
    """TERM would make this one end with 7: it must not get it. The process without a unit is ended all the same."""
    child = family.start("import signal, sys", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", SLEEP)
    alone = family.start(SLEEP)
    machine.put(child.pid, GROUP)
    machine.put(alone.pid, "/user.slice")
    machine.unit("vllm.service", behaviour, child.pid)
    made = plan(target(child.pid, unit="vllm.service"), alone.pid, units=[unit("vllm.service", cgroup=GROUP)])
    said = stop(made, env=machine.env, roots=machine.roots)
    assert said["units"] == [{"name": "vllm.service", "scope": "system", "stopped": False, "detail": sentence}]
    assert outcomes(said) == {child.pid: "left", alone.pid: "terminated"}
    assert detail(said, child.pid) == f"vllm.service: {sentence}"
    assert child.poll() is None


def test_one_that_hangs_is_given_up_after_the_deadline(machine: Machine, family: Family) -> None:
    child = family.start(SLEEP)
    machine.put(child.pid, GROUP)
    machine.unit("vllm.service", "hangs", child.pid)
    made = plan(target(child.pid, unit="vllm.service"), units=[unit("vllm.service", cgroup=GROUP)], deadline_s=0.2)
    said = stop(made, env=machine.env, roots=machine.roots)
    assert said["units"][0]["detail"] == "is-active: deactivating; stop: no answer within 4.2 s"
    assert outcomes(said) == {child.pid: "left"}
    assert 4.2 <= said["seconds"] < 7
    assert not is_alive(int((machine.stub / "hanging").read_text()))  # the client was ended with its children
    assert child.poll() is None


def test_interrupted_while_a_unit_stops(machine: Machine, family: Family) -> None:
    child, alone = family.start(SLEEP), family.start(SLEEP)
    machine.put(child.pid, GROUP)
    machine.put(alone.pid, "/")
    machine.unit("vllm.service", "hangs", child.pid)
    made = plan(target(child.pid, unit="vllm.service"), alone.pid, units=[unit("vllm.service", cgroup=GROUP)], deadline_s=60)
    at_work = begin(packed(json.dumps({"plan": made, "roots": machine.roots})), env=machine.env)
    assert until((machine.stub / "hanging").exists)
    began = time.monotonic()
    at_work.terminate()
    said = document(at_work)
    assert time.monotonic() - began < 2
    assert said["units"][0]["detail"] == "is-active: deactivating; stop: interrupted"
    assert outcomes(said) == {child.pid: "left", alone.pid: "survives"}
    assert detail(said, alone.pid) == "interrupted: nothing was sent"
    assert (child.poll(), alone.poll()) == (None, None)


def test_a_unit_that_restarts_its_process_is_not_stopped(machine: Machine, family: Family) -> None:
    """Its process has ended, but what came after it is not in the plan."""
    child = family.start(SLEEP)
    machine.put(child.pid, GROUP)
    machine.unit("vllm.service", "respawns", child.pid)
    made = plan(target(child.pid, unit="vllm.service"), units=[unit("vllm.service", cgroup=GROUP)])
    said = stop(made, env=machine.env, roots=machine.roots)
    assert said["units"] == [{"name": "vllm.service", "scope": "system", "stopped": False, "detail": "is-active: activating"}]
    assert outcomes(said) == {child.pid: "terminated"}
    assert until((machine.stub / "respawned").exists)
    assert is_alive(int((machine.stub / "respawned").read_text()))


def test_several_units_share_the_time(machine: Machine, family: Family) -> None:
    names = [f"vllm@{number}.service" for number in range(3)]
    children = {name: family.start(SLEEP) for name in names}
    for name, child in children.items():
        machine.put(child.pid, f"/system.slice/{name}")
        machine.unit(name, "hangs", child.pid)
    targets = [target(child.pid, unit=name) for name, child in children.items()]
    said = stop(plan(*targets, units=[unit(name) for name in names], deadline_s=0.0), env=machine.env, roots=machine.roots)
    assert set(outcomes(said).values()) == {"left"}
    assert said["seconds"] < 7  # 4 s each
    for name in names:
        assert any(call.endswith(f"-- {name}") for call in machine.calls)


# Units that are not touched


@pytest.mark.parametrize(
    "name", ["ssh.service", "nvidia-persistenced.service", "user@0.service", "session-3.scope", "slurmd.service", "gdm3.service"]
)
def test_a_unit_of_the_system_is_never_stopped(machine: Machine, family: Family, name: str) -> None:
    child = family.start(SLEEP)
    machine.put(child.pid, f"/system.slice/{name}")
    machine.unit(name, "stops", child.pid)
    said = stop(plan(target(child.pid, unit=name), units=[unit(name)]), env=machine.env, roots=machine.roots)
    assert said["units"][0] == {"name": name, "scope": "system", "stopped": False, "detail": "a unit of this kind is never stopped"}
    assert outcomes(said) == {child.pid: "protected"}
    assert machine.calls == []
    assert child.poll() is None


def test_which_names_serve_the_whole_machine() -> None:
    units = """ssh.service sshd.service sshd@4-10.0.0.1:22-10.0.0.2:5.service ssh.socket dbus.service dbus-broker.service
        systemd-logind.service systemd-udevd.service user@1000.service session-3.scope session-c1.scope init.scope
        cron.service crond.service slurmd.service
        docker.service containerd.service kubelet.service gdm.service gdm3.service lightdm.service sddm.service display-manager.service
        nvidia-persistenced.service nvidia-dcgm.service getty@tty1.service"""
    assert [name for name in units.split() if not never_stopped(name)] == []
    others = """vllm.service vllm@1.service sglang.service my-docker.service dockerized.service users.service jupyter.service
        draftproof-0123456789ab.scope"""
    assert [name for name in others.split() if never_stopped(name)] == []
    assert [never_stopped("nv-hostengine", uid) for uid in (0, 1000)] == [True, False]
    assert not never_stopped("python3", 0)


def test_a_unit_that_the_process_is_not_in_is_not_stopped(machine: Machine, family: Family) -> None:
    """Whatever the plan says. Also not the system's unit of the same name as a user's."""
    for number, group in enumerate(
        ("/system.slice/postgresql.service", "/user.slice/user-0.slice/user@0.service/app.slice/vllm.service", "/")
    ):
        child = family.start(SLEEP)
        machine.put(child.pid, group)
        machine.unit("vllm.service", "stops", child.pid)
        said = stop(plan(target(child.pid, unit="vllm.service"), units=[unit("vllm.service")]), env=machine.env, roots=machine.roots)
        assert outcomes(said) == {child.pid: "changed"}, number
        assert detail(said, child.pid) == "it is no longer in vllm.service"
        assert not said["units"][0]["stopped"]
        assert child.poll() is None
    assert machine.calls == []


def test_a_unit_whose_planned_processes_are_gone_is_not_stopped(machine: Machine, family: Family) -> None:
    """Somebody has started it anew since: that is not what was planned."""
    child = family.start(SLEEP)
    made = plan(target(child.pid, unit="vllm.service"), units=[unit("vllm.service"), unit("empty.service")])
    child.kill()
    child.wait()
    said = stop(made, env=machine.env, roots=machine.roots)
    assert outcomes(said) == {child.pid: "gone"}
    assert [one["detail"] for one in said["units"]] == ["none of the processes that the plan names in it is there any more"] * 2
    assert machine.calls == []


@needs_root
def test_the_unit_in_which_it_runs_itself_is_not_stopped(machine: Machine, family: Family) -> None:
    """Real control groups: another process and `stop.py` share a unit."""
    root = Path("/sys/fs/cgroup/unified") if Path("/sys/fs/cgroup/unified").is_dir() else Path("/sys/fs/cgroup")
    group = root / f"draftproof-test-{os.getpid()}.service"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"No control group can be made: {error}.")
    child = family.start(SLEEP)
    try:
        (group / "cgroup.procs").write_text(str(child.pid))
        machine.unit(group.name, "stops", child.pid)
        made = plan(target(child.pid, unit=group.name), units=[unit(group.name)])
        inside = ["sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "sh"]
        said = stop(made, before=inside, env=machine.env)
        assert said["units"][0]["detail"] == "this runs inside it"
        assert outcomes(said) == {child.pid: "protected"}
        assert machine.calls == []
        assert outcomes(stop(made, env=machine.env)) == {child.pid: "terminated"}
        assert len(machine.calls) == 2
    finally:
        family.end()
        assert until(lambda: (group / "cgroup.procs").read_text() == "")
        group.rmdir()


# Other managers and users


def test_a_unit_of_the_user(machine: Machine, family: Family) -> None:
    group = f"/user.slice/user-{os.getuid()}.slice/user@{os.getuid()}.service/app.slice/vllm.service"
    child = machine.put(family.start(SLEEP).pid, group)
    machine.unit("vllm.service", "stops", child)
    said = stop(plan(target(child, unit="vllm.service"), units=[unit("vllm.service", "user", group)]), env=machine.env, roots=machine.roots)
    assert outcomes(said) == {child: "terminated"}
    assert machine.calls[0] == "systemctl --user stop --no-ask-password --job-mode=replace -- vllm.service"


@needs_root
def test_units_of_one_name_of_two_users(machine: Machine, family: Family) -> None:
    """root stops the one of `nobody` through that user's manager; its own stays, as the plan has no process in it alive."""
    groups = {uid: f"/user.slice/user-{uid}.slice/user@{uid}.service/app.slice/vllm.service" for uid in (0, NOBODY)}
    of_root, of_nobody = family.start(SLEEP), family.start(SLEEP, user=NOBODY)
    machine.put(of_root.pid, groups[0])
    machine.put(of_nobody.pid, groups[NOBODY])
    machine.unit("vllm.service", "stops", of_nobody.pid)
    targets = [target(of_root.pid, unit="vllm.service", cgroup=groups[0], uid=1)]
    targets.append(target(of_nobody.pid, unit="vllm.service", cgroup=groups[NOBODY]))
    made = plan(*targets, units=[unit("vllm.service", "user", group) for group in groups.values()], any_user=True)
    said = stop(made, env=machine.env, roots=machine.roots)
    assert outcomes(said) == {of_root.pid: "changed", of_nobody.pid: "terminated"}
    assert [one["stopped"] for one in said["units"]] == [False, True]
    assert machine.calls == [
        "systemctl --user --machine=nobody@.host stop --no-ask-password --job-mode=replace -- vllm.service",
        "systemctl --user --machine=nobody@.host is-active -- vllm.service",
    ]
    assert of_root.poll() is None


@needs_root
def test_a_unit_of_a_user_without_a_name_is_not_taken_for_ours(machine: Machine, family: Family) -> None:
    uid = 54321
    group = f"/user.slice/user-{uid}.slice/user@{uid}.service/app.slice/vllm.service"
    child = family.start(SLEEP, user=uid)
    machine.put(child.pid, group)
    machine.unit("vllm.service", "stops", child.pid)
    made = plan(target(child.pid, unit="vllm.service", user="54321"), units=[unit("vllm.service", "user", group)], any_user=True)
    said = stop(made, env=machine.env, roots=machine.roots)
    assert said["units"][0]["detail"] == "uid 54321 has no name, so its manager cannot be asked"
    assert outcomes(said) == {child.pid: "left"}
    assert machine.calls == []


@needs_root
def test_another_users_process_may_end_with_its_unit_but_is_not_signalled(machine: Machine, family: Family) -> None:
    """Whether the unit may be stopped is for systemd to say; what it leaves belongs to somebody else still."""
    survivor = family.start(SLEEP, user=NOBODY)
    machine.put(survivor.pid, GROUP)
    machine.unit("vllm.service", "forgets", survivor.pid)
    said = stop(plan(target(survivor.pid, unit="vllm.service"), units=[unit("vllm.service")]), env=machine.env, roots=machine.roots)
    assert said["units"][0]["stopped"]
    assert outcomes(said) == {survivor.pid: "forbidden"}
    assert survivor.poll() is None


@pytest.mark.parametrize("tool", ["docker", "podman"])
@pytest.mark.parametrize("behaviour", ["stops", "vanishes"])
def test_a_container(machine: Machine, family: Family, tool: str, behaviour: str) -> None:
    child = machine.put(family.start(SLEEP).pid, f"/system.slice/{tool}-{CONTAINER}.scope")
    machine.unit(CONTAINER[:12], behaviour, child, state="true")
    made = plan(target(child, unit=CONTAINER[:12]), units=[unit(CONTAINER[:12], tool)], deadline_s=7.5)
    said = stop(made, env=machine.env, roots=machine.roots)
    assert machine.calls == [f"{tool} stop --time 7 {CONTAINER[:12]}", f"{tool} inspect --format {{{{.State.Running}}}} {CONTAINER[:12]}"]
    assert (said["units"][0]["name"], said["units"][0]["scope"], said["units"][0]["stopped"]) == (CONTAINER[:12], tool, True)
    assert outcomes(said) == {child: "terminated"}


def test_a_container_that_stays(machine: Machine, family: Family) -> None:
    child = machine.put(family.start(SLEEP).pid, f"/docker/{CONTAINER}")
    machine.unit(CONTAINER[:12], "refused", child, state="true")
    said = stop(plan(target(child, unit=CONTAINER[:12]), units=[unit(CONTAINER[:12], "docker")]), env=machine.env, roots=machine.roots)
    assert said["units"][0]["detail"] == ("running: true; stop: permission denied while trying to connect to the Docker daemon socket")
    assert outcomes(said) == {child: "left"}
    assert is_alive(child)


def test_without_the_manager_nothing_of_its_unit_is_touched(machine: Machine, family: Family, tmp_path: Path) -> None:
    child = machine.put(family.start(SLEEP).pid, GROUP)
    made = plan(target(child, unit="vllm.service"), units=[unit("vllm.service")])
    with STOP.open("rb") as script:
        at_work = subprocess.Popen(
            [PYTHON, "-I", "-", packed(json.dumps({"plan": made, "roots": machine.roots}))],
            stdin=script,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": str(tmp_path)},
        )
    said = document(at_work)
    assert said["units"][0]["detail"].startswith("is-active: systemctl: No such file or directory")
    assert outcomes(said) == {child: "left"}
    assert is_alive(child)
