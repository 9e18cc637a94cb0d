"""The door through which a stage meets its gate.

    checkpoint = Checkpoint("extract", recipe=..., ...)
    checkpoint("before", None)        # holders of the recipe's units may be stopped, then every check runs
    checkpoint("loading", None)       # what is about to be spent is looked at again, and a watch follows the load
    checkpoint("loaded", evidence)    # the watch ends

Every verdict is written before it is enforced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftproof.artifact import read_json, write_json
from draftproof.errors import DraftproofError, Refused, UsageError
from draftproof.gate.catalog import CHECKS
from draftproof.gate.finding import failed
from draftproof.gate.gate import GateContext, GateReport, enforce, run_gate
from draftproof.machine.apply import Applied, apply_all
from draftproof.machine.reclaim import HostPlan, ReclaimPlan, Selection, load_plan, plan_host, save
from draftproof.machine.watch import LoadTurnedBad, Watch
from draftproof.recipe import Recipe
from draftproof.stage import Point, StagePlan
from draftproof.target.target import Target

_FREED = ("gpu.holders", "gpu.memory")
"""What is well once the holders are stopped."""


def plans_for_here(path: Path) -> list[HostPlan]:
    """The plans of a file that a run may carry out. Raises UsageError for a plan of another host: a run frees the machine
    that it runs on, and a plan that is passed over in silence would be taken for carried out."""
    plans = list(load_plan(path).hosts)
    here = os.uname().nodename
    for plan in plans:
        if plan.host != here:
            raise UsageError(
                f"The plan is for {plan.host}; a run frees only the machine that it runs on, {here}.",
                where=str(path),
                remedy="Carry it out with `draftproof reclaim --apply`, then run without it.",
            )
    return plans


@dataclass
class Freeing:
    """Whether a run may stop what the recipe's `machine.units` hold, and who is told."""

    plans: list[HostPlan] = field(default_factory=list)
    """Plans that somebody has read and given with --apply; each is carried out once."""
    confirm: Callable[[HostPlan], bool] | None = None
    """Shows a plan on a terminal and asks; None where nobody sits there."""
    announce: Callable[[Applied], None] = lambda applied: None


