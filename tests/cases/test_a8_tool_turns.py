"""A8: tool turns. They are not supported yet: each such conversation is dropped by name, none loses a turn in silence."""

from __future__ import annotations

import json

import pytest
from tests.helpers.preparing import FILLER, make_target, prepare

from draftproof.records.conversations import Unusable, parse
from draftproof.records.jsonl import Line

_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]


def _row(arguments, tools, content):
    call = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}]}
    if content != "missing":
        call["content"] = content
    return {
        "messages": [
            {"role": "user", "content": "Add 1."},
            call,
            {"role": "tool", "tool_call_id": "1", "content": "2"},
            {"role": "assistant", "content": "It is 2."},
        ],
        "tools": tools,
    }


def test_the_six_rows_are_dropped_by_name(tt_plain, tm_folder, tmp_path):
    target = make_target(tm_folder, tmp_path / "target", tt_plain)
    contents = (None, "", "missing", None, "", "missing")
    forms = [(arguments, tools) for arguments in ({"a": 1}, '{"a": 1}', '{"a": 1') for tools in (_TOOLS, json.dumps(_TOOLS))]
    lines = [_row(arguments, tools, content) for (arguments, tools), content in zip(forms, contents, strict=True)]
    done = prepare(target, tmp_path, [*lines, *FILLER])
    assert done.conversations == {"in": 10, "kept": 4, "changed": {}, "dropped": {"tools (not supported)": 6}}
    assert [item["source"] for item in done.dropped] == [f"data.jsonl:{n}" for n in range(1, 7)]


@pytest.mark.parametrize("role", ["tool", "function", "observation"])
def test_tool_roles_alone_are_named_too(role):
    messages = [{"role": "user", "content": "Q"}, {"role": role, "content": "2"}, {"role": "assistant", "content": "A"}]
    with pytest.raises(Unusable, match="tool calls"):
        parse(Line({"messages": messages}, "f:1"))


def test_a_call_without_a_tools_list_is_named_too():
    with pytest.raises(Unusable, match="tool calls"):
        parse(Line({"messages": _row({"a": 1}, None, None)["messages"]}, "f:1"))
