"""A run folder as the pipeline leaves it, built through the real artifact API with figures of a small run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftproof.artifact import open_build, write_atomic, write_json
from draftproof.recipe import load
from draftproof.stage import Outcome

STAGES = ("regenerate", "prepare", "vocab", "extract", "train", "export", "evaluate")

RECIPE = """\
target: {model: models/SmolLM2-135M-Instruct.Q4_1.gguf}
regenerate: {prompts: prompts.jsonl, max_tokens: 160}
vocab: {size: 4096}
extract: {codec: fp8}
train: {unroll: 3, epochs: 3}
gates: {waive: {data.length_stops: "Short answers are cut on purpose in this demo."}}
run: {dir: runs/smollm2-cpu}
"""

COUNTS: dict[str, dict[str, Any]] = {
    "regenerate": {"conversations": 480, "finish_reasons": {"stop": 371, "length": 109}, "tokens": 52_114},
    "prepare": {
        "conversations": {"in": 480, "kept": 366, "changed": {"cut to max_length": 3, "no end token after a length stop": 106},
                          "dropped": {"nothing supervised": 5}},
        "rows_out": 475, "tokens": 74_902, "supervised_tokens": 51_377, "splits": {"train": 451, "validation": 24},
        "finish_reasons": {"stop": 371, "length": 109},
    },
    "vocab": {"size": 4096, "target_size": 49_152, "coverage": {"train": 0.9871, "validation": 0.9764}, "filled": 912},
    "extract": {"rows": 475, "tokens": 74_902, "bytes": 345_000_000, "tokens_per_second": 803.0, "engine": "transformers"},
    "train": {"steps": 120, "best_step": 105, "tokens_per_second": 4_480.0, "acceptance_length": 1.71},
    "export": {"formats": ["vllm", "sglang"]},
    "evaluate": {"acceptance_length": 1.68},
}  # fmt: skip

ACTUAL = {
    "regenerate": {"seconds": 131.4, "tokens_per_second": 396.6},
    "prepare": {"seconds": 2.1, "tokens_per_second": 35_668.0},
    "vocab": {"seconds": 0.1},
    "extract": {"seconds": 93.3, "tokens_per_second": 803.0, "memory": 1_090_000_000.0},
    "train": {"seconds": 141.0, "tokens_per_second": 4_480.0},
    "export": {"seconds": 1.9},
    "evaluate": {"seconds": 48.2, "draft_tokens_per_second": 253.2},
}

PREDICTED = {
    "regenerate": {"seconds": 150.0, "bytes": 400_000.0, "files": 1.0},
    "extract": {"seconds": 104.0, "bytes": 346_000_000.0, "memory": 1_300_000_000.0},
    "train": {"seconds": 120.0, "bytes": 62_000_000.0, "files": 3.0},
    "export": {"bytes": 110_000_000.0, "files": 8.0},
}

FINDINGS: dict[str, list[dict[str, Any]]] = {
    "regenerate": [{"check": "target.shards", "status": "pass", "evidence": "1 of 1 shards whole, 272 tensors, 269 MB."},
                   {"check": "storage.bytes", "status": "pass", "evidence": "0.4 MB wanted, 81.2 GB free on /data."}],
    "prepare": [{"check": "data.template", "status": "pass", "evidence": "ChatML; prompts are prefixes in 20 of 20 sampled."}],
    "vocab": [],
    "extract": [{"check": "data.supervised", "status": "pass", "evidence": "68.6 % of the tokens are supervised (51,377 of 74,902)."},
                {"check": "data.length_stops", "status": "fail", "evidence": "22.7 % of the answers end at max_tokens.",
                 "remedy": "Raise regenerate.max_tokens.", "waived": "Short answers are cut on purpose in this demo."},
                {"check": "storage.bytes", "status": "pass", "evidence": "346 MB wanted, 81.2 GB free on /data."},
                {"check": "storage.inodes", "status": "pass", "evidence": "3 files wanted, 5,301,122 inodes free."}],
    "train": [{"check": "storage.bytes", "status": "pass", "evidence": "62 MB wanted, 80.9 GB free on /data."}],
    "export": [{"check": "target.head", "status": "pass", "evidence": "the head is tied to model.embed_tokens.weight, bfloat16."}],
    "evaluate": [{"check": "data.bench", "status": "warn", "evidence": "10 prompts in the smallest category: its figure is rough.",
                  "remedy": "Add prompts to evaluate.bench."}],
}  # fmt: skip

PARITY = [
    {
        "check": "parity.logprobs",
        "status": "pass",
        "evidence": "10 rows: largest difference to the engine's own log-probabilities 0.013 nat.",
    },
    {
        "check": "parity.boundaries",
        "status": "pass",
        "evidence": "Boundaries 2, 15, 27 equal the forward hooks' within fp8 rounding, 10 of 10 rows.",
    },
]

RESULT: dict[str, Any] = {
    "acceptance_length": 1.68,
    "acceptance_by_position": [0.42, 0.18, 0.08],
    "by_category": {
        "explain": {"acceptance_length": 1.74, "prompts": 20, "tokens": 2_311},
        "list": {"acceptance_length": 1.81, "prompts": 16, "tokens": 1_804},
        "story": {"acceptance_length": 1.49, "prompts": 14, "tokens": 1_790},
        "arithmetic": {"acceptance_length": 1.66, "prompts": 10, "tokens": 702},
    },
    "draft_tokens": 3,
    "decoding": "greedy, chain",
    "engine": "transformers reference, float32",
    "prompts": 60,
    "identical_to_target": 59 / 60,
    "baselines": {
        "prompt_lookup": {"acceptance_length": 1.21, "acceptance_by_position": [0.11, 0.06, 0.04]},
        "untrained": {"acceptance_length": 1.01, "acceptance_by_position": [0.01, 0.0, 0.0]},
    },
}


SAMPLE = [
    {
        "source": f"conversations.jsonl:{line}",
        "before_text": ["<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"],
        "first_supervised_text": first,
    }
    for line, first in ((1, ["The", " sky", " is", " blue", " because"]), (97, ["Here", " are", " three", " ideas", ":"]))
]


def build_run(
    parent: Path,
    *,
    until: str = "evaluate",
    unfinished: str | None = None,
    recipe: str = RECIPE,
    findings: Mapping[str, list[dict[str, Any]]] | None = None,
    result: Mapping[str, Any] | None = None,
    counts: Mapping[str, dict[str, Any]] | None = None,
) -> Path:
    """A run folder inside `parent`, done up to and with the stage `until`."""
    run = parent / "run"
    run.mkdir()
    source = parent / "smollm2-cpu.yaml"
    source.write_text(recipe)
    loaded = load(source, ["train.batch_tokens=4096"])
    write_atomic(run / "recipe.yaml", loaded.resolved_yaml().encode())
    done = STAGES[: STAGES.index(until) + 1]
    for number, stage in enumerate(STAGES, start=1):
        if stage in done or stage == unfinished or stage in (findings or {}):
            _write_gate(run, number, stage, (findings or {}).get(stage, FINDINGS[stage]))
        if stage not in done and stage != unfinished:
            continue
        artifact = open_build(run / stage, stage=stage, ingredients={"stage_version": 1}, predicted=PREDICTED.get(stage))
        for name, content in _files(stage, result or RESULT).items():
            (artifact.folder / name).write_text(content)
        if stage in done:
            artifact.finish(Outcome(counts=(counts or {}).get(stage, COUNTS[stage]), contents={}, actual=ACTUAL[stage]))
    return run


def _write_gate(run: Path, number: int, stage: str, findings: list[dict[str, Any]]) -> None:
    points = [_point("before", findings)]
    if stage == "extract" and points[0]["verdict"] in ("pass", "warn"):
        points.append(_point("loaded", PARITY))
    protects = {"extract": "a 2 min pass over 74,902 tokens", "train": "2 min of training"}.get(stage, "")
    write_json(run / "gates" / f"{number:02d}-{stage}.json", {"stage": stage, "protects": protects, "points": points})


def _point(point: str, findings: list[dict[str, Any]]) -> dict[str, Any]:
    complete = [{"remedy": "", "seconds": 0.004, "waived": None, **finding} for finding in findings]
    statuses = {finding["status"] for finding in complete if finding["waived"] is None}
    verdict = next((status for status in ("fail", "unknown", "warn") if status in statuses), "pass")
    return {"point": point, "verdict": verdict, "findings": complete}


def _files(stage: str, result: Mapping[str, Any]) -> dict[str, str]:
    if stage == "train":
        lines = [_step(step) for step in range(1, 121)] + [_forecast(step) for step in range(15, 121, 15)]
        lines.sort(key=lambda line: line["step"])
        return {"metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines), "draft.json": "{}"}
    if stage == "evaluate":
        timing = {"target_alone_tokens_per_second": 213.1, "draft_tokens_per_second": 253.2, "prompt_lookup_tokens_per_second": 219.7}
        return {"result.json": json.dumps(result), "timing.json": json.dumps(timing)}
    if stage == "prepare":
        return {"report.json": json.dumps({"sample": SAMPLE})}
    if stage == "vocab":
        return {"coverage.json": json.dumps(COUNTS["vocab"]["coverage"])}
    return {"work.bin": "x" * 4321}


def _step(step: int) -> dict[str, Any]:
    noise = 0.12 * math.sin(step * 2.7) + 0.08 * math.sin(step * 1.3)
    loss = 3.1 + 5.2 * math.exp(-step / 28) + noise
    return {
        "kind": "step", "step": step, "loss": loss, "loss_by_step": [loss - 0.35, loss + 0.05, loss + 0.3], "learning_rate": 1e-3,
        "gradient_norm": 0.6, "tokens_per_second": 4_480.0, "supervised_seen": step * 1_300,
    }  # fmt: skip


def _forecast(step: int) -> dict[str, Any]:
    length = 1.71 - 0.68 * math.exp(-step / 40) - (0.02 if step > 105 else 0.0)
    return {
        "kind": "forecast", "step": step,
        "by_walk": {"acceptance_length": length, "by_position": [0.43, 0.19, 0.09]},
        "by_start": {"acceptance_length": length + 0.11, "by_position": [0.47, 0.23, 0.12]},
    }  # fmt: skip
