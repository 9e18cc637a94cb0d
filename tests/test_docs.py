"""The generated reference leaves nothing out, and README and docs name only what exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import typer

from draftproof.cli import app
from draftproof.recipe import known_keys

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_reference", ROOT / "docs" / "gen_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_recipe_key_has_a_row_with_a_reason(reference: ModuleType) -> None:
    rows = {line.split("`")[1]: line for line in reference.recipe_page().splitlines() if line.startswith("| `")}
    assert set(rows) == set(known_keys())
    assert [key for key, row in rows.items() if row.rstrip().endswith("| |")] == []


def test_every_exit_code_has_a_row(reference: ModuleType) -> None:
    codes = re.findall(r"^\| (\d+) \| `(\w+)`", reference.exit_codes_page(), re.MULTILINE)
    assert codes == [("0", "ok"), ("1", "failed"), ("2", "usage"), ("3", "refused"), ("4", "unknown"), ("5", "stopped"), ("130", "stopped")]


def test_docs_name_only_commands_and_keys_that_exist(reference: ModuleType) -> None:
    command = typer.main.get_command(app)
    commands = set(getattr(command, "commands", {}))
    assert {f"draftproof {name}" for name in commands - {"recipe"}} <= set(
        re.findall(r"^## (.+)$", reference.commands_page(), re.MULTILINE)
    )
    keys = set(known_keys())
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text()
        shell = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
        for name in re.findall(r"^(?:\.venv-demo/bin/)?draftproof ([a-z]+)", shell, re.MULTILINE):
            assert name in commands, f"{page.name}: draftproof {name}"
        for key in re.findall(r"\b([a-z]+\.[a-z_]+)=", text):
            assert key in keys, f"{page.name}: {key}"
