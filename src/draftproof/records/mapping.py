"""The draft vocabulary: which target token each draft token stands for.

    mapping = VocabMapping.from_kept(np.array([0, 4, 9]), vocab_size=10)
    mapping.d2t         # [0, 3, 7]: offsets, target id = draft id + d2t[draft id]
    mapping.kept        # [0, 4, 9]

`d2t` holds offsets in this family of checkpoints. Read as absolute ids it would give other tokens without an
error, so the check compares it with `t2d` wherever a mapping is made, saved or loaded.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from draftproof.artifact import write_atomic
from draftproof.errors import DataError, UsageError

MAPPING = "mapping.safetensors"


@dataclass(frozen=True, eq=False)
class VocabMapping:
    """Vd draft ids in V target ids."""

    d2t: np.ndarray
    """int64 [Vd]: offsets."""
    t2d: np.ndarray
    """bool [V]: whether the target id is in the draft vocabulary."""

    @classmethod
    def from_kept(cls, kept_ids: np.ndarray, vocab_size: int) -> VocabMapping:
        """The mapping that keeps these target ids (any order, no duplicates) of `vocab_size` = rows of the target's LM head."""
        given = np.asarray(kept_ids)
        check_draft_size(given.size, vocab_size)
        if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
            raise DataError("The kept ids are not a flat list of integers.", remedy="Give target token ids.")
        kept = np.sort(given.astype(np.int64))
        t2d = np.zeros(vocab_size, np.bool_)
        t2d[kept[(kept >= 0) & (kept < vocab_size)]] = True  # ids out of range are left for check() to name
        return cls(kept - np.arange(kept.size), t2d).check()

    @property
    def kept(self) -> np.ndarray:
        """int64 [Vd]: the target ids, ascending."""
        kept: np.ndarray = np.arange(self.d2t.size) + self.d2t
        return kept

    @property
    def is_full(self) -> bool:
        """Whether the draft vocabulary is the target's."""
        return self.d2t.size == self.t2d.size

    def check(self, where: str | None = None) -> VocabMapping:
        """This mapping, if it holds together; raises DataError that names the first violated rule."""
        if wrong := self._first_problem():
            raise DataError(f"The draft vocabulary is damaged: {wrong}.", where=where, remedy="Make it again with --from vocab.")
        return self

    def _first_problem(self) -> str | None:
        d2t, t2d = self.d2t, self.t2d
        if d2t.dtype != np.int64 or d2t.ndim != 1 or t2d.dtype != np.bool_ or t2d.ndim != 1:
            return f"d2t must be int64 [Vd] and t2d bool [V], found {d2t.dtype} {list(d2t.shape)} and {t2d.dtype} {list(t2d.shape)}"
        if not 0 < d2t.size <= t2d.size:
            return f"it has {d2t.size} entries for a target vocabulary of {t2d.size}"
        kept = self.kept
        if kept.min() < 0 or kept.max() >= t2d.size:
            worst = int(kept.max() if kept.max() >= t2d.size else kept.min())
            return f"target id {worst} is outside 0..{t2d.size - 1} (are these absolute ids? d2t holds offsets)"
        if (np.diff(kept) <= 0).any():
            at = int(np.flatnonzero(np.diff(kept) <= 0)[0])
            return f"target ids do not strictly increase at draft id {at + 1}"
        if not np.array_equal(np.flatnonzero(t2d), kept):
            return "t2d is not true exactly at the target ids of d2t"
        return None


def check_draft_size(size: object, vocab_size: int) -> int:
    """`size` as an int, if it can be the number of draft tokens of a target with `vocab_size` LM-head rows."""
    if isinstance(size, bool) or not isinstance(size, numbers.Integral):
        raise UsageError(f"vocab.size must be an integer, not {size!r}.", remedy=f"Give a number from 1 to {vocab_size}.")
    if not 0 < int(size) <= vocab_size:
        raise UsageError(
            f"A draft vocabulary of {size} tokens is impossible: the target's has {vocab_size}.",
            remedy=f"Set vocab.size to a number from 1 to {vocab_size}, or to null for the whole vocabulary.",
        )
    return int(size)


def save_mapping(folder: Path, mapping: VocabMapping) -> Path:
    """Write `mapping.safetensors` (`d2t`, `t2d`), whole or not at all; returns its path."""
    path = folder / MAPPING
    mapping.check(str(path))
    write_atomic(path, save({"d2t": mapping.d2t, "t2d": mapping.t2d}))
    return path


def load_mapping(folder: Path) -> VocabMapping:
    """The mapping of a `vocab` artifact, checked; raises DataError when a table is missing or wrong."""
    path = folder / MAPPING
    remedy = "Make it again with --from vocab."
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise DataError("There is no draft vocabulary here.", where=str(path), remedy=remedy) from None
    except (SafetensorError, OSError) as error:
        raise DataError(f"The draft vocabulary cannot be read: {error}.", where=str(path), remedy=remedy) from None
    if missing := {"d2t", "t2d"} - set(tensors):
        raise DataError(f"The draft vocabulary lacks {', '.join(sorted(missing))}.", where=str(path), remedy=remedy)
    return VocabMapping(tensors["d2t"], tensors["t2d"]).check(str(path))
