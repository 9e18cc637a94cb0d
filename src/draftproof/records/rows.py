"""Rows: token ids with a supervised mask, as `prepare` writes them and everybody else reads them.

    hashes = write_rows(task.out, rows)                  # rows/rows-00000.parquet ...
    table = read_rows(task.inputs["prepare"])
    for index in table.indices("train"):
        table.token_ids(index), table.supervised(index)  # views, no copies

`supervised[t]` says that token t was produced by the target. A row is one conversation, or one turn of it
where the template rewrites history.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import blake3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftproof.artifact import hash_bytes
from draftproof.errors import DamagedArtifact

Split = Literal["train", "validation"]

ROWS = "rows"
_TOKENS_PER_FILE = 1 << 28  # far below 2**31, where the 32-bit list offsets of a Parquet file would end

SCHEMA = pa.schema(
    [
        ("row_key", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("supervised", pa.list_(pa.bool_())),
        ("turn_start", pa.list_(pa.int32())),
        ("conversation_key", pa.string()),
        ("split", pa.string()),
        ("category", pa.string()),
        ("finish_reason", pa.string()),
        ("source", pa.string()),
    ]
)


@dataclass(frozen=True, eq=False)
class Row:
    """One training row of T tokens."""

    row_key: str
    """`make_row_key` of the token ids, the conversation's key and the turn."""
    token_ids: np.ndarray
    """int32 [T]"""
    supervised: np.ndarray
    """bool [T]"""
    turn_start: tuple[int, ...]
    """Index of the first supervised token of every supervised turn, ascending."""
    conversation_key: str
    """Hash of the conversation's content: the same words have the same key wherever they stand."""
    split: Split
    category: str
    finish_reason: str
    """Of the last answer: `stop`, `length`, or `` when the source does not say."""
    source: str
    """`file:line`"""


def make_row_key(token_ids: np.ndarray, conversation_key: str, turn: int) -> str:
    """BLAKE3 (hex) of a row's identity. `turn` is the message index of its answer, or -1 for a whole conversation."""
    return hash_bytes(np.ascontiguousarray(token_ids, "<i4").tobytes(), conversation_key.encode(), str(turn).encode())


def write_rows(folder: Path, rows: Iterable[Row], rows_per_file: int = 50_000) -> dict[str, str]:
    """Write `rows/*.parquet` under `folder`, in the order given; what lay there before is replaced.

    Returns the contents hashes: `token_ids` over (row_key, token ids) of all rows in order, which is what states
    depend on; `rows` over all that training and evaluation see (token ids, mask, turns, split, category).
    """
    target = folder / ROWS
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    by_tokens, by_rows = blake3.blake3(), blake3.blake3()
    for number, chunk in enumerate(_chunks(rows, rows_per_file)):
        for row in chunk:
            _check(row)
            key, ids = row.row_key.encode(), np.ascontiguousarray(row.token_ids, "<i4").tobytes()
            mask = np.packbits(row.supervised).tobytes()
            turns = np.asarray(row.turn_start, "<i4").tobytes()
            by_tokens.update(bytes.fromhex(hash_bytes(key, ids)))
            by_rows.update(bytes.fromhex(hash_bytes(key, ids, mask, turns, row.split.encode(), row.category.encode())))
        pq.write_table(_to_arrow(chunk), target / f"rows-{number:05d}.parquet", compression="zstd", version="2.6")
    return {"token_ids": by_tokens.hexdigest(), "rows": by_rows.hexdigest()}


