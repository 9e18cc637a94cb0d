"""Extract: the target reads every row once, and its hidden states are stored.

    rows -> shards (planned from their lengths) -> batches (rows of like length) -> engine -> sealed shard

A shard is the unit of work: batches never cross one, so a killed run goes on at the last sealed shard and makes
the same bytes as an undisturbed one (same device, same thread count). The target is loaded once; the canary rows go
through it first, and the gate may end the run there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from draftproof.artifact import Manifest
from draftproof.extract.canary import keyed, run_canary
from draftproof.extract.engines.base import Engine
from draftproof.extract.engines.transformers import TransformersEngine
from draftproof.progress import Meter
from draftproof.recipe import ExtractSettings
from draftproof.records.layout import StoreLayout, plan_shards, token_bytes
from draftproof.records.rows import RowTable, read_rows
from draftproof.records.store import Store, StoreWriter
from draftproof.stage import Outcome, StageTask
from draftproof.target.boundaries import check_boundaries, default_boundaries
from draftproof.target.loaded import compute_dtype
from draftproof.target.target import Target

VERSION, NEEDS = 1, ("prepare",)


def ingredients(settings: ExtractSettings, target: Target, inputs: Mapping[str, Manifest]) -> dict[str, Any]:
    """What the states depend on: token ids (not masks), target, dtype, boundaries, codec, and how rows are batched."""
    return {
        "target": target.fingerprint,
        "token_ids": inputs["prepare"].contents["token_ids"],
        "dtype": target.settings.dtype,
        "boundaries": list(_boundaries(settings, target)),
        **settings.model_dump(mode="json", include={"engine", "codec", "shard_gb", "batch_tokens"}),
    }


def run(task: StageTask, settings: ExtractSettings, target: Target) -> Outcome:
    """Make the store in `task.out`, or go on with it. Raises what the gate raises, and the OSError of a full disk."""
    rows = read_rows(task.inputs["prepare"])
    boundaries = _boundaries(settings, target)
    layout = StoreLayout(
        boundaries=boundaries,
        hidden_size=target.config.hidden_size,
        codec=settings.codec,
        vocab_size=target.config.vocab_size,
        dtype=compute_dtype(target, task.device),
    )
    distinct = _distinct(rows)
    total = int(rows.lengths[distinct].sum())
    shards = [distinct[members].tolist() for members in plan_shards(rows.lengths[distinct].tolist(), layout, settings.shard_gb)]
    engine = TransformersEngine(target, boundaries, task.device)
    limits = BatchLimits.of(settings.batch_tokens, task.device)
    done_tokens, seconds = 0, 0.0
    with StoreWriter(task.out, layout, shards) as writer, task.progress.meter("extract", total, "tokens") as meter:
        sealed = writer.sealed()
        left = [index for index in range(len(shards)) if index not in sealed]
        if left:
            task.checkpoint("loading", None)
            try:
                engine.load()
                task.checkpoint("loaded", run_canary(engine, target, rows, layout, settings.canary_rows, limits.most))
                meter.resume(sum(int(rows.lengths[shards[index]].sum()) for index in sealed))
                started = time.monotonic()
                for index in left:
                    bytes_left = (total - int(meter.done)) * token_bytes(layout)
                    task.checkpoint("running", {"shard": index, "shards": len(shards), "bytes_left": bytes_left})
                    done_tokens += _fill_shard(writer, engine, rows, index, limits, meter)
                seconds = time.monotonic() - started
            finally:
                engine.close()
    store = Store(task.out)
    rate = round(done_tokens / seconds, 1) if done_tokens else None
    return Outcome(
        counts={
            "rows": len(store),
            "tokens": store.tokens,
            "bytes": store.bytes,
            "tokens_per_second": rate,
            "engine": engine.name,
            "shards": len(shards),
            "dtype": layout.dtype,
            "codec": layout.codec,
            "boundaries": list(boundaries),
        },
        contents=store.contents(),
        actual={} if rate is None else {"tokens_per_second": rate},
    )


@dataclass(frozen=True)
class BatchLimits:
    """How large a padded batch may get, and from where on it pays to start another one."""

    most: int
    """Tokens, padding included; a longer row goes alone."""
    enough: int
    """Tokens that already keep the device busy: beyond them no row joins that would be padded by more than a tenth."""

    @classmethod
    def of(cls, batch_tokens: int, device: str) -> BatchLimits:
        """The recipe's limit; on a CPU at most 1,024 tokens, which stay in its caches.

        Measured, SmolLM2-135M, float32, tokens per CPU second: 314 at 128 tokens a batch, 346 at 512, 369 at 1,024,
        306 at 2,048, 314 at 4,096.
        """
        return cls(min(batch_tokens, 1024), 128) if device == "cpu" else cls(batch_tokens, 4096)


def plan_batches(lengths: np.ndarray, members: Sequence[int], limits: BatchLimits) -> Iterator[list[int]]:
    """The rows of one shard in batches.

    Longest first: rows of like length meet, so that padding stays small, and a batch that is too large for the memory
    fails at the start.
    """
    batch: list[int] = []
    for row in sorted(members, key=lambda row: (-int(lengths[row]), row)):
        if batch:
            width, filled = int(lengths[batch[0]]), int(lengths[batch[0]]) * len(batch)
            if filled + width > limits.most or (filled >= limits.enough and lengths[row] < 0.9 * width):
                yield batch
                batch = []
        batch.append(row)
    if batch:
        yield batch


def _fill_shard(writer: StoreWriter, engine: Engine, rows: RowTable, index: int, limits: BatchLimits, meter: Meter) -> int:
    """Run the rows of one shard and seal it; returns its tokens."""
    layout, members = writer.layout, writer.shards[index]
    lengths = [int(rows.lengths[row]) for row in members]
    starts = dict(zip(members, np.cumsum([0, *lengths[:-1]]).tolist(), strict=True))
    N, A, H = sum(lengths), layout.aux, layout.hidden_size
    aux = torch.empty(N, A, H, dtype=torch.bfloat16)
    final = torch.empty(N, H, dtype=torch.bfloat16)
    top1 = torch.empty(N, dtype=torch.int32)
    for batch in plan_batches(rows.lengths, members, limits):
        asked = {rows.keys[row]: rows.token_ids(row) for row in batch}
        answers = keyed(engine.states(asked), asked)
        for row in batch:
            own, answer = slice(starts[row], starts[row] + int(rows.lengths[row])), answers[rows.keys[row]]
            aux[own], final[own], top1[own] = answer.aux, answer.final, answer.teacher_top1
        meter.advance(sum(len(ids) for ids in asked.values()))
    token_ids = torch.from_numpy(np.concatenate([rows.token_ids(row) for row in members]))
    writer.write_shard(index, [rows.keys[row] for row in members], lengths, token_ids, aux, final, top1)
    return N


def _distinct(rows: RowTable) -> np.ndarray:
    """int64: the first row of every key. The same conversation twice in the data has the same states."""
    first: dict[str, int] = {}
    for row, key in enumerate(rows.keys):
        first.setdefault(key, row)
    return np.fromiter(first.values(), np.int64, len(first))


def _boundaries(settings: ExtractSettings, target: Target) -> tuple[int, ...]:
    return check_boundaries(settings.boundaries or default_boundaries(target.config.layers), target.config.layers)
