"""Is there room for what the stage will write? Asked of the filesystem, against the plan."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from draftproof.artifact import partial_folder
from draftproof.gate.finding import Finding, failed, passed, unsure, warned
from draftproof.gate.gate import GateContext

MARGIN = 1.05
"""Beyond the plan: filesystem blocks, journals, headers."""
SPARE_INODES = 16


def storage_writable(context: GateContext) -> Finding:
    """A file can be made, flushed and removed where the stage will write. Tried, since permissions and read-only
    mounts say little to root."""
    folder = _existing(context.out)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".draftproof-probe-") as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return failed(
            "storage.writable", f"{folder} cannot be written: {error.strerror}.", "Give another run.dir, or mend the folder's rights."
        )
    return passed("storage.writable", f"{folder} takes files.")


def storage_bytes(context: GateContext) -> Finding:
    """Free bytes for this user against the bytes still to be written."""
    needed = _bytes_left(context)
    if needed is None:
        return unsure("storage.bytes", "There is no plan to compare the free space with.", "Report this as a fault of draftproof.")
    folder = _existing(context.out)
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize
    evidence = f"{_gb(free)} free at {folder}, {_gb(needed)} still to be written."
    if free < needed * MARGIN:
        return failed("storage.bytes", evidence, "Free some space, give another run.dir, or store less: extract.codec=fp8.")
    if free < 1.2 * needed:
        return warned("storage.bytes", evidence, "Keep others from filling this filesystem.")
    return passed("storage.bytes", evidence)


def storage_inodes(context: GateContext) -> Finding:
    """Free inodes against the files of the plan; a filesystem that makes them as needed reports none at all."""
    if context.plan is None:
        return unsure("storage.inodes", "There is no plan to compare the free inodes with.", "Report this as a fault of draftproof.")
    folder = _existing(context.out)
    stats = os.statvfs(folder)
    needed = context.plan.files + SPARE_INODES
    if stats.f_files == 0:
        return passed("storage.inodes", f"The filesystem at {folder} does not count inodes.")
    evidence = f"{stats.f_favail:,} inodes free at {folder}, {needed:,} needed."
    if stats.f_favail < needed:
        return failed("storage.inodes", evidence, "Remove small files there, or give another run.dir.")
    return passed("storage.inodes", evidence)


def _bytes_left(context: GateContext) -> int | None:
    """What a stage at work says itself; before that, the plan without what an earlier session left in place."""
    if isinstance(context.evidence, dict) and "bytes_left" in context.evidence:
        return int(context.evidence["bytes_left"])
    if context.plan is None:
        return None
    return max(0, context.plan.bytes - _size(partial_folder(context.out)))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def _existing(path: Path) -> Path:
    """The nearest folder above that exists: the stage's own does not, before its first run."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def _gb(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
