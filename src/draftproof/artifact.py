"""Artifacts: folders that describe and prove themselves.

An artifact is a folder with a `manifest.json`, written last, by rename:

    if reusable(run / "vocab", stage="vocab", ingredients={...}) is None:
        build = open_build(run / "vocab", stage="vocab", ingredients={...})
        write_files(build.folder)                   # RUN/.vocab.partial/
        build.finish(outcome)                       # hash, manifest, rename to RUN/vocab/

Until then the work lies in `.NAME.partial`, which survives a crash so that a stage can go on from its
own journal. The manifest holds the *ingredients* (settings, contents of the inputs, stage version): their
hash is the fingerprint, and comparing them names the field that differs. Whoever reads an artifact calls
`verify`, which trusts size and modification time recorded at sealing, or rehashes with `deep=True`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import blake3
from pydantic import BaseModel, ConfigDict, ValidationError

from draftproof.errors import DamagedArtifact, OtherRunsWork
from draftproof.stage import Outcome

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1


class FileRecord(BaseModel):
    """One file of an artifact."""

    size: int
    mtime_ns: int
    hash: str
    """BLAKE3, hex."""


class Manifest(BaseModel):
    """What an artifact says of itself."""

    model_config = ConfigDict(frozen=True)

    schema_version: int
    stage: str
    fingerprint: str
    """BLAKE3 of the ingredients' canonical JSON."""
    ingredients: dict[str, Any]
    counts: dict[str, Any]
    contents: dict[str, str]
    files: dict[str, FileRecord]
    documents: list[str]
    """Files for people that a later stage may complete: present, but not hashed."""
    actual: dict[str, float]
    predicted: dict[str, float]
    versions: dict[str, str]
    host: str
    started: str
    ended: str


@dataclass
class Build:
    """An artifact in the making."""

    folder: Path
    """Where the stage writes: `.NAME.partial` beside the final folder."""
    final: Path
    stage: str
    ingredients: dict[str, Any]
    started: str
    predicted: dict[str, float]

    def finish(self, outcome: Outcome) -> Manifest:
        """Hash every file, write the manifest, and move the folder to its name."""
        files = {}
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder).as_posix()
            if path.is_file() and relative not in (MANIFEST, _INGREDIENTS) and relative not in outcome.documents:
                files[relative] = record_file(path)
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            stage=self.stage,
            fingerprint=fingerprint(self.ingredients),
            ingredients=self.ingredients,
            counts=outcome.counts,
            contents=outcome.contents,
            files=files,
            documents=sorted(outcome.documents),
            actual=outcome.actual,
            predicted=self.predicted,
            versions=_versions(),
            host=socket.gethostname(),
            started=self.started,
            ended=now(),
        )
        write_atomic(self.folder / MANIFEST, manifest.model_dump_json(indent=1).encode())
        (self.folder / _INGREDIENTS).unlink(missing_ok=True)
        os.replace(self.folder, self.final)
        sync_folder(self.final.parent)
        return manifest


_INGREDIENTS = "ingredients.json"


def partial_folder(final: Path) -> Path:
    """Where the unfinished work for `final` lies."""
    return final.with_name(f".{final.name}.partial")


def open_build(
    final: Path,
    *,
    stage: str,
    ingredients: Mapping[str, Any],
    conditions: Mapping[str, Any] | None = None,
    predicted: Mapping[str, float] | None = None,
) -> Build:
    """Start or go on with an artifact. Refuses when the unfinished work there has other ingredients, or was begun
    under other `conditions` (device, dtype): halves of two kinds must not be joined, whole ones may be used anywhere."""
    folder = partial_folder(final)
    under = {"conditions": conditions} if conditions else {}
    begun = _plain({**ingredients, **under})
    marker = folder / _INGREDIENTS
    if (folder / MANIFEST).exists():  # sealed, but the last rename did not happen: `reusable` did not want it as it is
        write_atomic(marker, _canonical({**read_manifest(folder).ingredients, **under}))
        (folder / MANIFEST).unlink()
    if marker.exists():
        found = read_json(marker)
        if found != begun:
            raise _other_work(final, "unfinished work", found, begun)
    else:
        if folder.exists():
            shutil.rmtree(folder)  # killed before it said what it was: holds nothing of value
        folder.mkdir(parents=True)
        write_atomic(marker, _canonical(begun))
    return Build(folder, final, stage, _plain(ingredients), now(), dict(predicted or {}))


