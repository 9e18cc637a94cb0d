"""Who holds a GPU: each kind on a host written down by hand, what happens when a process fits several, and what must always hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from draftproof.machine.holders import Holder, find_holders, summary
from snapshots import BOB, CUDA, MIB, NOW, ROOT, documents, gpu, host, listed, memory_v1, process, seen, viewer

WATCHES = ("nvidia0", "nvidiactl")
"""What nvidia-smi and exporters have open."""


def holders(*, used: int, lists: list[dict[str, Any]], processes: list[dict[str, Any]], **changes: Any) -> list[Holder]:
    """Who holds GPU 0 of a host of one."""
    return find_holders(seen(host(gpus=[gpu(0, used, lists)], processes=processes, **changes)))


def only(found: list[Holder]) -> Holder:
    assert len(found) == 1, [one.why for one in found]
    return found[0]


def told(holder: Holder) -> tuple[int | None, str, int | None, bool]:
    """pid, kind, MiB, blocking."""
    return holder.pid, holder.kind, None if holder.bytes is None else holder.bytes // MIB, holder.blocking


# Each kind


def test_an_idle_gpu_has_no_holder() -> None:
    assert holders(used=0, lists=[], processes=[process(5), process(6, fds=("nvidiactl",))]) == []


def test_live() -> None:
    one = only(holders(used=71_610, lists=[listed(4121, 71_604)], processes=[process(4121, "VLLM::Worker_TP3", fds=CUDA)]))
    assert told(one) == (4121, "live", 71_604, True)
    assert one.why == "pid 4121 `VLLM::Worker_TP3` of alice, 2 h old, holds 71,604 MiB"
    assert one.process is not None
    assert one.process.comm == "VLLM::Worker_TP"
    assert one.listed == (4121,)
    assert summary([one]) == "GPU 0: pid 4121 VLLM::Worker_TP3 (alice, 2 h), 71,604 MiB, alive"


def test_forked_as_measured_on_an_h200() -> None:
    """The parent took 2,574 MiB and was killed; NVML lists it with 2,566 MiB as long as its child lives."""
    one = only(holders(used=2574, lists=[listed(4099, 2566)], processes=[process(4121, "VLLM::Worker_TP3", fds=CUDA)]))
    assert told(one) == (4121, "forked", 2566, True)
    assert one.why == "pid 4121 `VLLM::Worker_TP3` of alice, 2 h old, holds 2,566 MiB; it is a forked child of pid 4099, which is gone"
    assert one.listed == (4099,)
    assert summary([one]) == "GPU 0: pid 4121 VLLM::Worker_TP3 (alice, 2 h), 2,566 MiB, forked child of dead pid 4099"


def test_dead_when_only_programs_that_ask_have_the_gpu_open() -> None:
    """An exporter without nvidia-uvm cannot hold the dead one's memory."""
    found = holders(
        used=2574,
        lists=[listed(4099, 2566)],
        processes=[process(7, "my_monitor", fds=WATCHES), process(8, "uvm_alone", fds=("nvidia-uvm", "nvidia1", "nvidiactl"))],
    )
    assert [told(one) for one in found] == [(4099, "dead", 2566, True), (7, "fd_only", None, False)]
    assert found[0].why == "pid 4099 is gone, and NVML still lists it with 2,566 MiB; no process was found that holds them"
    assert found[0].process is None
    assert found[1].why == "pid 7 `my_monitor` of alice, 2 h old, has GPU 0 open, and NVML lists no memory of it"
    assert summary(found[:1]) == "GPU 0: pid 4099, 2,566 MiB, gone, nobody found who holds them"


def test_dead_says_what_could_not_be_looked_at() -> None:
    unseen = [{"what": "processes.device_fds", "why": "the open files of 12 processes may not be read as alice"}]
    one = only(holders(used=2574, lists=[listed(4099, 2566)], processes=[], unseen=unseen))
    assert one.why.endswith("that holds them (not all was seen: the open files of 12 processes may not be read as alice)")


def test_driver() -> None:
    one = only(holders(used=812, lists=[], processes=[process(7, "my_monitor", fds=("nvidiactl",))]))
    assert told(one) == (None, "driver", 812, True)
    assert one.why == "812 MiB are in use that no process owns: the driver holds them"
    assert summary([one]) == "GPU 0: 812 MiB that no process owns"


