"""AdamW over float32 masters, with a warm-up and a cosine."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from draftproof.recipe import TrainSettings

FINAL_SHARE = 0.05
"""The cosine ends at this share of the peak: the last steps still move, but settle."""


def make_optimizer(parameters: Iterable[nn.Parameter], settings: TrainSettings) -> torch.optim.AdamW:
    """The parameters are float32 masters; autocast makes the compute copies, so small updates are never
    rounded away."""
    chosen = list(parameters)
    return torch.optim.AdamW(
        chosen,
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
        fused=chosen[0].is_cuda,
        foreach=False if not chosen[0].is_cuda else None,
    )


def learning_rate(step: int, total: int, settings: TrainSettings) -> float:
    """Learning rate of a step (counted from 0): linear warm-up, then a cosine to FINAL_SHARE of the peak."""
    warmup = max(1, round(settings.warmup * total))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    turned = (step - warmup) / max(1, total - warmup)
    return settings.learning_rate * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * min(turned, 1.0))))


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """Scale gradients to a global norm of at most `largest`; returns the norm before, a scalar."""
    return nn.utils.clip_grad_norm_(list(parameters), largest)
