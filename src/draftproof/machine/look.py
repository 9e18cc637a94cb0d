"""Look at machines, and remember what is needed of them: what the checks of `gate/machine.py` judge.

looks = look_at([Reach(), Reach("node7")], Needs(gpus=(0, 1)))
looks[0].snapshot.gpus, looks[0].holders
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof.errors import DraftproofError
from draftproof.machine.holders import Holder, find_holders
from draftproof.machine.remote import Answer, Reach, ask_all
from draftproof.machine.snapshot import MIB, Gpu, Snapshot, parse

if TYPE_CHECKING:
    from draftproof.recipe import Recipe
    from draftproof.stage import StagePlan

DEADLINE_S = 4.0
"""For one look at one machine. A driver that has not answered by then is a finding of its own."""
CALL_S = 1.0
"""For one call into the driver, which takes milliseconds on a healthy GPU."""
SAMPLES, INTERVAL_S = 3, 0.1
"""Readings of the memory in use: it must be low and stay so."""
TRAVEL_S = 8.0
"""Beyond the deadline, for Python to start and ssh to connect."""

PARTS = ("gpus", "links", "processes", "host")
QUICK = ("gpus", "processes")
"""Who holds the GPUs, without the rest."""


@dataclass(frozen=True)
class DiskNeed:
    """What will be written where."""

    path: Path
    bytes: int = 0
    files: int = 0


@dataclass(frozen=True)
class Needs:
    """What a stage, or whoever asks, needs of a machine."""

    gpus: tuple[int, ...] | None = None
    """GPUs by NVML's numbers; empty: none, None: every one that is there."""
    allowance_mib: int = 0
    """Memory that may be in use on a free GPU."""
    gpu_bytes: int | None = None
    """What each GPU must have free for the work; None: not known."""
    host_bytes: int | None = None
    """Forecast of the peak memory of the host."""
    any_gpu: bool = False
    """Whether the work needs a GPU at all, where `gpus` does not name them."""
    disks: tuple[DiskNeed, ...] = ()
    ports: tuple[int, ...] = ()
    """TCP ports to listen on."""

    @property
    def least_host_bytes(self) -> float | None:
        """Below this the work does not begin, nor go on: half the forecast, which may be too high."""
        return None if self.host_bytes is None else self.host_bytes / 2


@dataclass(frozen=True)
class Look:
    """What was seen of one machine, against what is needed of it."""

    reach: Reach
    needs: Needs
    snapshot: Snapshot | None
    """None: it could not be looked at, and `error` says why."""
    error: DraftproofError | None = None
    partial: str | None = None
    """Why less was seen than asked for."""
    seconds: float = 0.0
    between: tuple[float, float] = (0.0, 0.0)
    """When it was asked and when the answer was there, by this machine's clock (Unix seconds)."""

    @property
    def seen(self) -> Snapshot:
        """The snapshot, where there is one."""
        assert self.snapshot is not None, "judged only where something was seen"
        return self.snapshot

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that are needed and there."""
        if self.snapshot is None:
            return ()
        wanted = self.needs.gpus
        return tuple(gpu for gpu in self.snapshot.gpus if wanted is None or gpu.index in wanted)

    @cached_property
    def holders(self) -> list[Holder]:
        """Who holds them."""
        return [] if self.snapshot is None else find_holders(self.snapshot, [gpu.index for gpu in self.gpus])

    @property
    def driver_silent(self) -> str | None:
        """Why the driver did not say which GPUs there are: it hangs, or its library cannot be used. None: it did, or there is none."""
        unseen = {one.what: one.why for one in self.seen.unseen}
        return unseen.get("nvml") or unseen.get("nvml.count") or unseen.get("probe")

    @property
    def blind(self) -> str | None:
        """Why nothing can be said of who holds the needed GPUs; None: it can."""
        if self.snapshot is None:
            return self.error.what if self.error is not None else "it was not looked at"
        if self.driver_silent is not None:
            return self.driver_silent
        missing = sorted(set(self.needs.gpus or ()) - {gpu.index for gpu in self.gpus})
        if missing:
            return f"GPU {', '.join(map(str, missing))} is not there"
        for gpu in self.gpus:
            for part, seen in (("memory", gpu.memory), ("processes", gpu.processes)):
                if seen is None:
                    return f"GPU {gpu.index}: its {part} could not be read: {self.snapshot.why_unseen(f'gpu.{gpu.index}') or 'not told'}"
        if self.gpus and self.snapshot.processes is None:
            return self.snapshot.why_unseen("processes") or "the processes could not be read"
        return None

    @property
    def blockers(self) -> list[Holder]:
        """Those that stand in the way. Memory that no process owns does not within the allowance, which is for just that."""
        allowance = self.needs.allowance_mib * MIB
        return [
            holder
            for holder in self.holders
            if holder.blocking and not (holder.kind == "driver" and holder.bytes is not None and holder.bytes <= allowance)
        ]

    def own_bytes(self, index: int) -> int:
        """Bytes on a GPU that this run itself holds."""
        return sum(holder.bytes or 0 for holder in self.holders if holder.gpu == index and holder.kind == "self" and not holder.blocking)


def look_at(
    reaches: Sequence[Reach],
    needs: Needs,
    *,
    parts: Sequence[str] = PARTS,
    samples: int = SAMPLES,
    interval_s: float = INTERVAL_S,
    deadline_s: float = DEADLINE_S,
) -> list[Look]:
    """Look at all of them at once; one that does not answer is a Look without a snapshot. Never raises for a host's sake."""
    request: dict[str, Any] = {
        "deadline_s": deadline_s,
        "call_s": CALL_S,
        "samples": samples,
        "interval_s": interval_s,
        "parts": list(parts),
        "paths": [str(disk.path) for disk in needs.disks],
        "ports": list(needs.ports),
    }
    asked = time.time()
    answers = ask_all(reaches, "probe", lambda reach: request, deadline_s + TRAVEL_S)
    return [_look(reach, needs, answer, asked) for reach, answer in zip(reaches, answers, strict=True)]


def _look(reach: Reach, needs: Needs, answer: Answer | DraftproofError, asked: float) -> Look:
    if isinstance(answer, DraftproofError):
        return Look(reach, needs, None, answer)
    try:
        snapshot = parse(answer.document)
    except DraftproofError as error:
        return Look(reach, needs, None, error, seconds=answer.seconds)
    # Each host's own answer: one that is slow must not excuse the clocks of the others.
    return Look(reach, needs, snapshot, None, answer.partial, answer.seconds, (asked, asked + answer.seconds))


def needs_of(recipe: Recipe, device: str, plan: StagePlan | None) -> Needs:
    """What a stage of this recipe needs of the machine it runs on."""
    wanted = recipe.machine.gpus
    gpus = (visible_gpus() if device == "cuda" else ()) if wanted == "auto" else None if wanted == "all" else wanted
    return Needs(
        gpus=gpus,
        any_gpu=device == "cuda",
        allowance_mib=recipe.gates.gpu_memory_mib,
        gpu_bytes=plan.gpu_memory if plan is not None and device == "cuda" else None,
        host_bytes=plan.memory if plan is not None and device == "cpu" else None,
    )


def visible_gpus() -> tuple[int, ...] | None:
    """The GPU that torch takes first, by NVML's number; None, which stands for all, where it is named in another way.

    Where GPUs of several models are mixed, CUDA counts the fastest first, NVML by bus; CUDA_DEVICE_ORDER=PCI_BUS_ID makes
    both count alike.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return (0,)
    first = named.split(",")[0].strip()
    return (int(first),) if first.isdigit() else None
