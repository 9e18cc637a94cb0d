"""Copies memory between each pair of GPUs and compares every byte: what `gpu.links` asks for when it is to look deep.

    ssh node7 python3 -I - < copies.py        # by hand: all GPUs, default sizes

What NVML says of a link is what the hardware could do. A wrong IOMMU or ACS setting shows only in a copy: it hangs, or
"succeeds" while other bytes arrive. So for each directed pair a pattern of its own is written to one GPU and poison to
the other, the one is copied over the other, and all of it is read back.

Standard library and libcuda alone, Python >= 3.9. CUDA is only ever initialised in a forked child, which takes one pair
at a time and is killed when it does not answer. A fresh one goes on after any pair that was not right, because the
errors of a CUDA context stay with it.

Request (all keys optional): {"gpus": null | [NVML indices], "bytes": 67108864, "repeats": 8, "pair_s": 10.0, "start_s": 20.0,
"deadline_s": 120.0, "roots": {"cuda": "libcuda.so.1"}}. Document: {"schema": 1, "pairs": [{"from", "to", "status", "detail",
"gb_per_s"}], "seconds", "why"}, where `status` is

- ok: every byte arrived, directly from GPU to GPU
- no_peer_access: every byte arrived, but by way of host memory: the driver allows no direct access
- corrupt: other bytes arrived
- failed: the driver refused, or there was no time left; `detail` says which
- hung: no end within pair_s

and `why` says what kept CUDA from starting, if anything did. A single GPU copies to itself.
"""

from __future__ import annotations

import array
import base64
import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
import zlib
from typing import Any

BEGIN, END = "=====draftproof-begin=====", "=====draftproof-end====="

DEFAULTS: dict[str, Any] = {
    "gpus": None,
    "bytes": 64 * 2**20,
    "repeats": 8,
    "pair_s": 10.0,
    "start_s": 20.0,
    "deadline_s": 120.0,
    "roots": {},
}

