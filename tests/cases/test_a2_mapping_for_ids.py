"""A2: the chat-template call returns a mapping; its length is its number of fields, not of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from tests.helpers.preparing import chat, make_target, prepare

from draftproof.errors import DataError
from draftproof.target.tokenizer import render, to_ids


def test_every_return_form_becomes_a_flat_list(tt_plain):
    import torch
    from transformers import BatchEncoding

    messages = [{"role": "user", "content": "Say hello to the dog."}]
    wanted = tt_plain.encode("<|im_start|>user\nSay hello to the dog.<|im_end|>\n", add_special_tokens=False)
    assert len(wanted) > 10
    returned = tt_plain.apply_chat_template(messages)
    forms = (
        *(returned, wanted, tuple(wanted), np.array(wanted), np.array([wanted]), torch.tensor(wanted), torch.tensor([wanted])),
        *([wanted], {"input_ids": wanted}, BatchEncoding({"input_ids": [wanted], "attention_mask": [[1] * len(wanted)]})),
        tt_plain._tokenizer.encode("<|im_start|>user\nSay hello to the dog.<|im_end|>\n", add_special_tokens=False),
    )
    for form in forms:
        ids = to_ids(form)
        assert ids == wanted
        assert all(type(token) is int for token in ids)
    assert render(tt_plain, messages, add_generation_prompt=False) == wanted


@pytest.mark.parametrize("form", ["text", [[1, 2], [3]], ["a"], [True, False], None, 7, [1.5]])
def test_anything_else_is_refused(form):
    with pytest.raises(DataError, match="no flat list of ids"):
        to_ids(form)


def test_twenty_rows_are_kept_whole(tt_plain, tm_folder, tmp_path):
    target = make_target(tm_folder, tmp_path / "target", tt_plain)
    lines = [chat(f"Say the number {n} and the next one.", f"It is {n}, then {n + 1}.") for n in range(20)]
    done = prepare(target, tmp_path, lines, minimum_kept=0.5)
    assert done.conversations == {"in": 20, "kept": 20, "changed": {}, "dropped": {}}
    assert min(done.rows.lengths) > 30


def test_too_few_kept_fails_with_counts(tt_plain, tm_folder, tmp_path):
    target = make_target(tm_folder, tmp_path / "target", tt_plain)
    lines = [chat(f"Question {n}", "A full answer.") for n in range(9)] + [chat(f"Only a question {n}") for n in range(11)]
    with pytest.raises(DataError, match=r"Only 9 of 20 conversations are kept.*11 x no assistant answer"):
        prepare(target, tmp_path, lines, minimum_kept=0.5)
    assert (tmp_path / "out" / "dropped.jsonl").read_text().count("no assistant answer") == 11
