"""The quiet checkpoint on a real GPU: what `check` names, what `reclaim` frees, and how long both take.

    python benchmarks/machine_gpu.py [--trials 20] [--runs 50] [--out FILE.json]

Needs one NVIDIA GPU that nobody uses, and nothing but CUDA's driver. Three kinds of holders are real CUDA processes of
this script: a live one, a forked child of a killed parent, and one that ignores SIGTERM. Each is looked at, planned,
stopped and verified in the way of `draftproof reclaim`; then `draftproof check` is timed against `nvidia-smi`. Last, this
process loads memory itself, as a target would be, under the watch: alone, which must not end it, and with a holder that
comes in the middle, which must.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftproof.gate.machine import judge
from draftproof.machine.apply import apply
from draftproof.machine.look import QUICK, Look, Needs, look_at
from draftproof.machine.reclaim import Selection, plan_host
from draftproof.machine.remote import Reach
from draftproof.machine.watch import LoadTurnedBad, Watch

MIB = 2**20
HELD_MIB = 2048

HOLDER = """
import ctypes, os, signal, sys, time
mib, how, ready = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    assert code == 0, (name, code)
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(mib * 2**20))
child = os.fork() if how == "forked" else None
if child == 0:
    time.sleep(3600)
with open(ready + ".new", "w") as stream:
    stream.write(f"{os.getpid()} {child or os.getpid()}")
os.rename(ready + ".new", ready)
time.sleep(3600)
"""
"""A CUDA context with memory, and nothing but the driver. Writes its own process id and that of who is to hold the memory."""


def main() -> None:
    """Run all, print two tables, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    console = Console(width=140)
    idle = look()
    for finding in judge(idle):
        console.print(f"{finding.status:>8}  {finding.check}: {finding.evidence}")
    assert not idle.blockers, [holder.why for holder in idle.blockers]
    figures: dict[str, Any] = {"reclaim": {}, "check": {}}
    table = Table(
        "holder", "named", "freed", "MiB back", "kill to steady, p50 s", "p99 s", "whole reclaim, p50 s", title=idle.seen.gpus[0].name
    )
    for how, kind in (("live", "live"), ("forked", "forked"), ("stubborn", "live")):
        trials = [reclaim(how, kind) for _ in range(options.trials)]
        verify = [trial["verify_s"] for trial in trials]
        figures["reclaim"][how] = trials
        table.add_row(
            how,
            f"{sum(trial['named'] for trial in trials)}/{len(trials)}",
            f"{sum(trial['free'] for trial in trials)}/{len(trials)}",
            f"{min(trial['freed_mib'] for trial in trials):,}",
            f"{statistics.median(verify):.3f}",
            f"{quantile(verify, 0.99):.3f}",
            f"{statistics.median(trial['seconds'] for trial in trials):.2f}",
        )
    console.print(table)
    times = Table("command", "p50 s", "p95 s", "against nvidia-smi, p50")
    commands = {
        "nvidia-smi": ["nvidia-smi"],
        "nvidia-smi --query-gpu": ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv"],
        "draftproof check --json": [sys.executable, "-m", "draftproof", "check", "--json"],
        "its look alone": [],
    }
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.runs):  # side by side, so that the machine's moods meet all of them
        for name, command in commands.items():
            taken[name].append(timed(command))
    base = statistics.median(taken["nvidia-smi"])
    for name, seconds in taken.items():
        times.add_row(
            name, f"{statistics.median(seconds):.3f}", f"{quantile(seconds, 0.95):.3f}", f"{statistics.median(seconds) / base:.2f}"
        )
    figures["check"] = taken
    console.print(times)
    figures["watch"] = [load(intruder) for intruder in (False, True)]
    for watched in figures["watch"]:
        console.print(f"load of {watched['mib']:,} MiB {'with' if watched['intruder'] else 'without'} an intruder: {watched['ended']}")
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1))


def reclaim(how: str, kind: str) -> dict[str, Any]:
    """One holder of a kind: start, look, plan, stop, verify."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready")
        # In a session of its own and a child of init: nothing of this script's, as somebody else's work would be.
        subprocess.run(["setsid", "--fork", sys.executable, "-W", "ignore", "-c", HOLDER, str(HELD_MIB), how, str(ready)], check=True)
        wait_for(ready.exists)
        parent, holder = map(int, ready.read_text().split())
    try:
        if how == "forked":
            os.kill(parent, signal.SIGKILL)
            wait_for(lambda: not Path(f"/proc/{parent}").exists())
        seen = look()
        named = [(found.pid, found.kind) for found in seen.blockers]
        started = time.monotonic()
        plan = plan_host(seen, Selection(gpus=(0,), grace_s=0.5))
        done = apply(plan, Reach())
        return {
            "named": named == [(holder, kind)],
            "as": named,
            "why": [found.why for found in seen.blockers],
            "free": done.free,
            "blockers": done.blockers,
            "freed_mib": done.freed_mib,
            "outcomes": [outcome.outcome for outcome in done.outcomes],
            "stop_s": done.stop_s,
            "verify_s": done.verify_s,
            "seconds": time.monotonic() - started,
        }
    finally:
        for pid in {parent, holder}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def load(intruder: bool) -> dict[str, Any]:
    """Take a GiB of the GPU every 0.2 s under the watch; after 3 s somebody else comes, or nobody does."""
    import torch

    chunks: list[torch.Tensor] = [torch.zeros(1, device="cuda")]
    watch = Watch(look(), every_s=1.0, give_up=lambda cause: os._exit(1))
    watch.start()
    began, came, other = time.monotonic(), None, None
    try:
        while time.monotonic() - began < 10:
            chunks.append(torch.empty(2**30, dtype=torch.uint8, device="cuda"))
            if intruder and other is None and time.monotonic() - began > 3:
                with tempfile.TemporaryDirectory() as folder:
                    ready = Path(folder, "ready")
                    subprocess.run(["setsid", "--fork", sys.executable, "-c", HOLDER, str(HELD_MIB), "live", str(ready)], check=True)
                    wait_for(ready.exists)
                    other, came = int(ready.read_text().split()[1]), time.monotonic()
            time.sleep(0.2)
        ended = "not ended"
    except LoadTurnedBad as bad:
        ended = f"ended {time.monotonic() - (came or began):.2f} s after the intruder held its memory: {bad}"
    finally:
        watch.stop()
        if other is not None:
            os.kill(other, signal.SIGKILL)
    mib = len(chunks) * 1024
    chunks.clear()
    torch.cuda.empty_cache()
    return {"intruder": intruder, "mib": mib, "ended": ended}


def look() -> Look:
    """Who holds the GPU now."""
    return look_at([Reach()], Needs(gpus=(0,)), parts=(*QUICK, "links", "host"))[0]


def timed(command: list[str]) -> float:
    """Wall seconds of a command; of a look where there is none."""
    started = time.perf_counter()
    if command:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    else:
        look()
    return time.perf_counter() - started


def quantile(values: list[float], share: float) -> float:
    """The nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def wait_for(true: Callable[[], bool]) -> None:
    """Until it is, at most ten seconds."""
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


if __name__ == "__main__":
    main()
