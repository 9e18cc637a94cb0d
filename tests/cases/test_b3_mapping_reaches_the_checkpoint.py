"""B3: the mapping never reaches the checkpoint, so draft ids become the first N target ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from draftproof.errors import DataError
from draftproof.export.files import target_embedding
from draftproof.export.loaders import load_sglang, load_vllm
from draftproof.export.proof import prove
from draftproof.export.schema import describe
from draftproof.export.sglang import to_sglang
from draftproof.export.vllm import to_vllm
from draftproof.records.mapping import VocabMapping
from draftproof.target.target import Target
from tiny_draft import TD, masters, spoil, tiny_draft, tiny_mapping


@pytest.fixture
def folders(tm_target: Target, tmp_path: Path) -> dict[str, Path]:
    to_vllm(tmp_path / "vllm", masters(tiny_draft()), TD, tiny_mapping(), tm_target, draft_tokens=3)
    to_sglang(tmp_path / "sglang", masters(tiny_draft()), TD, tiny_mapping(), tm_target)
    return {"vllm": tmp_path / "vllm", "sglang": tmp_path / "sglang"}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_file_alone_gives_the_kept_ids_back(folders: dict[str, Path], engine: str) -> None:
    """1,000 draft ids, mapped by nothing but the safetensors file, against the ids that were chosen."""
    held = load_file(folders[engine] / "model.safetensors")
    drafted = np.random.default_rng(3).integers(0, 64, 1000)
    assert (drafted + held["d2t"][drafted] == tiny_mapping().kept[drafted]).all()
    assert (np.flatnonzero(held["t2d"]) == tiny_mapping().kept).all()
    assert tiny_mapping().kept[63] != 63, "the identity would hide a lost mapping"


@pytest.mark.parametrize("table", ["d2t", "t2d"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_lost_table_is_refused(folders: dict[str, Path], tm_target: Target, engine: str, table: str) -> None:
    spoil(folders[engine], tensors=lambda held: held.pop(table))
    load = {"vllm": load_vllm, "sglang": load_sglang}[engine]
    with pytest.raises(DataError, match=f"lacks {table}"):
        load(folders[engine], describe(tm_target), target_embedding(tm_target))


def test_a_table_of_zeros_is_refused(folders: dict[str, Path], tm_target: Target) -> None:
    """Zeros are a legal identity for the first 64 ids; beside this t2d they are a table that was never filled."""
    spoil(folders["vllm"], tensors=lambda held: held["d2t"].zero_())
    with pytest.raises(DataError, match="t2d is not true exactly at the target ids of d2t"):
        load_vllm(folders["vllm"], describe(tm_target), target_embedding(tm_target))


def test_an_identity_of_both_tables_is_another_model(folders: dict[str, Path], tm_target: Target) -> None:
    """Second variant: both tables agree with each other, and with nothing that was trained."""

    def identity(held: dict[str, torch.Tensor]) -> None:
        held["d2t"].zero_()
        held["t2d"].zero_()[:64] = True

    spoil(folders["vllm"], tensors=identity)
    embedding = target_embedding(tm_target)
    loaded = load_vllm(folders["vllm"], describe(tm_target), embedding)
    with pytest.raises(DataError, match="it can propose other tokens"):
        prove(loaded, tiny_draft(), tiny_mapping(), embedding, layers=8, seed=0)


def test_a_true_identity_passes(tm_target: Target, tmp_path: Path) -> None:
    mapping = VocabMapping.from_kept(np.arange(64), 320)
    to_vllm(tmp_path, masters(tiny_draft()), TD, mapping, tm_target, draft_tokens=3)
    embedding = target_embedding(tm_target)
    loaded = load_vllm(tmp_path, describe(tm_target), embedding)
    assert prove(loaded, tiny_draft(), mapping, embedding, layers=8, seed=0) < 1e-5
