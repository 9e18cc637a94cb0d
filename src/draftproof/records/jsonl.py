"""JSON objects, one a line: read whole, with the place of every damage.

    for line in read_jsonl(path):
        line.value, line.where          # {...}, 'prompts.jsonl:17'

What a killed writer, a full disk or another tool leaves behind (a cut last line, a run of NUL bytes, a byte-order
mark, one array over the whole file, an empty file) each has its own sentence with file, line and byte. Byte offsets
count the decompressed bytes of a `.gz`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from draftproof.errors import DataError, UsageError

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Line:
    """One JSON object and where it stands."""

    value: dict[str, Any]
    where: str
    """`name:line`, lines counted from 1."""


@dataclass
class BadLines:
    """How many damaged lines may be skipped over all files of a reading, and which were."""

    allowed: int = 0
    skipped: list[DataError] = field(default_factory=list)

    def meet(self, damage: DataError) -> None:
        """Note a damaged line; raises it when no more may be skipped."""
        if len(self.skipped) >= self.allowed:
            raise damage
        self.skipped.append(damage)


def read_jsonl(path: Path, bad: BadLines | None = None, *, remedy: str = "Mend or remove the line.") -> Iterator[Line]:
    """Each object of a `.jsonl` or `.jsonl.gz` file, in order; blank lines are passed over.

    Raises UsageError when the file is not there or not of this kind, DataError with file, line and byte offset
    at damage, unless `bad` allows to skip it. `remedy` is what the caller can advise about a damaged line.
    """
    bad = bad if bad is not None else BadLines()
    _check_name(path)
    offset, objects = 0, 0
    with _open(path) as stream:
        for number, raw in enumerate(_lines(stream, path), start=1):
            content = raw.removeprefix(_BOM) if number == 1 else raw
            if content.strip():
                objects += 1
                place = f"{path}:{number}, byte {offset}"
                if objects == 1:
                    _refuse_array(content, place)
                try:
                    value = _parse(content, place, remedy)
                except DataError as damage:
                    bad.meet(damage)
                else:
                    yield Line(value, f"{path.name}:{number}")
            offset += len(raw)
    if not objects:
        what = "The file is empty." if offset == 0 else "The file has only blank lines."
        raise DataError(what, where=str(path), remedy="Write it again, or take it out of the recipe.")


def _check_name(path: Path) -> None:
    if not path.is_file():
        raise UsageError("There is no such file.", where=str(path), remedy="Mend the path in the recipe.")
    if not path.name.endswith((".jsonl", ".jsonl.gz", ".json", ".json.gz")):
        raise UsageError(
            f"{path.name} is not a JSONL file, the only kind that is read.",
            where=str(path),
            remedy="Convert it to one JSON object a line and name it NAME.jsonl.",
        )


def _open(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.name.endswith(".gz") else path.open("rb")


def _lines(stream: IO[bytes], path: Path) -> Iterator[bytes]:
    try:
        yield from stream
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"The compressed file is damaged: {error}.", where=str(path), remedy="Fetch or write it again.") from None


def _refuse_array(content: bytes, place: str) -> None:
    if content.lstrip().startswith(b"["):
        raise DataError(
            "The file holds one JSON array, not one object a line.",
            where=place,
            remedy="Convert it: `jq -c '.[]' FILE > FILE.jsonl`.",
        )


def _parse(content: bytes, place: str, remedy: str) -> dict[str, Any]:
    """The object of one line; raises DataError saying which kind of damage it is."""
    try:
        value = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"The line is not UTF-8 (byte {error.start} of the line).", where=place, remedy=remedy) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{_diagnosis(content, error)}.", where=place, remedy=remedy) from None
    if not isinstance(value, dict):
        raise DataError(f"The line holds a {type(value).__name__}, not an object.", where=place, remedy=remedy)
    return value


def _diagnosis(content: bytes, error: Exception) -> str:
    if not content.strip(b"\0\r\n \t"):
        return f"The line is a run of {content.count(0)} NUL bytes, as a crash leaves them"
    if not content.endswith(b"\n"):
        return "The last line is cut: it ends in the middle of an object, as a killed writer leaves it"
    if content.strip() == b"{":
        return "The line holds the start of an object only: objects must not be spread over lines"
    column = f" (column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
    return f"The line is not JSON{column}: {getattr(error, 'msg', error)}"
