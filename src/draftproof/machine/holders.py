"""Who holds the memory of the GPUs of a snapshot, and whether that stands in the way.

    for holder in find_holders(snapshot, gpus=[3]):
        print(holder.why)
    # pid 4121 `VLLM::Worker_TP3` of alice, 2 h old, holds 71,604 MiB; it is a forked child of pid 4099, which is gone

`claims.py` says whose memory is whose; here it gets a kind, a verdict and a sentence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

from draftproof.errors import printable
from draftproof.machine.claims import Claim, Machine, has_open, is_system
from draftproof.machine.snapshot import MIB, Gpu, Process, Snapshot

Kind = Literal["self", "ours", "mps", "container", "other_user", "system", "forked", "live", "dead", "driver", "fd_only"]
"""What a holder is; of several, the first in this order. `why` names them all.

- self: the caller, what it started, and what is above it, which alone of these blocks. ours: an engine that a record names.
- mps: the MPS server or a client of it. container: in a container or pid namespace other than the viewer's, or hidden by one.
- other_user: another user's. system: a service, monitor or display server.
- forked: not listed, but has the GPU open for CUDA, and there is memory whose owner is gone or missing.
- live: listed and alive. dead: listed and gone, and nobody was found who holds it. driver: memory that nobody owns.
- fd_only: has the GPU open, without memory.
"""

SYSTEM_ALLOWANCE = 16 * MIB
"""Bytes that a service or monitor may be listed with for computing and not stand in the way."""


@dataclass(frozen=True)
class Holder:
    """Somebody, or something, that holds a GPU."""

    gpu: int
    """NVML's index."""
    pid: int | None
    """The process, or a pid that NVML lists and that is not to be seen. None: no process."""
    bytes: int | None
    """Device memory. None: not known, or said at another holder that shares it."""
    kind: Kind
    """What it is."""
    blocking: bool
    """Whether the GPU is not free because of it."""
    why: str
    """One sentence, without its full stop, that names everything."""
    process: Process | None
    """None where no process is to be seen."""
    listed: tuple[int, ...] = ()
    """The pids under which NVML lists `bytes`. Each pid of a GPU's list stands at exactly one of its holders."""
    short: str = ""
    """`why` in a few words, for `summary`."""


def find_holders(snapshot: Snapshot, gpus: Collection[int] | None = None) -> list[Holder]:
    """Everybody who has one of the GPUs (NVML's indices; None: all that were seen) open or holds memory on it.

    By GPU; on each, those that block first, then the largest. The bytes on a GPU never add up to more than it has in use.
    """
    machine = Machine(snapshot)
    found: list[Holder] = []
    for gpu in snapshot.gpus:
        if gpus is None or gpu.index in gpus:
            found += sorted(_on(machine, gpu), key=lambda holder: (not holder.blocking, -(holder.bytes or 0), holder.pid or 0))
    return found


def summary(holders: Iterable[Holder]) -> str:
    """One line, in the order given, with the first three by name: `GPU 3: pid 4121 VLLM::Worker_TP3 (alice, 2 h), 71,604 MiB, ...`."""
    lines = [f"GPU {holder.gpu}: {holder.short or holder.why}" for holder in holders]
    return "; ".join(lines[:3] + ([f"+ {len(lines) - 3} more"] if len(lines) > 3 else []))


class _Said(NamedTuple):
    """One thing, said twice."""

    clause: str
    """For `why`. Empty: it is only in `short`."""
    words: str = ""
    """For `short`."""


def _on(machine: Machine, gpu: Gpu) -> list[Holder]:
    claims = machine.claims(gpu)
    held_by: dict[int, list[Claim]] = defaultdict(list)
    for claim in claims:
        for owner in claim.owners:
            held_by[owner.pid].append(claim)
    hidden = [claim for claim in claims if claim.fate == "hidden"]
    suspects = {process.pid for process in machine.candidates(gpu)} if hidden else set()
    found = [_without_process(machine, gpu, claim) for claim in claims if not claim.owners]
    for process in machine.snapshot.processes or ():
        if process.pid in held_by:
            found.append(_with_memory(machine, gpu, process, held_by[process.pid]))
        elif process.pid in suspects:
            found.append(_suspect(machine, gpu, process, hidden))
        elif has_open(process, gpu):
            found.append(_only_open(machine, gpu, process))
    return found


# A process


