"""Every way a command can end badly, each with a sentence, a place and a next step.

The exit codes are a promise to scripts (see `docs/reference/exit-codes.md`):
0 done, 1 failed, 2 wrong usage or recipe, 3 a gate said no, 4 a gate could not tell,
5 stopped and resumable, 130 interrupted and resumable.
"""

from __future__ import annotations

from typing import ClassVar


class DraftproofError(Exception):
    """Something failed, and we know what, where, and what to do about it.

    `what` is one clear sentence; `where` a file, line, row or key; `remedy` the next step.
    """

    exit_code: ClassVar[int] = 1
    status: ClassVar[str] = "failed"

    def __init__(self, what: str, *, remedy: str, where: str | None = None) -> None:
        self.what, self.where, self.remedy = what, where, remedy
        place = f" [{where}]" if where else ""
        super().__init__(f"{what}{place} {remedy}")


class UsageError(DraftproofError):
    """The command line or the recipe asks for something that cannot be meant."""

    exit_code = 2
    status = "usage"


class DataError(DraftproofError):
    """An input file does not hold what it should; names file, line and byte."""


class DamagedArtifact(DraftproofError):
    """An artifact's files are not what its manifest says."""


class OtherRunsWork(UsageError):
    """A folder holds the result of other settings or other inputs; nothing was touched."""


class Refused(DraftproofError):
    """A gate said no."""

    exit_code = 3
    status = "refused"


class Undecided(DraftproofError):
    """A gate could not tell, and nobody waived it."""

    exit_code = 4
    status = "unknown"


class Stopped(DraftproofError):
    """The work stopped at a clean border (full disk, SIGTERM); running again goes on from there."""

    exit_code = 5
    status = "stopped"


def printable(text: str) -> str:
    """Fit for a terminal: names of processes, users and hosts are chosen by others, escape sequences included."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
