"""Conversations to rows through the target's chat template.

For each answer two renderings: the prompt as an engine would feed it (messages before it, generation prompt added) and
the whole up to the answer. Where the prompt's ids are a strict prefix of the whole's, the border is its length. Where
only the *texts* are prefixes (a merge of the tokenizer spans the border), prompt and answer are encoded apart, as they
come about when serving, and accepted when they decode to the same text. Ids that the target itself produced
(`token_ids`) go before all that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from draftproof.prepare.mask import ENDED, Masked, Turn, after_prompt, assemble, produced
from draftproof.records.conversations import Conversation, Message, Unusable, answers
from draftproof.target.tokenizer import closing_text, decode, encode, encode_many, inserted_text, render_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Rendered:
    """What became of one conversation."""

    conversation: Conversation
    rows: list[Masked] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    dropped: str | None = None
    """The reason, when there are no rows."""
    given_ids: bool = False
    """Whether the ids produced by the target were given and used."""
    retokenised: bool = False
    """Whether encoding the text of those ids gives other ids."""


@dataclass(frozen=True)
class _TurnText:
    message: int
    bare: str
    """What an engine would feed the target."""
    prompt: str
    """The same and the block that the template inserts before the content, if it does."""
    whole: str

    @property
    def rest(self) -> str | None:
        """The text after the prompt, where the prompt is a prefix."""
        return self.whole[len(self.prompt) :] if self.whole.startswith(self.prompt) else None


class Renderer:
    """Turns conversations into masked rows; holds what is known of the template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[int], max_length: int, vocab_size: int) -> None:
        self.tokenizer, self.stops, self.max_length, self.vocab_size = tokenizer, frozenset(stops), max_length, vocab_size
        self.inserted = inserted_text(tokenizer)
        self.closing = sum(token in self.stops for token in encode(tokenizer, closing_text(tokenizer)))

    def render(self, conversations: Sequence[Conversation]) -> Iterator[Rendered]:
        """Each conversation's rows, in order. Give some hundred at once: their texts are encoded together."""
        texts = [self._texts(conversation) for conversation in conversations]
        wanted = list(dict.fromkeys(text for turns, _ in texts for turn in turns for text in (turn.bare, turn.prompt, turn.whole)))
        ids = dict(zip(wanted, encode_many(self.tokenizer, wanted), strict=True))
        for conversation, (turns, reasons) in zip(conversations, texts, strict=True):
            yield self._rows(conversation, turns, reasons, ids)

    def _texts(self, conversation: Conversation) -> tuple[list[_TurnText], list[str]]:
        """The two renderings of each answer, and why some have none."""
        turns, reasons = [], []
        for index in answers(conversation.messages):
            try:
                turns.append(self._turn_text(conversation.messages, index))
            except Unusable as reason:
                reasons.append(str(reason))
        return turns, reasons

    def _turn_text(self, messages: Sequence[Message], index: int) -> _TurnText:
        answer = messages[index]
        if not answer["content"] and not answer.get("reasoning_content"):
            raise Unusable("empty answer")
        try:
            bare = render_text(self.tokenizer, messages[:index], add_generation_prompt=True)
            whole = render_text(self.tokenizer, messages[: index + 1], add_generation_prompt=False)
        except Exception as error:  # noqa: BLE001  a template may raise anything; its sentence is the reason
            raise Unusable(f"the template refuses: {_first_line(error)}") from None
        inserted = not answer.get("reasoning_content") and whole.startswith(bare + self.inserted)
        prompt = bare + self.inserted if inserted else bare  # printed by the template, so never supervised
        return _TurnText(index, bare, prompt, whole)

    def _rows(self, conversation: Conversation, texts: list[_TurnText], reasons: list[str], ids: dict[str, list[int]]) -> Rendered:
        result = Rendered(conversation, changes=list(conversation.changes))
        found = answers(conversation.messages)
        if len(found) < sum(message["role"] == "assistant" for message in conversation.messages):
            reasons.append("no user turn before the answer")
        turns = []
        for text in texts:
            last = text.message == found[-1]
            try:
                turn = self._turn(text, ids, conversation.finish_reason if last else "", result)
            except Unusable as reason:
                turn = None
                reasons.append(str(reason))
            if last and conversation.token_ids is not None:
                turn = self._given(conversation, text, ids, turn, result)
            if turn is not None:
                turns.append(turn)
        self._finish(result, turns, reasons)
        return result

    def _turn(self, text: _TurnText, ids: dict[str, list[int]], finish_reason: str, result: Rendered) -> Turn:
        prompt, whole = ids[text.prompt], ids[text.whole]
        rest = after_prompt(prompt, whole)
        if rest is None:
            if text.rest is None:
                raise Unusable("the template rewrites the prompt once the answer is there")
            rest = encode(self.tokenizer, text.rest)
            if decode(self.tokenizer, prompt + rest) != decode(self.tokenizer, whole):
                raise Unusable("prompt and answer cannot be encoded apart")
            _note(result.changes, "encoded apart at the border of prompt and answer")
        return Turn(text.message, prompt, produced(rest, self.stops, self.closing, finish_reason))

    def _given(
        self, conversation: Conversation, text: _TurnText, ids: dict[str, list[int]], turn: Turn | None, result: Rendered
    ) -> Turn | None:
        """The last turn with the ids that the target produced, if they say what the text says; else `turn`."""
        given = list(conversation.token_ids or ())
        stopped = given[-1] in self.stops
        body = given[:-1] if stopped else given
        message = conversation.messages[text.message]
        fits = (
            not self.stops.intersection(body)
            and not message.get("reasoning_content")
            and stopped == (conversation.finish_reason in ENDED)
            and max(given) < self.vocab_size
            and decode(self.tokenizer, body) == message["content"]
        )
        if not fits:
            _note(result.changes, "token_ids do not fit the text: encoded again")
            return turn
        result.given_ids, result.retokenised = True, turn is None or turn.answer != given
        return Turn(text.message, ids[text.bare], given)

    def _finish(self, result: Rendered, turns: list[Turn], reasons: list[str]) -> None:
        """Assemble, cut, and settle whether the conversation is kept, changed or dropped."""
        rows = assemble(turns)
        if len(rows) > 1:
            _note(result.changes, "one row a turn: the template rewrites history")
        for row in rows:
            cut = row.cut(self.max_length)
            if len(cut.ids) < len(row.ids):
                _note(result.changes, "cut to max_length")
            if cut.ids.max(initial=0) >= self.vocab_size:
                reasons.append("a token id outside the target's vocabulary")
            elif cut.can_draft():
                result.rows.append(cut)
            else:
                shorter = len(cut.ids) < len(row.ids)
                reasons.append("no answer within max_length" if shorter else "answer too short to draft from")
        if result.rows:
            for reason in reasons:
                _note(result.changes, f"an answer is not supervised: {reason}")
            return
        if not any(message["role"] == "assistant" for message in result.conversation.messages):
            reasons.insert(0, "no assistant answer")
        result.dropped = reasons[0]


def _note(changes: list[str], change: str) -> None:
    if change not in changes:
        changes.append(change)


def _first_line(error: Any) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
