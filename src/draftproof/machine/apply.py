"""Carry out a reclaim plan on its host, and verify that the memory came back.

    done = apply(plan, Reach(plan.address))
    done.freed_mib, done.blockers

It looks again first and drops what changed since the plan; `stop.py`, on the host itself, compares every identity once
more before it signals. Then the memory is watched until it is low and steady, or what holds it is named.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from draftproof.errors import DraftproofError, Refused, Undecided
from draftproof.machine.claims import LAUNCHERS
from draftproof.machine.holders import Holder, plain
from draftproof.machine.look import QUICK, TRAVEL_S, Look, Needs, look_at
from draftproof.machine.reclaim import HostPlan, ReclaimPlan
from draftproof.machine.remote import Reach
from draftproof.machine.snapshot import MIB, Process

VERIFY_S = 15.0
"""For memory to come back after the last process ended. On an H200 it was steady within 0.8 s, three looks included
(`benchmarks/machine_gpu.py`)."""
STEADY_LOOKS = 3
"""Looks in a row with the same memory in use, and no blocker, before it counts as free."""
LOOK_EVERY_S = 0.1


class UnitOutcome(BaseModel):
    """What became of a unit."""

    model_config = ConfigDict(frozen=True)
    name: str
    scope: str
    stopped: bool
    detail: str


class Outcome(BaseModel):
    """What became of a target: see `stop.py`."""

    model_config = ConfigDict(frozen=True)
    pid: int
    outcome: str
    detail: str
    seconds: float | None = None


class _Stopped(BaseModel):
    """The document of `stop.py`."""

    refused: str | None
    units: tuple[UnitOutcome, ...]
    outcomes: tuple[Outcome, ...]
    seconds: float


@dataclass(frozen=True)
class Applied:
    """What a plan came to."""

    host: str
    units: tuple[UnitOutcome, ...]
    outcomes: tuple[Outcome, ...]
    freed_mib: int
    """Less in use on the plan's GPUs than before."""
    blockers: tuple[str, ...]
    """Sentences: who holds memory there still."""
    stop_s: float
    verify_s: float
    """From the last process's end to low and steady memory."""

    @property
    def free(self) -> bool:
        """Whether nothing is in the way any more."""
        return not self.blockers


def apply(plan: HostPlan, reach: Reach, *, allowance_mib: int = 0, interrupted: threading.Event | None = None) -> Applied:
    """Stop what the plan names and is still what it was; wait until its GPUs are free.

    Once `interrupted` is set nothing is killed any more, and what became of everybody is said.

    Raises Refused when the host refuses the plan as a whole (another host, another boot, a changed file), and what the
    look raises when the host cannot be reached. Individual refusals are outcomes, not errors.
    """
    needs = Needs(gpus=plan.gpus, allowance_mib=allowance_mib)
    before = _look(reach, needs)
    if before.error is not None:
        raise before.error
    _check_place(plan, before)
    if before.blind is not None:
        raise Undecided(
            f"Nothing was done, for who holds the GPUs cannot be told now: {before.blind}.", where=reach.name, remedy=_LOOK_AGAIN
        )
    current, dropped = still_true(plan, before)
    if current.empty:
        stopped = _Stopped(refused=None, units=(), outcomes=(), seconds=0.0)
    else:
        answer = reach.ask("stop", {"plan": current.model_dump(mode="json")}, _longest(current), interrupted)
        stopped = _read(answer.document, reach)
    if stopped.refused is not None:
        raise Refused(f"{reach.name} refused the plan: {stopped.refused}", remedy=_LOOK_AGAIN)
    started = time.monotonic()
    after = _until_free(reach, needs, plan, quiet=current.empty or (interrupted is not None and interrupted.is_set()))
    ended = {outcome.pid: outcome for outcome in stopped.outcomes}
    blockers = tuple(_blocker(holder, plan, ended, after) for holder in after.blockers)
    if after.blind is not None:  # the processes have ended all the same, so what became of them is said
        blockers = (*blockers, f"unknown, for the look afterwards did not tell: {after.blind}")
    return Applied(
        host=plan.host,
        units=stopped.units,
        outcomes=(*dropped, *stopped.outcomes),
        freed_mib=0 if after.blind is not None else max(0, _in_use(before) - _in_use(after)) // MIB,
        blockers=blockers,
        stop_s=stopped.seconds,
        verify_s=time.monotonic() - started,
    )


