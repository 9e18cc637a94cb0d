"""What `config.json` of each engine's folder says: one writer per engine, every key typed, no other key allowed.

    vllm_config(draft, verifier, draft_tokens=3)     # the `speculators` layout, read by vLLM
    sglang_config(draft, verifier)                   # the flat layout, read by SGLang

A few fields decide which class an engine builds and which states it feeds; none of them raises an error when it
is wrong or absent. So nothing is left to an engine's default. Read from vLLM 0.32
(`transformers_utils/configs/speculators`, `models/llama_eagle3.py`, `models/qwen3_eagle3.py`) and from SGLang's
`srt/models/llama_eagle3.py` and `model_runner.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from draftproof.draft.eagle3 import DraftConfig
from draftproof.draft.engines import unsupported
from draftproof.errors import DataError, UsageError
from draftproof.target.boundaries import to_sglang, to_vllm
from draftproof.target.config import Dtype

if TYPE_CHECKING:
    from draftproof.target.target import Target

SPECULATORS_VERSION = "0.9.0"
"""The release of `speculators` whose layout this is."""


@dataclass(frozen=True)
class Verifier:
    """What a draft's folder has to know of its target."""

    name: str
    """Hub id or folder, as an engine would be given it."""
    hub: bool
    """Whether the name is a hub id."""
    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    dtype: Dtype


def describe(target: Target) -> Verifier:
    """The target as its drafts see it. A hub id stays one; a `.gguf` is named by its converted folder."""
    given = target.settings.model
    local = given.endswith(".gguf") or Path(given).exists()
    config = target.config
    return Verifier(
        name=str(target.folder) if local else given,
        hub=not local,
        architecture=config.architecture,
        layers=config.layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        dtype=target.dtype,
    )


class Written(BaseModel):
    """A part of a config file: closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TransformerLayer(Written):
    """The draft's decoder layer, as vLLM builds its `hf_config` from it."""

    model_type: Literal["llama", "qwen3"]
    """qwen3 is the class with norms on q and k."""
    vocab_size: int
    """Of the target: the draft's own number is `draft_vocab_size`."""
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: Literal[1] = 1
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: Literal["silu"]
    rms_norm_eps: float
    max_position_embeddings: int
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    num_aux_hidden_states: int
    """Sizes `fc`; without it vLLM's llama draft counts nested ids, then takes 3."""
    rope_parameters: dict[str, Any]
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    """Left out when there is none: an explicit null after `rope_parameters` would erase them in transformers 5."""


class ProposalMethod(Written):
    """How the draft proposes."""

    proposal_type: Literal["greedy"] = "greedy"
    speculative_tokens: int
    verifier_accept_k: Literal[1] = 1
    accept_tolerance: float = 0.0


class VerifierConfig(Written):
    """The target, by name."""

    name_or_path: str
    architectures: list[str]


class SpeculatorsConfig(Written):
    """Its presence is what makes vLLM read the folder as this layout."""

    algorithm: Literal["eagle3"] = "eagle3"
    default_proposal_method: Literal["greedy"] = "greedy"
    proposal_methods: list[ProposalMethod]
    verifier: VerifierConfig


class VllmConfig(Written):
    """`vllm/config.json`."""

    architectures: list[Literal["Eagle3DraftModel"]]
    speculators_model_type: Literal["eagle3"] = "eagle3"
    speculators_version: str = SPECULATORS_VERSION
    draft_vocab_size: int
    eagle_aux_hidden_state_layer_ids: list[int]
    """Boundaries: vLLM's ids are the same numbers."""
    norm_before_residual: Literal[False] = False
    """The residual is the state before `hidden_norm`. vLLM takes true when this is absent."""
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    target_hidden_size: int
    dtype: Dtype
    tie_word_embeddings: Literal[False] = False
    speculators_config: SpeculatorsConfig
    transformer_layer_config: TransformerLayer


class EagleConfig(Written):
    """Where SGLang looks for the captured layers."""

    eagle_aux_hidden_state_layer_ids: list[int]
    """Boundary - 1: SGLang adds 1 to written ids."""
    use_aux_hidden_state: Literal[True] = True


