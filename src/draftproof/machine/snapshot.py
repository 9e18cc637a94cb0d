"""What the probe saw of one machine, typed: `parse` reads the document that `probe.py` prints (schema 1).

A document comes from another process, often on another host, so nothing in it is believed before it is checked: types are strict,
numbers, strings and lists are bounded, and a key that stands twice is refused. Unknown keys are passed over, so that a newer probe
of the same schema can be read. `None` means "not seen" everywhere, never "none there"; `Snapshot.unseen` says why.
"""

from __future__ import annotations

import json
import math
import re
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from draftproof.errors import DraftproofError, printable

SCHEMA = 1
"""The one schema that this module reads."""
MAX_BYTES = 64_000_000
"""A document of a busy host with 8 GPUs has some 200 kB; one of more than this is no document of the probe."""
MIB = 2**20
"""Bytes in a MiB, the unit that people read GPU memory in."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
Limit = Annotated[int, Field(ge=-1, lt=2**63)]
Number = Annotated[float, Field(ge=-1e15, le=1e15)]
Text = Annotated[str, Field(max_length=8192)]


class Seen(BaseModel):
    """A part of the document: immutable, strict about types, open to unknown keys."""

    model_config = ConfigDict(
        extra="ignore", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True, populate_by_name=True
    )


class Viewer(Seen):
    """As whom, and from where, the probe looked."""

    uid: Count
    """Numeric user id of the probe; 0 sees the open files of everybody."""
    user: Text
    """Name of that user."""
    pid: Count
    """The probe's own pid, in its own pid namespace."""
    ancestors: Annotated[tuple[Count, ...], Field(max_length=4096)]
    """Pids above the probe, its parent first, up to 1."""
    initial_namespace: bool | None
    """Whether the probe's pid namespace is the host's first one: only then are NVML's pids sure to be those of /proc."""
    container: Text | None
    """The container that the probe ran in, as in `Process.container`."""


class Unseen(Seen):
    """Something that the probe could not see."""

    what: Text
    """Dotted name, for example `gpu.3.memory`."""
    why: Text
    """One sentence."""


class Nvml(Seen):
    """NVIDIA's management library on that host."""

    present: bool
    """Whether it was loaded and answered."""
    why: Text | None
    """Why it is not present."""
    driver: Text | None
    """Driver version, for example `580.65.06`."""
    cuda: Text | None
    """Highest CUDA version that the driver supports, for example `13.0`."""