class Checkpoint:
    """Runs the gate of one stage at each point; raises Refused or Undecided."""

    def __init__(
        self,
        stage: str,
        *,
        recipe: Recipe,
        target: Target,
        device: str,
        inputs: Mapping[str, Path],
        out: Path,
        plan: StagePlan | None,
        file: Path,
        announce: Callable[[GateReport], None],
        freeing: Freeing,
    ) -> None:
        self.stage, self.recipe, self.target, self.device = stage, recipe, target, device
        self.inputs, self.out, self.plan = inputs, out, plan
        self.file, self.announce, self.freeing = file, announce, freeing
        self.protects = f"the stage {stage}" if plan is None else plan.protects
        self._points: dict[str, Any] = {shown["point"]: shown for shown in read_json(file)["points"]} if file.is_file() else {}
        self._watch: Watch | None = None

    def __call__(self, point: Point, evidence: Any) -> None:
        """Ask every check of this point; returns when the stage may go on."""
        if (cause := self._stop_watch()) is not None:
            raise self._turned_bad(cause)
        checks = CHECKS.get((self.stage, point), ())
        if not checks:
            return
        context, waiting = self._context(point, evidence), None
        if point == "before" and self.recipe.machine.units:
            context, waiting = self._free(context)
        report = run_gate(context, checks, protects=self.protects)
        self._write(report)
        self.announce(report)
        try:
            enforce(report)
        except Refused as refused:
            if waiting is None:
                raise
            remedy = f"Units of this recipe hold the GPUs. Read {waiting}, then run the same command with --apply {waiting}."
            if any(finding.status == "fail" and finding.waived is None and finding.check not in _FREED for finding in report.findings):
                remedy = f"{refused.remedy} Also: {remedy}"
            raise Refused(refused.what, where=refused.where, remedy=remedy) from None
        if point == "loading" and self.recipe.machine.watch_s is not None:
            self._watch = Watch(context.looks[0], every_s=self.recipe.machine.watch_s, give_up=self._give_up)
            self._watch.start()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around the stage's work: a load that the watch ended, or that died of what the watch saw, is said by its cause."""
        cause: str | None = None
        try:
            try:
                yield
            finally:
                cause = self._stop_watch()
        except LoadTurnedBad as bad:  # from anywhere, also from just before the watch is stopped
            self._stop_watch()
            raise self._turned_bad(str(bad)) from None
        except Exception as error:
            if cause is not None:
                raise self._turned_bad(cause) from error
            raise
        if cause is not None:
            raise self._turned_bad(cause)

    def _stop_watch(self) -> str | None:
        """End the watch, if there is one; returns its cause. It is forgotten only once it has ended, whatever interrupts that."""
        cause = self._watch.stop() if self._watch is not None else None
        self._watch = None
        return cause

    def _free(self, context: GateContext) -> tuple[GateContext, Path | None]:
        """Stop what holds the GPUs for the recipe's units, if somebody said so: then look anew. Else, where the plan waits."""
        look = context.looks[0]
        if look.blind is not None or not look.blockers:  # the gate says why, and writes it down
            return context, None
        plan = plan_host(look, Selection(units=self.recipe.machine.units))
        if plan.empty:
            return context, None
        chosen = self._given(plan) or (plan if self.freeing.confirm is not None and self.freeing.confirm(plan) else None)
        if chosen is None:
            path = self.out.parent / f"reclaim-{self.stage}.json"
            save(ReclaimPlan(hosts=(plan,)), path)
            return context, path
        self._check_within(chosen, plan)
        (freed,) = apply_all(ReclaimPlan(hosts=(chosen,)), allowance_mib=self.recipe.gates.gpu_memory_mib)
        if isinstance(freed, DraftproofError):
            raise freed
        self.freeing.announce(freed)
        return self._context(context.point, context.evidence), None

    def _given(self, plan: HostPlan) -> HostPlan | None:
        """The plan that came with --apply, for this host; each is used once."""
        chosen = next((given for given in self.freeing.plans if given.host == plan.host), None)
        if chosen is not None:
            self.freeing.plans.remove(chosen)
        return chosen

    @staticmethod
    def _check_within(given: HostPlan, units: HostPlan) -> None:
        """A run stops what its units hold and nothing else. Raises Refused for a plan that names more."""
        beyond = {unit.name for unit in given.units} - {unit.name for unit in units.units}
        known = {target.pid for target in units.targets}
        beyond |= {f"pid {target.pid}" for target in given.targets if target.pid not in known and Path(f"/proc/{target.pid}").exists()}
        if beyond:
            raise Refused(
                f"The plan stops more than machine.units hold: {', '.join(sorted(beyond))}.",
                where="--apply",
                remedy="Carry it out with `draftproof reclaim --apply`, or name the unit in the recipe.",
            )

    def _turned_bad(self, cause: str) -> Refused:
        """The refusal for a load that the watch ended, written down."""
        finding = failed("machine.watch", f"The load was ended: {cause}.", "Find out who that is (draftproof check), then run again.")
        report = GateReport(self.stage, "loading", self.protects, [finding])
        self._write(report)
        self.announce(report)
        return Refused(finding.evidence, where=f"{self.stage}, loading", remedy=finding.remedy)

    def _give_up(self, cause: str) -> None:
        """The main thread is stuck in a call that no signal ends, so the process ends. A resume goes on as after a kill."""
        refused = self._turned_bad(cause)
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # a progress bar has hidden the cursor, and cannot show it again
        print(f"refused: {refused}", file=sys.stderr, flush=True)  # the command line's own door is stuck, too
        os._exit(refused.exit_code)

    def _context(self, point: Point, evidence: Any) -> GateContext:
        return GateContext(self.stage, point, self.recipe, self.target, self.inputs, self.out, self.plan, evidence, self.device)

    def _write(self, report: GateReport) -> None:
        found = [asdict(finding) for finding in report.findings]
        self._points[report.point] = {"point": report.point, "verdict": report.verdict, "findings": found}
        write_json(self.file, {"stage": self.stage, "protects": self.protects, "points": list(self._points.values())})
