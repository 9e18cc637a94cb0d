"""F2: a killed front end leaves engine workers that keep the GPU, while its port is already free."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_gpus import FakeGpus, ended, on_this_machine
from line import draftproof, write_job

FRONT_END = """
import json, socket, sys, time
from draftproof.machine.records import recorded

listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
with recorded("vLLM", run="runs/one") as engine:
    print(json.dumps(engine.environment), flush=True)
    time.sleep(600)
"""
"""Listens, and says what its workers carry in their environment; they have sessions of their own."""


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpus]:
    with on_this_machine(tmp_path, monkeypatch, count=2) as fake:
        yield fake


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_of_a_killed_front_end_are_named_as_ours_and_given_back(
    gpus: FakeGpus, tmp_path: Path, tm_folder: Path, how: signal.Signals
) -> None:
    port = _free_port()
    front_end, worker = _serve(gpus, port)
    assert draftproof("check", "--port", str(port)).code == 3
    front_end.send_signal(how)
    front_end.wait(20)
    assert not ended(worker)

    checked = draftproof("check", "--port", str(port), "--json")
    found = {finding["check"]: finding for finding in checked.document()["findings"]}
    assert found["host.ports"]["status"] == "pass"  # the port alone would say that all is well
    assert found["gpu.holders"]["status"] == "fail"
    holder = checked.document()["hosts"][0]["gpus"][1]["holders"][0]
    assert holder["pid"] == worker
    assert holder["kind"] == "ours"  # also of a front end that ended in good order and left its worker

    recipe = write_job(tmp_path / "job", tm_folder)
    refused = draftproof("run", recipe, "machine.gpus=[1]", "--until", "regenerate", "--workdir", tmp_path / "run", "-q")
    assert refused.code == 3
    assert str(worker) in refused.sentence()

    plan = tmp_path / "plan.json"
    assert draftproof("reclaim", "--out", plan).code == 0
    done = draftproof("reclaim", "--apply", plan, "--json")
    assert done.code == 0, done.stderr
    assert done.document()["freed_mib"] == 71_604
    assert ended(worker)
    assert draftproof("check").code == 0


def test_a_process_of_the_same_name_is_left_alone(gpus: FakeGpus, tmp_path: Path) -> None:
    innocent = gpus.bystander("VLLM::Worker_TP0")
    front_end, worker = _serve(gpus, _free_port())
    front_end.kill()
    front_end.wait(20)
    plan = tmp_path / "plan.json"
    draftproof("reclaim", "--out", plan)
    assert draftproof("reclaim", "--apply", plan).code == 0
    assert ended(worker)
    assert not ended(innocent)


def _serve(gpus: FakeGpus, port: int) -> tuple[subprocess.Popen[str], int]:
    """A front end that is up, and the pid of its worker."""
    front_end = subprocess.Popen([sys.executable, "-c", FRONT_END, str(port)], stdout=subprocess.PIPE, text=True)
    assert front_end.stdout is not None
    return front_end, gpus.holder([1], 71_604, name="VLLM::Worker_TP0", env=json.loads(front_end.stdout.readline()))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
