"""Scenes of held GPUs: real processes over the fake NVML, with who must be named as what, who must end, and what must be said.

    for build in SCENARIOS:
        row = play(build, by_draftproof, folder)        # reclaiming.py: how it is played and judged

GPUs 0 to 7 are the ones that somebody wants back. In every scene stands the same crowd (see `Host`), which must survive.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

from draftproof.machine.records import EngineRecord
from fake_gpus import ended, wait_for
from reclaiming import NOBODY, TOOLS, WANTED, AsScript, Build, Host, Row, Scene, Tool, over_ssh, play, title, wanted

MODEL = 71_604
"""MiB of one of eight workers of a large model."""
CONTAINER = "0123456789ab" * 5 + "cdef"


def live_holder(host: Host) -> Scene:
    pid = host.holder([0], MODEL, name="VLLM::Worker_TP0")
    return Scene({pid: "live"}, {pid})


def name_without_a_hint(host: Host) -> Scene:
    """Nothing in it says Python or vLLM."""
    pid = host.holder([2], 40_000, name="ray::Worker")
    return Scene({pid: "live"}, {pid})


def holder_ignores_term(host: Host) -> Scene:
    pid = host.holder([0], MODEL, ignore_term=True)
    return Scene({pid: "live"}, {pid})


def stopped_holder(host: Host) -> Scene:
    """By Ctrl-Z: it acts on TERM only once it goes on."""
    pid = host.holder([0], MODEL)
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: " T " in Path(f"/proc/{pid}/stat").read_text())
    return Scene({pid: "live"}, {pid})


def parent_with_a_forked_child(host: Host) -> Scene:
    """As a data loader's: the child has the device open and no memory of its own."""
    parent, child = host.forked([1], 2_566, killed=False)
    return Scene({parent: "live"}, {parent, child})


def parent_killed_forked_child_lives(host: Host) -> Scene:
    """NVML goes on listing the dead one."""
    _, child = host.forked([1], 2_566)
    return Scene({child: "forked"}, {child})


def forked_child_in_a_session_of_its_own(host: Host) -> Scene:
    """Nothing but its open device files tells whose child it was. Two monitors have some open, too: one of no known name, and
    one that profiles and has even those of a program with memory."""
    host.gpus.exporter(WANTED, name="gpu-watch")
    host.gpus.holder(WANTED, None, name="nv-hostengine")
    _, child = host.forked([1], 2_566, own_session=True)
    return Scene({child: "forked"}, {child})


# Servers


def worker_of_a_killed_front_end(host: Host) -> Scene:
    """Forked twice, so that init is its parent; it is still in the session of the dead one."""
    _, worker = host.orphan([0], MODEL, name="VLLM::Worker_TP0")
    return Scene({worker: "live"}, {worker})


def worker_in_a_session_of_its_own(host: Host) -> Scene:
    """Nothing leads from it to its server any more, and the server's port is free."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    _, worker = host.orphan([0], MODEL, name="VLLM::Worker_TP0", port=port, own_session=True)
    socket.create_server(("127.0.0.1", port)).close()
    return Scene({worker: "live"}, {worker})


def engine_over_eight_gpus(host: Host) -> Scene:
    """What holds memory ends; its parents hold none, and being a parent is no reason."""
    _, _, *workers = host.engine(WANTED, MODEL)
    return Scene(dict.fromkeys(workers, "live"), workers)


def engine_by_its_session(host: Host) -> Scene:
    """The same, and whoever asks wants the whole of it gone."""
    front_end, core, *workers = host.engine(WANTED, MODEL)
    return Scene(dict.fromkeys(workers, "live"), {front_end, core, *workers}, selection=wanted(sessions=(front_end,)))


def our_own_engine(host: Host) -> Scene:
    """By the record of a run that was killed. All that carry its token go, also from other sessions and without a GPU."""
    run = subprocess.Popen([sys.executable, "-c", _RUN], stdout=subprocess.PIPE, text=True)
    host.stack.callback(run.wait)
    host.stack.callback(run.kill)
    assert run.stdout is not None
    environment = EngineRecord(json.loads(run.stdout.readline()), "vLLM", "").environment
    worker = host.holder([0], MODEL, name="VLLM::Worker_TP0", env=environment)
    core = host.gpus.bystander("VLLM::EngineCore", env=environment)
    run.kill()
    run.wait()
    return Scene({worker: "ours"}, {worker, core})


_RUN = """
import json, time
from draftproof.machine.records import recorded
with recorded("vLLM", run="runs/one") as engine:
    print(json.dumps(engine.token), flush=True)
    time.sleep(600)
