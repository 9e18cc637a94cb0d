"""The whole line on the tiny target, through the installed console script: start it, freeze it at work, read what it left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STAGES = ("regenerate", "prepare", "vocab", "extract", "train", "export", "evaluate")

_WORDS = (
    *("quick", "brown", "fox", "river", "capital", "country", "people", "answer"),
    *("question", "book", "ship", "world", "numbers", "user", "story", "sum"),
)

_RECIPE = """\
target: {{model: {target}}}
regenerate: {{prompts: prompts.jsonl, max_tokens: 24, batch_size: 8}}
data: {{validation: 0.1}}
vocab: {{size: 96}}
extract: {{boundaries: [2, 4, 5], shard_gb: 1.0e-4, canary_rows: 4}}
train: {{steps: 60, unroll: 3, batch_tokens: 256}}
evaluate: {{draft_tokens: 3, max_tokens: 16, prompts: 6}}
gates: {{waive: {waive}}}
run: {{threads: 1, device: cpu}}
"""

_PROGRESS = {"regenerate": "journal.jsonl", "extract": "journal.jsonl", "train": "resume.safetensors"}
"""What a stage goes on from; the others start over."""

_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str

    def sentence(self) -> str:
        """Its one line on stderr."""
        lines = self.stderr.splitlines()
        assert len(lines) == 1, self.stderr
        assert "Traceback" not in self.stderr
        return lines[0]

    def document(self) -> dict[str, Any]:
        """Its one JSON document, which says what the process said."""
        assert self.stdout.count("\n") == 1, self.stdout
        document: dict[str, Any] = json.loads(self.stdout)
        assert document["exit_code"] == self.code
        assert {"command", "version", "status", "message"} <= set(document)
        return document


def write_job(folder: Path, target: Path, *, waive: dict[str, str] | None = None) -> Path:
    """A recipe and its 60 prompts; returns the recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "prompts.jsonl").open("w") as stream:
        for i in range(60):
            one, two, three = _WORDS[i % 16], _WORDS[(i * 7 + 3) % 16], _WORDS[(i * 5 + i // 16) % 16]
            text = f"What is the {one} of the {two} and the {three}?"
            record = {"id": f"p{i}", "category": ("ask", "tell")[i % 2], "messages": [{"role": "user", "content": text}]}
            stream.write(json.dumps(record) + "\n")
    recipe = folder / "recipe.yaml"
    recipe.write_text(_RECIPE.format(target=target, waive=json.dumps(waive or {})))
    return recipe


def start(*arguments: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start the console script."""
    script = Path(sys.executable).with_name("draftproof")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen(
        [script, *map(str, arguments)], cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen[str]) -> Ended:
    """Wait for a started command."""
    stdout, stderr = process.communicate(timeout=_PATIENCE_S)
    return Ended(process.returncode, stdout, stderr)


def draftproof(*arguments: str | Path, cwd: Path | None = None) -> Ended:
    """Run the console script to its end."""
    return end(start(*arguments, cwd=cwd))


def frozen_at_work(recipe: Path, run: Path, stage: str, *more: str) -> subprocess.Popen[str]:
    """`draftproof run` of a recipe (and `more` arguments), frozen by SIGSTOP while `stage` is at work and has made progress of its own.

    The short stages last milliseconds; when one is missed its artifact is removed and the command started again.
    """
    for _ in range(5):
        before = _progress(run, stage)
        process = start("run", recipe, "--workdir", run, "-q", *more)
        deadline = time.monotonic() + _PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline:
            if _progress(run, stage) in (None, before):
                time.sleep(0.0005)
                continue
            process.send_signal(signal.SIGSTOP)
            while process.poll() is None and _state(process.pid) != "T":
                time.sleep(0.0005)
            if _progress(run, stage) not in (None, before) and not (run / stage).exists():
                return process
            process.send_signal(signal.SIGCONT)
            break
        ended = end(process)
        assert ended.code == 0, f"{stage} was not reached: {ended.stderr}"
        shutil.rmtree(run / stage)
    raise AssertionError(f"{stage} was never seen at work.")


def signalled(process: subprocess.Popen[str], number: signal.Signals) -> Ended:
    """Send a frozen command a signal, let it go on, and wait for its end."""
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    return end(process)


def manifests(run: Path) -> dict[str, dict[str, Any]]:
    """The manifest of every stage."""
    return {stage: json.loads((run / stage / "manifest.json").read_text()) for stage in STAGES}


def contents(run: Path) -> dict[str, tuple[dict[str, str], list[str]]]:
    """What every stage made: its content hashes and the names of its files."""
    return {stage: (manifest["contents"], sorted(manifest["files"])) for stage, manifest in manifests(run).items()}


def trace(folder: Path, stage: str) -> object:
    """Something of a stage's work that making it again would change: an inode, a time, a measured rate."""
    if stage == "regenerate":
        return (folder / "journal.jsonl").stat().st_ino
    if stage == "extract":
        return (folder / "shard-00000.safetensors").stat().st_mtime_ns
    return (folder / "metrics.jsonl").read_text().splitlines()[0]


def partial(run: Path, stage: str) -> Path:
    """Where a stage's unfinished work lies."""
    return run / f".{stage}.partial"


def assert_whole(run: Path) -> None:
    """`draftproof inspect` says so, every byte hashed again, and nothing of the work is left lying about."""
    ended = draftproof("inspect", run, "--verify", "--json")
    document = ended.document()
    assert ended.code == 0, ended.stderr
    assert document["whole"]
    assert [state["state"] for state in document["stages"].values()] == ["whole"] * len(STAGES)
    assert sorted(path.name for path in run.iterdir()) == sorted([".lock", "gates", "recipe.yaml", "report.html", *STAGES])


def _progress(run: Path, stage: str) -> tuple[int, int] | None:
    """Changes whenever the stage has made something that it could go on from; None before that."""
    try:
        stat = (partial(run, stage) / _PROGRESS.get(stage, "ingredients.json")).stat()
    except FileNotFoundError:
        return None
    return (stat.st_mtime_ns, stat.st_size) if stat.st_size else None


def _state(pid: int) -> str:
    """The kernel's letter for a process: R, S, T (stopped), Z."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
