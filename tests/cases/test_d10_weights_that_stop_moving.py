"""D10: pure bf16 parameters round small updates away; gradients look healthy, nothing moves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from draftproof.recipe import DraftSettings, TrainSettings
from draftproof.train.optimizer import make_optimizer
from draftproof.train.stage import run

if TYPE_CHECKING:
    from tests.train.conftest import TinyRun

    from draftproof.target.target import Target


@pytest.mark.parametrize(("dtype", "left"), [(torch.float32, 0.0), (torch.bfloat16, 1.0)])
def test_a_thousand_updates_of_a_thousandth(dtype: torch.dtype, left: float) -> None:
    """AdamW under a constant gradient steps by the learning rate: 1.0 - 1000 * 1e-3 = 0. In bf16 it is still 1."""
    weight = nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer = make_optimizer([weight], TrainSettings(learning_rate=1e-3))
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.item() == pytest.approx(left, abs=1e-4)


def test_in_bf16_compute_every_tensor_still_moves(tiny_run: TinyRun, tm_target: Target, tmp_path: Path) -> None:
    """Masters stay float32 under autocast: a learning rate far below bf16's step moves each of them, by about its sum."""
    kept = {}
    for steps in (1, 20):
        folder = tmp_path / str(steps)
        folder.mkdir()
        settings = TrainSettings(
            steps=steps, unroll=2, batch_tokens=128, learning_rate=1e-5, warmup=0.0, precision="bf16", evaluations=1, checkpoints=1
        )
        run(tiny_run.task(folder), settings, tm_target, draft=DraftSettings(), draft_tokens=3)
        kept[steps] = load_file(folder / "draft.safetensors")
    for name, early in kept[1].items():
        assert early.dtype == torch.float32
        moved = (kept[20][name] - early).abs()
        assert moved.median() > 1e-6, name
        assert moved.max() < 2.1e-4, name
