"""The shape of a hidden-state store and how its rows are dealt into shards, known before anything is loaded.

    layout = StoreLayout(boundaries=(2, 15, 27), hidden_size=576, codec="bf16", vocab_size=49152)
    token_bytes(layout)                          # 4616
    plan_shards(lengths, layout, shard_gb=2.0)   # [[0, 1, 2, ...], [431, ...], ...]

No torch here: the plan and the gates need these figures in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from draftproof.errors import DataError
from draftproof.recipe import ExtractSettings

CODECS: tuple[str, ...] = get_args(ExtractSettings.model_fields["codec"].annotation)


@dataclass(frozen=True)
class StoreLayout:
    """What every shard of a store has in common."""

    boundaries: tuple[int, ...]
    """Aux boundaries, strictly increasing (A of them)."""
    hidden_size: int
    """H"""
    codec: str
    """How aux states are stored: bf16 or fp8."""
    vocab_size: int
    """V, rows of the target's LM head; teacher_top1 lies below it."""
    dtype: str = "float32"
    """What the target computed in. Stored in bf16 or fp8 all the same, but states of two dtypes do not mix."""

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise DataError(f"There is no codec {self.codec!r}.", remedy=f"Use one of {', '.join(CODECS)}.")

    @property
    def aux(self) -> int:
        """A, the number of aux boundaries."""
        return len(self.boundaries)

    def to_json(self) -> dict[str, Any]:
        """Plain values, as store.json holds them."""
        return {**asdict(self), "boundaries": list(self.boundaries)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> StoreLayout:
        """The inverse of to_json."""
        return cls(tuple(value["boundaries"]), value["hidden_size"], value["codec"], value["vocab_size"], value["dtype"])


def token_bytes(layout: StoreLayout) -> int:
    """Bytes of one token on disk: aux, final (bf16 in both codecs), token id and teacher top-1 (int32)."""
    aux = layout.aux * (layout.hidden_size + 4 if layout.codec == "fp8" else 2 * layout.hidden_size)
    return aux + 2 * layout.hidden_size + 8


def plan_shards(lengths: Sequence[int], layout: StoreLayout, shard_gb: float) -> list[list[int]]:
    """Rows of each shard, in row order, each shard at most `shard_gb` GB (10^9 bytes) unless a single row is larger.

    Depends on nothing but the arguments, so that an interrupted run finds its shards again.
    """
    room = int(shard_gb * 1e9 // token_bytes(layout))
    shards: list[list[int]] = []
    used = 0
    for row, length in enumerate(lengths):
        if not shards or used + int(length) > room:
            shards.append([])
            used = 0
        shards[-1].append(row)
        used += int(length)
    return shards
