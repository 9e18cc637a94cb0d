"""Whose memory is whose: each piece of a GPU's memory, and the processes that can hold it. `holders.py` puts it into words.

NVML alone does not say it. It goes on listing a killed process with the memory that a forked child keeps (measured on an H200), it
counts pids as the host does and not as a container does, and a number that it lists may belong to another process by now. So
its list is joined with the open device files of all processes. A CUDA program has /dev/nvidia-uvm open beside the GPU's own
device file, while programs that only ask (nvidia-smi, exporters) do not: only the former can hold memory.

Where the facts do not decide, the answer is the one that stops the work and kills nobody.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from draftproof.machine.snapshot import MIB, Gpu, Process, Snapshot

UNOWNED_TOLERANCE = 64 * MIB
"""Bytes in use beyond what NVML's list adds up to that are nothing to name. One process on an H200 had 8 MiB more than listed."""
UNOWNED_TOLERANCE_V1 = 1024 * MIB
"""The same where the reading counts the driver's reserve as used, 615 MiB on an H200."""

Fate = Literal["alive", "gone", "recycled", "ended", "hidden", "unseen"]
"""What became of a listed pid. alive: it holds the memory itself. gone: no process has the number. recycled: another one has it.
ended: a zombie has it. hidden: it counts in a pid namespace that cannot be seen from here. unseen: it was not looked at."""


@dataclass(frozen=True)
class Claim:
    """A piece of memory, which NVML lists under one pid or under none, and who can hold it."""

    pid: int | None
    """As listed. None: memory in use beyond the list."""
    bytes: int | None
    """Never more than the GPU has in use beside the other claims. None: NVML does not say."""
    fate: Fate
    """Of the pid. Of memory without a pid: `gone`; `unseen` if the list was not seen; `hidden` if the list may be short."""
    owners: tuple[Process, ...]
    """One of these holds it, or several share it; oldest first. Empty: nobody was found."""
    as_listed: int | None = None
    """Bytes as NVML lists them."""


class Machine:
    """A snapshot, asked about its processes."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    @cached_property
    def own(self) -> frozenset[int]:
        """Pids of the probe, of the caller, and of what the caller started."""
        viewer = self.snapshot.viewer
        children: dict[int, list[int]] = defaultdict(list)
        for process in self.snapshot.by_pid.values():
            children[process.ppid].append(process.pid)
        callers = self._callers()
        pids = {viewer.pid, *callers}
        todo = [viewer.pid, *callers]
        while todo:
            for pid in children.pop(todo.pop(), ()):
                pids.add(pid)
                todo.append(pid)
        return frozenset(pids)

    @cached_property
    def above(self) -> frozenset[int]:
        """Pids above the caller: a shell, a notebook, init. What they hold, the caller will not get."""
        return frozenset(self.snapshot.viewer.ancestors) - self.own

    def _callers(self) -> list[int]:
        """The probe's parent, and the draftproofs directly above it.

        Not the shell, the ssh session and init above those: what else they started is not the caller's, and a worker that
        outlived its server hangs on one of them.
        """
        callers: list[int] = []
        for pid in self.snapshot.viewer.ancestors:
            process = self.snapshot.process(pid)
            if not callers and process is not None and process.comm == "sudo":
                continue
            if pid <= 1 or (process is not None and process.comm in LAUNCHERS):
                break
            if callers and (process is None or not _DRAFTPROOF.search(process.command)):
                break
            callers.append(pid)
        return callers

    @property
    def sees_all_pids(self) -> bool:
        """Whether NVML lists all processes, by numbers that mean the same here. In a container it depends on the driver: the
        open kernel modules leave out what is in other pid namespaces, the others list it by the host's numbers."""
        return self.snapshot.viewer.initial_namespace is True

    @property
    def partial(self) -> bool:
        """Whether a process can be there without being among those seen."""
        return self.snapshot.processes is None or any(one.what == "processes" for one in self.snapshot.unseen)

    def fate(self, gpu: Gpu, pid: int) -> Fate:
        """What became of a pid that NVML lists on this GPU."""
        process = self.snapshot.process(pid)
        if not self.sees_all_pids:
            # The number may be another process here. Only one that has the GPU open is taken for the one that is meant.
            return "alive" if process is not None and has_open(process, gpu) else "hidden"
        if process is None:
            return "unseen" if self.partial or self.snapshot.why_unseen(f"process.{pid}") else "gone"
        if process.ended:
            return "ended"
        # One that may be looked into and has no GPU open cannot be the one that was listed.
        return "recycled" if process.device_fds is not None and not any(_NODE.fullmatch(name) for name in process.device_fds) else "alive"

    @cached_property
    def computing(self) -> frozenset[int]:
        """Pids that live and are listed on some GPU: with a context of their own, which a forked child cannot have."""
        return frozenset(pid for gpu in self.snapshot.gpus for pid in gpu.listed if self.fate(gpu, pid) == "alive")

    def candidates(self, gpu: Gpu) -> tuple[Process, ...]:
        """Those who can hold memory of this GPU without being listed, oldest first.

        Not the caller's own: they may have opened the GPU a moment ago, and what they seem to hold would not block.
        """
        found = [
            process
            for process in self.snapshot.processes or ()
            if has_open(process, gpu)
            and "nvidia-uvm" in (process.device_fds or ())
            and not process.ended
            and process.pid not in self.computing
            and process.pid not in self.own | self.above
            and not is_system(process)
        ]
        return tuple(sorted(found, key=lambda process: (process.start_ticks, process.pid)))

    def claims(self, gpu: Gpu) -> tuple[Claim, ...]:
        """All memory of a GPU, each piece once: one claim for each listed pid, and one for what is beyond the list."""
        candidates = self.candidates(gpu)
        left = None if gpu.memory is None else gpu.memory.used_now
        fates: dict[int, Fate] = {pid: self.fate(gpu, pid) for pid in gpu.listed}
        claims = []
        # Where the list adds up to more than is in use, somebody ended during the look: those who live come first.
        for pid in sorted(fates, key=lambda pid: fates[pid] != "alive"):
            listed = gpu.listed[pid]
            held = listed if listed is None or left is None else min(listed, left)
            left = None if left is None else left - (held or 0)
            claims.append(Claim(pid, held, fates[pid], self._owners(pid, fates[pid], held, candidates), listed))
        if gpu.memory is not None and left is not None and None not in gpu.listed.values():
            tolerance = UNOWNED_TOLERANCE if gpu.memory.version == 2 else UNOWNED_TOLERANCE_V1
            if left > tolerance:
                fate: Fate = "unseen" if gpu.processes is None else "gone" if self.sees_all_pids else "hidden"
                claims.append(Claim(None, left, fate, () if fate == "hidden" else candidates))
        return tuple(claims)

    def _owners(self, pid: int, fate: Fate, held: int | None, candidates: tuple[Process, ...]) -> tuple[Process, ...]:
        process = self.snapshot.process(pid)
        if fate in ("hidden", "unseen"):
            return ()
        if fate == "alive" and process is not None:
            return (process,)
        if held == 0:  # it ended during the look, and nobody kept anything
            candidates = ()
        if fate == "ended" and process is not None:
            heirs = [one for one in candidates if one.uid == process.uid and one.start_ticks >= process.start_ticks]
            return tuple(heirs) or (process,)
        # Linux gives no number anew while a session or a process group goes by it: these are its children for sure.
        children = tuple(one for one in candidates if pid in (one.session, one.pgrp))
        return children or candidates


