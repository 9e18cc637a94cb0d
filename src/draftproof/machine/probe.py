"""Looks at one machine and prints what it saw as one JSON document: GPUs, who holds them, processes, host. It never acts.

    ssh node7 python3 -I - < probe.py         # by hand: everything, default settings

Standard library alone, Python >= 3.9, Linux. Whatever may hang is done in forked children: calls into the driver (a GPU that fell
off its bus answers none), disks (a dead NFS mount), command lines (a process stuck with its memory map locked). A child says in
shared memory where it stands and sends what it saw as JSON lines. One that stands at the same place for `call_s` is killed and
never waited for, since it may be uninterruptible; `unseen` names where it stood, and a new child goes on behind it. So the
document comes within `deadline_s`, with as much as could be seen.

Each fact has a dotted name, `gpu.3.memory`. What is null in the document stands in `unseen` under that name, with one sentence.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import ctypes
import errno
import functools
import glob
import json
import math
import mmap
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
from collections.abc import Callable, Iterable
from typing import Any

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
MOST_STALLS = 8
"""After so many a child is not started again."""
INITIAL_NAMESPACE = 4026531836
"""Inode of a host's first pid namespace, fixed in the kernel."""


def main(arguments: list[str]) -> int:
    """Print the document between its sentinels; returns 0, since whatever could not be seen is said in it."""
    began = time.monotonic()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, a child's number could be another's before we kill it
    request, complaint = read_request(arguments)
    try:
        document = look(request, began)
    except Exception as error:  # noqa: BLE001  (a fault of ours must not leave the asker without a word)
        document = assemble(request, Watch(0, 0), {"probe": f"the probe failed: {type(error).__name__} {error}"}, began)
    if complaint is not None:
        document["unseen"].append({"what": "request", "why": complaint})
    sys.stdout.write(f"{BEGIN}\n{to_json(document)}\n{END}\n")
    sys.stdout.flush()
    return 0


def look(request: dict[str, Any], began: float) -> dict[str, Any]:
    """The document for a complete request. `began` is on the monotonic clock."""
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    watch = Watch(request["call_s"], began + request["deadline_s"])
    try:
        host = watch.start(look_at_host, request)
        first = [watch.start(look_at_processes, request)]
        if {"gpus", "links"} & set(request["parts"]):
            first.append(watch.start(look_at_gpus, request))
        watch.attend(first, began + FIRST_SHARE * request["deadline_s"])
        chosen = choose(watch.facts)
        watch.call_s = min(watch.call_s, max(0.05, (watch.end - time.monotonic()) / 3))
        watch.attend([host, watch.start(look_closer, request, chosen, booted)], watch.end)
    finally:
        watch.close()
    return assemble(request, watch, watch.unseen, began)


def read_request(arguments: list[str]) -> tuple[dict[str, Any], str | None]:
    """The request with defaults filled in, and what is wrong with it; wrong values are passed over, as is a garbled whole."""
    request = dict(DEFAULTS, roots=dict(DEFAULTS["roots"]))
    wrong = None
    try:
        given = json.loads(zlib.decompress(base64.urlsafe_b64decode(arguments[0]))) if arguments else {}
        roots = {name: path for name, path in given.pop("roots", {}).items() if name in request["roots"] and isinstance(path, str)}
        request["roots"].update(roots)
        for key, value in given.items():
            if key in DEFAULTS and fits(key, value):
                request[key] = value
            else:
                wrong = f"{key} is not known to this probe or has a wrong value, and was passed over"
    except (ValueError, AttributeError, zlib.error) as error:
        wrong = f"it could not be read, the defaults were taken: {error}"
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    request["roots"]["records"] = request["roots"]["records"] or os.path.join(state, "draftproof/engines")
    return request, wrong


def fits(key: str, value: Any) -> bool:
    """Whether a value of the request can be meant."""
    if key in ("deadline_s", "call_s", "interval_s"):
        return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 3600
    if key == "samples":
        return type(value) is int and 1 <= value <= 1000
    kind = int if key in ("gpus", "ports") else str
    return (key == "gpus" and value is None) or (isinstance(value, list) and all(type(one) is kind for one in value))


def to_json(document: dict[str, Any]) -> str:
    """One line of ASCII. Half characters, which file names and command lines may hold, become question marks."""
    line = json.dumps(document)
    return line if "\\ud" not in line else json.dumps(json.loads(json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")))


# The document

HEALTH = ("ecc_uncorrected", "remap_pending", "remap_failed", "recovery_action", "slowdown", "temperature_c")
OTHER = ("uuid", "name", "minor", "bus_id", "numa_node", "compute_capability", "processes", "mig", "pcie", "compute_mode", "persistence")
PART_OF = {"gpu": "gpus", "nvml": "gpus", "links": "links", "processes": "processes"}
ALWAYS = ("boot_id", "pid_namespace", "viewer", "port", "disk")
"""Facts that belong to no part; all that stands neither here nor above belongs to `host`."""


def assemble(request: dict[str, Any], watch: Watch, unseen: dict[str, str], began: float) -> dict[str, Any]:
    """The document, schema 1, from the facts. Each null in it gets a reason."""
    facts, told = watch.facts, dict(unseen)
    asked = set(request["parts"]) | ({"gpus"} if "links" in request["parts"] else set())
    for gpu, call in (lost for child in watch.children for lost in given_up(child.stalls)[1].items()):
        told[f"gpu.{gpu}"] = f"it was given up after {call} did not answer either"

    def get(what: str) -> Any:
        value = facts.get(what)
        if value is None and what not in told:
            words = what.split(".")
            gpus = [f"gpu.{word}" for word in words[1:3] if words[0] in ("gpu", "links")]
            above = [told[name] for name in (*gpus, *(".".join(words[:n]) for n in range(1, len(words)))) if name in told]
            if words[0] not in ALWAYS and PART_OF.get(words[0], "host") not in asked:
                told[what] = "it was not asked for"
            elif above:
                told[what] = above[-1]
            else:
                told[what] = f"it was not reached within {request['deadline_s']:g} s"
        return value

    uid, namespace = os.getuid(), get("pid_namespace")
    count = get("nvml.count") or 0
    wanted = range(count) if request["gpus"] is None else sorted(set(request["gpus"]))
    indices = [index for index in wanted if 0 <= index < count]
    for index in set(wanted) - set(indices):
        told.setdefault(f"gpu.{index}", f"NVML counts {count} GPUs here")
    for port in request["ports"]:
        if not 0 < port < 65536:
            told[f"port.{port}"] = "there is no port of this number"
    linked = "links" in request["parts"] and "nvml.count" in facts
    shm = get("shm")
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
            "present": facts.get("nvml.present", False),
            "why": facts.get("nvml.why") or told.get("nvml") or told.get("nvml.count"),
            "driver": get("nvml.driver") if facts.get("nvml.present") else None,
            "cuda": get("nvml.cuda") if facts.get("nvml.present") else None,
        },
        "gpus": [gpu_entry(index, request["samples"], get) for index in indices],
        "links": [link_entry(a, b, get) for a in indices for b in indices if a != b] if linked else get("links"),
        "xid": get("xid"),
        "processes": process_entries(facts) if get("processes") is not None and "processes" in asked else None,
        "host_memory": get("host_memory"),
        "shm": None if shm is None else dict(shm, stale=get("shm.stale") or []),
        "disks": [entry for path in request["paths"] for entry in [get(f"disk.{path}")] if entry is not None],
        "limits": get("limits"),
        "ports": [dict(entry, owner=facts.get(f"port.{entry['port']}.owner")) for entry in map(get, port_names(request)) if entry],
        "clock": get("clock"),
        "iommu": get("iommu"),
        "torch": get("torch"),
    }
    document["unseen"] = [{"what": what, "why": why} for what, why in told.items()]
    document["seconds"] = round(time.monotonic() - began, 4)
    return document


