"""Rows, tasks and canary evidence for tests of extraction and its gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftproof.extract.canary import run_canary
from draftproof.extract.engines.transformers import TransformersEngine
from draftproof.gate.gate import GateContext, enforce, run_gate
from draftproof.gate.parity import parity_batching, parity_boundaries, parity_logprobs, parity_rows
from draftproof.progress import Progress
from draftproof.recipe import ExtractSettings, Recipe, TargetSettings
from draftproof.records.layout import StoreLayout
from draftproof.records.rows import Row, RowTable, make_row_key, read_rows, write_rows
from draftproof.stage import CanaryEvidence, Checkpoint, StageTask
from draftproof.target.target import Target, open_target

BOUNDARIES = (2, 4, 5)


def write_random_rows(folder: Path, lengths: Sequence[int], *, seed: int = 0, shared: int = 0, vocab: int = 300) -> RowTable:
    """A `prepare` artifact's rows of random ids in 3..vocab-1, the first `shared` tokens being the same in all."""
    generator = np.random.default_rng(seed)
    prefix = generator.integers(3, vocab, shared)
    rows = []
    for number, length in enumerate(lengths):
        ids = generator.integers(3, vocab, length).astype(np.int32)
        ids[:shared] = prefix[:length]
        rows.append(row(ids, f"conversation-{number}"))
    write_rows(folder, rows)
    return read_rows(folder)


def row(token_ids: np.ndarray, conversation: str) -> Row:
    """A training row whose last token is supervised."""
    supervised = np.zeros(len(token_ids), np.bool_)
    supervised[-1] = True
    return Row(
        row_key=make_row_key(token_ids, conversation, -1),
        token_ids=token_ids,
        supervised=supervised,
        turn_start=(len(token_ids) - 1,),
        conversation_key=conversation,
        split="train",
        category="",
        finish_reason="stop",
        source="test:1",
    )


def stage_task(prepare: Path, out: Path, checkpoint: Checkpoint = lambda point, evidence: None) -> StageTask:
    """The stage's task on the CPU."""
    return StageTask(inputs={"prepare": prepare}, out=out, seed=0, device="cpu", checkpoint=checkpoint, progress=Progress(quiet=True))


def open_tm(folder: Path, dtype: str) -> Target:
    """TM computing in float32 or bfloat16."""
    return open_target(TargetSettings(model=str(folder), dtype=dtype))  # type: ignore[arg-type]  # a literal of the caller's


def canary(
    target: Target, rows: RowTable, *, codec: str = "bf16", boundaries: tuple[int, ...] = BOUNDARIES, **settings: Any
) -> CanaryEvidence:
    """Evidence from the real engine."""
    chosen = ExtractSettings(**settings)
    engine = TransformersEngine(target, boundaries, "cpu")
    layout = StoreLayout(boundaries, target.config.hidden_size, codec, target.config.vocab_size, engine.dtype)
    engine.load()
    try:
        return run_canary(engine, target, rows, layout, chosen.canary_rows, chosen.batch_tokens)
    finally:
        engine.close()


def gate_context(
    target: Target | None, evidence: Any, *, out: Path = Path("unused"), inputs: Mapping[str, Path] | None = None
) -> GateContext:
    """The gate at the point `loaded`."""
    recipe = Recipe.model_validate(
        {"target": {"model": "unused"}, "data": {"train": ["unused"]}, "run": {"dir": "unused", "device": "cpu"}}
    )
    return GateContext("extract", "loaded", recipe, target, inputs or {}, out, None, evidence)


def gate_checkpoint(target: Target) -> Checkpoint:
    """The real gate of extraction at the point `loaded`; other points pass."""

    def checkpoint(point: str, evidence: Any) -> None:
        if point == "loaded":
            checks = (parity_rows, parity_logprobs, parity_batching, parity_boundaries)
            enforce(run_gate(gate_context(target, evidence), checks, protects="the bulk"))

    return checkpoint
