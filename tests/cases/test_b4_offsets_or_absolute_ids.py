"""B4: offsets read as absolute ids, or the other way round. Kept ids 0, 4, 9 of 10: offsets 0, 3, 7."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from draftproof.errors import DataError
from draftproof.export.files import target_embedding
from draftproof.export.loaders import load_sglang, load_vllm
from draftproof.export.schema import describe
from draftproof.export.sglang import to_sglang
from draftproof.export.vllm import to_vllm
from draftproof.records.mapping import VocabMapping
from draftproof.target.target import Target
from tiny_draft import TD, masters, spoil, tiny_draft, tiny_mapping


def test_offsets_by_hand() -> None:
    mapping = VocabMapping.from_kept(np.array([0, 4, 9]), 10)
    assert mapping.d2t.tolist() == [0, 3, 7]
    assert mapping.kept.tolist() == [0, 4, 9]


def test_absolute_ids_in_the_place_of_offsets_are_refused() -> None:
    """0, 4, 9 read as offsets would be 0, 5, 11, outside a target of 10."""
    t2d = np.isin(np.arange(10), [0, 4, 9])
    with pytest.raises(DataError, match=r"target id 11 is outside 0\.\.9 \(are these absolute ids"):
        VocabMapping(np.array([0, 4, 9]), t2d).check()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_export_holds_offsets_and_absolute_ids_in_it_are_refused(tm_target: Target, tmp_path: Path, engine: str) -> None:
    """Both engines add the draft id: `base + draft_id_to_target_id` in vLLM, `d2t + arange` in SGLang."""
    mapping = tiny_mapping()
    if engine == "vllm":
        to_vllm(tmp_path, masters(tiny_draft()), TD, mapping, tm_target, draft_tokens=3)
    else:
        to_sglang(tmp_path, masters(tiny_draft()), TD, mapping, tm_target)
    held = load_file(tmp_path / "model.safetensors")
    assert (np.arange(64) + held["d2t"] == mapping.kept).all()
    load = {"vllm": load_vllm, "sglang": load_sglang}[engine]
    assert (load(tmp_path, describe(tm_target), target_embedding(tm_target)).mapping.kept == mapping.kept).all()

    import torch

    spoil(tmp_path, tensors=lambda tensors: tensors["d2t"].add_(torch.arange(64)))
    with pytest.raises(DataError, match="The draft vocabulary is damaged"):
        load(tmp_path, describe(tm_target), target_embedding(tm_target))
