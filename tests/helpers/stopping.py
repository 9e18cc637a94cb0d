"""Real processes to stop, plans that name them, and `stop.py` run on a plan as `remote.py` runs it.

Plans are made here from /proc and psutil, without the project's own code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

STOP = Path(__file__).resolve().parents[2] / "src" / "draftproof" / "machine" / "stop.py"
PYTHON = shutil.which("python3", path="/usr/bin") or os.path.realpath(sys.executable)
"""The system's, so that every user may run it."""
NOBODY = 65534

IGNORE = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
SLEEP = "print('ready', flush=True); import time; time.sleep(300)"


class Family:
    """Starts processes, and ends them and all that they started: they are known by a token in their environment."""

    def __init__(self) -> None:
        self.token = f"DRAFTPROOF_TEST={secrets.token_hex(8)}"
        self.children: list[subprocess.Popen[str]] = []

    def start(self, *lines: str, session: bool = True, **popen: Any) -> subprocess.Popen[str]:
        """A process in a session of its own that runs these lines of Python and has said `ready`."""
        key, value = self.token.split("=")
        child = subprocess.Popen(
            [PYTHON, "-I", "-S", "-c", "\n".join(lines)],
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"], key: value},
            start_new_session=session,
            **popen,
        )
        self.children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    def alive(self) -> list[int]:
        """All that still run."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.token.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def end(self) -> None:
        for _ in range(100):
            living = self.alive()
            for pid in living:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if not living:
                break
            time.sleep(0.02)
        for child in self.children:
            child.kill()
            child.wait(5)
            assert child.stdout is not None
            child.stdout.close()


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(true: Callable[[], bool], within_s: float = 5.0) -> bool:
    """Whether it becomes true in time."""
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def stat_field(pid: int, number: int) -> int:
    """As proc(5) counts them; the name before the third is in brackets and may hold spaces."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[number - 3])


def target(pid: int, /, **changes: Any) -> dict[str, Any]:
    """A living process as a plan names it."""
    process = psutil.Process(pid)
    return {
        "pid": pid,
        "start_ticks": stat_field(pid, 22),
        "uid": process.uids().real,
        "user": process.username(),
        "command": Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(),
        "cgroup": None,
        "session": stat_field(pid, 6),
        "unit": None,
        "mib": {"0": 100},
        "kind": "live",
        "why": "a test",
        **changes,
    }


def unit(name: str, scope: str = "system", cgroup: str | None = None) -> dict[str, Any]:
    """A unit as a plan names it."""
    return {"name": name, "scope": scope, "cgroup": cgroup, "why": "a test"}


def plan(*targets: int | dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A plan of this machine, with its hash; targets are pids or come from `target`."""
    return sealed(
        {
            "version": 1,
            "host": socket.gethostname(),
            "address": None,
            "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "pid_namespace": os.stat("/proc/self/ns/pid").st_ino,
            "made": datetime.now(UTC).isoformat(),
            "uid": os.getuid(),
            "any_user": False,
            "gpus": [0],
            "deadline_s": 5.0,
            "units": [],
            "cgroups": [],
            "targets": [target(one) if isinstance(one, int) else one for one in targets],
            "left": [],
            **changes,
        }
    )


def sealed(body: Mapping[str, Any]) -> dict[str, Any]:
    """With the hash over everything else."""
    rest = {key: value for key, value in body.items() if key != "hash"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return {**rest, "hash": hashlib.sha256(canonical.encode()).hexdigest()}


def packed(text: str | bytes) -> str:
    """A request as it stands on the command line."""
    return base64.urlsafe_b64encode(zlib.compress(text.encode() if isinstance(text, str) else text)).decode()


def begin(*arguments: str, before: Sequence[str] = (), **popen: Any) -> subprocess.Popen[str]:
    """`stop.py` at work. `before` are words in front of the command."""
    with STOP.open("rb") as script:
        return subprocess.Popen(
            [*before, PYTHON, "-I", "-", *arguments], stdin=script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen
        )


def document(ended: subprocess.Popen[str], within_s: float = 30.0) -> dict[str, Any]:
    """What it printed, once it has ended well."""
    stdout, stderr = ended.communicate(timeout=within_s)
    assert (ended.returncode, stderr) == (0, "")
    first, line, last = stdout.splitlines()
    assert (first, last) == ("=====draftproof-begin=====", "=====draftproof-end=====")
    said: dict[str, Any] = json.loads(line)
    assert sorted(said) == ["outcomes", "refused", "schema", "seconds", "units"]
    assert said["schema"] == 1
    return said


def stop(of: dict[str, Any], *, before: Sequence[str] = (), env: Mapping[str, str] | None = None, **request: Any) -> dict[str, Any]:
    """Carry out a plan; the document."""
    return document(begin(packed(json.dumps({"plan": of, **request})), before=before, env=env))


def outcomes(said: dict[str, Any]) -> dict[int, str]:
    """By pid."""
    assert said["refused"] is None
    return {one["pid"]: one["outcome"] for one in said["outcomes"]}


def detail(said: dict[str, Any], pid: int) -> str:
    """What is said about a process."""
    return next(one["detail"] for one in said["outcomes"] if one["pid"] == pid)
