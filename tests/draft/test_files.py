"""The trained draft on disk: a round trip, and strict about everything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftproof.draft.eagle3 import Eagle3Draft
from draftproof.draft.files import load_draft, save_draft
from draftproof.errors import DamagedArtifact


def _save(folder: Path, draft: Eagle3Draft) -> None:
    save_draft(folder, draft.config, draft.state_dict())


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "fc_norm": True}, {"norm_before_fc": True, "norm_output": True}])
def test_a_round_trip_changes_nothing(make_draft: Callable[..., Eagle3Draft], tmp_path: Path, options: dict[str, bool]) -> None:
    draft = make_draft(**options)
    _save(tmp_path, draft)
    loaded, config = load_draft(tmp_path)
    assert config == draft.config
    assert isinstance(config.boundaries, tuple)
    assert not loaded.training
    for (name, ours), (other, theirs) in zip(draft.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs)


def test_the_names_are_those_of_the_checkpoint_and_all_is_float32(make_draft: Callable[..., Eagle3Draft], tmp_path: Path) -> None:
    draft = make_draft(qk_norm=True)
    save_draft(tmp_path, draft.config, {name: tensor.bfloat16() for name, tensor in draft.state_dict().items()})
    held = load_file(tmp_path / "draft.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in held.items()} == {
        "fc.weight": (32, 96),
        "lm_head.weight": (64, 32),
        "norm.weight": (32,),
        **{f"layers.0.{name}.weight": (32,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "layers.0.self_attn.q_proj.weight": (32, 64),
        "layers.0.self_attn.k_proj.weight": (16, 64),
        "layers.0.self_attn.v_proj.weight": (16, 64),
        "layers.0.self_attn.o_proj.weight": (32, 32),
        "layers.0.self_attn.q_norm.weight": (8,),
        "layers.0.self_attn.k_norm.weight": (8,),
        "layers.0.mlp.gate_proj.weight": (48, 32),
        "layers.0.mlp.up_proj.weight": (48, 32),
        "layers.0.mlp.down_proj.weight": (32, 48),
    }
    assert {tensor.dtype for tensor in held.values()} == {torch.float32}


def _spoil_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        held = {name: tensor.clone() for name, tensor in load_file(folder / "draft.safetensors").items()}
        change(held)
        save_file(held, folder / "draft.safetensors")

    return spoil


def _spoil_config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        values = json.loads((folder / "draft.json").read_text())
        change(values)
        (folder / "draft.json").write_text(json.dumps(values))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (_spoil_tensors(lambda held: held.pop("norm.weight")), 'Missing key.*"norm.weight"'),
        (_spoil_tensors(lambda held: held.pop("fc.weight")), 'Missing key.*"fc.weight"'),
        (_spoil_tensors(lambda held: held.update(extra=torch.zeros(1))), 'Unexpected key.*"extra"'),
        (_spoil_tensors(lambda held: held.update({"lm_head.weight": torch.zeros(63, 32)})), "size mismatch for lm_head.weight"),
        (_spoil_config(lambda values: values.update(qk_norm=True)), "Missing key.*q_norm"),
        (_spoil_config(lambda values: values.update(intermediate_size=47)), "size mismatch for layers.0.mlp"),
        (_spoil_config(lambda values: values.pop("boundaries")), "config cannot be read: 'boundaries'"),
        (_spoil_config(lambda values: values.update(layers=2)), "config cannot be read: .*'layers'"),
        (_spoil_config(lambda values: values.pop("heads")), "config cannot be read: .*'heads'"),
        (lambda folder: (folder / "draft.json").write_text("{"), "does not hold JSON"),
        (lambda folder: (folder / "draft.json").unlink(), "config cannot be read: .*No such file"),
        (lambda folder: (folder / "draft.safetensors").unlink(), "weights cannot be read: .*No such file"),
        (lambda folder: (folder / "draft.safetensors").write_bytes(b"\x10\0\0\0"), "weights cannot be read"),
    ],
)
def test_a_damaged_draft_is_refused_by_name(
    make_draft: Callable[..., Eagle3Draft], tmp_path: Path, spoil: Callable[[Path], object], sentence: str
) -> None:
    _save(tmp_path, make_draft())
    spoil(tmp_path)
    with pytest.raises(DamagedArtifact, match=f"(?s){sentence}"):
        load_draft(tmp_path)
