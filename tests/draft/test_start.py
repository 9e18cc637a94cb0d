"""The first weights of a draft, against the target's own tensors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftproof.draft.eagle3 import Eagle3Draft, draft_config
from draftproof.draft.start import NOISE, start_draft
from draftproof.recipe import DraftSettings, TargetSettings
from draftproof.target.target import Target, open_target

HEAD = torch.randn(64, 32, generator=torch.Generator().manual_seed(9))


def _draft(target: Target, **changes: Any) -> Eagle3Draft:
    config = draft_config(target.config, DraftSettings(), boundaries=(2, 4, 5), draft_vocab_size=64)
    return Eagle3Draft(dataclasses.replace(config, **changes))


def test_the_layer_is_the_targets_last(tm: Any, tm_target: Target) -> None:
    draft = _draft(tm_target)
    assert start_draft(draft, seed=0, head=HEAD, start="target", target=tm_target) == "the target's last layer"
    last = tm.model.layers[7]
    layer = draft.layer
    for name in ("o_proj",):
        assert torch.equal(getattr(layer.self_attn, name).weight, getattr(last.self_attn, name).weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert torch.equal(getattr(layer.mlp, name).weight, getattr(last.mlp, name).weight)
    for name in ("q_proj", "k_proj", "v_proj"):
        own, theirs = getattr(layer.self_attn, name).weight, getattr(last.self_attn, name).weight
        assert torch.equal(own[:, 32:], theirs), "the state's half"
        assert own[:, :32].std().item() == pytest.approx(NOISE, rel=0.15), "the embedding's half"
    assert torch.equal(draft.norm.weight, tm.model.norm.weight)
    assert not torch.equal(draft.norm.weight, torch.ones(32))
    assert torch.equal(layer.hidden_norm.weight, last.input_layernorm.weight)
    assert torch.equal(layer.input_layernorm.weight, torch.ones(32))


@pytest.mark.parametrize("start", ["target", "state", "random"])
def test_head_and_fc(tm_target: Target, start: str) -> None:
    """The head is always the target's rows; unless all is random, fc passes the last of three boundaries on."""
    draft = _draft(tm_target)
    start_draft(draft, seed=0, head=HEAD, start=start, target=tm_target)
    assert torch.equal(draft.lm_head.weight, HEAD)
    rest = draft.fc.weight.detach().clone()
    if start != "random":
        rest[:, 64:] -= torch.eye(32)
        aux = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(1))
        assert (draft.fuse(aux) - aux[:, 2]).std() < 0.3 < aux[:, 2].std()
    assert rest.std().item() == pytest.approx(NOISE, rel=0.1)
    assert rest.abs().max() < 6 * NOISE


@pytest.mark.parametrize(("start", "said"), [("state", "the target's late state"), ("random", "random weights")])
def test_without_the_targets_layer(tm: Any, tm_target: Target, start: str, said: str) -> None:
    draft = _draft(tm_target)
    assert start_draft(draft, seed=0, head=HEAD, start=start, target=tm_target) == said
    assert torch.equal(draft.norm.weight, torch.ones(32))
    for name, parameter in draft.layer.named_parameters():
        if parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(NOISE, rel=0.15), name


def test_no_weight_is_left_unset(tm_target: Target) -> None:
    for options in ({}, {"qk_norm": True, "fc_norm": True, "norm_output": True}, {"norm_before_fc": True, "intermediate_size": 48}):
        draft = _draft(tm_target, **options)
        start_draft(draft, seed=0, head=HEAD, start="target", target=tm_target)
        assert all(parameter.isfinite().all() for parameter in draft.parameters())


def test_it_is_a_function_of_the_seed(tm_target: Target) -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        draft = _draft(tm_target)
        start_draft(draft, seed=seed, head=HEAD, start="state", target=tm_target)
        return {name: parameter.detach() for name, parameter in draft.named_parameters()}

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["layers.0.self_attn.o_proj.weight"], other["layers.0.self_attn.o_proj.weight"])


SHAPES = "the target's late state (its last layer has other shapes)"


@pytest.mark.parametrize("change", [{"intermediate_size": 48}, {"kv_heads": 1}, {"heads": 8, "kv_heads": 4}])
def test_other_shapes_fall_back_and_say_so(tm_target: Target, change: dict[str, int]) -> None:
    draft, alone = _draft(tm_target, **change), _draft(tm_target, **change)
    assert start_draft(draft, seed=0, head=HEAD, start="target", target=tm_target) == SHAPES
    start_draft(alone, seed=0, head=HEAD, start="state", target=tm_target)
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), alone.parameters(), strict=True)), "nothing half-copied"


def test_a_packed_layer_falls_back(tm_folder: Path, tmp_path: Path) -> None:
    """A fused qkv, as some families have it."""
    target = _changed(tm_folder, tmp_path, lambda held: held.update({"model.layers.7.self_attn.qkv.weight": _pop_qkv(held)}))
    assert start_draft(_draft(target), seed=0, head=HEAD, start="target", target=target) == SHAPES


def _pop_qkv(held: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([held.pop(f"model.layers.7.self_attn.{name}_proj.weight") for name in "qkv"])


def _changed(tm_folder: Path, folder: Path, change: Any, **config: Any) -> Target:
    held = load_file(tm_folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors")
    (folder / "config.json").write_text((tm_folder / "config.json").read_text())
    target = open_target(TargetSettings(model=str(folder)))
    return dataclasses.replace(target, config=dataclasses.replace(target.config, **config))


def test_gemmas_norms_are_one_plus_weight(tm: Any, tm_folder: Path, tmp_path: Path) -> None:
    """Stored w means a gain of 1 + w; the draft's own norms are plain."""

    def lower(held: dict[str, torch.Tensor]) -> None:
        for name in held:
            if "norm" in name:
                held[name] -= 1.0

    target = _changed(tm_folder, tmp_path, lower, norm_convention="one_plus_weight")
    draft = _draft(target)
    assert start_draft(draft, seed=0, head=HEAD, start="target", target=target) == "the target's last layer"
    assert torch.allclose(draft.norm.weight, tm.model.norm.weight, atol=1e-6)
    assert torch.equal(draft.layer.hidden_norm.weight, torch.ones(32))
    assert torch.equal(draft.layer.post_attention_layernorm.weight, torch.ones(32))
