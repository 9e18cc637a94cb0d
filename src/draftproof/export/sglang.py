"""The folder that SGLang serves (flat config, `midlayer.` names), and the way back.

    hashes = to_sglang(folder, masters, config, mapping, target)
    back = from_sglang(folder)          # back.tensors == masters, rounded once

The embedding is absent by contract: SGLang replaces a draft's embedding with the target's own after loading
(`eagle_worker.py`, `set_embed`), so one in the file would only cost space.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from draftproof.draft.eagle3 import DraftConfig
from draftproof.export.files import ReadBack, mapping_of, mapping_tensors, read_tensors, read_typed, round_once, write_folder
from draftproof.export.schema import SglangConfig, describe, sglang_config
from draftproof.records.mapping import VocabMapping
from draftproof.target.target import Target

OURS, THEIRS = "layers.0.", "midlayer."
"""The decoder layer's prefix. Releases of SGLang that call it `layers.0.` inside still take `midlayer.`."""


def to_sglang(folder: Path, masters: Mapping[str, Tensor], config: DraftConfig, mapping: VocabMapping, target: Target) -> dict[str, str]:
    """Write the folder from float32 masters (names of `draft/eagle3.py`); returns the hash of each tensor written.

    Raises UsageError for a draft whose options SGLang does not read.
    """
    verifier = describe(target)
    written = sglang_config(config, verifier)
    renamed = {_renamed(name, OURS, THEIRS): tensor for name, tensor in round_once(masters, verifier.dtype).items()}
    return write_folder(folder, written, renamed | mapping_tensors(mapping))


def from_sglang(folder: Path) -> ReadBack:
    """Read a folder that `to_sglang` wrote; raises DataError when a key of the config is not what it would write."""
    written = read_typed(folder, SglangConfig)
    tensors = read_tensors(folder)
    mapping = mapping_of(tensors, vocab_size=written.vocab_size, draft_vocab_size=written.draft_vocab_size, where=str(folder))
    config = DraftConfig(
        hidden_size=written.hidden_size,
        intermediate_size=written.intermediate_size,
        heads=written.num_attention_heads,
        kv_heads=written.num_key_value_heads,
        head_dim=written.head_dim,
        vocab_size=written.vocab_size,
        draft_vocab_size=written.draft_vocab_size,
        aux=written.num_aux_hidden_states,
        boundaries=tuple(layer_id + 1 for layer_id in written.eagle_config.eagle_aux_hidden_state_layer_ids),
        hidden_act=written.hidden_act,
        rms_norm_eps=written.rms_norm_eps,
        rope_parameters=written.rope_parameters,
        max_positions=written.max_position_embeddings,
        fc_norm=written.fc_norm,
        norm_output=written.norm_output,
    )
    draft = {_renamed(name, THEIRS, OURS): tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    return ReadBack(draft, config, mapping, None)


def _renamed(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name
