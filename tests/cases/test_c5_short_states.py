"""C5: tokens served from a prefix cache have no states; padding the front with zeros hides it from a count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.extraction import gate_checkpoint, open_tm, stage_task, write_random_rows

from draftproof.errors import DataError, Refused
from draftproof.extract import stage
from draftproof.extract.engines.base import RowStates
from draftproof.extract.engines.transformers import TransformersEngine
from draftproof.recipe import ExtractSettings

SHARED = 32


class _PrefixCache(TransformersEngine):
    """From the second row on, gives no states for a prefix that it has seen."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: set[bytes] = set()

    def states(self, batch: Mapping[str, np.ndarray], *, logprobs: bool = False) -> dict[str, RowStates]:
        answers = super().states(batch, logprobs=logprobs)
        for key, ids in batch.items():
            prefix = ids[:SHARED].tobytes()
            if prefix in self.seen:
                answers[key] = self.cut(answers[key])
            self.seen.add(prefix)
        return answers

    def cut(self, answer: RowStates) -> RowStates:
        return replace(answer, aux=answer.aux[SHARED:], final=answer.final[SHARED:])


class _PaddedPrefixCache(_PrefixCache):
    def cut(self, answer: RowStates) -> RowStates:
        aux, final = answer.aux.clone(), answer.final.clone()
        aux[:SHARED], final[:SHARED] = 0, 0
        return replace(answer, aux=aux, final=final)


def test_short_states_stop_the_canary(tmp_path: Path, tm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_rows(tmp_path / "prepare", [50, 41, 60], shared=SHARED)
    monkeypatch.setattr(stage, "TransformersEngine", _PrefixCache)
    target = open_tm(tm_folder, "float32")
    with pytest.raises(DataError, match=r"states of \d+ tokens for a row of \d+\..*prefix caching"):
        stage.run(stage_task(tmp_path / "prepare", tmp_path / "out", gate_checkpoint(target)), ExtractSettings(), target)
    assert not list((tmp_path / "out").glob("shard-*"))


def test_zero_padded_states_stop_at_the_gate(tmp_path: Path, tm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_rows(tmp_path / "prepare", [50, 41, 60], shared=SHARED)
    monkeypatch.setattr(stage, "TransformersEngine", _PaddedPrefixCache)
    target = open_tm(tm_folder, "float32")
    with pytest.raises(Refused, match=r"parity\.rows: Row \w+: boundary 2 is all zero at token 0 \(32 of"):
        stage.run(stage_task(tmp_path / "prepare", tmp_path / "out", gate_checkpoint(target)), ExtractSettings(), target)


def test_zeros_that_no_canary_saw_are_not_stored(tmp_path: Path, tm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that fills later: only the bulk meets it, and the store's own check refuses the shard."""
    write_random_rows(tmp_path / "prepare", [50, 41, 60], shared=SHARED)
    monkeypatch.setattr(stage, "TransformersEngine", _PaddedPrefixCache)
    target = open_tm(tm_folder, "float32")
    with pytest.raises(DataError, match=r"all zero at token 0\. \[row \w+\]"):
        stage.run(stage_task(tmp_path / "prepare", tmp_path / "out"), ExtractSettings(), target)
    assert not list((tmp_path / "out").glob("shard-*"))


def test_shared_prefixes_without_a_cache_pass(tmp_path: Path, tm_folder: Path) -> None:
    table = write_random_rows(tmp_path / "prepare", [50, 41, 60], shared=SHARED)
    target = open_tm(tm_folder, "float32")
    stage.run(stage_task(tmp_path / "prepare", tmp_path / "out", gate_checkpoint(target)), ExtractSettings(), target)
    from draftproof.records.store import Store

    store = Store(tmp_path / "out")
    first, second = (store.read(key).aux[:SHARED].float() for key in table.keys[:2])
    torch.testing.assert_close(first, second, rtol=2**-7, atol=1e-6)  # the same tokens have the same states