"""


# Whoever starts it again


def supervisor_bears_it_again(host: Host) -> Scene:
    supervisor, first = host.respawner([0], MODEL)
    return Scene({first: "live"}, {first}, blocker=rf"its parent is pid {supervisor} `[^`]+`: plan again with --tree {supervisor}$")


def supervisor_and_all_below_it(host: Host) -> Scene:
    supervisor, first = host.respawner([0], MODEL)
    return Scene({first: "live"}, {supervisor, first}, selection=wanted(trees=(supervisor,)))


def service_that_restarts(host: Host) -> Scene:
    """Whoever ends its process alone gets the next one: here a supervisor outside stands for systemd's `Restart=`."""
    group = host.group(f"vllm-{host.gpus.token}.service")
    systemd, worker = host.respawner([0], MODEL, name="VLLM::Worker_TP0", cgroup=group)
    host.unit(group.name, "stops", systemd, worker)
    return Scene({worker: "live"}, {worker}, may_end={systemd})


def worker_left_by_a_stopped_service(host: Host) -> Scene:
    """With KillMode=process: the unit is inactive, its control group is not empty."""
    group = host.group(f"vllm-{host.gpus.token}.service")
    worker = host.holder([0], MODEL, name="VLLM::Worker_TP0", cgroup=group)
    host.unit(group.name, "forgets", state="inactive")
    return Scene({worker: "live"}, {worker})


def job_by_its_control_group(host: Host) -> Scene:
    """With a helper that holds nothing, and without another user's. A holder outside was not selected, and it is said so."""
    group = host.group(f"job-{host.gpus.token}.scope")
    worker, helper = host.holder([0], MODEL, cgroup=group), host.gpus.bystander("helper", cgroup=group)
    host.gpus.bystander("helper", cgroup=group, uid=NOBODY)
    other = host.holder([1], 900)
    path = f"/system.slice/{group.name}"
    blocker = rf"^pid {other} .*Name its"
    return Scene({worker: "live", other: "live"}, {worker, helper}, blocker=blocker, selection=wanted(cgroups=(path,)))


# What is not ours to stop


def another_users_holder(host: Host) -> Scene:
    pid = host.holder([0], MODEL, uid=NOBODY)
    return Scene({pid: "other_user"}, blocker=rf"^pid {pid} .* of nobody.*Ask its owner")


def another_users_holder_and_root_says_so(host: Host) -> Scene:
    pid = host.holder([0], MODEL, uid=NOBODY)
    return Scene({pid: "other_user"}, {pid}, selection=wanted(any_user=True))


def holder_in_a_container(host: Host) -> Scene:
    pid = host.holder([0], MODEL, cgroup=host.group(f"docker-{CONTAINER}.scope"))
    return Scene({pid: "container"}, blocker=rf"^pid {pid} .*in container docker:{CONTAINER[:12]}.*`docker stop`")


def container_by_its_name(host: Host) -> Scene:
    pid = host.holder([0], MODEL, cgroup=host.group(f"docker-{CONTAINER}.scope"))
    host.unit(CONTAINER[:12], "stops", pid, state="true")
    return Scene({pid: "container"}, {pid}, selection=wanted(units=(f"docker:{CONTAINER[:12]}",)))


def server_of_mps(host: Host) -> Scene:
    """Clients of others may stand behind it; it has a command of its own to end it."""
    pid = host.holder([0], 300, name="nvidia-cuda-mps-server")
    return Scene({pid: "mps"}, blocker=rf"^pid {pid} .*echo quit \| nvidia-cuda-mps-control")


def holder_above_the_one_who_asks(host: Host) -> Scene:
    """A notebook, say, that runs the command."""
    pid = host.holder([0], MODEL, name="jupyter-lab", runs=f"sh {AsScript.job_in(host.gpus.folder)}", env=os.environ)
    return Scene({pid: "self"}, blocker=rf"^pid {pid} .*the caller runs below it", asked=AsScript(host.gpus.folder, above=pid))


# Memory without a process


def memory_without_an_owner(host: Host) -> Scene:
    host.unowned(1, 700)
    return Scene({None: "driver"}, blocker="^700 MiB are in use that no process owns: the driver holds them.*reset")


def memory_without_an_owner_beside_a_holder(host: Host) -> Scene:
    """What can be had back comes back. (The rest is waited for, less long than usual here.)"""
    host.stack.enter_context(patch("draftproof.machine.apply.VERIFY_S", 1.0))
    pid = host.holder([1], MODEL)
    host.unowned(1, 700)
    return Scene({pid: "live", None: "driver"}, {pid}, blocker="^700 MiB are in use that no process owns")


def dead_process_still_listed(host: Host) -> Scene:
    gone = subprocess.Popen(["true"])
    gone.wait()
    host.listed(1, gone.pid, 700)
    return Scene({gone.pid: "dead"}, blocker=rf"^pid {gone.pid} is gone, and NVML still lists it with 700 MiB")


# What changes between the plan and its being carried out