def _with_memory(machine: Machine, gpu: Gpu, process: Process, claims: list[Claim]) -> Holder:
    """One that holds memory, alone or with others."""
    own = next((claim for claim in claims if claim.pid == process.pid), None)
    alone = [claim.bytes for claim in claims if len(claim.owners) == 1]
    main = f"holds {_mib(alone)}" if alone else f"has GPU {gpu.index} open"
    said = [_Said("", _mib(alone))] if alone else []
    role: Kind = "forked" if own is None else "live"
    blocking = True
    if own is not None and process.ended:
        role, blocking = "dead", own.bytes != 0
        main = f"has ended, and NVML still lists it with {_mib(alone)}"
        said.append(_Said(f"no other process was found that holds them{_blind(machine)}", "ended, nobody found who holds them"))
    elif own is not None and is_system(process):
        blocking = _computes(gpu, process.pid)
    said += _inheritance(machine, gpu, [claim for claim in claims if claim is not own])
    if own is not None:
        said += _cut(gpu, own)
    carried = [claim for claim in claims if claim.owners[0] is process]
    return _holder(
        machine,
        gpu,
        process,
        _Part(
            role,
            _sum([claim.bytes for claim in carried]) if carried else None,
            blocking,
            tuple(claim.pid for claim in carried if claim.pid is not None),
        ),
        main,
        said,
    )


def _suspect(machine: Machine, gpu: Gpu, process: Process, hidden: list[Claim]) -> Holder:
    """One that may hold what is listed by a number of another pid namespace, or not listed for being in one."""
    pids, amount = [claim.pid for claim in hidden if claim.pid is not None], _mib([claim.bytes for claim in hidden])
    whose = f"NVML lists under {_pids(pids)}, not to be seen from this pid namespace" if pids else "nobody to be seen from here owns"
    said = [_Said(f"it may hold the {amount} that {whose}", f"may hold {amount} of nobody seen")]
    return _holder(machine, gpu, process, _Part("forked"), f"has GPU {gpu.index} open", said)


def _only_open(machine: Machine, gpu: Gpu, process: Process) -> Holder:
    """One that holds nothing. An engine of ours is about to; others are no obstacle."""
    starting = process.engine is not None and "nvidia-uvm" in (process.device_fds or ())
    said = [_Said("", "device open, no memory listed")]
    said += [_Said("it may still be starting", "may still be starting")] if starting else []
    return _holder(
        machine, gpu, process, _Part("fd_only", blocking=starting), f"has GPU {gpu.index} open, and NVML lists no memory of it", said
    )


class _Part(NamedTuple):
    """What a process does on a GPU, whoever it is."""

    role: Kind
    bytes: int | None = None
    blocking: bool = True
    listed: tuple[int, ...] = ()


def _holder(machine: Machine, gpu: Gpu, process: Process, part: _Part, main: str, said: Sequence[_Said]) -> Holder:
    traits = _traits(machine, gpu, process)
    kind = next(iter(traits), part.role)
    alive = [_Said("", "alive")] if kind == "live" else []
    everything = [*said, *traits.values(), *alive, *_state(process), *_unit(process)]
    age, name, user = _age(machine.snapshot.time - process.started), _name(process), plain(process.user)
    return Holder(
        gpu=gpu.index,
        pid=process.pid,
        bytes=part.bytes,
        kind=kind,
        blocking=part.blocking and process.pid not in machine.own,
        why="; ".join([f"pid {process.pid} `{name}` of {user}, {age} old, {main}", *(one.clause for one in everything if one.clause)]),
        process=process,
        listed=part.listed,
        short=", ".join([f"pid {process.pid} {name} ({user}, {age})", *(one.words for one in everything if one.words)]),
    )


def _traits(machine: Machine, gpu: Gpu, process: Process) -> dict[Kind, _Said]:
    """Who it is, whatever it does; the first is its kind."""
    viewer, snapshot = machine.snapshot.viewer, machine.snapshot
    traits: dict[Kind, _Said] = {}
    if process.pid in machine.above:
        traits["self"] = _Said("the caller runs below it", "above the caller")
    elif process.pid == viewer.pid or process.pid in viewer.ancestors:
        traits["self"] = _Said("it is the caller itself", "the caller itself")
    elif process.pid in machine.own:
        traits["self"] = _Said("the caller started it", "started by the caller")
    if process.engine is not None:
        what = f"our {plain(process.engine.what)} of {plain(process.engine.run, 80)}"
        traits["ours"] = _Said(f"it belongs to {what}", what)
    if process.comm.startswith("nvidia-cuda-mps"):
        traits["mps"] = _Said("it serves MPS, and may hold memory for its clients", "serves MPS")
    elif _is_mps_client(gpu, process.pid):
        traits["mps"] = _Said("it is a client of MPS", "client of MPS")
    if process.container is not None and process.container != viewer.container:
        traits["container"] = _Said(f"it runs in container {plain(process.container)}", f"in {plain(process.container)}")
    elif None not in (process.pid_namespace, snapshot.pid_namespace) and process.pid_namespace != snapshot.pid_namespace:
        traits["container"] = _Said("it runs in another pid namespace", "in another pid namespace")
    if process.uid != viewer.uid:
        traits["other_user"] = _Said("it belongs to another user", "another user's")
    if is_system(process):
        traits["system"] = _Said("by its name it is a service, a monitor or a display server", "service or monitor")
    return traits


