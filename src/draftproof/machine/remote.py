"""Asks a machine: runs `probe.py`, `stop.py` or `copies.py` there, this machine or one behind OpenSSH, and hands back its document.

    Reach("alice@node7").ask("probe", {"deadline_s": 4.0}, timeout_s=8.0).document

Nothing is installed on the other side: the script's bytes go to `python3 -I - REQUEST` on its standard input, here and
there alike, and one line of JSON comes back between two sentinel lines, so that whatever a login script prints before
or after does no harm.

The system's own ssh is used, with the user's configuration, agent and known hosts. We only forbid questions, set
time-outs, and keep the connection open for a minute (measured on loopback: 0.21 s with a new connection, 0.023 s over an open
one). Host keys are checked as the user has it; nothing here ever accepts one.

Whole or not at all: a document counts once its closing sentinel has come. Killing ssh does not kill the script on the
other side, so each script keeps a deadline of its own; `timeout_s` is how long *we* wait, whatever hangs.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import re
import selectors
import shlex
import signal
import stat
import subprocess
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

from draftproof.errors import DraftproofError, Undecided, UsageError

Script = Literal["probe", "stop", "copies"]
Request = Mapping[str, Any]

BEGIN, END = b"=====draftproof-begin=====", b"=====draftproof-end====="
ROOTS_VARIABLE = "DRAFTPROOF_PROBE_ROOTS"
ROOTS: Mapping[str, frozenset[str]] = {
    "probe": frozenset({"nvml", "proc", "sys", "dev", "shm", "records"}),
    "copies": frozenset({"cuda"}),
}
"""What DRAFTPROOF_PROBE_ROOTS may move, by script. `stop` acts, so it has no such door."""

SCRIPTS = Path(__file__).parent
MOST_OUTPUT = 64 * 2**20
MOST_STDERR = 64 * 2**10
MOST_REQUEST = 120_000
"""Linux takes 128 KiB for one argument, and ssh hands the whole command to the remote shell as one."""
LONGEST_SOCKET_FOLDER = 36
"""A socket's path has 104 characters on the meanest system, its end included; we add 50, and ssh 17 while it makes one."""

GRACE_S = 0.5
"""For the child to end by itself once its document is whole. A forgotten grandchild with stdout open keeps an ssh session up for ever."""
LOOK_EVERY_S = 0.05


class Unreachable(Undecided):
    """A machine could not be asked, so nothing is known about it."""


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
    partial = None
    while True:
        left_s = started + timeout_s - time.monotonic()
        command = _command(reach, argument, sudo=sudo, left_s=left_s)
        ended = _run(command, program, left_s, interrupted, remote=reach.host is not None, finishes=script == "stop")
        if ended.document is not None:
            return Answer(ended.document, time.monotonic() - started, partial)
        why = _sudo_refusal(ended) if sudo else None
        if why is None:
            raise _explain(reach, ended, timeout_s)
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


# The child


@dataclass(frozen=True)
class _Ended:
    """A child that has ended, or that was ended by us (code None)."""

    how: Literal["ended", "timed out", "said too much", "interrupted", "could not start"]
    code: int | None
    stdout: bytes
    stderr: str

    @property
    def document(self) -> bytes | None:
        """The line between the sentinels, if both are there."""
        begin = self.stdout.rfind(BEGIN)
        end = self.stdout.find(END, begin)
        if begin < 0 or end < 0:
            return None
        return self.stdout[begin + len(BEGIN) : end].strip()


