"""Every scene once: the right one is named, nothing else ends, and the memory is back or what holds it is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scenarios import SCENARIOS, Build, by_draftproof, by_fuser, by_name, false_alarms, live_holder, play

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="Other users and control groups need root.")


@pytest.mark.parametrize("build", SCENARIOS, ids=lambda build: build.__name__)
def test_scenario(build: Build, tmp_path: Path) -> None:
    row = play(build, by_draftproof, tmp_path)
    assert row.named_right
    assert row.wrong == 0
    assert row.freed


def test_the_clean_twin_raises_no_alarm(tmp_path: Path) -> None:
    for _ in range(3):
        assert false_alarms(tmp_path) == []


def test_the_scenes_tell_a_careless_tool_apart(tmp_path: Path) -> None:
    """Or they would prove nothing: fuser ends the monitor, killing by name the innocent of that name."""
    assert play(live_holder, by_fuser, tmp_path).wrong == 1
    assert play(live_holder, by_name, tmp_path).wrong >= 3
