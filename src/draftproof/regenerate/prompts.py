"""Prompts to answer, and the fixed batches in which they are answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftproof.records.conversations import Conversation, Message, Unusable, parse
from draftproof.records.jsonl import read_jsonl
from draftproof.target.tokenizer import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """Something to answer."""

    id: str
    category: str
    messages: tuple[Message, ...]
    """Ends with a user message."""
    source: str
    """`file:line`"""


@dataclass(frozen=True)
class Unanswerable:
    """A line that cannot be answered, and why."""

    source: str
    id: str
    reason: str


def read_prompts(path: Path) -> list[Prompt | Unanswerable]:
    """Each line of a `messages` JSONL; a trailing assistant turn is taken off, since the target answers anew."""
    found: list[Prompt | Unanswerable] = []
    for line in read_jsonl(path):
        try:
            found.append(_prompt(parse(line)))
        except Unusable as reason:
            found.append(Unanswerable(line.where, str(line.value.get("id") or line.where), str(reason)))
    return found


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, longest: int) -> list[int]:
    """The ids the target is given. Raises Unusable when the template refuses, or they leave no room for an answer."""
    try:
        ids = render(tokenizer, prompt.messages, add_generation_prompt=True)
    except Exception as error:  # noqa: BLE001  a template may raise anything; its sentence is the reason
        raise Unusable(f"the template refuses: {(str(error).splitlines() or [type(error).__name__])[0][:120]}") from None
    if len(ids) > longest:
        raise Unusable("the prompt leaves no room for max_tokens within the target's positions")
    return ids


def batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of prompts in batches of `size`, the longest first: little padding, and one that does not fit the memory
    is met at once. What is in a batch depends on the prompts and `size` alone."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    return [order[start : start + size] for start in range(0, len(order), size)]


def _prompt(conversation: Conversation) -> Prompt:
    messages = conversation.messages
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1]["role"] != "user":
        raise Unusable("it does not end with a user turn")
    return Prompt(conversation.id, conversation.category, messages, conversation.source)