def _run(command: Sequence[str], program: Path, left_s: float, interrupted: threading.Event, *, remote: bool, finishes: bool) -> _Ended:
    """Run a command with a file on stdin; returns within `left_s`, and nothing of it runs on here.

    finishes: an interruption does not drop it, see `Reach.ask`.
    """
    deadline = time.monotonic() + left_s
    environment = {**os.environ, "LC_ALL": "C", "LANG": "C", "LANGUAGE": "C", "SSH_ASKPASS_REQUIRE": "never"}
    with program.open("rb") as stream:
        try:
            # ssh gets a session of its own: without a terminal nothing can stop to ask, a jump host's ssh neither.
            # sudo here keeps ours, since its leave is bound to the terminal.
            child = subprocess.Popen(  # noqa: S603  (a list, no shell here)
                list(command),
                stdin=stream,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=remote,
                process_group=None if remote else 0,
            )
        except OSError as error:
            return _Ended("could not start", None, b"", f"{command[0]}: {error.strerror}")
    try:
        if not finishes:
            return _listen(child, deadline, interrupted)
        told = threading.Thread(target=_tell, args=(child, interrupted, remote), name="tell-stop", daemon=True)
        told.start()
        return _listen(child, deadline, threading.Event())
    finally:
        _end(child)


def _tell(child: subprocess.Popen[bytes], interrupted: threading.Event, remote: bool) -> None:
    """Pass an interruption on to a child here, once."""
    while child.poll() is None:
        if interrupted.wait(LOOK_EVERY_S):
            if not remote:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGINT)
            return


def _listen(child: subprocess.Popen[bytes], deadline: float, interrupted: threading.Event) -> _Ended:
    """Read until the child has ended, its document is whole and the grace is over, or it has to be given up."""
    assert child.stdout is not None
    assert child.stderr is not None
    out, err = bytearray(), bytearray()
    how: Literal["ended", "timed out", "said too much", "interrupted"] = "ended"
    whole_at = math.inf
    with selectors.DefaultSelector() as selector:
        for stream, into in ((child.stdout, out), (child.stderr, err)):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, into)
        while True:
            gone = child.poll() is not None  # before reading: all that it wrote is then in the pipes
            now = time.monotonic()
            wait = 0.0 if gone else min(LOOK_EVERY_S, max(0.0, deadline - now))
            if child.stdout not in {key.fileobj for key in selector.get_map().values()}:
                wait = min(wait, 0.002)  # it is about to end
            events = selector.select(wait)
            for key, _ in events:
                chunk = _read(key.fd)
                if not chunk:
                    selector.unregister(key.fileobj)
                    continue
                key.data.extend(chunk)
            del err[:-MOST_STDERR]
            if math.isinf(whole_at) and END in out[-(2**17) :] and BEGIN in out:
                whole_at = time.monotonic()
            if gone and not events:
                break
            if len(out) > MOST_OUTPUT:
                how = "said too much"
            elif interrupted.is_set():
                how = "interrupted"
            elif time.monotonic() >= deadline:
                how = "timed out"
            elif time.monotonic() < whole_at + GRACE_S:
                continue
            break
    return _Ended(how, child.returncode, bytes(out), err.decode(errors="replace"))


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 2**16)
    except OSError:
        return b""


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child's group if it still runs. Once it is reaped its number may be another's, and its group holds a
    jump host's ssh, which the open connection needs."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # a sudo of ours is root's; the script has its own deadline
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.2)
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()


# What went wrong


_SUDO = re.compile(
    r"^(?:sudo(?:-rs)?: .*|Sorry, user .*|.* is not in the sudoers file.*|.* may not run sudo.*|env: .*\bsudo\b.*)$", re.MULTILINE
)

_SSH_SAYS: tuple[tuple[str, str], ...] = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed",
        "Its host key is another than last time: find out why before anything else; then connect once by hand with `ssh {host}`.",
    ),
    (
        r"Host key verification failed|host key is known for",
        "Its host key is not known here: connect once by hand with `ssh {host}` and compare the fingerprint.",
    ),
    (
        r"Permission denied|Too many authentication failures|no mutual signature",
        "No key was accepted: load one with ssh-add or name it in your ssh config, until `ssh -o BatchMode=yes {host} true` works.",
    ),
    (r"Could not resolve hostname", "Check the name, or give it a HostName in your ssh config."),
    (r"Connection refused", "No ssh server listens there: check host and port."),
    (r"timed out|Timeout, server", "It does not answer on the network: check that it is up, and that you are in its network or VPN."),
    (r"No route to host|Network is unreachable", "Check that it is up, and that you are in its network or VPN."),
    (r"[Cc]onnection (?:closed|reset)|Broken pipe|kex_exchange_identification", "It hung up: its ssh server's log says why."),
    (r"Bad owner or permissions|[Bb]ad configuration option", "Mend your ssh config; `ssh -G {host}` reads it."),
)


