"""Asks a machine: runs `probe.py`, `stop.py` or `copies.py` there, this machine or one behind OpenSSH, and hands back its document.

    Reach("alice@node7").ask("probe", {"deadline_s": 4.0}, timeout_s=8.0).document

Nothing is installed on the other side: the script's bytes go to `python3 -I - REQUEST` on its standard input, here and
there alike, and one line of JSON comes back between two sentinel lines, so that whatever a login script prints before
or after does no harm.

The system's own ssh is used, with the user's configuration, agent and known hosts. We only forbid questions, set
time-outs, and keep the connection open for a minute, so that the next question is as quick as one here
(`benchmarks/machine_gate.py`). Host keys are checked as the user has it; nothing here ever accepts one.

Whole or not at all: a document counts once its closing sentinel has come. Killing ssh does not kill the script on the
other side, so each script keeps a deadline of its own; `timeout_s` is how long *we* wait, whatever hangs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import shlex
import stat
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftproof.errors import DraftproofError, UsageError
from draftproof.machine.child import WhenInterrupted, run
from draftproof.machine.unreachable import Unreachable, explain, sudo_refusal

Script = Literal["probe", "stop", "copies"]
Request = Mapping[str, Any]

ROOTS_VARIABLE = "DRAFTPROOF_PROBE_ROOTS"
ROOTS: Mapping[str, frozenset[str]] = {
    "probe": frozenset({"nvml", "proc", "sys", "dev", "shm", "records"}),
    "copies": frozenset({"cuda"}),
}
"""What DRAFTPROOF_PROBE_ROOTS may move, by script. `stop` acts, so it has no such door."""

SCRIPTS = Path(__file__).parent
MOST_REQUEST = 120_000
"""Linux takes 128 KiB for one argument, and ssh hands the whole command to the remote shell as one."""
LONGEST_SOCKET_FOLDER = 36
"""A socket's path has 104 characters on the meanest system, its end included; we add 50, and ssh 17 while it makes one."""


@dataclass(frozen=True)
class Answer:
    """What a script printed (one JSON document), how long asking took in seconds, and why less was seen than was asked for."""

    document: bytes
    seconds: float
    partial: str | None


@dataclass(frozen=True)
class Reach:
    """How to reach a machine. Raises UsageError for a host or python that could not be one.

    host: what ssh takes (`node7`, `alice@node7`, an alias of the user's ssh config); None is this machine.
    python: the remote interpreter, >= 3.9. Here it is the one that runs us.
    sudo: ask through `sudo -n`; if that is refused the machine is asked without, and the answer says so.
    connect_s: for the connection alone.
    """

    host: str | None = None
    python: str = "python3"
    sudo: bool = False
    connect_s: float = 5.0

    def __post_init__(self) -> None:
        if self.host is not None:
            _check_host(self.host)
        if not self.python or self.python.startswith("-") or "=" in self.python or not self.python.isprintable():
            raise UsageError(
                f"{self.python!r} cannot be the name of a Python.", remedy="Give a command or path, such as /usr/bin/python3.11."
            )

    @property
    def name(self) -> str:
        """For sentences."""
        return "this machine" if self.host is None else self.host

    def ask(self, script: Script, request: Request, timeout_s: float, interrupted: threading.Event | None = None) -> Answer:
        """Run a script there and return its document, within `timeout_s` in any case.

        Once `interrupted` is set a look is dropped. `stop` is not: here it is told by SIGINT, sends no KILL any more and says
        what became of each; on another host it is waited for, since what was begun there cannot be called back.

        Raises Unreachable, with ssh's or Python's own words and a remedy, when there is no whole document by then;
        UsageError for a DRAFTPROOF_PROBE_ROOTS that cannot be used.
        """
        return _ask(self, script, request, timeout_s, interrupted or threading.Event())


def ask_all(
    reaches: Sequence[Reach], script: Script, request_of: Callable[[Reach], Request], timeout_s: float
) -> list[Answer | DraftproofError]:
    """Ask all machines at once, each with a request of its own; answers and failures come in the order of `reaches`.

    Takes as long as the slowest of them, at most `timeout_s`. Ctrl-C ends all of them.
    """
    interrupted = threading.Event()

    def one(reach: Reach) -> Answer | DraftproofError:
        try:
            return _ask(reach, script, request_of(reach), timeout_s, interrupted)
        except DraftproofError as error:
            return error

    with ThreadPoolExecutor(max_workers=max(1, len(reaches))) as pool:
        try:
            return list(pool.map(one, reaches))
        except BaseException:
            interrupted.set()
            raise


def _ask(reach: Reach, script: Script, request: Request, timeout_s: float, interrupted: threading.Event) -> Answer:
    started = time.monotonic()
    argument = _encode(_with_roots(script, request))
    program = SCRIPTS / f"{script}.py"
    sudo = reach.sudo and not (reach.host is None and os.geteuid() == 0)
    when: WhenInterrupted = "drop" if script != "stop" else "tell" if reach.host is None else "wait"
    partial = None
    while True:
        left_s = started + timeout_s - time.monotonic()
        command = _command(reach, argument, sudo=sudo, left_s=left_s)
        ended = run(command, program, left_s, interrupted, when=when, own_session=reach.host is not None)
        if ended.document is not None:
            return Answer(ended.document, time.monotonic() - started, partial)
        why = sudo_refusal(ended) if sudo else None
        if why is None:
            raise explain(reach.host, sys.executable if reach.host is None else reach.python, ended, timeout_s)
        sudo, partial = False, f"sudo was refused on {reach.name} ({why}), so it was looked at without."


