"""The target's config, read as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftproof.errors import DataError
from draftproof.target.config import parse_config, read_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "vocab_size": 128256,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192},
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def test_older_form_of_a_flat_config() -> None:
    config = parse_config(LLAMA, where="here")
    assert (config.layers, config.hidden_size, config.vocab_size, config.head_dim, config.kv_heads) == (16, 2048, 128256, 64, 8)
    assert config.rope_parameters == {
        "rope_type": "llama3",
        "factor": 32.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    assert (config.tied_head, config.dtype, config.nesting, config.norm_convention) == (True, "bfloat16", (), "weight")
    assert (config.logit_softcap, config.logit_scale, config.quantization) == (None, 1.0, None)


def test_saved_tiny_target(tm_folder: Path) -> None:
    config = read_config(tm_folder)
    assert (config.layers, config.hidden_size, config.vocab_size, config.intermediate_size) == (8, 32, 320, 64)
    assert (config.heads, config.kv_heads, config.head_dim, config.max_positions) == (4, 2, 8, 256)
    assert (config.tied_head, config.dtype) == (False, "float32")
    assert config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("changes", "field", "wanted"),
    [
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, "logit_softcap", 30.0),
        ({"model_type": "gemma2"}, "norm_convention", "one_plus_weight"),
        ({"model_type": "granite", "logits_scaling": 8.0}, "logit_scale", 0.125),
        ({"model_type": "cohere2_moe", "logit_scale": 0.25}, "logit_scale", 0.25),
        ({"model_type": "minicpm3", "dim_model_base": 256}, "logit_scale", 0.125),
        ({"head_dim": 128}, "head_dim", 128),
        ({"num_key_value_heads": None}, "kv_heads", 32),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization", "compressed-tensors"),
        ({"rope_scaling": None}, "rope_parameters", {"rope_type": "default", "rope_theta": 500000.0}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_parameters",
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0},
        ),
    ],
)
def test_families(changes: dict[str, Any], field: str, wanted: Any) -> None:
    assert getattr(parse_config({**LLAMA, **changes}, where="here"), field) == wanted


def test_gemma_ties_when_the_file_does_not_say_llama_does_not() -> None:
    silent = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    assert not parse_config(silent, where="here").tied_head
    assert parse_config({**silent, "model_type": "gemma3_text"}, where="here").tied_head


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
        ({"intermediate_size": [64, 64]}, "intermediate_size"),
        ({"architectures": []}, "no architecture"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ],
)
def test_what_would_have_to_be_guessed_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_config({**LLAMA, **changes}, where="DIR/config.json")
    assert sentence in caught.value.what
    assert caught.value.where == "DIR/config.json"


def test_layer_norm_targets_are_refused() -> None:
    values = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"} | {"layer_norm_epsilon": 1e-5}
    with pytest.raises(DataError, match="LayerNorm"):
        parse_config(values, where="here")


@pytest.mark.parametrize(("text", "place"), [('{"a": 1,\n "b" 2}', ":2:6"), ("[1]", ""), ("", ":1:1")])
def test_damaged_json_is_named_with_its_place(tmp_path: Path, text: str, place: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DataError) as caught:
        read_config(tmp_path)
    assert caught.value.where == f"{tmp_path / 'config.json'}{place}"


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no config\.json"):
        read_config(tmp_path)


def test_dtype_comes_from_the_files_when_the_config_is_silent(tm_folder: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    values = json.loads((tm_folder / "config.json").read_text())
    del values["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file({"a.ids": torch.zeros(2, dtype=torch.int64), "b.weight": torch.zeros(2, dtype=torch.float16)}, tmp_path / "model.safetensors")
    assert read_config(tmp_path).dtype == "float16"


def test_reading_needs_neither_torch_nor_transformers(tm_folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from draftproof.recipe import TargetSettings\n"
        "from draftproof.target.target import open_target; import draftproof.gate.target\n"
        f"open_target(TargetSettings(model={str(tm_folder)!r})).weights().names\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
