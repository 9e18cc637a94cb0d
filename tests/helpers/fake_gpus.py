"""GPUs without GPUs: a fake NVML (`tests/fakes/nvml.c`) whose memory belongs to real processes.

    with FakeGpus(tmp_path, count=8) as gpus:
        pid = gpus.holder([3], mib=71_604, name="VLLM::Worker_TP3")
        look_at([Reach()], Needs())                 # under gpus.roots(), as the environment says

Holders are orphans in sessions of their own, so that nobody takes them for the test's. They open files in a folder that stands for
/dev, append what they hold to the library's description, and are ended by a token in their environment.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "fakes" / "nvml.c"
PROBE = SOURCE.parents[2] / "src" / "draftproof" / "machine" / "probe.py"
PYTHON = shutil.which("python3", path="/usr/bin") or os.path.realpath(sys.executable)
"""The system's, so that every user may run it."""
MIB = 2**20

_CHILD = r"""
import fcntl, json, os, signal, sys, time
job = json.loads(os.environ["DRAFTPROOF_FAKE_JOB"])
ready = open(job["ready"], "w")
first = os.getpid()

def start(pid):
    return open(f"/proc/{pid}/stat", "rb").read().rpartition(b")")[2].split()[19].decode()

def claim(listed, keepers):
    with open(job["file"], "a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        for gpu in job["gpus"]:
            held = ",".join(f"{pid}:{start(pid)}" for pid in keepers)
            stream.write(f"hold {gpu} {listed} {job['bytes']} {job['kind']} {held}\n")

def tell(*pids):
    if not ready.closed:
        print(json.dumps(pids), file=ready)
        ready.close()

def call(name):
    open("/proc/self/comm", "wb").write(os.fsencode(name)[:15])

def hold():
    if job["cgroup"] is not None:
        open(os.path.join(job["cgroup"], "cgroup.procs"), "w").write(str(os.getpid()))
    kept = [open(os.path.join(job["dev"], name)) for name in job["opens"]]
    if job["ignore_term"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if job["runs"] is not None:
        signal.signal(signal.SIGUSR1, lambda *_: os.system(job["runs"]))
    if job["how"] == "forked":
        read, write = os.pipe()
        child = os.fork()
        if not child:
            if job["own_session"]:
                os.setsid()
            os.write(write, b".")
            time.sleep(600)
        os.read(read, 1)
        if job["bytes"] is not None:
            claim(os.getpid(), [os.getpid(), child])
        tell(os.getpid(), child)
    else:
        if job["bytes"] is not None:
            claim(os.getpid() if job["listed"] else 0, [os.getpid()])
        if job["uid"] is not None:
            import ctypes  # while the standard library may be read: it need not lie where everybody may go
            os.setgid(job["uid"])
            os.setuid(job["uid"])
            ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: what exec would do, or its owner could not see it
        tell(*dict.fromkeys([first, os.getpid()]))
    time.sleep(600)

def serve():
    import socket
    listener = socket.create_server(("127.0.0.1", job["port"])) if job["port"] else None
    if os.fork():
        os.wait()
        time.sleep(600)
    if listener:
        listener.close()
    if os.fork():
        os._exit(0)
    if job["own_session"]:
        os.setsid()
    hold()

def engine():
    global tell
    read, write = os.pipe()
    if os.fork():
        time.sleep(600)
    call("VLLM::EngineCore")
    say, tell, gpus, workers = tell, lambda *_: os.write(write, b"."), job["gpus"], []
    for gpu in gpus:
        workers.append(os.fork())
        if not workers[-1]:
            job.update(gpus=[gpu], opens=[f"nvidia{gpu}", "nvidiactl", "nvidia-uvm"])
            call(f"VLLM::Worker_TP{gpu}")
            hold()
    for _ in workers:
        os.read(read, 1)
    say(first, os.getpid(), *workers)
    time.sleep(600)

call(job["name"])
if job["how"] == "respawned":
    while True:
        child = os.fork()
        if not child:
            hold()
        os.waitpid(child, 0)
{"served": serve, "engine": engine}.get(job["how"], hold)()
"""


class _Memory(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint), *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")))