# The request


def _with_roots(script: Script, request: Request) -> Request:
    """The request, with what DRAFTPROOF_PROBE_ROOTS moves."""
    text = os.environ.get(ROOTS_VARIABLE)
    if not text or script not in ROOTS:
        return request
    remedy = """Give a JSON object of paths, such as {"nvml": "/opt/driver/lib/libnvidia-ml.so.1"}, or unset it."""
    try:
        roots = json.loads(text)
    except ValueError as error:
        raise UsageError(f"It is not JSON: {error}.", where=ROOTS_VARIABLE, remedy=remedy) from None
    if not isinstance(roots, dict):
        raise UsageError("It is JSON, but not an object.", where=ROOTS_VARIABLE, remedy=remedy)
    known = sorted(frozenset().union(*ROOTS.values()))
    for name, path in roots.items():
        if name not in known:
            raise UsageError(f"There is no root {name!r}; there are {', '.join(known)}.", where=ROOTS_VARIABLE, remedy=remedy)
        if not isinstance(path, str) or not path or "\0" in path:
            raise UsageError(f"The root {name!r} is not a path: {path!r}.", where=ROOTS_VARIABLE, remedy=remedy)
    moved = {name: path for name, path in roots.items() if name in ROOTS[script]}
    return {**request, "roots": {**(request.get("roots") or {}), **moved}}


def _encode(request: Request) -> str:
    argument = base64.urlsafe_b64encode(zlib.compress(json.dumps(request).encode())).decode()
    if len(argument) > MOST_REQUEST:
        raise UsageError(
            f"The request is too long to hand over: {len(argument):,} characters, at most {MOST_REQUEST:,}.",
            remedy="Ask about fewer GPUs or folders at a time.",
        )
    return argument


# The command


def _command(reach: Reach, argument: str, *, sudo: bool, left_s: float) -> list[str]:
    if reach.host is None:
        return [*(["sudo", "-n"] if sudo else []), sys.executable, "-I", "-", argument]
    # `env` rather than `LC_ALL=C ...`: the login shell there may be csh or fish.
    words = ["env", "LC_ALL=C", *(["sudo", "-n"] if sudo else []), reach.python, "-I", "-", argument]
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(max(1, math.ceil(min(reach.connect_s, left_s)))),
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "2",
        "LogLevel": "INFO",  # at ERROR, "Connection closed by ..." is not said
        # A user's forwards would fight over ports; a RemoteCommand of the user's config would take the place of ours.
        "ClearAllForwardings": "yes",
        "RemoteCommand": "none",
        **_sharing(reach.host),
    }
    return [
        "ssh",
        "-T",
        *(word for key, value in options.items() for word in ("-o", f"{key}={value}")),
        "--",
        reach.host,
        shlex.join(words),
    ]


def _sharing(host: str) -> dict[str, str]:
    """The ssh options that keep a connection open for the next question.

    ssh's %C is made of address, port and user. Two machines behind two jump hosts may have all three in common, so the
    name we were given is part of the socket's.
    """
    folder = _socket_folder()
    if folder is None:
        return {"ControlMaster": "no", "ControlPath": "none"}
    name = hashlib.sha256(host.encode()).hexdigest()[:8]
    return {"ControlMaster": "auto", "ControlPersist": "60", "ControlPath": f"{str(folder).replace('%', '%%')}/{name}-%C"}


def _socket_folder() -> Path | None:
    """Our private folder for ssh's sockets; None where there can be none: then each question connects anew.

    Whoever can write there can hand us a connection to a machine of theirs, so it must be ours alone.
    Raises Unreachable if somebody else got there first.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and _is_private(Path(runtime)):
        folder = Path(runtime) / "draftproof"
    else:  # unset, or of the user before `su`
        folder = Path(tempfile.gettempdir()) / f"draftproof-{os.getuid()}"
    if len(os.fsencode(folder)) > LONGEST_SOCKET_FOLDER:
        return None
    try:
        above = folder.parent.stat()
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError:
        return None
    movable = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
    if movable or above.st_uid not in (0, os.getuid()) or not _is_private(folder):
        raise Unreachable(
            "This folder is for ssh's sockets, but others can write to it or it is a link.",
            where=str(folder),
            remedy="See who made it; remove it, or point XDG_RUNTIME_DIR to a folder of yours with mode 0700.",
        )
    return folder


def _is_private(folder: Path) -> bool:
    """A real folder, no link, ours, closed to everybody else."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _check_host(host: str) -> None:
    """Refuses what ssh, or a shell in the user's ProxyCommand, could take for anything but a host."""
    user, _, machine = host.removeprefix("ssh://").rpartition("@")
    if (
        not machine
        or not host.isprintable()
        or any(part.startswith("-") for part in (host, user, machine))
        or re.search(r"[\s'`\"$;&<>|(){}!*?#]", host)
        or "\\" in machine
        or len(host) > 512
    ):
        raise UsageError(
            f"{host!r} cannot be a host.", remedy="Give a name as for ssh: node7, alice@node7, or an alias of your ssh config."
        )
