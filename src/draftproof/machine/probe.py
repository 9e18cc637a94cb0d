"""Looks at one machine and prints what it saw as one JSON document: GPUs, who holds them, processes, host. It never acts.

    ssh node7 python3 -I - < probe.py         # by hand: everything, default settings

Standard library alone, Python >= 3.9, Linux. Whatever may hang is done in forked children: calls into the driver (a GPU that fell
off its bus answers none), disks (a dead NFS mount), files of /proc (a process stuck with its memory map locked). A child says what
it is about to do, then what it saw, as lines of JSON. One that is silent for `call_s` is killed and never waited for, since it
may be uninterruptible; `unseen` names what it was doing, and a new child goes on behind that. So the document comes within
`deadline_s`, with as much as could be seen.

Each fact has a dotted name, `gpu.3.memory`. What is null in the document stands in `unseen` under that name, with one sentence.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import glob
import json
import os
import pwd
import re
import resource
import select
import signal
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn

BEGIN, END = "=====draftproof-begin=====", "=====draftproof-end====="

DEFAULTS: dict[str, Any] = {
    "deadline_s": 4.0,
    "call_s": 1.0,
    "samples": 3,
    "interval_s": 0.1,
    "parts": ["gpus", "links", "processes", "host"],
    "gpus": None,
    "paths": [],
    "ports": [],
    "roots": {"nvml": "libnvidia-ml.so.1", "proc": "/proc", "sys": "/sys", "dev": "/dev", "shm": "/dev/shm", "records": None},  # noqa: S108  (looked at only)
}

FIRST_SHARE = 0.8
"""Of the deadline, for the driver and the pass over /proc. The rest is for the processes that these two name."""
LEAST_CALL_S = 0.05
"""However short the deadline is, a step is given this long."""
MOST_STALLS = 8
"""After so many a child is not started again."""
INITIAL_NAMESPACE = 4026531836
"""Inode of a host's first pid namespace, fixed in the kernel."""


def main(arguments: list[str]) -> int:
    """Print the document between its sentinels; returns 0, since whatever could not be seen is said in it."""
    began = time.monotonic()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, a child's number could be another's before we kill it
    watch = Watch()
    try:
        request = read_request(arguments)
        look(request, watch, began)
        document = assemble(request, watch.facts, watch.unseen, began)
    except Exception as error:  # noqa: BLE001  (neither a garbled request nor a fault of ours may leave the asker without a word)
        watch.end("first", "last")
        told = {"probe": f"the probe failed: {type(error).__name__} {error}"}
        document = assemble(read_request([]), {}, told, began)
    whole = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")  # half characters, which file names may hold, become "?"
    sys.stdout.write(f"{BEGIN}\n{json.dumps(json.loads(whole))}\n{END}\n")
    sys.stdout.flush()
    return 0


def read_request(arguments: list[str]) -> dict[str, Any]:
    """The request, with defaults filled in."""
    given = json.loads(zlib.decompress(base64.urlsafe_b64decode(arguments[0]))) if arguments else {}
    roots = {**DEFAULTS["roots"], **given.get("roots", {})}
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return {**DEFAULTS, **given, "roots": {**roots, "records": roots["records"] or os.path.join(state, "draftproof/engines")}}


def look(request: dict[str, Any], watch: Watch, began: float) -> None:
    """Gather the facts of a complete request. `began` is on the monotonic clock."""
    end, first_s = began + request["deadline_s"], FIRST_SHARE * request["deadline_s"]
    watch.call_s = min(request["call_s"], max(LEAST_CALL_S, first_s / 3))
    if {"gpus", "links"} & set(request["parts"]):
        watch.start(Child("first", look_at_gpus, (request, None)))
    watch.start(Child("first", look_at_processes, (request,)))
    watch.start(Child("last", look_at_host, (request,)))
    watch.attend("first", began + first_s)  # what NVML lists later would not be looked at
    watch.call_s = min(watch.call_s, max(LEAST_CALL_S, (end - time.monotonic()) / 3))
    if "processes" in request["parts"] and "processes.table" in watch.facts:
        watch.start(Child("last", look_closer, (request, choose(watch.facts))))
    watch.attend("last", end)


# The document

TOPS = {
    "gpus": ("nvml",),
    "links": ("links",),
    "processes": ("processes", "engines"),
    "host": ("xid", "host_memory", "shm", "limits", "clock", "iommu", "torch"),
}
"""Where the names of facts begin, by part. The others belong to none, and are always looked for."""
HEALTH = ("ecc_uncorrected", "remap_pending", "remap_failed", "recovery_action", "slowdown", "temperature_c")
OF_A_LINK = ("read", "write", "ancestor")
OF_A_GPU = ("uuid", "name", "minor", "bus_id", "numa_node", "compute_capability", "mig", "pcie", "compute_mode", "persistence")


def assemble(request: dict[str, Any], facts: dict[str, Any], told: dict[str, str], began: float) -> dict[str, Any]:
    """The document, schema 1. Each null in it gets a reason, in `told`, unless a child has given one."""
    for part, names in TOPS.items():
        if part not in request["parts"] and not (part == "gpus" and "links" in request["parts"]):
            told.update(dict.fromkeys(names, "it was not asked for"))

    def get(what: str) -> Any:
        if facts.get(what) is None and what not in told:
            words = what.split(".")
            above = [".".join(words[:n]) for n in range(len(words) - 1, 0, -1)]
            above += [f"gpu.{word}" for word in words[1:3] if words[0] == "links"] + ["nvml"] * (words[0] in ("gpu", "links"))
            late = f"it was not reached within {request['deadline_s']:g} s"
            told[what] = next((told[name] for name in above if name in told), late)
        return facts.get(what)

    uid, namespace, shm, present = os.getuid(), get("pid_namespace"), get("shm"), facts.get("nvml.present", False)
    count, cuda = get("nvml.count"), get("nvml.cuda") if present else None
    indices = chosen_gpus(request, facts)
    for index in set(request["gpus"] or ()) - set(indices):
        told.setdefault(f"gpu.{index}", f"NVML counts {count} GPUs here")
    linked = "links" in request["parts"] and count is not None
    document = {
        "schema": 1,
        "host": os.uname().nodename,
        "boot_id": get("boot_id") or "",
        "pid_namespace": namespace,
        "time": time.time() - (time.monotonic() - began),
        "uptime_s": round(time.clock_gettime(time.CLOCK_BOOTTIME), 2),
        "python": ".".join(map(str, sys.version_info[:3])),
        "viewer": {
            "uid": uid,
            "user": get("viewer.user") or str(uid),
            "pid": os.getpid(),
            "ancestors": get("viewer.ancestors") or [],
            "initial_namespace": None if namespace is None else namespace == INITIAL_NAMESPACE,
            "container": facts.get("viewer.container"),
        },
        "nvml": {
            "present": present,
            "why": facts.get("nvml.why") or told.get("nvml") or told.get("nvml.count"),
            "driver": get("nvml.driver") if present else None,
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        },
        "gpus": [gpu_entry(index, request["samples"], get, told) for index in indices],
        "links": [
            {"from": a, "to": b, **{name: get(f"links.{a}.{b}.{name}") for name in OF_A_LINK}} for a in indices for b in indices if a != b
        ]
        if linked
        else get("links"),
        "processes": process_entries(facts, get) if "processes" in request["parts"] else None,
        "shm": None if shm is None else dict(shm, stale=get("shm.stale") or []),
        "disks": [entry for entry in (get(f"disk.{path}") for path in request["paths"]) if entry is not None],
        "ports": [dict(seen, owner=facts.get(f"port.{port}.owner")) for port in request["ports"] for seen in [get(f"port.{port}")] if seen],
        **{name: get(name) for name in ("xid", "host_memory", "limits", "clock", "iommu", "torch")},
    }
    document["unseen"] = [{"what": what, "why": why} for what, why in told.items()]
    document["seconds"] = round(time.monotonic() - began, 4)
    return document


