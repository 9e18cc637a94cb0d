"""The face is quick: no torch, no transformers, no pyarrow before a command needs them."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

DRAFTPROOF = Path(sys.executable).with_name("draftproof")

HEAVY = ("torch", "transformers", "pyarrow", "vllm", "numpy")

QUIET = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}


@pytest.mark.parametrize("module", ["draftproof", "draftproof.cli"])
def test_import_brings_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_help_and_recipe_commands_bring_no_torch(tmp_path: Path) -> None:
    """`-X importtime` lists every module that was really imported."""
    recipe = tmp_path / "recipe.yaml"
    for arguments in (["--help"], ["recipe", "init", str(recipe)], ["recipe", "show", str(recipe)]):
        result = subprocess.run(
            [sys.executable, "-X", "importtime", DRAFTPROOF, *arguments], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time:")}
        assert "draftproof.cli" in imported
        assert not imported & {"torch", "transformers", "vllm"}, arguments


def test_help_takes_less_than_a_third_of_a_second() -> None:
    """Median of eleven processor times: the wall clock of a busy machine says little."""
    seconds, wall = [], []
    for _ in range(11):
        before, started = os.times(), time.perf_counter()
        result = subprocess.run([DRAFTPROOF, "--help"], capture_output=True, text=True, check=True, env=QUIET)
        after = os.times()
        wall.append(time.perf_counter() - started)
        seconds.append(after.children_user - before.children_user + after.children_system - before.children_system)
        assert "run" in result.stdout
    assert statistics.median(seconds) < 0.3, f"processor {seconds}, wall {wall}"
