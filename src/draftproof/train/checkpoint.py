"""Resumable training state: one safetensors file a checkpoint, written whole or not at all.

Holds the float32 masters, both AdamW moments, the best weights so far, and the step numbers. No pickle.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from draftproof.artifact import write_atomic
from draftproof.draft.eagle3 import Eagle3Draft

NAME = "resume.safetensors"


@dataclass(frozen=True)
class Position:
    """Where a training stands."""

    step: int
    """Optimizer steps done."""
    supervised_seen: int
    """Counted step-0 rows seen."""
    best_step: int
    best_length: float
    """Held-out acceptance length of the best weights; 0.0 before the first forecast."""
    selected_by: str = "walk"
    """`walk`, or `start` where no held-out answer is long enough for a whole cycle."""


def save_checkpoint(folder: Path, position: Position, draft: Eagle3Draft, optimizer: torch.optim.AdamW, best: dict[str, Tensor]) -> None:
    """Replace the checkpoint atomically."""
    tensors = {f"draft.{name}": value for name, value in draft.state_dict().items()}
    tensors |= {f"best.{name}": value for name, value in best.items()}
    names = [name for name, parameter in draft.named_parameters() if parameter.requires_grad]
    for name, state in zip(names, _states(optimizer), strict=True):
        tensors |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    plain = {name: value.detach().to("cpu").contiguous() for name, value in tensors.items()}
    write_atomic(folder / NAME, save(plain, metadata={"position": json.dumps(asdict(position))}))


def load_checkpoint(folder: Path, draft: Eagle3Draft, optimizer: torch.optim.AdamW) -> tuple[Position, dict[str, Tensor]] | None:
    """Put a checkpoint's state back; None when there is none. A damaged file counts as none: rename made it
    whole or absent, so damage came from outside, and starting over is safe."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            position = Position(**json.loads(file.metadata()["position"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError):
        return None
    draft.load_state_dict({name.removeprefix("draft."): value for name, value in tensors.items() if name.startswith("draft.")})
    names = [name for name, parameter in draft.named_parameters() if parameter.requires_grad]
    state = {
        index: {key: tensors[f"optimizer.{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")} for index, name in enumerate(names)
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    best = {name.removeprefix("best."): value for name, value in tensors.items() if name.startswith("best.")}
    return position, best


def _states(optimizer: torch.optim.AdamW) -> list[dict[str, Tensor]]:
    return [optimizer.state[parameter] for group in optimizer.param_groups for parameter in group["params"]]
