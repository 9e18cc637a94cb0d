"""The store: what goes in comes out, and nothing that is not proven counts."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from draftproof.artifact import hash_file
from draftproof.errors import DamagedArtifact, DataError, DraftproofError, OtherRunsWork
from draftproof.records import store as store_module
from draftproof.records.layout import StoreLayout, plan_shards, token_bytes
from draftproof.records.store import Store, StoreWriter

A, H, V = 3, 5, 50


def _layout(codec: str = "bf16") -> StoreLayout:
    return StoreLayout(boundaries=(2, 4, 5), hidden_size=H, codec=codec, vocab_size=V)


def _row(seed: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "token_ids": torch.randint(0, V, (length,), generator=generator, dtype=torch.int32),
        "aux": torch.randn(length, A, H, generator=generator).to(torch.bfloat16),
        "final": torch.randn(length, H, generator=generator).to(torch.bfloat16),
        "teacher_top1": torch.randint(0, V, (length,), generator=generator, dtype=torch.int32),
    }


def _write(folder: Path, lengths: list[int], room: int, codec: str = "bf16", only: set[int] | None = None) -> list[list[int]]:
    """A store of rows 0, 1, ... with keys row-0, row-1, ..., `room` tokens a shard."""
    layout = _layout(codec)
    shards = plan_shards(lengths, layout, room * token_bytes(layout) / 1e9)
    with StoreWriter(folder, layout, shards) as writer:
        for index, members in enumerate(shards):
            if only is None or index in only:
                rows = [_row(row, lengths[row]) for row in members]
                joined = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
                writer.write_shard(index, [f"row-{row}" for row in members], [lengths[row] for row in members], **joined)
    return shards


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), room=st.integers(1, 90), codec=st.sampled_from(["bf16", "fp8"]))
def test_every_row_comes_back_whatever_the_lengths_and_shards(lengths: list[int], room: int, codec: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        _write(Path(name), lengths, room, codec)
        store = Store(Path(name))
        assert store.keys == [f"row-{row}" for row in range(len(lengths))]
        assert store.tokens == sum(lengths)
        for row in reversed(range(len(lengths))):
            wanted, got = _row(row, lengths[row]), store.read(f"row-{row}")
            assert torch.equal(got.token_ids, wanted["token_ids"])
            assert torch.equal(got.final, wanted["final"])
            assert torch.equal(got.teacher_top1, wanted["teacher_top1"].long())
            if codec == "bf16":
                assert torch.equal(got.aux, wanted["aux"])
            else:
                assert (got.aux.float() - wanted["aux"].float()).abs().max() <= 2**-4 * wanted["aux"].float().abs().max()


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20), room=st.integers(1, 90))
def test_shards_hold_all_rows_in_order_and_overflow_only_for_a_single_row(lengths: list[int], room: int) -> None:
    layout = _layout()
    shards = plan_shards(lengths, layout, room * token_bytes(layout) / 1e9)
    assert [row for members in shards for row in members] == list(range(len(lengths)))
    for members in shards:
        assert len(members) == 1 or sum(lengths[row] for row in members) <= room
    for members, following in itertools.pairwise(shards):  # no shard could have taken the next row
        assert sum(lengths[row] for row in members) + lengths[following[0]] > room


@pytest.mark.parametrize(("codec", "expected"), [("bf16", 3 * 5 * 2 + 5 * 2 + 8), ("fp8", 3 * (5 + 4) + 5 * 2 + 8)])
def test_token_bytes_are_what_lies_on_disk(tmp_path: Path, codec: str, expected: int) -> None:
    assert token_bytes(_layout(codec)) == expected
    _write(tmp_path, [1000], 1000, codec)
    assert 0 < (tmp_path / "shard-00000.safetensors").stat().st_size - 1000 * expected < 1000  # header, key, row_start


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_cut_or_zeroed_stretch_of_a_shard_is_noticed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = _write(folder, [7, 9, 4, 11], 12)
        victim = data.draw(st.integers(0, len(shards) - 1))
        path = folder / f"shard-{victim:05d}.safetensors"
        content = path.read_bytes()
        cut = data.draw(st.booleans())
        start = data.draw(st.integers(0, len(content) - 1))
        path.unlink()  # a new file, as a torn copy would be
        if cut:
            path.write_bytes(content[:start])
        else:
            stop = data.draw(st.integers(start + 1, len(content)))
            damaged = content[:start] + bytes(stop - start) + content[stop:]
            if damaged == content:
                return
            path.write_bytes(damaged)
        with StoreWriter(folder, _layout(), shards) as writer:
            assert writer.sealed() == set(range(len(shards))) - {victim}
        with pytest.raises(DamagedArtifact, match=f"shard-{victim:05d}"):
            Store(folder)


def test_the_library_reads_our_shards(tmp_path: Path) -> None:
    _write(tmp_path, [7, 9], 100)
    tensors = load_file(tmp_path / "shard-00000.safetensors")
    assert tensors["aux"].shape == (16, A, H)
    assert tensors["row_start"].tolist() == [0, 7, 16]
    assert bytes(tensors["row_key"][1].tolist()) == b"row-1"
    assert torch.equal(tensors["final"][7:], _row(1, 9)["final"])


def test_an_interrupted_store_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    shards = _write(whole, [7, 9, 3, 11], 12)
    _write(parts, [7, 9, 3, 11], 12, only={0})
    (parts / ".shard-00001.safetensors.tmp").write_bytes(b"half")
    with pytest.raises(DamagedArtifact, match="Shard 1 of 3 is not sealed"):
        Store(parts)
    with StoreWriter(parts, _layout(), shards) as writer:
        assert writer.sealed() == {0}
    _write(parts, [7, 9, 3, 11], 12, only={1, 2})
    assert not list(parts.glob(".*"))
    for path in whole.glob("shard-*"):
        assert hash_file(path) == hash_file(parts / path.name)
    assert Store(whole).contents() == Store(parts).contents()


def test_contents_name_the_states_and_the_layout(tmp_path: Path) -> None:
    _write(tmp_path / "a", [7, 9], 100)
    _write(tmp_path / "b", [9, 7], 100)
    assert Store(tmp_path / "a").contents()["states"] != Store(tmp_path / "b").contents()["states"]


def _zero_token(row: dict[str, torch.Tensor]) -> None:
    row["aux"][8, 1] = 0


def _not_finite(row: dict[str, torch.Tensor]) -> None:
    row["final"][8, 2] = float("nan")


def _short(row: dict[str, torch.Tensor]) -> None:
    row["aux"] = row["aux"][1:]


def _axes_swapped(row: dict[str, torch.Tensor]) -> None:
    row["aux"] = row["aux"].transpose(0, 1)


def _outside_vocabulary(row: dict[str, torch.Tensor]) -> None:
    row["teacher_top1"][0] = V


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (_zero_token, r"boundary 4 is all zero at token 3\. \[row second\]"),
        (_not_finite, r"final is not finite at token 3\. \[row second\]"),
        (_short, r"aux has the shape \(10, 3, 5\).*\(11, 3, 5\)"),
        (_axes_swapped, r"aux has the shape \(3, 11, 5\)"),
        (_outside_vocabulary, "outside the vocabulary"),
    ],
)
def test_states_that_cannot_be_right_are_refused(tmp_path: Path, fault: Callable[[dict[str, torch.Tensor]], None], sentence: str) -> None:
    row = _row(0, 11)
    fault(row)
    with StoreWriter(tmp_path, _layout(), [[0, 1]]) as writer:
        with pytest.raises(DataError, match=sentence):
            writer.write_shard(0, ["first", "second"], [5, 6], **row)
        assert writer.sealed() == set()
    assert not list(tmp_path.glob("shard-*"))


def test_a_lost_row_is_refused(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, _layout(), [[0, 1]]) as writer, pytest.raises(DataError, match=r"1 rows .* shard of 2"):
        writer.write_shard(0, ["first"], [5], **_row(0, 5))


def test_a_second_writer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LOCK_WAIT_S", 0.1)
    with StoreWriter(tmp_path, _layout(), [[0]]), pytest.raises(DraftproofError, match="Another process writes"):
        StoreWriter(tmp_path, _layout(), [[0]])
    StoreWriter(tmp_path, _layout(), [[0]]).close()


def test_another_layout_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, [3], 10)
    with pytest.raises(OtherRunsWork, match=r'layout\.codec: "bf16" there, "fp8" wanted'):
        StoreWriter(tmp_path, _layout("fp8"), [[0]])


def test_unknown_rows_are_named(tmp_path: Path) -> None:
    _write(tmp_path, [3], 10)
    store = Store(tmp_path)
    with pytest.raises(DataError, match="row-1"):
        store.read("row-1")


def test_reading_copies_and_does_not_change_the_file(tmp_path: Path) -> None:
    _write(tmp_path, [3], 10)
    store = Store(tmp_path)
    store.read("row-0").aux.zero_()
    store.read("row-0").final.zero_()
    assert torch.equal(store.read("row-0").aux, _row(0, 3)["aux"])
    assert torch.equal(store.read("row-0").final, _row(0, 3)["final"])


def test_only_touched_rows_are_read_from_disk(tmp_path: Path) -> None:
    """64 MB of states in one shard; reading one row must not bring them into this process."""
    layout = StoreLayout(boundaries=(2, 4, 5), hidden_size=1024, codec="bf16", vocab_size=V)
    lengths = [8] * 1024
    tokens = sum(lengths)
    with StoreWriter(tmp_path, layout, [list(range(1024))]) as writer:
        ones = torch.ones(tokens, 1024, dtype=torch.bfloat16)
        ids = torch.zeros(tokens, dtype=torch.int32)
        writer.write_shard(0, [f"{row:04d}" for row in range(1024)], lengths, ids, ones[:, None].expand(-1, 3, -1), ones, ids)
    script = (
        "import sys, pathlib, psutil, torch; from draftproof.records.store import Store\n"
        "me = psutil.Process(); before = me.memory_full_info().uss + me.memory_info().shared\n"
        "store = Store(pathlib.Path(sys.argv[1])); store.read('0500')\n"
        "print(me.memory_full_info().uss + me.memory_info().shared - before)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32e6


def test_the_journal_is_one_checked_line_a_shard(tmp_path: Path) -> None:
    _write(tmp_path, [7, 9], 8)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    records = [json.loads(line.split(" ", 1)[1]) for line in lines]
    assert [record["shard"] for record in records] == [0, 1]
    assert records[1]["hash"] == hash_file(tmp_path / "shard-00001.safetensors")
    assert records[1]["size"] == (tmp_path / "shard-00001.safetensors").stat().st_size
    assert (records[1]["rows"], records[1]["tokens"]) == (1, 9)
