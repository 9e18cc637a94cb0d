"""A9: unknown roles, turns out of order, nothing to learn: every row ends as kept, changed or dropped, and the counts add up."""

from __future__ import annotations

import copy

import pytest
from tests.helpers.preparing import FILLER, chat, make_target, prepare, supervised_texts


def _say(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


ROWS = {
    "unknown role": _say(("user", "Q one?"), ("some_model_v2", "An answer.")),
    "two users": _say(("user", "Wait."), ("user", "Q two?"), ("assistant", "The second answer.")),
    "assistant first": _say(("assistant", "I greet you."), ("user", "Q three?"), ("assistant", "The third answer.")),
    "only an assistant": _say(("assistant", "I greet you.")),
    "system only": _say(("system", "Be kind.")),
    "user only": _say(("user", "Q four?")),
    "empty answer": _say(("user", "Q five?"), ("assistant", "")),
    "null answer": _say(("user", "Q six?"), ("assistant", None)),
    "null question": _say(("user", None), ("assistant", "An answer.")),
    "no messages": {"messages": []},
    "no list": {"text": "hello"},
    "ShareGPT": {"conversations": [{"from": "human", "value": "Q seven?"}, {"from": "gpt", "value": "The seventh answer."}]},
    "ShareGPT tool": {
        "conversations": [
            {"from": "human", "value": "Q"},
            {"from": "function", "value": "call"},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "A"},
        ]
    },
}


@pytest.fixture
def target(tt_plain, tm_folder, tmp_path):
    return make_target(tm_folder, tmp_path / "target", tt_plain)


def test_every_row_has_a_fate_and_the_counts_add_up(target, tt_plain, tmp_path):
    done = prepare(target, tmp_path, [*ROWS.values(), *FILLER])
    assert done.conversations == {
        "in": 17,
        "kept": 5,
        "changed": {
            "an answer is not supervised: no user turn before the answer": 1,
            "read from `conversations`; ShareGPT keys": 1,
        },
        "dropped": {
            "unknown role 'some_model_v2' (map it with data.roles)": 1,
            "no user turn before the answer": 1,
            "no assistant answer": 2,
            "empty answer": 2,
            "a user message has no content": 1,
            "no messages": 1,
            "no `messages` list": 1,
            "tool calls (not supported)": 1,
        },
    }
    counts = done.conversations
    assert counts["in"] == counts["kept"] + sum(counts["changed"].values()) + sum(counts["dropped"].values())
    names = list(ROWS)
    texts = {names[int(row.source.split(":")[1]) - 1]: supervised_texts(tt_plain, row) for row in done.all()[:3]}
    assert texts == {
        "two users": ["The second answer.<|im_end|>"],
        "assistant first": ["The third answer.<|im_end|>"],
        "ShareGPT": ["The seventh answer.<|im_end|>"],
    }
    assert len(done.dropped) == 10


def test_a_mapped_role_is_read(target, tt_plain, tmp_path):
    done = prepare(target, tmp_path, [ROWS["unknown role"], *FILLER], roles={"some_model_v2": "assistant"})
    assert supervised_texts(tt_plain, done.all()[0]) == ["An answer.<|im_end|>"]
    assert done.conversations["changed"] == {"role 'some_model_v2' read as 'assistant'": 1}


def test_a_strict_template_drops_one_row_with_its_own_words(tt_plain, tm_folder, tmp_path):
    """Templates that insist on alternating turns raise; that must cost the row, not the run."""
    tokenizer = copy.deepcopy(tt_plain)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}" + tt_plain.chat_template
    )
    strict = make_target(tm_folder, tmp_path / "strict", tokenizer)
    done = prepare(strict, tmp_path, [ROWS["two users"], *FILLER])
    assert done.conversations["dropped"] == {"the template refuses: Conversation roles must alternate": 1}


def test_duplicates_are_counted_and_the_first_is_kept(target, tmp_path):
    again = copy.deepcopy(FILLER[1])
    done = prepare(target, tmp_path, [*FILLER, again, chat("Say the number 1.", "Another answer to it.")])
    assert done.conversations["dropped"] == {"exact duplicate": 1}
    assert done.dropped == [{"source": "data.jsonl:5", "id": "data.jsonl:5", "reason": "exact duplicate of data.jsonl:2"}]
    splits = {row.source: row.split for row in done.all()}
    assert splits["data.jsonl:2"] == splits["data.jsonl:6"], "the same prompt lies in the same split"
