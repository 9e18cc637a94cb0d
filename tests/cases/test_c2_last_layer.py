"""C2: "last layer" means L in one convention and L-1 in another; axes that happen to be equal hide a swap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.extraction import gate_checkpoint, open_tm, stage_task, write_random_rows

from draftproof.errors import Refused, UsageError
from draftproof.extract import stage
from draftproof.extract.engines.base import RowStates
from draftproof.extract.engines.transformers import TransformersEngine
from draftproof.recipe import ExtractSettings
from draftproof.target.loaded import capture

SETTINGS = ExtractSettings(boundaries=(2, 4, 5))


class _LastButOne(TransformersEngine):
    """Takes layer id L-1 for the final state: boundaries [2, 4, 5, 7] for [2, 4, 5, 8]."""

    def states(self, batch: Mapping[str, np.ndarray], *, logprobs: bool = False) -> dict[str, RowStates]:
        answers = super().states(batch, logprobs=logprobs)
        for key, ids in batch.items():
            with capture(self.model, (7,)) as captured, torch.inference_mode():
                self.model(input_ids=torch.from_numpy(ids[None].astype(np.int64)), use_cache=False)
                answers[key] = replace(answers[key], final=captured.take()[7][0].to(torch.bfloat16))
        return answers


class _SwappedAxes(TransformersEngine):
    """Reads [A, T, H] as [T, A, H]; fits where T = A."""

    def states(self, batch: Mapping[str, np.ndarray], *, logprobs: bool = False) -> dict[str, RowStates]:
        answers = super().states(batch, logprobs=logprobs)
        return {
            key: replace(answer, aux=answer.aux.transpose(0, 1).reshape(answer.aux.shape).contiguous()) for key, answer in answers.items()
        }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_state_before_the_last_block_is_not_the_final_one(
    tmp_path: Path, tm_folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    write_random_rows(tmp_path / "prepare", [20, 11])
    monkeypatch.setattr(stage, "TransformersEngine", _LastButOne)
    target = open_tm(tm_folder, dtype)
    reports: list[str] = []

    def checkpoint(point: str, evidence: object) -> None:
        from tests.helpers.extraction import gate_context

        from draftproof.gate.parity import parity_boundaries

        if point == "loaded":
            reports.append(parity_boundaries(gate_context(target, evidence)).evidence)
        gate_checkpoint(target)(point, evidence)  # type: ignore[arg-type]  # one of the points

    with pytest.raises(Refused, match=r"parity\.logprobs: Top-1 agreement 0\."):
        stage.run(stage_task(tmp_path / "prepare", tmp_path / "out", checkpoint), SETTINGS, target)
    assert "what is stored as boundary 8" in reports[0]
    assert "matches boundary 7 (shift -1)" in reports[0]


@pytest.mark.parametrize("lengths", [[3, 3], [20, 11]])
def test_swapped_axes_are_refused_also_where_the_shapes_fit(
    tmp_path: Path, tm_folder: Path, monkeypatch: pytest.MonkeyPatch, lengths: list[int]
) -> None:
    write_random_rows(tmp_path / "prepare", lengths)
    monkeypatch.setattr(stage, "TransformersEngine", _SwappedAxes)
    target = open_tm(tm_folder, "float32")
    with pytest.raises(Refused, match="matches none"):
        stage.run(stage_task(tmp_path / "prepare", tmp_path / "out", gate_checkpoint(target)), SETTINGS, target)


@pytest.mark.parametrize("ids", [(2, 4, 5, 8), (2, 4, 5, 9), (2, 4, 4), (4, 2, 5), (0, 4, 5)])
def test_ids_that_are_no_aux_boundaries_are_refused_before_anything_is_loaded(
    tmp_path: Path, tm_folder: Path, ids: tuple[int, ...]
) -> None:
    write_random_rows(tmp_path / "prepare", [20])
    with pytest.raises(UsageError, match="boundar"):
        stage.run(stage_task(tmp_path / "prepare", tmp_path / "out"), ExtractSettings(boundaries=ids), open_tm(tm_folder, "float32"))
    assert not (tmp_path / "out").exists()


def test_final_is_stored_apart_and_no_aux_slice_is_lost(tmp_path: Path, tm_folder: Path) -> None:
    from draftproof.records.store import Store

    table = write_random_rows(tmp_path / "prepare", [8])  # T = L on purpose
    target = open_tm(tm_folder, "float32")
    stage.run(stage_task(tmp_path / "prepare", tmp_path / "out", gate_checkpoint(target)), SETTINGS, target)
    stored = Store(tmp_path / "out").read(table.keys[0])
    assert stored.aux.shape == (8, 3, 32)
    assert stored.final.shape == (8, 32)
