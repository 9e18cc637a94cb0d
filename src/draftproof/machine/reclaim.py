"""A plan to get device memory back: whom to stop on one host, how, and why. Nothing is touched here.

    plan = plan_host(look, Selection(gpus=(3,)))
    save(ReclaimPlan(hosts=(plan,)), path)           # shown, and read again by `draftproof reclaim --apply PATH`

A unit or container is stopped before a process is; a process becomes a target by what it holds and by the selection,
never by its name or its parent alone; and only one of the same user does, unless its unit was named or `any_user` says
otherwise. `apply.py` carries a plan out.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftproof.artifact import write_json
from draftproof.errors import Undecided, UsageError
from draftproof.machine.claims import is_system
from draftproof.machine.holders import Holder
from draftproof.machine.look import QUICK, Look, Needs, look_at
from draftproof.machine.records import state_folder
from draftproof.machine.remote import Reach
from draftproof.machine.snapshot import MIB, Process, Snapshot
from draftproof.machine.stop import never_stopped

GRACE_S = 20.0
"""Between TERM and KILL. A busy engine takes up to 13 s to end by itself."""
MOST_BYTES = 64_000_000
"""Of a plan's file. One target takes about 1 kB."""
NEVER = ("self", "system", "fd_only")
"""Kinds that are not in the way: neither targets nor worth a word."""

Text = Annotated[str, Field(max_length=8192)]
Number = Annotated[int, Field(ge=0, lt=2**63)]


class Part(BaseModel):
    """A part of a plan: immutable, strict, closed to unknown keys; nothing in a file is believed before that."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class PlannedUnit(Part):
    """A service or container that is stopped as a whole."""

    name: Text
    scope: Literal["system", "user", "docker", "podman"]
    cgroup: Text | None
    why: Text


class Target(Part):
    """A process that is stopped."""

    pid: Number
    start_ticks: Number
    """With the pid, it names the process for good."""
    uid: Number
    user: Text
    command: Text
    cgroup: Text | None
    session: Number
    unit: Text | None
    """The planned unit that it ends with; it is signalled only if that is stopped and it still lives."""
    mib: dict[str, int | None]
    """Device memory by GPU; None: not told. Empty for members of a selection that hold none."""
    kind: Text
    why: Text


class Left(Part):
    """A holder that is not stopped, and who could."""

    gpu: int
    pid: int | None
    kind: Text
    why: Text
    remedy: Text


class HostPlan(Part):
    """The plan of one host. Its hash covers everything else in it."""

    version: Literal[1] = 1
    host: Text
    address: Text | None
    """As ssh knows it; None: this machine."""
    boot_id: Text
    pid_namespace: int | None
    made: Text
    uid: Number
    any_user: bool
    gpus: tuple[Number, ...]
    deadline_s: float = Field(ge=0, le=3600)
    """Seconds between TERM and KILL."""
    units: tuple[PlannedUnit, ...]
    cgroups: tuple[Text, ...]
    """Control groups that hold targets alone and may be killed whole."""
    targets: tuple[Target, ...]
    left: tuple[Left, ...]
    hash: Text = ""

    def sealed(self) -> HostPlan:
        """The same plan with its hash."""
        return self.model_copy(update={"hash": self.digest()})

    def digest(self) -> str:
        """SHA-256 of the canonical JSON of everything but the hash."""
        body = self.model_dump(mode="json", exclude={"hash"})
        return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()).hexdigest()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to stop."""
        return not self.targets and not self.units


class ReclaimPlan(Part):
    """What `--apply` takes: a plan for each host."""

    hosts: tuple[HostPlan, ...]


@dataclass(frozen=True)
class Selection:
    """Which holders somebody wants stopped. Without units, cgroups, sessions and trees: all on these GPUs."""

    gpus: tuple[int, ...] | None = None
    """None: all."""
    units: tuple[str, ...] = ()
    """`vllm.service`, `user:vllm.service`, `docker:ID`, `podman:ID`."""
    cgroups: tuple[str, ...] = ()
    sessions: tuple[int, ...] = ()
    trees: tuple[int, ...] = ()
    """Pids: each with all that descends from it."""
    any_user: bool = False
    """Also other users' processes (for root)."""
    grace_s: float = GRACE_S

    @property
    def narrow(self) -> bool:
        """Whether it names groups of processes."""
        return bool(self.units or self.cgroups or self.sessions or self.trees)


