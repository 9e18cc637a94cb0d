"""The input files of `prepare`: every line ends as a conversation or with a reason.

`messages` JSONL, plain or gzipped. Reading is strict about the file (see `records/jsonl.py`) and forgiving about a
conversation: one that cannot be used is named and counted, and the rest goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftproof.errors import DataError
from draftproof.records.conversations import Conversation, Unusable, parse
from draftproof.records.jsonl import BadLines, read_jsonl

_REMEDY = "Mend or remove the line, or allow it with data.skip_bad_lines."


@dataclass(frozen=True)
class Dropped:
    """A line that gives no rows."""

    source: str
    """`file:line`"""
    id: str
    reason: str
    """What it is counted under."""
    detail: str = ""
    """What more to say of this one line."""


def read_conversations(paths: Sequence[Path], roles: Mapping[str, str], bad: BadLines) -> Iterator[Conversation | Dropped]:
    """Each line of the files in order. Damaged lines that `bad` lets pass come out as dropped, too."""
    for path in paths:
        before = len(bad.skipped)
        for line in read_jsonl(path, bad, remedy=_REMEDY):
            yield from _damaged(bad.skipped[before:])
            before = len(bad.skipped)
            try:
                yield parse(line, roles)
            except Unusable as reason:
                yield Dropped(line.where, str(line.value.get("id") or line.where), str(reason))
        yield from _damaged(bad.skipped[before:])


def _damaged(errors: Sequence[DataError]) -> Iterator[Dropped]:
    for error in errors:
        place = Path((error.where or "").partition(", byte")[0]).name
        yield Dropped(place, place, "damaged line")
