"""TD, the tiny draft of the tests: it fits TM (8 layers, hidden 32, vocabulary 320), every weight random, norms far from 1."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from draftproof.draft.eagle3 import DraftConfig, Eagle3Draft
from draftproof.export.schema import Verifier
from draftproof.recipe import TargetSettings
from draftproof.records.mapping import VocabMapping
from draftproof.target.target import Target, open_target

TD = DraftConfig(
    hidden_size=32,
    intermediate_size=48,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocab_size=320,
    draft_vocab_size=64,
    aux=3,
    boundaries=(2, 4, 6),  # not the default (2, 4, 5), so that an engine's guess shows
    hidden_act="silu",
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
    max_positions=256,
)

VERIFIER = Verifier(
    name="acme/tiny",
    hub=True,
    architecture="LlamaForCausalLM",
    layers=8,
    hidden_size=32,
    vocab_size=320,
    max_positions=256,
    dtype="float32",
)


def tiny_config(**changes: Any) -> DraftConfig:
    """TD's config with other values."""
    return dataclasses.replace(TD, **changes)


def tiny_draft(config: DraftConfig = TD, seed: int = 0) -> Eagle3Draft:
    """TD: matrices keep the size of what passes through, norm weights uniform in 0.2..3."""
    draft, generator = Eagle3Draft(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() == 1:
                parameter.copy_(0.2 + 2.8 * torch.rand(parameter.shape, generator=generator))
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
    return draft.eval().requires_grad_(False)


def tiny_mapping(config: DraftConfig = TD) -> VocabMapping:
    """Id 0 and a spread of others: the first 64 ids, or their numbers read as offsets, are another vocabulary."""
    kept = np.sort(np.random.default_rng(0).permutation(np.arange(1, config.vocab_size))[: config.draft_vocab_size - 1])
    if config.draft_vocab_size == config.vocab_size:
        kept = np.arange(1, config.vocab_size)
    return VocabMapping.from_kept(np.concatenate([[0], kept]), config.vocab_size)


def masters(draft: Eagle3Draft) -> dict[str, torch.Tensor]:
    """Its float32 weights by name."""
    return {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}


def target_in(folder: Path, dtype: str = "auto") -> Target:
    """The target of a folder, computing in `dtype`."""
    return open_target(TargetSettings.model_validate({"model": str(folder), "dtype": dtype}))


def spoil(
    folder: Path,
    *,
    config: Callable[[dict[str, Any]], object] | None = None,
    tensors: Callable[[dict[str, torch.Tensor]], object] | None = None,
) -> None:
    """Change an exported folder in place, as a faulty exporter would have written it."""
    if config is not None:
        values = json.loads((folder / "config.json").read_text())
        config(values)
        (folder / "config.json").write_text(json.dumps(values, sort_keys=True))
    if tensors is not None:
        held = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
        tensors(held)
        save_file(held, folder / "model.safetensors")