def plan_host(look: Look, selection: Selection) -> HostPlan:
    """Whom to stop on this host, and whom to leave, from one look. Raises the look's error where there was none."""
    if look.snapshot is None:
        assert look.error is not None
        raise look.error
    if look.blind is not None:
        raise Undecided(f"Who holds the GPUs cannot be told: {look.blind}.", where=look.reach.name, remedy="See `draftproof check`.")
    snapshot = look.snapshot
    protected = {1, snapshot.viewer.pid, *snapshot.viewer.ancestors}
    _check_selection(selection, protected)
    selected = _selected(snapshot, selection)
    units: dict[tuple[str, str, str | None], PlannedUnit] = {}
    targets: dict[int, Target] = {}
    left: list[Left] = []
    holders = [holder for holder in look.holders if holder.kind not in NEVER or holder.blocking]
    for holder in holders:
        process = holder.process
        refusal = _why_not(holder, snapshot, selection, protected, selected)
        if process is None or refusal is not None:
            why, remedy = refusal or (holder.why, _remedy(holder, snapshot))
            left.append(Left(gpu=holder.gpu, pid=holder.pid, kind=holder.kind, why=why, remedy=remedy))
            continue
        unit = _unit_of(process, snapshot, selection, protected)
        if unit is not None:
            unit = units.setdefault((unit.scope, unit.name, unit.cgroup), unit)
        for member, around in _group(process, snapshot, selected, unit, any_user=selection.any_user):
            if member.pid in protected or never_stopped(member.comm, member.uid) or (member.pid != process.pid and is_system(member)):
                continue
            if member.pid not in targets or (around is not None and targets[member.pid].unit is None):
                held = [other for other in holders if other.pid == member.pid]
                targets[member.pid] = _target(member, held, process, around)
    cgroups = _whole_cgroups(targets, snapshot, selection)
    return HostPlan(
        host=snapshot.host,
        address=look.reach.host,
        boot_id=snapshot.boot_id,
        pid_namespace=snapshot.pid_namespace,
        made=_moment(snapshot.time),
        uid=snapshot.viewer.uid,
        any_user=selection.any_user,
        gpus=tuple(gpu.index for gpu in look.gpus),
        deadline_s=float(selection.grace_s),
        units=tuple(units.values()),
        cgroups=cgroups,
        targets=tuple(targets.values()),
        left=tuple(left),
    ).sealed()


def draw(reaches: Sequence[Reach], selection: Selection, *, tell: Callable[[str], None] = lambda sentence: None) -> ReclaimPlan:
    """A plan for each host. Raises the first host's error that could not be looked at; `tell` gets the reason where one
    was seen in part, for then the plan may name too few."""
    looks = look_at(reaches, Needs(gpus=selection.gpus), parts=QUICK)
    for look in looks:
        if look.partial is not None:
            tell(look.partial)
    return ReclaimPlan(hosts=tuple(plan_host(look, selection) for look in looks))


def default_path(plan: ReclaimPlan) -> Path:
    """Where a plan is kept when nobody says where: this user's state folder, by hash."""
    name = hashlib.sha256("".join(host.hash for host in plan.hosts).encode()).hexdigest()[:12]
    return state_folder() / "plans" / f"reclaim-{name}.json"


