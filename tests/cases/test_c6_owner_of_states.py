"""C6: a flat result cut up by input order breaks when the engine reorders or splits; shapes cannot tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.extraction import gate_checkpoint, open_tm, stage_task, write_random_rows

from draftproof.errors import Refused
from draftproof.extract import stage
from draftproof.extract.engines.base import RowStates
from draftproof.extract.engines.transformers import TransformersEngine
from draftproof.recipe import ExtractSettings
from draftproof.records.store import Store

LENGTHS = [7, 13, 7, 30, 13]


class _AnyOrder(TransformersEngine):
    """Answers the last row first, and row 4 in two steps; keyed, so nothing is lost."""

    def states(self, batch: Mapping[str, np.ndarray], *, logprobs: bool = False) -> dict[str, RowStates]:
        answers = {}
        for key, ids in reversed(batch.items()):
            if len(ids) == 30 and not logprobs:
                parts = [super(_AnyOrder, self).states({key: ids[:n]})[key] for n in (12, 30)]
                aux = torch.cat([parts[0].aux, parts[1].aux[12:]])
                answers[key] = replace(parts[1], aux=aux)
            else:
                answers[key] = super().states({key: ids}, logprobs=logprobs)[key]
        return answers


class _CutByInputOrder(TransformersEngine):
    """A scheduler that sorts equal lengths the other way, and a caller that cuts its flat answer by input order."""

    def states(self, batch: Mapping[str, np.ndarray], *, logprobs: bool = False) -> dict[str, RowStates]:
        answers = super().states(batch, logprobs=logprobs)
        scheduled = sorted(answers, key=lambda key: (len(batch[key]), list(batch).index(key) * -1))
        asked = sorted(answers, key=lambda key: (len(batch[key]), list(batch).index(key)))
        flat = {name: torch.cat([getattr(answers[key], name) for key in scheduled]) for name in ("aux", "final", "teacher_top1")}
        found, start = {}, 0
        for key in asked:
            own = slice(start, start + len(batch[key]))
            found[key] = RowStates(flat["aux"][own], flat["final"][own], flat["teacher_top1"][own], answers[key].logprobs)
            start = own.stop
        return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_of_a_row_of_equal_length_are_refused_and_their_owner_is_named(
    tmp_path: Path, tm_folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    table = write_random_rows(tmp_path / "prepare", LENGTHS)
    monkeypatch.setattr(stage, "TransformersEngine", _CutByInputOrder)
    target = open_tm(tm_folder, dtype)
    evidence: list[str] = []

    def checkpoint(point: str, shown: object) -> None:
        from tests.helpers.extraction import gate_context

        from draftproof.gate.parity import parity_batching

        if point == "loaded":
            evidence.append(parity_batching(gate_context(target, shown)).evidence)
        gate_checkpoint(target)(point, shown)  # type: ignore[arg-type]  # one of the points

    with pytest.raises(Refused):
        stage.run(stage_task(tmp_path / "prepare", tmp_path / "out", checkpoint), ExtractSettings(), target)
    mates = {table.keys[0]: table.keys[2], table.keys[2]: table.keys[0], table.keys[1]: table.keys[4], table.keys[4]: table.keys[1]}
    victim = evidence[0].split()[1]
    assert f"they are the states of row {mates[victim]}" in evidence[0]


def test_an_engine_may_answer_in_any_order_and_in_pieces(tmp_path: Path, tm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = write_random_rows(tmp_path / "prepare", LENGTHS)
    target = open_tm(tm_folder, "float32")
    stage.run(stage_task(tmp_path / "prepare", tmp_path / "plain"), ExtractSettings(), target)
    monkeypatch.setattr(stage, "TransformersEngine", _AnyOrder)
    stage.run(stage_task(tmp_path / "prepare", tmp_path / "other", gate_checkpoint(target)), ExtractSettings(), target)
    plain, other = Store(tmp_path / "plain"), Store(tmp_path / "other")
    for key in table.keys:
        torch.testing.assert_close(other.read(key).aux.float(), plain.read(key).aux.float(), rtol=2**-7, atol=1e-5)


def test_no_state_leaks_from_call_to_call(tmp_path: Path, tm_folder: Path) -> None:
    table = write_random_rows(tmp_path / "prepare", LENGTHS)
    engine = TransformersEngine(open_tm(tm_folder, "float32"), (2, 4, 5), "cpu")
    engine.load()
    rows = {key: table.token_ids(index) for index, key in enumerate(table.keys)}
    first = engine.states(rows)
    engine.states(dict(reversed(rows.items())))
    second = engine.states(rows)
    for key in rows:
        assert torch.equal(first[key].aux, second[key].aux)
        assert torch.equal(first[key].final, second[key].final)
