"""Watch a machine while a target loads, and end the load with the cause when it turns bad.

    watch = Watch(look, every_s=1.0, give_up=write_down)
    watch.start()                                    # the main thread loads
    cause = watch.stop()                             # None, or why the load should not have gone on

A gate has just said that the GPUs are free; loading takes up to 18 minutes, and what kills it is memory that *changes*
meanwhile. The watch looks every second; a new holder, memory that somebody else takes, or host memory that no longer
suffices raises LoadTurnedBad in the main thread, by a signal, so that also a wait for a child ends at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import psutil

from draftproof.machine.look import QUICK, Look, look_at
from draftproof.machine.snapshot import MIB

GROWTH_MIB = 256
"""Growth of others' memory that ends a load. Less is the jitter of contexts and of reading two lists one after the other."""
ANSWER_S = 3.0
"""For the main thread to leave what it is doing. A single read of a shard or copy to a GPU takes less."""
SIGNAL = signal.SIGUSR1


class LoadTurnedBad(BaseException):
    """The cause, raised in the main thread. No Exception, so that no library takes it for an error of its own."""


class Watch:
    """From the first byte of a load to the last."""

    def __init__(self, before: Look, *, every_s: float, give_up: Callable[[str], None]) -> None:
        """`before`: what the gate saw. `give_up` is called, in the watch's thread, with the cause when the main thread does
        not react within ANSWER_S; it must not return to the load."""
        self.before, self.every_s, self.give_up = before, every_s, give_up
        self.cause: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine-watch", daemon=True)
        self._signals = False
        self._earlier: Any = None

    def start(self) -> None:
        """Begin. Called outside the main thread it only looks, and `stop` tells."""
        if threading.current_thread() is threading.main_thread():
            self._earlier = signal.signal(SIGNAL, self._raise)
            self._signals = True
        self._thread.start()

    def stop(self) -> str | None:
        """End the watch; returns the cause if it found one. May be called again, and must be if Ctrl-C interrupts it."""
        try:
            self._ended.set()
            self._thread.join()
        except LoadTurnedBad:  # the signal, of which there is one at most, arrives right here
            self._ended.set()
            self._thread.join()
        # Not before the thread has ended: without our handler its signal would end the process.
        if self._signals:
            signal.signal(SIGNAL, self._earlier)
            self._signals = False
        return self.cause

    def _run(self) -> None:
        while not self._ended.wait(self.every_s):
            try:
                cause = self._look()
            except (OSError, RuntimeError, psutil.Error):  # no thread or file to be had for this look: the next may have them
                continue
            if cause is None:
                continue
            if self._ended.is_set():
                return
            self.cause = cause
            if self._signals:
                signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
                if not self._ended.wait(ANSWER_S):
                    self.give_up(cause)
            return

    def _look(self) -> str | None:
        needs = self.before.needs
        if needs.host_bytes is not None and needs.least_host_bytes is not None:
            own = _own_memory()
            room = psutil.virtual_memory().available + sum(own.values())
            if room < needs.least_host_bytes:
                told = f"{room / MIB:,.0f} MiB for this run, about {needs.host_bytes / MIB:,.0f} MiB expected"
                return f"host memory shrank: {told}{_largest(own)}"
        if needs.gpus == ():
            return None
        now = look_at([self.before.reach], needs, parts=QUICK, samples=1)[0]
        return what_changed(self.before, now)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self._ended.set()
        raise LoadTurnedBad(self.cause)


def what_changed(before: Look, now: Look) -> str | None:
    """The sentence that ends a load, or None: a holder that was not there, or memory that others took since.

    A look that fails is no cause: a driver is busy while it loads. In a container, whose processes NVML may list by the
    host's numbers or not at all, this run's own memory cannot be told from others': only processes that can be seen count.
    """
    if now.snapshot is None or before.snapshot is None:
        return None
    tells_apart = now.snapshot.viewer.initial_namespace is True
    known = {(holder.gpu, holder.pid) for holder in before.holders}
    for holder in now.blockers:
        if (holder.gpu, holder.pid) in known or holder.kind in ("driver", "dead"):
            continue
        if tells_apart or holder.process is not None:
            return f"a new holder on GPU {holder.gpu}: {holder.why}"
    for gpu in now.gpus if tells_apart else ():
        grown = _of_others(now, gpu.index) - _of_others(before, gpu.index)
        if grown > GROWTH_MIB * MIB:
            who = max((h for h in now.blockers if h.gpu == gpu.index), key=lambda h: h.bytes or 0, default=None)
            return f"others took {grown / MIB:,.0f} MiB on GPU {gpu.index}" + (f": {who.why}" if who else ", and no process shows it")
    return None


def _of_others(look: Look, index: int) -> int:
    """Bytes in use on a GPU that are not of this run. Its own are read after the whole, so they can only be overrated."""
    gpu = next((gpu for gpu in look.gpus if gpu.index == index), None)
    if gpu is None or gpu.memory is None:
        return 0
    return max(0, min(gpu.memory.used) - look.own_bytes(index))


def _own_memory() -> dict[int, int]:
    """Resident bytes of this process and all below it, by pid."""
    sizes = {}
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            sizes[process.pid] = process.memory_info().rss
    return sizes


def _largest(own: Collection[int]) -> str:
    """Who else uses most of the host's memory."""
    sizes = [
        (process.info["memory_info"].rss, process.info["pid"], process.info["name"])
        for process in psutil.process_iter(["pid", "name", "memory_info"])
        if process.info["memory_info"] is not None and process.info["pid"] not in own
    ]
    if not sizes:
        return ""
    size, pid, name = max(sizes)
    return f"; the largest other program is pid {pid} `{name}` with {size / MIB:,.0f} MiB"