@pytest.mark.parametrize(("used", "expected"), [(2630, [2566]), (2631, [2566, 65])])
def test_the_rest_is_named_from_65_mib(used: int, expected: list[int]) -> None:
    found = holders(used=used, lists=[listed(4121, 2566)], processes=[process(4121, fds=CUDA)])
    assert [(one.bytes or 0) // MIB for one in found] == expected


@pytest.mark.parametrize(("used", "expected"), [(1024, []), (1025, ["driver"])])
def test_an_old_reading_counts_the_reserve_in(used: int, expected: list[str]) -> None:
    found = find_holders(seen(host(gpus=[gpu(0, memory=memory_v1(used))])))
    assert [one.kind for one in found] == expected
    assert all("counts its own reserve" in one.why for one in found)


def test_fd_only_with_cuda_on_a_free_gpu() -> None:
    one = only(holders(used=0, lists=[], processes=[process(4121, "train.py", fds=CUDA)]))
    assert told(one) == (4121, "fd_only", None, False)


def test_self() -> None:
    """The caller holds a CUDA context, and so do a child of it and the notebook above it."""
    found = holders(
        used=1500,
        lists=[listed(800, 500), listed(810, 400), listed(700, 600)],
        processes=[
            process(800, "draftproof", ppid=700, fds=CUDA),
            process(810, "python3", ppid=800, fds=CUDA),
            process(700, "ipykernel", ppid=600, fds=CUDA),
        ],
    )
    assert [told(one) for one in found] == [(700, "self", 600, True), (800, "self", 500, False), (810, "self", 400, False)]
    assert found[1].why == "pid 800 `draftproof` of alice, 2 h old, holds 500 MiB; it is the caller itself"
    assert found[2].why == "pid 810 `python3` of alice, 2 h old, holds 400 MiB; the caller started it"


def test_self_reaches_up_through_sudo_and_draftproofs_but_not_into_the_shell() -> None:
    """probe 900 <- sudo 850 <- draftproof 800 <- draftproof 790 <- bash 700: what the shell started is not the caller's."""
    found = holders(
        used=400,
        lists=[listed(791, 100), listed(801, 100), listed(701, 100), listed(4121, 100)],
        processes=[
            process(850, "sudo", ppid=800, uid=ROOT),
            process(800, "python3", ppid=790, command="/venv/bin/python3 -m draftproof check"),
            process(790, "draftproof", ppid=700, command="/venv/bin/python3 /venv/bin/draftproof run recipe.yaml"),
            process(700, "bash", ppid=600, command="bash -c draftproof run recipe.yaml"),
            process(791, "VLLM::Worker_TP0", ppid=790, fds=CUDA),
            process(801, "VLLM::Worker_TP1", ppid=800, fds=CUDA),
            process(701, "VLLM::Worker_TP2", ppid=700, fds=CUDA),
            process(4121, "VLLM::Worker_TP3", ppid=1, fds=CUDA),
        ],
        viewer=viewer(ancestors=[850, 800, 790, 700, 600, 1]),
    )
    assert {one.pid: one.kind for one in found} == {791: "self", 801: "self", 701: "live", 4121: "live"}


def test_self_reaches_through_sudo_to_a_notebook_but_not_to_the_notebooks_beside_it() -> None:
    """probe 900 <- sudo 850 <- kernel 800 <- jupyter-lab 790, which has another kernel, 795."""
    found = holders(
        used=300,
        lists=[listed(801, 100), listed(795, 100), listed(4121, 100)],
        processes=[
            process(850, "sudo", ppid=800, uid=ROOT),
            process(800, "python3", ppid=790, command="python3 -m ipykernel_launcher"),
            process(790, "jupyter-lab", ppid=700),
            process(801, "python3", ppid=800, fds=CUDA),
            process(795, "python3", ppid=790, fds=CUDA),
            process(4121, "python3", ppid=795, fds=CUDA),
        ],
        viewer=viewer(ancestors=[850, 800, 790, 700, 600, 1]),
    )
    assert {one.pid: one.kind for one in found} == {801: "self", 795: "live", 4121: "live"}


@pytest.mark.parametrize("parent", ["sshd", "sshd-session", "bash", "tmux: server", "systemd"])
def test_a_probe_run_by_a_shell_or_over_ssh_has_no_caller_there(parent: str) -> None:
    found = holders(
        used=100,
        lists=[listed(701, 100)],
        processes=[process(700, parent), process(701, "VLLM::Worker_TP2", ppid=700, fds=CUDA)],
        viewer=viewer(ancestors=[700, 1]),
    )
    assert told(only(found)) == (701, "live", 100, True)


def test_ours() -> None:
    engine = {"what": "vLLM", "run": "runs/one"}
    one = only(holders(used=900, lists=[listed(4121, 900)], processes=[process(4121, "VLLM::EngineCore", fds=CUDA, engine=engine)]))
    assert told(one) == (4121, "ours", 900, True)
    assert one.why == "pid 4121 `VLLM::EngineCore` of alice, 2 h old, holds 900 MiB; it belongs to our vLLM of runs/one"
    assert one.short == "pid 4121 VLLM::EngineCore (alice, 2 h), 900 MiB, our vLLM of runs/one"


def test_an_engine_of_ours_that_starts_blocks_before_it_holds_anything() -> None:
    engine = {"what": "vLLM", "run": "runs/one"}
    found = holders(
        used=0, lists=[], processes=[process(61, "vllm", fds=CUDA, engine=engine), process(62, "vllm", fds=WATCHES, engine=engine)]
    )
    assert [told(one) for one in found] == [(61, "ours", None, True), (62, "ours", None, False)]
    assert "it may still be starting" in found[0].why


def test_mps() -> None:
    found = holders(
        used=700,
        lists=[listed(300, 30), listed(4121, 600, "mps")],
        processes=[
            process(300, "nvidia-cuda-mps-server", fds=CUDA),
            process(299, "nvidia-cuda-mps-control", fds=("nvidiactl",)),
            process(4121, "train.py", fds=CUDA),
        ],
    )
    assert [told(one) for one in found] == [(4121, "mps", 600, True), (None, "driver", 70, True), (300, "mps", 30, True)]
    assert found[0].why == "pid 4121 `train.py` of alice, 2 h old, holds 600 MiB; it is a client of MPS"
    assert found[2].why.endswith("holds 30 MiB; it serves MPS, and may hold memory for its clients")


def test_a_dead_client_of_mps() -> None:
    one = only(holders(used=600, lists=[listed(4099, 600, "mps")], processes=[]))
    assert told(one) == (4099, "mps", 600, True)
    assert one.why.startswith("pid 4099 is gone, and NVML still lists it with 600 MiB; ")
    assert one.why.endswith("; it is listed as a client of MPS, whose server may hold them")


def test_a_server_of_mps_keeps_a_dead_clients_memory() -> None:
    found = holders(used=600, lists=[listed(4099, 600, "mps")], processes=[process(300, "nvidia-cuda-mps-server", fds=CUDA)])
    assert told(only(found)) == (300, "mps", 600, True)


def test_container() -> None:
    found = holders(
        used=300,
        lists=[listed(10, 100), listed(11, 120), listed(12, 80)],
        processes=[
            process(10, "python3", uid=ROOT, fds=CUDA, container="docker:0123456789ab"),
            process(11, "python3", fds=CUDA, pid_namespace=4026532999),
            process(12, "python3", fds=CUDA, pid_namespace=None),
        ],
    )
    assert [told(one) for one in found] == [(11, "container", 120, True), (10, "container", 100, True), (12, "live", 80, True)]
    assert found[0].why.endswith("holds 120 MiB; it runs in another pid namespace")
    assert found[1].why.endswith("holds 100 MiB; it runs in container docker:0123456789ab; it belongs to another user")


IN_CONTAINER = {"pid_namespace": 4026532999, "viewer": viewer(initial_namespace=False, container="docker:0123456789ab")}
HERE = {"pid_namespace": 4026532999, "container": "docker:0123456789ab"}


def test_looked_at_from_a_container_a_process_that_is_seen_to_have_the_gpu_is_the_one_listed() -> None:
    found = holders(used=500, lists=[listed(12, 500)], processes=[process(12, fds=CUDA, **HERE)], **IN_CONTAINER)
    assert told(only(found)) == (12, "live", 500, True)


def test_looked_at_from_a_container_a_foreign_number_is_not_taken_for_a_local_process() -> None:
    """The host's pid 12 is listed; the container's own pid 12 is an editor, and pid 30 has the GPU open."""
    found = holders(
        used=500,
        lists=[listed(12, 500)],
        processes=[process(12, "vim", **HERE), process(30, "python3", fds=CUDA, **HERE), process(31, "my_monitor", fds=WATCHES, **HERE)],
        **IN_CONTAINER,
    )
    assert [told(one) for one in found] == [(12, "container", 500, True), (30, "forked", None, True), (31, "fd_only", None, False)]
    assert found[0].process is None
    assert found[0].why == "pid 12 holds 500 MiB; it is in a pid namespace that cannot be seen from here"
    assert found[1].why == (
        "pid 30 `python3` of alice, 2 h old, has GPU 0 open; "
        "it may hold the 500 MiB that NVML lists under pid 12, not to be seen from this pid namespace"
    )


def test_looked_at_from_a_container_memory_without_a_pid_is_not_blamed_on_the_driver() -> None:
    """The open kernel modules list no process of another pid namespace."""
    found = holders(used=500, lists=[], processes=[process(800, "draftproof", fds=CUDA, **HERE)], **IN_CONTAINER)
    assert [told(one) for one in found] == [(None, "container", 500, True), (800, "self", None, False)]
    assert found[0].why == (
        "500 MiB are in use that no process to be seen from this pid namespace owns: "
        "a process of another pid namespace or the driver holds them, unless it is the caller itself, which has the GPU open"
    )


def test_looked_at_from_a_container_one_that_could_hold_such_memory_is_named_without_it() -> None:
    found = holders(used=500, lists=[], processes=[process(30, "python3", fds=CUDA, **HERE)], **IN_CONTAINER)
    assert [told(one) for one in found] == [(None, "container", 500, True), (30, "forked", None, True)]
    assert found[1].why.endswith("has GPU 0 open; it may hold the 500 MiB that nobody to be seen from here owns")


def test_looked_at_from_a_container_a_foreign_number_blocks_with_nothing_too() -> None:
    """It has a context, and may take memory at any time."""
    assert told(only(holders(used=0, lists=[listed(12, 0)], processes=[], **IN_CONTAINER))) == (12, "container", 0, True)


def test_other_user() -> None:
    """Root's open files may not be read by alice; that it is listed is enough."""
    one = only(holders(used=500, lists=[listed(12, 500)], processes=[process(12, "train.py", uid=BOB, fds=None)]))
    assert told(one) == (12, "other_user", 500, True)
    assert one.why == "pid 12 `train.py` of bob, 2 h old, holds 500 MiB; it belongs to another user"


def test_system() -> None:
    """Display servers may draw, monitors may hold a little; one that computes with more is in the way, whatever its name."""
    found = holders(
        used=1117,
        lists=[listed(20, 300, "graphics"), listed(21, 16), listed(22, 17), listed(23, 784)],
        processes=[
            process(20, "Xorg", uid=ROOT, fds=("nvidia0", "nvidiactl", "nvidia-modeset")),
            process(21, "nv-hostengine", uid=ROOT, fds=CUDA),
            process(22, "dcgm-exporter", uid=ROOT, fds=CUDA),
            process(23, "nvidia-smi", uid=ROOT, fds=CUDA),
            process(24, "nvidia-persistenced", uid=ROOT, fds=WATCHES),
        ],
        viewer=viewer(uid=ROOT, user="root"),
    )
    assert [told(one) for one in found] == [
        (23, "system", 784, True),
        (22, "system", 17, True),
        (20, "system", 300, False),
        (21, "system", 16, False),
        (24, "system", None, False),
    ]
    assert found[4].why == (
        "pid 24 `nvidia-persistenced` of root, 2 h old, has GPU 0 open, and NVML lists no memory of it; "
        "by its name it is a service, a monitor or a display server"
    )


def test_a_monitor_of_unknown_size_is_in_the_way() -> None:
    one = only(holders(used=50, lists=[listed(21, None)], processes=[process(21, "nvtop", fds=WATCHES)]))
    assert told(one) == (21, "system", None, True)
    assert "holds memory of unknown size" in one.why


# Who has what from the dead


def test_several_children_share_and_the_bytes_are_said_once() -> None:
    found = holders(
        used=71_610,
        lists=[listed(4099, 71_604)],
        processes=[
            process(31, fds=CUDA, start_ticks=3),
            process(33, fds=CUDA, start_ticks=1),
            process(32, fds=CUDA, start_ticks=2),
        ],
    )
    assert [told(one) for one in found] == [(33, "forked", 71_604, True), (31, "forked", None, True), (32, "forked", None, True)]
    assert found[0].why == "pid 33 `python3` of alice, 2 h old, has GPU 0 open; 3 processes share 71,604 MiB of pid 4099, which is gone"
    assert found[2].why == "pid 32 `python3` of alice, 2 h old, has GPU 0 open; 3 processes share 71,604 MiB of pid 4099, which is gone"
    assert [one.listed for one in found] == [(4099,), (), ()]
    assert found[1].short == "pid 31 python3 (alice, 2 h), one of 3 that share 71,604 MiB of dead pid 4099"


def test_one_child_of_several_dead() -> None:
    one = only(holders(used=300, lists=[listed(41, 100), listed(42, 200)], processes=[process(50, fds=CUDA)]))
    assert told(one) == (50, "forked", 300, True)
    assert one.why == "pid 50 `python3` of alice, 2 h old, holds 300 MiB; it is a forked child of pids 41 and 42, which are gone"
    assert one.listed == (41, 42)


def test_a_session_or_process_group_tells_whose_child_it_is() -> None:
    """51 was forked in the session of 41, 52 in the process group of 42; 53 might be anybody's, but nothing is left for it."""
    found = holders(
        used=300,
        lists=[listed(41, 100), listed(42, 200)],
        processes=[process(51, fds=CUDA, session=41), process(52, fds=CUDA, pgrp=42), process(53, fds=CUDA)],
    )
    assert [told(one) for one in found] == [(52, "forked", 200, True), (51, "forked", 100, True), (53, "fd_only", None, False)]


def test_a_healthy_worker_of_another_gpu_is_not_blamed() -> None:
    """CUDA opens every GPU. The worker of GPU 1 has a context of its own and cannot be the dead one's child."""
    document = host(
        gpus=[gpu(0, 600, [listed(4099, 600)]), gpu(1, 800, [listed(61, 800)])],
        processes=[process(61, "VLLM::Worker_TP1", fds=("nvidia-uvm", "nvidia0", "nvidia1", "nvidiactl"))],
    )
    found = find_holders(seen(document))
    assert [(one.gpu, *told(one)) for one in found] == [
        (0, 4099, "dead", 600, True),
        (0, 61, "fd_only", None, False),
        (1, 61, "live", 800, True),
    ]


def test_the_caller_is_not_blamed_for_the_dead() -> None:
    """It opened the GPU a moment ago. If it were taken for the holder, 600 MiB would pass as its own."""
    found = holders(used=600, lists=[listed(4099, 600)], processes=[process(800, "draftproof", fds=CUDA)])
    assert [told(one) for one in found] == [(4099, "dead", 600, True), (800, "self", None, False)]
    assert found[0].why.endswith("no process was found that holds them, unless it is the caller itself, which has the GPU open")


def test_a_service_is_not_blamed_for_the_dead() -> None:
    found = holders(used=600, lists=[listed(4099, 600)], processes=[process(21, "nv-hostengine", fds=CUDA)])
    assert [told(one) for one in found] == [(4099, "dead", 600, True), (21, "system", None, False)]


def test_a_number_that_another_process_has_now_does_not_make_it_the_holder() -> None:
    """pid 4099 is an editor today; the child of the former 4099 holds the memory."""
    found = holders(used=600, lists=[listed(4099, 600)], processes=[process(4099, "vim"), process(4121, fds=CUDA)])
    one = only(found)
    assert told(one) == (4121, "forked", 600, True)
    assert one.why.endswith("it is a forked child of pid 4099, which is gone (the number is another process's now)")
    alone = only(holders(used=600, lists=[listed(4099, 600)], processes=[process(4099, "vim", fds=("nvidiactl",))]))
    assert told(alone) == (4099, "dead", 600, True)
    assert alone.process is None


def test_memory_beyond_the_list_belongs_to_who_can_hold_it() -> None:
    one = only(holders(used=600, lists=[], processes=[process(4121, fds=CUDA)]))
    assert told(one) == (4121, "forked", 600, True)
    assert one.why == (
        "pid 4121 `python3` of alice, 2 h old, holds 600 MiB; no other process was found that can hold 600 MiB that NVML lists nobody with"
    )
    two = holders(used=600, lists=[], processes=[process(4121, fds=CUDA), process(4122, fds=CUDA)])
    assert [told(one) for one in two] == [(4121, "forked", 600, True), (4122, "forked", None, True)]
    assert two[1].why.endswith("has GPU 0 open; 2 processes can hold 600 MiB that NVML lists nobody with")


def test_a_child_has_what_the_dead_left_and_what_is_not_listed() -> None:
    one = only(holders(used=700, lists=[listed(4099, 600)], processes=[process(4121, fds=CUDA)]))
    assert told(one) == (4121, "forked", 700, True)
    assert one.why == (
        "pid 4121 `python3` of alice, 2 h old, holds 700 MiB; it is a forked child of pid 4099, which is gone; "
        "no other process was found that can hold 100 MiB that NVML lists nobody with"
    )


def test_one_that_ended_while_it_was_looked_at_is_in_nobodys_way() -> None:
    """The list still has it, the memory is back: its bytes are cut to what is in use, and no bystander is blamed."""
    found = find_holders(seen(host(gpus=[gpu(0, [500, 200, 0], [listed(4099, 500)])], processes=[process(4121, fds=CUDA)])))
    assert [told(one) for one in found] == [(4099, "dead", 0, False), (4121, "fd_only", None, False)]
    assert found[0].why.endswith("NVML lists it with 500 MiB, more than GPU 0 has in use beside the others")


def test_those_who_live_come_first_when_the_list_adds_up_to_too_much() -> None:
    found = holders(used=250, lists=[listed(4099, 500), listed(12, 200)], processes=[process(12, fds=CUDA)])
    assert [told(one) for one in found] == [(12, "live", 200, True), (4099, "dead", 50, True)]


# States


def test_a_zombie_holds_nothing_itself() -> None:
    """Its child does: of the same user, and younger. Bob's process and the older one are not its children."""
    zombie = process(4099, fds=(), state="Z", command="", comm="VLLM::EngineCor", start_ticks=100, ppid=77)
    found = holders(
        used=600,
        lists=[listed(4099, 600)],
        processes=[
            zombie,
            process(4121, fds=CUDA, start_ticks=200),
            process(4122, fds=CUDA, start_ticks=50),
            process(4123, uid=BOB, fds=CUDA, start_ticks=300),
        ],
    )
    assert [told(one) for one in found] == [
        (4121, "forked", 600, True),
        (4122, "fd_only", None, False),
        (4123, "other_user", None, False),
    ]
    assert found[0].why.endswith("holds 600 MiB; it is a forked child of pid 4099, which has ended")
    assert told(only(holders(used=0, lists=[listed(4099, 600)], processes=[zombie]))) == (4099, "dead", 0, False)
    one = only(holders(used=600, lists=[listed(4099, 600)], processes=[zombie, process(60, state="Z", fds=CUDA)])[:1])
    assert told(one) == (4099, "dead", 600, True)
    assert one.why == (
        "pid 4099 `VLLM::EngineCor` of alice, 2 h old, has ended, and NVML still lists it with 600 MiB; "
        "no other process was found that holds them; it is a zombie (state Z) until its parent, pid 77, collects it"
    )


def test_stuck_processes_are_named_so() -> None:
    found = holders(
        used=300,
        lists=[listed(10, 200), listed(11, 100)],
        processes=[process(10, fds=CUDA, state="D"), process(11, fds=CUDA, state="T", unit="train.service", unit_scope="user")],
    )
    assert found[0].why == "pid 10 `python3` of alice, 2 h old, holds 200 MiB; it is in uninterruptible sleep (state D)"
    assert found[0].short == "pid 10 python3 (alice, 2 h), 200 MiB, alive, uninterruptible"
    assert found[1].why.endswith("holds 100 MiB; it is stopped (state T); it runs in user unit train.service")


# What was not seen


def test_without_the_list_who_can_hold_the_memory_is_named() -> None:
    unseen = [{"what": "gpu.0.processes", "why": "it did not answer within 1.0 s"}]
    document = host(gpus=[{**gpu(0, 600), "processes": None}], processes=[process(4121, fds=CUDA)], unseen=unseen)
    one = only(find_holders(seen(document)))
    assert told(one) == (4121, "forked", 600, True)
    assert one.why.endswith(
        "no other process was found that can hold the 600 MiB in use, and NVML's list was not seen: it did not answer within 1.0 s"
    )
    nobody = only(find_holders(seen({**document, "processes": []})))
    assert told(nobody) == (None, "driver", 600, True)
    assert nobody.why == "600 MiB are in use, and who holds them was not seen: it did not answer within 1.0 s"


def test_a_listed_process_that_was_not_looked_at_is_not_called_dead() -> None:
    unseen = [{"what": "processes", "why": "/proc did not answer"}]
    one = only(find_holders(seen(host(gpus=[gpu(0, 600, [listed(12, 600)])], processes=None, unseen=unseen))))
    assert told(one) == (12, "live", 600, True)
    assert one.why == "pid 12 holds 600 MiB; what process it is was not seen: /proc did not answer"
    cut_short = holders(used=600, lists=[listed(12, 600)], processes=[process(4121, fds=CUDA)], unseen=unseen)
    assert [told(each) for each in cut_short] == [(12, "live", 600, True), (4121, "fd_only", None, False)]
    unseen = [{"what": "process.12", "why": "it is hidden from alice"}]
    one = only(holders(used=600, lists=[listed(12, 600)], processes=[process(4121, fds=CUDA)], unseen=unseen)[:1])
    assert told(one) == (12, "other_user", 600, True)
    assert one.why == "pid 12 holds 600 MiB; what process it is was not seen: it is hidden from alice"


def test_bytes_that_nvml_does_not_say_leave_the_rest_open() -> None:
    found = holders(used=600, lists=[listed(12, None), listed(4099, None)], processes=[process(12, fds=CUDA)])
    assert [told(one) for one in found] == [(12, "live", None, True), (4099, "dead", None, True)]


def test_without_the_memory_the_list_is_taken_as_it_is() -> None:
    document = host(gpus=[gpu(0, 0, [listed(12, 600)], memory=None)], processes=[process(12, fds=CUDA)])
    assert told(only(find_holders(seen(document)))) == (12, "live", 600, True)


def test_the_device_file_goes_by_the_minor_number() -> None:
    """GPU 0 is /dev/nvidia5. What has nvidia0 open has another GPU open."""
    document = host(
        gpus=[gpu(0, 600, [listed(4099, 600)], minor=5)],
        processes=[process(50, fds=("nvidia-uvm", "nvidia5")), process(51, fds=("nvidia-uvm", "nvidia0"))],
    )
    assert told(only(find_holders(seen(document)))) == (50, "forked", 600, True)
    document["gpus"][0]["minor"] = None
    assert told(only(find_holders(seen(document)))) == (4099, "dead", 600, True)


# Several things at once


FITS = {
    "self": {"ppid": 800},
    "ours": {"engine": {"what": "vLLM", "run": "runs/one"}},
    "container": {"container": "podman:ba9876543210"},
    "other_user": {"uid": BOB, "user": "bob"},
    "system": {"comm": "nvtop"},
}
ORDER = ["self", "ours", "mps", "container", "other_user", "system", "live"]


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_the_first_kind_in_the_order_wins_and_all_are_named(first: int) -> None:
    """A listed process that fits every kind from `first` on."""
    fits = ORDER[first:]
    changes: dict[str, Any] = {}
    for kind in fits:
        changes |= FITS.get(kind, {})
    lines = [listed(12, 600, "mps" if "mps" in fits else "compute")]
    one = only(holders(used=600, lists=lines, processes=[process(12, fds=CUDA) | changes]))
    assert told(one) == (12, fits[0], 600, fits[0] != "self")
    named = {
        "self": "the caller started it",
        "ours": "our vLLM of runs/one",
        "mps": "a client of MPS",
        "container": "in container podman:ba9876543210",
        "other_user": "another user",
        "system": "by its name it is a service",
    }
    assert [kind for kind, words in named.items() if words in one.why] == [kind for kind in fits if kind in named]


def test_another_users_child_of_the_dead_is_another_users_and_says_so() -> None:
    one = only(holders(used=600, lists=[listed(4099, 600)], processes=[process(12, uid=BOB, fds=CUDA)]))
    assert told(one) == (12, "other_user", 600, True)
    assert one.why == (
        "pid 12 `python3` of bob, 2 h old, holds 600 MiB; it is a forked child of pid 4099, which is gone; it belongs to another user"
    )
    assert one.short == "pid 12 python3 (bob, 2 h), 600 MiB, forked child of dead pid 4099, another user's"


def test_another_users_service_is_another_users_and_not_in_the_way() -> None:
    one = only(holders(used=0, lists=[], processes=[process(24, "nvidia-persistenced", uid=ROOT, fds=WATCHES)]))
    assert told(one) == (24, "other_user", None, False)
    assert "service" in one.why


# Several GPUs, MIG


def test_only_the_gpus_that_were_asked_for_in_their_order() -> None:
    document = host(
        gpus=[gpu(index, 10 * index, [listed(100 + index, 10 * index)]) for index in (2, 1, 3)],
        processes=[process(100 + index, fds=("nvidia-uvm", f"nvidia{index}")) for index in (1, 2, 3)],
    )
    assert [(one.gpu, one.pid) for one in find_holders(seen(document), [3, 2, 9])] == [(2, 102), (3, 103)]
    assert find_holders(seen(document), []) == []


def test_mig() -> None:
    """One process in two instances holds the sum; what is left is named with the number of instances."""
    split = {"enabled": True, "instances": 3}
    document = host(gpus=[gpu(0, 400, [listed(12, 100), listed(12, 150)], mig=split)], processes=[process(12, fds=CUDA)])
    found = find_holders(seen(document))
    assert [told(one) for one in found] == [(12, "live", 250, True), (None, "driver", 150, True)]
    assert found[1].why.endswith("; the GPU is split into 3 MIG instances")


# Words


@pytest.mark.parametrize(
    ("seconds", "age"),
    [(-5, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min"), (3600, "1 h"), (86_399, "23 h"), (86_400, "1 d"), (9e7, "1041 d")],
)
def test_ages(seconds: float, age: str) -> None:
    one = only(holders(used=1, lists=[listed(12, 1)], processes=[process(12, fds=CUDA, started=NOW - seconds)]))
    assert one.why == f"pid 12 `python3` of alice, {age} old, holds 1 MiB"


@pytest.mark.parametrize(
    ("command", "comm", "name"),
    [
        (
            "/usr/bin/python3 -m vllm.entrypoints.openai.api_server --model x",
            "python3",
            "python3 -m vllm.entrypoints.openai.api_server -…",
        ),
        ("", "kworker/3:1", "kworker/3:1"),
        ("", "", "?"),
        ("/", "odd", "/"),
        ("a`b\x1b[31m\nc\u202ed", "odd", "a?b?[31m?c?d"),
    ],
)
def test_commands_are_short_and_cannot_play_tricks(command: str, comm: str, name: str) -> None:
    one = only(holders(used=1, lists=[listed(12, 1)], processes=[process(12, comm, fds=CUDA, command=command)]))
    assert one.why == f"pid 12 `{name}` of alice, 2 h old, holds 1 MiB"


def test_the_summary_names_three() -> None:
    found = holders(
        used=150,
        lists=[listed(pid, 10) for pid in range(11, 19)],
        processes=[process(pid, f"job{pid}", fds=CUDA) for pid in range(11, 19)],
    )
    driver = "GPU 0: 70 MiB that no process owns"
    first, second = "GPU 0: pid 11 job11 (alice, 2 h), 10 MiB, alive", "GPU 0: pid 12 job12 (alice, 2 h), 10 MiB, alive"
    assert summary(found) == f"{driver}; {first}; {second}; + 6 more"
    assert summary(found[:3]) == f"{driver}; {first}; {second}"
    assert summary([]) == ""


# What always holds


@given(documents())
def test_any_snapshot_has_an_answer_that_adds_up(document: dict[str, Any]) -> None:
    snapshot = seen(document)
    found = find_holders(snapshot)
    for one in snapshot.gpus:
        here = [holder for holder in found if holder.gpu == one.index]
        if one.memory is not None:
            assert sum(holder.bytes or 0 for holder in here) <= one.memory.used[-1]
        # Each listed pid at one holder, each process at one holder.
        assert sorted(pid for holder in here for pid in holder.listed) == sorted({line.pid for line in one.processes or ()})
        pids = [holder.pid for holder in here if holder.process is not None]
        assert len(pids) == len(set(pids))
        for holder in here:
            assert holder.why.isprintable()
            assert holder.short.isprintable()
            assert holder.short
            assert not holder.why.endswith(".")
            assert holder.process is None or holder.process.pid == holder.pid
            assert holder.kind != "self" or not holder.blocking or holder.pid in snapshot.viewer.ancestors
        # Memory in use, and nobody said to hold it: only below the tolerance, or where a listed size is not known.
        if one.memory is not None and one.memory.used[-1] > 1024 * MIB and not any(line.bytes is None for line in one.processes or ()):
            assert sum(holder.bytes or 0 for holder in here) >= one.memory.used[-1] - 1024 * MIB
    assert find_holders(snapshot, [one.index for one in snapshot.gpus]) == found
    assert isinstance(summary(found), str)


@given(documents())
def test_a_process_that_only_asks_is_never_taken_for_forked(document: dict[str, Any]) -> None:
    for entry in document["processes"] or ():
        if entry["device_fds"] is not None:
            entry["device_fds"] = [name for name in entry["device_fds"] if name != "nvidia-uvm"]
    assert all(holder.kind != "forked" for holder in find_holders(seen(json.loads(json.dumps(document)))))
