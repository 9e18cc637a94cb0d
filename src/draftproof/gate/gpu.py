"""Are the GPUs there, free, sound and well connected? Judged on what `machine/probe.py` saw of one host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draftproof.gate.finding import SEVERITY, Finding, failed, passed, unsure, warned
from draftproof.machine.claims import UNOWNED_TOLERANCE_V1
from draftproof.machine.holders import summary
from draftproof.machine.look import Look
from draftproof.machine.snapshot import MIB, Gpu

STEADY_MIB = 16
"""Movement of the memory in use within one look that is no movement: clients of NVML itself come and go."""
DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}
"""Oldest driver branch for each CUDA major (NVIDIA, CUDA compatibility guide, minor-version compatibility)."""
CUDA_OF_ARCHITECTURE = {(8, 9): (11, 8), (9, 0): (11, 8), (10, 0): (12, 8), (10, 3): (12, 9), (12, 0): (12, 8), (12, 1): (12, 9)}
"""First CUDA release that compiles for an architecture (release notes of the toolkit)."""
MOST_DIGITS = 5
"""Of a part of a version."""
OLDEST_ARCHITECTURE = {13: (7, 5), 12: (5, 0)}
"""What a CUDA major still compiles for."""


def gpu_count(look: Look) -> Finding:
    """The GPUs that are needed are there, whole and open for work."""
    snapshot, wanted = look.seen, look.needs.gpus
    if wanted == ():
        return passed("gpu.count", "The work needs no GPU.")
    # Before "there is none": a library that hangs or does not fit its driver is not there either.
    if look.driver_silent is not None:
        return unsure("gpu.count", look.driver_silent, _HUNG)
    if not snapshot.nvml.present:
        if wanted is None and not look.needs.any_gpu:
            return passed("gpu.count", "This machine has no NVIDIA GPU; what applies to a CPU was checked.")
        return failed("gpu.count", f"There is no NVIDIA driver: {snapshot.nvml.why}.", "Install the driver, or set run.device=cpu.")
    there = [gpu.index for gpu in snapshot.gpus]
    missing = sorted(set(wanted or ()) - set(there))
    if missing or not there:
        lacks = f"GPU {_list(missing)} is not there; there are {len(there)}." if there else "The driver runs, but sees no GPU."
        return failed("gpu.count", lacks, "Mend machine.gpus, or look for a GPU that fell off the bus (dmesg: Xid 79).")
    split = [gpu.index for gpu in look.gpus if gpu.mig is not None and gpu.mig.enabled]
    if split:
        return failed("gpu.count", f"GPU {_list(split)} is split by MIG.", "Give other GPUs, or have MIG switched off.")
    closed = [gpu.index for gpu in look.gpus if gpu.compute_mode == "prohibited"]
    if closed:
        return failed("gpu.count", f"GPU {_list(closed)} is in compute mode prohibited.", "Have an administrator set it to default.")
    return passed("gpu.count", f"{len(look.gpus)} of {len(there)} GPUs.")


def gpu_model(look: Look) -> Finding:
    """They are alike."""
    if not look.gpus:
        return passed("gpu.model", _NONE)
    unnamed = [gpu.index for gpu in look.gpus if gpu.name is None]
    if unnamed:
        return unsure("gpu.model", f"GPU {_list(unnamed)} does not say what it is.", _HUNG)
    totals = {gpu.memory.total // MIB for gpu in look.gpus if gpu.memory is not None}  # gpu.memory tells of the others
    models = sorted({f"{gpu.name}, {gpu.memory.total // MIB:,} MiB" if gpu.memory else str(gpu.name) for gpu in look.gpus})
    if len({gpu.name for gpu in look.gpus}) > 1 or len(totals) > 1:
        return failed("gpu.model", f"The GPUs differ: {'; '.join(models)}.", "Choose equal ones with machine.gpus.")
    return passed("gpu.model", f"{len(look.gpus)} x {models[-1]}.")


def gpu_memory(look: Look) -> Finding:
    """The memory in use is low, stays so over the samples, and leaves what the work needs."""
    worst = [_memory_of(look, gpu) for gpu in look.gpus]
    if not worst:
        return passed("gpu.memory", _NONE)
    found = max(worst, key=lambda finding: SEVERITY[finding.status])
    same = [finding for finding in worst if finding.status == found.status]
    if found.status == "pass":
        free = min(gpu.memory.free_mib for gpu in look.gpus if gpu.memory is not None)
        return passed("gpu.memory", f"At most {look.needs.allowance_mib:,} MiB in use on each, steady; at least {free:,} MiB free.")
    return replace(found, evidence=" ".join(finding.evidence for finding in same))


def _memory_of(look: Look, gpu: Gpu) -> Finding:
    name, snapshot, allowance = "gpu.memory", look.seen, look.needs.allowance_mib
    if gpu.memory is None:
        why = snapshot.why_unseen(f"gpu.{gpu.index}.memory") or "the driver did not say"
        return unsure(name, f"GPU {gpu.index}: its memory could not be read: {why}.", _HUNG)
    own = look.own_bytes(gpu.index)
    used = [max(0, sample - own) / MIB for sample in gpu.memory.used]
    spread = max(used) - min(used)
    if spread > STEADY_MIB:
        return failed(
            name,
            f"GPU {gpu.index}: its memory moves, {min(used):,.0f} to {max(used):,.0f} MiB within the look.",
            "Somebody loads or frees; wait until it is steady, or see gpu.holders.",
        )
    if max(used) > allowance:
        reserve = UNOWNED_TOLERANCE_V1 / MIB if gpu.memory.version == 1 else 0  # which version 1 counts as in use
        if reserve and max(used) <= allowance + reserve and not any(holder.gpu == gpu.index for holder in look.blockers):
            return unsure(
                name,
                f"GPU {gpu.index}: {max(used):,.0f} MiB in use, in which this old driver counts its own share.",
                "If that is the idle level of this machine, set gates.gpu_memory_mib to it.",
            )
        return failed(
            name,
            f"GPU {gpu.index}: {max(used):,.0f} MiB in use, {allowance:,} allowed.",
            "See gpu.holders; if that is the idle level of this machine, set gates.gpu_memory_mib to it.",
        )
    if look.needs.gpu_bytes is not None and gpu.memory.free + own < look.needs.gpu_bytes:
        return failed(
            name,
            f"GPU {gpu.index}: {(gpu.memory.free + own) / MIB:,.0f} MiB free, at least {look.needs.gpu_bytes / MIB:,.0f} MiB needed.",
            "Use more or larger GPUs, or a smaller target.",
        )
    return passed(name, f"GPU {gpu.index}: {max(used):,.0f} MiB in use.")


def gpu_holders(look: Look) -> Finding:
    """No process that is not ours holds device memory."""
    if not look.gpus:
        return passed("gpu.holders", _NONE)
    snapshot = look.seen
    unlisted = [gpu.index for gpu in look.gpus if gpu.processes is None]
    blockers = look.blockers
    if blockers:
        gpus = ",".join(str(index) for index in sorted({holder.gpu for holder in blockers}))
        host = "" if look.reach.host is None else f" --host {look.reach.host}"
        return failed("gpu.holders", f"{summary(blockers)}.", f"See what can be stopped: draftproof reclaim --gpus {gpus}{host}")
    if unlisted:
        why = snapshot.why_unseen(f"gpu.{unlisted[0]}.processes") or "the driver did not say"
        return unsure("gpu.holders", f"GPU {_list(unlisted)}: its processes could not be read: {why}.", _HUNG)
    if snapshot.processes is None:
        return unsure("gpu.holders", snapshot.why_unseen("processes") or "The processes could not be read.", "Look as another user.")
    others = sum(holder.kind != "driver" for holder in look.holders)
    return passed("gpu.holders", f"Nobody holds them{f' ({others} watch or are this run)' if others else ''}.")


def gpu_health(look: Look) -> Finding:
    """No fault that the driver knows of. Xid messages are told where the kernel's log can be read."""
    if not look.gpus:
        return passed("gpu.health", _NONE)
    snapshot, faults = look.seen, []
    for gpu in look.gpus:
        health = gpu.health
        if health is None:
            why = snapshot.why_unseen(f"gpu.{gpu.index}.health") or "the driver did not say"
            return unsure("gpu.health", f"GPU {gpu.index}: {why}.", _HUNG)
        told = [
            (f"{health.ecc_uncorrected} uncorrected memory errors since its reset", bool(health.ecc_uncorrected)),
            ("a row remap waits for a reset", bool(health.remap_pending)),
            ("a row remap failed", bool(health.remap_failed)),
            (f"the driver asks for: {health.recovery_action}", health.recovery_action not in (None, "none")),
            (f"its clocks are held down by the hardware ({', '.join(health.slowdown or ())})", bool(health.slowdown)),
        ]
        faults += [f"GPU {gpu.index}: {what}." for what, true in told if true]
    if faults:
        return failed("gpu.health", " ".join(faults), "Drain it and have it reset or replaced; that is for a person to decide.")
    if snapshot.xid is None:
        return passed("gpu.health", "No fault known to the driver; the kernel's log (Xid) could not be read.")
    ours = [event for event in snapshot.xid if any(gpu.bus_id == event.bus_id for gpu in look.gpus)]
    if ours:
        last = ours[-1]
        return warned("gpu.health", f"{len(ours)} Xid messages, the last {last.xid} on {last.bus_id}: {last.text[:80]}", "Read dmesg.")
    return passed("gpu.health", "No fault known to the driver, no Xid message.")


