"""A5: a template that keeps reasoning only after the last user turn; per-turn prefixes do not line up."""

from __future__ import annotations

import copy

import pytest
from tests.helpers.preparing import FILLER, THINKING, make_target, prepare, supervised_texts

from draftproof.errors import DataError


def _conversation():
    return {
        "messages": [
            {"role": "user", "content": "First question?"},
            {"role": "assistant", "content": "First answer.", "reasoning_content": "R1 because."},
            {"role": "user", "content": "Second question?"},
            {"role": "assistant", "content": "Second answer.", "reasoning_content": "R2 therefore."},
        ]
    }


def test_one_row_a_turn_each_with_its_own_reasoning(tt_plain, tm_folder, tmp_path):
    tokenizer = copy.deepcopy(tt_plain)
    tokenizer.chat_template = THINKING
    target = make_target(tm_folder, tmp_path / "target", tokenizer)
    done = prepare(target, tmp_path, [_conversation(), *FILLER])
    first, second = (row for row in done.all() if row.source == "data.jsonl:1")
    one = "<think>\nR1 because.\n</think>\n\nFirst answer.<|im_end|>"
    two = "<think>\nR2 therefore.\n</think>\n\nSecond answer.<|im_end|>"
    assert supervised_texts(tokenizer, first) == [one]
    assert supervised_texts(tokenizer, second) == [two]
    prompt = "<|im_start|>user\nFirst question?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(first.token_ids.tolist()) == prompt + one
    assert tokenizer.decode(second.token_ids.tolist()) == (
        prompt + "First answer.<|im_end|>\n<|im_start|>user\nSecond question?<|im_end|>\n<|im_start|>assistant\n" + two
    )
    assert first.conversation_key == second.conversation_key
    assert first.split == second.split
    assert first.row_key != second.row_key
    assert done.conversations["changed"]["one row a turn: the template rewrites history"] == 1


def test_a_template_that_changes_the_prompt_once_answered_is_rejected_with_a_reason(tt_plain, tm_folder, tmp_path):
    tokenizer = copy.deepcopy(tt_plain)
    tokenizer.chat_template = "{{ messages | length }}" + tt_plain.chat_template
    target = make_target(tm_folder, tmp_path / "target", tokenizer)
    with pytest.raises(DataError, match="4 x the template rewrites the prompt once the answer is there"):
        prepare(target, tmp_path, FILLER)


def test_a_template_that_refuses_one_turn_keeps_the_others(tt_plain, tm_folder, tmp_path):
    """slime#1742: a template that raises when an answer stands alone."""
    tokenizer = copy.deepcopy(tt_plain)
    tokenizer.chat_template = "{% if messages | length == 2 %}{{ raise_exception('too short a talk') }}{% endif %}" + tt_plain.chat_template
    target = make_target(tm_folder, tmp_path / "target", copy.deepcopy(tt_plain))
    (target.folder / "chat_template.jinja").write_text(tokenizer.chat_template.replace("== 2", "== 2 and messages[1]['content'] == 'Bad.'"))
    lines = [
        {
            "messages": [
                {"role": r, "content": c} for r, c in (("user", "Q1"), ("assistant", "Bad."), ("user", "Q2"), ("assistant", "Good one."))
            ]
        },
        *FILLER,
    ]
    done = prepare(target, tmp_path, lines)
    row = done.all()[0]
    assert supervised_texts(tt_plain, row) == ["Good one.<|im_end|>"]
    assert done.conversations["changed"] == {"an answer is not supervised: the template refuses: too short a talk": 1}
