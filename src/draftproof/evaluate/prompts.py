"""Which prompts to evaluate on: bench files, or the prompts of the held-out rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftproof.errors import DataError
from draftproof.recipe import EvaluateSettings
from draftproof.records.rows import read_rows
from draftproof.target.tokenizer import render


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt as token ids, generation prompt included."""

    prompt_id: str
    category: str
    token_ids: list[int]


def read_prompts(settings: EvaluateSettings, prepare: Path, tokenizer: Any) -> list[BenchPrompt]:
    """The prompts of the recipe's bench files, or of the validation rows when there are none.

    At most `settings.prompts`, evenly spread. Raises DataError with file and line.
    """
    found = [prompt for path in settings.bench for prompt in _read_bench(Path(path), tokenizer)] or _held_out(prepare)
    if not found:
        raise DataError(
            "There is no prompt to evaluate on.", where=str(prepare), remedy="Give evaluate.bench, or a larger data.validation."
        )
    if settings.prompts is not None and settings.prompts < len(found):
        found = [found[int(index)] for index in np.linspace(0, len(found) - 1, settings.prompts).round()]
    return found


def _read_bench(path: Path, tokenizer: Any) -> list[BenchPrompt]:
    """Rows of {id, category, turns: [text, ...]} or {id, category, messages}: the first user turn is answered.

    Later turns depend on the answer to the first and are left out; the figures say how many prompts they are of.
    """
    prompts = []
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DataError(f"The line is not JSON: {error}.", where=where, remedy="Mend or remove the line.") from None
            messages = _first_turn(row) if isinstance(row, dict) else None
            if messages is None:
                raise DataError(
                    "The row has neither `turns` (texts) nor `messages` with a user turn.", where=where, remedy="Give one of them."
                )
            ids = render(tokenizer, messages, add_generation_prompt=True)
            prompts.append(BenchPrompt(str(row.get("id", number)), str(row.get("category", path.stem)), ids))
    return prompts


def _first_turn(row: dict[str, Any]) -> Sequence[dict[str, str]] | None:
    turns, messages = row.get("turns"), row.get("messages")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return [{"role": "user", "content": turns[0]}]
    if isinstance(messages, list):
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        if "user" in roles:
            return messages[: roles.index("user") + 1]
    return None


def _held_out(prepare: Path) -> list[BenchPrompt]:
    rows = read_rows(prepare)
    prompts = []
    for index in rows.indices("validation").tolist():
        row = rows.row(index)
        if row.turn_start:
            prompts.append(BenchPrompt(row.row_key, row.category or "all", row.token_ids[: row.turn_start[0]].tolist()))
    return prompts
