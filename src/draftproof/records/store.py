"""The hidden-state store: sealed shards of packed rows, read by key from memory maps.

    store.json               layout, number of shards
    journal.jsonl            one line for each sealed shard: file, size, time, hash, rows, tokens
    shard-00000.safetensors  aux [N, A, H], (aux_scale [N, A],) final [N, H] bf16, token_ids int32 [N],
                             teacher_top1 int32 [N], row_start int64 [R+1], row_key uint8 [R, K] (UTF-8)

A shard gets its name by rename after its bytes are on disk, and counts only once the journal proves it: a kill
at any moment loses at most the open shard, and a file that is merely there (cut, zeroed, another's) is nothing.
There is one writer; a second one is refused.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import blake3
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftproof.artifact import Journal, differing_fields, hash_bytes, hash_file, read_json, sync_folder, write_json
from draftproof.errors import DamagedArtifact, DataError, DraftproofError, OtherRunsWork
from draftproof.records.codec import decode, encode
from draftproof.records.layout import StoreLayout

STORE, JOURNAL = "store.json", "journal.jsonl"
LOCK_WAIT_S = 5.0
_MAKE_AGAIN = "Make it again with --from extract."


@dataclass(frozen=True)
class StoredRow:
    """The states of one row of T tokens, copies of the file's content."""

    token_ids: Tensor
    """int32 [T]"""
    aux: Tensor
    """bfloat16 [T, A, H], decoded"""
    final: Tensor
    """bfloat16 [T, H], boundary L, before the final norm"""
    teacher_top1: Tensor
    """int64 [T], the target's most likely next token over its whole vocabulary"""


class StoreWriter:
    """Writes the shards of one store, in any order, each whole or not at all.

    `shards` holds the rows of each shard (`plan_shards`). Use as a context manager; the lock on the store is
    freed at its end, or by the kernel when the process dies. Raises DraftproofError when another process writes.
    """

    def __init__(self, folder: Path, layout: StoreLayout, shards: Sequence[Sequence[int]]) -> None:
        self.folder, self.layout, self.shards = folder, layout, shards
        folder.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(folder / JOURNAL)
        self._lock: int | None = _lock(folder / JOURNAL)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Free the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def sealed(self) -> set[int]:
        """Shards proven whole by the journal, read from disk at each call.

        Size and time must be those recorded at sealing; if the time differs, the content is hashed. Anything else is to
        be made again.
        """
        return {
            record["shard"]
            for record in self._journal.read()
            if record["shard"] < len(self.shards)
            and record["rows"] == len(self.shards[record["shard"]])
            and not _shard_problem(self.folder, record)
        }

    def write_shard(
        self,
        index: int,
        row_keys: Sequence[str],
        lengths: Sequence[int],
        token_ids: Tensor,
        aux: Tensor,
        final: Tensor,
        teacher_top1: Tensor,
    ) -> None:
        """Seal shard `index`.

        Shapes for its R rows and N tokens: token_ids and teacher_top1 [N] integers, aux [N, A, H] and final
        [N, H] float. Raises DataError, naming row and token, for states that cannot be right (wrong count, not
        finite, all zero), and the OSError of a full disk, leaving no partial file.
        """
        self._check(index, row_keys, lengths, token_ids, aux, final, teacher_top1)
        tensors = {
            **encode(aux, self.layout.codec),
            "final": final.to(torch.bfloat16),
            "token_ids": token_ids.to(torch.int32),
            "teacher_top1": teacher_top1.to(torch.int32),
            "row_start": torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(list(lengths), dtype=torch.int64).cumsum(0)]),
            "row_key": _pack_keys(row_keys),
        }
        name = f"shard-{index:05d}.safetensors"
        temporary, path = self.folder / f".{name}.tmp", self.folder / name
        with _removed_on_error(temporary, path):
            digest = _write_safetensors(temporary, tensors)
            os.replace(temporary, path)
            sync_folder(self.folder)
            stat = path.stat()
            self._journal.append(
                {
                    "shard": index,
                    "file": name,
                    "size": stat.st_size,
                    "mtime_ns": stat.st_mtime_ns,
                    "hash": digest,
                    "rows": len(row_keys),
                    "tokens": len(token_ids),
                }
            )

    def _open(self) -> None:
        """Write what the store is, or compare it with what is there; clear away what a kill left."""
        wanted = {"layout": self.layout.to_json(), "shards": len(self.shards), "rows": sum(len(rows) for rows in self.shards)}
        about = self.folder / STORE
        for left_over in self.folder.glob(".*.tmp"):  # a store made without a run folder has nobody else who sweeps it
            left_over.unlink()
        if not about.exists():
            write_json(about, wanted)
        elif (found := read_json(about)) != wanted:
            raise OtherRunsWork(
                f"The store there has another layout: {differing_fields(found, wanted)[0]}.", where=str(about), remedy=_MAKE_AGAIN
            )

    def _check(
        self, index: int, row_keys: Sequence[str], lengths: Sequence[int], token_ids: Tensor, aux: Tensor, final: Tensor, top1: Tensor
    ) -> None:
        where = f"shard {index}"
        if len(row_keys) != len(self.shards[index]) or len(lengths) != len(row_keys):
            raise DataError(
                f"{len(row_keys)} rows with {len(lengths)} lengths came for a shard of {len(self.shards[index])}.",
                where=where,
                remedy="The engine lost or doubled rows; report it with the recipe.",
            )
        N, A, H = sum(int(length) for length in lengths), self.layout.aux, self.layout.hidden_size
        wanted = {"token_ids": (N,), "aux": (N, A, H), "final": (N, H), "teacher_top1": (N,)}
        for (name, shape), tensor in zip(wanted.items(), (token_ids, aux, final, top1), strict=True):
            if tuple(tensor.shape) != shape:
                raise DataError(
                    f"{name} has the shape {tuple(tensor.shape)}, its rows of {N} tokens need {shape}.",
                    where=where,
                    remedy="An engine that returns fewer states than tokens usually has prefix caching on: turn it off.",
                )
        if N and not 0 <= int(top1.min()) <= int(top1.max()) < self.layout.vocab_size:
            raise DataError(
                "A teacher top-1 lies outside the vocabulary.", where=where, remedy="Check vocab_size against the LM head's rows."
            )
        starts = np.cumsum([0, *lengths])
        for name, states in (
            ("final", final[:, None]),
            *((f"boundary {b}", aux[:, i : i + 1]) for i, b in enumerate(self.layout.boundaries)),
        ):
            largest = states.to(torch.bfloat16).abs().amax((1, 2))  # [N]
            for fault, wrong in (("not finite", ~largest.isfinite()), ("all zero", largest == 0)):
                if bool(wrong.any()):
                    token = int(wrong.nonzero()[0, 0])
                    row = int(np.searchsorted(starts, token, side="right")) - 1
                    raise DataError(
                        f"The state at {name} is {fault} at token {token - int(starts[row])}.",
                        where=f"row {row_keys[row]}",
                        remedy="The engine's states cannot be trusted: try another extract.batch_tokens or target.dtype, "
                        "and report it if that does not help.",
                    )