def gpu_entry(index: int, samples: int, get: Callable[[str], Any], told: dict[str, str]) -> dict[str, Any]:
    """One GPU of the document."""
    name = f"gpu.{index}"
    memory, processes = get(f"{name}.memory"), get(f"{name}.processes")
    if memory is not None:
        later = [get(f"{name}.memory.{number}") for number in range(1, samples)]
        alike = [memory, *(sample for sample in later if sample is not None and sample["version"] == memory["version"])]
        memory = dict(alike[-1], used=[sample["used"] for sample in alike])
        if memory["reserved"] is None:
            told[f"{name}.memory.reserved"] = "this driver knows only version 1 of the call, which counts what it keeps as used"
    if processes is not None:
        again = get(f"{name}.processes.again") if samples > 1 else None
        processes = processes if again is None else again
        silent = [str(line["pid"]) for line in processes if line["bytes"] is None]
        if silent:
            told[f"{name}.processes.bytes"] = f"the driver does not say how much pid {', '.join(silent)} holds"
    health = {fact: get(f"{name}.health.{fact}") for fact in HEALTH}
    seen = any(value is not None for value in health.values())
    rest = {fact: get(f"{name}.{fact}") for fact in OF_A_GPU}
    return {"index": index, "memory": memory, "processes": processes, "health": health if seen else None, **rest}


def process_entries(facts: dict[str, Any], get: Callable[[str], Any]) -> list[dict[str, Any]] | None:
    """The processes of the document, by pid. If not all came to be described, `processes` is in `unseen`: who is missing is not gone."""
    get("processes")
    engines = get("engines") or {}
    entries = []
    for entry in described(facts):
        user = facts.get(f"user.{entry['uid']}") or str(entry["uid"])
        command = facts.get(f"process.{entry['pid']}.command") or ""
        entries.append(dict(entry, user=user, command=command, engine=engines.get(str(entry["pid"]))))
    return entries if "processes.table" in facts else None