class SglangConfig(Written):
    """`sglang/config.json`."""

    architectures: list[Literal["LlamaForCausalLMEagle3"]]
    model_type: Literal["llama"] = "llama"
    vocab_size: int
    draft_vocab_size: int
    """SGLang takes the head from the target when this is null."""
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_hidden_layers: Literal[1] = 1
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: Literal["silu"]
    rms_norm_eps: float
    max_position_embeddings: int
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    rope_parameters: dict[str, Any]
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: Literal[False] = False
    num_aux_hidden_states: int
    fc_norm: bool
    norm_output: bool
    eagle_config: EagleConfig
    dtype: Dtype
    torch_dtype: Dtype
    """The name that older transformers read."""


def vllm_config(draft: DraftConfig, verifier: Verifier, *, draft_tokens: int) -> VllmConfig:
    """The config for vLLM, which drafts `draft_tokens` tokens a cycle when it is not told otherwise."""
    check_fit(draft, verifier)
    return VllmConfig(
        architectures=["Eagle3DraftModel"],
        draft_vocab_size=draft.draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=list(to_vllm(draft.boundaries)),
        norm_before_fc=draft.norm_before_fc,
        fc_norm=draft.fc_norm,
        norm_output=draft.norm_output,
        target_hidden_size=verifier.hidden_size,
        dtype=verifier.dtype,
        speculators_config=SpeculatorsConfig(
            proposal_methods=[ProposalMethod(speculative_tokens=draft_tokens)],
            verifier=VerifierConfig(name_or_path=verifier.name, architectures=[verifier.architecture]),
        ),
        transformer_layer_config=TransformerLayer(model_type="qwen3" if draft.qk_norm else "llama", **_layer(draft)),
    )


def sglang_config(draft: DraftConfig, verifier: Verifier) -> SglangConfig:
    """The config for SGLang; raises UsageError for a draft that SGLang cannot serve."""
    check_fit(draft, verifier)
    if reason := unsupported(draft, verifier.architecture, "sglang"):
        raise UsageError(f"This draft cannot be exported for SGLang: {reason}.", remedy="Set export.formats to [vllm].")
    return SglangConfig(
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=draft.draft_vocab_size,
        target_hidden_size=verifier.hidden_size,
        fc_norm=draft.fc_norm,
        norm_output=draft.norm_output,
        eagle_config=EagleConfig(eagle_aux_hidden_state_layer_ids=list(to_sglang(draft.boundaries))),
        dtype=verifier.dtype,
        torch_dtype=verifier.dtype,
        **_layer(draft),
    )


def check_fit(draft: DraftConfig, verifier: Verifier) -> None:
    """Raise DataError, naming every number by which draft and target do not belong together."""
    wrong = []
    if draft.vocab_size != verifier.vocab_size:
        wrong.append(f"vocabulary {draft.vocab_size}, the target's is {verifier.vocab_size}")
    if draft.hidden_size != verifier.hidden_size:
        # The embedding is the target's, so a narrower draft would need one of its own.
        wrong.append(f"hidden size {draft.hidden_size}, the target's is {verifier.hidden_size}")
    if not 0 < draft.draft_vocab_size <= draft.vocab_size:
        wrong.append(f"a draft vocabulary of {draft.draft_vocab_size} out of {draft.vocab_size}")
    if draft.aux != len(draft.boundaries) or not draft.boundaries or max(draft.boundaries) >= verifier.layers:
        wrong.append(f"{draft.aux} aux states from boundaries {list(draft.boundaries)} of {verifier.layers} layers")
    if draft.max_positions < verifier.max_positions:
        wrong.append(f"{draft.max_positions} positions, the target serves {verifier.max_positions}")
    if wrong:
        raise DataError(
            f"The draft does not fit its target: it has {'; '.join(wrong)}.", remedy="Train it on this target with --from train."
        )


def _layer(draft: DraftConfig) -> dict[str, Any]:
    """The keys that both configs have in common."""
    rope = dict(draft.rope_parameters)
    theta = float(rope.get("rope_theta", 10_000.0))
    return {
        "vocab_size": draft.vocab_size,
        "hidden_size": draft.hidden_size,
        "intermediate_size": draft.intermediate_size,
        "num_attention_heads": draft.heads,
        "num_key_value_heads": draft.kv_heads,
        "head_dim": draft.head_dim,
        "hidden_act": draft.hidden_act,
        "rms_norm_eps": draft.rms_norm_eps,
        "max_position_embeddings": draft.max_positions,
        "num_aux_hidden_states": draft.aux,
        "rope_parameters": {**rope, "rope_theta": theta, "rope_type": rope.get("rope_type", "default")},
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else {k: v for k, v in rope.items() if k != "rope_theta"},
    }
