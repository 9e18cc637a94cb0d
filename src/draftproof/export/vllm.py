"""The folder that vLLM serves (`speculators` layout), and the way back.

hashes = to_vllm(folder, masters, config, mapping, target, draft_tokens=3)
back = from_vllm(folder)            # back.tensors == masters, rounded once
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from draftproof.draft.eagle3 import DraftConfig
from draftproof.export.files import (
    EMBEDDING,
    ReadBack,
    mapping_of,
    mapping_tensors,
    read_tensors,
    read_typed,
    round_once,
    target_embedding,
    write_folder,
)
from draftproof.export.schema import VllmConfig, describe, vllm_config
from draftproof.records.mapping import VocabMapping
from draftproof.target.target import Target


def to_vllm(
    folder: Path, masters: Mapping[str, Tensor], config: DraftConfig, mapping: VocabMapping, target: Target, *, draft_tokens: int
) -> dict[str, str]:
    """Write the folder from float32 masters (names of `draft/eagle3.py`); returns the hash of each tensor written.

    The embedding is written too, bit for bit the target's: vLLM then sees that both are the same and keeps one.
    """
    verifier = describe(target)
    written = vllm_config(config, verifier, draft_tokens=draft_tokens)
    tensors = round_once(masters, verifier.dtype) | mapping_tensors(mapping) | {EMBEDDING: target_embedding(target)}
    return write_folder(folder, written, tensors)


def from_vllm(folder: Path) -> ReadBack:
    """Read a folder that `to_vllm` wrote; raises DataError when a key of the config is not what it would write."""
    written = read_typed(folder, VllmConfig)
    layer = written.transformer_layer_config
    tensors = read_tensors(folder)
    mapping = mapping_of(tensors, vocab_size=layer.vocab_size, draft_vocab_size=written.draft_vocab_size, where=str(folder))
    config = DraftConfig(
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        heads=layer.num_attention_heads,
        kv_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim,
        vocab_size=layer.vocab_size,
        draft_vocab_size=written.draft_vocab_size,
        aux=layer.num_aux_hidden_states,
        boundaries=tuple(written.eagle_aux_hidden_state_layer_ids),
        hidden_act=layer.hidden_act,
        rms_norm_eps=layer.rms_norm_eps,
        rope_parameters=layer.rope_parameters,
        max_positions=layer.max_position_embeddings,
        qk_norm=layer.model_type == "qwen3",
        norm_before_fc=written.norm_before_fc,
        fc_norm=written.fc_norm,
        norm_output=written.norm_output,
    )
    draft = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d", EMBEDDING)}
    return ReadBack(draft, config, mapping, tensors.get(EMBEDDING))
