"""E2: embedding key refused, or target and draft widths differ. Target hidden 48, draft hidden 32."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftproof.draft.eagle3 import Eagle3Draft
from draftproof.errors import DataError
from draftproof.export.files import mapping_tensors
from draftproof.export.loaders import load_vllm
from draftproof.export.proof import prove
from draftproof.export.schema import vllm_config
from tiny_draft import TD, VERIFIER, masters, tiny_draft, tiny_mapping

WIDE = dataclasses.replace(VERIFIER, hidden_size=48)
GENERATOR = torch.Generator().manual_seed(11)
TARGETS_ROWS, OWN_ROWS = torch.randn(320, 48, generator=GENERATOR), torch.randn(320, 32, generator=GENERATOR)


def _narrow_draft() -> Eagle3Draft:
    draft = Eagle3Draft(TD, target_hidden_size=48).requires_grad_(False)
    same = masters(tiny_draft())
    same["fc.weight"] = torch.randn(32, 3 * 48, generator=torch.Generator().manual_seed(12)) / 12
    draft.load_state_dict(same)
    return draft


def _folder(folder: Path, embedding: torch.Tensor | None) -> Path:
    """Another exporter's folder: the embedding is the draft's own, and `target_hidden_size` says 48."""
    folder.mkdir()
    config = vllm_config(TD, VERIFIER, draft_tokens=3).model_dump(exclude_none=True) | {"target_hidden_size": 48}
    (folder / "config.json").write_text(json.dumps(config))
    own = {} if embedding is None else {"embed_tokens.weight": embedding}
    save_file(masters(_narrow_draft()) | mapping_tensors(tiny_mapping()) | own, folder / "model.safetensors")
    return folder


def test_a_narrow_draft_with_its_own_embedding_loads_and_is_the_trained_one(tmp_path: Path) -> None:
    loaded = load_vllm(_folder(tmp_path / "draft", OWN_ROWS), WIDE, TARGETS_ROWS)
    assert loaded.weights["fc.weight"].shape == (32, 144)
    assert prove(loaded, _narrow_draft(), tiny_mapping(), OWN_ROWS, layers=8, seed=0) < 1e-5


def test_without_it_the_dry_run_refuses(tmp_path: Path) -> None:
    """vLLM would keep a table that was never filled, since the target's is too wide to share."""
    with pytest.raises(DataError, match=r"embed_tokens\.weight is missing, and the target's is 48 wide"):
        load_vllm(_folder(tmp_path / "draft", None), WIDE, TARGETS_ROWS)


def test_an_embedding_of_the_targets_width_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"embed_tokens\.weight is \[320, 48\], not \[320, 32\]"):
        load_vllm(_folder(tmp_path / "draft", TARGETS_ROWS), WIDE, TARGETS_ROWS)


def test_a_config_that_hides_the_width_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "draft", OWN_ROWS)
    config = json.loads((folder / "config.json").read_text())
    del config["target_hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"target_hidden_size is 32, the target's is 48.*fc\.weight is \[32, 144\], not \[32, 96\]"):
        load_vllm(folder, WIDE, TARGETS_ROWS)


def test_our_own_exporter_refuses_what_it_cannot_embed() -> None:
    """The embedding that it writes is the target's."""
    with pytest.raises(DataError, match="hidden size 32, the target's is 48"):
        vllm_config(TD, WIDE, draft_tokens=3)
