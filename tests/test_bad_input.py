"""Wrong recipes, damaged data, full disks: one clear sentence, the right exit code, nothing half-written, a rerun that goes on.

Everything runs through the installed console script.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from line import assert_whole, contents, draftproof, end, frozen_at_work, partial, signalled, trace, write_job

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


@pytest.fixture
def job(tm_folder: Path, tmp_path: Path) -> Path:
    """A recipe of its own, to be spoiled."""
    return write_job(tmp_path / "job", tm_folder)


@pytest.fixture
def copy(line_run: Path, tmp_path: Path) -> Path:
    """A finished run of its own, to be spoiled."""
    shutil.copytree(line_run, tmp_path / "copy")
    return tmp_path / "copy"


def change_byte(path: Path, *, unseen: bool) -> None:
    """Flip one bit in the middle; `unseen`: with the old modification time, as bad memory or a bad disk would."""
    stat, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    if unseen:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_unknown_recipe_key(job: Path) -> None:
    text = job.read_text().replace("unroll: 3", "unrol: 3")
    job.write_text(text)
    line = next(number for number, written in enumerate(text.splitlines(), start=1) if "unrol:" in written)
    ended = draftproof("run", job, "--workdir", job.parent / "run")
    assert ended.code == 2
    assert ended.sentence() == f"usage: There is no recipe key 'train.unrol'. [recipe.yaml:{line}] Did you mean 'train.unroll'?"
    assert not (job.parent / "run").exists()


def test_unknown_key_on_the_command_line(job: Path) -> None:
    ended = draftproof("plan", job, "train.unrol=3", "--json")
    assert ended.code == 2
    assert ended.document()["status"] == "usage"
    assert ended.document()["message"] == "There is no recipe key 'train.unrol'. Did you mean 'train.unroll'?"
    assert ended.sentence() == f"usage: {ended.document()['message']}"


def test_missing_recipe(tmp_path: Path) -> None:
    ended = draftproof("run", "nowhere.yaml", cwd=tmp_path)
    assert ended.code == 2
    assert ended.sentence().startswith("usage: There is no such recipe. [nowhere.yaml]")
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_said_like_every_other_error(job: Path) -> None:
    plain = draftproof("run", job, "--workdr", "x")
    assert plain.code == 2
    assert plain.sentence().startswith("usage: No such option: --workdr")
    assert "--workdir" in plain.stderr
    asked = draftproof("run", "--json")
    assert asked.code == 2
    assert asked.document()["status"] == "usage"
    assert "RECIPE" in asked.sentence()


def test_run_folder_that_is_a_file(job: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    ended = draftproof("run", job, "--workdir", tmp_path / "taken", "-q")
    assert ended.code == 2
    assert f"[{tmp_path / 'taken'}]" in ended.sentence()
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.slow
def test_missing_file_of_prompts_costs_no_work(line_recipe: Path, copy: Path) -> None:
    """Neither plainly nor with --from is anything of the finished run given up for a recipe that cannot run."""
    before = contents(copy)
    for more in ([], ["--from", "regenerate"]):
        ended = draftproof("run", line_recipe, "regenerate.prompts=gone.jsonl", "--workdir", copy, "-q", *more)
        assert ended.code == 2
        assert "There is no such file of prompts." in ended.sentence()
        assert "gone.jsonl]" in ended.stderr
    assert contents(copy) == before


@pytest.mark.slow
def test_truncated_last_line_then_mended(job: Path) -> None:
    """A killed writer's file: file, line and byte are named; once it is mended the same command goes on."""
    lines = [
        json.dumps({"messages": [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"answer {i}"}]}) + "\n"
        for i in range(6)
    ]
    data = job.parent / "talk.jsonl"
    data.write_text("".join(lines)[:-30])
    recipe = "\n".join(line for line in job.read_text().splitlines() if not line.startswith("regenerate"))
    job.write_text(recipe.replace("data: {", "data: {train: [talk.jsonl], "))
    ended = draftproof("prepare", job, "--workdir", job.parent / "run", "-q", "--json")
    assert ended.code == 1
    assert f"[{data}:6, byte {sum(map(len, lines[:5]))}]" in ended.sentence()
    assert "The last line is cut" in ended.document()["message"]
    assert not (job.parent / "run" / "prepare").exists()

    data.write_text("".join(lines))
    ended = draftproof("prepare", job, "--workdir", job.parent / "run", "-q", "--json")
    assert ended.code == 0, ended.stderr
    assert ended.stderr == ""
    assert ended.document()["conversations"]["in"] == 6


