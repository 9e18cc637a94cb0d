"""A full disk, however a library says it, ends as Stopped; anything else stays what it is."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from safetensors import SafetensorError

from draftproof.errors import Stopped
from draftproof.runfolder import stops_on_full_disk


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        SafetensorError("Error while serializing: I/O error: Disk quota exceeded (os error 122)"),
    ],
    ids=lambda error: str(error),
)
def test_a_full_disk_is_a_stop(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(Stopped, match="The disk is full"), stops_on_full_disk(tmp_path):
        raise error


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), ValueError("os error 280"), KeyboardInterrupt()], ids=repr)
def test_other_errors_stay_what_they_are(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, stops_on_full_disk(tmp_path):
        raise error
    assert caught.value is error