def reusable(final: Path, *, stage: str, ingredients: Mapping[str, Any]) -> Manifest | None:
    """The manifest when `final` is finished, whole, and of these ingredients; None when it is not there.

    Work that was sealed but not renamed gets its name now. Raises OtherRunsWork, naming the differing field, or
    DamagedArtifact, naming the file.
    """
    wanted = _plain(ingredients)
    if not final.exists() and not _rename_sealed(final, wanted):
        return None
    manifest = verify(final)
    if manifest.stage != stage or manifest.ingredients != wanted:
        raise _other_work(final, "work", {"stage": manifest.stage, **manifest.ingredients}, {"stage": stage, **wanted})
    return manifest


def _rename_sealed(final: Path, wanted: dict[str, Any]) -> bool:
    """Do the last rename of work that a kill left between manifest and rename; False where there is none, or other work."""
    folder = partial_folder(final)
    if not (folder / MANIFEST).exists() or read_manifest(folder).ingredients != wanted:
        return False
    (folder / _INGREDIENTS).unlink(missing_ok=True)
    os.replace(folder, final)
    sync_folder(final.parent)
    return True


def discard(final: Path) -> None:
    """Remove an artifact and its unfinished work, so that nothing half-removed can be taken for whole."""
    for folder in (final, partial_folder(final)):
        name = f".{folder.name.strip('.')}.discarded-"
        for earlier in folder.parent.glob(f"{name}*"):  # killed while it was removed
            _remove(earlier)
        if folder.exists() or folder.is_symlink():
            doomed = folder.with_name(f"{name}{os.getpid()}")
            os.replace(folder, doomed)
            _remove(doomed)


def _remove(folder: Path) -> None:
    """A folder with all it holds; of a link to one, the link."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an artifact, without looking at its files."""
    path = folder / MANIFEST
    if not path.is_file():
        raise DamagedArtifact(
            "This folder is not a finished artifact: it has no manifest.json.",
            where=str(folder),
            remedy="Run the stage that makes it.",
        )
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DamagedArtifact(
            f"The manifest is damaged: {error.errors()[0]['msg']}.", where=str(path), remedy="Make the artifact again with --from."
        ) from None
    if manifest.schema_version != SCHEMA_VERSION:
        raise DamagedArtifact(
            f"The manifest has schema version {manifest.schema_version}; this draftproof reads {SCHEMA_VERSION}.",
            where=str(path),
            remedy="Use the version of draftproof that made it, or make it again with --from.",
        )
    if manifest.fingerprint != fingerprint(manifest.ingredients):
        raise DamagedArtifact(
            "The manifest's fingerprint is not that of its ingredients.", where=str(path), remedy="Make the artifact again with --from."
        )
    return manifest


def problems(folder: Path, manifest: Manifest, *, deep: bool = False) -> list[str]:
    """What is wrong with the files, one sentence each; empty when the artifact is whole.

    Size and time must be those recorded at sealing; if only the time differs, or with `deep`, the content
    is hashed again.
    """
    found = []
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing.")
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            found.append(f"{name} is a link that leaves the folder.")
            continue
        stat = path.stat()
        if stat.st_size != record.size:
            found.append(f"{name} has {stat.st_size} bytes, its manifest says {record.size}.")
        elif (deep or stat.st_mtime_ns != record.mtime_ns) and hash_file(path) != record.hash:
            found.append(f"{name} does not hash to what its manifest says.")
    found += [f"{name} is missing." for name in manifest.documents if not (folder / name).is_file()]
    known = set(manifest.files) | set(manifest.documents) | {MANIFEST}
    for path in sorted(folder.rglob("*")):
        if (path.is_symlink() or not path.is_dir()) and path.relative_to(folder).as_posix() not in known:
            found.append(f"{path.relative_to(folder).as_posix()} is not in the manifest.")
    return found


def verify(folder: Path, *, deep: bool = False) -> Manifest:
    """The manifest of a whole artifact; raises DamagedArtifact with the first problem."""
    manifest = read_manifest(folder)
    if wrong := problems(folder, manifest, deep=deep):
        raise DamagedArtifact(
            f"The {manifest.stage} artifact is damaged: {wrong[0]}",
            where=str(folder),
            remedy=f"Make it again with --from {manifest.stage}.",
        )
    return manifest