def gpu_links(look: Look) -> Finding:
    """The GPUs reach each other and the host at full width. Capabilities only: `--deep` proves a copy."""
    if not look.gpus:
        return passed("gpu.links", _NONE)
    snapshot, slow = look.seen, []
    lanes = {gpu.index: (gpu.pcie.width, gpu.pcie.max_width) for gpu in look.gpus if gpu.pcie is not None}
    slow += [f"GPU {index} has {width} of {most} PCIe lanes." for index, (width, most) in lanes.items() if width < most]
    ours = {gpu.index for gpu in look.gpus}
    pairs = [link for link in snapshot.links or () if link.from_ in ours and link.to in ours]
    untold = [link for link in pairs if link.read is None or link.write is None]
    if len(ours) > 1 and (snapshot.links is None or untold):
        return unsure("gpu.links", snapshot.why_unseen("links") or "The links could not be read.", _HUNG)
    blocked = [link for link in pairs if link.read != "ok" or link.write != "ok"]
    if blocked:
        first = blocked[0]
        slow.append(
            f"{len(blocked)} of {len(pairs)} directed pairs have no peer access (first: {first.from_} to {first.to}, {first.read})."
        )
    nodes = sorted({gpu.numa_node for gpu in look.gpus if gpu.numa_node is not None})
    told = f"{len(pairs)} directed pairs, NUMA node{'s' if len(nodes) != 1 else ''} {_list(nodes) or 'not told'}."
    if slow:
        return warned("gpu.links", " ".join([*slow, told]), "Copies between GPUs will be slow; look at risers, IOMMU and ACS.")
    width = "Full PCIe width" if len(lanes) == len(ours) else "PCIe width not told"
    return passed("gpu.links", f"{width}; {'all peers reach each other; ' if pairs else ''}{told}")


