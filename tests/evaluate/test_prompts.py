"""Prompts to evaluate on: bench files and held-out rows, and what is said of those that cannot be asked."""

from __future__ import annotations

import copy
import gzip
import json
import logging

import numpy as np
import pytest

from draftproof.errors import DataError, UsageError
from draftproof.evaluate.prompts import BenchPrompt, read_prompts
from draftproof.recipe import EvaluateSettings
from draftproof.records.rows import Row, make_row_key, write_rows
from tests.helpers.preparing import write_lines

TURNS = {"id": 1, "category": "maths", "turns": ["How many?", "And then?"]}
SYSTEM = {
    "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
}


def _settings(*paths, **more):
    return EvaluateSettings(bench=tuple(map(str, paths)), **more)


def _asked(tokenizer, text):
    return tokenizer.encode(f"{text}<|im_start|>assistant\n", add_special_tokens=False)


def _user(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def _row(n, length, start, split, category=""):
    ids = (np.arange(length, dtype=np.int32) + n) % 300
    return Row(make_row_key(ids, f"c{n}", -1), ids, np.arange(length) >= start, (start,), f"c{n}", split, category, "stop", f"f:{n}")


def test_turns_and_messages(tt_plain, tmp_path):
    path = write_lines(tmp_path / "mine.jsonl", [TURNS, SYSTEM])
    assert read_prompts(_settings(path), tmp_path, tt_plain) == [
        BenchPrompt("maths", _asked(tt_plain, _user("How many?"))),
        BenchPrompt("mine", _asked(tt_plain, "<|im_start|>system\nBe kind.<|im_end|>\n" + _user("Who?"))),
    ]


def test_messages_are_read_as_everywhere_else(tt_plain, tmp_path):
    parts = {"messages": [{"role": "human", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "o?"}]}]}
    shared = {"conversations": [{"from": "human", "value": "Who?"}]}
    path = write_lines(tmp_path / "mine.jsonl", [parts, shared])
    assert [prompt.token_ids for prompt in read_prompts(_settings(path), tmp_path, tt_plain)] == [_asked(tt_plain, _user("Who?"))] * 2


def test_gzip_and_a_byte_order_mark(tt_plain, tmp_path):
    path = tmp_path / "mine.jsonl.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + json.dumps({"turns": ["Who?"]}).encode() + b"\r\n"))
    assert read_prompts(_settings(path), tmp_path, tt_plain) == [BenchPrompt("mine", _asked(tt_plain, _user("Who?")))]


def test_a_damaged_line_is_named_with_file_line_and_byte(tt_plain, tmp_path):
    first = json.dumps(TURNS).encode() + b"\n"
    path = tmp_path / "mine.jsonl"
    path.write_bytes(first + b'{"turns": ["\xff"]}\n')
    with pytest.raises(DataError, match="not UTF-8") as caught:
        read_prompts(_settings(path), tmp_path, tt_plain)
    assert caught.value.where == f"{path}:2, byte {len(first)}"
    assert "skip_bad_lines" not in caught.value.remedy
    path.write_bytes(b"")
    with pytest.raises(DataError, match="The file is empty"):
        read_prompts(_settings(path), tmp_path, tt_plain)
    with pytest.raises(UsageError, match="no such file"):
        read_prompts(_settings(tmp_path / "gone.jsonl"), tmp_path, tt_plain)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "user"}]}, "a user message has no content"),
        ({"messages": [{"role": "system", "content": None}, {"role": "user", "content": "Who?"}]}, "a system message has no content"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is a int, not text"),
        ({"messages": [{"role": "guest", "content": "Who?"}]}, r"unknown role 'guest'\."),
        ({"messages": [{"role": "system", "content": "Be kind."}]}, "with a user turn"),
        ({"turns": []}, "do not begin with a text"),
        ({"question": "Who?"}, "no `messages` list"),
    ],
)
def test_a_row_that_cannot_be_asked(row, reason, tt_plain, tmp_path):
    path = write_lines(tmp_path / "mine.jsonl", [TURNS, row])
    with pytest.raises(DataError, match=reason) as caught:
        read_prompts(_settings(path), tmp_path, tt_plain)
    assert caught.value.where == f"{path}:2"


def test_a_template_that_refuses(tt_plain, tmp_path):
    tokenizer = copy.deepcopy(tt_plain)
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + tt_plain.chat_template
    )
    with pytest.raises(DataError, match="refuses the row: System role not supported"):
        read_prompts(_settings(write_lines(tmp_path / "mine.jsonl", [SYSTEM])), tmp_path, tokenizer)


def test_prompts_without_room_for_an_answer_are_left_out_and_counted(tt_plain, tmp_path, caplog):
    path = write_lines(tmp_path / "mine.jsonl", [TURNS, {"turns": ["xq " * 80]}, {"turns": ["Who?"]}])
    lengths = [len(prompt.token_ids) for prompt in read_prompts(_settings(path), tmp_path, tt_plain)]
    with caplog.at_level(logging.WARNING, "draftproof"):
        kept = read_prompts(_settings(path), tmp_path, tt_plain, lengths[0])
    assert [len(prompt.token_ids) for prompt in kept] == [lengths[0], lengths[2]]
    assert "1 of 3 prompts leave no room" in caplog.text
    with pytest.raises(DataError, match="3 of 3 prompts leave no room") as caught:
        read_prompts(_settings(path), tmp_path, tt_plain, lengths[2] - 1)
    assert caught.value.where == str(path)
    assert "evaluate.max_tokens" in caught.value.remedy


def test_held_out_rows(tt_plain, tmp_path):
    write_rows(
        tmp_path, [_row(0, 9, 4, "train"), _row(1, 9, 5, "validation", "maths"), _row(2, 30, 20, "validation"), _row(3, 9, 3, "validation")]
    )
    found = read_prompts(_settings(), tmp_path, tt_plain)
    assert found == [BenchPrompt("maths", [1, 2, 3, 4, 5]), BenchPrompt("all", list(range(2, 22))), BenchPrompt("all", [3, 4, 5])]
    assert read_prompts(_settings(prompts=2), tmp_path, tt_plain, longest=19) == [found[0], found[2]]
    write_rows(tmp_path, [_row(0, 9, 4, "train")])
    with pytest.raises(DataError, match="no prompt to evaluate on"):
        read_prompts(_settings(), tmp_path, tt_plain)
