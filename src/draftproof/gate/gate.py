"""Runs the checks before a stage and gives a verdict.

A check is a function `(context: GateContext) -> Finding`. Its name is the function's, with the first
underscore as a dot: `storage_bytes` is the check `storage.bytes`. Every check runs, also after a failure,
so that one run shows every problem; a check that raises is `unknown`, not `pass`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from draftproof.errors import DraftproofError, Refused, Undecided
from draftproof.gate.finding import Finding, Status, unsure, verdict_of, worst_of

if TYPE_CHECKING:
    from draftproof.machine.look import Look
    from draftproof.recipe import Recipe
    from draftproof.records.rows import RowTable
    from draftproof.stage import Point, StagePlan
    from draftproof.target.target import Target


@dataclass(frozen=True)
class GateContext:
    """What the checks of one gate may look at."""

    stage: str
    point: Point
    recipe: Recipe
    target: Target | None
    inputs: Mapping[str, Path]
    """Verified artifact folders that the stage will read."""
    out: Path
    """Where the stage will write."""
    plan: StagePlan | None
    """What the stage is expected to take."""
    evidence: Any = None
    """What the stage shows at this point; at `loaded` a CanaryEvidence."""
    device: str = "cpu"
    """`cpu` or `cuda`: what the stage will compute on."""

    @cached_property
    def rows(self) -> RowTable | None:
        """The rows of `prepare`, read once for all checks; None where the stage reads none."""
        if "prepare" not in self.inputs:
            return None
        from draftproof.records.rows import read_rows

        return read_rows(self.inputs["prepare"])

    @cached_property
    def looks(self) -> list[Look]:
        """This machine and the recipe's other hosts, looked at once for all checks."""
        from draftproof.machine.look import look_at, needs_of
        from draftproof.machine.remote import Reach

        needs = needs_of(self.recipe, self.device, self.plan)
        return look_at([Reach(), *map(Reach, self.recipe.machine.hosts)], needs)


Check = Callable[[GateContext], Finding]
Subject = TypeVar("Subject")


@dataclass(frozen=True)
class GateReport:
    """All findings of one gate at one point."""

    stage: str
    point: Point
    protects: str
    """What would be lost without it, for people."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def verdict(self) -> Status:
        """The worst finding that is not waived."""
        return verdict_of(self.findings)


def check_name(check: Callable[..., Finding]) -> str:
    """`storage_bytes` -> `storage.bytes`."""
    return check.__name__.replace("_", ".", 1)


def answer(check: Callable[[Subject], Finding], subject: Subject) -> Finding:
    """The finding of one check, whatever becomes of it: one that raises is `fail` or `unknown`, never `pass`."""
    started = time.monotonic()
    try:
        finding = check(subject)
    except DraftproofError as error:
        finding = Finding(check_name(check), "fail", f"{error.what}{f' [{error.where}]' if error.where else ''}", error.remedy)
    except Exception as error:  # noqa: BLE001  a check of ours that breaks must not let the stage pass
        finding = unsure(
            check_name(check), f"The check itself broke: {type(error).__name__}: {error}", "Report this as a fault of draftproof."
        )
    return replace(finding, seconds=round(time.monotonic() - started, 4))


def run_gate(context: GateContext, checks: Iterable[Check], *, protects: str) -> GateReport:
    """Run every check; apply the recipe's waivers to those that did not pass."""
    findings = [waived(answer(check, context), context.recipe.gates.waive) for check in checks]
    return GateReport(context.stage, context.point, protects, findings)


def waived(finding: Finding, waive: Mapping[str, str]) -> Finding:
    """The finding, overruled if it did not pass and the recipe names a reason for its check."""
    overruled = finding.status in ("fail", "unknown") and finding.check in waive
    return replace(finding, waived=waive[finding.check]) if overruled else finding


def enforce(report: GateReport) -> None:
    """Raise Refused or Undecided unless the verdict lets the stage go on."""
    verdict = report.verdict
    if verdict not in ("fail", "unknown"):
        return
    worst = worst_of(report.findings)
    more = f" ({len(worst) - 1} more in the gate's report)" if len(worst) > 1 else ""
    error = Refused if verdict == "fail" else Undecided
    sentence = "said no" if verdict == "fail" else "could not tell"
    raise error(
        f"The gate before {report.stage} {sentence}: {worst[0].check}: {worst[0].evidence}{more}",
        where=f"{report.stage}, {report.point}",
        remedy=f"{worst[0].remedy} To overrule it, with a reason: gates: {{waive: {{{worst[0].check}: REASON}}}}.".strip(),
    )
