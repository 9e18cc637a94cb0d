"""The config writers against files written by hand, and against vLLM's own reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftproof.errors import DataError, UsageError
from draftproof.export.loaders import view_vllm
from draftproof.export.schema import VllmConfig, sglang_config, vllm_config
from tiny_draft import TD, VERIFIER, tiny_config

GOLDEN = Path(__file__).parent / "golden"

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
OPTIONS = tiny_config(
    aux=4, boundaries=(1, 3, 5, 7), draft_vocab_size=320, qk_norm=True, norm_before_fc=True, norm_output=True, rope_parameters=LLAMA3
)


def _golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


def test_vllm_config_is_the_golden_file() -> None:
    assert vllm_config(TD, VERIFIER, draft_tokens=3).model_dump(exclude_none=True) == _golden("vllm.json")


def test_vllm_config_with_options_is_the_golden_file() -> None:
    assert vllm_config(OPTIONS, VERIFIER, draft_tokens=5).model_dump(exclude_none=True) == _golden("vllm-qwen3-llama3rope.json")


def test_sglang_config_is_the_golden_file() -> None:
    assert sglang_config(TD, VERIFIER).model_dump(exclude_none=True) == _golden("sglang.json")


def test_the_schema_is_closed() -> None:
    config = _golden("vllm.json")
    config["norm_before_residuals"] = False
    with pytest.raises(ValueError, match="norm_before_residuals"):
        VllmConfig.model_validate(config)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"qk_norm": True}, "norms on q and k"),
        ({"aux": 1, "boundaries": (4,)}, "skips fc"),
    ],
)
def test_what_sglang_does_not_read_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        sglang_config(tiny_config(**changes), VERIFIER)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": 64}, "vocabulary 64, the target's is 320"),
        ({"hidden_size": 16}, "hidden size 16, the target's is 32"),
        ({"draft_vocab_size": 321}, "321 out of 320"),
        ({"boundaries": (2, 4, 8)}, r"boundaries \[2, 4, 8\] of 8 layers"),
        ({"max_positions": 128}, "128 positions, the target serves 256"),
    ],
)
def test_a_draft_of_another_target_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        vllm_config(tiny_config(**changes), VERIFIER, draft_tokens=3)


@pytest.mark.slow
@pytest.mark.parametrize("golden", ["vllm.json", "vllm-qwen3-llama3rope.json"])
def test_vllm_itself_reads_what_the_simulated_loader_reads(golden: str, tmp_path: Path) -> None:
    """Through vLLM's own `get_config`, key by key."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.transformers_utils.config import get_config

    (tmp_path / "config.json").write_text(json.dumps(_golden(golden), sort_keys=True))
    theirs = get_config(tmp_path, trust_remote_code=False)
    view = view_vllm(_golden(golden), VERIFIER, golden)
    assert type(theirs).__name__ == "SpeculatorsConfig"
    assert theirs.architectures == ["Eagle3Qwen3ForCausalLM" if view.qk_norm else "Eagle3LlamaForCausalLM"]
    assert tuple(theirs.eagle_aux_hidden_state_layer_ids) == view.boundaries
    assert theirs.num_aux_hidden_states == view.aux
    assert theirs.rope_parameters == view.rope
    assert (theirs.vocab_size, theirs.draft_vocab_size) == (view.vocab_size, view.draft_vocab_size)
    assert (theirs.hidden_size, theirs.target_hidden_size) == (view.hidden_size, view.target_hidden_size)
    assert (theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim) == (view.heads, view.kv_heads, view.head_dim)
    assert theirs.intermediate_size == view.intermediate_size
    assert (theirs.rms_norm_eps, theirs.max_position_embeddings) == (view.eps, view.max_positions)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert {flag: getattr(theirs, flag) for flag in flags} == {flag: getattr(view, flag) for flag in flags}
