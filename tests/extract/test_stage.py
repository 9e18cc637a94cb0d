"""The stage: every row once, whatever the batches; resumed work has the same bytes; the gate can end it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.extraction import BOUNDARIES, open_tm, row, stage_task, write_random_rows

from draftproof.artifact import hash_file
from draftproof.errors import DataError, Refused
from draftproof.extract import stage
from draftproof.extract.canary import choose_rows, keyed
from draftproof.extract.engines.base import RowStates
from draftproof.recipe import ExtractSettings
from draftproof.records.rows import read_rows, write_rows
from draftproof.records.store import Store
from draftproof.stage import CanaryEvidence, Point

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

LENGTHS = (7, 13, 7, 30, 13, 1, 22)
TOKEN = 3 * 32 * 2 + 32 * 2 + 8
SMALL = ExtractSettings(boundaries=BOUNDARIES, shard_gb=40 * TOKEN / 1e9, batch_tokens=40, canary_rows=4)
"""Shards of at most 40 tokens: rows 0-2, 3, 4-6."""


def test_the_store_holds_every_rows_own_states(tmp_path: Path, tm_folder: Path, tm: LlamaForCausalLM) -> None:
    table = write_random_rows(tmp_path / "prepare", LENGTHS)
    outcome = stage.run(stage_task(tmp_path / "prepare", tmp_path / "extract"), SMALL, open_tm(tm_folder, "float32"))
    store = Store(tmp_path / "extract")
    assert store.keys == table.keys
    assert (outcome.counts["rows"], outcome.counts["tokens"], outcome.counts["shards"]) == (7, sum(LENGTHS), 3)
    assert outcome.counts["bytes"] == sum(path.stat().st_size for path in (tmp_path / "extract").glob("shard-*"))
    assert outcome.counts["engine"] == "transformers"
    assert outcome.counts["tokens_per_second"] > 0
    assert outcome.contents == store.contents()
    for index, key in enumerate(table.keys):
        ids = torch.from_numpy(table.token_ids(index).astype(np.int64))
        output = tm(input_ids=ids[None], output_hidden_states=True)
        stored = store.read(key)
        assert torch.equal(stored.token_ids.long(), ids)
        for place, boundary in enumerate(BOUNDARIES):
            torch.testing.assert_close(stored.aux[:, place].float(), output.hidden_states[boundary][0], rtol=2**-7, atol=1e-6)
        assert torch.equal(stored.teacher_top1, output.logits[0].argmax(-1))


def test_fp8_differs_from_bf16_within_its_bound_and_leaves_final_alone(tmp_path: Path, tm_folder: Path) -> None:
    table = write_random_rows(tmp_path / "prepare", LENGTHS)
    for codec in ("bf16", "fp8"):
        chosen = SMALL.model_copy(update={"codec": codec})
        stage.run(stage_task(tmp_path / "prepare", tmp_path / codec), chosen, open_tm(tm_folder, "float32"))
    plain, small = Store(tmp_path / "bf16"), Store(tmp_path / "fp8")
    assert small.layout.codec == "fp8"
    for key in table.keys:
        exact, coarse = plain.read(key), small.read(key)
        scale = exact.aux.float().abs().amax(-1, keepdim=True) / 448
        bound = torch.maximum(exact.aux.float().abs() * 2**-4, scale * 2**-10)
        assert bool(((coarse.aux.float() - exact.aux.float()).abs() <= bound * 1.1).all())  # bf16 rounds once more
        assert torch.equal(coarse.final, exact.final)
        assert torch.equal(coarse.teacher_top1, exact.teacher_top1)


class _KilledError(Exception):
    pass


def test_a_run_killed_before_any_shard_goes_on_to_the_same_bytes(tmp_path: Path, tm_folder: Path) -> None:
    write_random_rows(tmp_path / "prepare", LENGTHS)
    target = open_tm(tm_folder, "float32")
    whole = stage.run(stage_task(tmp_path / "prepare", tmp_path / "whole"), SMALL, target)
    for victim in range(3):
        out = tmp_path / f"killed-{victim}"

        def kill(point: Point, evidence: Any, victim: int = victim) -> None:
            if point == "running" and evidence["shard"] == victim:
                raise _KilledError

        with pytest.raises(_KilledError):
            stage.run(stage_task(tmp_path / "prepare", out, kill), SMALL, target)
        sealed = {path.name: path.stat().st_mtime_ns for path in out.glob("shard-*")}
        assert len(sealed) == victim
        resumed = stage.run(stage_task(tmp_path / "prepare", out), SMALL, target)
        assert resumed.contents == whole.contents
        for path in (tmp_path / "whole").glob("shard-*"):
            assert hash_file(path) == hash_file(out / path.name)
            assert sealed.get(path.name) in (None, (out / path.name).stat().st_mtime_ns)  # sealed work was not done again


def test_finished_work_does_not_load_the_target(tmp_path: Path, tm_folder: Path) -> None:
    write_random_rows(tmp_path / "prepare", LENGTHS)
    target = open_tm(tm_folder, "float32")
    whole = stage.run(stage_task(tmp_path / "prepare", tmp_path / "out"), SMALL, target)
    points: list[Point] = []
    again = stage.run(stage_task(tmp_path / "prepare", tmp_path / "out", lambda point, evidence: points.append(point)), SMALL, target)
    assert points == []
    assert again.contents == whole.contents


def test_the_gate_sees_every_point_in_order_and_can_end_it_before_the_bulk(tmp_path: Path, tm_folder: Path) -> None:
    write_random_rows(tmp_path / "prepare", LENGTHS)
    seen: list[tuple[Point, Any]] = []

    def refuse(point: Point, evidence: Any) -> None:
        seen.append((point, evidence))
        if point == "loaded":
            raise Refused("no", remedy="")

    with pytest.raises(Refused):
        stage.run(stage_task(tmp_path / "prepare", tmp_path / "out", refuse), SMALL, open_tm(tm_folder, "float32"))
    assert [point for point, _ in seen] == ["loading", "loaded"]
    assert isinstance(seen[1][1], CanaryEvidence)
    assert not list((tmp_path / "out").glob("shard-*"))

    seen.clear()
    stage.run(stage_task(tmp_path / "prepare", tmp_path / "out", lambda *a: seen.append(a)), SMALL, open_tm(tm_folder, "float32"))
    running = [evidence for point, evidence in seen if point == "running"]
    assert [evidence["bytes_left"] for evidence in running] == [(93 - done) * TOKEN for done in (0, 27, 57)]


def test_the_same_conversation_twice_is_extracted_once(tmp_path: Path, tm_folder: Path) -> None:
    ids = np.arange(3, 20, dtype=np.int32)
    write_rows(tmp_path / "prepare", [row(ids, "same"), row(ids[:9], "other"), row(ids, "same")])
    outcome = stage.run(stage_task(tmp_path / "prepare", tmp_path / "out"), SMALL, open_tm(tm_folder, "float32"))
    assert (outcome.counts["rows"], outcome.counts["tokens"]) == (2, 26)


def test_ingredients_hold_what_changes_states_and_nothing_else(tm_folder: Path) -> None:
    class Prepared:
        contents = {"token_ids": "abc", "rows": "changed by a new mask"}  # noqa: RUF012  nobody changes it

    target = open_tm(tm_folder, "float32")
    base = stage.ingredients(ExtractSettings(), target, {"prepare": Prepared()})  # type: ignore[dict-item]  # a manifest's one field
    assert base["boundaries"] == [2, 4, 5]
    assert base == stage.ingredients(ExtractSettings(boundaries=(2, 4, 5), canary_rows=3), target, {"prepare": Prepared()})  # type: ignore[dict-item]  # as above
    assert "changed by a new mask" not in str(base)
    for change in ({"codec": "fp8"}, {"boundaries": (1, 4, 5)}, {"batch_tokens": 64}, {"shard_gb": 1.0}):
        assert base != stage.ingredients(ExtractSettings(**change), target, {"prepare": Prepared()})  # type: ignore[arg-type, dict-item]  # as above


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30), most=st.integers(1, 200), enough=st.integers(1, 200))
def test_batches_hold_every_row_once_and_keep_to_the_limits(lengths: list[int], most: int, enough: int) -> None:
    batches = list(stage.plan_batches(np.array(lengths), range(len(lengths)), stage.BatchLimits(most, enough)))
    assert sorted(r for batch in batches for r in batch) == list(range(len(lengths)))
    for batch in batches:
        width = max(lengths[r] for r in batch)
        assert len(batch) == 1 or len(batch) * width <= most
        for place, r in enumerate(batch):  # who joined a batch that was full enough fits it
            assert place * width < enough or lengths[r] >= 0.9 * width
    widths = [max(lengths[r] for r in batch) for batch in batches]
    assert widths == sorted(widths, reverse=True)


def test_batches_worked_by_hand() -> None:
    lengths = np.array([10, 50, 49, 20, 48, 21])
    batches = stage.plan_batches(lengths, range(6), stage.BatchLimits(most=120, enough=60))
    assert list(batches) == [[1, 2], [4, 5], [3, 0]]  # 3 x 50 is too much; 48 alone is not enough, so 21 joins; then 20 with 10
    assert stage.BatchLimits.of(8192, "cpu") == stage.BatchLimits(1024, 128)
    assert stage.BatchLimits.of(8192, "cuda").most == 8192
    assert stage.BatchLimits.of(40, "cpu").most == 40


def test_canary_rows_hold_the_longest_equal_lengths_and_a_shared_prefix(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    rows = [row(generator.integers(3, 300, n).astype(np.int32), f"c{n}") for n in range(20, 60)]
    shared = generator.integers(3, 300, 16)
    for number, length in ((0, 70), (1, 75)):
        rows.append(row(np.concatenate([shared, generator.integers(3, 300, length)]).astype(np.int32), f"shared-{number}"))
    rows += [
        row(generator.integers(3, 300, 33).astype(np.int32), "twin"),
        row(np.full(3, 5, np.int32), "three"),
        row(np.full(200, 5, np.int32), "long"),
    ]
    write_rows(tmp_path, rows)
    table = read_rows(tmp_path)
    chosen = choose_rows(table, 10, aux=3)
    assert chosen == choose_rows(table, 10, aux=3)
    assert len(set(chosen)) == 10
    assert {40, 41, 44, 13, 42} <= set(chosen)  # both shared, the longest, 33 tokens and its twin
    assert 43 not in chosen  # as many tokens as aux boundaries: swapped axes would fit
    assert choose_rows(table, 1, aux=3) == [44]


def test_few_rows_are_all_canaries(tmp_path: Path) -> None:
    assert sorted(choose_rows(write_random_rows(tmp_path, [4, 9]), 10, aux=3)) == [0, 1]
    assert choose_rows(write_random_rows(tmp_path, [3]), 10, aux=3) == [0]


def test_an_engine_that_loses_rows_or_tokens_is_named() -> None:
    def states(length: int) -> RowStates:
        return RowStates(torch.ones(length, 3, 2), torch.ones(length, 2), torch.ones(length, dtype=torch.int32))

    batch = {"a": np.arange(4), "b": np.arange(6)}
    with pytest.raises(DataError, match=r"1 rows for 2: 1 lost, 0 unknown\. \[row b\]"):
        keyed({"a": states(4)}, batch)
    with pytest.raises(DataError, match=r"states of 2 tokens for a row of 6\. \[row b\].*prefix caching"):
        keyed({"a": states(4), "b": states(2)}, batch)
    assert list(keyed({"b": states(6), "a": states(4)}, batch)) == ["b", "a"]