def described(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """What `describe` saw, by pid."""
    return sorted((fact for name, fact in facts.items() if re.fullmatch(r"process\.\d+", name)), key=lambda fact: int(fact["pid"]))


# Children that may hang


class Child:
    """A forked look, `look(report, *arguments)`, as its parent knows it: what it is doing, for which fact, and since when."""

    def __init__(self, group: str, look: Callable[..., None], arguments: tuple[Any, ...], stalls: Iterable[tuple[str, str]] = ()) -> None:
        self.group, self.look, self.arguments, self.stalls = group, look, arguments, list(stalls)
        self.pid, self.pipe, self.rest = 0, -1, b""
        self.what, self.call, self.since = "", "", 0.0


class Watch:
    """The parent's side: starts children, gathers what they see, and kills those that stand still."""

    def __init__(self) -> None:
        self.call_s = 1.0
        self.facts: dict[str, Any] = {}
        self.unseen: dict[str, str] = {}
        self.children: list[Child] = []

    def attend(self, group: str, until: float) -> None:
        """Gather from all children until those of this group are over, and end them when it is `until`."""
        while any(child.group == group for child in self.children) and time.monotonic() < until:
            running = {child.pipe: child for child in self.children}
            due = min([until, *(child.since + self.call_s for child in running.values())])
            ready, _, _ = select.select(list(running), [], [], max(0.0, due - time.monotonic()) + 0.001)
            for pipe, child in running.items():
                if pipe in ready:
                    self._read(child)
                elif time.monotonic() > child.since + self.call_s:
                    self._lose(child, f"did not answer within {self.call_s:.2g} s")
        self.end(group)

    def end(self, *groups: str) -> None:
        """Kill those that still run, and say what they were doing. One stuck in the kernel stays, and becomes init's."""
        for child in list(self.children):
            if child.group in groups:
                waited_s = time.monotonic() - child.since
                if waited_s >= 0 and child.what not in self.facts:
                    self.unseen.setdefault(child.what or "probe", f"{child.call or 'a child'} had not answered after {waited_s:.2g} s")
                self._kill(child)

    def start(self, child: Child) -> None:
        """Start it, or start it again: it goes on behind what is known."""
        child.what, child.call, child.since, child.rest = "", "", time.monotonic(), b""
        reading, writing = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            self.unseen.setdefault("probe", f"a child could not be started: {error.strerror}")
            os.close(reading)
            os.close(writing)
            return
        if pid == 0:
            run_child(child, Report(writing, self.facts, self.unseen, child.stalls))
        os.close(writing)
        child.pid, child.pipe = pid, reading
        self.children.append(child)

    def _read(self, child: Child) -> None:
        data = os.read(child.pipe, 1 << 20)
        *lines, child.rest = (child.rest + data).split(b"\n")
        for kind, *said in map(json.loads, lines):
            if kind == "doing":
                child.what, child.call, pause_s = said
                child.since = time.monotonic() + pause_s
            elif kind == "saw":
                self.facts[said[0]] = said[1]
            elif kind == "unseen":
                self.unseen[said[0]] = said[1]
            else:  # it is done, and need not end: closing the driver may take long
                self._kill(child)
                return
        if not data:
            self._lose(child, f"ended the look with {fate(child)}")

    def _lose(self, child: Child, how: str) -> None:
        """A child stalled or died: say what it was doing, and start who goes on behind that."""
        self._kill(child)
        self.unseen.setdefault(child.what or "probe", f"{child.call or 'a child'} {how}")
        child.stalls.append((child.what, child.call))
        gpu = place_of(child.what) if child.what.startswith("gpu.") else None
        if gpu and child.arguments[1] is None:  # from now on each GPU by itself: one that hangs must not keep the others waiting
            for which in [*chosen_gpus(child.arguments[0], self.facts), "links"]:
                stalls = [stall for stall in child.stalls if place_of(stall[0]) == f"gpu.{which}"]
                self.start(Child(child.group, child.look, (child.arguments[0], which), stalls))
        elif gpu and child.arguments[1] != "links" and len(child.stalls) > 1:
            self.unseen.setdefault(gpu, f"it was given up after {child.call} did not answer either")
        elif child.what and len(child.stalls) < MOST_STALLS:
            self.start(child)

    def _kill(self, child: Child) -> None:
        """Without waiting for it."""
        self.children.remove(child)
        os.close(child.pipe)
        if child.pid:
            os.kill(child.pid, signal.SIGKILL)  # its number cannot be another's: only fate() collects it, and then forgets it


def fate(child: Child) -> str:
    """How a child ended that closed its pipe too early."""
    for _ in range(50):  # the pipe closes a moment before the process can be collected
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid:
            child.pid, code = 0, os.waitstatus_to_exitcode(status)
            return {-one: one.name for one in signal.Signals}.get(code, f"exit code {code}")
        time.sleep(0.002)
    return "no word"


class Report:
    """The child's side: says what it is doing and what it saw. `facts`, `told` and the stalls are as they were at the fork."""

    def __init__(self, pipe: int, facts: dict[str, Any], told: dict[str, str], stalls: list[tuple[str, str]]) -> None:
        self.pipe, self.facts, self.told, self.stalls = pipe, facts, told, stalls
        self.what, self.unsent = "", b""

    def wants(self, what: str) -> bool:
        """Whether nothing is known about it yet."""
        return what not in self.facts and what not in self.told

    def see(self, what: str, call: str | None, look: Callable[..., Any], *arguments: Any) -> Any:
        """What look(*arguments) returns, sent as the fact `what` unless that is known; or None, and why it failed is sent.
        `call` names what may hang in it; None: it says so itself."""
        if self.wants(what):
            self.what = what
            if call is not None:
                self.doing(call)
            try:
                self.put(what, look(*arguments))
            except Exception as error:  # noqa: BLE001  (one fact that fails must not take the others along)
                self.unseen(what, reason(error, call or what))
        return self.facts.get(what)

    def doing(self, call: str, what: str | None = None, pause_s: float = 0.0) -> None:
        """What follows may hang: it is a call for this fact, or for the same as before, and takes `pause_s` longer than others may."""
        self.what = self.what if what is None else what
        self.send("doing", self.what, call, pause_s)
        self.flush()

    def put(self, what: str, value: Any) -> None:
        """A fact. It goes out with the next step."""
        self.facts[what] = value
        self.send("saw", what, value)

    def unseen(self, what: str, why: str) -> None:
        """Why something is not seen."""
        self.told[what] = why
        self.send("unseen", what, why)

    def send(self, *line: Any) -> None:
        """A line for the parent."""
        self.unsent += json.dumps(line).encode() + b"\n"

    def flush(self) -> None:
        """Let it go."""
        while self.unsent:
            self.unsent = self.unsent[os.write(self.pipe, self.unsent) :]


def run_child(child: Child, report: Report) -> NoReturn:
    """Look, report, and end."""
    try:
        null = os.open("/dev/null", os.O_RDWR)
        for stream in (0, 1, 2):  # a stuck child must not keep ssh's channel open, nor a driver write into the document
            os.dup2(null, stream)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            child.look(report, *child.arguments)
            report.send("done")
        except Exception as error:  # noqa: BLE001  (another child goes on behind what failed)
            report.unseen(report.what or "probe", reason(error, child.look.__name__))
        report.flush()
    finally:  # nothing may escape into the parent's code
        os._exit(1)


class Told(Exception):
    """Something cannot be seen, and this is the sentence that says why."""


def reason(error: BaseException, call: str) -> str:
    """One sentence for an exception."""
    if isinstance(error, Told):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{call}: {error.strerror}"
    return f"{call}: {type(error).__name__} {error}".rstrip()


# The driver, by NVML

STATUS = {
    1: "UNINITIALIZED", 2: "INVALID_ARGUMENT", 3: "NOT_SUPPORTED", 4: "NO_PERMISSION", 6: "NOT_FOUND", 7: "INSUFFICIENT_SIZE",
    8: "INSUFFICIENT_POWER", 9: "DRIVER_NOT_LOADED", 10: "TIMEOUT", 11: "IRQ_ISSUE", 12: "LIBRARY_NOT_FOUND", 13: "FUNCTION_NOT_FOUND",
    14: "CORRUPTED_INFOROM", 15: "GPU_IS_LOST", 16: "RESET_REQUIRED", 17: "OPERATING_SYSTEM", 18: "LIB_RM_VERSION_MISMATCH", 19: "IN_USE",
    20: "MEMORY", 21: "NO_DATA", 23: "INSUFFICIENT_RESOURCES", 25: "ARGUMENT_VERSION_MISMATCH", 26: "DEPRECATED", 27: "NOT_READY",
    28: "GPU_NOT_FOUND", 29: "INVALID_STATE", 999: "UNKNOWN",
}  # fmt: skip
INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE, FUNCTION_NOT_FOUND = 2, 3, 6, 7, 13
OLDER = (INVALID_ARGUMENT, NOT_SUPPORTED, FUNCTION_NOT_FOUND, 25, 26)
"""After these an older version of the function is asked: the driver knows the newer one by name alone."""
UINT, INT, LONG = ctypes.c_uint, ctypes.c_int, ctypes.c_ulonglong
NO_BYTES = 2**64 - 1
"""The driver does not say how much a process holds."""
LISTS = {"compute": "ComputeRunningProcesses", "graphics": "GraphicsRunningProcesses", "mps": "MPSComputeRunningProcesses"}
RECOVERY_FIELD = 230
RECOVERY = {0: "none", 1: "reset", 2: "reboot", 3: "drain_p2p", 4: "drain_and_reset", 6: "reset", 7: "reboot"}
"""6 resets the bus, 7 reboots the system: to a reader the same as 1 and 2."""
SLOWDOWN = {0x8: "hw_slowdown", 0x40: "hw_thermal", 0x80: "hw_power_brake"}
"""The reasons that mean trouble. A power cap or idle clocks are everyday."""
COMPUTE_MODE = {0: "default", 1: "exclusive_process", 2: "prohibited", 3: "exclusive_process"}
P2P = ["ok", "chipset_not_supported", "gpu_not_supported", "ioh_topology_not_supported", "disabled_by_regkey", "not_supported", "unknown"]
ANCESTOR = {0: "internal", 10: "single", 20: "multiple", 30: "hostbridge", 40: "node", 50: "system"}


class NvmlError(Told):
    """A function of NVML is missing, was given up, or returned a status other than success."""

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        self.status = status


def look_at_gpus(report: Report, request: dict[str, Any], which: int | str | None) -> None:
    """Facts of all GPUs and their links (`which` is None), of one GPU, or of the "links" alone."""
    nvml = open_nvml(report, request["roots"])
    if nvml is None:
        return
    report.see("nvml.driver", None, nvml.text, "nvmlSystemGetDriverVersion")
    report.see("nvml.cuda", None, nvml.number, "nvmlSystemGetCudaDriverVersion_v2")
    report.see("nvml.count", None, nvml.number, "nvmlDeviceGetCount_v2")
    indices = [index for index in chosen_gpus(request, report.facts) if which in (None, "links", index)]
    gpus = [gpu for gpu in (open_gpu(report, nvml, index) for index in indices) if gpu is not None]
    if which != "links":
        look_at_each(report, request, gpus)
    for a, b in ((a, b) for a in gpus for b in gpus if a is not b and "links" in request["parts"]):
        for direction, name in enumerate(("read", "write")):
            report.see(f"links.{a.index}.{b.index}.{name}", None, a.link_to, b, direction)
        report.see(f"links.{a.index}.{b.index}.ancestor", None, a.ancestor_with, b)


def look_at_each(report: Report, request: dict[str, Any], gpus: list[Gpu]) -> None:
    """First what they hold and who they are, then their health and the further samples."""
    for gpu in gpus:
        gpu.look_first()
    begun = time.monotonic()
    for gpu in gpus:
        gpu.look_further(request["roots"]["sys"])
    for number in range(1, request["samples"]):
        if any(report.wants(f"gpu.{gpu.index}.memory.{number}") for gpu in gpus):
            pause_s = max(0.0, begun + number * request["interval_s"] - time.monotonic())
            report.doing("a pause", pause_s=pause_s)
            time.sleep(pause_s)
        for gpu in gpus:
            gpu.see(f"memory.{number}", gpu.memory)
    for gpu in gpus if request["samples"] > 1 else ():
        # A process that ended while we sampled is no longer a holder, and none must be missing that began.
        gpu.see("processes.again", gpu.processes)


def open_nvml(report: Report, roots: dict[str, Any]) -> Nvml | None:
    """NVML, initialised; or None, and the facts say why. That a machine without GPUs has no NVML is nothing unseen."""
    if not report.wants("nvml"):
        return None
    report.doing(f"loading {roots['nvml']}", "nvml")
    try:
        nvml = Nvml(ctypes.CDLL(roots["nvml"]), report)
        report.put("nvml.present", True)
        nvml.ask("nvmlInit_v2")
    except OSError as error:
        report.put("nvml.present", False)
        report.put("nvml.why", str(error))
        report.put("nvml.count", 0)
        devices = glob.glob(f"{roots['dev']}/nvidia[0-9]*") + glob.glob(f"{roots['proc']}/driver/nvidia")
        if devices:
            report.unseen("nvml", f"{devices[0]} is there, but {roots['nvml']} cannot be loaded: {error}")
    except NvmlError as error:
        report.unseen("nvml", str(error))
    else:
        return nvml
    return None


def chosen_gpus(request: dict[str, Any], facts: dict[str, Any]) -> list[int]:
    """Those that are asked for and there."""
    return [index for index in range(facts.get("nvml.count") or 0) if request["gpus"] is None or index in request["gpus"]]


def open_gpu(report: Report, nvml: Nvml, index: int) -> Gpu | None:
    """A GPU by its handle; or None, and the facts say why."""
    what, handle = f"gpu.{index}", ctypes.c_void_p()
    if not report.wants(what):
        return None
    report.what = what
    try:
        nvml.ask("nvmlDeviceGetHandleByIndex_v2", UINT(index), ctypes.byref(handle))
    except NvmlError as error:
        report.unseen(what, str(error))
        return None
    return Gpu(nvml, report, index, handle)


def place_of(what: str) -> str:
    """`gpu.3` for `gpu.3.memory`, `links.0` for `links.0.1.read`."""
    return ".".join(what.split(".")[:2])


class Nvml:
    """The library, called by name. A function that stalled is not asked again for that GPU, and after a second one for none."""

    def __init__(self, library: ctypes.CDLL, report: Report) -> None:
        self.library, self.report = library, report
        self.stalled = {(place_of(what), call) for what, call in report.stalls}

    def ask(self, name: str, *arguments: Any, out: Collection[Any] = ()) -> list[int]:
        """Call a function for the fact that the report is at. Returns what it writes behind its last pointers, of these C types.
        Raises NvmlError unless it succeeds."""
        if not hasattr(self.library, name):
            raise NvmlError(f"{name} is missing in this driver", FUNCTION_NOT_FOUND)
        if (place_of(self.report.what), name) in self.stalled or [call for _, call in self.stalled].count(name) > 1:
            raise NvmlError(f"{name} did not answer before and was not asked again")
        values = [kind() for kind in out]
        self.report.doing(name)
        status = getattr(self.library, name)(*arguments, *map(ctypes.byref, values))
        if status:
            raise NvmlError(f"{name} returned {STATUS.get(status, status)}", status)
        return [value.value for value in values]

    def number(self, name: str, *arguments: Any) -> int:
        """The unsigned int that a function writes behind its last pointer."""
        return self.ask(name, *arguments, out=[UINT])[0]

    def text(self, name: str, *arguments: Any) -> str:
        """What a function writes into a buffer. 80 characters are enough for all versions of all of them but names (96)."""
        buffer = ctypes.create_string_buffer(96)
        self.ask(name, *arguments, buffer, UINT(96))
        return buffer.value.decode("utf-8", "replace")


def newest(call: Callable[[str], Any], *versions: str) -> Any:
    """What call(version) returns for the first of the versions, newest first, that this driver knows; raises what the last one did."""
    for version in versions:
        try:
            return call(version)
        except NvmlError as error:
            if error.status not in OLDER or version == versions[-1]:
                raise
    return None


class Gpu:
    """One GPU. Layouts are those of nvml.h, as `struct` writes them."""

    def __init__(self, nvml: Nvml, report: Report, index: int, handle: ctypes.c_void_p) -> None:
        self.nvml, self.report, self.index, self.handle = nvml, report, index, handle

    def see(self, name: str, look: Callable[..., Any], *arguments: Any) -> Any:
        """Send the fact gpu.N.name, which is look(*arguments)."""
        return self.report.see(f"gpu.{self.index}.{name}", None, look, *arguments)

    def fact(self, name: str) -> Any:
        """The fact gpu.N.name, if it was seen."""
        return self.report.facts.get(f"gpu.{self.index}.{name}")

    def get(self, name: str, *arguments: Any, out: Collection[Any] = ()) -> list[int]:
        """Call nvmlDeviceGet`name` for this GPU."""
        return self.nvml.ask(f"nvmlDeviceGet{name}", self.handle, *arguments, out=out)

    def number(self, name: str, *arguments: Any) -> int:
        """The same for one that writes an unsigned int."""
        return self.get(name, *arguments, out=[UINT])[0]

    def look_first(self) -> None:
        """What is on it, and who it is. Memory is read before the list of processes: what a caller takes between the two makes its
        own share look larger, never smaller."""
        self.see("memory", self.memory)
        self.see("mig", self.mig)
        self.see("processes", self.processes)
        self.see("uuid", self.nvml.text, "nvmlDeviceGetUUID", self.handle)
        self.see("name", self.nvml.text, "nvmlDeviceGetName", self.handle)
        self.see("minor", self.number, "MinorNumber")
        self.see("bus_id", self.bus_id)

    def look_further(self, sys_root: str) -> None:
        """Whether it is fit."""
        self.see("numa_node", self.numa_node, sys_root)
        self.see("compute_capability", lambda: self.get("CudaComputeCapability", out=[INT, INT]))
        self.see("health.temperature_c", self.number, "Temperature", INT(0))
        self.see("health.slowdown", self.slowdown)
        # Uncorrected, since the driver was loaded: those of a lifetime may have been remapped long ago.
        self.see("health.ecc_uncorrected", lambda: self.get("TotalEccErrors", INT(1), INT(0), out=[LONG])[0])
        self.see("health.remap_pending", lambda: bool(self.get("RemappedRows", out=[UINT] * 4)[2]))
        self.see("health.remap_failed", lambda: bool(self.get("RemappedRows", out=[UINT] * 4)[3]))
        self.see("health.recovery_action", self.recovery_action)
        self.see("pcie", self.pcie)
        self.see("compute_mode", lambda: COMPUTE_MODE[self.number("ComputeMode")])
        self.see("persistence", lambda: bool(self.number("PersistenceMode")))

    def memory(self) -> dict[str, Any]:
        """Bytes. Version 2 tells the driver's own share apart; version 1 counts it as used."""

        def read_out(version: str) -> dict[str, Any]:
            buffer = ctypes.create_string_buffer(struct.pack("<I36x", 0x02000028), 40)
            self.get(f"MemoryInfo{version}", buffer)
            if version:
                total, reserved, free, used = struct.unpack("<8xQQQQ", buffer.raw)
                return {"version": 2, "total": total, "reserved": reserved, "used": used, "free": free}
            total, free, used = struct.unpack_from("<QQQ", buffer)
            return {"version": 1, "total": total, "reserved": None, "used": used, "free": free}

        found: dict[str, Any] = newest(read_out, "_v2", "")
        return found

    def mig(self) -> dict[str, Any]:
        """Whether it is split, and in how many. A GPU or driver that cannot split is not split."""
        try:
            enabled = self.get("MigMode", out=[UINT, UINT])[0] == 1
        except NvmlError as error:
            if error.status not in OLDER:
                raise
            enabled = False
        return {"enabled": enabled, "instances": len(self.instances()) if enabled else 0}

    def instances(self) -> list[ctypes.c_void_p]:
        """The handles of its MIG instances."""
        handles = []
        for number in range(self.number("MaxMigDeviceCount")):
            handle = ctypes.c_void_p()
            try:
                self.get("MigDeviceHandleByIndex", UINT(number), ctypes.byref(handle))
                handles.append(handle)
            except NvmlError as error:
                if error.status not in (NOT_FOUND, INVALID_ARGUMENT):
                    raise
        return handles

    def processes(self) -> list[dict[str, Any]]:
        """Who holds memory. One line for each pid and kind; those of a GPU that is split are in the lists of its instances."""
        what, lines = self.report.what, []
        instances = self.instances() if (self.fact("mig") or {}).get("enabled") else []
        for kind, name in LISTS.items():
            found: dict[int, int | None] = {}
            for handle in instances or [self.handle]:
                try:
                    listed = self.listed(name, handle)
                except NvmlError as error:
                    if kind == "compute":
                        raise
                    if error.status != NOT_SUPPORTED:  # a GPU that cannot draw has nobody drawing
                        self.report.unseen(f"{what}.{kind}", str(error))
                    listed = {}
                for pid, size in listed.items():
                    before = found.get(pid, 0)
                    found[pid] = None if size is None or before is None else before + size
            lines += [{"pid": pid, "kind": kind, "bytes": size} for pid, size in found.items()]
        return lines

    def listed(self, name: str, handle: ctypes.c_void_p) -> dict[int, int | None]:
        """Pid -> bytes in one list. Versions 2 and 3 add the MIG instance to each line."""
        library = self.nvml.library  # of drivers 535.43 to 535.86 had one more number in a line of version 3
        wide = hasattr(library, "nvmlDeviceGetConfComputeMemSizeInfo") and not hasattr(library, "nvmlDeviceGetRunningProcessDetailList")
        sizes = {"_v3": 32 if wide else 24, "_v2": 24, "": 16}

        def read_out(version: str, room: int = 64) -> dict[int, int | None]:
            count, buffer = UINT(room), ctypes.create_string_buffer(room * sizes[version])
            try:
                self.nvml.ask(f"nvmlDeviceGet{name}{version}", handle, ctypes.byref(count), buffer)
            except NvmlError as error:
                if error.status != INSUFFICIENT_SIZE or room > 10_000:
                    raise
                return read_out(version, 2 * max(room, count.value))
            lines = (struct.unpack_from("<I4xQ", buffer, number * sizes[version]) for number in range(count.value))
            return {pid: None if held == NO_BYTES else held for pid, held in lines}

        found: dict[int, int | None] = newest(read_out, *sizes)
        return found

    def bus_id(self) -> str:
        """As sysfs writes it."""
        buffer = ctypes.create_string_buffer(128)
        self.get("PciInfo_v3", buffer)
        return "{:04x}:{:02x}:{:02x}.0".format(*struct.unpack_from("<16xIII", buffer))

    def numa_node(self, sys_root: str) -> int:
        """The NUMA node of its slot."""
        bus_id = self.fact("bus_id")
        node = int(read(f"{sys_root}/bus/pci/devices/{bus_id}/numa_node"))
        if node < 0 and os.path.exists(f"{sys_root}/devices/system/node/node1"):
            raise Told(f"the firmware names no node for {bus_id}")
        return max(0, node)  # on a machine of one node the kernel says -1

    def slowdown(self) -> list[str]:
        """Hardware reasons for lower clocks."""
        (mask,) = newest(lambda word: self.get(f"CurrentClocks{word}Reasons", out=[LONG]), "Event", "Throttle")
        return [name for bit, name in SLOWDOWN.items() if mask & bit]

    def recovery_action(self) -> str:
        """What the driver wants done."""
        buffer = ctypes.create_string_buffer(struct.pack("<I36x", RECOVERY_FIELD), 40)
        self.get("FieldValues", INT(1), buffer)
        status, value = struct.unpack_from("<28xII", buffer)
        if status or value not in RECOVERY:
            said = f"returned {STATUS.get(status, status)}" if status else f"holds {value}, which this probe does not know"
            raise NvmlError(f"field GET_GPU_RECOVERY_ACTION {said}")
        return RECOVERY[value]

    def link_to(self, other: Gpu, direction: int) -> str:
        """Whether it may read (0) or write (1) the other's memory itself."""
        return P2P[self.number("P2PStatus", other.handle, INT(direction))]

    def ancestor_with(self, other: Gpu) -> str:
        """The nearest thing that both hang on."""
        return ANCESTOR[self.number("TopologyCommonAncestor", other.handle)]

    def pcie(self) -> dict[str, int]:
        """Its link, now and at most."""
        now = {name: self.number(f"CurrPcieLink{name.title()}") for name in ("width", "generation")}
        return {**now, **{f"max_{name}": self.number(f"MaxPcieLink{name.title()}") for name in ("width", "generation")}}


# Processes

KERNEL_THREAD = 0x00200000
"""PF_KTHREAD among the flags of /proc/PID/stat."""
TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
MARK = b"DRAFTPROOF_ENGINE="


def look_at_processes(report: Report, request: dict[str, Any]) -> None:
    """One pass over /proc: parents and open device files of all; who has the ports; stale shared memory; our engines' processes."""
    roots, listed = request["roots"], "processes" in request["parts"]
    seen = [report.see(f"port.{port}", "bind", bind_test, port) for port in request["ports"]]
    taken = [port["port"] for port in seen if port is not None and not port["free"]]
    sockets = (report.see("port.sockets", f"{roots['proc']}/net/tcp", sockets_of, roots["proc"], taken) if taken else None) or {}
    segments = report.see("shm.own", roots["shm"], own_segments, roots["shm"]) if "host" in request["parts"] else None
    if listed or sockets or segments:
        report.see("processes.table", roots["proc"], pass_over, report, roots, sockets)
    if segments is not None and (not segments or "processes.table" in report.facts):
        report.see("shm.stale", roots["shm"], stale_segments, report, roots, segments)
    if listed:
        report.see("engines", roots["records"], find_engines, report, roots)


def pass_over(report: Report, roots: dict[str, Any], sockets: dict[str, int]) -> list[list[Any]]:
    """[pid, parent, open device files or None if they may not be read] of all but kernel threads and us. On the way it reports
    who has the sockets, by inode, and which shared memory is open."""
    proc, dev, shm = roots["proc"], os.path.realpath(roots["dev"]) + "/", os.path.realpath(roots["shm"]) + "/"
    table: list[list[Any]] = []
    segments: set[str] = set()
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdigit()):
        if report.wants(f"process.{pid}"):
            report.doing(f"{proc}/{pid}", f"process.{pid}")
            try:
                stat = read_stat(proc, pid)
                if stat["kernel"] or os.getppid() in (pid, stat["ppid"]):
                    continue  # the probe's own children have the GPUs open
                links = open_files(proc, pid, stat["state"])
            except OSError:
                continue  # it ended meanwhile
            table.append([pid, stat["ppid"], device_names(links, dev)])
            segments.update(link[len(shm) :] for link in links or () if link.startswith(shm))
            for port in {sockets[link] for link in links or () if link in sockets}:
                report.see(f"port.{port}.owner", f"{proc}/{pid}/cmdline", lambda pid: {"pid": pid, "command": command_of(proc, pid)}, pid)
    hidden = sum(devices is None for _, _, devices in table)
    if hidden or (os.getuid() != 0 and not os.access(f"{proc}/1/stat", os.R_OK)):
        report.unseen("processes.device_fds", f"the open files of {hidden or 'hidden'} processes of other users may not be read")
    report.put("shm.open", sorted(segments))
    return table


