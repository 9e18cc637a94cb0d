"""Users' cases of training need the tiny trained run, too."""

from __future__ import annotations

from tests.train.conftest import tiny_run

__all__ = ["tiny_run"]
