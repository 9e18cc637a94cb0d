"""machine/copies.py as it ships, against a driver made of host memory (fakes/cuda.c) that corrupts, fails and hangs as told."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sshd
from draftproof.machine import remote
from draftproof.machine.remote import Reach

SOURCE = Path(__file__).parent.parent / "fakes" / "cuda.c"
MIB = 2**20

Look = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "A C compiler is needed (Debian: apt-get install gcc)."
    path = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", path, SOURCE], check=True)
    return path


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def look(library: Path, journal: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """`look("gpus=3 flip=0:1", pair_s=0.5)`: the document of a machine like that; 1 MiB a copy, twice for the rate."""

    def ask(fake: str, *, root: Path = library, **request: Any) -> dict[str, Any]:
        monkeypatch.setenv("FAKE_CUDA", f"{fake} journal={journal}")
        monkeypatch.setenv(remote.ROOTS_VARIABLE, json.dumps({"cuda": str(root)}))
        answer = Reach().ask("copies", {"bytes": MIB, "repeats": 2, "pair_s": 5.0, **request}, timeout_s=30.0)
        document: dict[str, Any] = json.loads(answer.document)
        assert document["schema"] == 1
        return document

    return ask


@pytest.fixture(autouse=True)
def _nothing_left(journal: Path) -> Iterator[None]:
    """Every process that initialised CUDA is gone."""
    yield
    for pid in _starts(journal):
        deadline = time.monotonic() + 5.0
        while _alive(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not _alive(pid), f"{pid} was left behind"


def _lines(journal: Path) -> list[str]:
    return journal.read_text().splitlines() if journal.exists() else []


def _starts(journal: Path) -> list[int]:
    return [int(line.split()[1]) for line in _lines(journal) if line.startswith("init")]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _statuses(document: dict[str, Any]) -> dict[tuple[int, int], str]:
    return {(pair["from"], pair["to"]): pair["status"] for pair in document["pairs"]}


def _detail(document: dict[str, Any], source: int, target: int) -> str:
    (detail,) = [pair["detail"] for pair in document["pairs"] if (pair["from"], pair["to"]) == (source, target)]
    return str(detail)


def test_every_pair_both_ways(look: Look, journal: Path) -> None:
    """A GPU of the fake holds 3 MiB: the four pairs of each GPU fit only if every pair gives its memory back."""
    document = look("gpus=3")
    assert [(pair["from"], pair["to"]) for pair in document["pairs"]] == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert set(_statuses(document).values()) == {"ok"}
    assert document["why"] is None
    assert _detail(document, 2, 1) == "1,048,576 bytes arrived as sent."
    # One copy that is compared, two for the rate, all of them direct, in one process.
    copied = [line for line in _lines(journal) if line.startswith("copy")]
    assert copied == [f"copy {a} {b} {MIB} direct" for a, b in _statuses(document) for _ in range(3)]
    assert len(_starts(journal)) == 1


def test_gpus_are_numbered_as_nvml_does(look: Look, journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    look("gpus=2")
    assert _lines(journal)[0].split()[2:] == ["PCI_BUS_ID", "-"]


def test_only_the_gpus_asked_for(look: Look, journal: Path) -> None:
    assert _statuses(look("gpus=4", gpus=[3, 1, 3])) == {(3, 1): "ok", (1, 3): "ok"}
    assert {tuple(line.split()[1:3]) for line in _lines(journal) if line.startswith("copy")} == {("3", "1"), ("1", "3")}


def test_one_gpu_copies_to_itself(look: Look) -> None:
    assert _statuses(look("gpus=1")) == {(0, 0): "ok"}
    assert _statuses(look("gpus=4", gpus=[2])) == {(2, 2): "ok"}
    assert _statuses(look("gpus=1 flip=0:0")) == {(0, 0): "corrupt"}


@pytest.mark.parametrize(
    ("fake", "detail"),
    [
        # The pattern of the first pair counts from 1: word 1250, at byte 5000, is 1251 = 0x4e3; bit 4 makes it 0x4f3.
        ("flip", "1 of 256 blocks of 4,096 bytes differ, the first at byte 5,000: 0x000004f3 instead of 0x000004e3"),
        ("flip_late", "1 of 256 blocks of 4,096 bytes differ, the first at byte 5,000: 0x000004f3 instead of 0x000004e3"),
        ("lost", "256 of 256 blocks of 4,096 bytes differ, the first at byte 0: nothing arrived there"),
        # 64 KiB are 16 blocks; 1 MiB - 64 KiB = 983,040.
        ("zeros", "16 of 256 blocks of 4,096 bytes differ, the first at byte 983,040: zeros arrived there"),
    ],
)
def test_other_bytes_arrive(look: Look, fake: str, detail: str) -> None:
    document = look(f"gpus=2 {fake}=0:1")
    assert _statuses(document) == {(0, 1): "corrupt", (1, 0): "ok"}
    assert _detail(document, 0, 1) == f"Other bytes arrived: {detail}."
    assert document["pairs"][0]["gb_per_s"] is None


def test_memory_that_is_bad_by_itself(look: Look) -> None:
    """Not the link is to blame: word 19 holds byte 77, and 20 = 0x14 with bit 8 changed is 0x114."""
    document = look("gpus=2 bad_memory=0")
    assert _statuses(document) == {(0, 1): "corrupt", (1, 0): "ok"}
    assert _detail(document, 0, 1) == (
        "GPU 0 does not even give back what the host wrote to it: "
        "1 of 256 blocks of 4,096 bytes differ, the first at byte 76: 0x00000114 instead of 0x00000014."
    )


def test_a_failure_and_the_pairs_after_it(look: Look, journal: Path) -> None:
    """After a failed copy every call of that context fails: the next pair needs a process of its own."""
    document = look("gpus=3 fail=0:2")
    assert _statuses(document) == {(0, 1): "ok", (0, 2): "failed", (1, 0): "ok", (1, 2): "ok", (2, 0): "ok", (2, 1): "ok"}
    assert _detail(document, 0, 2) == "cuCtxSynchronize: CUDA_ERROR_LAUNCH_FAILED."
    assert len(_starts(journal)) == 2


def test_a_hang_is_killed(look: Look, journal: Path) -> None:
    document = look("gpus=3 hang=1:0", pair_s=0.5)
    assert _statuses(document) == {(0, 1): "ok", (0, 2): "ok", (1, 0): "hung", (1, 2): "ok", (2, 0): "ok", (2, 1): "ok"}
    assert _detail(document, 1, 0) == "No end of the copy within 0.5 s; the process was killed."
    assert 0.5 <= document["seconds"] < 5.0
    assert len(_starts(journal)) == 2


def test_a_copy_that_ends_its_process(look: Look) -> None:
    document = look("gpus=2 crash=0:1")
    assert _statuses(document) == {(0, 1): "failed", (1, 0): "ok"}
    assert _detail(document, 0, 1) == "The process died in the copy (signal 6)."


def test_no_direct_access(look: Look, journal: Path) -> None:
    """The bytes are compared all the same, and both directions matter: either GPU may carry out the copy."""
    document = look("gpus=3 no_peer=0:1 no_peer=1:2 no_peer=2:1 flip=2:1")
    assert _statuses(document) == {
        (0, 1): "no_peer_access",
        (1, 0): "no_peer_access",
        (1, 2): "no_peer_access",
        (2, 1): "corrupt",
        (0, 2): "ok",
        (2, 0): "ok",
    }
    assert _detail(document, 1, 0) == "1,048,576 bytes arrived as sent, but by way of host memory: no direct access from 0 to 1."
    assert _detail(document, 1, 2).endswith("no direct access from 1 to 2 and from 2 to 1.")
    assert document["pairs"][0]["gb_per_s"] > 0
    assert f"copy 0 1 {MIB} staged" in _lines(journal)
    assert f"copy 0 2 {MIB} direct" in _lines(journal)


def test_the_rate(look: Look) -> None:
    """1 MiB in 20 ms and a little more: 0.0524 GB/s at most. Counting the first copy or the poison would give other values."""
    (pair, _) = look("gpus=2 slow=20", repeats=4)["pairs"]
    assert 0.02 <= pair["gb_per_s"] <= 0.05


def test_the_deadline_of_all_pairs(look: Look) -> None:
    document = look("gpus=4 hang=*:*", pair_s=0.4, deadline_s=1.0)
    statuses = list(_statuses(document).values())
    assert statuses[:2] == ["hung", "hung"]
    assert len(statuses) == 12
    assert set(statuses[3:]) == {"failed"}
    assert _detail(document, 3, 2) == "Not tried: the 1 s for all pairs were over."
    assert document["seconds"] < 3.0


def test_no_room(look: Look) -> None:
    document = look(f"gpus=2 memory={MIB - 1}")
    assert _statuses(document) == {(0, 1): "failed", (1, 0): "failed"}
    assert _detail(document, 0, 1) == "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY."


def test_a_gpu_that_is_not_there(look: Look) -> None:
    document = look("gpus=2", gpus=[0, 7])
    assert _statuses(document) == {(0, 7): "failed", (7, 0): "failed"}
    assert _detail(document, 0, 7) == "cuDeviceGet: CUDA_ERROR_INVALID_DEVICE."


@pytest.mark.parametrize(
    ("fake", "why"),
    [
        ("init=100", "CUDA did not start: cuInit: CUDA_ERROR_NO_DEVICE."),
        ("init=999", "CUDA did not start: cuInit: error 999."),
        ("gpus=0", "CUDA sees no GPU."),
        ("hang_init=1", "No end of starting CUDA within 0.5 s; the process was killed."),
    ],
)
def test_cuda_does_not_start(look: Look, fake: str, why: str) -> None:
    document = look(fake, start_s=0.5)
    assert (document["why"], document["pairs"]) == (why, [])
    document = look(fake, start_s=0.5, gpus=[0, 1])
    assert document["why"] == why
    assert [(pair["status"], pair["detail"]) for pair in document["pairs"]] == [("failed", why)] * 2


def test_no_library(look: Look, tmp_path: Path) -> None:
    missing = look("", root=tmp_path / "libcuda.so.1")
    assert missing["why"].startswith(f"CUDA did not start: {tmp_path}/libcuda.so.1: cannot open shared object file")
    other = look("", root=Path("libc.so.6"))
    assert other["why"].endswith("undefined symbol: cuInit.")


def test_the_child_dies_with_the_script(library: Path, journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hung child of a script that was killed would hold the GPU for ever."""
    monkeypatch.setenv("FAKE_CUDA", f"hang=0:1 journal={journal}")
    argument = remote._encode({"bytes": MIB, "pair_s": 60.0, "roots": {"cuda": str(library)}})
    with (remote.SCRIPTS / "copies.py").open("rb") as program:
        script = subprocess.Popen([sys.executable, "-I", "-", argument], stdin=program, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 10.0
    while not _starts(journal) and time.monotonic() < deadline:
        time.sleep(0.01)
    (child,) = _starts(journal)
    assert _alive(child)
    os.kill(script.pid, signal.SIGKILL)
    script.wait(10.0)  # that the child follows is asserted by `_nothing_left`


def test_over_ssh(library: Path, journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sshd.running(tmp_path / "sshd") as server, sshd.socket_folder() as sockets:
        server.alias("node7", f'environment="FAKE_CUDA=gpus=2 flip=1:0 journal={journal}"')
        monkeypatch.setenv("PATH", server.path)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(sockets))
        monkeypatch.setenv(remote.ROOTS_VARIABLE, json.dumps({"cuda": str(library)}))
        document = json.loads(Reach("node7", python=sys.executable).ask("copies", {"bytes": MIB}, timeout_s=30.0).document)
    assert _statuses(document) == {(0, 1): "ok", (1, 0): "corrupt"}


def test_it_runs_on_python_3_9_with_nothing_installed() -> None:
    tree = ast.parse((remote.SCRIPTS / "copies.py").read_text(), feature_version=(3, 9))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names
