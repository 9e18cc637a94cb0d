"""The face: what each command prints, changes, and leaves alone, through the installed console script."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import jsonschema
import pytest
import yaml

import draftproof as package
from line import STAGES, draftproof, write_job

COMMANDS = ("run", "plan", "check", "reclaim", *STAGES, "report", "inspect", "recipe")


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and time."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_help_names_every_command_at_once() -> None:
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        ended = draftproof("--help")
        seconds.append(time.perf_counter() - started)
        assert ended.code == 0
        listed = [line.split()[0] for line in ended.stdout.partition("Commands:")[2].splitlines() if line.strip()]
        assert sorted(listed) == sorted(COMMANDS)
    assert min(seconds) < 0.3


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(command: str) -> None:
    ended = draftproof(command, "--help")
    assert ended.code == 0
    assert ended.stdout.startswith(f"Usage: draftproof {command}")
    assert ended.stderr == ""


def test_without_a_command_the_help_is_shown() -> None:
    ended = draftproof()
    assert ended.code == 2
    assert "Commands:" in ended.stderr + ended.stdout


def test_version() -> None:
    ended = draftproof("--version")
    assert (ended.code, ended.stdout, ended.stderr) == (0, f"{package.__version__}\n", "")


def test_recipe_init_writes_once(tmp_path: Path) -> None:
    ended = draftproof("recipe", "init", "first.yaml", "--json", cwd=tmp_path)
    assert ended.code == 0
    assert ended.document()["path"] == "first.yaml"
    written = (tmp_path / "first.yaml").read_text()
    assert draftproof("recipe", "show", "first.yaml", cwd=tmp_path).code == 0
    again = draftproof("recipe", "init", "first.yaml", cwd=tmp_path)
    assert again.code == 2
    assert "[first.yaml]" in again.sentence()
    assert (tmp_path / "first.yaml").read_text() == written


def test_recipe_show_says_where_each_value_comes_from(line_recipe: Path) -> None:
    plain = draftproof("recipe", "show", line_recipe, "train.unroll=5")
    assert plain.code == 0
    assert "  unroll: 5  # command line" in plain.stdout.splitlines()
    assert "  steps: 60  # recipe.yaml:6" in plain.stdout.splitlines()
    assert "  decay: 0.8  # default" in plain.stdout.splitlines()
    document = draftproof("recipe", "show", line_recipe, "train.unroll=5", "--json").document()
    assert yaml.safe_load(plain.stdout) == document["recipe"]
    assert document["provenance"]["train.unroll"] == "command line"


def test_recipe_schema_judges_recipes(line_recipe: Path) -> None:
    schema = json.loads(draftproof("recipe", "schema").stdout)
    assert draftproof("recipe", "schema", "--json").document()["schema"] == schema
    recipe = yaml.safe_load(line_recipe.read_text())
    recipe["run"]["dir"] = "runs/x"
    jsonschema.validate(recipe, schema)
    recipe["train"]["unrol"] = 3
    with pytest.raises(jsonschema.ValidationError, match="unrol"):
        jsonschema.validate(recipe, schema)


def test_plan_and_dry_run_change_nothing(line_recipe: Path, line_run: Path, tmp_path: Path) -> None:
    before = snapshot(line_run)
    for command in (["plan"], ["run", "--dry-run"]):
        known = draftproof(*command, line_recipe, "--workdir", line_run, "--json").document()
        assert known["tokens_known"]
        assert list(known["stages"]) == list(STAGES)
        assert known["tokens"] == json.loads((line_run / "prepare" / "manifest.json").read_text())["counts"]["tokens"]
        guessed = draftproof(*command, line_recipe, "--workdir", tmp_path / "run", "--json").document()
        assert not guessed["tokens_known"]
        assert guessed["target_loads"] == 3
    assert snapshot(line_run) == before
    assert list(tmp_path.iterdir()) == []
    assert "evaluate" in draftproof("plan", line_recipe, "--workdir", tmp_path / "run").stdout


@pytest.mark.slow
def test_until_one_stage_and_from(tm_folder: Path, tmp_path: Path) -> None:
    recipe, run = write_job(tmp_path / "job", tm_folder), tmp_path / "run"
    place = ("--workdir", run, "-q", "--json")
    first = draftproof("run", recipe, *place, "--until", "prepare")
    assert first.code == 0, first.stderr
    assert first.document()["stages"] == {"regenerate": "made", "prepare": "made"}
    counted = first.document()["conversations"]
    assert counted["in"] == 60 == counted["kept"] + sum(counted["changed"].values()) + sum(counted["dropped"].values())
    assert Path(first.document()["report"]).is_file()

    too_early = draftproof("train", recipe, *place)
    assert too_early.code == 1
    assert str(run / "vocab") in too_early.sentence()
    one = draftproof("vocab", recipe, *place)
    assert one.code == 0, one.stderr
    assert one.document()["command"] == "vocab"
    assert one.document()["stages"] == {"vocab": "made"}
    assert one.document()["size"] == 96

    anew = draftproof("run", recipe, *place, "--from", "prepare", "--until", "vocab")
    assert anew.code == 0, anew.stderr
    assert anew.document()["stages"] == {"regenerate": "kept", "prepare": "made", "vocab": "made"}
    unknown = draftproof("run", recipe, *place, "--until", "trian")
    assert unknown.code == 2
    assert "no stage 'trian'" in unknown.sentence()


def test_a_finished_run_is_kept_and_its_report_written_again(line_recipe: Path, line_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "copy"
    shutil.copytree(line_run, run)
    again = draftproof("run", line_recipe, "--workdir", run)
    assert again.code == 0
    assert [line.split()[:2] for line in again.stdout.splitlines()[1:8]] == [[stage, "kept"] for stage in STAGES]
    assert "acceptance length" in again.stdout
    assert again.stderr.split() == [word for stage in STAGES for word in ("kept", stage)]

    (run / "report.html").unlink()
    written = draftproof("report", run, "--json")
    assert written.code == 0
    assert written.document()["report"] == str(run / "report.html")
    assert "<html" in (run / "report.html").read_text()
    nothing = draftproof("report", tmp_path / "nowhere")
    assert nothing.code == 2
    assert str(tmp_path / "nowhere") in nothing.sentence()


@pytest.mark.slow
def test_inspect_knows_what_it_sees(line_run: Path, tm_folder: Path, tmp_path: Path) -> None:
    kinds = {line_run: "run", line_run / "vocab": "vocab artifact", tm_folder: "target"}
    kinds |= {line_run / "export" / engine: f"{engine} draft" for engine in ("vllm", "sglang")}
    for path, kind in kinds.items():
        ended = draftproof("inspect", path, "--json")
        assert ended.code == 0, ended.stderr
        assert (ended.document()["kind"], ended.document()["whole"]) == (kind, True)
    assert draftproof("inspect", tmp_path).code == 2
    shutil.copytree(line_run, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "copy" / "recipe.yaml").write_text("{")
    damaged = draftproof("inspect", tmp_path / "copy", "--json")
    assert damaged.code == 1
    assert damaged.document()["problems"][0] == "recipe.yaml is damaged."
    assert damaged.document()["stages"]["train"]["state"] == "damaged"
