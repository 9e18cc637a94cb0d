"""Which prompts to evaluate on: bench files, or the prompts of the held-out rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from draftproof.errors import DataError
from draftproof.recipe import EvaluateSettings
from draftproof.records.conversations import Message, Unusable, parse
from draftproof.records.jsonl import Line, read_jsonl
from draftproof.records.rows import read_rows
from draftproof.target.tokenizer import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("draftproof")


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt as token ids, generation prompt included."""

    category: str
    token_ids: list[int]


def read_prompts(
    settings: EvaluateSettings, prepare: Path, tokenizer: PreTrainedTokenizerBase, longest: int | None = None
) -> list[BenchPrompt]:
    """The prompts of the recipe's bench files, or of the validation rows when there are none.

    At most `settings.prompts`, evenly spread over those of at most `longest` tokens; the others are left out, and their
    number is logged. Raises DataError with file, line and byte at damage, and when no prompt is left.
    """
    found = [prompt for path in settings.bench for prompt in _read_bench(Path(path), tokenizer)] or _held_out(prepare)
    if not found:
        raise DataError(
            "There is no prompt to evaluate on.", where=str(prepare), remedy="Give evaluate.bench, or a larger data.validation."
        )
    fitting = [prompt for prompt in found if longest is None or len(prompt.token_ids) <= longest]
    if len(fitting) < len(found):
        left_out = f"{len(found) - len(fitting)} of {len(found)} prompts leave no room for max_tokens within the target's positions"
        if not fitting:
            raise DataError(
                f"{left_out}.",
                where=", ".join(settings.bench) or str(prepare),
                remedy="Lower evaluate.max_tokens, or give shorter prompts as evaluate.bench.",
            )
        log.warning("evaluate: %s: left out.", left_out)
    if settings.prompts is not None and settings.prompts < len(fitting):
        fitting = [fitting[int(index)] for index in np.linspace(0, len(fitting) - 1, settings.prompts).round()]
    return fitting


def _read_bench(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[BenchPrompt]:
    """Rows of {category, turns: [text, ...]} or {category, messages}: the first user turn is answered.

    Later turns depend on the answer to the first and are left out; the figures say how many prompts they are of.
    """
    prompts = []
    for line in read_jsonl(path):
        where = str(path.parent / line.where)
        try:
            messages = _first_turn(line)
        except Unusable as reason:
            raise DataError(f"The row cannot be asked: {reason}.", where=where, remedy="Mend or remove the row.") from None
        try:
            ids = render(tokenizer, messages, add_generation_prompt=True)
        except Exception as error:  # noqa: BLE001  a template may raise anything; its sentence is the reason
            said = (str(error).splitlines() or [type(error).__name__])[0][:120]
            raise DataError(f"The target's chat template refuses the row: {said}.", where=where, remedy="Mend or remove the row.") from None
        default = Path(path.name.removesuffix(".gz")).stem
        prompts.append(BenchPrompt(str(line.value.get("category") or default), ids))
    return prompts


def _first_turn(line: Line) -> Sequence[Message]:
    """The messages up to the first of a user. Raises Unusable with the reason."""
    turns = line.value.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return [{"role": "user", "content": turns[0]}]
    if turns is not None and line.value.get("messages") is None:
        raise Unusable("its `turns` do not begin with a text")
    messages = parse(line).messages
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise Unusable("neither `turns` (texts) nor `messages` with a user turn")
    return messages[: roles.index("user") + 1]


def _held_out(prepare: Path) -> list[BenchPrompt]:
    rows = read_rows(prepare)
    prompts = []
    for index in rows.indices("validation").tolist():
        row = rows.row(index)
        if row.turn_start:
            prompts.append(BenchPrompt(row.category or "all", row.token_ids[: row.turn_start[0]].tolist()))
    return prompts