def choose(facts: dict[str, Any]) -> list[int]:
    """Pids to describe: those that NVML lists, that have a device open, or are of our engines; all above and below them."""
    table = facts.get("processes.table") or []
    parents = {pid: parent for pid, parent, _ in table}
    children: dict[int, list[int]] = {}
    for pid, parent, _ in table:
        children.setdefault(parent, []).append(pid)
    chosen = {line["pid"] for name, lines in facts.items() if re.fullmatch(r"gpu\.\d+\.processes(\.again)?", name) for line in lines}
    chosen |= {pid for pid, _, devices in table if devices} | {int(pid) for pid in facts.get("engines") or ()}
    below, above = list(chosen), list(chosen)
    while below:
        new = [child for child in children.get(below.pop(), ()) if child not in chosen]
        chosen.update(new)
        below += new
    while above:
        parent = parents.get(above.pop(), 0)
        if parent and parent not in chosen:
            chosen.add(parent)
            above.append(parent)
    return sorted(chosen)


def look_closer(report: Report, request: dict[str, Any], chosen: list[int]) -> None:
    """Everything of the chosen processes and of the other members of their units."""
    proc, dev = request["roots"]["proc"], os.path.realpath(request["roots"]["dev"]) + "/"
    for pid in chosen:
        describe(report, proc, dev, pid)
    units = {unit_of(fact["cgroup"])[2] for fact in described(report.facts)} - {None}
    for pid, _, _ in (report.facts.get("processes.table") or ()) if units else ():
        if report.wants(f"process.{pid}"):
            report.doing(f"{proc}/{pid}/cgroup", f"process.{pid}")
            with contextlib.suppress(OSError):
                if unit_of(parse_cgroup(read(f"{proc}/{pid}/cgroup")))[2] in units:
                    describe(report, proc, dev, pid)
    entries = described(report.facts)
    for uid in {entry["uid"] for entry in entries}:  # a directory service that is asked for the name may hang
        report.see(f"user.{uid}", f"getpwuid({uid})", user_name, uid)
    for entry in entries:
        report.see(f"process.{entry['pid']}.command", f"{proc}/{entry['pid']}/cmdline", command_of, proc, entry["pid"])
    report.put("processes", True)


