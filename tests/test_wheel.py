"""The wheel: built, installed into a fresh environment, and run from there."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

from draftproof import __version__

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, ROOT],
        check=True,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; its dependencies are those of the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-deps", "--no-index", wheel],
        check=True,
    )
    (site,) = folder.glob("lib/python*/site-packages")
    # A plain path line, so that the editable install of the outer environment (a .pth file there) is not followed.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def run(command: list[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, check=False)


def test_help_works_and_brings_no_torch(installed: Path, tmp_path: Path) -> None:
    result = run([installed / "draftproof", "--help"], tmp_path)
    assert result.returncode == 0, result.stderr
    for command in ("run", "plan", "inspect", "report"):
        assert command in result.stdout
    code = "import sys, draftproof.cli as cli; print(cli.__file__); print('torch' in sys.modules)"
    file, torch = run([installed / "python", "-c", code], tmp_path).stdout.split()
    assert Path(file).is_relative_to(installed.parent), "the wheel is what ran, not the working tree"
    assert torch == "False"


def test_the_report_finds_its_templates(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("target:\n  model: x  # r.yaml:1\nrun:\n  dir: runs/x  # default\n")
    result = run([installed / "draftproof", "report", "run"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Gate before evaluate" in (tmp_path / "run" / "report.html").read_text()


def test_every_package_that_is_imported_is_declared() -> None:
    """Also those that would come along with another one, until that one no longer brings them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    declared = {re.split(r"[^\w-]", line)[0].lower() for line in lines}
    imported = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    imported -= set(sys.stdlib_module_names) | {"draftproof"}
    names = {"yaml": "pyyaml", "huggingface_hub": "huggingface-hub"}
    assert {names.get(name, name) for name in imported} <= declared


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = BytesParser().parsebytes(archive.read(f"draftproof-{__version__}.dist-info/METADATA"))
    assert metadata["Name"] == "draftproof"
    assert metadata["Version"] == __version__
    assert {"vllm", "track", "hub"} <= set(metadata.get_all("Provides-Extra"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert f"draftproof-{__version__}.dist-info/licenses/LICENSE" in names
    requires = metadata.get_all("Requires-Dist")
    assert any(line.startswith("vllm") and "extra == 'vllm'" in line for line in requires)
    assert not any(line.startswith("vllm") and "extra" not in line for line in requires)
    assert {name.split("/")[0] for name in names} == {"draftproof", f"draftproof-{__version__}.dist-info"}