def gpu_entry(index: int, samples: int, get: Callable[[str], Any]) -> dict[str, Any]:
    """One GPU of the document."""
    memory = get(f"gpu.{index}.memory")
    if memory is not None:
        later = [get(f"gpu.{index}.memory.{number}") for number in range(1, samples)]
        alike = [memory, *(sample for sample in later if sample is not None and sample["version"] == memory["version"])]
        memory = dict(alike[-1], used=[sample["used"] for sample in alike])
    health = {name: get(f"gpu.{index}.health.{name}") for name in HEALTH}
    seen = any(value is not None for value in health.values())
    entry = {"index": index, "memory": memory, "health": health if seen else None, **{name: get(f"gpu.{index}.{name}") for name in OTHER}}
    again = get(f"gpu.{index}.processes.again") if samples > 1 else None
    return entry if again is None else dict(entry, processes=again)


def link_entry(a: int, b: int, get: Callable[[str], Any]) -> dict[str, Any]:
    """One direction between two GPUs. What both hang on is the same for both directions."""
    directions = {name: get(f"links.{a}.{b}.{name}") for name in ("read", "write")}
    return {"from": a, "to": b, **directions, "ancestor": get(f"links.{min(a, b)}.{max(a, b)}.ancestor")}


def process_entries(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The processes of the document, by pid."""
    entries = []
    for entry in described(facts):
        user = facts.get(f"user.{entry['uid']}") or str(entry["uid"])
        command = facts.get(f"process.{entry['pid']}.command") or ""
        entries.append(dict(entry, user=user, command=command, engine=(facts.get("engines") or {}).get(str(entry["pid"]))))
    return entries


def described(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """What `describe` saw, by pid."""
    return sorted((fact for name, fact in facts.items() if re.fullmatch(r"process\.\d+", name)), key=lambda fact: int(fact["pid"]))


# Children that may hang


class Watch:
    """The parent's side: starts children, gathers what they see, and kills those that stand still."""

    def __init__(self, call_s: float, end: float) -> None:
        self.call_s, self.end = call_s, end
        self.facts: dict[str, Any] = {}
        self.unseen: dict[str, str] = {}
        self.children: list[Child] = []

    def start(self, look: Callable[..., None], *arguments: Any) -> Child:
        """A child that runs `look(report, *arguments)`."""
        child = Child(look, arguments)
        self.children.append(child)
        self._fork(child)
        return child

    def attend(self, wanted: Iterable[Child], until: float) -> None:
        """Gather from all children until the wanted ones are over, or it is `until`."""
        wanted = list(wanted)
        while not all(child.over for child in wanted) and time.monotonic() < until:
            running = {child.pipe: child for child in self.children if not child.over}
            poll = select.poll()
            for pipe in running:
                poll.register(pipe, select.POLLIN)
            dues = [child.since() + self.call_s for child in running.values()]
            wait = min([until, time.monotonic() + 0.1, *dues]) - time.monotonic()
            ready = {pipe for pipe, _ in poll.poll(max(0.0, wait) * 1000 + 1)}
            for pipe, child in running.items():
                if pipe in ready:
                    self._read(child)
                elif time.monotonic() - child.since() > self.call_s:
                    self._lose(child, f"did not answer within {self.call_s:.2g} s")

    def close(self) -> None:
        """Kill what still runs. A child stuck in the kernel stays, and becomes init's."""
        for child in self.children:
            if not child.over:
                child.kill()

    def _fork(self, child: Child) -> None:
        reading, writing = os.pipe()
        child.prepare()
        try:
            pid = os.fork()
        except OSError as error:
            self.unseen.setdefault("probe", f"a child could not be started: {error.strerror}")
            child.over = True
            os.close(reading)
            os.close(writing)
            return
        if pid == 0:
            run_child(child, Report(child, writing, self.facts, self.unseen))
        os.close(writing)
        child.pid, child.pipe = pid, reading

    def _read(self, child: Child) -> None:
        data = os.read(child.pipe, 1 << 20)
        *lines, child.rest = (child.rest + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if said is None:
                child.finished = True
            elif len(said) == 2:
                self.facts[said[0]] = said[1]
            else:
                self.unseen[said[0]] = said[2]
        if child.finished:  # it need not end: closing the driver may take long
            child.kill()
        elif not data:
            self._lose(child, f"ended the look with {child.fate()}")

    def _lose(self, child: Child, how: str) -> None:
        """A child stalled or died: name where it stood, and start another that goes on behind it."""
        what, call = child.stands_at()
        child.kill()
        self.unseen.setdefault(what or "probe", f"{call or 'a child'} {how}")
        child.stalls.append((what, call))
        if what and len(child.stalls) < MOST_STALLS:
            child.over = False
            self._fork(child)


class Child:
    """A forked process and what its parent knows of it. Where it stands is in memory that both share: since when, what, call."""

    def __init__(self, look: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.look, self.arguments = look, arguments
        self.stalls: list[tuple[str, str]] = []
        self.over = False
        self.pid, self.pipe = 0, -1

    def prepare(self) -> None:
        """For a fork: it stands nowhere, and has said nothing."""
        self.place = mmap.mmap(-1, 4096)
        # Through these a number is written as a whole. `struct` writes byte by byte: the parent would read half a time, and a stall.
        self.clock, self.size = memoryview(self.place)[:8].cast("d"), memoryview(self.place)[8:16].cast("q")
        self.rest, self.finished = b"", False
        self.stand("", "")

    def stand(self, what: str, call: str) -> None:
        """The child is about to do something that may hang."""
        place = f"{what}\0{call}".encode("utf-8", "replace")[:2000]
        self.place[16 : 16 + len(place)] = place
        self.size[0] = len(place)
        self.clock[0] = time.monotonic()

    def sleep(self, until: float) -> None:
        """The child is idle, which is no stall."""
        self.clock[0] = math.inf
        time.sleep(max(0.0, until - time.monotonic()))

    def since(self) -> float:
        """When the child came to where it stands."""
        return self.clock[0]

    def stands_at(self) -> tuple[str, str]:
        """What it looks at, and the call that it made for it."""
        what, _, call = self.place[16 : 16 + self.size[0]].decode("utf-8", "replace").partition("\0")
        return what, call

    def fate(self) -> str:
        """How a child ended that closed its pipe too early."""
        for _ in range(50):  # the pipe closes a moment before the process can be collected
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                names = {one.value: one.name for one in signal.Signals}
                number = os.WTERMSIG(status)
                return names.get(number, f"signal {number}") if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
            time.sleep(0.002)
        return "no word"

    def kill(self) -> None:
        """Without waiting for it."""
        self.over = True
        os.close(self.pipe)
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)  # its number cannot be another's: only fate() collects it, and then forgets it
            self.pid = 0


class Report:
    """The child's side: says where it stands and what it saw. `facts`, `unseen` and the stalls are as they were at the fork."""

    def __init__(self, child: Child, pipe: int, facts: dict[str, Any], unseen: dict[str, str]) -> None:
        self.pipe, self.facts, self.told = pipe, facts, unseen
        self.stand, self.sleep, self.stalls = child.stand, child.sleep, child.stalls

    def wants(self, what: str) -> bool:
        """Whether nothing is known about it yet."""
        return what not in self.facts and what not in self.told

    def see(self, what: str, call: str, look: Callable[..., Any], *arguments: Any) -> Any:
        """What look(*arguments) returns, sent as the fact `what` unless that is known; or None, and why it failed is sent."""
        if not self.wants(what):
            return self.facts.get(what)
        self.stand(what, call)
        try:
            value = look(*arguments)
        except Exception as error:  # noqa: BLE001  (one fact that fails must not take the others along)
            self.unseen(what, reason(error, call))
            return None
        self.put(what, value)
        return value

    def put(self, what: str, value: Any) -> None:
        """Send a fact."""
        self.facts[what] = value
        self.send([what, value])

    def unseen(self, what: str, why: str) -> None:
        """Send why something is not seen."""
        self.told[what] = why
        self.send([what, None, why])

    def send(self, line: list[Any] | None) -> None:
        """Write a line to the parent; None says that all is done."""
        data = json.dumps(line).encode() + b"\n"
        while data:
            data = data[os.write(self.pipe, data) :]


def run_child(child: Child, report: Report) -> None:
    """Look, report, and end. Never returns."""
    code = 1
    try:
        null = os.open("/dev/null", os.O_RDWR)
        for stream in (0, 1, 2):  # a stuck child must not keep ssh's channel open, nor a driver write into the document
            os.dup2(null, stream)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        child.look(report, *child.arguments)
        report.send(None)
        code = 0
    except BaseException as error:  # noqa: BLE001  (nothing may escape into the parent's code)
        with contextlib.suppress(OSError):
            what, call = child.stands_at()
            report.unseen(what or "probe", f"{call or 'a child'} failed: {reason(error, call)}")
    finally:
        os._exit(code)


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
    1: "UNINITIALIZED",
    2: "INVALID_ARGUMENT",
    3: "NOT_SUPPORTED",
    4: "NO_PERMISSION",
    6: "NOT_FOUND",
    7: "INSUFFICIENT_SIZE",
    8: "INSUFFICIENT_POWER",
    9: "DRIVER_NOT_LOADED",
    10: "TIMEOUT",
    11: "IRQ_ISSUE",
    12: "LIBRARY_NOT_FOUND",
    13: "FUNCTION_NOT_FOUND",
    14: "CORRUPTED_INFOROM",
    15: "GPU_IS_LOST",
    16: "RESET_REQUIRED",
    17: "OPERATING_SYSTEM",
    18: "LIB_RM_VERSION_MISMATCH",
    19: "IN_USE",
    20: "MEMORY",
    21: "NO_DATA",
    23: "INSUFFICIENT_RESOURCES",
    25: "ARGUMENT_VERSION_MISMATCH",
    26: "DEPRECATED",
    27: "NOT_READY",
    28: "GPU_NOT_FOUND",
    29: "INVALID_STATE",
    999: "UNKNOWN",
}
NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE = 3, 6, 7
OLDER = (2, 3, 13, 25, 26)
"""After these an older version of the function is asked: the driver knows the newer one by name alone."""

LISTS = {"compute": "nvmlDeviceGetComputeRunningProcesses", "graphics": "nvmlDeviceGetGraphicsRunningProcesses",
         "mps": "nvmlDeviceGetMPSComputeRunningProcesses"}  # fmt: skip
NO_BYTES = 2**64 - 1
"""The driver does not say how much a process holds."""
FIELD_RECOVERY_ACTION = 230
RECOVERY = {0: "none", 1: "reset", 2: "reboot", 3: "drain_p2p", 4: "drain_and_reset", 6: "reset", 7: "reboot"}
"""6 resets the bus, 7 reboots the system: to a reader the same as 1 and 2."""
SLOWDOWN = {0x8: "hw_slowdown", 0x40: "hw_thermal", 0x80: "hw_power_brake"}
"""The reasons that mean trouble. A power cap or idle clocks are everyday."""
COMPUTE_MODE = {0: "default", 1: "exclusive_process", 2: "prohibited", 3: "exclusive_process"}
P2P = {0: "ok", 1: "chipset_not_supported", 2: "gpu_not_supported", 3: "ioh_topology_not_supported", 4: "disabled_by_regkey",
       5: "not_supported"}  # fmt: skip
ANCESTOR = {0: "internal", 10: "single", 20: "multiple", 30: "hostbridge", 40: "node", 50: "system"}


class NvmlError(Told):
    """A function of NVML is missing, was given up, or returned a status other than success."""

    def __init__(self, name: str, why: str, status: int = 0) -> None:
        super().__init__(f"{name}{why}")
        self.status = status


def look_at_gpus(report: Report, request: dict[str, Any]) -> None:
    """Facts of all GPUs: first who they are and what they hold, then their health, the further samples, and the links.

    A function that stalled on two GPUs is not asked again, and a GPU on which two functions stalled is left alone; a GPU on
    which one did comes after the others.
    """
    nvml = open_nvml(report, request["roots"])
    if nvml is None:
        return
    report.see("nvml.driver", "nvmlSystemGetDriverVersion", nvml.text, "nvml.driver", "nvmlSystemGetDriverVersion")
    report.see("nvml.cuda", "nvmlSystemGetCudaDriverVersion_v2", nvml.cuda)
    count = report.see("nvml.count", "nvmlDeviceGetCount_v2", nvml.number, "nvml.count", "nvmlDeviceGetCount_v2") or 0
    doubtful = {what.split(".")[1] for what, _ in report.stalls if what.startswith("gpu.")}
    wanted = [index for index in (range(count) if request["gpus"] is None else set(request["gpus"])) if 0 <= index < count]
    gpus = []
    for index in sorted(wanted, key=lambda index: (str(index) in doubtful, index)):
        if index not in nvml.lost and f"gpu.{index}" not in report.told:
            handle = ctypes.c_void_p()
            try:
                nvml.ask(f"gpu.{index}", "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            except NvmlError as error:
                report.unseen(f"gpu.{index}", str(error))
                continue
            gpus.append(Gpu(nvml, report, index, handle))
    for gpu in gpus:
        gpu.look_first()
    begun = time.monotonic()
    for gpu in gpus:
        gpu.look_further(request["roots"]["sys"])
    for number in range(1, request["samples"]):
        report.sleep(begun + number * request["interval_s"])
        for gpu in gpus:
            gpu.see(f"memory.{number}", gpu.memory)
    for gpu in gpus if request["samples"] > 1 else []:
        # A process that ended while we sampled is no longer a holder, and none must be missing that began.
        gpu.see("processes.again", gpu.processes)
    if "links" in request["parts"]:
        look_at_links(report, nvml, gpus)


def look_at_links(report: Report, nvml: Nvml, gpus: list[Gpu]) -> None:
    """P2P status of each directed pair, and what each pair hangs on."""

    def status(what: str, a: Gpu, b: Gpu, direction: int) -> str:
        return P2P.get(nvml.number(what, "nvmlDeviceGetP2PStatus", a.handle, b.handle, ctypes.c_int(direction)), "unknown")

    def ancestor(what: str, a: Gpu, b: Gpu) -> str:
        return ANCESTOR[nvml.number(what, "nvmlDeviceGetTopologyCommonAncestor", a.handle, b.handle)]

    for a in gpus:
        for b in gpus:
            for direction, name in enumerate(("read", "write") if a is not b else ()):
                what = f"links.{a.index}.{b.index}.{name}"
                report.see(what, "links", status, what, a, b, direction)
            if a.index < b.index:
                what = f"links.{a.index}.{b.index}.ancestor"
                report.see(what, "links", ancestor, what, a, b)


def open_nvml(report: Report, roots: dict[str, Any]) -> Nvml | None:
    """NVML, initialised; or None, and the facts say why. That a machine without GPUs has no NVML is nothing unseen."""
    library = None
    if report.wants("nvml"):
        report.stand("nvml", f"loading {roots['nvml']}")
        try:
            library = ctypes.CDLL(roots["nvml"])
        except OSError as error:
            report.put("nvml.present", False)
            report.put("nvml.why", str(error))
            devices = [*glob.glob(f"{roots['dev']}/nvidia[0-9]*"), *glob.glob(f"{roots['proc']}/driver/nvidia")]
            if devices:
                report.unseen("nvml", f"{devices[0]} is there, but {roots['nvml']} cannot be loaded: {error}")
    if library is not None:
        report.put("nvml.present", True)
        nvml = Nvml(library, report)
        try:
            nvml.ask("nvml", "nvmlInit_v2")
        except NvmlError as error:
            report.unseen("nvml", str(error))
        else:
            return nvml
    report.put("nvml.count", 0)
    return None


def given_up(stalls: list[tuple[str, str]]) -> tuple[set[str], dict[int, str]]:
    """Functions that stalled on two GPUs or pairs; and GPUs on which two other functions did, each with the last of them."""
    calls = collections.Counter(call for _, call in stalls)
    functions = {call for call, times in calls.items() if times > 1}
    on = [(int(what.split(".")[1]), call) for what, call in stalls if what.startswith("gpu.") and call not in functions]
    gpus = collections.Counter(gpu for gpu, _ in on)
    return functions, {gpu: call for gpu, call in on if gpus[gpu] > 1}


class Nvml:
    """The library, called by name. `what` is the fact that a call is made for."""

    def __init__(self, library: ctypes.CDLL, report: Report) -> None:
        self.library, self.report = library, report
        self.functions, self.lost = given_up(report.stalls)

    def has(self, name: str) -> bool:
        """Whether this driver has a function."""
        return hasattr(self.library, name)

    def ask(self, what: str, name: str, *arguments: Any) -> None:
        """Call a function; raises NvmlError unless it succeeds."""
        if not self.has(name):
            raise NvmlError(name, " is missing in this driver", 13)
        if name in self.functions:
            raise NvmlError(name, " did not answer for two GPUs and was not asked again")
        self.report.stand(what, name)
        status = getattr(self.library, name)(*arguments)
        if status:
            raise NvmlError(name, f" returned {STATUS.get(status, status)}", status)

    def numbers(self, what: str, name: str, kinds: tuple[Any, ...], *arguments: Any) -> list[int]:
        """What a function writes behind its last pointers, of these C types."""
        values = [kind() for kind in kinds]
        self.ask(what, name, *arguments, *map(ctypes.byref, values))
        return [value.value for value in values]

    def number(self, what: str, name: str, *arguments: Any) -> int:
        """What a function writes behind its last pointer, an unsigned int."""
        return self.numbers(what, name, (ctypes.c_uint,), *arguments)[0]

    def text(self, what: str, name: str, *arguments: Any) -> str:
        """What a function writes into a buffer. 80 characters are enough for all versions of all of them but names (96)."""
        buffer = ctypes.create_string_buffer(96)
        self.ask(what, name, *arguments, buffer, ctypes.c_uint(96))
        return buffer.value.decode("utf-8", "replace")

    def cuda(self) -> str:
        """`13.0`, from 13000."""
        version = self.number("nvml.cuda", "nvmlSystemGetCudaDriverVersion_v2")
        return f"{version // 1000}.{version % 1000 // 10}"

    def first(self, *ways: Callable[[], Any]) -> Any:
        """The first of several ways, newest first, that this driver knows; raises what the last one did."""
        for way in ways[:-1]:
            try:
                return way()
            except NvmlError as error:
                if error.status not in OLDER:
                    raise
        return ways[-1]()


class Gpu:
    """One GPU. Layouts are those of nvml.h, as `struct` writes them."""

    def __init__(self, nvml: Nvml, report: Report, index: int, handle: ctypes.c_void_p) -> None:
        self.nvml, self.report, self.index, self.handle = nvml, report, index, handle

    def see(self, name: str, look: Callable[[str], Any]) -> None:
        """Send the fact gpu.N.name, which is look("gpu.N.name")."""
        what = f"gpu.{self.index}.{name}"
        self.report.see(what, name, look, what)

    def look_first(self) -> None:
        """Who it is, and what is on it."""
        self.see("memory", self.memory)
        self.see("mig", self.mig)
        self.see("processes", self.processes)
        self.see("uuid", self.reads("nvmlDeviceGetUUID", self.nvml.text))
        self.see("name", self.reads("nvmlDeviceGetName", self.nvml.text))
        self.see("minor", self.reads("nvmlDeviceGetMinorNumber"))
        self.see("bus_id", self.bus_id)

    def look_further(self, sys_root: str) -> None:
        """Whether it is fit."""
        self.see("numa_node", lambda what: numa_node(sys_root, self.report.facts.get(f"gpu.{self.index}.bus_id")))
        self.see("compute_capability", lambda what: self.integers(what, "nvmlDeviceGetCudaComputeCapability", 2))
        self.see("health.temperature_c", self.reads("nvmlDeviceGetTemperature", self.nvml.number, ctypes.c_int(0)))
        self.see("health.slowdown", self.slowdown)
        # Uncorrected errors since the driver was loaded; those of a lifetime may have been remapped long ago.
        self.see("health.ecc_uncorrected", lambda what: self.nvml.numbers(
            what, "nvmlDeviceGetTotalEccErrors", (ctypes.c_ulonglong,), self.handle, ctypes.c_int(1), ctypes.c_int(0))[0])  # fmt: skip
        self.see("health.remap_pending", lambda what: bool(self.integers(what, "nvmlDeviceGetRemappedRows", 4)[2]))
        self.see("health.remap_failed", lambda what: bool(self.integers(what, "nvmlDeviceGetRemappedRows", 4)[3]))
        self.see("health.recovery_action", self.recovery_action)
        self.see("pcie", self.pcie)
        self.see("compute_mode", lambda what: COMPUTE_MODE[self.nvml.number(what, "nvmlDeviceGetComputeMode", self.handle)])
        self.see("persistence", lambda what: bool(self.nvml.number(what, "nvmlDeviceGetPersistenceMode", self.handle)))

    def reads(self, name: str, how: Callable[..., Any] | None = None, *arguments: Any) -> Callable[[str], Any]:
        """A look that calls one function, which writes an unsigned int or, with `text`, a string."""
        return lambda what: (how or self.nvml.number)(what, name, self.handle, *arguments)

    def integers(self, what: str, name: str, count: int) -> list[int]:
        """The ints that a function writes."""
        return self.nvml.numbers(what, name, (ctypes.c_int,) * count, self.handle)

    def memory(self, what: str) -> dict[str, Any]:
        """Bytes. Version 2 tells the driver's own share apart; version 1 counts it as used."""

        def second() -> dict[str, Any]:
            buffer = ctypes.create_string_buffer(struct.pack("<I36x", 0x02000028), 40)
            self.nvml.ask(what, "nvmlDeviceGetMemoryInfo_v2", self.handle, buffer)
            total, reserved, free, used = struct.unpack("<8xQQQQ", buffer.raw)
            return {"version": 2, "total": total, "reserved": reserved, "used": used, "free": free}

        def first() -> dict[str, Any]:
            buffer = ctypes.create_string_buffer(24)
            self.nvml.ask(what, "nvmlDeviceGetMemoryInfo", self.handle, buffer)
            total, free, used = struct.unpack("<QQQ", buffer.raw)
            return {"version": 1, "total": total, "reserved": None, "used": used, "free": free}

        found: dict[str, Any] = self.nvml.first(second, first)
        missing = f"gpu.{self.index}.memory.reserved"
        if found["version"] == 1 and self.report.wants(missing):
            self.report.unseen(missing, "this driver knows only version 1 of the call, which counts what the driver keeps as used")
        return found

    def mig(self, what: str) -> dict[str, Any]:
        """Whether it is split, and in how many. A GPU or driver that cannot split is not split."""
        try:
            enabled = self.integers(what, "nvmlDeviceGetMigMode", 2)[0] == 1
        except NvmlError as error:
            if error.status not in OLDER:
                raise
            enabled = False
        return {"enabled": enabled, "instances": len(self.mig_handles(what)) if enabled else 0}

    def mig_handles(self, what: str) -> list[ctypes.c_void_p]:
        """The instances that exist."""
        handles = []
        for number in range(self.nvml.number(what, "nvmlDeviceGetMaxMigDeviceCount", self.handle)):
            handle = ctypes.c_void_p()
            try:
                self.nvml.ask(what, "nvmlDeviceGetMigDeviceHandleByIndex", self.handle, ctypes.c_uint(number), ctypes.byref(handle))
            except NvmlError as error:
                if error.status not in (NOT_FOUND, 2):
                    raise
            else:
                handles.append(handle)
        return handles

    def processes(self, what: str) -> list[dict[str, Any]]:
        """Who holds memory. One line for each pid and kind, MIG instances included."""
        split = (self.report.facts.get(f"gpu.{self.index}.mig") or {}).get("enabled")
        instances = self.mig_handles(what) if split else []
        lines = []
        for kind, name in LISTS.items():
            try:
                whole = self.listed(what, name, self.handle)
            except NvmlError as error:
                if kind == "compute" and not instances:
                    raise
                if error.status != NOT_SUPPORTED and not instances:  # a driver without graphics or MPS has nobody there
                    self.report.unseen(f"{what}.{kind}", str(error))
                whole = {}
            parts: dict[int, int | None] = {}
            for instance in instances:
                for pid, size in self.listed(what, name, instance).items():
                    parts[pid] = None if size is None or parts.get(pid, 0) is None else (parts.get(pid) or 0) + size
            # Root sees an instance's processes in the whole GPU's list as well: they count once.
            lines += [{"pid": pid, "kind": kind, "bytes": size} for pid, size in {**parts, **whole}.items()]
        hidden = [line["pid"] for line in lines if line["bytes"] is None]
        if hidden and self.report.wants(f"{what}.bytes"):
            self.report.unseen(f"{what}.bytes", f"the driver does not say how much pid {', '.join(map(str, hidden))} holds")
        return lines

    def listed(self, what: str, name: str, handle: ctypes.c_void_p) -> dict[int, int | None]:
        """Pid -> bytes in one list. Versions 2 and 3 add the MIG instance to each line."""
        # Drivers 535.43 to 535.86 had one more number in a line of version 3.
        wide = self.nvml.has("nvmlDeviceGetConfComputeMemSizeInfo") and not self.nvml.has("nvmlDeviceGetRunningProcessDetailList")
        found: dict[int, int | None] = self.nvml.first(
            lambda: self._lines(what, f"{name}_v3", handle, 32 if wide else 24),
            lambda: self._lines(what, f"{name}_v2", handle, 24),
            lambda: self._lines(what, name, handle, 16),
        )
        return found

    def _lines(self, what: str, name: str, handle: ctypes.c_void_p, size: int) -> dict[int, int | None]:
        room = 64
        while True:
            count = ctypes.c_uint(room)
            buffer = ctypes.create_string_buffer(room * 32)
            try:
                self.nvml.ask(what, name, handle, ctypes.byref(count), buffer)
                break
            except NvmlError as error:
                if error.status != INSUFFICIENT_SIZE or room > 10_000:
                    raise
            room = 2 * max(room, count.value)
        lines = [struct.unpack_from("<I4xQ", buffer, number * size) for number in range(count.value)]
        return {pid: None if held == NO_BYTES else held for pid, held in lines}

    def bus_id(self, what: str) -> str:
        """As sysfs writes it. The numbers stand at the same place in all versions of the struct."""
        buffer = ctypes.create_string_buffer(128)
        names = ("nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo")
        self.nvml.first(*(functools.partial(self.nvml.ask, what, name, self.handle, buffer) for name in names))
        domain, bus, device = struct.unpack_from("<16xIII", buffer)
        return f"{domain:04x}:{bus:02x}:{device:02x}.0"

    def slowdown(self, what: str) -> list[str]:
        """Hardware reasons for lower clocks."""
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        ways = (functools.partial(self.nvml.numbers, what, name, (ctypes.c_ulonglong,), self.handle) for name in names)
        (mask,) = self.nvml.first(*ways)
        return [name for bit, name in SLOWDOWN.items() if mask & bit]

    def recovery_action(self, what: str) -> str:
        """What the driver wants done."""
        buffer = ctypes.create_string_buffer(struct.pack("<I36x", FIELD_RECOVERY_ACTION), 40)
        self.nvml.ask(what, "nvmlDeviceGetFieldValues", self.handle, ctypes.c_int(1), buffer)
        status, value = struct.unpack_from("<28xII", buffer)
        if status:
            raise NvmlError("field GET_GPU_RECOVERY_ACTION", f" returned {STATUS.get(status, status)}", status)
        if value not in RECOVERY:
            raise NvmlError("field GET_GPU_RECOVERY_ACTION", f" holds {value}, which this probe does not know")
        return RECOVERY[value]

    def pcie(self, what: str) -> dict[str, int]:
        """Its link, now and at most."""
        names = {"width": "CurrPcieLinkWidth", "max_width": "MaxPcieLinkWidth", "generation": "CurrPcieLinkGeneration",
                 "max_generation": "MaxPcieLinkGeneration"}  # fmt: skip
        return {name: self.nvml.number(what, f"nvmlDeviceGet{function}", self.handle) for name, function in names.items()}


def numa_node(sys_root: str, bus_id: str | None) -> int:
    """The NUMA node of a PCI slot. The kernel says -1 where firmware names none; on a machine of one node it is that one."""
    if bus_id is None:
        raise Told("its bus id was not seen")
    try:
        node = int(read(f"{sys_root}/bus/pci/devices/{bus_id}/numa_node"))
    except OSError:
        raise Told(f"sysfs does not show {bus_id}") from None
    if node < 0 and len(glob.glob(f"{sys_root}/devices/system/node/node[0-9]*")) > 1:
        raise Told(f"the firmware names no node for {bus_id}")
    return max(0, node)


# Processes

KERNEL_THREAD = 0x00200000
"""PF_KTHREAD among the flags of /proc/PID/stat."""
TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
MARK = b"DRAFTPROOF_ENGINE="


def look_at_processes(report: Report, request: dict[str, Any]) -> None:
    """One pass over /proc: parents and open device files of all; who has the ports; stale shared memory; our engines' processes."""
    roots, names = request["roots"], port_names(request)
    for name in names:
        report.see(name, "bind", bind_test, int(name[5:]))
    taken = [int(name[5:]) for name in names if not (report.facts.get(name) or {}).get("free", True)]
    sockets = report.see("sockets", f"{roots['proc']}/net/tcp", sockets_of, roots["proc"], taken) if taken else None
    segments = report.see("segments", roots["shm"], own_segments, roots["shm"]) if "host" in request["parts"] else None
    if report.wants("processes") and ("processes" in request["parts"] or sockets or segments):
        pass_over(report, roots, sockets or {})
    if segments is not None and report.wants("shm.stale"):
        report.put("shm.stale", stale_segments(report, roots, segments))
    if "processes" in request["parts"] and report.wants("engines"):
        report.put("engines", find_engines(report, roots))


def pass_over(report: Report, roots: dict[str, Any], sockets: dict[str, int]) -> None:
    """The fact `processes`: [pid, parent, open device files or None if they may not be read] of all but kernel threads and us."""
    proc, dev, shm = roots["proc"], os.path.realpath(roots["dev"]) + "/", os.path.realpath(roots["shm"]) + "/"
    table, segments = [], set()
    report.stand("processes", proc)
    for pid in numbered(proc):
        if not report.wants(f"process.{pid}"):
            continue
        report.stand(f"process.{pid}", f"{proc}/{pid}")
        try:
            stat = read_stat(proc, pid)
            if stat["kernel"] or os.getppid() in (pid, stat["ppid"]):
                continue  # the probe's own children have the GPUs open
            links = open_files(proc, pid, stat["state"])
        except OSError:
            continue  # it ended meanwhile
        table.append([pid, stat["ppid"], device_names(links, dev)])
        for link in links or ():
            if link.startswith(shm):
                segments.add(link[len(shm) :])
            elif link in sockets and report.wants(f"port.{sockets[link]}.owner"):
                what = f"port.{sockets[link]}.owner"
                report.stand(what, f"{proc}/{pid}/cmdline")
                report.put(what, {"pid": pid, "command": command_of(proc, pid)})
    hidden = sum(1 for _, _, devices in table if devices is None)
    if hidden:
        report.unseen("processes.device_fds", f"the open files of {hidden} processes of other users may not be read")
    report.put("segments.open", sorted(segments))
    report.put("processes", table)


def choose(facts: dict[str, Any]) -> list[int]:
    """Pids to describe: those that NVML lists, that have a device open, or are of our engines; all above and below them."""
    table = facts.get("processes") or []
    parents = {pid: ppid for pid, ppid, _ in table}
    children: dict[int, list[int]] = {}
    for pid, ppid, _ in table:
        children.setdefault(ppid, []).append(pid)
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


def look_closer(report: Report, request: dict[str, Any], chosen: list[int], booted: float) -> None:
    """Everything of the chosen processes and of the other members of their units. `booted` is in unix seconds."""
    if "processes" not in request["parts"]:
        return
    proc, dev = request["roots"]["proc"], os.path.realpath(request["roots"]["dev"]) + "/"
    report.stand("processes.hidden", f"{proc}/mounts")
    hidden = hides_processes(proc)
    for pid in chosen:
        describe(report, proc, dev, pid, booted, hidden)
    units = {unit_of(fact["cgroup"])[2] for fact in described(report.facts)} - {None}
    for pid, _, _ in (report.facts.get("processes") or ()) if units else ():
        if report.wants(f"process.{pid}"):
            report.stand(f"process.{pid}", f"{proc}/{pid}/cgroup")
            with contextlib.suppress(OSError):
                if unit_of(parse_cgroup(read(f"{proc}/{pid}/cgroup")))[2] in units:
                    describe(report, proc, dev, pid, booted, None)
    entries = described(report.facts)
    for uid in {entry["uid"] for entry in entries}:  # a directory service that is asked for the name may hang
        report.see(f"user.{uid}", f"getpwuid({uid})", user_name, uid)
    for entry in entries:
        report.see(f"process.{entry['pid']}.command", f"{proc}/{entry['pid']}/cmdline", command_of, proc, entry["pid"])


def describe(report: Report, proc: str, dev: str, pid: int, booted: float, hidden: str | None) -> None:
    """The fact process.PID, but for what may hang. None for a process that is gone; `hidden` says why others may seem so."""
    what = f"process.{pid}"
    if not report.wants(what):
        return
    report.stand(what, f"{proc}/{pid}")
    try:
        stat = read_stat(proc, pid)
        uid = int(re.findall(r"^Uid:\s+(\d+)", read(f"{proc}/{pid}/status"), re.MULTILINE)[0])
        cgroup = parse_cgroup(read(f"{proc}/{pid}/cgroup"))
        devices = device_names(open_files(proc, pid, stat["state"]), dev)
    except OSError as error:
        if hidden is not None:
            report.unseen(what, hidden)
        elif not isinstance(error, (FileNotFoundError, ProcessLookupError)):
            report.unseen(what, reason(error, f"{proc}/{pid}"))
        return
    unit, scope, _ = unit_of(cgroup)
    report.put(what, {
        "pid": pid, "ppid": stat["ppid"], "start_ticks": stat["start"], "started": round(booted + stat["start"] / TICKS, 2), "uid": uid,
        "comm": stat["comm"], "state": stat["state"], "session": stat["session"], "pgrp": stat["pgrp"], "rss": stat["rss"] * PAGE,
        "cgroup": cgroup, "unit": unit, "unit_scope": scope, "container": container_of(cgroup),
        "pid_namespace": namespace_of(proc, str(pid)), "device_fds": devices,
    })  # fmt: skip


def find_engines(report: Report, roots: dict[str, Any]) -> dict[int, dict[str, str]]:
    """Pid -> engine, for the processes whose environment holds the token of a record of this boot."""
    report.stand("engines", roots["records"])
    records = {}
    boot_id = read(f"{roots['proc']}/sys/kernel/random/boot_id").strip()
    for path in glob.glob(glob.escape(roots["records"]) + "/*.json"):
        try:
            record = json.loads(read(path))
            if record["boot_id"] == boot_id:
                records[record["token"].encode()] = {"what": str(record["what"]), "run": str(record["run"])}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            report.unseen(f"engines.{os.path.basename(path)}", f"this record cannot be read: {type(error).__name__}")
    engines = {}
    for pid, _, _ in (report.facts.get("processes") or ()) if records else ():
        what = f"process.{pid}.engine"
        if report.wants(what):
            report.stand(what, f"{roots['proc']}/{pid}/environ")
            with contextlib.suppress(OSError):  # ended, or another user's
                for entry in read_bytes(f"{roots['proc']}/{pid}/environ").split(b"\0"):
                    if entry.startswith(MARK) and entry[len(MARK) :] in records:
                        engines[pid] = records[entry[len(MARK) :]]
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
            try:
                links.append(os.readlink(name, dir_fd=folder))
            except OSError:  # closed meanwhile
                continue
    finally:
        os.close(folder)
    return links


def device_names(links: list[str] | None, dev: str) -> list[str] | None:
    """nvidia0, nvidiactl, nvidia-uvm, nvidia-caps/nvidia-cap1, ... among links; `dev` ends with a slash."""
    if links is None:
        return None
    begin = f"{dev}nvidia"
    return sorted({link[len(dev) :].replace(" (deleted)", "") for link in links if link.startswith(begin)})


def numbered(proc: str) -> list[int]:
    """Pids in /proc."""
    return [int(name) for name in os.listdir(proc) if name.isdigit()]


def namespace_of(proc: str, pid: str) -> int | None:
    """Inode of a process's pid namespace; None if it may not be read."""
    try:
        return int(re.findall(r"\d+", os.readlink(f"{proc}/{pid}/ns/pid"))[0])
    except (OSError, IndexError):
        return None


def hides_processes(proc: str) -> str | None:
    """Why other users' processes do not show up at all, if /proc is mounted so."""
    with contextlib.suppress(OSError):
        for line in read(f"{proc}/mounts").splitlines():
            _, folder, kind, options = line.split()[:4]
            if kind == "proc" and folder == proc and re.search(r"hidepid=(?!0|off)", options) and os.geteuid() != 0:
                return "/proc is mounted with hidepid: processes of other users are invisible"
    return None


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
    paths = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths["2" if (number, controllers) == ("0", "") else controllers] = path
    second, first = paths.get("2"), paths.get("name=systemd")
    return first if first is not None and second in (None, "/") else second


def unit_of(cgroup: str | None) -> tuple[str | None, str | None, str | None]:
    """systemd's unit, whose systemd ("system" or "user"), and the unit's own path. Nothing for what runs in a container, whose
    units are not ours to name, nor for Slurm's steps, which all share one scope."""
    parts = (cgroup or "").split("/")
    scope = "system"
    for place, part in enumerate(parts):
        name = part[1:] if part.startswith("_") else part  # systemd escapes names that the kernel uses
        if not name or name.endswith(".slice"):
            continue
        below = [one for one in parts[place + 1 :] if one]
        if scope == "system" and re.fullmatch(r"user@\d+\.service", name) and below:
            if not any(one.endswith((".service", ".scope")) for one in below):
                return name, scope, "/".join(parts[: place + 1])
            scope = "user"
            continue
        unit = name.endswith((".service", ".scope")) and container_of(cgroup) is None and not name.startswith("slurmstepd")
        return (name, scope, "/".join(parts[: place + 1])) if unit else (None, None, None)
    return None, None, None


RUNTIMES = {"docker": "docker", "libpod": "podman", "crio": "containerd", "cri-containerd": "containerd", "nerdctl": "containerd"}


def container_of(cgroup: str | None) -> str | None:
    """Runtime and the first 12 characters of the id, by the ways in which docker, podman, containerd and Kubernetes name groups."""
    parts = (cgroup or "").split("/")
    kubernetes = any("kubepods" in part for part in parts)
    for before, part in zip(["", *parts], parts):  # noqa: B905  (strict= came with Python 3.10)
        match = re.fullmatch(r"(?:([a-z-]+)-)?([0-9a-f]{64})(?:\.scope)?", part)
        if match:
            runtime = RUNTIMES.get(match[1] or before, "containerd")
            return f"{'kubernetes' if kubernetes else runtime}:{match[2][:12]}"
        if part.startswith("lxc.payload."):
            return f"lxc:{part[12:]}"
    return None


# Command lines

SECRET = {"token", "key", "apikey", "password", "passwd", "pwd", "passphrase", "secret", "credential", "credentials", "auth",
          "authorization", "bearer"}  # fmt: skip
HARMLESS = {"id", "ids", "file", "path", "dir", "folder", "type", "name", "len", "length", "size", "count", "dtype"}
"""As the last word, --eos-token-id or --api-key-file, they say that no secret follows."""
VALUE = r"""("[^"]*"|'[^']*'|[^\s"',;&]+)"""
NAMED = (
    re.compile(r"(?<![\w.-])(--?[A-Za-z][\w.-]{0,60})(\s+)" + VALUE),
    re.compile(r"(?<![\w.-])([A-Za-z_-][\w.-]{0,60})([\"']?\s*[=:]\s*)" + VALUE),
)
"""Options and assignments within a text, which hide a secret if their name says so."""
PLAIN = (
    re.compile(r"(?i)\b((?:bearer|basic)\s+)\S+"),
    re.compile(r"(://)[^/\s:@]*:[^/\s@]+(?=@)"),
    re.compile(r"\b(hf_|sk-|ghp_|github_pat_|glpat-|xox[abp]-|nvapi-|AKIA)[\w-]{8,}"),
)
"""HTTP headers, URLs, and tokens that are known by how they begin."""


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
    following = ""
    for word in words:
        assigned = re.match(r"-{0,2}([A-Za-z_][\w.-]*)=", word)
        if following and not word.startswith("--"):
            masked.append("***")
            following = following if "key" in following else ""  # vLLM takes several keys
        elif assigned and is_secret(assigned[1]):
            masked.append(f"{assigned[0]}***")
        else:
            following = word if re.fullmatch(r"--?[A-Za-z][\w.-]*", word) and is_secret(word) else ""
            for pattern in PLAIN:
                word = pattern.sub(r"\1***", word)
            for pattern in NAMED:
                word = hide_named(pattern, word)
            masked.append(word)
    return " ".join(masked)


def hide_named(pattern: re.Pattern[str], text: str) -> str:
    """The text with *** for the values whose names say so. Within the other values it looks further: they may be whole URLs."""
    shown, at = "", 0
    while True:
        found = pattern.search(text, at)
        if found is None:
            return shown + text[at:]
        secret = is_secret(found[1])
        shown += text[at : found.end(2)] + ("***" if secret else "")
        at = found.end() if secret else found.end(2)


def is_secret(name: str) -> bool:
    """Whether an option or variable of this name holds one: HF_TOKEN and --apiKey, not --tokenizer or --eos-token-id."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return bool(SECRET & set(words)) and words[-1] not in HARMLESS


# Ports and shared memory


def port_names(request: dict[str, Any]) -> list[str]:
    """The names of the facts of the ports that were asked for."""
    return [f"port.{port}" for port in dict.fromkeys(request["ports"]) if 0 < port < 65536]


def bind_test(port: int) -> dict[str, Any]:
    """Whether a server could bind the port, as servers do: on all addresses, of IPv4 and IPv6, past connections that linger."""
    for family, address in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                server.bind((address, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return {"port": port, "free": False, "why": error.strerror}
            if family == socket.AF_INET:
                raise  # without IPv6 a server does without, too
    return {"port": port, "free": True, "why": None}


def sockets_of(proc: str, ports: list[int]) -> dict[str, int]:
    """`socket:[inode]` -> port, of those that listen there; of all that are bound there, where none listens."""
    found: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in read(f"{proc}/net/{table}").splitlines()[1:]:
                fields = line.split()
                port = int(fields[1].rpartition(":")[2], 16)
                if port in ports:
                    found[fields[3] == "0A"][f"socket:[{fields[9]}]"] = port
    heard = set(found[True].values())
    return {**{name: port for name, port in found[False].items() if port not in heard}, **found[True]}


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
    held = set(report.facts.get("segments.open") or ())
    stale = [segment for segment in segments if segment["name"] not in held]
    shm = os.path.realpath(roots["shm"])
    for pid, _, _ in report.facts.get("processes") or ():
        if not stale:
            break
        report.stand("shm.stale", f"{roots['proc']}/{pid}/maps")
        with contextlib.suppress(OSError):
            if os.stat(f"{roots['proc']}/{pid}").st_uid == os.getuid():
                maps = read_bytes(f"{roots['proc']}/{pid}/maps")
                stale = [segment for segment in stale if os.fsencode(f"{shm}/{segment['name']}") not in maps]
    return stale


# The host


def look_at_host(report: Report, request: dict[str, Any]) -> None:
    """Who looks, and the rest of the machine."""
    roots = request["roots"]
    proc, sys_root, shm = roots["proc"], roots["sys"], roots["shm"]
    report.see("boot_id", f"{proc}/sys/kernel/random/boot_id", lambda: read(f"{proc}/sys/kernel/random/boot_id").strip())
    report.see("pid_namespace", f"{proc}/self/ns/pid", lambda: int(re.findall(r"\d+", os.readlink(f"{proc}/self/ns/pid"))[0]))
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
    named = container_of(parse_cgroup(read(f"{proc}/self/cgroup")))
    if named is not None:
        return named
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    return "docker" if os.path.exists("/.dockerenv") else "podman" if os.path.exists("/run/.containerenv") else None


def limits() -> dict[str, list[int]]:
    """Soft and hard."""
    names = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}
    return {name: [-1 if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind)] for name, kind in names.items()}


def host_memory(proc: str, sys_root: str) -> dict[str, int | None]:
    """Bytes, and the control group with the least room: its limit, and what it uses beyond file cache that can be dropped."""
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB", read(f"{proc}/meminfo"), re.MULTILINE))
    total, available, swap = (int(kib[name]) * 1024 for name in ("MemTotal", "MemAvailable", "SwapFree"))
    rooms: list[tuple[int, int]] = []
    for number, controllers, path in re.findall(r"^(\d+):([^:]*):(.*)$", read(f"{proc}/self/cgroup"), re.MULTILINE):
        if number == "0":
            tops, files, cache = ["", "/unified"], ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            tops, files, cache = ["/memory"], ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for folder in (os.path.join(f"{sys_root}/fs/cgroup{top}", *parts[:depth]) for top in tops for depth in range(len(parts) + 1)):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                most, used = (int(read(f"{folder}/{name}")) for name in files)
                droppable = dict(line.split() for line in read(f"{folder}/memory.stat").splitlines()).get(cache, 0)
                if most < total:
                    rooms.append((most, max(0, used - int(droppable))))
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
    log = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
    records = []
    try:
        while True:
            try:
                record = os.read(log, 8192)
            except BlockingIOError:
                break  # that was the last
            except BrokenPipeError:
                continue  # it was overwritten before we came to it
            if not record:
                break
            records.append(record)
    finally:
        os.close(log)
    booted = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    text = b"".join(records).decode("utf-8", "replace")
    pattern = r"^\d+,\d+,(\d+),[^;\n]*;(NVRM: Xid \((?:PCI:)?([0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+)(\.\d)?\): (\d+).*)$"
    return [
        {"time": round(booted + int(at) / 1e6, 2), "bus_id": bus.lower() + (function or ".0"), "xid": int(number), "text": line[:500]}
        for at, line, bus, function, number in re.findall(pattern, text, re.MULTILINE)
    ][-1000:]


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
