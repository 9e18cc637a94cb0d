"""Run folders for the tests of the report."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from example_run import build_run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run(until="train", unfinished=None, findings={...}, result={...})`: see `example_run.build_run`."""
    return partial(build_run, tmp_path)