def _inheritance(machine: Machine, gpu: Gpu, claims: list[Claim]) -> list[_Said]:
    """Memory that a process has from others, those with the same heirs together."""
    said = []
    for unlisted in (False, True):
        groups: dict[tuple[int, ...], list[Claim]] = defaultdict(list)
        for claim in claims:
            if (claim.pid is None) is unlisted:
                groups[tuple(owner.pid for owner in claim.owners)].append(claim)
        for heirs, group in groups.items():
            amount = _mib([claim.bytes for claim in group])
            said.append(_unlisted(machine, gpu, group[0], amount) if unlisted else _from_dead(group, amount, len(heirs)))
    return said


def _from_dead(group: list[Claim], amount: str, heirs: int) -> _Said:
    pids = _pids([claim.pid for claim in group if claim.pid is not None])
    gone = "are gone" if len(group) > 1 else "has ended" if group[0].fate == "ended" else "is gone"
    if any(claim.fate == "recycled" for claim in group):
        gone += " (the number is another process's now)"
    if heirs == 1:
        return _Said(f"it is a forked child of {pids}, which {gone}", f"forked child of dead {pids}")
    return _Said(f"{heirs} processes share {amount} of {pids}, which {gone}", f"one of {heirs} that share {amount} of dead {pids}")


def _unlisted(machine: Machine, gpu: Gpu, claim: Claim, amount: str) -> _Said:
    heirs = len(claim.owners)
    who = "no other process was found that can hold" if heirs == 1 else f"{heirs} processes can hold"
    short = "not listed" if heirs == 1 else f"one of {heirs} that can hold {amount}"
    if claim.fate == "unseen":
        return _Said(f"{who} the {amount} in use, and NVML's list was not seen: {_no_list(machine, gpu)}", f"{short}, list not seen")
    return _Said(f"{who} {amount} that NVML lists nobody with", short)


# No process


def _without_process(machine: Machine, gpu: Gpu, claim: Claim) -> Holder:
    """Memory, and nobody to be seen who holds it."""
    amount = _mib([claim.bytes])
    if claim.pid is None:
        return _nobodys(machine, gpu, claim, amount)
    kind: Kind
    short = [f"pid {claim.pid}", amount]
    if claim.fate == "hidden":
        kind = "container"
        clauses = [f"pid {claim.pid} holds {amount}", f"it is in a pid namespace that cannot be seen from here{_or_caller(machine, gpu)}"]
        short.append("in a pid namespace that cannot be seen")
    elif claim.fate == "unseen":
        kind = "live" if machine.partial else "other_user"
        why = machine.snapshot.why_unseen(f"process.{claim.pid}") or machine.snapshot.why_unseen("processes") or "no reason was given"
        clauses = [f"pid {claim.pid} holds {amount}", f"what process it is was not seen: {plain(why, 200)}"]
        short.append("process not seen")
    else:
        kind = "dead"
        gone = "is gone (the number is another process's now)" if claim.fate == "recycled" else "is gone"
        clauses = [
            f"pid {claim.pid} {gone}, and NVML still lists it with {amount}",
            f"no process was found that holds them{_or_caller(machine, gpu)}{_blind(machine)}",
        ]
        short.append("gone, nobody found who holds them")
    if _is_mps_client(gpu, claim.pid):
        kind = "mps"
        clauses.append("it is listed as a client of MPS, whose server may hold them")
        short.append("client of MPS")
    clauses += [one.clause for one in _cut(gpu, claim)]
    blocking = claim.fate in ("hidden", "unseen") or claim.bytes != 0
    return Holder(gpu.index, claim.pid, claim.bytes, kind, blocking, "; ".join(clauses), None, (claim.pid,), ", ".join(short))


