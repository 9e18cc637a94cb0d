"""A11: rows whose keys differ. Lines are read one by one, so no key is invented and none is lost."""

from __future__ import annotations

import copy

from tests.helpers.preparing import THINKING, chat, make_target, prepare, supervised_texts, write_lines

from draftproof.records.conversations import parse
from draftproof.records.jsonl import read_jsonl


def test_reasoning_that_appears_late_is_neither_lost_nor_invented(tt_plain, tm_folder, tmp_path):
    tokenizer = copy.deepcopy(tt_plain)
    tokenizer.chat_template = THINKING
    target = make_target(tm_folder, tmp_path / "target", tokenizer)
    lines = [chat(f"Q{n} " + "and more words of a question " * 2, f"The answer {n}.") for n in range(403)]
    for n in range(400, 403):
        lines[n]["messages"][1]["reasoning_content"] = f"Reason {n}."
    done = prepare(target, tmp_path, lines)
    assert done.conversations == {"in": 403, "kept": 403, "changed": {}, "dropped": {}}
    assert supervised_texts(tokenizer, done.all()[399]) == ["The answer 399.<|im_end|>"]
    assert supervised_texts(tokenizer, done.all()[400]) == ["<think>\nReason 400.\n</think>\n\nThe answer 400.<|im_end|>"]


def test_messages_come_back_as_they_were_written(tmp_path):
    lines = [
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "name": "x"}]},
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "reasoning_content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, {"role": "assistant", "content": "A"}]},
        {"conversations": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}], "messages": None},
    ]
    found = [parse(line) for line in read_jsonl(write_lines(tmp_path / "f.jsonl", lines))]
    plain = ({"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"})
    assert found[0].messages == ({"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "name": "x"})
    assert found[0].changes == ()
    assert [item.messages for item in found[1:]] == [plain] * 3
    assert [item.changes for item in found[1:]] == [(), ("text parts joined",), ("read from `conversations`",)]