class Store:
    """The read side: rows by key, from memory-mapped shards.

    Raises DamagedArtifact when a shard is missing, has another size than its journal line, or is not readable;
    one whose time differs (a copied folder) is hashed first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / STORE).is_file():
            raise DamagedArtifact("This folder holds no hidden-state store.", where=str(folder), remedy="Run `draftproof extract` first.")
        about = read_json(folder / STORE)
        self.layout = StoreLayout.from_json(about["layout"])
        self._records: dict[int, dict[str, Any]] = {record["shard"]: record for record in Journal(folder / JOURNAL).read()}
        self._shards: dict[int, dict[str, Tensor]] = {}
        self._place: dict[str, tuple[int, int]] = {}
        for index in range(about["shards"]):
            if index not in self._records:
                raise DamagedArtifact(
                    f"Shard {index} of {about['shards']} is not sealed.", where=str(folder), remedy="Run it again: it goes on."
                )
            if problem := _shard_problem(folder, self._records[index]):
                raise DamagedArtifact(problem, where=str(folder), remedy=_MAKE_AGAIN)
            for number, key in enumerate(_unpack_keys(self._shard(index)["row_key"])):
                self._place[key] = (index, number)
        if len(self._place) != about["rows"]:
            raise DamagedArtifact(
                f"The store has {len(self._place)} different rows, store.json says {about['rows']}.", where=str(folder), remedy=_MAKE_AGAIN
            )

    @property
    def keys(self) -> list[str]:
        """Row keys in the order of the shards."""
        return list(self._place)

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(int(record["tokens"]) for record in self._records.values())

    @property
    def bytes(self) -> int:
        """Bytes of all shards on disk."""
        return sum(int(record["size"]) for record in self._records.values())

    def __len__(self) -> int:
        return len(self._place)

    def read(self, row_key: str) -> StoredRow:
        """All states of one row. Raises DataError for an unknown key."""
        shard, start, stop = self._span(row_key)
        packed = {name: tensor[start:stop] for name, tensor in shard.items() if name in ("aux", "aux_scale")}
        aux = decode(packed, self.layout.codec)
        return StoredRow(
            token_ids=shard["token_ids"][start:stop].clone(),
            aux=aux.clone() if aux.data_ptr() == packed["aux"].data_ptr() else aux,
            final=shard["final"][start:stop].clone(),
            teacher_top1=shard["teacher_top1"][start:stop].long(),
        )

    def contents(self) -> dict[str, str]:
        """{"states": hash over the layout and every shard's hash, in order}."""
        parts = [json.dumps(self.layout.to_json(), sort_keys=True).encode()]
        parts += [bytes.fromhex(self._records[index]["hash"]) for index in sorted(self._records)]
        return {"states": hash_bytes(*parts)}

    def _span(self, row_key: str) -> tuple[dict[str, Tensor], int, int]:
        if row_key not in self._place:
            raise DataError("The store has no such row.", where=f"row {row_key}", remedy="Extract again from these rows.")
        index, number = self._place[row_key]
        shard = self._shard(index)
        start, stop = shard["row_start"][number : number + 2].tolist()
        return shard, start, stop

    def _shard(self, index: int) -> dict[str, Tensor]:
        """The tensors of a shard, views of its memory map."""
        if index not in self._shards:
            path = self.folder / self._records[index]["file"]
            try:
                with safe_open(path, framework="pt") as handle:
                    self._shards[index] = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
            except (SafetensorError, OSError) as error:
                raise DamagedArtifact(f"The shard cannot be read: {error}.", where=str(path), remedy=_MAKE_AGAIN) from None
        return self._shards[index]


def _shard_problem(folder: Path, record: Mapping[str, Any]) -> str | None:
    path = folder / record["file"]
    try:
        stat = path.stat()
    except FileNotFoundError:
        return f"{record['file']} is missing."
    if stat.st_size != record["size"]:
        return f"{record['file']} has {stat.st_size} bytes, its journal line says {record['size']}."
    if stat.st_mtime_ns != record["mtime_ns"] and hash_file(path) != record["hash"]:
        return f"{record['file']} does not hash to what its journal line says."
    return None


_WRITE_AT_ONCE = 1 << 28  # bytes: one write call moves at most 2 GiB
_DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
}


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write, flush to disk and return the BLAKE3 of the bytes.

    The library's own writer would need the file read back for its hash, and reports a full disk as text only.
    Widest elements first, as the library does, so that every tensor is aligned in the map.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    with path.open("wb", buffering=0) as stream:
        for view in (memoryview(len(text).to_bytes(8, "little") + text), *(_raw(tensor) for _, tensor in ordered)):
            hasher.update(view)
            written = 0
            while written < len(view):
                written += stream.write(view[written : written + _WRITE_AT_ONCE]) or 0
        os.fsync(stream.fileno())
    return hasher.hexdigest()


