"""Whom a plan names, how, and whom it leaves; and plans from files that nobody should trust."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.snapshots import ALICE, BOB, CUDA, MIB, ROOT, documents, gpu, host, listed, process, seen, viewer

from draftproof.errors import Undecided, UsageError
from draftproof.machine.apply import still_true
from draftproof.machine.look import Look, Needs
from draftproof.machine.reclaim import HostPlan, ReclaimPlan, Selection, load_plan, plan_host, save
from draftproof.machine.remote import Reach

ENGINE = {"what": "vLLM", "run": "/runs/one"}
SERVICE = "/system.slice/vllm.service"
DOCKER = "/system.slice/docker-0123456789abcdef.scope"


def plan(*processes: dict[str, Any], lists: list[dict[str, Any]] | None = None, used: int = 500, **selection: Any) -> HostPlan:
    """The plan for one GPU whose list holds the first process, unless `lists` says otherwise."""
    shown = lists if lists is not None else [listed(processes[0]["pid"], used)]
    who = selection.pop("who", viewer())
    document = host(gpus=[gpu(0, used, shown)], processes=list(processes), viewer=who)
    return plan_host(Look(Reach(), Needs(), seen(document)), Selection(**selection))


def pids(made: HostPlan) -> list[int]:
    return sorted(target.pid for target in made.targets)


def test_a_live_holder_of_the_same_user_with_all_below_it() -> None:
    made = plan(process(40, fds=CUDA), process(41, ppid=40), process(42, ppid=41), process(43, ppid=1))
    assert pids(made) == [40, 41, 42]
    assert [target.mib for target in made.targets] == [{"0": 500}, {}, {}]
    assert (made.host, made.address, made.uid, made.gpus, made.deadline_s) == ("node7", None, ALICE, (0,), 20.0)
    assert not made.units
    assert not made.left


def test_a_forked_child_of_a_dead_parent_is_the_target_and_not_the_dead_pid() -> None:
    made = plan(process(40, fds=CUDA, session=39, pgrp=39), lists=[listed(39, 490)])
    assert pids(made) == [40]
    assert made.targets[0].kind == "forked"


def test_another_users_process_is_left_with_its_owner() -> None:
    made = plan(process(40, uid=BOB, fds=None))
    assert made.empty
    assert [(left.pid, left.kind, left.remedy) for left in made.left] == [
        (40, "other_user", "Ask its owner; root may plan with --any-user.")
    ]


def test_root_takes_other_users_only_when_asked() -> None:
    root = viewer(uid=ROOT, user="root")
    assert plan(process(40, uid=BOB, fds=CUDA), who=root).empty
    assert pids(plan(process(40, uid=BOB, fds=CUDA), process(41, uid=ALICE, ppid=40), who=root, any_user=True)) == [40, 41]


def test_a_service_is_stopped_as_a_unit_with_all_in_its_group() -> None:
    inside = {"cgroup": SERVICE, "unit": "vllm.service", "unit_scope": "system"}
    made = plan(process(40, fds=CUDA, **inside), process(41, **inside), process(42))
    assert [(unit.name, unit.scope, unit.cgroup) for unit in made.units] == [("vllm.service", "system", SERVICE)]
    assert pids(made) == [40, 41]
    assert {target.unit for target in made.targets} == {"vllm.service"}


def test_a_named_unit_of_another_user_may_be_stopped() -> None:
    inside = {"cgroup": SERVICE, "unit": "vllm.service", "unit_scope": "system"}
    made = plan(process(40, uid=BOB, fds=CUDA, **inside), units=("vllm.service",))
    assert [unit.name for unit in made.units] == ["vllm.service"]
    assert pids(made) == [40]


@pytest.mark.parametrize("name", ["ssh.service", "user@1000.service", "cron.service", "docker.service", "slurmd.service"])
def test_a_service_that_holds_other_work_is_not_stopped_for_it(name: str) -> None:
    made = plan(process(40, fds=CUDA, cgroup=f"/system.slice/{name}", unit=name, unit_scope="system"))
    assert not made.units
    assert pids(made) == [40]


def test_the_unit_in_which_we_run_is_not_stopped() -> None:
    inside = {"cgroup": "/system.slice/jupyter.service", "unit": "jupyter.service", "unit_scope": "system"}
    made = plan(process(40, fds=CUDA, **inside), process(700, "bash", **inside))
    assert not made.units
    assert pids(made) == [40]


def test_only_what_was_selected() -> None:
    lists = [listed(40, 300), listed(50, 200)]
    two = (process(40, fds=CUDA, session=400), process(50, fds=CUDA, session=500))
    assert pids(plan(*two, lists=lists, sessions=(400,))) == [40]
    assert pids(plan(*two, lists=lists, trees=(50,))) == [50]
    made = plan(*two, lists=lists, units=("vllm.service",))
    assert made.empty
    assert [left.pid for left in made.left] == [40, 50]


def test_a_tree_takes_the_supervisor_that_would_start_it_again() -> None:
    made = plan(process(40, fds=CUDA, ppid=30), process(30, "supervisor"), process(41, ppid=30), trees=(30,))
    assert pids(made) == [30, 40, 41]


def test_a_container_is_stopped_only_by_name() -> None:
    inside = {"cgroup": DOCKER, "container": "docker:0123456789ab", "unit": "docker-0123456789abcdef.scope", "unit_scope": "system"}
    assert plan(process(40, fds=CUDA, **inside)).empty
    made = plan(process(40, uid=ROOT, fds=CUDA, **inside), units=("docker:0123456789ab",))
    assert [(unit.name, unit.scope) for unit in made.units] == [("0123456789ab", "docker")]


def test_an_engine_of_ours_goes_whole() -> None:
    made = plan(process(40, fds=CUDA, engine=ENGINE), process(30, engine=ENGINE), process(31, engine={**ENGINE, "run": "/runs/two"}))
    assert pids(made) == [30, 40]


def test_a_selected_group_beside_a_unit_is_signalled_by_itself() -> None:
    inside = {"cgroup": SERVICE, "unit": "vllm.service", "unit_scope": "system"}
    lists = [listed(40, 300), listed(50, 200)]
    made = plan(
        process(40, fds=CUDA, **inside),
        process(41, ppid=40),  # it left its unit's group
        process(42, ppid=40, uid=BOB),
        process(50, fds=CUDA, session=500),
        process(51, session=500),
        lists=lists,
        units=("vllm.service",),
        sessions=(500,),
    )
    assert {target.pid: target.unit for target in made.targets} == {40: "vllm.service", 41: None, 50: None, 51: None}


def test_a_service_that_divides_its_group_is_one_unit() -> None:
    worker = {"unit": "vllm.service", "unit_scope": "system"}
    two = [process(pid, fds=CUDA, cgroup=f"{SERVICE}/rank{pid}", **worker) for pid in (40, 41)]
    made = plan(*two, process(42, cgroup=SERVICE, **worker), lists=[listed(40, 300), listed(41, 200)])
    assert [(unit.name, unit.cgroup) for unit in made.units] == [("vllm.service", SERVICE)]
    assert {target.pid: target.unit for target in made.targets} == dict.fromkeys((40, 41, 42), "vllm.service")


def test_two_users_services_of_one_name_are_two_units() -> None:
    groups = {uid: f"/user.slice/user-{uid}.slice/user@{uid}.service/app.slice/vllm.service" for uid in (ALICE, BOB)}
    two = [
        process(pid, uid=uid, fds=CUDA, cgroup=groups[uid], unit="vllm.service", unit_scope="user") for pid, uid in ((40, ALICE), (41, BOB))
    ]
    made = plan(*two, lists=[listed(40, 300), listed(41, 200)], who=viewer(uid=ROOT, user="root"), any_user=True)
    assert {unit.cgroup for unit in made.units} == set(groups.values())
    assert pids(made) == [40, 41]


@pytest.mark.parametrize("name", ["session-3.scope", "ssh.service"])
def test_naming_a_unit_that_is_not_stopped_gives_no_leave_over_others(name: str) -> None:
    inside = {"cgroup": f"/system.slice/{name}", "unit": name, "unit_scope": "system"}
    made = plan(process(40, uid=BOB, fds=CUDA, **inside), units=(name,))
    assert made.empty
    assert [(left.pid, left.kind) for left in made.left] == [(40, "other_user")]
    assert pids(plan(process(40, fds=CUDA, **inside), units=(name,))) == [40]


def test_a_process_in_a_container_is_not_signalled_past_its_runtime() -> None:
    inside = {"cgroup": DOCKER, "container": "docker:0123456789ab"}
    root = {"who": viewer(uid=ROOT, user="root"), "any_user": True}
    made = plan(process(40, uid=ROOT, fds=CUDA, **inside), **root)
    assert made.empty
    assert "docker stop" in made.left[0].remedy
    pod = {"cgroup": f"/kubepods/{'0' * 64}", "container": "kubernetes:000000000000"}
    assert plan(process(40, fds=CUDA, **pod), units=("kubernetes:000000000000",)).empty
    # Nor as a child of one that is.
    assert pids(plan(process(40, fds=CUDA), process(41, ppid=40, **inside))) == [40]


def _still_true(made: HostPlan, lists: list[dict[str, Any]], *processes: dict[str, Any]) -> tuple[list[int], list[str], set[int]]:
    """Targets and units that are left of a plan by this look, and who was dropped."""
    used = sum(line["bytes"] for line in lists) // MIB
    kept, dropped = still_true(made, Look(Reach(), Needs(), seen(host(gpus=[gpu(0, used, lists)], processes=list(processes)))))
    assert kept.hash == kept.digest()
    return pids(kept), [unit.name for unit in kept.units], {outcome.pid for outcome in dropped}


def test_who_belongs_to_one_that_let_go_is_left_with_it() -> None:
    family = (process(40, fds=CUDA), process(41, ppid=40), process(50, fds=CUDA), process(51, ppid=50))
    lists = [listed(40, 300), listed(50, 200)]
    made = plan(*family, lists=lists)
    assert _still_true(made, lists, *family) == ([40, 41, 50, 51], [], set())
    assert _still_true(made, lists[1:], *family) == ([50, 51], [], {40, 41})
    assert _still_true(made, [], *family) == ([], [], {40, 41, 50, 51})
    # A child that holds the memory now is not let go with its parent.
    assert _still_true(made, [listed(41, 300)], *(family[0], process(41, ppid=40, fds=CUDA)))[0] == [41]


def test_a_unit_of_which_nobody_holds_memory_any_more_is_not_stopped() -> None:
    inside = {"cgroup": SERVICE, "unit": "vllm.service", "unit_scope": "system"}
    service = (process(40, fds=CUDA, **inside), process(41, **inside))
    made = plan(*service, process(50, fds=CUDA), lists=[listed(40, 300), listed(50, 200)])
    assert _still_true(made, [listed(50, 200)], *service, process(50, fds=CUDA)) == ([50], [], {40, 41})
    assert _still_true(made, [listed(40, 300)], *service, process(50, fds=CUDA)) == ([40, 41], ["vllm.service"], {50})


def test_ancestors_are_never_targets() -> None:
    made = plan(process(700, "bash", fds=CUDA), process(40, fds=CUDA, ppid=700), lists=[listed(700, 300), listed(40, 200)], any_user=True)
    assert pids(made) == [40]


@pytest.mark.parametrize("comm", ["nvidia-persiste", "nv-hostengine", "Xorg"])
def test_services_of_the_machine_are_never_targets(comm: str) -> None:
    made = plan(process(40, comm, uid=ROOT, fds=CUDA), who=viewer(uid=ROOT, user="root"), any_user=True)
    assert made.empty


def test_memory_without_an_owner_is_for_a_person() -> None:
    for who, remedy in ((viewer(uid=ROOT, user="root"), "reset"), (viewer(), "Look as root (--sudo)")):
        made = plan(lists=[], who=who)
        assert made.empty
        assert [(left.pid, left.kind) for left in made.left] == [(None, "driver")]
        assert remedy in made.left[0].remedy


def test_the_hash_is_that_of_the_canonical_json(tmp_path: Path) -> None:
    """Computed here by hand, as `stop.py` does on the other side."""
    made = plan(process(40, fds=CUDA))
    save(ReclaimPlan(hosts=(made,)), tmp_path / "plan.json")
    body = json.loads((tmp_path / "plan.json").read_text())["hosts"][0]
    written = body.pop("hash")
    assert hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()).hexdigest() == written
    assert load_plan(tmp_path / "plan.json") == ReclaimPlan(hosts=(made,))


def test_a_changed_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save(ReclaimPlan(hosts=(plan(process(40, fds=CUDA)),)), path)
    path.write_text(path.read_text().replace('"pid": 40', '"pid": 41'))
    with pytest.raises(UsageError, match=r"The plan for node7 was changed after it was made"):
        load_plan(path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(st.data())
def test_a_hostile_plan_is_refused_in_a_sentence(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A good plan in which one value, anywhere, is another, or one key is gone: never anything but UsageError."""
    document = json.loads(ReclaimPlan(hosts=(plan(process(40, fds=CUDA)),)).model_dump_json())
    place: Any = document
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        before = place[key]
        place[key] = data.draw(_JSON)
        break
    path = tmp_path_factory.getbasetemp() / "hostile.json"
    path.write_text(json.dumps(document))
    if place[key] == before and type(place[key]) is type(before):
        assert load_plan(path)
        return
    if document == {"hosts": []}:
        return
    with pytest.raises(UsageError):
        load_plan(path)


@given(st.binary(max_size=60) | _JSON.map(lambda value: json.dumps(value).encode()) | st.just(b"[" * 100_000))
def test_anything_else_is_no_plan(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "nothing.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="no plan of draftproof"):
        load_plan(path)


@given(documents(), st.booleans())
def test_no_document_makes_a_plan_against_ourselves(document: dict[str, Any], any_user: bool) -> None:
    look = Look(Reach(), Needs(), snapshot := seen(document))
    if look.blind is not None:
        with pytest.raises(Undecided):
            plan_host(look, Selection(any_user=any_user))
        return
    made = plan_host(look, Selection(any_user=any_user))
    ours = {snapshot.viewer.pid, *snapshot.viewer.ancestors}
    assert not ours & set(pids(made))
    by_pid = snapshot.by_pid
    if not any_user:
        assert {by_pid[pid].uid for pid in pids(made)} <= {snapshot.viewer.uid}
