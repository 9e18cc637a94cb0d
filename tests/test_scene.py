"""The scene: a run that needs GPUs which somebody holds, through the console script, over a fake NVML and real processes."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftproof.machine.reclaim import ReclaimPlan, load_plan, save
from fake_gpus import FakeGpus, control_group, ended, on_this_machine, wait_for
from line import draftproof, end, start, write_job

STUBS = Path(__file__).parent / "machine" / "stubs"
SCRIPT = Path(sys.executable).with_name("draftproof")
UNTIL = ("--until", "regenerate", "machine.gpus=[0,1]")

SLOW = """
import sys, time, hashlib
from draftproof.cli import main
from draftproof.extract.engines.transformers import TransformersEngine
load = TransformersEngine.load
def slowly(self):
    load(self)
    {wait}
TransformersEngine.load = slowly
sys.argv = ["draftproof", *sys.argv[1:]]
main()
"""
"""The whole line with a target that takes longer to load."""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="Only root may make a control group.")


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpus]:
    with on_this_machine(tmp_path, monkeypatch, count=2) as fake:
        yield fake


@pytest.fixture
def recipe(tmp_path: Path, tm_folder: Path) -> Path:
    return write_job(tmp_path / "job", tm_folder)


def unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: int, *, active: bool = True) -> Path:
    """A systemd in which vllm.service holds this process; returns the folder of its calls."""
    stub = tmp_path / "stub"
    stub.mkdir()
    (stub / "vllm.service").write_text("stops" if active else "forgets")
    (stub / "vllm.service.state").write_text("active\n" if active else "inactive\n")
    (stub / "vllm.service.pids").write_text(str(pid))
    monkeypatch.setenv("STUB", str(stub))
    monkeypatch.setenv("PATH", f"{STUBS}:{os.environ['PATH']}")
    return stub


def test_a_quiet_machine_lets_the_run_go_on(gpus: FakeGpus, recipe: Path, tmp_path: Path) -> None:
    gpus.exporter([0, 1])
    ran = draftproof("run", recipe, *UNTIL, "--workdir", tmp_path / "run", "--json")
    assert ran.code == 0, ran.stderr
    points = json.loads((tmp_path / "run/gates/01-regenerate.json").read_text())["points"]
    assert [point["point"] for point in points] == ["before", "loading"]
    found = {finding["check"]: finding for finding in points[0]["findings"]}
    assert found["gpu.count"]["evidence"] == "2 of 2 GPUs."
    assert found["gpu.holders"]["status"] == "pass"
    assert {finding["check"] for finding in points[1]["findings"]} >= {"gpu.memory", "gpu.holders", "host.memory"}


def test_a_load_that_would_fail_is_stopped_at_the_gate(gpus: FakeGpus, recipe: Path, tmp_path: Path) -> None:
    _, child = gpus.forked([1], 2566)
    ran = draftproof("run", recipe, *UNTIL, "--workdir", tmp_path / "run", "-q")
    assert ran.code == 3
    assert f"gpu.holders: GPU 1: pid {child}" in ran.sentence()
    assert "draftproof reclaim --gpus 1" in ran.sentence()
    assert not (tmp_path / "run/regenerate").exists()
    assert not ended(child)


@needs_root
def test_units_of_the_recipe_are_shown_and_stopped_on_demand(
    gpus: FakeGpus, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with control_group("system.slice/vllm.service") as group:
        worker = gpus.holder([0], 71_604, name="VLLM::Worker_TP0", cgroup=group)
        bystander = gpus.bystander("VLLM::EngineCor")
        stub = unit(tmp_path, monkeypatch, worker)
        command = ("run", recipe, *UNTIL, "machine.units=[vllm.service]", "--workdir", tmp_path / "run", "-q")
        ran = draftproof(*command)
        assert ran.code == 3
        named = re.search(r"run the same command with --apply (\S+)\.$", ran.sentence())
        assert named is not None
        plan = json.loads(Path(named[1]).read_text())["hosts"][0]
        assert [(one["name"], one["scope"]) for one in plan["units"]] == [("vllm.service", "system")]
        assert [target["pid"] for target in plan["targets"]] == [worker]
        assert not ended(worker)
        assert not (stub / "calls").exists()

        ran = draftproof(*command, "--apply", named[1])
        assert ran.code == 0, ran.stderr
        assert ended(worker)
        assert not ended(bystander)
        assert "systemctl stop" in (stub / "calls").read_text()
        assert (tmp_path / "run/regenerate/manifest.json").exists()


@needs_root
def test_what_a_stopped_unit_would_not_mend_is_still_said(
    gpus: FakeGpus, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with control_group("system.slice/vllm.service") as group:
        unit(tmp_path, monkeypatch, gpus.holder([0], 900, cgroup=group))
        gpus.say("set 1 failed 1")
        ran = draftproof("run", recipe, *UNTIL, "machine.units=[vllm.service]", "--workdir", tmp_path / "run", "-q")
        assert ran.code == 3
        assert "Also: Units of this recipe hold the GPUs." in ran.sentence()


def test_a_plan_of_another_host_is_not_passed_over(gpus: FakeGpus, recipe: Path, tmp_path: Path) -> None:
    worker, path = gpus.holder([0], 900), tmp_path / "plan.json"
    draftproof("reclaim", "--out", path)
    made = load_plan(path).hosts[0]
    save(ReclaimPlan(hosts=(made, made.model_copy(update={"host": "node9"}).sealed())), path)
    ran = draftproof("run", recipe, *UNTIL, "--workdir", tmp_path / "run", "-q", "--apply", path)
    assert ran.code == 2
    assert "The plan is for node9; a run frees only the machine that it runs on" in ran.sentence()
    assert not ended(worker)


@needs_root
def test_a_run_stops_nothing_beyond_its_units(gpus: FakeGpus, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with control_group("system.slice/vllm.service") as group:
        worker, notebook = gpus.holder([0], 71_604, cgroup=group), gpus.holder([1], 900, name="jupyter")
        unit(tmp_path, monkeypatch, worker)
        plan = tmp_path / "plan.json"
        draftproof("reclaim", "--out", plan)
        command = ("run", recipe, *UNTIL, "--workdir", tmp_path / "run", "-q", "--apply", plan)
        ran = draftproof(*command, "machine.units=[vllm.service]")
        assert ran.code == 3
        assert f"The plan stops more than machine.units hold: pid {notebook}." in ran.sentence()
        assert "this recipe names none" in draftproof(*command).sentence()
        assert not ended(worker)
        assert not ended(notebook)


@needs_root
def test_a_yes_on_a_terminal_stops_them(gpus: FakeGpus, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with control_group("system.slice/vllm.service") as group:
        worker = gpus.holder([0], 71_604, name="VLLM::Worker_TP0", cgroup=group)
        unit(tmp_path, monkeypatch, worker, active=False)  # stopped long ago; its worker lives on in its group
        code, said = _at_a_terminal("run", recipe, *UNTIL, "machine.units=[vllm.service]", "--workdir", tmp_path / "run", answer="y\n")
        assert "Stop them now, and go on?" in said
        assert "71,604" in said
        assert code == 0, said
        assert ended(worker)


@needs_root
@pytest.mark.parametrize("answer", ["n\n", "\x04"], ids=["no", "Ctrl-D"])
def test_a_no_on_a_terminal_leaves_them(answer: str, gpus: FakeGpus, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with control_group("system.slice/vllm.service") as group:
        worker = gpus.holder([0], 71_604, name="VLLM::Worker_TP0", cgroup=group)
        unit(tmp_path, monkeypatch, worker)
        command = ("run", recipe, *UNTIL, "machine.units=[vllm.service]", "--workdir", tmp_path / "run", "-q")
        code, said = _at_a_terminal(*command, answer=answer)
        assert "systemctl stop vllm.service" in said  # shown before the question, also with -q
        assert code == 3, said
        assert not ended(worker)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wait",
    ["time.sleep(60)", "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"],
    ids=["a load that a signal ends", "a call that no signal ends"],
)
def test_a_load_that_turns_bad_is_ended_within_five_seconds(gpus: FakeGpus, recipe: Path, tmp_path: Path, wait: str) -> None:
    run = tmp_path / "run"
    assert draftproof("run", recipe, "--until", "vocab", "--workdir", run, "-q").code == 0
    command = [
        sys.executable,
        "-c",
        SLOW.format(wait=wait),
        "run",
        recipe,
        "machine.gpus=[0,1]",
        "--until",
        "extract",
        "--workdir",
        run,
        "-q",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    gate = run / "gates/04-extract.json"
    wait_for(lambda: gate.exists() and '"point": "loading"' in gate.read_text(), 60)
    intruder = gpus.holder([1], 3000, name="python")
    began = time.monotonic()
    _, said = process.communicate(timeout=30)
    seconds = time.monotonic() - began
    assert process.returncode == 3, said
    assert seconds < 5
    assert f"The load was ended: a new holder on GPU 1: pid {intruder} `python" in said
    last = json.loads(gate.read_text())["points"][-1]
    assert (last["point"], last["verdict"], last["findings"][0]["check"]) == ("loading", "fail", "machine.watch")
    assert not (run / "extract").exists()
    assert not ended(intruder)
    # With the intruder gone, the same command goes on to its end.
    os.kill(intruder, 9)
    wait_for(lambda: ended(intruder))
    assert end(start(*command[3:])).code == 0


def _at_a_terminal(*arguments: str | Path, answer: str) -> tuple[int, str]:
    """The console script with a person: stdin and stderr are a terminal. Its exit code, and what it said there."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [SCRIPT, *map(str, arguments)], stdin=theirs, stderr=theirs, stdout=subprocess.DEVNULL, env={**os.environ, "COLUMNS": "200"}
    )
    os.close(theirs)
    said = b""
    answered = False
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
        said += chunk
        if not answered and b"[y/N]" in said:
            os.write(ours, answer.encode())
            answered = True
    os.close(ours)
    return process.wait(60), said.decode(errors="replace")
