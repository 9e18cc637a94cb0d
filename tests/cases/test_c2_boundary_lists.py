"""C2: `last layer` means L or L-1, default ids collapse on shallow models; final is a flag, not a position."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof.errors import UsageError
from draftproof.gate.gate import GateContext
from draftproof.gate.target import target_boundaries
from draftproof.recipe import DataSettings, ExtractSettings, Recipe, RunSettings, TargetSettings
from draftproof.target.boundaries import check_boundaries, default_boundaries
from draftproof.target.loaded import capture
from draftproof.target.target import Target, open_target

IDS = torch.randint(3, 300, (1, 20), generator=torch.Generator().manual_seed(0))


def ask(target: Target, boundaries: tuple[int, ...] | None) -> Any:
    recipe = Recipe(
        target=target.settings, data=DataSettings(train=("x",)), extract=ExtractSettings(boundaries=boundaries), run=RunSettings(dir="r")
    )
    return target_boundaries(GateContext("extract", "before", recipe, target, {}, Path("out"), None))


def test_the_final_state_is_captured_whatever_the_list_says(tm: Any) -> None:
    """Not layer L-1, not the normed one, and not the last of the list."""
    hidden = tm(IDS, output_hidden_states=True).hidden_states
    with capture(tm, (2, 4, 5)) as captured:
        tm(IDS)
        states = captured.take()
    assert list(states) == [2, 4, 5, 8]
    assert torch.equal(tm.model.norm(states[8]), hidden[8])
    assert not torch.allclose(states[8], hidden[7], atol=1e-2)
    assert torch.equal(states[5], hidden[5])


@pytest.mark.parametrize("wrong", [(2, 4, 5, 8), (2, 4, 5, 9), (2, 4, 4), (5, 4, 2), (0, 4)])
def test_lists_that_cannot_be_meant_are_refused_before_the_target_loads(tm_target: Target, wrong: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        ask(tm_target, wrong)


def test_right_lists_pass_with_both_engines_words(tm_target: Target) -> None:
    finding = ask(tm_target, (2, 4, 7))
    assert finding.status == "pass"
    assert "vLLM writes [2, 4, 7], SGLang [1, 3, 6]" in finding.evidence
    assert "2, 4, 5 of 8 layers, by default" in ask(tm_target, None).evidence


@pytest.mark.parametrize("layers", [3, 4, 5, 7])
def test_shallow_models_need_their_list_written_out(layers: int, make_tm: Callable[..., Any], tmp_path: Path) -> None:
    collapsed = (2, layers // 2, layers - 3)
    if layers < 7:
        with pytest.raises(UsageError):
            check_boundaries(collapsed, layers)
    with pytest.raises(UsageError, match="Write them out"):
        default_boundaries(layers)
    make_tm(num_hidden_layers=layers).save_pretrained(tmp_path)
    target = open_target(TargetSettings(model=str(tmp_path)))
    with pytest.raises(UsageError, match=f"{layers} layers has no default"):
        ask(target, None)
    assert ask(target, (1, 2)).status == "pass"