class FakeGpus:
    """Some GPUs of one make; ends every process it started when it is left."""

    def __init__(
        self,
        folder: Path,
        count: int = 8,
        *,
        name: str = "NVIDIA RTX PRO 6000",
        total_mib: int = 97_887,
        reserved_mib: int = 615,
        release_ms: int = 0,
        old: bool = False,
        flags: Sequence[str] = (),
    ) -> None:
        """`old`: what drivers before branch 510 lack is missing. `flags`: for the compiler, such as `-DWIDE`: see nvml.c."""
        self.folder = folder / f"gpus-{secrets.token_hex(4)}"
        self.dev = self.folder / "dev"
        self.dev.mkdir(parents=True)
        self.library = self.folder / "libnvidia-ml.so.1"
        shutil.copy(_compiled([*(["-DOLD"] if old else []), *flags]), self.library)
        self._program = self.folder / "hold.py"
        self._program.write_text(_CHILD)
        self.sys = self.folder / "sys"
        (self.sys / "fs").mkdir(parents=True)
        (self.sys / "fs" / "cgroup").symlink_to("/sys/fs/cgroup")
        (self.sys / "kernel").symlink_to("/sys/kernel")
        for index in range(count):
            slot = self.sys / "bus" / "pci" / "devices" / f"0000:{0x18 + index:02x}:00.0"
            slot.mkdir(parents=True)
            (slot / "numa_node").write_text(f"{index // 4}\n")
        self.token = secrets.token_hex(8)
        for node in ("nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(count))):
            (self.dev / node).touch()
        self._file = Path(f"{self.library}.txt")
        lines = [f"gpu {index} {total_mib * MIB} {reserved_mib * MIB} {index} {0x18 + index} {name}" for index in range(count)]
        self._file.write_text("\n".join([f"release_ms {release_ms}", *lines]) + "\n")

    def __enter__(self) -> FakeGpus:
        return self

    def __exit__(self, *exception: object) -> None:
        wait_for(lambda: not self._kill())  # again and again: a supervisor may have been faster

    @property
    def roots(self) -> dict[str, str]:
        """For the probe's request."""
        return {"nvml": str(self.library), "dev": str(self.dev), "sys": str(self.sys)}

    @property
    def environment(self) -> dict[str, str]:
        """What makes every look see these GPUs, here and over ssh."""
        return {"DRAFTPROOF_PROBE_ROOTS": json.dumps(self.roots)}

    def say(self, *lines: str) -> None:
        """Add facts to the description: see the head of nvml.c."""
        with self._file.open("a") as stream:
            stream.write("".join(f"{line}\n" for line in lines))

    def unsay(self, *beginnings: str) -> None:
        """Take facts back that begin so."""
        kept = [line for line in self._file.read_text().splitlines() if not line.startswith(beginnings)]
        self._file.write_text("\n".join(kept) + "\n")

    def used_mib(self, gpus: Sequence[int]) -> int:
        """What is in use on these, without what is reserved; asked of the fake without the probe."""
        nvml, used = ctypes.CDLL(str(self.library)), 0
        assert nvml.nvmlInit_v2() == 0
        for gpu in gpus:
            device, memory = ctypes.c_void_p(), _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
            assert nvml.nvmlDeviceGetHandleByIndex_v2(gpu, ctypes.byref(device)) == 0
            assert nvml.nvmlDeviceGetMemoryInfo_v2(device, ctypes.byref(memory)) == 0
            used += memory.used
        return used // MIB

    def holder(self, gpus: Sequence[int], mib: int | None, **options: Any) -> int:
        """A process that holds so much on each of these GPUs; None: it has them open and holds nothing. Options: `_start`."""
        return self._start("plain", gpus, mib, **options)[-1]

    def forked(self, gpus: Sequence[int], mib: int | None, *, killed: bool = True, **options: Any) -> tuple[int, int]:
        """A parent that NVML lists, and is killed (or not), and its child, which holds the memory: both process ids."""
        parent, child = self._start("forked", gpus, mib, **options)
        if killed:
            os.kill(parent, signal.SIGKILL)
            wait_for(lambda: not Path(f"/proc/{parent}").exists())
        return parent, child

    def respawner(self, gpus: Sequence[int], mib: int | None, **options: Any) -> tuple[int, int]:
        """A supervisor that starts its holder again whenever it dies, and the first holder."""
        supervisor, child = self._start("respawned", gpus, mib, **options)
        return supervisor, child

    def orphan(self, gpus: Sequence[int], mib: int | None, **options: Any) -> tuple[int, int]:
        """A front end that is killed, and the worker that it had started by way of a process which ended: both process ids."""
        front_end, worker = self._start("served", gpus, mib, **options)
        os.kill(front_end, signal.SIGKILL)
        wait_for(lambda: ended(front_end))
        return front_end, worker

    def engine(self, gpus: Sequence[int], mib: int | None, **options: Any) -> list[int]:
        """A server in its usual form: a front end, its core, and a worker for each GPU below that. Process ids in this order."""
        return self._start("engine", gpus, mib, **options)

    def exporter(self, gpus: Sequence[int], **options: Any) -> int:
        """A monitor: has the devices open, but not for CUDA, and holds nothing."""
        return self.holder(gpus, None, uvm=False, **{"name": "dcgm-exporter", **options})

    def bystander(self, name: str, **options: Any) -> int:
        """A process that has nothing to do with any GPU."""
        return self.holder([], None, uvm=False, control=False, name=name, **options)

    def alive(self) -> list[int]:
        """All processes that came of these GPUs and still run."""
        mark = f"DRAFTPROOF_FAKE={self.token}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def _kill(self) -> list[int]:
        """Kill all that run; who that was."""
        pids = self.alive()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids

    def _start(
        self,
        how: str,
        gpus: Sequence[int],
        mib: int | None,
        *,
        name: str = "python3",
        kind: str = "compute",
        listed: bool = True,
        uvm: bool = True,
        control: bool = True,
        ignore_term: bool = False,
        uid: int | None = None,
        cgroup: Path | None = None,
        env: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        port: int = 0,
        own_session: bool = False,
        runs: str | None = None,
        number: int | None = None,
    ) -> list[int]:
        """`name`: its comm and first word. `listed`: NVML shows it. `uvm`, `control`: has these devices open. `cgroup`: a folder of
        the cgroup tree for whoever holds to live in. `env`: more environment. `arguments`: the end of its command line. `port`: an
        orphan's front end listens there. `own_session`: a child or orphan left that of its parent. `runs`: a command of the shell
        that it runs at SIGUSR1. `number`: the process id to have, which takes a pid namespace where nobody else starts processes."""
        opens = [*(f"nvidia{index}" for index in gpus), *(["nvidiactl"] if control else []), *(["nvidia-uvm"] if uvm else [])]
        ready = self.folder / f"ready-{secrets.token_hex(6)}"
        job = {
            "how": how,
            "file": str(self._file),
            "dev": str(self.dev),
            "ready": str(ready),
            "gpus": list(gpus),
            "bytes": None if mib is None else mib * MIB,
            "kind": kind,
            "opens": opens,
            "listed": listed,
            "ignore_term": ignore_term,
            "uid": uid,
            "cgroup": None if cgroup is None else str(cgroup),
            "name": name,
            "port": port,
            "own_session": own_session,
            "runs": runs,
        }
        chosen = [] if number is None else ["sh", "-c", 'echo "$0" >/proc/sys/kernel/ns_last_pid && exec "$@"', str(number - 1)]
        command = [*chosen, "setsid", "--fork", "bash", "-c", 'exec -a "$0" "$@"', name, PYTHON, "-IS", str(self._program), *arguments]
        environment = {"PATH": os.environ["PATH"], "DRAFTPROOF_FAKE": self.token, "DRAFTPROOF_FAKE_JOB": json.dumps(job), **(env or {})}
        subprocess.run(command, env=environment, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        wait_for(lambda: ready.exists() and ready.read_text().endswith("\n"))
        pids: list[int] = json.loads(ready.read_text())
        ready.unlink()
        return pids


def run_probe(python: str = PYTHON, *, uid: int | None = None, **request: Any) -> dict[str, Any]:
    """What `probe.py` prints for a request, run as `remote.py` runs it; its sentinels, exit code and silence are checked here.

    `samples` is 1 unless given, so that it does not sleep between them.
    """
    argument = base64.urlsafe_b64encode(zlib.compress(json.dumps({"samples": 1, **request}).encode())).decode()
    environment = {**os.environ, "XDG_STATE_HOME": "/nonexistent"}  # records of engines that run here while the tests do
    ran = subprocess.run(
        [python, "-I", "-", argument], input=PROBE.read_bytes(), capture_output=True, env=environment, user=uid, group=uid, check=True
    )
    assert ran.stderr == b""
    begin, line, end, nothing = ran.stdout.split(b"\n")
    assert (begin, end, nothing) == (b"=====draftproof-begin=====", b"=====draftproof-end=====", b"")
    document: dict[str, Any] = json.loads(line)
    return document


@contextlib.contextmanager
def on_this_machine(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> Iterator[FakeGpus]:
    """GPUs that every command started from here sees, with a state folder of their own."""
    with FakeGpus(folder, count) as gpus:
        for name, value in gpus.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        yield gpus


def ended(pid: int) -> bool:
    """Whether a process has ended, a zombie included."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


@contextlib.contextmanager
def control_group(path: str) -> Iterator[Path]:
    """A control group in the hierarchy that systemd uses, for real processes; as root."""
    named = Path("/sys/fs/cgroup/systemd")
    root = named if named.is_dir() else Path("/sys/fs/cgroup")
    made = root / path
    made.mkdir(parents=True)
    try:
        yield made
    finally:
        for pid in (made / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        for folder in (made, *made.parents):
            if folder == root or any(folder.glob("*/cgroup.procs")):
                break
            wait_for(lambda folder=folder: not (folder / "cgroup.procs").read_text())  # type: ignore[misc]  # mypy takes it for no callable
            folder.rmdir()


def wait_for(true: Callable[[], bool], seconds: float = 15.0) -> None:
    """Until it is."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.002)


def _compiled(flags: Sequence[str]) -> Path:
    """The library, compiled once for each version of its source, in this user's part of the temporary folder."""
    key = hashlib.sha256(SOURCE.read_bytes() + "\0".join(flags).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"draftproof-fakes-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"nvml-{key}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", *flags, "-o", made, SOURCE], check=True)
        made.rename(library)
    return library
