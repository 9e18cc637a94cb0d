"""Our own engines, known by record.

    with recorded("vLLM", run="runs/one") as engine:
        child = subprocess.Popen([*engine.scope(), *command], env=env | engine.environment)

The record is a small file on the machine where the engine runs. It holds a random token, which every process of the
engine carries in its environment: whoever looks at the machine later (`probe.py`) knows them by it, also when their
parent was killed, they left its session, or their ids were used before. Nobody else can carry the token by chance.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from draftproof.artifact import write_json

MARK = "DRAFTPROOF_ENGINE"
"""The environment variable that carries the token."""


@dataclass(frozen=True)
class EngineRecord:
    """An engine that runs, or ran."""

    token: str
    what: str
    run: str
    """The folder whose work it does."""

    @property
    def environment(self) -> dict[str, str]:
        """What its processes are started with. Engines rename their processes by overwriting the memory in which the
        kernel shows the environment; SPT_NOENV keeps them (setproctitle) from that."""
        return {MARK: self.token, "SPT_NOENV": "1"}

    def scope(self) -> list[str]:
        """The words before a command that give it a transient scope of its own, where this user has a systemd: then
        its control group holds it and nothing else. Empty where there is none."""
        manager = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent", "systemd/private")
        if not (manager.exists() and Path("/run/systemd/system").is_dir() and shutil.which("systemd-run")):
            return []
        return ["systemd-run", "--user", "--scope", "--quiet", "--collect", f"--unit=draftproof-{self.token[:12]}", "--"]


@contextmanager
def recorded(what: str, *, run: str) -> Iterator[EngineRecord]:
    """A record that lasts as long as the work inside, or any process of it. It stays when this process is killed, or could
    not end all of them, and is what tells then."""
    engine = EngineRecord(secrets.token_hex(16), what, run)
    folder = records_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _forget_old(folder)
    path = folder / f"{engine.token}.json"
    write_json(
        path,
        {
            "token": engine.token,
            "what": what,
            "run": run,
            "parent": os.getpid(),
            "host": socket.gethostname(),
            "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )
    try:
        yield engine
    finally:
        if not any(carries(int(process.name), engine.token) for process in Path("/proc").glob("[0-9]*")):
            path.unlink(missing_ok=True)


def carries(pid: int, token: str) -> bool:
    """Whether a process belongs to the engine of this token. False for processes of others, which cannot be read."""
    try:
        return f"{MARK}={token}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def state_folder() -> Path:
    """Where this user's programs keep what must outlive them, by the XDG convention."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "draftproof"


def records_folder() -> Path:
    """Where records lie, as `probe.py` also knows."""
    return state_folder() / "engines"


def _forget_old(folder: Path) -> None:
    """Remove the records of earlier boots: their processes are gone."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for path in folder.glob("*.json"):
        try:
            stale = json.loads(path.read_text())["boot_id"] != boot
        except (OSError, ValueError, KeyError, TypeError):
            stale = True
        if stale:
            path.unlink(missing_ok=True)
