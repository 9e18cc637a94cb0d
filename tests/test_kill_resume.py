"""A run that is killed or interrupted in any stage goes on, and ends with the same hashes as one that never was.

One run folder is taken through a whole series: the command is stopped in the first stage; the same command goes on,
finishes that stage, and is stopped in the next; and so on to the end.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from line import STAGES, Ended, assert_whole, contents, draftproof, frozen_at_work, partial, signalled, trace

LONG = ("regenerate", "extract", "train")
"""Stages that go on from what they have; the others last a moment and start over."""


def finish(recipe: Path, run: Path) -> None:
    ended = draftproof("run", recipe, "--workdir", run, "-q")
    assert ended.code == 0, ended.stderr
    assert ended.stderr == ""


@pytest.mark.slow
def test_kill_9_in_every_stage(line_recipe: Path, line_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kept = {}
    for stage in STAGES:
        process = frozen_at_work(line_recipe, run, stage)
        if stage in LONG:
            kept[stage] = trace(partial(run, stage), stage)
        if stage == "train":
            seen = draftproof("inspect", run, "--json")
            assert seen.code == 1
            assert seen.document()["stages"]["train"]["state"] == "unfinished"
            assert "same command again" in seen.sentence()
        ended = signalled(process, signal.SIGKILL)
        assert ended.code == -signal.SIGKILL
        assert not (run / stage).exists(), f"{stage} was only half made"
    finish(line_recipe, run)
    assert contents(run) == contents(line_run)
    assert {stage: trace(run / stage, stage) for stage in LONG} == kept, "work done before the kill was done again"
    assert_whole(run)


@pytest.mark.slow
def test_ctrl_c_in_every_stage_and_sigterm(line_recipe: Path, line_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    told_to_go: Ended = signalled(frozen_at_work(line_recipe, run, "regenerate"), signal.SIGTERM)
    assert told_to_go.code == 5
    assert told_to_go.sentence() == "stopped: Stopped by SIGTERM. Run the same command again to go on from here."
    kept = {"regenerate": trace(partial(run, "regenerate"), "regenerate")}
    for stage in STAGES:
        process = frozen_at_work(line_recipe, run, stage)
        if stage in LONG:
            kept.setdefault(stage, trace(partial(run, stage), stage))
        ended = signalled(process, signal.SIGINT)
        assert ended.code == 130, f"{stage}: {ended}"
        assert ended.sentence() == "stopped: Interrupted. Run the same command again to go on from here."
        assert ended.stdout == ""
        assert not (run / stage).exists(), f"{stage} was only half made"
    finish(line_recipe, run)
    assert contents(run) == contents(line_run)
    assert {stage: trace(run / stage, stage) for stage in LONG} == kept, "work done before Ctrl-C was done again"
    assert_whole(run)


@pytest.mark.slow
def test_an_interrupted_from_goes_on(line_recipe: Path, line_run: Path, tmp_path: Path) -> None:
    """The command that people are told to give again must not throw away what it has done since."""
    run = tmp_path / "run"
    shutil.copytree(line_run, run)
    before = trace(run / "train", "train")
    process = frozen_at_work(line_recipe, run, "train", "--from", "train")
    begun = trace(partial(run, "train"), "train")
    signalled(process, signal.SIGKILL)
    again = draftproof("run", line_recipe, "--workdir", run, "-q", "--from", "train")
    assert again.code == 0, again.stderr
    assert before != begun == trace(run / "train", "train")
    assert contents(run) == contents(line_run)
    assert_whole(run)


def test_leftovers_of_a_kill_are_swept(tmp_path: Path) -> None:
    """Temporary files and folders on their way out, as a kill in the middle of a write leaves them, are nobody's work."""
    from draftproof.runfolder import sweep

    run = tmp_path / "run"
    for name in (".vocab.discarded-4711", ".train.partial", "gates", "export/vllm"):
        (run / name).mkdir(parents=True)
    torn = [".recipe.yaml.abc.tmp", ".draftproof-probe-x1", "gates/.04-extract.json.q.tmp", "export/vllm/.README.md.z.tmp"]
    torn += [".train.partial/.resume.safetensors.r.tmp", ".vocab.discarded-4711/coverage.json"]
    whole = ["recipe.yaml", ".train.partial/resume.safetensors", "export/vllm/README.md"]
    for name in (*torn, *whole):
        (run / name).write_text("x")
    sweep(run)
    assert sorted(path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()) == sorted(whole)
    assert not (run / ".vocab.discarded-4711").exists()