def _raw(tensor: Tensor) -> memoryview:
    plain: np.ndarray[Any, Any] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return plain.data


def _pack_keys(keys: Sequence[str]) -> Tensor:
    """uint8 [R, K]: UTF-8, padded with zeros to the longest."""
    encoded = np.array([key.encode() for key in keys], dtype=np.bytes_)
    return torch.from_numpy(encoded.view(np.uint8).reshape(len(keys), -1).copy())


def _unpack_keys(packed: Tensor) -> list[str]:
    rows = np.ascontiguousarray(packed.numpy())
    return [key.decode() for key in rows.view(f"S{rows.shape[1]}").reshape(-1).tolist()]


def _lock(path: Path) -> int:
    """A descriptor that holds the only lock on the store."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise DraftproofError(
                    "Another process writes this store.", where=str(path.parent), remedy="Wait for it to end, or stop it; then run again."
                ) from None
            time.sleep(0.05)
        else:
            return descriptor


@contextmanager
def _removed_on_error(*unproven: Path) -> Iterator[None]:
    """Removes files that nothing proves yet, so that a full disk is not filled by them.

    Not after Ctrl-C: it may come when the journal line is written already, and the shard then counts.
    """
    try:
        yield
    except Exception:
        for path in unproven:
            path.unlink(missing_ok=True)
        raise