def apply_all(
    plan: ReclaimPlan,
    *,
    python: str = "python3",
    sudo: bool = False,
    allowance_mib: int = 0,
    announce: Callable[[Applied | DraftproofError], None] = lambda one: None,
) -> list[Applied | DraftproofError]:
    """Carry out the plans of all hosts at once; what came of each, in order, also told to `announce`.

    Ctrl-C stops the killing, not the answer: it is raised once every host has said what became of its processes.
    """
    interrupted = threading.Event()

    def one(host: HostPlan) -> Applied | DraftproofError:
        try:
            reach = Reach(host.address, python=python, sudo=sudo)
            return apply(host, reach, allowance_mib=allowance_mib, interrupted=interrupted)
        except DraftproofError as error:
            return error

    with ThreadPoolExecutor(max_workers=max(1, len(plan.hosts))) as pool:
        running = [pool.submit(one, host) for host in plan.hosts]
        ended: BaseException | None = None
        while True:
            try:
                done = [future.result() for future in running]
                break
            except KeyboardInterrupt as error:
                interrupted.set()
                ended = error
    for result in done:
        announce(result)
    if ended is not None:
        raise ended
    return done


def applied_document(done: Sequence[Applied | DraftproofError]) -> dict[str, Any]:
    """For `--json`: what came back, and what stands in the way, over all hosts; and each host for itself."""
    hosts: list[dict[str, Any]] = []
    for one in done:
        if isinstance(one, DraftproofError):
            hosts.append({"error": str(one)})
            continue
        shown = {"units": [unit.model_dump() for unit in one.units], "outcomes": [outcome.model_dump() for outcome in one.outcomes]}
        hosts.append({**asdict(one), **shown})
    well = [one for one in done if isinstance(one, Applied)]
    return {
        "freed_mib": sum(one.freed_mib for one in well),
        "blockers": [blocker for one in well for blocker in one.blockers],
        "hosts": hosts,
    }


def enforce(done: Sequence[Applied | DraftproofError]) -> None:
    """Raise the first host's error, or DraftproofError where memory did not come back."""
    for one in done:
        if isinstance(one, DraftproofError):
            raise one
    for one in done:
        if isinstance(one, Applied) and not one.free:
            more = f" ({len(one.blockers) - 1} more)" if len(one.blockers) > 1 else ""
            raise DraftproofError(
                f"Memory is still held: {one.blockers[0]}{more}", where=one.host, remedy="See what is left: draftproof check."
            )


_LOOK_AGAIN = "Look again: draftproof reclaim."


def _look(reach: Reach, needs: Needs) -> Look:
    return look_at([reach], needs, parts=QUICK, samples=1)[0]


def _check_place(plan: HostPlan, look: Look) -> None:
    """`stop.py` checks the same again, where it acts; here it saves the journey."""
    snapshot = look.seen
    if plan.hash != plan.digest():
        raise Refused("The plan was changed after it was made: its hash does not fit.", remedy=_LOOK_AGAIN)
    for what, planned, found in (
        ("host", plan.host, snapshot.host),
        ("boot", plan.boot_id, snapshot.boot_id),
        ("process namespace", plan.pid_namespace, snapshot.pid_namespace),
    ):
        if planned != found:
            raise Refused(f"The plan is of another {what}: {planned}, this is {found}.", remedy=_LOOK_AGAIN)


