"""Schedule and optimizer by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from draftproof.recipe import TrainSettings
from draftproof.train.optimizer import clip_gradients, learning_rate, make_optimizer


def _schedule(total: int, **settings: float) -> list[float]:
    return [learning_rate(step, total, TrainSettings(**settings)) for step in range(total)]  # type: ignore[arg-type]


def test_the_schedule_by_hand() -> None:
    """Ten steps, a peak of 1: two rise, then cos from 1 towards 0.05 over eight."""
    expected = [0.5, 1.0, *(0.05 + 0.95 * (1 + math.cos(math.pi * i / 8)) / 2 for i in range(8))]
    assert _schedule(10, learning_rate=1.0, warmup=0.2) == pytest.approx(expected)
    assert expected[6] == pytest.approx(0.525)  # half-way down


def test_without_warm_up_it_starts_at_the_peak() -> None:
    rates = _schedule(100, learning_rate=2e-3, warmup=0.0)
    assert rates[0] == 2e-3
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert 0.05 * 2e-3 < rates[-1] < 0.051 * 2e-3


@pytest.mark.parametrize("total", [1, 2, 3])
def test_short_trainings_move(total: int) -> None:
    assert all(0 < rate <= 1e-3 for rate in _schedule(total))
    assert learning_rate(total + 5, total, TrainSettings()) == pytest.approx(5e-5)  # past the end it stays at the floor


def test_one_step_of_adamw_by_hand() -> None:
    """m = 0.1 g, v = 0.05 g^2, both bias-corrected to g and g^2: the step is lr * sign(g), after decay by 1 - lr * wd."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = make_optimizer([weight], TrainSettings(learning_rate=0.01, weight_decay=0.1))
    weight.grad = torch.tensor([0.5, -4.0, 1e-3])
    optimizer.step()
    by_hand = [w * (1 - 0.01 * 0.1) - 0.01 * g / (abs(g) + 1e-8) for w, g in ((1.0, 0.5), (-2.0, -4.0), (3.0, 1e-3))]
    assert weight.tolist() == pytest.approx(by_hand, rel=1e-6)
    # A second step with gradient 0: m = 0.95... by the betas (0.9, 0.95).
    before = weight[0].item()
    weight.grad = torch.zeros(3)
    optimizer.step()
    m, v = 0.9 * 0.1 * 0.5 / (1 - 0.9**2), 0.95 * 0.05 * 0.25 / (1 - 0.95**2)
    assert weight[0].item() == pytest.approx(before * (1 - 0.01 * 0.1) - 0.01 * m / (math.sqrt(v) + 1e-8), rel=1e-6)


def test_gradients_are_clipped_together() -> None:
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))]
    parameters[0].grad, parameters[1].grad = torch.tensor([2.0]), torch.tensor([3.0, 6.0])
    assert clip_gradients(parameters, 3.5).item() == pytest.approx(7.0)  # 2, 3, 6: length 7
    assert [value for p in parameters for value in p.grad.tolist()] == pytest.approx([1.0, 1.5, 3.0], rel=1e-5)  # type: ignore[union-attr]
    assert clip_gradients(parameters, 100.0).item() == pytest.approx(3.5, rel=1e-5)
    assert parameters[0].grad.item() == pytest.approx(1.0, rel=1e-5)
