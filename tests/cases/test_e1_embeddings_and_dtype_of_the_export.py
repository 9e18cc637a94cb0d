"""E1: randomly initialised embeddings shipped; dtype changed on the way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from draftproof.errors import DataError
from draftproof.export.files import target_embedding, tensor_hash
from draftproof.export.loaders import load_sglang, load_vllm
from draftproof.export.schema import describe
from draftproof.export.sglang import to_sglang
from draftproof.export.vllm import to_vllm
from tiny_draft import TD, masters, spoil, target_in, tiny_draft, tiny_mapping

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

EMBEDDING = "embed_tokens.weight"


def test_the_embedding_is_the_targets_bit_for_bit(tm: LlamaForCausalLM, tm_folder: Path, tmp_path: Path) -> None:
    """Against the model in memory, not against what the exporter read."""
    to_vllm(tmp_path, masters(tiny_draft()), TD, tiny_mapping(), target_in(tm_folder), draft_tokens=3)
    assert torch.equal(load_file(tmp_path / "model.safetensors")[EMBEDDING], tm.model.embed_tokens.weight)


def test_for_sglang_it_is_absent_by_contract(tm_folder: Path, tmp_path: Path) -> None:
    to_sglang(tmp_path, masters(tiny_draft()), TD, tiny_mapping(), target_in(tm_folder))
    assert EMBEDDING not in load_file(tmp_path / "model.safetensors")
    embedding = target_embedding(target_in(tm_folder))
    assert torch.equal(load_sglang(tmp_path, describe(target_in(tm_folder)), embedding).embedding, embedding)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_fresh_table_in_its_place_is_refused(engine: str, tm_folder: Path, tmp_path: Path) -> None:
    """vLLM would keep it, SGLang overwrite it: the same folder would draft well in one and not in the other."""
    target = target_in(tm_folder)
    to_vllm(tmp_path, masters(tiny_draft()), TD, tiny_mapping(), target, draft_tokens=3)
    if engine == "sglang":
        to_sglang(tmp_path, masters(tiny_draft()), TD, tiny_mapping(), target)
    spoil(tmp_path, tensors=lambda held: held.update({EMBEDDING: torch.randn(320, 32)}))
    load = {"vllm": load_vllm, "sglang": load_sglang}[engine]
    with pytest.raises(DataError, match=r"embed_tokens\.weight is not the target's"):
        load(tmp_path, describe(target), target_embedding(target))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_tensor_is_the_master_rounded_once(dtype: str, tm_folder: Path, tmp_path: Path) -> None:
    """The reported hash of each tensor is that of the trained weight, rounded to the target's dtype."""
    trained, as_dtype = masters(tiny_draft()), getattr(torch, dtype)
    hashes = to_vllm(tmp_path, trained, TD, tiny_mapping(), target_in(tm_folder, dtype), draft_tokens=3)
    expected = {name: tensor_hash(tensor.to(as_dtype)) for name, tensor in trained.items()}
    assert {name: value for name, value in hashes.items() if name in expected} == expected
    assert set(hashes) - set(expected) == {"d2t", "t2d", EMBEDDING}


def test_a_detour_through_another_dtype_is_seen(tm_folder: Path, tmp_path: Path) -> None:
    """bf16 -> fp16 -> bf16 loses the smallest values; fp16 in a folder that says bf16 is refused."""
    tiny = {name: tensor * (1e-9 if name == "lm_head.weight" else 1) for name, tensor in masters(tiny_draft()).items()}
    target = target_in(tm_folder, "bfloat16")
    direct = to_vllm(tmp_path / "direct", tiny, TD, tiny_mapping(), target, draft_tokens=3)
    detour = {name: tensor.bfloat16().half().bfloat16().float() for name, tensor in tiny.items()}
    assert to_vllm(tmp_path / "detour", detour, TD, tiny_mapping(), target, draft_tokens=3)["lm_head.weight"] != direct["lm_head.weight"]
    spoil(tmp_path / "direct", tensors=lambda held: held.update({"fc.weight": held["fc.weight"].half()}))
    with pytest.raises(DataError, match=r"fc\.weight is float16, the config says bfloat16"):
        load_vllm(tmp_path / "direct", describe(target), target_embedding(target))


def test_a_trained_state_that_lacks_a_weight_does_not_load(tm_folder: Path, tmp_path: Path) -> None:
    target, trained = target_in(tm_folder), masters(tiny_draft())
    del trained["norm.weight"]
    to_vllm(tmp_path, trained, TD, tiny_mapping(), target, draft_tokens=3)
    with pytest.raises(DataError, match=r"norm\.weight is missing"):
        load_vllm(tmp_path, describe(target), target_embedding(target))
