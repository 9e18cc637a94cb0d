"""A run folder while somebody works in it: one at a time, swept of what a kill left, and honest about a full disk."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftproof.artifact import MANIFEST, partial_folder
from draftproof.errors import DraftproofError, Stopped, UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_IN_WORDS = re.compile(rf"No space left|quota exceeded|os error ({errno.ENOSPC}|{errno.EDQUOT})\b", re.IGNORECASE)
"""As libraries say it that lose the number."""


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """One walk at a time in a run folder; the kernel frees the lock of a killed one.

    Raises UsageError, with the other's process id, and when the folder cannot be made.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        stream = (run_dir / ".lock").open("a+")
    except OSError as error:
        if error.errno in _FULL:
            raise
        raise UsageError(
            f"The run folder cannot be used: {error.strerror}.",
            where=str(error.filename),
            remedy="Give another --workdir, or mend this one.",
        ) from None
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            raise UsageError(
                f"Another draftproof works in this run folder (process {stream.read().strip() or 'unknown'}).",
                where=str(run_dir),
                remedy="Wait for it, or give another --workdir.",
            ) from None
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        yield


@contextmanager
def stops_on_full_disk(run_dir: Path) -> Iterator[None]:
    """A full disk or quota, wherever it is met, ends as Stopped: the journals go on from the last whole piece."""
    try:
        yield
    except DraftproofError:
        raise
    except Exception as error:
        if getattr(error, "errno", None) in _FULL or _FULL_IN_WORDS.search(str(error)):
            raise Stopped(
                "The disk is full.",
                where=str(getattr(error, "filename", None) or run_dir),
                remedy="Free some space and run the same command again.",
            ) from error
        raise


def sweep(run_dir: Path) -> None:
    """Remove what a kill can leave beside the work: temporary files, probes of the gate, folders on their way out.

    Only call it under the lock: another's temporary files look the same.
    """
    for doomed in run_dir.glob(".*.discarded-*"):
        shutil.rmtree(doomed)
    folders = (
        run_dir,
        run_dir / "gates",
        *run_dir.glob("export/*"),
        *(p for top in run_dir.glob(".*.partial") for p in (top, *top.rglob("*"))),
    )
    for folder in folders:
        if folder.is_dir():
            for left_over in (*folder.glob(".*.tmp"), *folder.glob(".draftproof-probe-*")):
                left_over.unlink(missing_ok=True)


def drop_worthless(final: Path, progress_file: str | None) -> None:
    """Remove unfinished work that nothing can go on from, so that other settings or mended data need no --from.

    `progress_file`: what a stage goes on from (a journal, a checkpoint); None where it starts over anyway.
    """
    folder = partial_folder(final)
    if not folder.is_dir() or (folder / MANIFEST).exists():
        return
    progress = folder / progress_file if progress_file is not None else None
    if progress is None or not progress.is_file() or progress.stat().st_size == 0:
        shutil.rmtree(folder)