def holder_ended_after_the_plan(host: Host) -> Scene:
    pid = host.holder([0], MODEL)
    return Scene({pid: "live"}, {pid}, meanwhile=lambda: _kill(pid))


def holder_let_go_after_the_plan(host: Host) -> Scene:
    """It lives on and holds nothing any more: there is no reason left to stop it."""
    pid = host.holder([0], MODEL)
    return Scene({pid: "live"}, meanwhile=lambda: host.gpus.unsay("hold 0"))


def holder_replaced_after_the_plan(host: Host) -> Scene:
    """By another with the same command. It was not planned; and its parent is init, whose tree is no good advice."""
    pid = host.holder([0], MODEL)

    def meanwhile() -> None:
        _kill(pid)
        host.holder([0], MODEL)

    return Scene({pid: "live"}, {pid}, blocker="^pid .* holds 71,604 MiB.*after the plan", never_said=r"--tree 1\b", meanwhile=meanwhile)


def number_given_to_a_bystander(host: Host) -> Scene:
    """Between the plan and its being carried out."""
    pid = host.holder([0], MODEL, name="python3")

    def meanwhile() -> None:
        _kill(pid)
        wait_for(lambda: not Path(f"/proc/{pid}").exists())  # a zombie keeps its number
        assert host.gpus.bystander("python3", number=pid) == pid

    return Scene({pid: "live"}, meanwhile=meanwhile)


def number_given_to_a_holder_of_the_same_command(host: Host) -> Scene:
    """Between the plan and its being carried out: by number, name, command and memory it is the one of the plan."""
    pid = host.holder([0], MODEL, name="python3")

    def meanwhile() -> None:
        _kill(pid)
        wait_for(lambda: not Path(f"/proc/{pid}").exists())  # a zombie keeps its number
        assert host.holder([0], MODEL, name="python3", number=pid) == pid

    return Scene({pid: "live"}, blocker=rf"^pid {pid} .* holds 71,604 MiB", meanwhile=meanwhile)


# Other ways to ask


def asked_through_the_console_script(host: Host) -> Scene:
    _, child = host.forked([0, 1], MODEL)
    return Scene({child: "forked"}, {child}, asked=AsScript(host.gpus.folder))


def asked_over_ssh(host: Host) -> Scene:
    _, worker = host.orphan([0], MODEL, name="VLLM::Worker_TP0")
    stubborn = host.holder([1], MODEL, ignore_term=True)
    return Scene({worker: "live", stubborn: "live"}, {worker, stubborn}, asked=over_ssh(host))


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: ended(pid))


SCENARIOS: tuple[Build, ...] = (
    live_holder,
    name_without_a_hint,
    holder_ignores_term,
    stopped_holder,
    parent_with_a_forked_child,
    parent_killed_forked_child_lives,
    forked_child_in_a_session_of_its_own,
    worker_of_a_killed_front_end,
    worker_in_a_session_of_its_own,
    engine_over_eight_gpus,
    engine_by_its_session,
    our_own_engine,
    supervisor_bears_it_again,
    supervisor_and_all_below_it,
    service_that_restarts,
    worker_left_by_a_stopped_service,
    job_by_its_control_group,
    another_users_holder,
    another_users_holder_and_root_says_so,
    holder_in_a_container,
    container_by_its_name,
    server_of_mps,
    holder_above_the_one_who_asks,
    memory_without_an_owner,
    memory_without_an_owner_beside_a_holder,
    dead_process_still_listed,
    holder_ended_after_the_plan,
    holder_let_go_after_the_plan,
    holder_replaced_after_the_plan,
    number_given_to_a_bystander,
    number_given_to_a_holder_of_the_same_command,
    asked_through_the_console_script,
    asked_over_ssh,
)

RENUMBERED = (number_given_to_a_bystander, number_given_to_a_holder_of_the_same_command)
"""Numbers can only be given again in a pid namespace of one's own."""


def play_anywhere(build: Build, tool: Tool, folder: Path) -> Row:
    """`play`, in a pid namespace of its own where a scene needs one."""
    if build not in RENUMBERED:
        return play(build, tool, folder)
    names = {function: name for name, function in TOOLS.items()}
    # A shell as the first process takes note of the ends of orphans; without that no number is free again.
    first = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", '"$@" & wait $!', "sh"]
    words = [sys.executable, __file__, title(build), names[tool], str(folder)]
    ran = subprocess.run([*first, *words], stdout=subprocess.PIPE, check=True, timeout=60)
    row = json.loads(ran.stdout)
    return Row(**{**row, "wrong": tuple(row["wrong"]), "faults": tuple(row["faults"])})


if __name__ == "__main__":
    _, scene_name, tool_name, place = sys.argv
    builds = {title(build): build for build in RENUMBERED}
    print(json.dumps(asdict(play(builds[scene_name], TOOLS[tool_name], Path(place)))))