def describe(report: Report, proc: str, dev: str, pid: int) -> None:
    """The fact process.PID, but for what may hang. None for a process that is gone."""
    what = f"process.{pid}"
    if not report.wants(what):
        return
    report.doing(f"{proc}/{pid}", what)
    try:
        stat = read_stat(proc, pid)
        uid = int(re.findall(r"^Uid:\s+(\d+)", read(f"{proc}/{pid}/status"), re.MULTILINE)[0])
        cgroup = parse_cgroup(read(f"{proc}/{pid}/cgroup"))
        devices = device_names(open_files(proc, pid, stat["state"]), dev)
    except (FileNotFoundError, ProcessLookupError):
        if not os.path.exists(f"{proc}/1"):  # mounted with hidepid, it hides what is other users'
            report.unseen(what, f"{proc} hides the processes of other users (hidepid), so it may be there")
        return
    except OSError as error:
        report.unseen(what, reason(error, f"{proc}/{pid}"))
        return
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    unit, scope, _ = unit_of(cgroup)
    namespace = None
    with contextlib.suppress(OSError):
        namespace = namespace_of(proc, pid)
    report.put(what, {
        "pid": pid, "ppid": stat["ppid"], "start_ticks": stat["start"], "started": round(booted + stat["start"] / TICKS, 2), "uid": uid,
        "comm": stat["comm"], "state": stat["state"], "session": stat["session"], "pgrp": stat["pgrp"], "rss": stat["rss"] * PAGE,
        "cgroup": cgroup, "unit": unit, "unit_scope": scope, "container": container_of(cgroup),
        "pid_namespace": namespace, "device_fds": devices,
    })  # fmt: skip


