"""F6: heads and embeddings may be packed integers with scales; never taken for floats, refused by name, early."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftproof.errors import DataError
from draftproof.gate.gate import GateContext, run_gate
from draftproof.gate.target import target_sizes
from draftproof.recipe import DataSettings, Recipe, RunSettings, TargetSettings
from draftproof.target.head import TargetHead
from draftproof.target.target import Target, open_target

Tensors = dict[str, torch.Tensor]


def head_packed(tensors: Tensors) -> None:
    del tensors["lm_head.weight"]
    tensors["lm_head.weight_packed"] = torch.zeros(320, 4, dtype=torch.int32)
    tensors["lm_head.weight_scale"] = torch.ones(320, 1)
    tensors["lm_head.weight_shape"] = torch.tensor([320, 32])


def head_fp8(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    tensors["lm_head.weight_scale"] = torch.ones(320, 1)


def head_gptq(tensors: Tensors) -> None:
    del tensors["lm_head.weight"]
    tensors["lm_head.qweight"] = torch.zeros(4, 320, dtype=torch.int32)
    tensors["lm_head.scales"] = torch.ones(1, 320)


def head_int8_of_the_right_shape(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = torch.zeros(320, 32, dtype=torch.int8)


def embedding_of_another_width(tensors: Tensors) -> None:
    tensors["model.embed_tokens.weight"] = torch.zeros(320, 4, dtype=torch.uint32)
    tensors["model.embed_tokens.scales"] = torch.ones(320, 1)


def folder_with(tm: Any, folder: Path, change: Callable[[Tensors], None] | None = None, **config: Any) -> Target:
    tm.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    if change:
        change(tensors)
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    return open_target(TargetSettings(model=str(folder)))


def ask(target: Target) -> Any:
    recipe = Recipe(target=target.settings, data=DataSettings(train=("x",)), run=RunSettings(dir="r"))
    context = GateContext("extract", "before", recipe, target, {}, Path("out"), None)
    return run_gate(context, [target_sizes], protects="the load").findings[0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (head_packed, "LM head lm_head is packed or quantised (weight_packed I32 [320, 4], weight_scale F32 [320, 1]"),
        (head_fp8, "LM head lm_head is packed or quantised (weight F8_E4M3 [320, 32], weight_scale F32 [320, 1])"),
        (head_gptq, "LM head lm_head is packed or quantised (qweight I32 [4, 320]"),
        (head_int8_of_the_right_shape, "LM head lm_head is packed or quantised (weight I8 [320, 32])"),
        (
            embedding_of_another_width,
            "embedding model.embed_tokens is packed or quantised (scales F32 [320, 1], weight U32 [320, 4])",
        ),
    ],
)
def test_packed_parts_are_refused_by_name_before_anything_loads(tm: Any, tmp_path: Path, change: Any, named: str) -> None:
    target = folder_with(tm, tmp_path, change)
    finding = ask(target)
    assert finding.status == "fail"
    assert named in finding.evidence
    if change is not embedding_of_another_width:
        with pytest.raises(DataError, match="packed or quantised"):
            TargetHead.from_weights(target.weights(), target.config, torch.float32, "cpu")


@pytest.mark.parametrize("ignored", ["lm_head", "language_model.lm_head"])
def test_a_plain_head_of_a_quantised_target_is_taken_whatever_the_ignore_list_is_called(tm: Any, tmp_path: Path, ignored: str) -> None:
    """The files decide, not a list of names whose prefix may differ."""
    quantization = {"quant_method": "compressed-tensors", "ignore": [ignored]}
    target = folder_with(tm, tmp_path, quantization_config=quantization)
    assert target.config.quantization == "compressed-tensors"
    assert ask(target).status == "pass"
    head = TargetHead.from_weights(target.weights(), target.config, torch.float32, "cpu")
    assert torch.equal(head.weight, tm.lm_head.weight)


def test_quantisation_stated_inside_the_text_part(tm: Any, tmp_path: Path) -> None:
    folder_with(tm, tmp_path)
    inner = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Wrapper"], "model_type": "wrapper", "text_config": inner}))
    assert open_target(TargetSettings(model=str(tmp_path))).config.quantization == "fp8"
