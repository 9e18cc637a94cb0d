"""The quiet checkpoint: are these machines fit, and their GPUs free?

    checked = check([Reach(), Reach("node7")], Needs())
    checked.verdict, checked.findings

This is what `draftproof check` says; the gates of a run ask the same checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from draftproof.errors import DraftproofError, Refused, Undecided, UsageError
from draftproof.gate.finding import Finding, Status, failed, passed, unsure, verdict_of, warned, worst_of
from draftproof.gate.machine import judge
from draftproof.machine.holders import Holder
from draftproof.machine.look import TRAVEL_S, Look, Needs, look_at, needs_of
from draftproof.machine.remote import Reach
from draftproof.machine.snapshot import MIB

if TYPE_CHECKING:
    from draftproof.recipe import LoadedRecipe

COPIES_S = 120.0
"""For all pairs of eight GPUs: a healthy pair takes well under a second."""


class _Shown(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class ShownHolder(_Shown):
    """A process, or memory without one, on a GPU."""

    pid: int | None
    user: str | None
    command: str | None
    kind: str
    """live, forked, other_user, container, mps, ours, self, system, fd_only, dead, driver."""
    mib: int | None
    """Device memory in MiB; null: not told."""
    blocking: bool
    started: float | None
    """Unix seconds."""
    unit: str | None
    cgroup: str | None
    why: str


class ShownGpu(_Shown):
    """A GPU and who holds it."""

    index: int
    name: str | None
    total_mib: int | None
    used_mib: int | None
    """Without what the driver keeps for itself, where the driver tells that apart."""
    free_mib: int | None
    holders: list[ShownHolder]


class ShownHost(_Shown):
    """One machine."""

    host: str
    reached: bool
    seconds: float
    driver: str | None
    gpus: list[ShownGpu]
    unseen: list[str]
    """What could not be seen, and why."""


class ShownFinding(_Shown):
    """The answer of one check."""

    check: str
    status: Status
    host: str | None
    evidence: str
    remedy: str


class CheckDocument(_Shown):
    """`draftproof check --json`, beside the keys of every command."""

    verdict: Status
    protects: str
    findings: list[ShownFinding]
    hosts: list[ShownHost]


def check(reaches: Sequence[Reach], needs: Needs, *, protects: str = "", deep: bool = False) -> Checked:
    """Look at all machines at once and judge each."""
    looks = look_at(reaches, needs)
    findings = [finding for look in looks for finding in judge(look)]
    if deep:
        findings += [replace(_copies(look), host=look.reach.name) for look in looks if look.snapshot is not None]
    return Checked(looks, findings, protects or _protects(looks))


class Checked:
    """Looks and findings."""

    def __init__(self, looks: Sequence[Look], findings: Sequence[Finding], protects: str) -> None:
        self.looks, self.findings, self.protects = looks, list(findings), protects

    @property
    def verdict(self) -> Status:
        """The worst finding that is not waived."""
        return verdict_of(self.findings)

    def document(self) -> CheckDocument:
        """For `--json`."""
        return CheckDocument(
            verdict=self.verdict,
            protects=self.protects,
            findings=[_shown_finding(finding) for finding in self.findings],
            hosts=[_shown_host(look) for look in self.looks],
        )

    def enforce(self) -> None:
        """Raise Refused or Undecided unless the verdict is pass or warn."""
        if self.verdict not in ("fail", "unknown"):
            return
        worst = worst_of(self.findings)
        more = f" ({len(worst) - 1} more)" if len(worst) > 1 else ""
        error = Refused if self.verdict == "fail" else Undecided
        raise error(f"{worst[0].check}: {worst[0].evidence}{more}", where=worst[0].host, remedy=worst[0].remedy)


def check_recipe(loaded: LoadedRecipe, stage: str, reaches: Sequence[Reach], needs: Needs | None = None, *, deep: bool = False) -> Checked:
    """The same for what a stage of a recipe needs, on `reaches` and the recipe's other hosts, with the checks of its target
    and run folder, and its waivers. `needs.disks`, `.ports` and `.gpus` (unless None) are kept, and the larger allowance
    counts. Raises UsageError for a stage that the recipe does not have.

    Torch is not imported: where a driver is there, the stage is taken to run on the GPU, unless the recipe says `cpu`.
    """
    from draftproof.gate.catalog import UNLOADED  # numpy and more, for which a look at the machine alone should not wait
    from draftproof.gate.gate import GateContext, run_gate, waived
    from draftproof.plan import make_plan, measure_flops
    from draftproof.target.target import open_target

    recipe, given = loaded.recipe, needs or Needs()
    target = open_target(recipe.target)
    here = any(reach.host is None for reach in reaches)
    device = "cpu" if recipe.run.device == "cpu" or (here and not Path("/dev/nvidiactl").exists()) else "cuda"
    stages = make_plan(recipe, target, Path(recipe.run.dir), flops=measure_flops("cpu") if device == "cpu" else None, device=device).stages
    if stage not in stages:
        raise UsageError(f"This recipe has no stage {stage!r}.", where="--stage", remedy=f"Its stages: {', '.join(stages)}.")
    plan = stages[stage]
    needed = needs_of(recipe, device, plan)
    needed = replace(
        needed,
        gpus=needed.gpus if given.gpus is None else given.gpus,
        allowance_mib=max(needed.allowance_mib, given.allowance_mib),
        disks=given.disks,
        ports=given.ports,
    )
    asked = {reach.host for reach in reaches}
    others = [replace(reaches[0], host=host) for host in dict.fromkeys(recipe.machine.hosts) if host not in asked]
    checked = check([*reaches, *others], needed, protects=f"{stage}: {plan.protects}", deep=deep)
    context = GateContext(stage, "before", recipe, target, {}, Path(recipe.run.dir) / stage, plan, device=device)
    gate = run_gate(context, UNLOADED, protects=plan.protects)
    findings = [waived(finding, recipe.gates.waive) for finding in checked.findings]
    return Checked(checked.looks, [*findings, *gate.findings], checked.protects)


def parse_gpus(text: str | None) -> tuple[int, ...] | None:
    """`0-3,6` -> (0, 1, 2, 3, 6); None and `all` stand for every GPU. Raises UsageError."""
    if text is None or text == "all":
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and not int(first) <= int(last) < 1024):
            raise UsageError(f"{text!r} names no GPUs.", where="--gpus", remedy="Write numbers and ranges, as in 0-3,6.")
        chosen |= set(range(int(first), int(last or first) + 1))
    return tuple(sorted(chosen))


def _copies(look: Look) -> Finding:
    """`--deep`: a copy between each pair of GPUs, written, read back and compared."""
    if not look.gpus:
        return passed("gpu.copies", "There is no GPU to copy between.")
    try:
        answer = look.reach.ask("copies", {"gpus": [gpu.index for gpu in look.gpus], "deadline_s": COPIES_S}, COPIES_S + TRAVEL_S)
        document = CopiesDocument.model_validate_json(answer.document)
    except (DraftproofError, ValueError) as error:
        return unsure("gpu.copies", f"The copies could not be made: {error}", "Look at the driver; dmesg may say more.")
    if document.why is not None or not document.pairs:
        return unsure("gpu.copies", document.why or "No copy was made.", "Look at the driver; dmesg may say more.")
    wrong = [pair for pair in document.pairs if pair.status not in ("ok", "no_peer_access")]
    slowest = min((pair.gb_per_s for pair in document.pairs if pair.gb_per_s is not None), default=0.0)
    if wrong:
        told = "; ".join(f"{pair.start} to {pair.end} {pair.status}: {pair.detail}" for pair in wrong[:3])
        more = f" (+ {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        return failed(
            "gpu.copies", f"{len(wrong)} of {len(document.pairs)} pairs: {told}{more}.", "Look at IOMMU and ACS settings, risers and dmesg."
        )
    direct = sum(pair.status == "ok" for pair in document.pairs)
    evidence = f"{len(document.pairs)} pairs copied and compared, {direct} directly, {slowest:,.1f} GB/s at least."
    if direct < len(document.pairs):
        return warned("gpu.copies", evidence, "The others go by way of host memory.")
    return passed("gpu.copies", evidence)


class _Pair(BaseModel):
    model_config = ConfigDict(frozen=True)
    start: int = Field(alias="from")
    end: int = Field(alias="to")
    status: str
    detail: str
    gb_per_s: float | None


class CopiesDocument(BaseModel):
    """The document of `machine/copies.py`."""

    model_config = ConfigDict(frozen=True)
    pairs: list[_Pair]
    why: str | None = None


def _shown_finding(finding: Finding) -> ShownFinding:
    return ShownFinding(check=finding.check, status=finding.status, host=finding.host, evidence=finding.said, remedy=finding.remedy)


def _shown_host(look: Look) -> ShownHost:
    snapshot = look.snapshot
    if snapshot is None:
        return ShownHost(host=look.reach.name, reached=False, seconds=look.seconds, driver=None, gpus=[], unseen=[])
    gpus = [
        ShownGpu(
            index=gpu.index,
            name=gpu.name,
            total_mib=None if gpu.memory is None else gpu.memory.total // MIB,
            used_mib=None if gpu.memory is None else gpu.memory.used_mib,
            free_mib=None if gpu.memory is None else gpu.memory.free_mib,
            holders=[_shown_holder(holder) for holder in look.holders if holder.gpu == gpu.index],
        )
        for gpu in look.gpus
    ]
    unseen = [f"{one.what}: {one.why}" for one in snapshot.unseen]
    return ShownHost(
        host=snapshot.host, reached=True, seconds=round(look.seconds, 3), driver=snapshot.nvml.driver, gpus=gpus, unseen=unseen
    )


def _shown_holder(holder: Holder) -> ShownHolder:
    process = holder.process
    return ShownHolder(
        pid=holder.pid,
        user=process.user if process else None,
        command=(process.command or process.comm) if process else None,
        kind=holder.kind,
        mib=None if holder.bytes is None else -(-holder.bytes // MIB),
        blocking=holder.blocking,
        started=process.started if process else None,
        unit=process.unit if process else None,
        cgroup=process.cgroup if process else None,
        why=holder.why,
    )


def _protects(looks: Sequence[Look]) -> str:
    gpus = sum(len(look.gpus) for look in looks)
    return f"{gpus} GPUs on {len(looks)} hosts" if len(looks) > 1 else f"{gpus} GPUs" if gpus else "work on this CPU"
