"""A1: a template without generation tags must give neither an all-zero nor an all-ones mask."""

from __future__ import annotations

import copy

import pytest
from tests.helpers.preparing import FILLER, chat, make_target, prepare, supervised_texts

from draftproof.errors import DataError


@pytest.mark.parametrize("template", ["tt_plain", "tt_gen"])
def test_spans_are_the_answers_with_their_end_token(template, request, tm_folder, tmp_path):
    tokenizer = request.getfixturevalue(template)
    target = make_target(tm_folder, tmp_path / "target", tokenizer)
    conversation = chat("What is two and two?", "It makes four.", "And three?", "That is another number.")
    done = prepare(target, tmp_path, [conversation, *FILLER])
    row = done.all()[0]
    assert supervised_texts(tokenizer, row) == ["It makes four.<|im_end|>", "That is another number.<|im_end|>"]
    assert 0 < row.supervised.sum() < len(row.token_ids)
    whole = "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n"
        for role, text in [("user", "What is two and two?"), ("assistant", "It makes four."), ("user", "And three?")]
    )
    assert tokenizer.decode(row.token_ids.tolist(), skip_special_tokens=False) == (
        whole + "<|im_start|>assistant\nThat is another number.<|im_end|>"
    )


def test_both_templates_give_the_same_rows(tt_plain, tt_gen, tm_folder, tmp_path):
    hashes = []
    for name, tokenizer in (("plain", tt_plain), ("gen", tt_gen)):
        (tmp_path / name).mkdir()
        target = make_target(tm_folder, tmp_path / name / "target", tokenizer)
        hashes.append(prepare(target, tmp_path / name, FILLER).outcome.contents)
    assert hashes[0] == hashes[1]


def test_a_template_without_a_stop_token_is_refused_by_name(tt_plain, tm_folder, tmp_path):
    tokenizer = copy.deepcopy(tt_plain)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    target = make_target(tm_folder, tmp_path / "target", tokenizer)
    with pytest.raises(DataError, match="prints no stop token after the answer"):
        prepare(target, tmp_path, FILLER, minimum_kept=0.5)
