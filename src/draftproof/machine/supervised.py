"""A child process that cannot outlive its work.

Engines start processes of their own, and those outlive a parent that is killed: they keep the memory and go on
computing. All of them stay in the session of the process that started them, or at least carry the token of its
record (`records.py`), so these are what is owned here:

    run_supervised(command, env=..., log=path, timeout_s=600, what="vLLM")

However this ends (done, failed, out of time, Ctrl-C), none of them is left when it returns or raises. When *this*
process is killed, the child notices by itself, see `end_with_parent`; and should that fail, too, the record tells
the next `draftproof reclaim` whose they are.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from draftproof.errors import DraftproofError
from draftproof.machine.records import MARK, EngineRecord, carries, recorded

GRACE_S = 20.0
"""For processes to end by themselves after the child's own end, and again after SIGTERM (a busy engine takes up to 13 s)."""
LOOK_EVERY_S = 0.1

_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\)\s*)?(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\s[\d-]+\s[\d:]+\s(?:\[[^\]]*\]\s?)?)?")
_HARMLESS = re.compile(r"^(?:\([^)]*pid=\d+\)\s*)?(?:DEBUG|INFO|WARNING)\s")
_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]*(?:Error|Exception|Interrupt|Exit|Exceeded)\b.*")


def run_supervised(command: Sequence[str], *, env: Mapping[str, str], log: Path, timeout_s: float, what: str) -> None:
    """Run `command` in a session of its own, output to `log`; returns when it ended well and nothing of it is left.

    Raises DraftproofError with the first real error of the log when it fails, or when it takes longer than `timeout_s`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with recorded(what, run=str(log.parent.resolve())) as engine:
        code = _run(command, engine, env=env, log=log, timeout_s=timeout_s, what=what)
    if code != 0:
        raise DraftproofError(f"{what} failed: {first_error(log)}", where=str(log), remedy="The log has the whole story.")


def _run(command: Sequence[str], engine: EngineRecord, *, env: Mapping[str, str], log: Path, timeout_s: float, what: str) -> int:
    """The exit code; the engine is ended whole, whatever happens."""
    with log.open("wb") as stream:
        child = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
            [*engine.scope(), *command],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**env, **engine.environment},
            start_new_session=True,
        )
    try:
        code = child.wait(timeout_s)
        end_session(child.pid, engine.token, grace_s=GRACE_S)
    except subprocess.TimeoutExpired:
        end_session(child.pid, engine.token)
        child.wait()
        raise DraftproofError(
            f"{what} did not finish within {timeout_s:.0f} s; it was ended.",
            where=str(log),
            remedy="Read the log; fewer prompts take less time.",
        ) from None
    except BaseException:  # Ctrl-C, or anything else: nothing may be left behind
        end_session(child.pid, engine.token)
        child.wait()
        raise
    return code


def end_session(session: int, token: str, *, grace_s: float = 0.0) -> None:
    """End every process of a session that this process started, and every other that carries the token; returns when
    none is left.

    Waits `grace_s` for them to go by themselves, then SIGTERM, then SIGKILL. Resource trackers are left to the last:
    they end by themselves after the others, and free the shared memory that these left. Raises DraftproofError naming
    what could not be ended.
    """
    try:
        if _emptied(session, token, grace_s):
            return
        _send(workers(session, token), psutil.Process.terminate)
        if _emptied(session, token, GRACE_S):
            return
    finally:  # also on a second Ctrl-C
        _send(workers(session, token), psutil.Process.kill)
    if _emptied(session, token, GRACE_S):
        return
    _send(members(session, token), psutil.Process.kill)
    if not _emptied(session, token, GRACE_S):
        left = ", ".join(f"{process.pid} ({process.name()})" for process in members(session, token))
        raise DraftproofError(f"Processes of an engine could not be ended: {left}.", remedy="Look at them by hand before starting another.")


def members(session: int, token: str) -> list[psutil.Process]:
    """Processes of a session, or with the token, that still run."""
    found = []
    for process in psutil.process_iter():
        try:
            if (os.getsid(process.pid) == session or carries(process.pid, token)) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return found


def workers(session: int, token: str) -> list[psutil.Process]:
    """The members but for Python's resource trackers."""
    found = []
    for process in members(session, token):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if not any("resource_tracker" in word for word in process.cmdline()):
                found.append(process)
    return found


def end_with_parent(parent: int) -> None:
    """Called in the child: once process `parent` is gone, end all that belongs to the child, itself last."""
    token = os.environ.get(MARK, "")

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        others = [process for process in workers(os.getsid(0), token) if process.pid != os.getpid()]
        _send(others, psutil.Process.terminate)
        _, stubborn = psutil.wait_procs(others, timeout=GRACE_S)
        _send(stubborn, psutil.Process.kill)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def first_error(log: Path) -> str:
    """The sentence that began the trouble: the end of the log's first traceback, else its first error line, else its last line.

    Tracebacks that an engine logs as a warning are not trouble: it went on.
    """
    raw = [line for line in log.read_text(errors="replace").splitlines() if line.strip() and not _HARMLESS.match(line)]
    lines = [_PREFIX.sub("", line).strip() for line in raw]
    start = next((i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")), len(lines))
    ended = [line for line in lines[start:] if _ERROR.match(line)]
    marked = [line for line, whole in zip(lines, raw, strict=True) if re.search(r"\bERROR\b|\b[Ee]rror:", whole)]
    return (ended or marked or lines[-1:] or ["it wrote nothing"])[0][:300]


def _emptied(session: int, token: str, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while members(session, token):
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def _send(processes: Sequence[psutil.Process], signal: Callable[[psutil.Process], None]) -> None:
    """psutil compares the start time first, so a recycled pid is not hit."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            signal(process)