def still_true(plan: HostPlan, look: Look) -> tuple[HostPlan, tuple[Outcome, ...]]:
    """The plan without targets that were recycled, hold nothing any more, or were to go along with one of those; and what
    became of them."""
    changed: dict[int, str] = {}
    holding = {holder.pid for holder in look.blockers}
    for target in plan.targets:
        process = look.seen.process(target.pid)
        if process is not None and (process.start_ticks, process.uid) != (target.start_ticks, target.uid):
            changed[target.pid] = "the process id is another process's now"
        elif target.mib and target.pid not in holding:
            changed[target.pid] = "it has ended or holds no memory there any more, so it was left alone"
    # Who holds nothing was to end for the sake of one who does: of its own unit, of its parents, or else of any.
    let_go = set(changed)
    reasons = {target.unit for target in plan.targets if target.pid not in let_go and (target.mib or target.pid in holding)}
    for target in plan.targets:
        if target.pid in let_go or target.mib or target.pid in holding:
            continue
        if look.seen.process(target.pid) is None:  # a look shows all that belongs to a holder
            meant = False
        elif target.unit is not None:
            meant = target.unit in reasons
        else:
            meant = bool(reasons) and not _parents(look, target.pid) & let_go
        if not meant:
            changed[target.pid] = "it has ended, or what it belongs to holds no memory there any more, so it was left alone"
    kept = tuple(target for target in plan.targets if target.pid not in changed)
    units = tuple(unit for unit in plan.units if unit.name in {target.unit for target in kept})
    dropped = tuple(Outcome(pid=pid, outcome="changed", detail=why) for pid, why in changed.items())
    return plan.model_copy(update={"targets": kept, "units": units}).sealed(), dropped


def _parents(look: Look, pid: int) -> set[int]:
    """Pids above a process, as they are now."""
    found: set[int] = set()
    process = look.seen.process(pid)
    while process is not None and process.ppid not in found:
        found.add(process.ppid)
        process = look.seen.process(process.ppid)
    return found


def _longest(plan: HostPlan) -> float:
    """Seconds after which the host must have answered: units one after the other, TERM, KILL, and the journey."""
    return (2 * plan.deadline_s + 10) * len(plan.units) + plan.deadline_s + 10 + TRAVEL_S


def _read(document: bytes, reach: Reach) -> _Stopped:
    try:
        return _Stopped.model_validate(json.loads(document))
    except (ValidationError, ValueError, RecursionError) as error:
        raise DraftproofError(f"{reach.name} answered what cannot be read: {error}", remedy="Look again: draftproof check.") from None


def _until_free(reach: Reach, needs: Needs, plan: HostPlan, *, quiet: bool) -> Look:
    """The first look that shows steady memory and nothing in the way but living processes and what the plan left, or the last
    one before the deadline.

    A look that fails does not count, unless it is the last.
    """
    deadline = time.monotonic() + (0 if quiet else VERIFY_S)
    left = {(one.gpu, one.pid) for one in plan.left}
    seen: list[int] = []
    while True:
        look = _look(reach, needs)
        if look.blind is not None:
            seen.clear()
        else:
            seen.append(_in_use(look))
        steady = len(seen) >= STEADY_LOOKS and len(set(seen[-STEADY_LOOKS:])) == 1
        coming = [holder for holder in look.blockers if holder.process is None or holder.process.ended]  # memory may still come back
        waiting = any((holder.gpu, holder.pid) not in left for holder in coming)
        if (steady and not waiting) or time.monotonic() >= deadline:
            return look
        time.sleep(LOOK_EVERY_S)


def _in_use(look: Look) -> int:
    return sum(gpu.memory.used_now for gpu in look.gpus if gpu.memory is not None)


def _blocker(holder: Holder, plan: HostPlan, ended: dict[int, Outcome], look: Look) -> str:
    """Who still holds memory, and why the plan did not change that."""
    if holder.pid in ended and ended[holder.pid].outcome not in ("terminated", "killed", "gone"):
        return f"{holder.why}; {ended[holder.pid].outcome}: {ended[holder.pid].detail}"
    left = next((left for left in plan.left if left.pid == holder.pid), None)
    if left is not None:
        return f"{holder.why}; {left.remedy}"
    if holder.process is not None and all(target.pid != holder.pid for target in plan.targets):
        return f"{holder.why}; it came after the plan{_whose(holder.process, look)}"
    return holder.why


def _whose(process: Process, look: Look) -> str:
    """What to do about a process that came after the plan: a parent that starts it again and again has to go with it, but
    not init, a shell or another that only took it in."""
    parent = look.seen.process(process.ppid)
    own = parent is not None and parent.uid == process.uid and parent.pid > 1 and parent.comm not in LAUNCHERS
    if parent is None or not own or parent.pid in look.seen.viewer.ancestors:
        return ": plan again"
    return f"; its parent is pid {parent.pid} `{plain(parent.comm)}`: plan again with --tree {parent.pid}"