def fingerprint(ingredients: Mapping[str, Any]) -> str:
    """BLAKE3 (hex) of the canonical JSON of the ingredients."""
    return blake3.blake3(_canonical(ingredients)).hexdigest()


def differing_fields(found: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`field: OLD there, NEW wanted` for each leaf that differs."""
    sentences: list[str] = []
    for key in sorted(set(found) | set(wanted)):
        old, new = found.get(key, _ABSENT), wanted.get(key, _ABSENT)
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            sentences += differing_fields(old, new, f"{prefix}{key}.")
        else:
            sentences.append(f"{prefix}{key}: {_short(old)} there, {_short(new)} wanted")
    return sentences


def hash_file(path: Path) -> str:
    """BLAKE3 (hex) of a file's bytes, memory-mapped."""
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    if path.stat().st_size:
        hasher.update_mmap(path)
    return hasher.hexdigest()


def hash_bytes(*parts: bytes | memoryview) -> str:
    """BLAKE3 (hex) of byte strings, each preceded by its length, so that borders count."""
    hasher = blake3.blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def record_file(path: Path) -> FileRecord:
    """Size, time and hash of a file as it is now, flushed to disk first."""
    with path.open("rb") as handle:
        os.fsync(handle.fileno())
    stat = path.stat()
    return FileRecord(size=stat.st_size, mtime_ns=stat.st_mtime_ns, hash=hash_file(path))


def write_atomic(path: Path, content: bytes) -> None:
    """Write a whole file or none of it: temporary name, fsync, rename, fsync of the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Atomic, sorted, readable JSON."""
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n")


def read_json(path: Path) -> Any:
    """JSON of one of our own files; raises DamagedArtifact when it does not parse."""
    try:
        return json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DamagedArtifact(f"The file does not hold JSON: {error}.", where=str(path), remedy="Make it again with --from.") from None


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Journal:
    """Append-only JSON lines, each with its own checksum and flushed before `append` returns.

    A crash can tear only the last line; it is then ignored and overwritten. A damaged line further up
    means that somebody else wrote there, and raises DamagedArtifact.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end: int | None = None

    def read(self) -> list[dict[str, Any]]:
        """The records, in order."""
        return [record for record, _ in self._records()]

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record, durably, over whatever a crash left behind the last whole one."""
        if self._end is None:
            self._end = max((end for _, end in self._records()), default=0)
        end = self._end
        body = json.dumps(record, sort_keys=True).encode()
        line = _line_check(body) + b" " + body + b"\n"
        new = not self.path.exists()
        with self.path.open("w+b" if new else "r+b") as stream:
            stream.truncate(end)
            stream.seek(end)
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
        if new:
            sync_folder(self.path.parent)
        self._end = end + len(line)

    def _records(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Each record with the byte offset at which it ends."""
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        offset, number = 0, 0
        while offset < len(data):
            number += 1
            newline = data.find(b"\n", offset)
            line = data[offset:newline] if newline >= 0 else data[offset:]
            check, _, body = line.partition(b" ")
            whole = newline >= 0 and check == _line_check(body)
            if not whole:
                if newline >= 0 and newline + 1 < len(data):
                    raise DamagedArtifact(
                        "A journal line is damaged.", where=f"{self.path}:{number}", remedy="Make the stage again with --from."
                    )
                return
            offset = newline + 1
            yield json.loads(body), offset


def now() -> str:
    """The time, UTC, ISO 8601, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _line_check(body: bytes) -> bytes:
    return blake3.blake3(body).hexdigest(length=4).encode()


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON would give it back: tuples become lists."""
    plain: dict[str, Any] = json.loads(json.dumps(value))
    return plain


_ABSENT = object()


def _short(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."


def _other_work(final: Path, kind: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> OtherRunsWork:
    fields = differing_fields(found, wanted)
    shown = "; ".join(fields[:3]) + (f"; and {len(fields) - 3} more" if len(fields) > 3 else "")
    return OtherRunsWork(
        f"{final.name}/ holds {kind} of other settings: {shown}.",
        where=str(final),
        remedy=f"Use `draftproof run RECIPE --from {final.name}` to make it again, or --workdir for another run folder.",
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in ("draftproof", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