def find_engines(report: Report, roots: dict[str, Any]) -> dict[int, dict[str, str]]:
    """Pid -> engine, for the processes whose environment holds the token of a record of this boot."""
    records: dict[bytes, dict[str, str]] = {}
    boot_id = read(f"{roots['proc']}/sys/kernel/random/boot_id").strip()
    for path in glob.glob(glob.escape(roots["records"]) + "/*.json"):
        try:
            record = json.loads(read(path))
            if record["boot_id"] == boot_id:
                records[MARK + record["token"].encode()] = {"what": str(record["what"]), "run": str(record["run"])}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            report.unseen(f"engines.{os.path.basename(path)}", f"this record cannot be read: {type(error).__name__}")
    engines = {}
    for pid, _, _ in (report.facts.get("processes.table") or ()) if records else ():
        if report.wants(f"process.{pid}.engine"):
            report.doing(f"{roots['proc']}/{pid}/environ", f"process.{pid}.engine")
            with contextlib.suppress(OSError):  # ended, or another user's
                for entry in set(read_bytes(f"{roots['proc']}/{pid}/environ").split(b"\0")) & set(records):
                    engines[pid] = records[entry]
    return engines


def read_stat(proc: str, pid: int) -> dict[str, Any]:
    """/proc/PID/stat. The name may hold brackets and blanks, so the numbers are counted from the last bracket."""
    data = read_bytes(f"{proc}/{pid}/stat")
    comm, _, rest = data.partition(b"(")[2].rpartition(b")")
    fields = rest.split()
    if len(fields) < 22:
        raise FileNotFoundError(errno.ENOENT, "it ended while it was read")
    return {
        "comm": comm.decode("utf-8", "replace"), "state": fields[0].decode(), "ppid": int(fields[1]), "pgrp": max(0, int(fields[2])),
        "session": max(0, int(fields[3])), "kernel": bool(int(fields[6]) & KERNEL_THREAD), "start": int(fields[19]),
        "rss": max(0, int(fields[21])),
    }  # fmt: skip


