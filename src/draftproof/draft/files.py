"""The trained draft on disk: `draft.safetensors` (float32, names as in `eagle3.py`) and `draft.json` (its config)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from draftproof.artifact import read_json, write_atomic, write_json
from draftproof.draft.eagle3 import DraftConfig, Eagle3Draft
from draftproof.errors import DamagedArtifact

WEIGHTS, CONFIG = "draft.safetensors", "draft.json"


def save_draft(folder: Path, config: DraftConfig, tensors: dict[str, Tensor]) -> None:
    """Write both files atomically; tensors are written as contiguous float32."""
    plain = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in sorted(tensors.items())}
    write_atomic(folder / WEIGHTS, save(plain))
    write_json(folder / CONFIG, dataclasses.asdict(config))


def load_draft(folder: Path) -> tuple[Eagle3Draft, DraftConfig]:
    """Build the draft from its config and load it strictly; raises DamagedArtifact naming the tensor."""
    try:
        values = read_json(folder / CONFIG)
        config = DraftConfig(**{**values, "boundaries": tuple(values["boundaries"])})
    except (OSError, TypeError, KeyError) as error:
        raise DamagedArtifact(
            f"The draft's config cannot be read: {error}.", where=str(folder / CONFIG), remedy="Train again with --from train."
        ) from None
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise DamagedArtifact(
            f"The draft's weights cannot be read: {error}.", where=str(folder / WEIGHTS), remedy="Train again with --from train."
        ) from None
    draft = Eagle3Draft(config, target_hidden_size=tensors["fc.weight"].shape[1] // config.aux if "fc.weight" in tensors else None)
    try:
        draft.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise DamagedArtifact(
            f"The draft's weights do not fit its config: {error}", where=str(folder), remedy="Train again with --from train."
        ) from None
    return draft.eval(), config
