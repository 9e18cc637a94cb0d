"""The walls of the house: who may import whom (`[tool.importlinter]` in pyproject.toml)."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def lint_imports(*, cwd: Path, config: Path) -> subprocess.CompletedProcess[str]:
    linter = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [linter, "--config", config, "--no-cache"],
        cwd=cwd,
        env={"PYTHONPATH": str(cwd), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_import_goes_downwards() -> None:
    result = lint_imports(cwd=ROOT / "src", config=ROOT / "pyproject.toml")
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


def test_the_walls_are_seen_when_they_break(tmp_path: Path) -> None:
    """A stage that imports its neighbour, and a gate that imports a stage, are both reported."""
    package = tmp_path / "draftproof"
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = config["tool"]["importlinter"]["contracts"][0]["layers"]
    for name in {name.strip(" ()") for layer in layers for name in re.split(r"[|:]", layer)}:
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "train" / "__init__.py").write_text("import draftproof.extract\n")
    (package / "gate" / "__init__.py").write_text("from draftproof import prepare\n")
    (package / "unlisted.py").touch()
    result = lint_imports(cwd=tmp_path, config=ROOT / "pyproject.toml")
    assert result.returncode == 1
    for sentence in (
        "draftproof.train is not allowed to import draftproof.extract",
        "draftproof.gate is not allowed to import draftproof.prepare",
        "draftproof.unlisted",
    ):
        assert sentence in result.stdout
