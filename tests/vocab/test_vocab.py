"""The draft vocabulary against a slow reference, and the stage that makes it."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.preparing import chat, make_target, prepare, task_in

from draftproof.errors import DataError, UsageError
from draftproof.recipe import VocabSettings
from draftproof.records.mapping import load_mapping
from draftproof.vocab import stage
from draftproof.vocab.build import choose, count_tokens, coverage


@given(
    ids=st.lists(st.integers(0, 29), max_size=60),
    unnamed=st.sets(st.integers(0, 29), max_size=5),
    always=st.sets(st.integers(0, 29), max_size=3),
    size=st.integers(3, 25),
)
def test_most_frequent_first_lower_ids_at_ties(ids, unnamed, always, size):
    counts = count_tokens(np.array(ids, np.int32), 30)
    assert counts.tolist() == [ids.count(i) for i in range(30)]
    named = np.array([i not in unnamed for i in range(30)])
    candidates = [i for i in range(30) if i not in unnamed and i not in always]
    wanted = sorted([*always, *sorted(candidates, key=lambda i: (-ids.count(i), i))[: size - len(always)]])
    chosen = choose(counts, size, named=named, always=always)
    assert chosen.mapping.kept.tolist() == wanted
    assert chosen.filled == sum(ids.count(i) == 0 for i in wanted)
    if ids:
        assert coverage(counts, chosen.mapping) == pytest.approx(sum(i in wanted for i in ids) / len(ids))


def test_the_whole_vocabulary():
    chosen = choose(np.array([0, 3, 0]), None, named=np.array([True, True, False]), always=())
    assert chosen.mapping.is_full
    assert chosen.mapping.d2t.tolist() == [0, 0, 0]
    assert chosen.filled == 2


def test_ids_without_a_name_leave_too_few():
    with pytest.raises(UsageError, match="4 of the target's 6 ids have a tokenizer entry"):
        choose(np.ones(6, np.int64), 5, named=np.array([True] * 4 + [False] * 2), always=())
    with pytest.raises(UsageError, match="2 of them are stop tokens"):
        choose(np.ones(6, np.int64), 1, named=np.ones(6, bool), always=(0, 1))


def test_an_id_beyond_the_head_is_refused():
    with pytest.raises(DataError, match="token id 30"):
        count_tokens(np.array([30]), 30)


def test_ten_million_tokens_in_two_seconds():
    generator = np.random.default_rng(0)
    ids = generator.zipf(1.2, 10_000_000).clip(max=163_840).astype(np.int32) - 1
    started = time.process_time()
    counts = count_tokens(ids, 163_840)
    chosen = choose(counts, 32_000, named=np.ones(163_840, bool), always=(163_839,))
    assert time.process_time() - started < 2
    assert chosen.mapping.d2t.size == 32_000


def test_the_stage_counts_training_answers_alone(tt_plain, tm_folder, tmp_path):
    target = make_target(tm_folder, tmp_path / "target", tt_plain)
    prepared = prepare(target, tmp_path, [chat(f"{'z' * 30} {n}?", "the river " * (n + 1)) for n in range(6)])
    out = tmp_path / "vocab"
    outcome = stage.run(task_in(out, {"prepare": tmp_path / "out"}), VocabSettings(size=40), target)
    rows = prepared.all()
    texts = {
        split: [t for row in rows if row.split == split for t in row.token_ids[row.supervised].tolist()]
        for split in ("train", "validation")
    }
    frequency = {i: texts["train"].count(i) for i in range(320)}
    wanted = sorted([2, *sorted((i for i in range(300) if i != 2), key=lambda i: (-frequency[i], i))[:39]])
    mapping = load_mapping(out)
    assert mapping.kept.tolist() == wanted
    assert mapping.t2d.shape == (320,)
    counts = outcome.counts
    assert (counts["size"], counts["target_size"]) == (40, 320)
    for split, ids in texts.items():
        assert counts["coverage"][split] == pytest.approx(sum(i in wanted for i in ids) / len(ids))
    assert counts["filled"] == sum(frequency[i] == 0 for i in wanted) > 0
    assert json.loads((out / "coverage.json").read_text()) == counts
    z = tt_plain.encode("z", add_special_tokens=False)[0]
    assert frequency[z] == 0, "the prompts' words do not count"


def test_by_default_the_size_fits_the_target(tt_plain, tm_folder, tmp_path):
    """TM's head has 320 rows, its tokenizer 300 tokens, and the default of large targets is 32,000."""
    target = make_target(tm_folder, tmp_path / "target", tt_plain)
    prepare(target, tmp_path, [chat(f"Hi {n}?", "the river " * (n + 1)) for n in range(6)])
    outcome = stage.run(task_in(tmp_path / "vocab", {"prepare": tmp_path / "out"}), VocabSettings(), target)
    assert load_mapping(tmp_path / "vocab").kept.tolist() == list(range(300))
    assert (outcome.counts["size"], outcome.counts["coverage"]["train"]) == (300, 1.0)
    assert [VocabSettings().at_most(rows) for rows in (300, 49_152)] == [300, 32_000]
    assert [VocabSettings(size=size).at_most(320) for size in (40, 400, None)] == [40, 400, 320]