def _nobodys(machine: Machine, gpu: Gpu, claim: Claim, amount: str) -> Holder:
    if claim.fate == "unseen":
        why = f"{amount} are in use, and who holds them was not seen: {_no_list(machine, gpu)}"
        return Holder(gpu.index, None, claim.bytes, "driver", True, why, None, (), f"{amount}, nobody seen who holds them")
    if claim.fate == "hidden":
        who = f"a process of another pid namespace or the driver holds them{_or_caller(machine, gpu)}"
        why = f"{amount} are in use that no process to be seen from this pid namespace owns: {who}"
        return Holder(gpu.index, None, claim.bytes, "container", True, why, None, (), f"{amount} that nobody to be seen owns")
    why = f"{amount} are in use that no process owns: the driver holds them{_or_caller(machine, gpu)}{_blind(machine)}"
    if gpu.mig is not None and gpu.mig.enabled:
        why += f"; the GPU is split into {gpu.mig.instances} MIG instances"
    if gpu.memory is not None and gpu.memory.version == 1:
        why += "; this driver counts its own reserve in"
    return Holder(gpu.index, None, claim.bytes, "driver", True, why, None, (), f"{amount} that no process owns")


# Words


def _blind(machine: Machine) -> str:
    """What could not be looked at, where somebody was looked for in vain."""
    why = machine.snapshot.why_unseen("process")
    return f" (not all was seen: {plain(why, 200)})" if why else ""


def _or_caller(machine: Machine, gpu: Gpu) -> str:
    """What the caller may hold itself, without a way to tell."""
    opened = any(process.pid in machine.own and has_open(process, gpu) for process in machine.snapshot.processes or ())
    return ", unless it is the caller itself, which has the GPU open" if opened else ""


def _no_list(machine: Machine, gpu: Gpu) -> str:
    return plain(machine.snapshot.why_unseen(f"gpu.{gpu.index}.processes") or "no reason was given", 200)


def _cut(gpu: Gpu, claim: Claim) -> list[_Said]:
    if claim.bytes == claim.as_listed:
        return []
    return [_Said(f"NVML lists it with {_mib([claim.as_listed])}, more than GPU {gpu.index} has in use beside the others")]


def _state(process: Process) -> list[_Said]:
    if process.ended:
        return [_Said(f"it is a zombie (state {process.state}) until its parent, pid {process.ppid}, collects it", "zombie")]
    if process.state == "D":
        return [_Said("it is in uninterruptible sleep (state D)", "uninterruptible")]
    if process.state in ("T", "t"):
        return [_Said(f"it is stopped (state {process.state})", "stopped")]
    return []


def _unit(process: Process) -> list[_Said]:
    if process.unit is None:
        return []
    return [_Said(f"it runs in {'user ' if process.unit_scope == 'user' else ''}unit {plain(process.unit, 80)}")]


def _is_mps_client(gpu: Gpu, pid: int) -> bool:
    return any(line.pid == pid and line.kind == "mps" for line in gpu.processes or ())


def _computes(gpu: Gpu, pid: int) -> bool:
    """Whether NVML lists it for computing with more than a service may have."""
    sizes = [line.bytes for line in gpu.processes or () if line.pid == pid and line.kind != "graphics"]
    total = _sum(sizes)
    return total is None or total > SYSTEM_ALLOWANCE


def _sum(sizes: Collection[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _mib(sizes: Collection[int | None]) -> str:
    size = _sum(sizes)
    if size is None:
        return "memory of unknown size"
    return "less than 1 MiB" if 0 < size < MIB else f"{round(size / MIB):,} MiB"


def _age(seconds: float) -> str:
    """In the largest unit of which there is one: `50 s`, `12 min`, `2 h`, `3 d`."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def _pids(pids: Sequence[int]) -> str:
    """`pid 1`, `pids 1 and 2`, `pids 1, 2, 3 and 9 more`."""
    if len(pids) == 1:
        return f"pid {pids[0]}"
    first, last = (pids[:-1], str(pids[-1])) if len(pids) <= 4 else (pids[:3], f"{len(pids) - 3} more")
    return f"pids {', '.join(map(str, first))} and {last}"


def _name(process: Process) -> str:
    """The command line without the folder of its program, cut; the kernel's name where there is none."""
    program, space, rest = (process.command.strip() or process.comm or "?").partition(" ")
    short = PurePosixPath(program).name if program.startswith("/") else program
    return plain((short or program) + space + rest, 48)


def plain(text: str, at_most: int = 40) -> str:
    """Fit to stand in a sentence, between backticks too."""
    shown = printable(text).replace("`", "?")
    return shown if len(shown) <= at_most else shown[: at_most - 1].rstrip() + "…"