class RowTable:
    """All rows of a `prepare` artifact, columnar: a row's arrays are views of long ones (5 bytes a token)."""

    def __init__(self, table: pa.Table, where: str) -> None:
        if table.schema.names != SCHEMA.names:
            raise DamagedArtifact(
                f"The rows have the columns {', '.join(table.schema.names)}, not {', '.join(SCHEMA.names)}.",
                where=where,
                remedy="Make them again with --from prepare.",
            )
        self._tokens, self._offsets = _flat(table["token_ids"], np.dtype(np.int32))
        self._mask, mask_offsets = _flat(table["supervised"], np.dtype(np.bool_))
        self._turns, self._turn_offsets = _flat(table["turn_start"], np.dtype(np.int32))
        if not np.array_equal(self._offsets, mask_offsets):
            raise DamagedArtifact(
                "Some row's mask is not as long as its token ids.", where=where, remedy="Make the rows again with --from prepare."
            )
        self._text: dict[str, pa.ChunkedArray] = {name: table[name] for name in ("conversation_key", "category", "finish_reason", "source")}
        self.keys: list[str] = table["row_key"].to_pylist()
        self._splits = np.array(table["split"].to_pylist(), dtype=object)
        self.lengths: np.ndarray = np.diff(self._offsets)
        """int64 [rows], in tokens."""

    def __len__(self) -> int:
        return len(self.keys)

    def row(self, index: int) -> Row:
        """Row `index`, its arrays being views."""
        start, stop = self._turn_offsets[index], self._turn_offsets[index + 1]
        return Row(
            row_key=self.keys[index],
            token_ids=self.token_ids(index),
            supervised=self.supervised(index),
            turn_start=tuple(int(t) for t in self._turns[start:stop]),
            conversation_key=self._text["conversation_key"][int(index)].as_py(),
            split=self._splits[index],
            category=self._text["category"][int(index)].as_py(),
            finish_reason=self._text["finish_reason"][int(index)].as_py(),
            source=self._text["source"][int(index)].as_py(),
        )

    def indices(self, split: Split) -> np.ndarray:
        """int64: the rows of a split, in order."""
        return np.flatnonzero(self._splits == split)

    def token_ids(self, index: int) -> np.ndarray:
        """int32 [T]"""
        return self._tokens[self._offsets[index] : self._offsets[index + 1]]

    def supervised(self, index: int) -> np.ndarray:
        """bool [T]"""
        return self._mask[self._offsets[index] : self._offsets[index + 1]]

    def supervised_counts(self) -> np.ndarray:
        """int64 [rows]: supervised tokens of each row."""
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._mask, dtype=np.int64)])
        counts: np.ndarray = np.diff(before[self._offsets])
        return counts

    def conversation_keys(self) -> np.ndarray:
        """object [rows]: the conversation key of each row."""
        return np.array(self._text["conversation_key"].to_pylist(), dtype=object)

    def finish_reasons(self) -> np.ndarray:
        """object [rows]: how each row's last answer ended, `` where the source does not say."""
        return np.array(self._text["finish_reason"].to_pylist(), dtype=object)

    def supervised_ids(self, split: Split) -> np.ndarray:
        """int32: every supervised token id of a split, row after row."""
        chosen = np.repeat(self._splits == split, self.lengths)
        ids: np.ndarray = self._tokens[self._mask & chosen]
        return ids


def read_rows(artifact_folder: Path) -> RowTable:
    """The rows of a `prepare` artifact."""
    files = sorted((artifact_folder / ROWS).glob("*.parquet"))
    if not files:
        raise DamagedArtifact("There are no rows here.", where=str(artifact_folder), remedy="Make them with `draftproof prepare`.")
    try:
        table = pa.concat_tables([pq.read_table(file) for file in files])
    except (pa.ArrowInvalid, OSError) as error:
        raise DamagedArtifact(
            f"The rows cannot be read: {error}.", where=str(artifact_folder / ROWS), remedy="Make them again with --from prepare."
        ) from None
    return RowTable(table, str(artifact_folder / ROWS))


def _chunks(rows: Iterable[Row], rows_per_file: int) -> Iterator[list[Row]]:
    """Lists of at most `rows_per_file` rows and 2**28 tokens; one empty list when there are no rows."""
    chunk: list[Row] = []
    tokens = written = 0
    for row in rows:
        if chunk and (len(chunk) >= rows_per_file or tokens + len(row.token_ids) > _TOKENS_PER_FILE):
            yield chunk
            chunk, tokens, written = [], 0, written + 1
        chunk.append(row)
        tokens += len(row.token_ids)
    if chunk or not written:
        yield chunk


def _check(row: Row) -> None:
    """A row that breaks its own rules is a fault of ours: stop before it is written."""
    assert len(row.token_ids) == len(row.supervised), row.source
    assert row.supervised.dtype == np.bool_, row.source
    assert row.split in get_args(Split), row.source
    assert all(row.supervised[list(row.turn_start)]), row.source


def _to_arrow(rows: list[Row]) -> pa.Table:
    def lists(arrays: list[np.ndarray], dtype: str, kind: pa.DataType) -> pa.Array:
        offsets = np.zeros(len(arrays) + 1, np.int32)
        np.cumsum([len(a) for a in arrays], out=offsets[1:])
        values = np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind))

    columns = {
        "row_key": pa.array([r.row_key for r in rows], pa.string()),
        "token_ids": lists([r.token_ids for r in rows], "int32", pa.int32()),
        "supervised": lists([r.supervised for r in rows], "bool", pa.bool_()),
        "turn_start": lists([np.asarray(r.turn_start, np.int32) for r in rows], "int32", pa.int32()),
        "conversation_key": pa.array([r.conversation_key for r in rows], pa.string()),
        "split": pa.array([r.split for r in rows], pa.string()),
        "category": pa.array([r.category for r in rows], pa.string()),
        "finish_reason": pa.array([r.finish_reason for r in rows], pa.string()),
        "source": pa.array([r.source for r in rows], pa.string()),
    }
    return pa.table(columns, schema=SCHEMA)


def _flat(column: pa.ChunkedArray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """A list column as (all values, int64 offsets [rows + 1])."""
    values, lengths = [], []
    for chunk in column.chunks:
        values.append(chunk.flatten().to_numpy(zero_copy_only=False).astype(dtype, copy=False))
        lengths.append(np.diff(chunk.offsets.to_numpy()).astype(np.int64))
    offsets = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
    return (np.concatenate(values) if values else np.zeros(0, dtype)), offsets
