"""Every scene of held GPUs once: the right ones are named, nobody else is harmed, and the memory is back or what holds it is said."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

import scenarios
from draftproof.machine.reclaim import ReclaimPlan
from draftproof.machine.remote import Reach
from reclaiming import AsLibrary, Build, Host, Said, Scene, Tool, by_careful_fuser, by_draftproof, by_fuser, by_name, false_alarms, play
from scenarios import SCENARIOS, play_anywhere

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="Other users, control groups and pid namespaces need root.")


@pytest.mark.parametrize("build", SCENARIOS, ids=lambda build: build.__name__)
def test_draftproof(build: Build, tmp_path: Path) -> None:
    row = play_anywhere(build, by_draftproof, tmp_path)
    assert row.faults == ()
    assert row.named_right


@pytest.mark.parametrize(
    "build",
    [
        scenarios.parent_with_a_forked_child,
        scenarios.engine_over_eight_gpus,
        scenarios.our_own_engine,
        scenarios.supervisor_bears_it_again,
        scenarios.service_that_restarts,
        scenarios.holder_in_a_container,
        scenarios.asked_through_the_console_script,
    ],
    ids=lambda build: build.__name__,
)
def test_the_clean_twin_raises_no_alarm(build: Build, tmp_path: Path) -> None:
    assert false_alarms(build, tmp_path) == []


# The same scenes without draftproof: they prove something only if others go wrong in them


@pytest.mark.parametrize(
    ("tool", "harmed"),
    [
        (by_fuser, ["VLLM::Worker_TP0", "dcgm-exporter"]),
        (by_careful_fuser, ["dcgm-exporter"]),
        (by_name, ["VLLM::EngineCor", "VLLM::Worker_TP0", "python3 notebook.py", "python3 tokenise.py"]),
    ],
)
def test_other_tools_harm_the_crowd(tool: Tool, harmed: list[str], tmp_path: Path) -> None:
    row = play(scenarios.live_holder, tool, tmp_path)
    assert sorted(who.split(" ", 2)[2] for who in row.wrong) == harmed
    assert row.back


@pytest.mark.parametrize("tool", [by_fuser, by_careful_fuser])
def test_a_service_starts_again_what_fuser_kills(tool: Tool, tmp_path: Path) -> None:
    assert not play(scenarios.service_that_restarts, tool, tmp_path).back


def test_killing_by_name_misses_another_name(tmp_path: Path) -> None:
    assert not play(scenarios.name_without_a_hint, by_name, tmp_path).back


# The judge


@dataclass(frozen=True)
class Careless(AsLibrary):
    """Stops nobody that it should, does something else, and says that all is well."""

    act: Callable[[], object]

    def apply(self, plan: ReclaimPlan) -> list[str]:
        self.act()
        return []


@pytest.mark.parametrize(
    ("what", "faults"),
    [
        (None, ()),
        (signal.SIGKILL, ("harmed: pid {exporter} dcgm-exporter",)),
        (signal.SIGSTOP, ("harmed: pid {exporter} dcgm-exporter",)),
    ],
    ids=["does nothing", "kills the monitor", "leaves the monitor stopped"],
)
def test_a_tool_that_says_all_is_well_is_not_believed(what: signal.Signals | None, faults: tuple[str, ...], tmp_path: Path) -> None:
    pids = {}

    def careless(host: Host, scene: Scene) -> Said:
        pids["holder"], pids["exporter"] = *scene.must_end, host.crowd[0]
        act = (lambda: None) if what is None else partial(os.kill, host.crowd[0], what)
        return by_draftproof(host, replace(scene, asked=Careless(Reach(), act)))

    row = play(scenarios.live_holder, careless, tmp_path)
    expected = ("pid {holder} lives", *faults, "71,604 MiB are still in use")
    assert row.faults == tuple(fault.format(**pids) for fault in expected)
    assert not row.back
