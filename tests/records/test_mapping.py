"""The draft vocabulary's tables: offsets, their invariants, and every way to break them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from draftproof.errors import DataError
from draftproof.records.mapping import VocabMapping, load_mapping, save_mapping


@given(st.integers(1, 60).flatmap(lambda v: st.tuples(st.just(v), st.sets(st.integers(0, v - 1), min_size=1))))
def test_there_and_back(case):
    vocab_size, kept = case
    mapping = VocabMapping.from_kept(np.array(sorted(kept, reverse=True)), vocab_size)
    ordered = sorted(kept)
    assert mapping.d2t.tolist() == [target - draft for draft, target in enumerate(ordered)]
    assert mapping.t2d.tolist() == [i in kept for i in range(vocab_size)]
    assert mapping.kept.tolist() == ordered
    assert mapping.is_full == (len(kept) == vocab_size)


def test_saved_and_loaded(tmp_path):
    mapping = VocabMapping.from_kept(np.array([0, 4, 9]), 10)
    save_mapping(tmp_path, mapping)
    loaded = load_mapping(tmp_path)
    assert loaded.d2t.dtype == np.int64
    assert loaded.d2t.tolist() == [0, 3, 7]
    assert loaded.t2d.tolist() == mapping.t2d.tolist()


def _t2d(*true):
    return np.isin(np.arange(10), true)


@pytest.mark.parametrize(
    ("d2t", "t2d", "sentence"),
    [
        (np.array([0, 4, 9]), _t2d(0, 4, 9), r"target id 11 is outside 0\.\.9 .*absolute ids"),
        (np.array([0, 4, 6]), _t2d(0, 4, 6), "t2d is not true exactly"),
        (np.zeros(3, np.int64), _t2d(0, 4, 9), "t2d is not true exactly"),
        (np.array([0, 3, 2]), _t2d(0, 4), "do not strictly increase at draft id 2"),
        (np.array([-1, 3, 7]), _t2d(4, 9), "target id -1 is outside"),
        (np.array([0, 3, 7], np.int32), _t2d(0, 4, 9), "int64"),
        (np.array([0, 3, 7]), _t2d(0, 4, 9).astype(np.uint8), "bool"),
        (np.zeros(0, np.int64), _t2d(), "0 entries"),
        (np.zeros(11, np.int64), _t2d(*range(10)), "11 entries for a target vocabulary of 10"),
    ],
)
def test_a_broken_table_is_refused_with_its_rule(d2t, t2d, sentence, tmp_path):
    with pytest.raises(DataError, match=sentence):
        VocabMapping(d2t, t2d).check()
    save_file({"d2t": d2t, "t2d": t2d}, tmp_path / "mapping.safetensors")
    with pytest.raises(DataError, match=sentence):
        load_mapping(tmp_path)


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(DataError, match="no draft vocabulary"):
        load_mapping(tmp_path)
    save_file({"d2t": np.zeros(3, np.int64)}, tmp_path / "mapping.safetensors")
    with pytest.raises(DataError, match="lacks t2d"):
        load_mapping(tmp_path)
    (tmp_path / "mapping.safetensors").write_bytes(b"xx")
    with pytest.raises(DataError, match="cannot be read"):
        load_mapping(tmp_path)


@pytest.mark.parametrize("kept", [[0, 4, 4], [0, 10], [-1, 3]])
def test_ids_that_cannot_be_kept(kept):
    with pytest.raises(DataError):
        VocabMapping.from_kept(np.array(kept), 10)
