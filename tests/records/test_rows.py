"""Rows: written and read back equal, hashed by what they are."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.errors import DamagedArtifact
from draftproof.records.rows import Row, make_row_key, read_rows, write_rows


def _row(n: int, length: int, start: int, split: str = "train") -> Row:
    ids = (np.arange(length, dtype=np.int32) * 7 + n) % 320
    mask = np.arange(length) >= start
    turns = (start,) if start < length else ()
    return Row(make_row_key(ids, f"c{n}", -1), ids, mask, turns, f"c{n}", split, f"kind{n % 2}", "stop", f"f.jsonl:{n}")


def _same(a: Row, b: Row) -> bool:
    arrays = np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.supervised, b.supervised)
    names = ("row_key", "turn_start", "conversation_key", "split", "category", "finish_reason", "source")
    return arrays and all(getattr(a, name) == getattr(b, name) for name in names)


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30), st.sampled_from(["train", "validation"])), max_size=12),
    per_file=st.integers(1, 5),
)
def test_what_is_written_is_read(shapes, per_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    rows = [_row(n, length, start, split) for n, (length, start, split) in enumerate(shapes)]
    write_rows(folder, rows, per_file)
    table = read_rows(folder)
    assert len(table) == len(rows)
    assert len(list((folder / "rows").iterdir())) == max(1, -(-len(rows) // per_file))
    assert all(_same(table.row(i), row) for i, row in enumerate(rows))
    for split in ("train", "validation"):
        assert table.indices(split).tolist() == [i for i, row in enumerate(rows) if row.split == split]
        wanted = [int(t) for row in rows if row.split == split for t, m in zip(row.token_ids, row.supervised, strict=True) if m]
        assert table.supervised_ids(split).tolist() == wanted
    assert table.supervised_counts().tolist() == [sum(map(int, row.supervised)) for row in rows]
    assert table.lengths.tolist() == [len(row.token_ids) for row in rows]
    assert table.keys == [row.row_key for row in rows]


def test_the_columns_are_those_that_programs_rely_on(tmp_path):
    write_rows(tmp_path, [_row(0, 5, 2)])
    schema = pq.read_schema(tmp_path / "rows" / "rows-00000.parquet")
    assert {name: str(schema.field(name).type) for name in schema.names} == {
        "row_key": "string",
        "token_ids": "list<element: int32>",
        "supervised": "list<element: bool>",
        "turn_start": "list<element: int32>",
        "conversation_key": "string",
        "split": "string",
        "category": "string",
        "finish_reason": "string",
        "source": "string",
    }


def test_hashes_change_with_what_they_stand_for(tmp_path):
    base = [_row(0, 6, 2), _row(1, 6, 3)]
    first = write_rows(tmp_path, base)
    assert write_rows(tmp_path, base, rows_per_file=1) == first, "files do not matter"
    mask = base[0].supervised.copy()
    mask[2] = False
    masked = write_rows(tmp_path, [replace(base[0], supervised=mask, turn_start=(3,)), base[1]])
    assert masked["token_ids"] == first["token_ids"], "a change of mask costs no extraction"
    assert masked["rows"] != first["rows"]
    moved = write_rows(tmp_path, [replace(base[0], split="validation"), base[1]])
    assert (moved["token_ids"] == first["token_ids"], moved["rows"] == first["rows"]) == (True, False)
    swapped = write_rows(tmp_path, base[::-1])
    assert swapped["token_ids"] != first["token_ids"]
    sorted_anew = write_rows(tmp_path, [replace(base[0], category="another kind"), base[1]])
    assert sorted_anew["token_ids"] == first["token_ids"]
    assert sorted_anew["rows"] != first["rows"], "figures are given by category"
    renamed = write_rows(tmp_path, [replace(row, source="g:1") for row in base])
    assert renamed == first, "where a row came from changes no result"


def test_the_key_tells_turns_and_conversations_apart():
    ids = np.arange(5, dtype=np.int32)
    keys = {make_row_key(ids, "a", -1), make_row_key(ids, "a", 1), make_row_key(ids, "b", -1), make_row_key(ids[:4], "a", -1)}
    assert len(keys) == 4
    assert make_row_key(ids.astype(np.int64), "a", -1) == make_row_key(ids, "a", -1)


def test_rewriting_leaves_nothing_of_before(tmp_path):
    write_rows(tmp_path, [_row(n, 4, 1) for n in range(5)], rows_per_file=1)
    write_rows(tmp_path, [_row(9, 4, 1)])
    assert len(read_rows(tmp_path)) == 1


def test_damage_is_named(tmp_path):
    with pytest.raises(DamagedArtifact, match="no rows here"):
        read_rows(tmp_path)
    write_rows(tmp_path, [_row(0, 40, 2)])
    path = tmp_path / "rows" / "rows-00000.parquet"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DamagedArtifact, match="cannot be read"):
        read_rows(tmp_path)


def test_reading_rows_needs_no_torch():
    code = (
        "import sys, draftproof.records.rows, draftproof.records.mapping, draftproof.records.conversations; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
