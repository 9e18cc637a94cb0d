"""A6: an empty think block comes from the template or the generation prompt, never from the target."""

from __future__ import annotations

import copy

import pytest
from tests.helpers.preparing import FILLER, THINKING, THINKING_SUPPLIED, chat, make_target, prepare, supervised_texts


@pytest.mark.parametrize("template", [THINKING, THINKING_SUPPLIED], ids=["inserted", "in the generation prompt"])
def test_the_empty_pair_is_never_supervised(template, tt_plain, tm_folder, tmp_path):
    tokenizer = copy.deepcopy(tt_plain)
    tokenizer.chat_template = template
    target = make_target(tm_folder, tmp_path / "target", tokenizer)
    done = prepare(target, tmp_path, [chat("Is it so?", "Yes, it is."), *FILLER])
    row = done.all()[0]
    assert supervised_texts(tokenizer, row) == ["Yes, it is.<|im_end|>"]
    assert tokenizer.decode(row.token_ids[: row.turn_start[0]].tolist()).endswith("assistant\n<think>\n\n</think>\n\n")
    first = done.report["sample"][0]
    assert "".join(first["first_supervised_text"]) == tokenizer.decode(row.token_ids[row.turn_start[0] :][:5].tolist())


def test_real_reasoning_is_supervised(tt_plain, tm_folder, tmp_path):
    tokenizer = copy.deepcopy(tt_plain)
    tokenizer.chat_template = THINKING
    target = make_target(tm_folder, tmp_path / "target", tokenizer)
    line = chat("Is it so?", "Yes, it is.")
    line["messages"][1]["reasoning_content"] = "Let us see."
    done = prepare(target, tmp_path, [line, *FILLER])
    assert supervised_texts(tokenizer, done.all()[0]) == ["<think>\nLet us see.\n</think>\n\nYes, it is.<|im_end|>"]


def test_ids_from_the_target_follow_the_prompt_it_was_given(tt_plain, tm_folder, tmp_path):
    """An engine feeds no empty pair, so the ids it produced come right after the generation prompt."""
    tokenizer = copy.deepcopy(tt_plain)
    tokenizer.chat_template = THINKING
    target = make_target(tm_folder, tmp_path / "target", tokenizer)
    given = [token for letter in "Yes, it is." for token in tokenizer.encode(letter, add_special_tokens=False)] + [2]
    done = prepare(target, tmp_path, [chat("Is it so?", "Yes, it is.", finish_reason="stop", token_ids=given), *FILLER])
    row = done.all()[0]
    prompt = tokenizer.encode("<|im_start|>user\nIs it so?<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    assert row.token_ids.tolist() == [*prompt, *given]
    assert row.turn_start == (len(prompt),)
    assert done.report["given_token_ids"] == 1
