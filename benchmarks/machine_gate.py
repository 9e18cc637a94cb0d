"""How fast a host of eight GPUs answers: the probe, the command, the whole gate, over warm ssh, and with a driver that hangs.

    python benchmarks/machine_gate.py [--runs 50] [--out FILE.json]

The GPUs are fake (`tests/fakes/nvml.c`), with a holder and a monitor on each; the probe, the processes, sshd and ssh are real.
Exits with 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from draftproof.gate.finding import Status
from draftproof.gate.machine import judge
from draftproof.machine.look import DEADLINE_S, Needs, look_at
from draftproof.machine.remote import Reach
from fake_gpus import FakeGpus
from sshd import running, socket_folder

GPUS = 8
LOCAL_S, WARM_SSH_S, HANGING_S = 1.0, 1.5, DEADLINE_S


def main() -> int:
    """Time all, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        gpus = stack.enter_context(FakeGpus(folder, count=GPUS))
        server = stack.enter_context(running(folder / "sshd"))
        server.alias("node7")
        os.environ.update({**gpus.environment, "PATH": server.path, "XDG_RUNTIME_DIR": str(stack.enter_context(socket_folder()))})
        for index in range(GPUS):
            gpus.holder([index], 71_604, name=f"VLLM::Worker_TP{index}")
        gpus.exporter(range(GPUS))
        command = [sys.executable, "-m", "draftproof", "check", "--json"]
        ways: dict[str, tuple[Callable[[], object], float]] = {
            "the probe alone, here": (lambda: Reach().ask("probe", {}, HANGING_S), LOCAL_S),
            "look and judge, here": (lambda: gate(None, "fail"), LOCAL_S),
            "draftproof check --json, here": (
                lambda: subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL),
                LOCAL_S,
            ),
            "look and judge, over warm ssh": (lambda: gate("node7", "fail"), WARM_SSH_S),
            "draftproof check --host, over warm ssh": (
                lambda: subprocess.run([*command, "--host", "node7"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL),
                WARM_SSH_S,
            ),
        }
        gate("node7", "fail")  # the connection is made
        taken = {name: [timed(way) for _ in range(options.runs)] for name, (way, _) in ways.items()}
        limits = {name: limit for name, (_, limit) in ways.items()}
        gpus.unsay("hold")  # so that nothing else is wrong
        gpus.say("hang nvmlDeviceGetMemoryInfo_v2 5 600")
        hangs = "look and judge, nvmlDeviceGetMemoryInfo_v2 hangs on GPU 5"
        taken[hangs] = [timed(lambda: gate(None, "unknown")) for _ in range(5)]
        gpus.say("hang nvmlInit_v2 -1 600")
        dead = "look and judge, nvmlInit hangs"
        taken[dead] = [timed(lambda: gate(None, "unknown", "gpu.count")) for _ in range(5)]
        limits |= {hangs: HANGING_S, dead: HANGING_S}
    table = Table("8 fake GPUs, each held", "runs", "p50 s", "p95 s", "limit s")
    figures = {}
    for name, seconds in taken.items():
        p50, p95 = statistics.median(seconds), sorted(seconds)[min(len(seconds) - 1, int(0.95 * len(seconds)))]
        figures[name] = {"p50_s": p50, "p95_s": p95, "limit_s": limits[name], "met": p95 <= limits[name], "seconds": seconds}
        table.add_row(name, str(len(seconds)), f"{p50:.3f}", f"{p95:.3f}", f"{limits[name]:.1f}")
    Console(width=120).print(table)
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1))
    return 0 if all(one["met"] for one in figures.values()) else 1


def gate(host: str | None, memory: Status, check: str = "gpu.memory") -> None:
    """The whole machine gate of a host; what it finds is as it must be."""
    look = look_at([Reach(host)], Needs())[0]
    found = {finding.check: finding for finding in judge(look)}
    assert found[check].status == memory, found[check]


def timed(way: Callable[[], object]) -> float:
    """Wall seconds."""
    started = time.perf_counter()
    way()
    return time.perf_counter() - started


if __name__ == "__main__":
    raise SystemExit(main())
