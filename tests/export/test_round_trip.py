"""to_vllm / from_vllm and to_sglang / from_sglang as pairs, and every loader against the trainer's own forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftproof.draft.eagle3 import Eagle3Draft
from draftproof.errors import DataError, Stopped
from draftproof.export.files import round_once, target_embedding
from draftproof.export.loaders import load_sglang, load_vllm
from draftproof.export.proof import prove
from draftproof.export.schema import describe
from draftproof.export.sglang import from_sglang, to_sglang
from draftproof.export.vllm import from_vllm, to_vllm
from draftproof.runfolder import stops_on_full_disk
from tiny_draft import TD, masters, target_in, tiny_config, tiny_draft, tiny_mapping

LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
# Kimi's and DeepSeek's form.
YARN_SCALED = YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7}

FOR_BOTH: dict[str, dict[str, Any]] = {
    "plain": {},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "four_states": {"aux": 4, "boundaries": (1, 3, 4, 7)},
    "full_vocabulary": {"draft_vocab_size": 320},
    "linear": {"rope_parameters": LINEAR},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "yarn_scaled": {"rope_parameters": YARN_SCALED},
}
FOR_VLLM: dict[str, dict[str, Any]] = {
    "qk_norm": {"qk_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "everything": {"qk_norm": True, "fc_norm": True, "norm_output": True, "aux": 2, "boundaries": (3, 7), "rope_parameters": LLAMA3},
}


def _rounded(draft: Eagle3Draft, dtype: str) -> Eagle3Draft:
    draft.load_state_dict({name: tensor.float() for name, tensor in round_once(masters(draft), dtype).items()})
    return draft


@pytest.mark.parametrize("changes", (FOR_BOTH | FOR_VLLM).values(), ids=(FOR_BOTH | FOR_VLLM).keys())
def test_vllm_round_trip_and_parity(changes: dict[str, Any], tm_folder: Path, tmp_path: Path) -> None:
    config, target = tiny_config(**changes), target_in(tm_folder, "bfloat16")
    draft, mapping = tiny_draft(config), tiny_mapping(config)
    weights = masters(draft)
    hashes = to_vllm(tmp_path / "one", weights, config, mapping, target, draft_tokens=3)
    back = from_vllm(tmp_path / "one")
    assert back.tensors.keys() == weights.keys()
    for name, master in weights.items():
        assert torch.equal(back.tensors[name], master.to(torch.bfloat16)), name
    assert back.config == config
    assert (back.mapping.kept == mapping.kept).all()
    again = to_vllm(
        tmp_path / "two", {name: tensor.float() for name, tensor in back.tensors.items()}, back.config, back.mapping, target, draft_tokens=3
    )
    assert again == hashes
    assert (tmp_path / "two/model.safetensors").read_bytes() == (tmp_path / "one/model.safetensors").read_bytes()
    embedding = target_embedding(target)
    loaded = load_vllm(tmp_path / "one", describe(target), embedding)
    assert prove(loaded, _rounded(draft, "bfloat16"), mapping, embedding, layers=8, seed=1) < 1e-5


@pytest.mark.parametrize("changes", FOR_BOTH.values(), ids=FOR_BOTH.keys())
def test_sglang_round_trip_and_parity(changes: dict[str, Any], tm_folder: Path, tmp_path: Path) -> None:
    config, target = tiny_config(**changes), target_in(tm_folder, "float16")
    draft, mapping = tiny_draft(config), tiny_mapping(config)
    weights = masters(draft)
    hashes = to_sglang(tmp_path / "one", weights, config, mapping, target)
    back = from_sglang(tmp_path / "one")
    assert back.tensors.keys() == weights.keys()
    for name, master in weights.items():
        assert torch.equal(back.tensors[name], master.to(torch.float16)), name
    assert back.config == config
    assert (back.mapping.kept == mapping.kept).all()
    again = to_sglang(tmp_path / "two", {name: tensor.float() for name, tensor in back.tensors.items()}, back.config, back.mapping, target)
    assert again == hashes
    embedding = target_embedding(target)
    loaded = load_sglang(tmp_path / "one", describe(target), embedding)
    assert prove(loaded, _rounded(draft, "float16"), mapping, embedding, layers=8, seed=1) < 1e-5


def test_the_names_are_those_that_each_engine_reads(tm_target: Any, tmp_path: Path) -> None:
    draft, mapping = tiny_draft(), tiny_mapping()
    to_vllm(tmp_path / "vllm", masters(draft), TD, mapping, tm_target, draft_tokens=3)
    to_sglang(tmp_path / "sglang", masters(draft), TD, mapping, tm_target)
    layer = ["input_layernorm", "hidden_norm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    layer += [f"self_attn.{part}_proj" for part in "qkvo"]
    common = {"d2t", "t2d", "fc.weight", "norm.weight", "lm_head.weight"}
    assert set(load_file(tmp_path / "vllm/model.safetensors")) == common | {"embed_tokens.weight"} | {f"layers.0.{n}.weight" for n in layer}
    assert set(load_file(tmp_path / "sglang/model.safetensors")) == common | {f"midlayer.{n}.weight" for n in layer}


def test_a_weight_that_is_no_number_is_refused(tm_target: Any, tmp_path: Path) -> None:
    weights = masters(tiny_draft())
    weights["norm.weight"][3] = float("nan")
    with pytest.raises(DataError, match=r"norm\.weight holds NaN"):
        to_vllm(tmp_path / "vllm", weights, TD, tiny_mapping(), tm_target, draft_tokens=3)
    assert not (tmp_path / "vllm").exists()


def test_a_weight_that_overflows_is_refused() -> None:
    with pytest.raises(DataError, match=r"fc\.weight overflows float16"):
        round_once({"fc.weight": torch.tensor([1e5])}, "float16")


def test_a_full_disk_stops_and_leaves_nothing(tm_target: Any, tmp_path: Path) -> None:
    """On a real file system of 64 KiB, where it may be mounted."""
    import subprocess

    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        with pytest.raises(Stopped, match="disk is full"), stops_on_full_disk(small):
            to_vllm(small / "vllm", masters(tiny_draft()), TD, tiny_mapping(), tm_target, draft_tokens=3)
        assert list((small / "vllm").iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_the_written_config_is_plain_json_without_nulls(tm_target: Any, tmp_path: Path) -> None:
    to_vllm(tmp_path, masters(tiny_draft()), TD, tiny_mapping(), tm_target, draft_tokens=3)
    text = (tmp_path / "config.json").read_text()
    assert "null" not in text
    assert json.loads(text)["speculators_config"]["verifier"]["name_or_path"] == str(tm_target.folder)