class Memory(Seen):
    """Memory of one GPU, in bytes."""

    version: Literal[1, 2]
    """NVML's reading. Version 1 counts what the driver reserves as used (615 MiB on an idle H200); version 2 does not."""
    total: Count
    """All of it."""
    reserved: Count | None
    """Kept by the driver; None in version 1."""
    used: Annotated[tuple[Count, ...], Field(min_length=1, max_length=1024)]
    """In use, one reading per sample, the latest last."""
    free: Count
    """Free at the latest sample."""

    @property
    def used_now(self) -> int:
        """Bytes in use at the latest sample."""
        return self.used[-1]

    @property
    def used_mib(self) -> int:
        """`used_now` in MiB, rounded up: one byte in use is not 0 MiB."""
        return -(-self.used_now // MIB)

    @property
    def free_mib(self) -> int:
        """`free` in MiB, rounded down."""
        return self.free // MIB


class Listed(Seen):
    """One line of NVML's process list of a GPU."""

    pid: Count
    """As the host's first pid namespace counts; the process may be gone and its memory still held by a forked child."""
    kind: Literal["compute", "graphics", "mps"]
    """Which of NVML's three lists; `mps` holds the clients of an MPS server. One process may stand in several."""
    bytes: Count | None
    """Device memory in bytes. None where NVML does not say."""


class Mig(Seen):
    """Multi-Instance GPU."""

    enabled: bool
    """Whether the GPU is split."""
    instances: Count
    """Compute instances that exist."""


class Health(Seen):
    """What would make a GPU unfit, as NVML says it."""

    ecc_uncorrected: Count | None
    """Uncorrected memory errors since the driver was loaded."""
    remap_pending: bool | None
    """A row remap waits for a reset."""
    remap_failed: bool | None
    """A row could not be remapped."""
    recovery_action: Literal["none", "reset", "reboot", "drain_p2p", "drain_and_reset"] | None
    """What the driver wants done."""
    slowdown: Annotated[tuple[Text, ...], Field(max_length=64)] | None
    """Hardware reasons for lower clocks: hw_slowdown, hw_thermal, hw_power_brake."""
    temperature_c: Annotated[int, Field(ge=-300, le=1000)] | None
    """Degrees Celsius of the GPU."""


class Pcie(Seen):
    """The GPU's PCIe link. The generation drops when the GPU is idle; the width does not."""

    width: Count
    """Lanes now."""
    max_width: Count
    """Lanes that GPU and slot can have."""
    generation: Count
    """PCIe generation now."""
    max_generation: Count
    """PCIe generation that GPU and slot can have."""


class Gpu(Seen):
    """One GPU."""

    index: Count
    """NVML's index."""
    uuid: Text | None
    """`GPU-...`."""
    name: Text | None
    """The model's name."""
    minor: Count | None
    """N of its device file /dev/nvidiaN, which need not be `index`."""
    bus_id: Text | None
    """PCI address in sysfs' form, lower case: `0000:18:00.0`."""
    numa_node: Count | None
    """NUMA node of its PCI slot."""
    compute_capability: tuple[Count, Count] | None
    """Major and minor, for example (9, 0)."""
    memory: Memory | None
    """Its memory."""
    processes: Annotated[tuple[Listed, ...], Field(max_length=100_000)] | None
    """Who holds memory, as NVML lists them, those of MIG instances included."""
    mig: Mig | None
    """How it is split."""
    health: Health | None
    """Errors and slowdowns."""
    pcie: Pcie | None
    """Its link."""
    compute_mode: Literal["default", "exclusive_process", "prohibited"] | None
    """Who may open it."""
    persistence: bool | None
    """Whether the driver stays loaded without a client."""

    @cached_property
    def listed(self) -> dict[int, int | None]:
        """Pid -> bytes of the process list; one entry per pid, None where NVML does not say the bytes. Empty where not seen.

        A process in two MIG instances stands twice in one list and its bytes add up; one that both computes and draws stands in
        two lists with the same bytes, which count once.
        """
        sums: dict[int, dict[str, int | None]] = {}
        for line in self.processes or ():
            kinds = sums.setdefault(line.pid, {})
            before = kinds.get(line.kind, 0)
            kinds[line.kind] = None if before is None or line.bytes is None else before + line.bytes
        known = {pid: [size for size in kinds.values() if size is not None] for pid, kinds in sums.items()}
        return {pid: max(sizes) if sizes else None for pid, sizes in known.items()}


class Link(Seen):
    """One direction between two GPUs: what the driver says is possible, not what was measured."""

    from_: Annotated[Count, Field(alias="from")]
    """Index of the GPU that reads or writes."""
    to: Count
    """Index of the GPU whose memory it is."""
    read: Text | None
    """`ok`, or the name of NVML's status for peer-to-peer reads."""
    write: Text | None
    """The same for writes."""
    ancestor: Literal["internal", "single", "multiple", "hostbridge", "node", "system"] | None
    """The nearest thing that both hang on."""


class Xid(Seen):
    """A driver error from the kernel log."""

    time: Number | None
    """Unix seconds."""
    bus_id: Text
    """PCI address of the GPU."""
    xid: Count
    """NVIDIA's error number."""
    text: Text
    """The line."""


class Engine(Seen):
    """An engine that draftproof started, known by its record."""

    what: Text
    """For example `vLLM`."""
    run: Text
    """The run folder it was started for."""


class Process(Seen):
    """One process. All pids are those of the probe's pid namespace."""

    pid: Count
    """Process id."""
    ppid: Count
    """Pid of its parent; an orphan has that of init, of a subreaper or of a shell."""
    start_ticks: Count
    """Start in clock ticks since boot (field 22 of /proc/PID/stat): with the pid, it names the process for good."""
    started: Number
    """Start in unix seconds."""
    uid: Count
    """User id."""
    user: Text
    """User name."""
    comm: Text
    """Name, cut to 15 characters by the kernel."""
    command: Text
    """Command line with secrets masked, at most 300 characters. Empty for kernel threads and zombies."""
    state: Annotated[str, Field(min_length=1, max_length=1)]
    """Letter of /proc/PID/stat: R, S, D (uninterruptible), Z (zombie), T (stopped), ..."""
    session: Count
    """Session id: the pid of its leader."""
    pgrp: Count
    """Process group id: the pid of its leader."""
    rss: Count
    """Resident memory in bytes."""
    cgroup: Text | None
    """Path in the cgroup tree."""
    unit: Text | None
    """systemd unit, for example `vllm.service`."""
    unit_scope: Literal["system", "user"] | None
    """Whose systemd."""
    container: Text | None
    """Runtime and the first 12 characters of the id: `docker:0123456789ab`."""
    pid_namespace: Count | None
    """Inode of its pid namespace. None if it may not be read."""
    device_fds: Annotated[tuple[Text, ...], Field(max_length=4096)] | None
    """Device files that it holds open: nvidia0, nvidia-uvm, nvidiactl, ... None if they may not be read."""
    engine: Engine | None
    """The engine of ours that it belongs to."""

    @property
    def ended(self) -> bool:
        """Whether it runs no more and only waits to be collected by its parent."""
        return self.state in ("Z", "X", "x")


class HostMemory(Seen):
    """Memory of the host, in bytes."""

    total: Count
    """MemTotal."""
    available: Count
    """MemAvailable."""
    swap_free: Count
    """SwapFree."""
    cgroup_limit: Count | None
    """The lowest limit of the probe's cgroup and those above it. None: unlimited."""
    cgroup_used: Count | None
    """What is used under that limit."""


class StaleSegment(Seen):
    """A shared memory file of the viewer's that no process has mapped or open."""

    name: Text
    """File name."""
    bytes: Count
    """Size."""
    age_s: Number
    """Seconds since it was changed."""


class SharedMemory(Seen):
    """The shared memory file system of the host, in bytes."""

    total: Count
    """Size of the file system."""
    free: Count
    """Free for the viewer."""
    stale: Annotated[tuple[StaleSegment, ...], Field(max_length=100_000)]
    """What was left behind: psm_*, nccl-*, sem.*."""


class Disk(Seen):
    """The file system of one folder that was asked for."""

    path: Text
    """The folder, as asked."""
    existing: Text
    """The nearest folder above it that exists."""
    free_bytes: Count
    """Free for the viewer."""
    total_bytes: Count
    """Size of the file system."""
    free_inodes: Count | None
    """Free inodes. None where the file system has no such limit."""
    read_only: bool
    """Whether it is mounted read-only."""


class Limits(Seen):
    """Resource limits, (soft, hard); -1 is unlimited."""

    nofile: tuple[Limit, Limit]
    """Open files."""
    memlock: tuple[Limit, Limit]
    """Bytes that may be locked in memory."""
    nproc: tuple[Limit, Limit]
    """Processes of the user."""


class PortOwner(Seen):
    """Who listens on a port."""

    pid: Count
    """Process id."""
    command: Text
    """Command line with secrets masked."""


class Port(Seen):
    """One TCP port that was asked for."""

    port: Annotated[int, Field(ge=0, le=65535)]
    """The number."""
    free: bool
    """Whether it could be bound."""
    why: Text | None
    """Why not."""
    owner: PortOwner | None
    """Who has it. None if it is free or may not be seen."""


class Clock(Seen):
    """The host's clock."""

    synchronised: bool | None
    """Whether the kernel says that it follows a time server."""


class Iommu(Seen):
    """The IOMMU, which can slow or break peer-to-peer copies."""

    groups: Count
    """Its groups; 0 is off."""


class Torch(Seen):
    """The PyTorch of the environment, read from its files."""

    path: Text
    """Its folder."""
    version: Text
    """Its version."""
    cuda: Text | None
    """The CUDA version that it was built for. None: a CPU build."""


class Snapshot(Seen):
    """What the probe saw of one machine at one time."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    """The document's schema."""
    host: Text
    """Node name."""
    boot_id: Text
    """The kernel's id of this boot."""
    pid_namespace: Count | None
    """Inode of the probe's pid namespace."""
    time: Number
    """Unix seconds of the look."""
    uptime_s: Number
    """Seconds since boot."""
    seconds: Number
    """How long the look took."""
    python: Text
    """Version of the Python that the probe ran on."""
    viewer: Viewer
    """As whom it looked."""
    unseen: Annotated[tuple[Unseen, ...], Field(max_length=100_000)]
    """What could not be seen, and why."""
    nvml: Nvml
    """The driver's library."""
    gpus: Annotated[tuple[Gpu, ...], Field(max_length=1024)]
    """The GPUs that were looked at, in NVML's order; empty without NVML."""
    links: Annotated[tuple[Link, ...], Field(max_length=2**20)] | None
    """Each directed pair of GPUs."""
    xid: Annotated[tuple[Xid, ...], Field(max_length=100_000)] | None
    """Driver errors in the kernel log."""
    processes: Annotated[tuple[Process, ...], Field(max_length=200_000)] | None
    """All that NVML lists, all with a device file open, their ancestors and descendants, their units' and our engines'."""
    host_memory: HostMemory | None
    """The host's memory."""
    shm: SharedMemory | None
    """The host's /dev/shm."""
    disks: Annotated[tuple[Disk, ...], Field(max_length=4096)]
    """One for each folder that was asked for."""
    limits: Limits | None
    """The viewer's limits."""
    ports: Annotated[tuple[Port, ...], Field(max_length=65_536)]
    """One for each port that was asked for."""
    clock: Clock | None
    """The host's clock."""
    iommu: Iommu | None
    """The host's IOMMU."""
    torch: Torch | None
    """PyTorch as installed there."""

    @field_validator("gpus")
    @classmethod
    def _one_gpu_per_index(cls, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        if len({gpu.index for gpu in gpus}) < len(gpus):
            raise ValueError("must not hold two GPUs of one index")
        return gpus

    @field_validator("processes")
    @classmethod
    def _one_process_per_pid(cls, processes: tuple[Process, ...] | None) -> tuple[Process, ...] | None:
        if processes is not None and len({process.pid for process in processes}) < len(processes):
            raise ValueError("must not hold two processes of one pid")
        return processes

    @cached_property
    def by_pid(self) -> dict[int, Process]:
        """The processes by pid; empty where they were not seen."""
        return {process.pid: process for process in self.processes or ()}

    def process(self, pid: int) -> Process | None:
        """The process of this pid, or None if it is not among those seen."""
        return self.by_pid.get(pid)

    def why_unseen(self, prefix: str) -> str | None:
        """Why nothing, or not all, was seen of what begins with `prefix`: the reasons joined by `; `, or None if there are none.

        `gpu.3` takes in `gpu.3.memory`, but not `gpu.30.memory`.
        """
        begins = re.compile(re.escape(prefix) + (r"(?!\d)" if prefix[-1:].isdigit() else ""))
        return "; ".join(dict.fromkeys(one.why for one in self.unseen if begins.match(one.what))) or None


def parse(document: bytes | str) -> Snapshot:
    """The snapshot that a probe's document (UTF-8, without the sentinels) holds.

    Raises DraftproofError, with the path of the key where there is one, for anything that is not a document of schema 1.
    """
    if len(document) > MAX_BYTES:  # before it is copied; characters are at most as many as bytes
        raise _too_large()
    try:
        raw = document.encode("utf-8", "surrogatepass") if isinstance(document, str) else document
        if len(raw) > MAX_BYTES:
            raise _too_large()
        read = json.loads(raw.decode(), object_pairs_hook=_no_key_twice, parse_constant=_no_constant, parse_float=_finite)
        # A command line may hold half a character; it becomes "?" rather than costing the whole document.
        clean = json.dumps(read, ensure_ascii=False).encode("utf-8", "replace")
    except DraftproofError:
        raise
    except RecursionError:
        raise _refused("is nested too deep", None) from None
    except UnicodeDecodeError as error:
        raise _refused("is not UTF-8", f"byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _refused(f"is not JSON ({error.msg})", f"line {error.lineno}, column {error.colno}") from None
    except ValueError:  # Python reads no number of more than 4,300
        raise _refused("holds a number of too many digits", None) from None
    _check_schema(read)
    try:
        return Snapshot.model_validate_json(clean)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise _refused(f"does not hold what it should ({_short(first['msg'])})", _short(place) or None) from None


def _check_schema(read: Any) -> None:
    """A schema that we do not read is said before anything else, since everything else may differ with it."""
    schema = read.get("schema") if isinstance(read, dict) else None
    if type(schema) is not int:
        raise _refused("has no schema number", "schema")
    if schema != SCHEMA:
        raise DraftproofError(
            f"This draftproof reads schema {SCHEMA}, the host answered schema {_short(str(schema))}.",
            where="schema",
            remedy="Look with the probe of this draftproof, or read the answer with the draftproof that it came from.",
        )


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for key, value in pairs:
        if key in keys:
            raise _refused("holds a key twice", _short(key))
        keys[key] = value
    return keys


def _no_constant(name: str) -> float:
    raise _refused(f"holds {name}, which is not JSON", None)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _refused("holds a number that is too large", _short(digits))
    return number


def _too_large() -> DraftproofError:
    return _refused(f"is larger than {MAX_BYTES // 1_000_000} MB", None)


def _refused(what: str, where: str | None) -> DraftproofError:
    return DraftproofError(
        f"The host's answer {what}.",
        where=where,
        remedy="Run the check again; if it stays, look with the probe of this draftproof and see what else writes into its output.",
    )


def _short(text: str) -> str:
    """Fit for one line of a terminal, whatever a host put into it."""
    plain = printable(text)
    return plain if len(plain) <= 120 else plain[:119] + "…"
