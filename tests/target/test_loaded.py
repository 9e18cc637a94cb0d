"""The loaded target: parts and boundaries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftproof.errors import DataError, UsageError
from draftproof.recipe import TargetSettings
from draftproof.target.loaded import capture, load_model, text_parts
from draftproof.target.target import Target, open_target

IDS = torch.randint(3, 300, (2, 20), generator=torch.Generator().manual_seed(1))


def test_loaded_model_is_the_saved_one_ready_for_inference(tm: Any, tm_target: Target) -> None:
    model = load_model(tm_target, "cpu")
    assert model.config._attn_implementation == "sdpa"
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model(IDS).logits, tm(IDS).logits)
    assert next(load_model(tm_target, "cpu", torch.bfloat16).parameters()).dtype == torch.bfloat16


def test_recipe_dtype_wins_over_the_config(tm_folder: Path) -> None:
    target = open_target(TargetSettings(model=str(tm_folder), dtype="bfloat16"))
    assert target.dtype == "bfloat16"
    assert next(load_model(target, "cpu").parameters()).dtype == torch.bfloat16


def test_a_weight_that_is_not_in_the_files_is_never_made_up(tm: Any, tmp_path: Path) -> None:
    tm.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"no model\.layers\.3\.mlp\.up_proj\.weight"):
        load_model(open_target(TargetSettings(model=str(tmp_path))), "cpu")


def test_parts_are_found_with_their_paths(tm: Any) -> None:
    parts = text_parts(tm)
    assert parts.layers is tm.model.layers
    assert parts.embedding is tm.model.embed_tokens
    assert parts.final_norm is tm.model.norm
    assert parts.head is tm.lm_head
    assert parts.paths == {"layers": "model.layers", "embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}


def test_every_boundary(tm: Any) -> None:
    """Boundary k is hidden_states[k] for k < L; boundary L gives hidden_states[L] only after the final norm."""
    with capture(tm, range(8), final=True) as captured:
        hidden = tm(IDS, output_hidden_states=True).hidden_states
        states = captured.take()
    assert list(states) == list(range(9))
    for boundary in range(8):
        assert torch.equal(states[boundary], hidden[boundary])
    assert torch.equal(tm.model.norm(states[8]), hidden[8])
    assert not torch.allclose(states[8], hidden[8], atol=0.1)


def test_states_are_handed_over_once_and_hooks_removed(tm: Any) -> None:
    def hooks() -> int:
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in tm.modules())

    tm(IDS, output_hidden_states=True)  # the library leaves hooks of its own
    before = hooks()
    with capture(tm, (2,), final=False) as captured:
        tm(IDS)
        assert hooks() == before + 1
        assert list(captured.take()) == [2]
        with pytest.raises(RuntimeError, match="not captured"):
            captured.take()
    assert hooks() == before


def test_boundaries_outside_the_model(tm: Any) -> None:
    with pytest.raises(UsageError, match=r"no boundary 9: the target has boundaries 0\.\.8"), capture(tm, (2, 9)):
        pass


@pytest.mark.parametrize("family", ["Gemma2", "Qwen3", "Granite"])
def test_parts_and_head_of_other_families(family: str, tmp_path: Path) -> None:
    """TargetHead must give back the family's own logits from boundary L: norm convention, soft-cap, scale."""
    import transformers

    from draftproof.target.head import TargetHead

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    extra: dict[str, Any] = {
        "Gemma2": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
        "Granite": {"logits_scaling": 4.0},
    }.get(family, {})
    config = getattr(transformers, f"{family}Config")(**sizes, vocab_size=320, head_dim=8, pad_token_id=0, **extra)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.2, 3.0)
        model.lm_head.weight.mul_(20)
    model.save_pretrained(tmp_path)
    target = open_target(TargetSettings(model=str(tmp_path)))
    with torch.no_grad(), capture(model, ()) as captured:
        wanted = model(IDS).logits
        final = captured.take()[3]
    head = TargetHead.from_weights(target.weights(), target.config, torch.float32, "cpu")
    assert torch.allclose(head.logits(final), wanted, atol=1e-5)
    rows = torch.tensor([7, 3, 300]).numpy()
    some = TargetHead.from_weights(target.weights(), target.config, torch.float32, "cpu", rows)
    assert torch.allclose(some.logits(final), wanted[..., [7, 3, 300]], atol=1e-5)


def test_shallow_and_deep_models_disagree_with_a_foreign_config(make_tm: Callable[..., Any], tm_target: Target) -> None:
    with pytest.raises(DataError, match=r"decoder of 8 layers, hidden 32, vocabulary 320; lists of blocks: model\.layers \(4\)"):
        text_parts(make_tm(num_hidden_layers=4), tm_target.config)


@pytest.mark.slow
def test_smollm2_whole(smollm2: Path) -> None:
    """The real LLM in bf16: sizes, every boundary, and its logits from boundary L and the head's file."""
    import time

    from draftproof.target.head import TargetHead

    started = time.perf_counter()
    target = open_target(TargetSettings(model=str(smollm2)))
    assert time.perf_counter() - started < 1.0
    config = target.config
    assert (config.layers, config.hidden_size, config.vocab_size, config.tied_head) == (30, 576, 49152, True)
    model = load_model(target, "cpu", torch.bfloat16)
    ids = torch.randint(20, 49152, (1, 48), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode(), capture(model, range(30)) as captured:
        out = model(ids, output_hidden_states=True)
        states = captured.take()
    assert all(torch.equal(states[k], out.hidden_states[k]) for k in range(30))
    head = TargetHead.from_weights(target.weights(), config, torch.bfloat16, "cpu")
    assert torch.equal(head.logits(states[30]), out.logits.float())
