"""What a stage receives and what it gives back: the only things that pipeline and stages share.

A stage is a function `run(task, settings, target) -> Outcome` in its folder's `stage.py`, with two
constants beside it: `VERSION` (raised by its authors whenever results would change) and `NEEDS` (the
artifacts it reads). It sees its own recipe section, its inputs and its output folder, and nothing else.
Gates reach it only as the `checkpoint` callable of its task.

    VERSION, NEEDS = 1, ("prepare",)

    def run(task: StageTask, settings: VocabSettings, target: Target) -> Outcome:
        rows = read_rows(task.inputs["prepare"])
        ...
        return Outcome(counts={"size": n}, contents={"mapping": hash_file(path)})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

    from draftproof.progress import Progress

Point = Literal["before", "loading", "loaded", "running"]
"""Moments at which a stage shows evidence and may be ended: nothing spent yet, the target loading,
the target loaded and proven on a few rows, bulk work under way."""


@dataclass(frozen=True)
class CanaryRow:
    """One row run through the engine that will do the bulk, with what the engine itself says of it.

    Shapes for T tokens, A aux boundaries, H hidden size, L layers; all float32 numpy.
    """

    row_key: str
    token_ids: np.ndarray
    """int32 [T]"""
    aux: np.ndarray
    """[T, A, H], as the store's codec would give it back."""
    final: np.ndarray
    """[T, H], boundary L, before the final norm."""
    engine_logprobs: np.ndarray
    """[T-1]: the engine's own log-probability of token t+1 after token t."""
    engine_top1: np.ndarray
    """int64 [T]: the engine's own most likely next token."""
    batched_aux: np.ndarray
    """[T, A, H] of the same run, before the codec."""
    rerun_aux: np.ndarray
    """[T, A, H] of a second run with other batch mates (single if the first was batched), before the codec."""
    reference: np.ndarray | None
    """[T, L+1, H]: every boundary as `output_hidden_states` gives it, another way than the engine's hooks; None where the
    target is too large for that."""


@dataclass(frozen=True)
class CanaryEvidence:
    """What `extract` shows at the point `loaded`, before it spends anything on the bulk."""

    rows: tuple[CanaryRow, ...]
    boundaries: tuple[int, ...]
    dtype: str
    codec: str


@dataclass(frozen=True)
class StagePlan:
    """What a stage is expected to take, from shapes alone. Unknown figures are None."""

    bytes: int
    """Bytes it will leave or need on disk at its peak."""
    files: int
    seconds: float | None
    memory: int | None
    """Peak host memory in bytes."""
    protects: str
    """What a failure in the middle would cost, for people: `a 4 min pass over 60,000 tokens`."""
    gpu_memory: int | None = None
    """Bytes that each GPU must have free at least: the weights."""


Checkpoint = Callable[[Point, Any], None]
"""Runs the gate of this stage at `point`; raises `Refused` or `Undecided`; returns when it may go on."""


@dataclass(frozen=True)
class StageTask:
    """All that a stage may touch."""

    inputs: Mapping[str, Path]
    """Folder of each artifact named in NEEDS, already verified."""
    out: Path
    """The stage's own folder. May hold its own earlier, unfinished work of the same ingredients."""
    seed: int
    device: str
    """`cpu` or `cuda`."""
    checkpoint: Checkpoint
    progress: Progress


@dataclass(frozen=True)
class Outcome:
    """What a stage reports when it is done."""

    counts: dict[str, Any]
    """Numbers for people and `--json`, the keys of design.md's table."""
    contents: dict[str, str]
    """Named hashes of what was made. Later stages depend on these, not on the settings that made them."""
    actual: dict[str, float] = field(default_factory=dict)
    """Measured cost (`tokens_per_second`, ...), set beside the plan's prediction in the report."""
    documents: tuple[str, ...] = ()
    """Files for people that may be completed later; listed, but not part of the proof."""