def test_target_with_a_missing_shard(tm: LlamaForCausalLM, tt_plain: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tm.save_pretrained(tmp_path / "target", max_shard_size="100KB")
    tt_plain.save_pretrained(tmp_path / "target")
    shards = sorted((tmp_path / "target").glob("model-*.safetensors"))
    assert len(shards) >= 3
    shards[1].unlink()
    job = write_job(tmp_path / "job", tmp_path / "target")
    ended = draftproof("run", job, "--workdir", tmp_path / "run", "-q", "--json")
    assert ended.code == 3
    document = ended.document()
    assert document["status"] == "refused"
    assert {"target.shards"} <= {finding["check"] for finding in document["findings"] if finding["status"] == "fail"}
    assert "regenerate" in (tmp_path / "run" / "report.html").read_text()  # it shows what the gate saw
    assert shards[1].name in ended.sentence()
    assert not (tmp_path / "run" / "regenerate").exists()
    assert not partial(tmp_path / "run", "regenerate").exists()
    seen = draftproof("inspect", tmp_path / "target")
    assert seen.code == 1
    assert shards[1].name in seen.sentence()


@pytest.mark.slow
def test_run_folder_with_other_work(line_recipe: Path, copy: Path) -> None:
    before, recipe = contents(copy), (copy / "recipe.yaml").read_bytes()
    ended = draftproof("run", line_recipe, "evaluate.max_tokens=12", "--workdir", copy, "-q")
    assert ended.code == 2
    assert "evaluate/ holds work of other settings: evaluate.max_tokens: 16 there, 12 wanted." in ended.sentence()
    assert "--from evaluate" in ended.stderr
    assert contents(copy) == before
    assert (copy / "recipe.yaml").read_bytes() == recipe

    mended = draftproof("run", line_recipe, "evaluate.max_tokens=12", "--workdir", copy, "-q", "--json", "--from", "evaluate")
    assert mended.code == 0, mended.stderr
    made = [name for name, happened in mended.document()["stages"].items() if happened == "made"]
    assert made == ["evaluate"]
    assert mended.document()["max_tokens"] == 12
    assert_whole(copy)


@pytest.mark.slow
def test_changed_byte_in_an_artifact(line_recipe: Path, copy: Path) -> None:
    """Seen at once when its time differs; seen by --verify even when it does not."""
    draft = copy / "train" / "draft.safetensors"
    change_byte(draft, unseen=True)
    assert draftproof("inspect", copy).code == 0
    seen = draftproof("inspect", copy, "--verify", "--json")
    assert seen.code == 1
    assert seen.document()["problems"] == ["train: draft.safetensors does not hash to what its manifest says."]
    assert "draft.safetensors" in seen.sentence()

    os.utime(draft)
    assert draftproof("inspect", copy / "train").code == 1
    refused = draftproof("run", line_recipe, "--workdir", copy, "-q")
    assert refused.code == 1
    assert "The train artifact is damaged: draft.safetensors does not hash to what its manifest says." in refused.sentence()
    assert "--from train" in refused.stderr


@pytest.mark.slow
def test_two_runs_in_one_folder(line_recipe: Path, tmp_path: Path) -> None:
    first = frozen_at_work(line_recipe, tmp_path / "run", "regenerate")
    try:
        second = draftproof("run", line_recipe, "--workdir", tmp_path / "run", "-q")
        assert second.code == 2
        assert f"Another draftproof works in this run folder (process {first.pid})." in second.sentence()
    finally:
        ended = signalled(first, signal.SIGINT)
    assert ended.code == 130


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of its own, 16 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", disk], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"Mounting is not allowed here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.fixture
def resize(small_disk: Path) -> Callable[[int | None], None]:
    """Give the disk another size in bytes; None: not a byte more than what lies there."""

    def set_size(size: int | None) -> None:
        stats = os.statvfs(small_disk)
        used = (stats.f_blocks - stats.f_bfree) * stats.f_frsize
        subprocess.run(["mount", "-o", f"remount,size={size or used}", small_disk], check=True)

    return set_size


@pytest.mark.slow
def test_full_disk(tm_folder: Path, line_run: Path, small_disk: Path, resize: Callable[[int | None], None], tmp_path: Path) -> None:
    """The disk fills while a stage writes: in its journal, in a shard, in a checkpoint.

    The gates of the storage are waived, since they would see it a moment earlier.
    """
    reason = "The test fills the disk behind the gate's back."
    recipe = write_job(tmp_path / "job", tm_folder, waive={"storage.bytes": reason, "storage.writable": reason})
    run = small_disk / "run"
    kept = {}
    for stage in ("regenerate", "extract", "train"):
        process = frozen_at_work(recipe, run, stage)
        kept[stage] = trace(partial(run, stage), stage)
        resize(None)
        process.send_signal(signal.SIGCONT)
        ended = end(process)
        assert ended.code == 5, ended
        assert ended.sentence().startswith("stopped: The disk is full")
        assert str(run) in ended.stderr
        assert "again" in ended.stderr
        assert not (run / stage).exists()
        assert not list(partial(run, stage).rglob(".*.tmp"))
        resize(16 << 20)
    ended = draftproof("run", recipe, "--workdir", run, "-q")
    assert ended.code == 0, ended.stderr
    assert contents(run) == contents(line_run)
    assert {stage: trace(run / stage, stage) for stage in kept} == kept
    assert_whole(run)


def test_too_small_a_disk_is_refused_before_anything_is_spent(
    line_recipe: Path, line_run: Path, small_disk: Path, resize: Callable[[int], None]
) -> None:
    """The gate compares the plan with the free bytes, before the target is loaded."""
    for stage in ("regenerate", "prepare", "vocab"):
        shutil.copytree(line_run / stage, small_disk / "run" / stage)
    resize(1 << 20)  # the states alone take that much
    ended = draftproof("extract", line_recipe, "--workdir", small_disk / "run", "-q")
    assert ended.code == 3
    assert "storage.bytes" in ended.sentence()
    assert not (small_disk / "run" / "extract").exists()
    assert not partial(small_disk / "run", "extract").exists()
