"""What one check found: a status, the evidence, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "warn", "fail", "unknown"]
"""`unknown` is not `pass`: it stops the line unless the recipe waives it by name."""


SEVERITY: dict[Status, int] = {"pass": 0, "warn": 1, "unknown": 2, "fail": 3}
"""A verdict is the worst of its findings."""


@dataclass(frozen=True)
class Finding:
    """The answer of one check."""

    check: str
    """`subject.what`, for example `storage.bytes`."""
    status: Status
    evidence: str
    """What was seen, with numbers and places."""
    remedy: str = ""
    """The next step; empty when there is nothing to do."""
    seconds: float = 0.0
    """How long the check took."""
    waived: str | None = None
    """The recipe's reason for overruling this finding."""
    host: str | None = None
    """Which machine it is about, where that matters."""

    @property
    def said(self) -> str:
        """The evidence, and why it was overruled."""
        return self.evidence if self.waived is None else f"{self.evidence} (waived: {self.waived})"


def verdict_of(findings: Iterable[Finding]) -> Status:
    """The worst finding that is not waived."""
    return max((finding.status for finding in findings if finding.waived is None), key=SEVERITY.__getitem__, default="pass")


def worst_of(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that make the verdict."""
    findings = list(findings)
    return [finding for finding in findings if finding.status == verdict_of(findings) and finding.waived is None]


def passed(check: str, evidence: str) -> Finding:
    """It is as it should be."""
    return Finding(check, "pass", evidence)


def warned(check: str, evidence: str, remedy: str) -> Finding:
    """It may go on, but somebody should look."""
    return Finding(check, "warn", evidence, remedy)


def failed(check: str, evidence: str, remedy: str) -> Finding:
    """It must not go on."""
    return Finding(check, "fail", evidence, remedy)


def unsure(check: str, evidence: str, remedy: str) -> Finding:
    """It could not be told."""
    return Finding(check, "unknown", evidence, remedy)
