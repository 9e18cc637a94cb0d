"""Progress of long work: a bar with rate and time left on a terminal, a line every 30 s in a log.

with progress.meter("generate", total=tokens, unit="tokens") as meter:
    meter.advance(512)
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

log = logging.getLogger("draftproof")

LOG_EVERY_S = 30.0


class Meter:
    """Counts units done; `note` shows a short text (a loss, a rate) beside them."""

    def __init__(self, label: str, total: float, unit: str, rich: RichProgress | None) -> None:
        self.label, self.total, self.unit, self.done, self.text = label, total, unit, 0.0, ""
        self.skipped = 0.0
        self._started = self._logged = time.monotonic()
        self._rich = rich
        self._task = rich.add_task(label, total=total, note="", rate="") if rich else None

    def resume(self, done: float) -> None:
        """Start from work done in an earlier session, which does not count for the rate."""
        self.skipped = done
        self.advance(done)

    def advance(self, amount: float, note: str = "") -> None:
        """Add `amount` units."""
        self.done += amount
        self.text = note or self.text
        if self._rich is not None and self._task is not None:
            self._rich.update(self._task, completed=self.done, note=self.text, rate=f"{self.rate():,.0f} {self.unit}/s")
        elif time.monotonic() - self._logged >= LOG_EVERY_S:
            self._logged = time.monotonic()
            rate = self.rate()
            left = f", {(self.total - self.done) / rate:,.0f} s left" if rate else ""
            log.info(
                "%s: %s of %s %s, %s/s%s  %s",
                self.label,
                *(f"{n:,.0f}" for n in (self.done, self.total)),
                self.unit,
                f"{rate:,.3g}",
                left,
                self.text,
            )

    def rate(self) -> float:
        """Units per second of this session."""
        return (self.done - self.skipped) / max(time.monotonic() - self._started, 1e-9)


class Progress:
    """Where the work of a command is shown; silent with `quiet`."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.quiet = quiet
        self._console = console or Console(stderr=True)

    @contextmanager
    def meter(self, label: str, total: float, unit: str) -> Iterator[Meter]:
        """A meter for one piece of work."""
        if self.quiet or not (self._console.is_terminal and sys.stderr.isatty()):
            yield Meter(label, total, unit, None)
            return
        columns = (
            TextColumn("{task.description:>10}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with RichProgress(*columns, console=self._console, transient=True) as rich:
            yield Meter(label, total, unit, rich)
