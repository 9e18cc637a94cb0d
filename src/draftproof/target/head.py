"""The target's head by itself: final norm and LM head, so that stored final states give back its logits.

head = TargetHead.from_weights(target.weights(), target.config, torch.bfloat16, "cpu")
head.logits(final)          # boundary L, before the final norm -> float32 [N, V]
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from draftproof.target.config import TargetConfig
from draftproof.target.weights import Weights, final_norm_name, head_name


class TargetHead:
    """Final norm (once, by the target's convention), LM head or some of its rows, logit scale and soft-cap."""

    def __init__(self, norm: torch.Tensor, weight: torch.Tensor, config: TargetConfig) -> None:
        self.norm = norm
        """[H], as stored."""
        self.weight = weight
        """[V or len(rows), H]"""
        self._eps = config.rms_norm_eps
        self._one_plus = config.norm_convention == "one_plus_weight"
        self._scale, self._softcap = config.logit_scale, config.logit_softcap

    @classmethod
    def from_weights(
        cls, weights: Weights, config: TargetConfig, dtype: torch.dtype, device: str, rows: np.ndarray[Any, Any] | None = None
    ) -> TargetHead:
        """Read the two tensors, or only `rows` of the head (ids of the target's vocabulary, in that order).

        Raises DataError when the files do not hold them plainly (`weights.head_name`).
        """
        norm = weights.read(final_norm_name(weights, config))
        name = head_name(weights, config)
        weight = weights.read(name) if rows is None else weights.read_rows(name, rows)
        return cls(norm.to(device, dtype), weight.to(device, dtype), config)

    def normed(self, final: torch.Tensor) -> torch.Tensor:
        """`[..., H]` boundary L -> after the final norm, in the head's dtype. RMS in float32, as transformers does."""
        final = final.to(self.weight.device, self.weight.dtype)
        wide = final.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        if self._one_plus:
            return (wide * (1.0 + self.norm.float())).to(final.dtype)
        return self.norm * wide.to(final.dtype)

    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """`[N, H]` boundary L -> float32 `[N, V or len(rows)]`: what the target's sampler sees."""
        logits = torch.nn.functional.linear(self.normed(final), self.weight).float()
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits
