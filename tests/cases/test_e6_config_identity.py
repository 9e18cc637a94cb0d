"""E6: architecture missing, wrong vocabulary number, no head, needless tables for a full vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftproof.draft.eagle3 import DraftConfig
from draftproof.errors import DataError
from draftproof.export.files import target_embedding
from draftproof.export.forward import LoadedDraft
from draftproof.export.loaders import load_sglang, load_vllm
from draftproof.export.proof import prove
from draftproof.export.schema import describe
from draftproof.export.sglang import to_sglang
from draftproof.export.vllm import to_vllm
from draftproof.target.target import Target
from tiny_draft import masters, spoil, tiny_config, tiny_draft, tiny_mapping

Change = Callable[[dict[str, Any]], object]


def _export(engine: str, folder: Path, target: Target, config: DraftConfig) -> Path:
    if engine == "vllm":
        to_vllm(folder, masters(tiny_draft(config)), config, tiny_mapping(config), target, draft_tokens=3)
    else:
        to_sglang(folder, masters(tiny_draft(config)), config, tiny_mapping(config), target)
    return folder


def _load(engine: str, folder: Path, target: Target) -> LoadedDraft:
    return {"vllm": load_vllm, "sglang": load_sglang}[engine](folder, describe(target), target_embedding(target))


@pytest.mark.parametrize(
    ("engine", "change", "reason"),
    [
        ("vllm", lambda c: c.pop("architectures"), "architectures is missing"),
        ("vllm", lambda c: c.update(model_type="llama"), "model_type or speculators_config is wrong"),
        ("vllm", lambda c: c.pop("speculators_config"), "model_type or speculators_config is wrong"),
        ("vllm", lambda c: c.update(speculators_model_type="eagle"), "speculators_model_type is not eagle3"),
        ("vllm", lambda c: c["transformer_layer_config"].update(vocab_size=64), "for a full vocabulary"),
        ("vllm", lambda c: c.update(draft_vocab_size=None), "for a full vocabulary"),
        ("vllm", lambda c: c["transformer_layer_config"].update(model_type="gemma"), "no EAGLE-3 draft of model_type 'gemma'"),
        ("sglang", lambda c: c.pop("architectures"), "picks the class by architectures"),
        ("sglang", lambda c: c.update(architectures=["Eagle3DraftModel"]), "picks the class by architectures"),
        ("sglang", lambda c: c.update(vocab_size=64), "for a full vocabulary"),
        ("sglang", lambda c: c.update(draft_vocab_size=None), "draft_vocab_size is null"),
        ("sglang", lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings is true"),
        ("sglang", lambda c: c.update(max_position_embeddings=128), "max_position_embeddings is 128, the target serves 256"),
    ],
)
def test_a_field_that_decides_is_checked(engine: str, change: Change, reason: str, tm_target: Target, tmp_path: Path) -> None:
    folder = _export(engine, tmp_path, tm_target, tiny_config())
    spoil(folder, config=change)
    with pytest.raises(DataError, match=reason):
        _load(engine, folder, tm_target)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_folder_of_the_other_engine_is_refused(engine: str, tm_target: Target, tmp_path: Path) -> None:
    folder = _export("sglang" if engine == "vllm" else "vllm", tmp_path, tm_target, tiny_config())
    with pytest.raises(DataError, match=r"speculators|picks the class"):
        _load(engine, folder, tm_target)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_full_vocabulary_has_no_tables(engine: str, tm_target: Target, tmp_path: Path) -> None:
    config = tiny_config(draft_vocab_size=320)
    folder = _export(engine, tmp_path, tm_target, config)
    assert not {"d2t", "t2d"} & set(load_file(folder / "model.safetensors"))
    embedding = target_embedding(tm_target)
    assert prove(_load(engine, folder, tm_target), tiny_draft(config), tiny_mapping(config), embedding, layers=8, seed=0) < 1e-5


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_tables_beside_a_full_vocabulary_are_refused(engine: str, tm_target: Target, tmp_path: Path) -> None:
    """vLLM has no parameter for them then and dies at load; SGLang takes the slow path for nothing."""
    folder = _export(engine, tmp_path, tm_target, tiny_config(draft_vocab_size=320))
    tables = {"d2t": torch.zeros(320, dtype=torch.int64), "t2d": torch.ones(320, dtype=torch.bool)}
    spoil(folder, tensors=lambda held: held.update(tables))
    with pytest.raises(DataError, match="has d2t, t2d for a full vocabulary"):
        _load(engine, folder, tm_target)
