"""Is the rest of the machine fit: memory, shared memory, disks, limits, ports, clock? Judged on what `machine/probe.py`
saw of one host."""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.gate.finding import Finding, failed, passed, unsure, warned
from draftproof.machine.look import DiskNeed, Look
from draftproof.machine.snapshot import MIB, Disk

SKEW_S = 5.0
"""Clocks further apart spoil tokens, caches and the order of logs."""
LEAST_FILES = 1024
"""Open files that an engine with a few workers needs."""
LEAST_BYTES, LEAST_INODES = 10**9, 1000
"""Below these a folder is as good as full, whatever is to be written."""


def host_reached(look: Look) -> Finding:
    """The host was looked at, in whole."""
    if look.error is not None:
        return unsure("host.reached", look.error.what, look.error.remedy)
    snapshot = look.seen
    evidence = f"Looked at {look.reach.name} as {snapshot.viewer.user} in {look.seconds:.2f} s."
    if look.partial:
        return warned("host.reached", f"{evidence} {look.partial}", "Look as a user who may see all processes.")
    return passed("host.reached", evidence)


def host_memory(look: Look) -> Finding:
    """Available memory, within the control group's limit, against the forecast of the peak."""
    memory = look.seen.host_memory
    if memory is None:
        return unsure("host.memory", look.seen.why_unseen("host_memory") or "Not told.", "Look as another user.")
    free = memory.available
    if memory.cgroup_limit is not None and memory.cgroup_used is not None:
        free = min(free, max(0, memory.cgroup_limit - memory.cgroup_used))
    needed, least = look.needs.host_bytes, look.needs.least_host_bytes
    if needed is None or least is None:
        return passed("host.memory", f"{free / MIB:,.0f} of {memory.total / MIB:,.0f} MiB available.")
    evidence = f"{free / MIB:,.0f} MiB available, about {needed / MIB:,.0f} MiB expected."
    if free < least:
        return failed("host.memory", evidence, "End other programs, or take a larger machine.")
    if free < needed:
        return warned("host.memory", evidence, "The forecast may be too high; watch it.")
    return passed("host.memory", evidence)


def host_shm(look: Look) -> Finding:
    """Shared memory: free, and without segments that a dead engine left."""
    shm = look.seen.shm
    if shm is None:
        return unsure("host.shm", look.seen.why_unseen("shm") or "Not told.", "Look as another user.")
    evidence = f"{shm.free / MIB:,.0f} of {shm.total / MIB:,.0f} MiB free in /dev/shm."
    if shm.stale:
        size = sum(segment.bytes for segment in shm.stale)
        names = " ".join(f"/dev/shm/{segment.name}" for segment in shm.stale[:3])  # noqa: S108  (named to a person, not used)
        more = "" if len(shm.stale) <= 3 else " ..."
        return warned(
            "host.shm",
            f"{evidence} {len(shm.stale)} segments of dead programs, {size / MIB:,.0f} MiB.",
            f"No process has them open; remove them: rm {names}{more}",
        )
    if shm.total and shm.free < 0.05 * shm.total:
        return warned("host.shm", evidence, "Engines with several workers speak through it; make room.")
    return passed("host.shm", evidence)


def host_disk(look: Look) -> Finding:
    """Free bytes on each folder that is written to."""
    told = []
    for disk, need in _disks(look):
        evidence, room = f"{disk.free_bytes / 1e9:,.1f} GB free at {disk.existing}.", max(need.bytes * 1.05, LEAST_BYTES)
        if disk.read_only:
            return failed("host.disk", f"{disk.existing} is mounted read-only.", "Give another folder.")
        if disk.free_bytes < room:
            return failed("host.disk", f"{evidence} {room / 1e9:,.1f} GB needed.", "Free some space, or give another folder.")
        told.append(evidence)
    return _about_disks("host.disk", look, told)


def host_inodes(look: Look) -> Finding:
    """Free inodes on each folder that is written to."""
    told = []
    for disk, need in _disks(look):
        if disk.free_inodes is None:
            continue
        evidence = f"{disk.free_inodes:,} inodes free at {disk.existing}."
        if disk.free_inodes < max(need.files, LEAST_INODES):
            return failed("host.inodes", evidence, "Remove small files there.")
        told.append(evidence)
    return _about_disks("host.inodes", look, told)


def host_limits(look: Look) -> Finding:
    """Open files, processes and locked memory that a process may have."""
    limits = look.seen.limits
    if limits is None:
        return unsure("host.limits", look.seen.why_unseen("limits") or "Not told.", "See `ulimit -a` there.")
    soft, hard = limits.nofile
    evidence = f"Open files {_limit(soft)} (at most {_limit(hard)}), locked memory {_limit(limits.memlock[0])}."
    if 0 <= hard < LEAST_FILES:
        return failed("host.limits", evidence, "Have an administrator raise nofile.")
    if 0 <= soft < LEAST_FILES:
        return warned("host.limits", evidence, "Run `ulimit -n 65536` first.")
    return passed("host.limits", evidence)


def host_ports(look: Look) -> Finding:
    """The ports that will be listened on are free, found by binding them."""
    ports = look.seen.ports
    taken = [port for port in ports if not port.free]
    if taken:
        owners = [f"pid {port.owner.pid} `{port.owner.command[:40]}`" if port.owner else port.why or "owner not visible" for port in taken]
        told = [f"{port.port} ({owner})" for port, owner in zip(taken, owners, strict=True)]
        return failed("host.ports", f"In use: {', '.join(told)}.", "Stop what listens there, or give another port.")
    return passed("host.ports", f"Free: {', '.join(str(port.port) for port in ports)}." if ports else "No port is needed.")


def host_clock(look: Look) -> Finding:
    """The clock is that of this machine, within a few seconds."""
    snapshot = look.seen
    asked, answered = look.between
    off = max(asked - snapshot.time, snapshot.time - answered, 0.0)
    if off > SKEW_S:
        return failed("host.clock", f"Its clock is {off:,.0f} s from this machine's.", "Set it (chrony, ntpd).")
    synchronised = None if snapshot.clock is None else snapshot.clock.synchronised
    told = {True: "synchronised", False: "not synchronised by the kernel's account", None: "synchronisation not told"}[synchronised]
    return passed("host.clock", f"Within {SKEW_S:.0f} s of this machine's, {told}.")


def _disks(look: Look) -> list[tuple[Disk, DiskNeed]]:
    """What was seen of each folder, with what is needed there."""
    needs = {str(need.path): need for need in look.needs.disks}
    return [(disk, needs[disk.path]) for disk in look.seen.disks if disk.path in needs]


def _about_disks(name: str, look: Look, told: Sequence[str]) -> Finding:
    """Every folder is fine, or some were not seen."""
    unseen = {str(need.path) for need in look.needs.disks} - {disk.path for disk in look.seen.disks}
    if unseen:
        why = look.seen.why_unseen("disk") or "not told"
        return unsure(name, f"{', '.join(sorted(unseen))} could not be looked at: {why}", "A network filesystem may hang; look by hand.")
    return passed(name, " ".join(told) or "No folder was named.")


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else f"{value:,}"
