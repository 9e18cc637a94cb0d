"""A few rows through the engine before the bulk, with all that the gate needs to judge them.

The rows run together, as the bulk will run (states and top-1 as they will be stored), then singly with the engine's
own log-probabilities; a target small enough is also asked for every boundary in another way. The gate
(`gate/parity.py`) compares.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from draftproof.errors import DataError
from draftproof.extract.engines.base import Engine, RowStates
from draftproof.extract.engines.transformers import TransformersEngine, reference_boundaries
from draftproof.records.codec import decode, encode
from draftproof.records.layout import StoreLayout
from draftproof.records.rows import RowTable
from draftproof.stage import CanaryEvidence, CanaryRow
from draftproof.target.target import Target

REFERENCE_BELOW = 2_000_000_000
"""Parameters: below this, states of all boundaries for ten rows cost less than a second on a GPU."""
REFERENCE_BYTES = 1 << 29
"""Of float32 reference states in memory: 7,500 tokens of a 30-layer target of width 576. Short rows come first."""
_PREFIX = 16


def run_canary(engine: Engine, target: Target, rows: RowTable, layout: StoreLayout, count: int, batch_tokens: int) -> CanaryEvidence:
    """Run the canary rows. Raises DataError when the engine loses or invents rows."""
    chosen = {rows.keys[index]: rows.token_ids(index) for index in choose_rows(rows, count, layout.aux)}
    together: dict[str, RowStates] = {}
    for batch in _packed(chosen, batch_tokens):
        together |= keyed(engine.states(batch), batch)
    evidence = []
    referenced = _with_reference(chosen, target) if isinstance(engine, TransformersEngine) else set()
    for key, ids in chosen.items():
        alone = keyed(engine.states({key: ids}, logprobs=True), {key: ids})[key]
        if alone.logprobs is None:
            raise DataError("The engine gave no log-probabilities.", where=f"row {key}", remedy="Report this as a fault of draftproof.")
        reference = reference_boundaries(engine.model, ids) if key in referenced and isinstance(engine, TransformersEngine) else None
        evidence.append(
            CanaryRow(
                row_key=key,
                token_ids=ids,
                aux=_as_stored(together[key].aux, layout.codec),
                final=together[key].final.float().numpy(),
                engine_logprobs=alone.logprobs.numpy(),
                engine_top1=together[key].teacher_top1.long().numpy(),
                batched_aux=together[key].aux.float().numpy(),
                rerun_aux=alone.aux.float().numpy(),
                reference=None if reference is None else reference.numpy(),
            )
        )
    return CanaryEvidence(tuple(evidence), layout.boundaries, engine.dtype, layout.codec)


def choose_rows(rows: RowTable, count: int, aux: int) -> list[int]:
    """At most `count` rows, the same for the same table: the longest, two of equal length, two that share a prefix,
    the shortest, and the rest spread evenly.

    Equal lengths, since swapped rows then have the right shapes; a shared prefix, since caches serve it; never a row of
    `aux` tokens if there is another, since swapped axes would fit.
    """
    lengths = rows.lengths
    usable = np.flatnonzero((lengths > 1) & (lengths != aux))
    if not len(usable):
        usable = np.arange(len(rows))
    by_length = usable[np.argsort(lengths[usable], kind="stable")]
    wanted = [int(by_length[-1]), *_twins(rows, by_length), *_share_prefix(rows, usable), int(by_length[0])]
    wanted += [int(usable[place]) for place in np.linspace(0, len(usable) - 1, count, dtype=np.int64)]
    wanted += [int(row) for row in usable[:count]]
    return list(dict.fromkeys(wanted))[:count]


def keyed(answers: Mapping[str, RowStates], batch: Mapping[str, np.ndarray]) -> dict[str, RowStates]:
    """The answers, when they are those of exactly these rows, each as long as its row; else DataError."""
    if answers.keys() != batch.keys():
        lost, new = sorted(batch.keys() - answers.keys()), sorted(answers.keys() - batch.keys())
        raise DataError(
            f"The engine gave back {len(answers)} rows for {len(batch)}: {len(lost)} lost, {len(new)} unknown.",
            where=f"row {(lost or new)[0]}",
            remedy="Report it with the recipe; `extract.engine` may have another choice.",
        )
    for key, ids in batch.items():
        found = (len(answers[key].aux), len(answers[key].final), len(answers[key].teacher_top1))
        if found != (len(ids),) * 3:
            raise DataError(
                f"The engine gave states of {min(found)} tokens for a row of {len(ids)}.",
                where=f"row {key}",
                remedy="Usually prefix caching is on in the engine: turn it off.",
            )
    return dict(answers)


def _as_stored(aux: Tensor, codec: str) -> np.ndarray:
    return decode(encode(aux, codec), codec, torch.float32).numpy()


def _packed(rows: Mapping[str, np.ndarray], batch_tokens: int) -> list[dict[str, np.ndarray]]:
    """The rows in as few padded batches as fit, mates of different lengths on purpose."""
    batches: list[dict[str, np.ndarray]] = []
    width = 0
    for key, ids in rows.items():
        if batches and max(width, len(ids)) * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1][key] = ids
            width = max(width, len(ids))
        else:
            batches.append({key: ids})
            width = len(ids)
    return batches


def _twins(rows: RowTable, by_length: np.ndarray) -> list[int]:
    """Two rows of equal length and different tokens, the longest such, or none."""
    for later, earlier in zip(by_length[::-1], by_length[-2::-1], strict=False):
        if rows.lengths[later] == rows.lengths[earlier] and not np.array_equal(rows.token_ids(later), rows.token_ids(earlier)):
            return [int(earlier), int(later)]
    return []


def _share_prefix(rows: RowTable, usable: np.ndarray) -> list[int]:
    """The first two rows whose first 16 tokens are the same, or none."""
    seen: dict[bytes, int] = {}
    for row in usable:
        start = rows.token_ids(row)[:_PREFIX]
        if len(start) == _PREFIX:
            first = seen.setdefault(start.tobytes(), int(row))
            if first != row:
                return [first, int(row)]
    return []


def _with_reference(chosen: Mapping[str, np.ndarray], target: Target) -> set[str]:
    """Keys of the rows that get reference states: the shortest first, as far as the memory goes; none for a large target."""
    weights = target.weights()
    if sum(int(np.prod(weights.info(name).shape)) for name in weights.names) >= REFERENCE_BELOW:
        return set()
    shortest = sorted(chosen, key=lambda key: len(chosen[key]))
    token = 4 * (target.config.layers + 1) * target.config.hidden_size
    size = np.cumsum([len(chosen[key]) * token for key in shortest])
    return {key for key, end in zip(shortest, size, strict=True) if end <= REFERENCE_BYTES or key == shortest[0]}