def _sudo_refusal(ended: _Ended) -> str | None:
    """sudo's own words if it did not let the script start."""
    if ended.how == "could not start" and ended.stderr.startswith("sudo:"):
        return ended.stderr
    if ended.how != "ended" or ended.code not in (1, 126, 127) or BEGIN in ended.stdout:
        return None
    match = _SUDO.search(ended.stderr)
    return _clean(match.group()) if match else None


def _explain(reach: Reach, ended: _Ended, timeout_s: float) -> Unreachable:
    """Why there is no document."""
    name, python = reach.name, sys.executable if reach.host is None else reach.python
    by_hand = f"Try `ssh {reach.host} true` by hand." if reach.host else "Look at `dmesg`: a driver call may hang."
    says = _last_line(ended.stderr)
    first = _first_line(ended.stdout) or _first_line(ended.stderr.encode())

    def because(what: str, remedy: str) -> Unreachable:
        return Unreachable(what, where=name, remedy=remedy)

    if ended.how == "interrupted":
        return because("Asking was interrupted.", "Ask again.")
    if ended.how == "could not start":
        return because(f"A program is missing here: {ended.stderr}.", "Install it (Debian: apt-get install openssh-client).")
    if ended.how == "timed out":
        return because(f"No answer within {timeout_s:g} s{f'; it said {says!r}' if says else ''}.", by_hand)
    if ended.how == "said too much":
        return because(
            f"It printed more than {MOST_OUTPUT // 2**20} MiB, beginning with {first!r}.", "Find what prints there: a login script?"
        )
    if reach.host is not None and ended.code == 255:
        for pattern, remedy in _SSH_SAYS:
            if re.search(pattern, ended.stderr):
                return because(_by_ssh(says), remedy.format(host=reach.host))
        return because(_by_ssh(says or "the connection ended without a word, or the script was killed there"), by_hand)
    if ended.code == 127:
        return because(f"There is no {python} there: {says}", "Install Python 3.9 or newer there, or give the path of one.")
    if ended.code == 126:
        return because(f"{python} cannot be run there: {says}", "Give the path of another Python, 3.9 or newer.")
    if re.search(r"SyntaxError|Unknown option: -I|'type' object is not subscriptable", ended.stderr):
        return because(f"{python} is too old there: {says}", "Python 3.9 or newer is needed: give the path of one.")
    number = -ended.code if ended.code is not None and ended.code < 0 else (ended.code or 0) - 128
    if 0 < number < signal.NSIG:
        return because(f"The script was killed by {_signal_name(number)}.", "Look at `dmesg` there: was memory short?")
    if "Traceback (most recent call last)" in ended.stderr:
        return because(f"The script failed there: {says}", "This is a fault of ours: please report it with the whole output.")
    return because(
        f"It answered with exit code {ended.code} and no document{f'; the first line was {first!r}' if first else ''}.",
        "A login script or a forced command may end the session or swallow its output: keep it silent for sessions without a terminal.",
    )


def _by_ssh(words: str) -> str:
    return words if words.startswith("ssh: ") else f"ssh: {words}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first_line(output: bytes) -> str:
    return next((_clean(line.decode(errors="replace")) for line in output[: 2**12].splitlines() if line.strip()), "")


def _last_line(text: str) -> str:
    return next((_clean(line) for line in reversed(text.splitlines()) if line.strip()), "")


def _clean(line: str) -> str:
    """One line for a terminal of ours: no control characters, no end of its own, not endless."""
    return "".join(character if character.isprintable() else "?" for character in line.strip())[:300].rstrip(".")
