"""Storage checks against real small filesystems."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.helpers.extraction import gate_context

from draftproof.artifact import partial_folder
from draftproof.gate.gate import GateContext
from draftproof.gate.storage import storage_bytes, storage_inodes, storage_writable
from draftproof.stage import StagePlan


def _context(out: Path, size: int = 0, files: int = 0) -> GateContext:
    return replace(gate_context(None, None, out=out), plan=StagePlan(size, files, None, None, ""))


def _mount(folder: Path, options: str) -> bool:
    folder.mkdir(exist_ok=True)
    return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False).returncode == 0


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB and 40 inodes."""
    folder = tmp_path / "small"
    if not _mount(folder, "size=1m,nr_inodes=40"):
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_bytes_free_against_the_plan(small: Path) -> None:
    out = small / "run" / "extract"  # not there yet: its filesystem is asked all the same
    assert storage_bytes(_context(out, 500_000)).status == "pass"
    assert storage_bytes(_context(out, 950_000)).status == "warn"
    refused = storage_bytes(_context(out, 1_040_000))
    assert refused.status == "fail"
    assert refused.evidence == f"1.0 MB free at {small}, 1.0 MB still to be written."
    assert "fp8" in refused.remedy


def test_what_an_interrupted_run_left_counts_as_written(small: Path) -> None:
    out = small / "extract"
    partial = partial_folder(out)
    partial.mkdir()
    (partial / "shard").write_bytes(bytes(600_000))
    assert storage_bytes(_context(out, 1_000_000)).status == "warn"  # 0.4 MB to go, 0.45 MB free
    assert storage_bytes(_context(out, 1_100_000)).status == "fail"


def test_a_stage_at_work_says_what_is_left(small: Path) -> None:
    context = _context(small / "extract", 5_000_000)
    assert storage_bytes(replace(context, evidence={"bytes_left": 100_000})).status == "pass"
    assert storage_bytes(replace(context, evidence={"bytes_left": 2_000_000})).status == "fail"


def test_inodes_free_against_the_plan(small: Path) -> None:
    assert storage_inodes(_context(small, files=20)).status == "pass"
    refused = storage_inodes(_context(small, files=30))
    assert refused.status == "fail"
    assert "46 needed" in refused.evidence


def test_a_filesystem_without_inode_counts_passes(tmp_path: Path) -> None:
    folder = tmp_path / "uncounted"
    if not _mount(folder, "size=1m,nr_inodes=0"):
        pytest.skip("mounting a tmpfs needs root")
    try:
        assert os.statvfs(folder).f_files == 0
        assert storage_inodes(_context(folder, files=10)).status == "pass"
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_filesystem_is_not_writable(small: Path) -> None:
    assert storage_writable(_context(small / "run" / "extract")).status == "pass"
    assert not list(small.iterdir())  # the probe is gone
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    refused = storage_writable(_context(small / "run" / "extract"))
    assert refused.status == "fail"
    assert f"{small} cannot be written: Read-only file system." in refused.evidence


def test_a_full_filesystem_is_not_writable(small: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        (small / "ballast").write_bytes(bytes(2_000_000))
    assert "No space left" in storage_writable(_context(small)).evidence


def test_without_a_plan_it_cannot_be_told(tmp_path: Path) -> None:
    context = replace(_context(tmp_path), plan=None)
    assert storage_bytes(context).status == "unknown"
    assert storage_inodes(context).status == "unknown"
