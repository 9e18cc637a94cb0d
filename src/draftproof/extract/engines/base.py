"""What an extraction engine is: three methods.

A new engine is one file beside this one:

    class MyEngine:
        name = "mine"
        dtype = "bfloat16"                     # what it computes in, known before it is loaded

        def __init__(self, target, boundaries, device): ...

        def load(self) -> None:
            self.server = start(self.target.folder)

        def states(self, batch, *, logprobs=False):
            answers = self.server.prefill(batch)              # may come back in any order
            return {key: RowStates(a.aux, a.final, a.top1) for key, a in answers.items()}

        def close(self) -> None:
            self.server.stop()

Results are keyed by row, never by position: engines reorder, split and merge what they are given. An engine need
not be trusted: the stage runs the canary rows through the same `states` before the bulk, and the gate compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class RowStates:
    """The target's states over one row of T tokens, on the CPU."""

    aux: Tensor
    """bfloat16 [T, A, H]: the aux boundaries, in their order"""
    final: Tensor
    """bfloat16 [T, H]: boundary L, before the final norm"""
    teacher_top1: Tensor
    """int32 [T]: the most likely next token over the whole vocabulary"""
    logprobs: Tensor | None = None
    """float32 [T-1], when asked for: log-probability of token t+1 after token t, from the engine's own logits"""


class Engine(Protocol):
    """Runs the target over rows of token ids."""

    @property
    def name(self) -> str:
        """As in `extract.engine`."""

    @property
    def dtype(self) -> str:
        """`float32`, `bfloat16` or `float16`: what the forward computes in."""

    def load(self) -> None:
        """Get ready; this is what costs. Raises DataError when the target cannot be run."""

    def states(self, batch: Mapping[str, np.ndarray], *, logprobs: bool = False) -> dict[str, RowStates]:
        """One forward over rows (row key -> int32 [T]); exactly the given keys come back.

        With `logprobs`, both they and teacher_top1 come from the engine's own complete logits, which costs memory
        ([T, V] a row): for a few rows only.
        """

    def close(self) -> None:
        """Give everything back. May be called twice."""