def open_files(proc: str, pid: int, state: str) -> list[str] | None:
    """What the open files of a process point to, unordered; None if that may not be read."""
    if state in "ZX":
        return []
    try:
        folder = os.open(f"{proc}/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return None
    links = []
    try:
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed meanwhile
                links.append(os.readlink(name, dir_fd=folder))
    finally:
        os.close(folder)
    return links


def device_names(links: list[str] | None, dev: str) -> list[str] | None:
    """nvidia0, nvidiactl, nvidia-uvm, nvidia-caps/nvidia-cap1, ... among links; `dev` ends with a slash."""
    if links is None:
        return None
    return sorted({link[len(dev) :].replace(" (deleted)", "") for link in links if link.startswith(f"{dev}nvidia")})


def namespace_of(proc: str, pid: int | str) -> int:
    """Inode of a process's pid namespace."""
    return int(os.readlink(f"{proc}/{pid}/ns/pid")[len("pid:[") : -1])


def user_name(uid: int) -> str:
    """Its name, or the number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def read_bytes(path: str) -> bytes:
    """A file of /proc or /sys."""
    with open(path, "rb", buffering=0) as file:
        return file.read()


def read(path: str) -> str:
    """A file of /proc or /sys as text."""
    return read_bytes(path).decode("utf-8", "replace")


# Control groups


def parse_cgroup(text: str) -> str | None:
    """The path in /proc/PID/cgroup: that of version 2, or systemd's own of version 1 where the other is the root."""
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in text.splitlines() if line.count(":") > 1)}
    second, first = paths.get(""), paths.get("name=systemd")
    return first if first is not None and second in (None, "/") else second


UNIT = re.compile(r"(?:/[^/]+\.slice)*(/user@\d+\.service(?:/[^/]+\.slice)*)?/(?!slurmstepd)([^/]+\.(?:service|scope))(?![^/])")
"""A unit below slices, at home in the system's tree or in that of a user's systemd. Slurm's steps all share one scope."""


def unit_of(cgroup: str | None) -> tuple[str | None, str | None, str | None]:
    """systemd's unit, whose systemd ("system" or "user"), and the unit's own path. Nothing for what runs in a container, whose
    units are not ours to name."""
    found = UNIT.match(cgroup or "")
    if not found or container_of(cgroup) is not None:
        return None, None, None
    name = found[2][1:] if found[2].startswith("_") else found[2]  # systemd escapes names that the kernel uses
    return name, "user" if found[1] else "system", found[0]


CONTAINER = re.compile(r"(?:/([^/]*))?/(?:([a-z-]+)-)?([0-9a-f]{64})(?:\.scope)?(?![^/])")
RUNTIMES = {"docker": "docker", "libpod": "podman"}


def container_of(cgroup: str | None) -> str | None:
    """Runtime and the first 12 characters of the id, by the ways in which docker, podman, containerd and Kubernetes name groups."""
    found = CONTAINER.search(cgroup or "")
    if not found:
        return None
    runtime = RUNTIMES.get(found[2] or found[1], "containerd")
    return f"{'kubernetes' if 'kubepods' in found.string else runtime}:{found[3][:12]}"


# Command lines

NAME = r"[\w.-]*(?:key|token|pass(?:word|wd|phrase)|pwd|secret|credentials?|auth(?:orization)?|bearer)[\d_-]*"
"""Ends of names that hold a secret: HF_TOKEN and --apiKey, not --tokenizer, --eos-token-id or --api-key-file."""
VALUE = r"""("[^"]*"|'[^']*'|[^\s"',;&]+)"""
OPTION = re.compile(rf"(?i)--?{NAME}")
ASSIGNMENT = re.compile(rf"(?i)-{{0,2}}{NAME}=")
WITHIN = (
    re.compile(r"(?i)(\b(?:bearer|basic)\s+)\S+"),
    re.compile(r"(://)[^/\s:@]*:[^/\s@]+(?=@)"),
    re.compile(r"(\b(?:hf_|sk-|ghp_|github_pat_|glpat-|xox[abp]-|nvapi-|AKIA))[\w-]{8,}"),
    re.compile(rf"(?i)((?<![\w.-])--?{NAME}\s+){VALUE}"),
    re.compile(rf"(?i)((?<![\w.-]){NAME}[\"']?\s*[=:]\s*){VALUE}"),
)
"""Secrets within a word: HTTP headers, URLs, tokens that are known by how they begin, options and assignments of a script."""


def command_of(proc: str, pid: int) -> str:
    """The command line, secrets masked, at most 300 characters; empty for a zombie or a process that ended."""
    try:
        with open(f"{proc}/{pid}/cmdline", "rb", buffering=0) as file:
            data = file.read(4096)
    except (FileNotFoundError, ProcessLookupError):
        return ""
    command = mask([word.decode("utf-8", "replace") for word in data.rstrip(b"\0").split(b"\0")])
    return command if len(command) <= 300 else command[:299] + "…"


def mask(words: list[str]) -> str:
    """The words joined by blanks, with *** for what follows --api-key, TOKEN= and the like."""
    masked = []
    option = ""
    for word in words:
        assigned = ASSIGNMENT.match(word)
        if option and not word.startswith("--"):
            masked.append("***")
            option = option if "key" in option else ""  # vLLM takes several keys
        elif assigned:  # to its end, since a secret may hold blanks
            masked.append(f"{assigned[0]}***")
        else:
            option = word if OPTION.fullmatch(word) else ""
            for pattern in WITHIN:
                word = pattern.sub(r"\1***", word)
            masked.append(word)
    return " ".join(masked)


# Ports and shared memory


def bind_test(port: int) -> dict[str, Any]:
    """Whether a server could bind the port, as servers do: on all addresses, of IPv4 and IPv6, past connections that linger."""
    both = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if both else socket.AF_INET) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            server.bind(("", port))
        except OSError as error:
            return {"port": port, "free": False, "why": error.strerror}
    return {"port": port, "free": True, "why": None}


def sockets_of(proc: str, ports: list[int]) -> dict[str, int]:
    """`socket:[inode]` -> port, of those that listen there."""
    found = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for fields in map(str.split, read(f"{proc}/net/{table}").splitlines()[1:]):
                port = int(fields[1].rpartition(":")[2], 16)
                if port in ports and fields[3] == "0A":
                    found[f"socket:[{fields[9]}]"] = port
    return found


def own_segments(shm: str) -> list[dict[str, Any]]:
    """The viewer's shared memory of Python (psm_), NCCL (nccl-) and semaphores (sem.)."""
    segments = []
    for name in os.listdir(shm):
        if name.startswith(("psm_", "nccl-", "sem.")):
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(f"{shm}/{name}")
                if status.st_uid == os.getuid():
                    age = round(max(0.0, time.time() - status.st_mtime), 1)
                    segments.append({"name": name, "bytes": status.st_size, "age_s": age})
    return segments


