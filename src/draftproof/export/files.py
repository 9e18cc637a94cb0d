"""A draft's folder for an engine: `config.json` and `model.safetensors`, written whole or not at all.

The trained masters are float32. They are rounded once, to the target's dtype, since an engine runs the draft in
the target's dtype and would round by itself otherwise, unseen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof.artifact import hash_bytes, sync_folder, write_json
from draftproof.draft.eagle3 import DraftConfig
from draftproof.errors import DataError
from draftproof.records.mapping import VocabMapping
from draftproof.target.weights import embedding_name

if TYPE_CHECKING:
    from draftproof.target.target import Target

CONFIG, WEIGHTS = "config.json", "model.safetensors"
EMBEDDING = "embed_tokens.weight"
"""The embedding's name in a folder; both engines know it by that."""

_Config = TypeVar("_Config", bound=BaseModel)


@dataclass(frozen=True)
class ReadBack:
    """What a folder holds, in this project's own names: the way back of a `to_...` / `from_...` pair."""

    tensors: dict[str, Tensor]
    """Names of `draft/eagle3.py`, in the dtype of the file."""
    config: DraftConfig
    mapping: VocabMapping
    embedding: Tensor | None
    """[V, h], or None where the engine takes the target's."""


def write_folder(folder: Path, config: BaseModel, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Write both files; returns the hash of each tensor written.

    On an error, as of a full disk, no part of a file is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, temporary = folder / WEIGHTS, folder / f".{WEIGHTS}.tmp"
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    try:
        save_file(plain, temporary, metadata={"format": "pt"})
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
        sync_folder(folder)
        write_json(folder / CONFIG, config.model_dump(exclude_none=True))
    finally:
        temporary.unlink(missing_ok=True)
    return {name: tensor_hash(tensor) for name, tensor in plain.items()}


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json`; raises DataError when it is missing or not a JSON object."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            f"The draft's config cannot be read: {error}.", where=str(path), remedy="Export again with --from export."
        ) from None
    if not isinstance(config, dict):
        raise DataError("The draft's config is not a JSON object.", where=str(path), remedy="Export again with --from export.")
    return config


def read_typed(folder: Path, schema: type[_Config]) -> _Config:
    """`config.json` by the schema it was written by; raises DataError naming the first key that is not as it would be."""
    try:
        return schema.model_validate(read_config(folder))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{key}: {first['msg']}.", where=str(folder / CONFIG), remedy="Export again with --from export.") from None


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of `model.safetensors`; raises DataError when it is missing or damaged."""
    path = folder / WEIGHTS
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"The draft's weights cannot be read: {error}.", where=str(path), remedy="Export again with --from export."
        ) from None


def round_once(masters: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """float32 masters -> tensors of the export; raises DataError naming a weight that is not a finite number in `dtype`."""
    rounded = {name: tensor.detach().to("cpu", getattr(torch, dtype)) for name, tensor in masters.items()}
    for name, tensor in rounded.items():
        if not bool(torch.isfinite(tensor).all()):
            reason = "holds NaN or infinity" if not bool(torch.isfinite(masters[name]).all()) else f"overflows {dtype}"
            raise DataError(f"The trained weight {name} {reason}.", remedy="Train again with --from train and a lower learning rate.")
    return rounded


def target_embedding(target: Target) -> Tensor:
    """The target's embedding rows [V, h] in the target's dtype, as an engine holds them."""
    weights = target.weights()
    name = embedding_name(weights, target.config)
    rows = weights.read(name)
    if not rows.is_floating_point() or rows.shape != (target.config.vocab_size, target.config.hidden_size):
        raise DataError(
            f"The target's embedding {name} is {str(rows.dtype).removeprefix('torch.')} {list(rows.shape)}, "
            f"not floating point [{target.config.vocab_size}, {target.config.hidden_size}].",
            where=str(target.folder),
            remedy="Use a target whose embedding is not packed.",
        )
    return rows.to(getattr(torch, target.dtype))


def mapping_tensors(mapping: VocabMapping) -> dict[str, Tensor]:
    """`d2t` and `t2d`; nothing for a full vocabulary, where engines need no tables and vLLM refuses them."""
    mapping.check()
    if mapping.is_full:
        return {}
    return {"d2t": torch.from_numpy(mapping.d2t.copy()), "t2d": torch.from_numpy(mapping.t2d.copy())}


def mapping_of(tensors: Mapping[str, Tensor], *, vocab_size: int, draft_vocab_size: int, where: str) -> VocabMapping:
    """The mapping in a folder's tensors, checked; raises DataError when a table is missing, superfluous or wrong.

    A missing table must never pass: engines then take draft ids for the first target ids.
    """
    found = {name for name in ("d2t", "t2d") if name in tensors}
    needed = set() if draft_vocab_size == vocab_size else {"d2t", "t2d"}
    if found != needed:
        what = (
            f"lacks {', '.join(sorted(needed - found))}"
            if needed - found
            else f"has {', '.join(sorted(found - needed))} for a full vocabulary"
        )
        raise DataError(f"The draft {what}.", where=where, remedy="Export again with --from export.")
    if not needed:
        return VocabMapping.from_kept(np.arange(vocab_size), vocab_size)
    mapping = VocabMapping(tensors["d2t"].numpy(), tensors["t2d"].numpy()).check(where)
    if (mapping.d2t.size, mapping.t2d.size) != (draft_vocab_size, vocab_size):
        raise DataError(
            f"The tables map {mapping.d2t.size} to {mapping.t2d.size} tokens, the config says {draft_vocab_size} to {vocab_size}.",
            where=where,
            remedy="Export again with --from export.",
        )
    return mapping


def tensor_hash(tensor: Tensor) -> str:
    """BLAKE3 (hex) of a tensor's dtype, shape and bytes."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hash_bytes(str(tensor.dtype).encode(), repr(tuple(tensor.shape)).encode(), data.data)
