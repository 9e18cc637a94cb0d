"""The benchmark of recycled pids with few trials: `stop.py` hits nobody, and the usual way shows that it could."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "pid_reuse.py"


def test_whoever_gets_a_recycled_pid_is_not_hit() -> None:
    ended = subprocess.run([sys.executable, BENCHMARK, "--trials", "40"], capture_output=True, text=True, check=False, timeout=120)
    if ended.returncode == 2:
        pytest.skip(ended.stderr.strip())
    assert (ended.returncode, ended.stderr) == (0, "")
    rows = {line[:38].strip(): [int(cell) for cell in line[38:].split()] for line in ended.stdout.splitlines()[2:]}
    trials, reused, wrong, *usual = rows["all"]
    assert (trials, wrong) == (40, 0)
    assert reused >= 30  # 36, unless another process came between
    assert usual[0] == 40
    assert usual[2] >= 12  # for certain: held three times while it looks, once between TERM and KILL, four trials each
    assert rows["between TERM and KILL: held"][2:] == [0, 4, 4, 4]
    assert rows["restarted under the next number"][:3] == [4, 0, 0]
