"""The main job, whole: a real small LLM, its own answers and states, a trained draft, served by the real vLLM.

Smaller than `make demo` (fewer prompts, fewer steps), but nothing is replaced. The same acceptance must come from the
reference decoder and from the engine that serves the export.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftproof.artifact import read_json, read_manifest
from draftproof.pipeline import STAGE_NAMES

ROOT = Path(__file__).resolve().parent.parent

SMALLER = (
    "regenerate.max_tokens=40",
    "regenerate.batch_size=32",
    "data.validation=0.1",
    "extract.shard_gb=0.01",
    "vocab.size=2048",
    "train.epochs=6",
    "evaluate.prompts=6",
    "evaluate.max_tokens=40",
    "evaluate.serve=vllm",
)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> tuple[Path, dict[str, Any]]:
    """The run folder and the JSON document of the command that made it."""
    folder = tmp_path_factory.mktemp("whole")
    prompts = folder / "prompts.jsonl"
    with (ROOT / "examples" / "prompts" / "demo.jsonl").open() as stream:
        prompts.write_text("".join(line for number, line in enumerate(stream) if number < 64))
    command = [sys.executable, "-m", "draftproof", "run", str(ROOT / "examples" / "smollm2-cpu.yaml"), *SMALLER]
    command += [f"target.model={smollm2}", f"regenerate.prompts={prompts}", "--workdir", str(folder / "run"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run", json.loads(done.stdout)


@pytest.mark.slow
def test_vllm_accepts_what_the_reference_decoder_accepts(whole_run: tuple[Path, dict[str, Any]]) -> None:
    _, document = whole_run
    served = document["served"]
    assert served["engine"].startswith("vllm")
    # Both give the target's own greedy text, token for token, so both verified the same drafts.
    assert (document["identical_to_target"], served["identical_to_target"]) == (1.0, 1.0)
    assert served["acceptance_length"] == pytest.approx(document["acceptance_length"], abs=0.03)
    assert served["acceptance_by_position"] == pytest.approx(document["acceptance_by_position"], abs=0.03)
    assert document["acceptance_length"] > 1.15  # an untrained draft is at 1.02 (docs/quality.md)


@pytest.mark.slow
def test_every_stage_ran_and_every_artifact_is_whole(whole_run: tuple[Path, dict[str, Any]]) -> None:
    run, document = whole_run
    assert document["stages"] == dict.fromkeys(STAGE_NAMES, "made")
    inspected = subprocess.run(
        [sys.executable, "-m", "draftproof", "inspect", str(run), "--verify", "--json"], capture_output=True, text=True, check=False
    )
    assert (inspected.returncode, json.loads(inspected.stdout)["whole"]) == (0, True)
    for name in STAGE_NAMES:
        assert read_manifest(run / name).actual["memory"] < 6 * 2**30, name
    gates = [read_json(path)["stage"] for path in sorted((run / "gates").iterdir())]
    assert gates == list(STAGE_NAMES)
    canary = next(point for point in read_json(run / "gates" / "04-extract.json")["points"] if point["point"] == "loaded")
    assert {finding["status"] for finding in canary["findings"]} == {"pass"}


@pytest.mark.slow
def test_cards_and_report_say_what_was_measured(whole_run: tuple[Path, dict[str, Any]]) -> None:
    run, document = whole_run
    length = f"{document['acceptance_length']:.2f}"
    assert length in (run / "report.html").read_text()
    for engine in ("vllm", "sglang"):
        assert length in (run / "export" / engine / "README.md").read_text()
