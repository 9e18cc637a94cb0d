"""A3: truncation may take every supervised token; they are counted after it, and after the shift of the first draft."""

from __future__ import annotations

import numpy as np
import pytest
from tests.helpers.preparing import FILLER, chat, make_target, prepare

from draftproof.errors import DataError
from draftproof.prepare.mask import Turn, assemble


@pytest.mark.parametrize("max_length", [10, 60, 64, 200])
def test_counted_after_truncation(max_length, tt_gen, tm_folder, tmp_path):
    target = make_target(tm_folder, tmp_path / "target", tt_gen)
    conversation = chat("xq" * 25, "Two words")
    prompt = len(tt_gen.encode("<|im_start|>user\n" + "xq" * 25 + "<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False))
    answer = len(tt_gen.encode("Two words<|im_end|>", add_special_tokens=False))
    assert prompt > 64
    if max_length == 10:
        with pytest.raises(DataError, match="5 x no answer within max_length"):
            prepare(target, tmp_path, [conversation, *FILLER], max_length=max_length)
        return
    done = prepare(target, tmp_path, [conversation, *FILLER], max_length=max_length)
    kept = [row for row in done.all() if row.source == "data.jsonl:1"]
    if max_length < prompt + 2:
        assert kept == []
        assert done.dropped[0] == {"source": "data.jsonl:1", "id": "data.jsonl:1", "reason": "no answer within max_length"}
    else:
        assert kept[0].supervised.sum() == answer
        assert len(kept[0].token_ids) == prompt + answer


def test_one_supervised_token_is_not_enough_to_draft(tt_gen, tm_folder, tmp_path):
    """The draft starts after the first produced token; with one token left nothing can be compared."""
    target = make_target(tm_folder, tmp_path / "target", tt_gen)
    prompt = len(tt_gen.encode("<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False))
    line = chat("Hello there", "General words of some length, long enough.")
    shorter = [chat("a", "Go on then."), chat("b", "Go on then.")]
    for extra, rows in ((1, 0), (2, 1)):
        done = prepare(target, tmp_path, [line, *shorter], max_length=prompt + extra)
        assert len([row for row in done.all() if row.source == "data.jsonl:1"]) == rows


def test_an_answer_at_index_zero_ends_where_it_ends():
    """The index-0 fault of an older library: a span that starts at token 0 ran to the end of the row."""
    first, second = Turn(0, [], [5]), Turn(2, [5, 6, 7], [8, 9])
    (row,) = assemble([first, second])
    np.testing.assert_array_equal(row.ids, [5, 6, 7, 8, 9])
    np.testing.assert_array_equal(row.supervised, [True, False, False, True, True])
    assert row.turn_start == (0, 3)


def test_a_target_of_few_positions_cuts_where_max_length_would_not(tt_gen, tm_folder, tmp_path):
    """TM has 256 positions: what stands after them has no state that could be stored."""
    target = make_target(tm_folder, tmp_path / "target", tt_gen)
    done = prepare(target, tmp_path, [chat("How?", "xq" * 300), *FILLER], max_length=4096)
    row = next(row for row in done.all() if row.source == "data.jsonl:1")
    assert len(row.token_ids) == 256
    assert row.supervised[-1]
    assert done.conversations["changed"] == {"cut to max_length": 1}
