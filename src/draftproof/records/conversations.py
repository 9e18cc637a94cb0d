"""Conversations: what `regenerate` writes, `prepare` reads, and people bring.

A line `{"id", "category", "messages": [{"role", "content", ...}], "finish_reason", "token_ids", ...}` becomes a
`Conversation` with one spelling of everything, or an `Unusable` with a reason that is counted. Absent keys stay absent
and nulls are taken for absent, so that a template sees what the author wrote and nothing more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftproof.artifact import hash_bytes
from draftproof.records.jsonl import Line

Message = dict[str, Any]
"""`role` and `content` (text, maybe empty), and whatever else the author gave (`reasoning_content`, `name`)."""

CONVERSATIONS = "conversations.jsonl"

ROLES = ("system", "user", "assistant")
ALIASES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "developer": "system",
    "observation": "tool",
    "function": "tool",
}
"""Other names of roles. Anything else needs `data.roles`."""


class Unusable(Exception):
    """A conversation that cannot become rows; the text is the reason it is counted under."""


@dataclass(frozen=True)
class Conversation:
    """One conversation in one spelling."""

    id: str
    category: str
    messages: tuple[Message, ...]
    finish_reason: str
    """Why the last answer ended: `stop`, `length`, another word of the source, or `` when it does not say."""
    token_ids: tuple[int, ...] | None
    """The ids of the last answer as the target produced them, its stop token included; None when not given."""
    source: str
    changes: tuple[str, ...] = ()
    """What had to be changed to read it."""

    @property
    def key(self) -> str:
        """Hash of the messages: the same words have the same key."""
        return _hash(self.messages)

    @property
    def prompt_key(self) -> str:
        """Hash of what stands before the first answer to a user. Conversations that share it share their split."""
        return _hash(self.messages[: next(iter(answers(self.messages)), len(self.messages))])


def answers(messages: tuple[Message, ...]) -> list[int]:
    """Indices of the assistant messages that follow a user message: those the target can have produced."""
    seen, found = False, []
    for index, message in enumerate(messages):
        seen = seen or message["role"] == "user"
        if seen and message["role"] == "assistant":
            found.append(index)
    return found


def parse(line: Line, roles: Mapping[str, str] | None = None) -> Conversation:
    """A line as a conversation. `roles` maps more role names, where the recipe can. Raises Unusable with the reason."""
    value, changes = line.value, []
    raw = value.get("messages")
    if raw is None and value.get("conversations") is not None:
        raw = value["conversations"]
        changes.append("read from `conversations`")
    if not isinstance(raw, list):
        raise Unusable("no `messages` list")
    if not raw:
        raise Unusable("no messages")
    if value.get("tools"):
        raise Unusable("tools (not supported)")
    messages = tuple(_message(item, roles, changes) for item in raw)
    finish = value.get("finish_reason")
    return Conversation(
        id=str(value.get("id") or line.where),
        category=str(value.get("category") or ""),
        messages=messages,
        finish_reason=finish if isinstance(finish, str) else "",
        token_ids=_token_ids(value.get("token_ids")),
        source=line.where,
        changes=tuple(dict.fromkeys(changes)),
    )


def _message(item: Any, roles: Mapping[str, str] | None, changes: list[str]) -> Message:
    if not isinstance(item, dict):
        raise Unusable("a message is not an object")
    fields = {key: value for key, value in item.items() if value is not None}
    if "role" not in fields and "from" in fields:
        fields["role"] = fields.pop("from")
        if "value" in fields:
            fields["content"] = fields.pop("value")
        changes.append("ShareGPT keys")
    role = fields.get("role")
    if not isinstance(role, str):
        raise Unusable("a message has no role")
    known = (roles or {}).get(role) or (role if role in ROLES or role == "tool" else ALIASES.get(role.lower()))
    if known is None:
        raise Unusable(f"unknown role {role!r}" + ("" if roles is None else " (map it with data.roles)"))
    if known == "tool" or fields.get("tool_calls") or fields.get("function_call"):
        raise Unusable("tool calls (not supported)")
    if known not in ROLES:
        raise Unusable(f"data.roles maps {role!r} to {known!r}, which is not system, user or assistant")
    if known != role and "ShareGPT keys" not in changes:
        changes.append(f"role {role!r} read as {known!r}")
    if known != "assistant" and "content" not in fields:
        raise Unusable(f"a {known} message has no content")
    fields["role"] = known
    fields["content"] = _content(fields.get("content", ""), changes)
    return fields


def _content(content: Any, changes: list[str]) -> str:
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise Unusable("content with parts that are not text")
        changes.append("text parts joined")
        content = "".join(str(part) for part in parts)
    if not isinstance(content, str):
        raise Unusable(f"content is a {type(content).__name__}, not text")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise Unusable("content is not valid Unicode (a lone surrogate)") from None
    return content


def _token_ids(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not value or not all(type(item) is int and item >= 0 for item in value):
        return None
    return tuple(value)


def _hash(messages: tuple[Message, ...]) -> str:
    return hash_bytes(json.dumps(messages, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass"))
