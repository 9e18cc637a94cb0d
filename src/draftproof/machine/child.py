"""A script that is run by a child process: what it printed, and how it ended, within a deadline in any case."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

BEGIN, END = b"=====draftproof-begin=====", b"=====draftproof-end====="
"""The lines between which a document stands."""
MOST_OUTPUT = 64 * 2**20
MOST_STDERR = 64 * 2**10
GRACE_S = 0.5
"""For the child to end by itself once its document is whole. A forgotten grandchild with stdout open keeps an ssh session up for ever."""
LOOK_EVERY_S = 0.05

WhenInterrupted = Literal["drop", "tell", "wait"]
"""What to do with a child when somebody presses Ctrl-C: end it, pass SIGINT on and wait for what it says, or just wait."""


@dataclass(frozen=True)
class Ended:
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


def run(
    command: Sequence[str], program: Path, left_s: float, interrupted: threading.Event, *, when: WhenInterrupted, own_session: bool
) -> Ended:
    """Run a command with a file on stdin; returns within `left_s`, and nothing of it runs on here.

    own_session: ssh gets one, so that without a terminal nothing can stop to ask, a jump host's ssh neither. sudo here
    keeps ours, since its leave is bound to the terminal.
    """
    deadline = time.monotonic() + left_s
    environment = {**os.environ, "LC_ALL": "C", "LANG": "C", "LANGUAGE": "C", "SSH_ASKPASS_REQUIRE": "never"}
    with program.open("rb") as stream:
        try:
            child = subprocess.Popen(  # noqa: S603  (a list, no shell here)
                list(command),
                stdin=stream,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=own_session,
                process_group=None if own_session else 0,
            )
        except OSError as error:
            return Ended("could not start", None, b"", f"{command[0]}: {error.strerror}")
    try:
        return _listen(child, deadline, interrupted, when)
    finally:
        _end(child)


def _listen(child: subprocess.Popen[bytes], deadline: float, interrupted: threading.Event, when: WhenInterrupted) -> Ended:
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
            if interrupted.is_set() and when == "tell" and not gone:  # only we reap it, so its number is still its own
                when = "wait"
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGINT)
            if len(out) > MOST_OUTPUT:
                how = "said too much"
            elif interrupted.is_set() and when == "drop":
                how = "interrupted"
            elif time.monotonic() >= deadline:
                how = "timed out"
            elif time.monotonic() < whole_at + GRACE_S:
                continue
            break
    return Ended(how, child.returncode, bytes(out), err.decode(errors="replace"))


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
