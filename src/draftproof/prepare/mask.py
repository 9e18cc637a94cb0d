"""Which tokens the target produced: supervised spans from id prefixes, without offsets and without searching text.

    turn = Turn(message=1, prompt=ids of what the target was given, answer=ids it produced, its stop token included)
    assemble([turn, ...])       # one row when every turn's ids are a prefix of the next turn's prompt, else one row a turn

A template that rewrites history (drops earlier reasoning, say) makes "prompt and answer of turn 1" no prefix of "prompt
of turn 2". Supervising turn 1 inside turn 2's row would then train on a prompt that never exists when serving.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from draftproof.records.conversations import Unusable

ENDED = frozenset({"", "stop"})
"""Finish reasons after which the stop token was produced by the target; `` is a source that does not say."""

WHOLE = -1
"""`Masked.message` of a row that holds every answer of its conversation."""


@dataclass(frozen=True)
class Turn:
    """One answer: the ids before it and the ids the target produced."""

    message: int
    """Index of the assistant message."""
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Masked:
    """A row in the making."""

    ids: np.ndarray
    """int32 [T]"""
    supervised: np.ndarray
    """bool [T]"""
    turn_start: tuple[int, ...]
    message: int
    """Index of the one supervised assistant message, or WHOLE."""

    def cut(self, max_length: int) -> Masked:
        """The first `max_length` tokens."""
        starts = tuple(start for start in self.turn_start if start < max_length)
        return Masked(self.ids[:max_length], self.supervised[:max_length], starts, self.message)

    def can_draft(self) -> bool:
        """Whether some draft can start here and be judged: two supervised tokens in a row, in one turn.

        The draft starts once the target has produced a token, and its first guess is the one after that.
        """
        return any(
            start + 1 < len(self.ids) and self.supervised[start + 1] and start + 1 not in self.turn_start for start in self.turn_start
        )


def assemble(turns: Sequence[Turn]) -> list[Masked]:
    """Rows of a conversation: one if history is kept as it was produced, else one for each turn.

    `turns` ascend by message; answers are not empty.
    """
    if all(is_prefix(before.prompt + before.answer, after.prompt) for before, after in pairwise(turns)):
        return [_row(turns[-1], turns, WHOLE)] if turns else []
    return [_row(turn, [turn], turn.message) for turn in turns]


def after_prompt(prompt: Sequence[int], whole: Sequence[int]) -> list[int] | None:
    """What follows the prompt in a whole rendering; None when the prompt is no strict prefix of it."""
    return list(whole[len(prompt) :]) if len(whole) > len(prompt) and is_prefix(prompt, whole) else None


def produced(rest: Sequence[int], stops: Collection[int], closing: int, finish_reason: str) -> list[int]:
    """The ids the target produced among those after the prompt.

    `closing`: how many stop tokens the template prints after an answer. Up to the first of them the ids are the
    target's; it belongs to them when the answer ended by itself, not when a limit cut it. What the template prints
    after it (a line break) never does. Raises Unusable when the stop tokens are not where they should be.
    """
    found = [index for index, token in enumerate(rest) if token in stops]
    if not found or closing == 0:
        raise Unusable("the template prints no stop token after the answer")
    if len(found) != closing:
        raise Unusable("a stop token inside the answer")
    answer = list(rest[: found[0] + 1] if finish_reason in ENDED else rest[: found[0]])
    if found[0] == 0 or not answer:
        raise Unusable("empty answer")
    return answer


def is_prefix(start: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether `whole` begins with `start`."""
    return len(start) <= len(whole) and list(whole[: len(start)]) == list(start)


def _row(last: Turn, supervised_turns: Sequence[Turn], message: int) -> Masked:
    ids = np.array(last.prompt + last.answer, np.int32)
    mask = np.zeros(len(ids), np.bool_)
    for turn in supervised_turns:
        mask[len(turn.prompt) : len(turn.prompt) + len(turn.answer)] = True
    return Masked(ids, mask, tuple(len(turn.prompt) for turn in supervised_turns), message)