def stale_segments(report: Report, roots: dict[str, Any], segments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that no process has open or mapped. Only the viewer's processes are asked for their maps, which is slow."""
    stale = [segment for segment in segments if segment["name"] not in report.facts["shm.open"]]
    shm = os.path.realpath(roots["shm"])
    for pid, _, _ in report.facts["processes.table"] if stale else ():
        folder = f"{roots['proc']}/{pid}"
        report.doing(f"{folder}/maps")
        with contextlib.suppress(OSError):
            if os.stat(folder).st_uid == os.getuid():
                maps = read_bytes(f"{folder}/maps")
                stale = [segment for segment in stale if os.fsencode(f"{shm}/{segment['name']}") not in maps]
    return stale


# The host


def look_at_host(report: Report, request: dict[str, Any]) -> None:
    """Who looks, and the rest of the machine."""
    roots = request["roots"]
    proc, sys_root, shm = roots["proc"], roots["sys"], roots["shm"]
    report.see("boot_id", f"{proc}/sys/kernel/random/boot_id", lambda: read(f"{proc}/sys/kernel/random/boot_id").strip())
    report.see("pid_namespace", f"{proc}/self/ns/pid", namespace_of, proc, "self")
    report.see("viewer.ancestors", f"{proc}/PID/stat", ancestors, proc, os.getppid())
    report.see("viewer.container", f"{proc}/self/cgroup", own_container, proc)
    report.see("viewer.user", "getpwuid", user_name, os.getuid())
    if "host" in request["parts"]:
        report.see("limits", "getrlimit", limits)
        report.see("host_memory", f"{proc}/meminfo", host_memory, proc, sys_root)
        report.see("shm", shm, lambda: {"total": (at := os.statvfs(shm)).f_blocks * at.f_frsize, "free": at.f_bavail * at.f_frsize})
        report.see("clock", "adjtimex", clock)
        report.see("iommu", f"{sys_root}/kernel/iommu_groups", lambda: {"groups": len(os.listdir(f"{sys_root}/kernel/iommu_groups"))})
        report.see("xid", f"{roots['dev']}/kmsg", driver_errors, f"{roots['dev']}/kmsg")
        report.see("torch", "torch/version.py", installed_torch)
    for path in request["paths"]:
        report.see(f"disk.{path}", f"statvfs of {path}", disk, path)


def ancestors(proc: str, pid: int) -> list[int]:
    """The pids above one, up to 1."""
    found: list[int] = []
    while pid > 1 and len(found) < 1000:
        pid = read_stat(proc, pid)["ppid"]
        found += [pid] if pid else []
    return found


def own_container(proc: str) -> str | None:
    """The container that we are in. Inside, the control group often shows as `/`: then the runtimes' marks tell."""
    marks = {"/.dockerenv": "docker", "/run/.containerenv": "podman", "/run/secrets/kubernetes.io": "kubernetes"}
    named = container_of(parse_cgroup(read(f"{proc}/self/cgroup")))
    return named or next((name for path, name in marks.items() if os.path.exists(path)), None)


def limits() -> dict[str, list[int]]:
    """Soft and hard."""
    names = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}
    return {name: [-1 if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind)] for name, kind in names.items()}


def host_memory(proc: str, sys_root: str) -> dict[str, int | None]:
    """Bytes, and the control group with the least room: its limit, and what it uses beyond file cache that can be dropped."""
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB", read(f"{proc}/meminfo"), re.MULTILINE))
    total, available, swap = (int(kib[name]) * 1024 for name in ("MemTotal", "MemAvailable", "SwapFree"))
    rooms: list[tuple[int, int]] = []
    for controllers, path in re.findall(r"^\d+:([^:]*):(.*)$", read(f"{proc}/self/cgroup"), re.MULTILINE):
        if controllers and "memory" not in controllers.split(","):
            continue
        first = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        most, used, cache = first if controllers else ("memory.max", "memory.current", "inactive_file")
        parts = path.strip("/").split("/")
        for depth in range(len(parts) + 1):
            folder = os.path.join(f"{sys_root}/fs/cgroup", "memory" if controllers else "", *parts[:depth])
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                limit, current = int(read(f"{folder}/{most}")), int(read(f"{folder}/{used}"))
                droppable = dict(map(str.split, read(f"{folder}/memory.stat").splitlines())).get(cache, 0)
                if limit < total:
                    rooms.append((limit, max(0, current - int(droppable))))
    room = min(rooms, key=lambda room: room[0] - room[1], default=(None, None))
    return {"total": total, "available": available, "swap_free": swap, "cgroup_limit": room[0], "cgroup_used": room[1]}


def clock() -> dict[str, bool]:
    """Whether the kernel's clock follows a time server, as the daemon that disciplines it has told the kernel."""
    timex = ctypes.create_string_buffer(512)  # struct timex; all zero asks without changing anything
    if struct.calcsize("l") != 8 or ctypes.CDLL(None, use_errno=True).adjtimex(timex) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    (status,) = struct.unpack_from("<i", timex, 40)
    return {"synchronised": not status & 0x40}


def driver_errors(kmsg: str) -> list[dict[str, Any]]:
    """Xid lines of the kernel's log: its records are `priority,number,microseconds since boot,flags;text`."""
    records = [b""]
    with open(os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as log:
        while True:
            try:
                record = log.read(8192)
            except BrokenPipeError:
                continue  # it was overwritten before we came to it
            if not record:  # that was the last
                break
            records.append(record)
    booted = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    pattern = r"^\d+,\d+,(\d+),[^;\n]*;(NVRM: Xid \((?:PCI:)?([0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+)(\.\d)?\): (\d+).*)$"
    found = re.findall(pattern, b"".join(records).decode("utf-8", "replace"), re.MULTILINE)
    return [
        {"time": round(booted + int(at) / 1e6, 2), "bus_id": bus.lower() + (function or ".0"), "xid": int(number), "text": line[:500]}
        for at, line, bus, function, number in found[-1000:]
    ]


def installed_torch() -> dict[str, str | None]:
    """PyTorch beside this Python, read from its files: importing it takes seconds."""
    for folder in sys.path:
        path = os.path.join(folder, "torch", "version.py")
        if os.path.isfile(path):
            found = dict(re.findall(r"""^(\w+)(?:\s*:[^=]*)?\s*=\s*['"]([^'"]*)['"]""", read(path), re.MULTILINE))
            return {"path": os.path.dirname(path), "version": found["__version__"], "cuda": found.get("cuda")}
    raise Told(f"there is no PyTorch beside {sys.executable}")


def disk(path: str) -> dict[str, Any]:
    """The file system of a folder, or of the nearest one above it that exists."""
    existing = os.path.abspath(os.path.expanduser(path))
    while not os.path.isdir(existing) and existing != "/":
        existing = os.path.dirname(existing)
    at = os.statvfs(existing)
    return {
        "path": path, "existing": existing, "free_bytes": at.f_bavail * at.f_frsize, "total_bytes": at.f_blocks * at.f_frsize,
        "free_inodes": at.f_favail if at.f_files else None, "read_only": bool(at.f_flag & os.ST_RDONLY),
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