def has_open(process: Process, gpu: Gpu) -> bool:
    """Whether the process is seen to have the GPU's device file open."""
    return gpu.minor is not None and f"nvidia{gpu.minor}" in (process.device_fds or ())


def is_system(process: Process) -> bool:
    """Whether it goes by the name of a service, a monitor or a display server. Anybody can take such a name."""
    return process.comm.lower().startswith(_SYSTEM)


_NODE = re.compile(r"nvidia\d+|nvidia-uvm")
"""Device files that a program with memory has open; `nvidiactl` alone only asks."""

_DRAFTPROOF = re.compile(r"(^|[/\s])draftproof(\s|$)")
"""`draftproof`, `/venv/bin/draftproof run` and `python -m draftproof` as a command line."""

LAUNCHERS = (
    *("ash", "bash", "busybox", "csh", "cron", "dash", "fish", "ksh", "sh", "tcsh", "zsh"),
    *("init", "systemd", "login", "su", "sshd", "sshd-session", "screen", "SCREEN", "tmux", "tmux: server"),
    *("slurmstepd", "containerd-shim", "docker-init", "dumb-init", "s6-svscan", "supervisord", "tini"),
)
"""Names (`comm`) of what starts other people's work too."""

_SYSTEM = (
    *("nvidia-persiste", "nv-hostengine", "nv-fabricmanage", "nvidia-fabricma", "nvidia-powerd", "nvidia-imex", "nvsm"),
    *("dcgm-exporter", "dcgmi", "nvidia_gpu_expo", "nvidia_gpu_prom", "nvidia-device-p", "gpu-feature-dis", "prometheus-dcgm"),
    *("nvidia-smi", "nvidia-settings", "nvtop", "nvitop", "gpustat", "btop", "gpud", "telegraf", "netdata", "nvidia.plugin"),
    *("xorg", "xwayland", "gnome-shell", "gnome-remote-de", "kwin_", "plasmashell", "sway", "weston", "mutter", "hyprland", "gdm", "sddm"),
)
"""How their names (`comm`, 15 characters, in lower case) begin."""