def save(plan: ReclaimPlan, path: Path) -> None:
    """Write it for `--apply`, for this user's eyes alone. Raises UsageError where something else than a file is in the way."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UsageError(
            "A plan is not written over what is no ordinary file.", where=str(path), remedy="Give the name of a file to --out."
        )
    write_json(path, plan.model_dump(mode="json"))
    path.chmod(0o600)


def load_plan(path: Path) -> ReclaimPlan:
    """The plan of a file; raises UsageError for anything else, for one that was changed, and for one that others may write."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:
            raise UsageError("This is no plan of draftproof, but no ordinary file or a very large one.", where=str(path), remedy=_AGAIN)
        if about.st_uid not in (0, os.geteuid()) or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UsageError(
                "Others may write this plan, so it says nothing.", where=str(path), remedy=f"{_AGAIN} Its hash is no signature."
            )
        plan = ReclaimPlan.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"The plan cannot be read: {error.strerror}.", where=str(path), remedy=_AGAIN) from None
    except (ValidationError, ValueError, RecursionError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        place = ".".join(str(part) for part in first["loc"])[:200]
        raise UsageError(f"This is no plan of draftproof: {place or 'file'}: {first['msg']}.", where=str(path), remedy=_AGAIN) from None
    if not plan.hosts or len({(host.address, host.host) for host in plan.hosts}) < len(plan.hosts):
        raise UsageError("The plan names no host, or one twice.", where=str(path), remedy=_AGAIN)
    for host in plan.hosts:
        if host.hash != host.digest():
            raise UsageError(
                f"The plan for {host.host} was changed after it was made: its hash does not fit.", where=str(path), remedy=_AGAIN
            )
    return plan


_AGAIN = "Make one with `draftproof reclaim`."

_REMEDIES = {
    "other_user": "Ask its owner; root may plan with --any-user.",
    "container": "Stop the container where it runs: `docker stop` there, or name it here with --unit docker:ID.",
    "mps": "End the MPS server by its own command: echo quit | nvidia-cuda-mps-control.",
    "dead": "The driver still frees it, or holds it for good; look again, and if it stays, the GPU needs a reset by a person.",
    "driver": "No process owns it: a reset of the GPU or a reboot frees it, which is for a person to decide.",
    "self": "It belongs to this command's own ancestors, which are never stopped; end it by hand.",
}


def _remedy(holder: Holder, snapshot: Snapshot) -> str:
    """For memory without a process to be seen."""
    if snapshot.viewer.uid != 0 and holder.kind in ("dead", "driver"):
        return "Look as root (--sudo): only root sees everybody who has the GPU open."
    return _REMEDIES.get(holder.kind, _REMEDIES["driver"])


def _moment(seconds: float) -> str:
    """ISO time. By the host's own clock, since that tells which children were born after it."""
    return datetime.fromtimestamp(min(max(seconds, 0.0), _YEAR_9999), UTC).isoformat()


_YEAR_9999 = 253_402_300_799.0
"""The last second that has an ISO date; a host may send any number."""


def _why_not(
    holder: Holder, snapshot: Snapshot, selection: Selection, protected: Set[int], selected: Sequence[Set[int]]
) -> tuple[str, str] | None:
    """Why a holder with a process is left alone, and the remedy; None: it may be stopped."""
    process = holder.process
    if process is None:
        return None
    if process.pid in protected:
        return f"{holder.why}; it is an ancestor of this command", _REMEDIES["self"]
    if holder.kind == "mps" and process.comm.startswith("nvidia-cuda-mps"):
        return holder.why, _REMEDIES["mps"]
    if never_stopped(process.comm, process.uid):
        return f"{holder.why}; such a process serves the whole machine", "Leave it, or stop its service by hand."
    named = _named_unit(process, selection) is not None
    if selection.narrow and not named and not _together(process, selected):
        return f"{holder.why}; it was not selected", "Name its --unit, --cgroup, --session or --tree as well."
    if named and _unit_of(process, snapshot, selection, protected) is not None:
        return None  # whether we may stop a unit of another user is for systemd or docker to say
    if _in_other_container(process, snapshot) or (holder.kind == "container" and not selection.any_user):
        return holder.why, _REMEDIES["container"]
    if process.uid != snapshot.viewer.uid and not selection.any_user:
        return holder.why, _REMEDIES["other_user"]
    return None


def _in_other_container(process: Process, snapshot: Snapshot) -> bool:
    """Whether a process is in a container that we are not in: that is stopped as a whole, or its runtime starts it again."""
    return process.container is not None and process.container != snapshot.viewer.container


def _named_unit(process: Process, selection: Selection) -> str | None:
    """The selected unit or container that a process belongs to, as the selection names it."""
    names = {process.container} if process.container else set()
    if process.unit:
        bare = process.unit.removesuffix(".service")
        names |= {f"user:{process.unit}", f"user:{bare}"} if process.unit_scope == "user" else {process.unit, bare}
    for wanted in selection.units:
        if wanted in names or (process.container and ":" in wanted and len(wanted) > 18 and wanted.startswith(process.container)):
            return wanted
    return None


def _unit_of(process: Process, snapshot: Snapshot, selection: Selection, protected: Set[int]) -> PlannedUnit | None:
    """The service or named container that is stopped instead of the process; None: the process itself is."""
    named = _named_unit(process, selection)
    if process.container is not None:
        runtime, _, name = process.container.partition(":")
        if named is None or runtime not in ("docker", "podman"):
            return None
        return PlannedUnit(
            name=name, scope="docker" if runtime == "docker" else "podman", cgroup=process.cgroup, why=f"pid {process.pid} runs in it"
        )
    if process.unit is None or process.unit_scope is None or not process.unit.endswith(".service"):
        return None
    unit = PlannedUnit(name=process.unit, scope=process.unit_scope, cgroup=_unit_cgroup(process), why=f"pid {process.pid} belongs to it")
    members = [other for other in snapshot.processes or () if _is_inside(other, unit)]
    if never_stopped(unit.name) or any(member.pid in protected for member in members):
        return None
    return unit


def _unit_cgroup(process: Process) -> str | None:
    """The control group of a process's unit. The process may be in one below it: a service may divide its own."""
    above, found, _ = f"{process.cgroup}/".partition(f"/{process.unit}/")
    return f"{above}/{process.unit}" if found else process.cgroup


def _is_inside(process: Process, unit: PlannedUnit) -> bool:
    """Whether a process ends with this unit or container."""
    if process.container == f"{unit.scope}:{unit.name}":
        return True
    return unit.cgroup is not None and process.cgroup is not None and f"{process.cgroup}/".startswith(f"{unit.cgroup}/")


def _group(
    process: Process, snapshot: Snapshot, selected: Sequence[Set[int]], unit: PlannedUnit | None, *, any_user: bool
) -> list[tuple[Process, PlannedUnit | None]]:
    """Who is stopped for the sake of one holder, and with which unit: its unit as a whole, itself, what descends from it,
    its engine and the selected groups. Outside the unit only who may be stopped by a signal: see `_why_not`."""
    everyone = list(snapshot.processes or ())
    chosen = {process.pid, *_descendants(process.pid, everyone), *_together(process, selected)}
    members: list[tuple[Process, PlannedUnit | None]] = []
    for other in everyone:
        if unit is not None and _is_inside(other, unit):
            members.append((other, unit))
            continue
        wanted = other.pid in chosen or (process.engine is not None and other.engine == process.engine)
        if wanted and (any_user or other.uid == snapshot.viewer.uid) and not _in_other_container(other, snapshot):
            members.append((other, None))
    return members


def _selected(snapshot: Snapshot, selection: Selection) -> list[frozenset[int]]:
    """Pids of each selected session, control group and tree."""
    everyone = list(snapshot.processes or ())
    sessions = [frozenset(one.pid for one in everyone if one.session == session) for session in selection.sessions]
    groups = [frozenset(one.pid for one in everyone if one.cgroup == group) for group in selection.cgroups]
    trees = [frozenset((root, *_descendants(root, everyone))) for root in selection.trees]
    return [*sessions, *groups, *trees]


def _together(process: Process, selected: Sequence[Set[int]]) -> set[int]:
    """Pids of the selected groups that a process is in; empty: it was not selected."""
    return {pid for group in selected if process.pid in group for pid in group}


def _check_selection(selection: Selection, protected: Set[int]) -> None:
    """Raises UsageError for a choice that takes in the whole machine, or this command itself."""
    for root in selection.trees:
        if root in protected:
            raise UsageError(
                f"The tree of process {root} holds this command itself.",
                where="--tree",
                remedy="Name a process further down: see `draftproof check`.",
            )
    for group in selection.cgroups:
        if not group.strip("/.") or ".." in group.split("/"):
            raise UsageError(f"{group!r} is not one control group.", where="--cgroup", remedy="Give its path: see /proc/PID/cgroup.")


def _descendants(root: int, everyone: Sequence[Process]) -> set[int]:
    """Pids below `root`."""
    children: dict[int, list[int]] = {}
    for process in everyone:
        children.setdefault(process.ppid, []).append(process.pid)
    found: set[int] = set()
    waiting = list(children.get(root, ()))
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, ())
    return found


def _target(member: Process, held: Sequence[Holder], holder: Process, unit: PlannedUnit | None) -> Target:
    why = held[0].why if held else f"pid {member.pid} `{member.comm}` belongs to pid {holder.pid}, which holds memory"
    return Target(
        pid=member.pid,
        start_ticks=member.start_ticks,
        uid=member.uid,
        user=member.user,
        command=member.command or member.comm,
        cgroup=member.cgroup,
        session=member.session,
        unit=None if unit is None else unit.name,
        mib={str(other.gpu): None if other.bytes is None else -(-other.bytes // MIB) for other in held},
        kind=held[0].kind if held else "member",
        why=why,
    )


def _whole_cgroups(targets: dict[int, Target], snapshot: Snapshot, selection: Selection) -> tuple[str, ...]:
    """Control groups that may be killed whole: named ones and our engines' scopes, where every member is a target."""
    chosen = set()
    for group in {target.cgroup for target in targets.values() if target.cgroup is not None}:
        members = [process.pid for process in snapshot.processes or () if process.cgroup == group]
        ours = os.path.basename(group).startswith("draftproof-")
        if (group in selection.cgroups or ours) and all(pid in targets for pid in members):
            chosen.add(group)
    return tuple(sorted(chosen))