POISON = 0xA5A5A5A5
"""What the destination holds before: no word of the pattern, which counts from 1."""
STEP, STEPS = 1021, 64
"""The pattern of a pair is shifted by STEP words against the last pair's, so that another pair's data is seen as wrong."""
BLOCK = 4096
"""Bytes in which differences are counted."""
DEATH_S = 1.0
"""For a killed child to go. One that is stuck in the driver may stay."""
PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Print the document; returns 0, since whatever happens to a pair is an answer."""
    request = json.loads(zlib.decompress(base64.urlsafe_b64decode(arguments[0]))) if arguments else {}
    print(BEGIN, json.dumps(copies(request)), END, sep="\n", flush=True)
    return 0


def copies(request: dict[str, Any]) -> dict[str, Any]:
    """Carry out a request (see the top of this file); returns the document, soon after `deadline_s` at the latest."""
    started = time.monotonic()
    request = {**DEFAULTS, **request}
    request["bytes"] = max(BLOCK, request["bytes"] // BLOCK * BLOCK)
    deadline = started + request["deadline_s"]
    pattern = array.array("I", range(1, 1 + request["bytes"] // 4 + STEP * STEPS))  # before forking: shared by all children
    results: list[dict[str, Any]] = []
    worker = Worker(request, pattern)
    try:
        count, why = worker.start(deadline)
        gpus = list(range(count)) if request["gpus"] is None else list(dict.fromkeys(request["gpus"]))
        pairs = [(a, b) for a in gpus for b in gpus if a != b] or [(a, a) for a in gpus]
        for number, (source, target) in enumerate(pairs):
            if why is None and time.monotonic() >= deadline:
                why = f"Not tried: the {request['deadline_s']:g} s for all pairs were over."
            if why is None and worker.ended:
                worker = Worker(request, pattern)
                _, why = worker.start(deadline)
            if why is not None:  # what failed once need not be tried 56 times
                results.append(_result(source, target, "failed", why))
                continue
            results.append(worker.ask(source, target, number, deadline))
            if results[-1]["status"] not in ("ok", "no_peer_access"):
                worker.end()
    finally:
        worker.end()
    return {"schema": 1, "pairs": results, "seconds": round(time.monotonic() - started, 3), "why": why}


def _result(source: int, target: int, status: str, detail: str, gb_per_s: float | None = None) -> dict[str, Any]:
    return {"from": source, "to": target, "status": status, "detail": detail, "gb_per_s": gb_per_s}


# The parent's side


class Worker:
    """The child that holds CUDA. Each question is answered by one line of JSON; when none comes in time the child is killed."""

    def __init__(self, request: dict[str, Any], pattern: array.array[int]) -> None:
        self.request = request
        questions, self.question = os.pipe()
        self.answer, answers = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.question)
                os.close(self.answer)
                _serve(questions, answers, parent, request, pattern)
            finally:
                os._exit(1)  # whatever happened, the child must not go on as a second parent
        os.close(questions)
        os.close(answers)
        self.buffer = b""
        self.ended = False
        self.code: int | None = None
        """Once it is reaped: its exit code, negative for a signal."""

    def start(self, deadline: float) -> tuple[int, str | None]:
        """How many GPUs CUDA sees, and why it sees none."""
        limit = min(self.request["start_s"], deadline - time.monotonic())
        answer = self._line(limit)
        if answer is None:
            answer = {"gpus": 0, "why": self._silence("starting CUDA", limit)[1]}
        if answer["why"] is not None:
            self.end()
        return answer["gpus"], answer["why"]

    def ask(self, source: int, target: int, number: int, deadline: float) -> dict[str, Any]:
        """The result of one pair."""
        limit = min(self.request["pair_s"], deadline - time.monotonic())
        with contextlib.suppress(BrokenPipeError):  # it has died: seen below
            os.write(self.question, f"{source} {target} {number}\n".encode())
        return self._line(limit) or _result(source, target, *self._silence("the copy", limit))

    def end(self) -> None:
        """Kill the child. If it is stuck in the driver it stays, but holds nothing of ours."""
        if not self.ended:
            self._kill()
            os.close(self.question)
            os.close(self.answer)
            self.ended = True

    def _line(self, timeout_s: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.answer], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self.answer, 65536) if ready else b""
            if not chunk:
                return None
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _silence(self, what: str, limit_s: float) -> tuple[str, str]:
        """Status and detail when no line came: it died, or it hangs."""
        closed, _, _ = select.select([self.answer], [], [], 0)
        if closed and self._reap(DEATH_S):
            assert self.code is not None
            return "failed", f"The process died in {what} ({f'signal {-self.code}' if self.code < 0 else f'exit code {self.code}'})."
        end = "was killed" if self._kill() else "cannot be killed: it is stuck in the driver"
        return "hung", f"No end of {what} within {limit_s:.1f} s; the process {end}."

    def _kill(self) -> bool:
        if self.code is None:  # else its number may be another's by now
            os.kill(self.pid, signal.SIGKILL)
        return self._reap(DEATH_S)

    def _reap(self, wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            elif time.monotonic() >= deadline:
                return False
            else:
                time.sleep(0.002)
        return True


# The child's side


class CudaError(Exception):
    """A call of the driver did not return CUDA_SUCCESS."""


class Cuda:
    """The driver API: `cuda("cuInit", 0)` calls, and raises CudaError with the driver's name for what went wrong."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.contexts: dict[int, ctypes.c_void_p] = {}

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(f"{name}: {text.value.decode() if text.value else f'error {code}'}")

    def handle(self, gpu: int) -> ctypes.c_int:
        """CUDA's name for a GPU."""
        handle = ctypes.c_int()
        self("cuDeviceGet", ctypes.byref(handle), gpu)
        return handle

    def context(self, gpu: int) -> ctypes.c_void_p:
        """A GPU's primary context, made at first need: about 0.5 GB of its memory."""
        if gpu not in self.contexts:
            context = ctypes.c_void_p()
            self("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.handle(gpu))
            self.contexts[gpu] = context
        return self.contexts[gpu]


def _serve(questions: int, answers: int, parent: int, request: dict[str, Any], pattern: array.array[int]) -> None:
    """Answer questions until the parent is gone."""
    library = ctypes.CDLL(None)
    library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # the parent's stdout is an ssh session's: a stuck child would keep it open
        os.dup2(null, standard)
    # NVML counts by bus and sees all of them; CUDA by speed, and only those it was told of.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    count, why = ctypes.c_int(), None
    try:
        cuda = Cuda(request["roots"].get("cuda") or "libcuda.so.1")
        cuda("cuInit", 0)
        cuda("cuDeviceGetCount", ctypes.byref(count))
        why = None if count.value else "CUDA sees no GPU."
    except (OSError, AttributeError, CudaError) as error:
        why = f"CUDA did not start: {error}."
    _say(answers, {"gpus": count.value, "why": why})
    with os.fdopen(questions) as lines:
        for line in lines:
            if os.getppid() != parent:
                return
            source, target, number = map(int, line.split())
            try:
                result = _copy(cuda, source, target, memoryview(pattern)[STEP * (number % STEPS) :], request)
            except (AttributeError, CudaError) as error:
                result = _result(source, target, "failed", f"{error}.")
            _say(answers, result)


def _say(answers: int, document: dict[str, Any]) -> None:
    os.write(answers, json.dumps(document).encode() + b"\n")


def _copy(cuda: Cuda, source: int, target: int, pattern: memoryview, request: dict[str, Any]) -> dict[str, Any]:
    """Copy the pattern's first `bytes` from one GPU to the other, once and then `repeats` times for the rate; compare after both."""
    size, repeats = request["bytes"], request["repeats"]
    source_context, target_context = cuda.context(source), cuda.context(target)
    directions = [] if source == target else [(source, target), (target, source)]  # either GPU may carry out the copy
    opened = [(of, peer) for of, peer in directions if _open_access(cuda, of, peer)]
    want = (ctypes.c_char * size).from_buffer(pattern)
    got = ctypes.create_string_buffer(size)
    n = ctypes.c_size_t(size)
    here, there = ctypes.c_uint64(), ctypes.c_uint64()

    def copy(times: int) -> float:
        """Seconds."""
        cuda("cuCtxSetCurrent", target_context)
        cuda("cuMemsetD32_v2", there, ctypes.c_uint(POISON), ctypes.c_size_t(size // 4))
        cuda("cuCtxSynchronize")
        cuda("cuCtxSetCurrent", source_context)
        started = time.perf_counter()
        for _ in range(times):
            cuda("cuMemcpyPeerAsync", there, target_context, here, source_context, n, None)
        cuda("cuCtxSynchronize")
        return time.perf_counter() - started

    def difference(memory: ctypes.c_uint64, context: ctypes.c_void_p) -> str | None:
        ctypes.memset(got, 0, size)
        cuda("cuCtxSetCurrent", context)
        cuda("cuMemcpyDtoH_v2", got, memory, n)
        return _difference(got, want, size)

    try:
        cuda("cuCtxSetCurrent", source_context)
        cuda("cuMemAlloc_v2", ctypes.byref(here), n)
        cuda("cuMemcpyHtoD_v2", here, want, n)
        wrong = difference(here, source_context)
        if wrong is not None:
            return _result(source, target, "corrupt", f"GPU {source} does not even give back what the host wrote to it: {wrong}.")
        cuda("cuCtxSetCurrent", target_context)
        cuda("cuMemAlloc_v2", ctypes.byref(there), n)
        copy(1)
        wrong = difference(there, target_context)
        seconds = copy(repeats) if wrong is None else 0.0
        wrong = wrong or difference(there, target_context)
    finally:  # after an error of the copy these fail too, and the process ends
        with contextlib.suppress(CudaError):
            for memory, context in ((here, source_context), (there, target_context)):
                if memory.value:
                    cuda("cuCtxSetCurrent", context)
                    cuda("cuMemFree_v2", memory)
            for of, peer in opened:  # a GPU may have only so many peers at a time
                cuda("cuCtxSetCurrent", cuda.context(of))
                cuda("cuCtxDisablePeerAccess", cuda.context(peer))
    if wrong is not None:
        return _result(source, target, "corrupt", f"Other bytes arrived: {wrong}.")
    rate = round(size * repeats / seconds / 1e9, 2)
    arrived = f"{size:,} bytes arrived as sent"
    if opened != directions:
        barred = " and ".join(f"from {of} to {peer}" for of, peer in directions if (of, peer) not in opened)
        return _result(source, target, "no_peer_access", f"{arrived}, but by way of host memory: no direct access {barred}.", rate)
    return _result(source, target, "ok", f"{arrived}.", rate)


def _open_access(cuda: Cuda, of: int, peer: int) -> bool:
    """Let one GPU reach the other's memory; False if the driver does not allow it."""
    can = ctypes.c_int()
    cuda("cuDeviceCanAccessPeer", ctypes.byref(can), cuda.handle(of), cuda.handle(peer))
    if can.value:
        cuda("cuCtxSetCurrent", cuda.context(of))
        cuda("cuCtxEnablePeerAccess", cuda.context(peer), 0)
    return bool(can.value)


def _difference(got: Any, want: Any, size: int) -> str | None:
    """Where and how two buffers differ, None if they do not."""
    if ctypes.CDLL(None).memcmp(got, want, ctypes.c_size_t(size)) == 0:
        return None
    a, b = bytes(got)[:size], bytes(want)
    blocks = [i for i in range(0, size, BLOCK) if a[i : i + BLOCK] != b[i : i + BLOCK]]
    word = next(i for i in range(blocks[0], size, 4) if a[i : i + 4] != b[i : i + 4])
    held, sent = (int.from_bytes(x[word : word + 4], sys.byteorder) for x in (a, b))
    how = {POISON: "nothing arrived there", 0: "zeros arrived there"}.get(held, f"0x{held:08x} instead of 0x{sent:08x}")
    return f"{len(blocks):,} of {size // BLOCK:,} blocks of {BLOCK:,} bytes differ, the first at byte {word:,}: {how}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