def gpu_driver(look: Look) -> Finding:
    """Driver, CUDA, the torch build and the GPU's architecture fit together. Read from files; torch is not imported."""
    snapshot = look.seen
    if not look.gpus:
        return passed("gpu.driver", _NONE)
    if snapshot.nvml.driver is None:
        return unsure("gpu.driver", snapshot.why_unseen("nvml.driver") or "The driver does not say its version.", _HUNG)
    evidence = f"Driver {snapshot.nvml.driver}, CUDA {snapshot.nvml.cuda or 'not told'}"
    torch = snapshot.torch
    if torch is None:
        return passed("gpu.driver", f"{evidence}; no torch beside {snapshot.python}.")
    evidence += f", torch {torch.version} for CUDA {torch.cuda or 'none'}."
    if torch.cuda is None:
        return warned("gpu.driver", evidence, "This torch is a CPU build; install one for CUDA to train or extract on these GPUs.")
    built, branch = _version(torch.cuda), _version(snapshot.nvml.driver)
    if not built or not branch:
        return unsure("gpu.driver", evidence, "One of these versions is in a form that is not known; look by hand.")
    needed = DRIVER_OF_CUDA.get(built[0], 0)
    if branch[0] < needed:
        return failed("gpu.driver", f"{evidence} CUDA {built[0]} needs driver {needed}.", "Update the driver, or install an older torch.")
    for gpu in look.gpus:
        architecture = gpu.compute_capability
        first = CUDA_OF_ARCHITECTURE.get(architecture, (0, 0)) if architecture else (0, 0)
        if architecture and (built < first or architecture < OLDEST_ARCHITECTURE.get(built[0], (0, 0))):
            needs = f"needs CUDA {first[0]}.{first[1]} or later" if built < first else f"is too old for CUDA {built[0]}"
            return failed(
                "gpu.driver", f"{evidence} {gpu.name} (sm_{architecture[0]}{architecture[1]}) {needs}.", "Install a torch for it."
            )
    return passed("gpu.driver", evidence)


_NONE = "No GPU is looked at."
_HUNG = "The driver hangs or refuses; see dmesg. If it stays so, the GPU needs a reset, which is for a person to decide."


def _version(text: str) -> tuple[int, ...]:
    """`13.0` -> (13, 0); empty where it is no version."""
    parts = text.split(".")[:2]
    return tuple(map(int, parts)) if all(part.isascii() and part.isdigit() and len(part) <= MOST_DIGITS for part in parts) else ()


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
