"""Drivers, disks and processes that hang, fail or crash: the probe ends in time, names the place, and sees everything else."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftproof.machine import probe, snapshot
from fake_gpus import MIB, SOURCE, FakeGpus, run_probe

CALL_S, DEADLINE_S = 0.5, 3.0
"""Half a second is long for a call of the fake, also on a machine that is busy with other tests."""

INIT = ("nvmlInit_v2", "nvmlDeviceGetCount_v2")
SYSTEM = {"nvmlSystemGetDriverVersion": "nvml.driver", "nvmlSystemGetCudaDriverVersion_v2": "nvml.cuda"}
OF_A_GPU = {
    "nvmlDeviceGetMemoryInfo_v2": "memory",
    "nvmlDeviceGetMigMode": "mig",
    "nvmlDeviceGetComputeRunningProcesses_v3": "processes",
    "nvmlDeviceGetGraphicsRunningProcesses_v3": "processes",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3": "processes",
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetMinorNumber": "minor",
    "nvmlDeviceGetPciInfo_v3": "bus_id",
    "nvmlDeviceGetCudaComputeCapability": "compute_capability",
    "nvmlDeviceGetTemperature": "health.temperature_c",
    "nvmlDeviceGetCurrentClocksEventReasons": "health.slowdown",
    "nvmlDeviceGetTotalEccErrors": "health.ecc_uncorrected",
    "nvmlDeviceGetRemappedRows": "health.remap_pending",
    "nvmlDeviceGetFieldValues": "health.recovery_action",
    "nvmlDeviceGetCurrPcieLinkWidth": "pcie",
    "nvmlDeviceGetCurrPcieLinkGeneration": "pcie",
    "nvmlDeviceGetMaxPcieLinkWidth": "pcie",
    "nvmlDeviceGetMaxPcieLinkGeneration": "pcie",
    "nvmlDeviceGetComputeMode": "compute_mode",
    "nvmlDeviceGetPersistenceMode": "persistence",
}
OF_AN_OLD_GPU = {
    "nvmlDeviceGetMemoryInfo": "memory",
    "nvmlDeviceGetComputeRunningProcesses": "processes",
    "nvmlDeviceGetGraphicsRunningProcesses": "processes",
    "nvmlDeviceGetCurrentClocksThrottleReasons": "health.slowdown",
}
OF_LISTS_OF_VERSION_2 = {f"nvmlDeviceGet{kind}RunningProcesses_v2": "processes" for kind in ("Compute", "Graphics", "MPSCompute")}
OF_A_SPLIT_GPU = {"nvmlDeviceGetMaxMigDeviceCount": "mig", "nvmlDeviceGetMigDeviceHandleByIndex": "mig"}
OF_LINKS = {"nvmlDeviceGetP2PStatus": "read", "nvmlDeviceGetTopologyCommonAncestor": "ancestor"}
HANDLE = "nvmlDeviceGetHandleByIndex_v2"


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[FakeGpus]:
    with FakeGpus(tmp_path, count=3) as fake:
        yield fake


def look(gpus: FakeGpus, **request: Any) -> dict[str, Any]:
    """The document of a look that must end in time."""
    begun = time.monotonic()
    document = run_probe(roots={**gpus.roots, **request.pop("roots", {})}, call_s=CALL_S, deadline_s=DEADLINE_S, **request)
    assert document["seconds"] < DEADLINE_S + 0.5
    assert time.monotonic() - begun < DEADLINE_S + 3.0  # with Python's start, on a busy machine
    return document


def told(document: dict[str, Any]) -> dict[str, str]:
    return {entry["what"]: entry["why"] for entry in document["unseen"]}


def value_of(gpu: dict[str, Any], name: str) -> Any:
    """`health.slowdown` of a GPU."""
    for word in name.split("."):
        gpu = gpu[word]
    return gpu


@pytest.mark.parametrize("function", OF_A_GPU)
def test_a_call_that_hangs_on_one_gpu(gpus: FakeGpus, function: str) -> None:
    whole = look(gpus)
    gpus.say(f"hang {function} 1 60")
    document = look(gpus)
    name = OF_A_GPU[function]
    assert told(document)[f"gpu.1.{name}"] == f"{function} did not answer within 0.5 s"
    assert value_of(document["gpus"][1], name) is None
    assert [document["gpus"][0], document["gpus"][2]] == [whole["gpus"][0], whole["gpus"][2]]
    assert document["links"] == whole["links"]
    if name not in ("memory", "processes"):  # what matters most is asked first
        assert document["gpus"][1]["memory"] == whole["gpus"][1]["memory"]
        assert document["gpus"][1]["processes"] == []


def test_every_function_of_the_fake_is_made_to_hang_here() -> None:
    there = set(re.findall(r"^(?:int |LIST\()(nvml\w+)", SOURCE.read_text(), re.MULTILINE)) - {
        "nvmlShutdown",
        "nvmlDeviceGetConfComputeMemSizeInfo",
    }
    tables = (INIT, SYSTEM, OF_A_GPU, OF_AN_OLD_GPU, OF_LISTS_OF_VERSION_2, OF_A_SPLIT_GPU, OF_LINKS, [HANDLE])
    assert there == {function for table in tables for function in table}


@pytest.mark.parametrize("function", [*OF_AN_OLD_GPU, *OF_LISTS_OF_VERSION_2, *OF_A_SPLIT_GPU])
def test_a_call_of_other_drivers_that_hangs_on_one_gpu(tmp_path: Path, function: str) -> None:
    third = [f"-DnvmlDeviceGet{kind}RunningProcesses_v3=hidden_{kind}" for kind in ("Compute", "Graphics", "MPSCompute")]
    with FakeGpus(tmp_path, count=2, old=function in OF_AN_OLD_GPU, flags=third if function in OF_LISTS_OF_VERSION_2 else []) as gpus:
        gpus.say("set 0 mig 1" if function in OF_A_SPLIT_GPU else "", "set 1 mig 1" if function in OF_A_SPLIT_GPU else "")
        whole = look(gpus)
        gpus.say(f"hang {function} 1 60")
        document = look(gpus)
    name = {**OF_AN_OLD_GPU, **OF_LISTS_OF_VERSION_2, **OF_A_SPLIT_GPU}[function]
    assert told(document)[f"gpu.1.{name}"] == f"{function} did not answer within 0.5 s"
    assert value_of(document["gpus"][1], name) is None
    assert document["gpus"][0] == whole["gpus"][0]
    assert document["gpus"][1]["uuid"] == "GPU-fake-1"


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetPersistenceMode"]
)
@pytest.mark.parametrize("deadline_s", [0.4, 1.0])
def test_a_short_deadline_is_kept_and_the_call_named(gpus: FakeGpus, function: str, deadline_s: float) -> None:
    """A call that may take a second must not use up what others need: it is given less."""
    gpus.say(f"hang {function} 1 30")
    document = run_probe(roots=gpus.roots, deadline_s=deadline_s, parts=["gpus", "processes"])
    assert document["seconds"] < deadline_s + 0.5
    assert re.fullmatch(rf"{function} did not answer within 0\.\d+ s", told(document)[f"gpu.1.{OF_A_GPU[function]}"])
    for index in (0, 2):
        assert document["gpus"][index]["memory"]["used"] == [0]
        assert document["gpus"][index]["processes"] == []
    assert document["processes"] == []


def test_one_gpu_that_hangs_leaves_the_others_all_their_samples(gpus: FakeGpus) -> None:
    pid = gpus.holder([2], 9)
    gpus.say("hang nvmlDeviceGetMemoryInfo_v2 1 60")
    document = look(gpus, samples=4, interval_s=0.02)
    assert [gpu["memory"] and gpu["memory"]["used"] for gpu in document["gpus"]] == [[0] * 4, None, [9 * MIB] * 4]
    assert document["gpus"][2]["processes"][0]["pid"] == pid
    assert document["seconds"] < 2 * CALL_S  # it is not tried again for each sample


def test_a_pause_between_samples_is_no_stall(gpus: FakeGpus) -> None:
    document = run_probe(roots=gpus.roots, call_s=0.3, samples=2, interval_s=0.8, parts=["gpus"])
    assert [gpu["memory"]["used"] for gpu in document["gpus"]] == [[0, 0]] * 3
    assert not [what for what in told(document) if what.startswith(("gpu", "nvml"))]


def test_a_driver_that_does_not_start_again_after_it_hung(gpus: FakeGpus) -> None:
    """What was seen before is kept: eight GPUs do not become none."""
    gpus.say("hang nvmlDeviceGetUUID 1 60")
    with subprocess.Popen(["sh", "-c", f"sleep 0.25; echo 'hang nvmlInit_v2 -1 60' >> {gpus.library}.txt"]) as _:
        document = look(gpus)
    assert [gpu["memory"] and gpu["memory"]["used"] for gpu in document["gpus"]] == [[0], [0], None]
    assert [gpu["uuid"] for gpu in document["gpus"]] == ["GPU-fake-0", None, None]
    assert told(document)["gpu.1.uuid"] == "nvmlDeviceGetUUID did not answer within 0.5 s"
    assert told(document)["nvml"] == told(document)["gpu.2.memory"] == "nvmlInit_v2 did not answer within 0.5 s"


@pytest.mark.parametrize("function", ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetName", "nvmlDeviceGetPersistenceMode"])
def test_a_call_that_hangs_on_every_gpu(gpus: FakeGpus, function: str) -> None:
    whole = look(gpus)
    gpus.say(f"hang {function} -1 60")
    document = look(gpus)
    name = OF_A_GPU[function]
    why = told(document)
    for index in range(3):
        assert why[f"gpu.{index}.{name}"] == f"{function} did not answer within 0.5 s"
        assert document["gpus"][index] == {**whole["gpus"][index], name: None}


def test_a_gpu_on_which_everything_hangs(gpus: FakeGpus) -> None:
    pid = gpus.holder([2], 5)
    gpus.say(*(f"hang {function} 1 60" for function in OF_A_GPU), "hang nvmlDeviceGetP2PStatus 1 60")
    document = look(gpus)
    why = told(document)
    assert why["gpu.1.memory"] == "nvmlDeviceGetMemoryInfo_v2 did not answer within 0.5 s"
    assert why["gpu.1.uuid"] == "it was given up after nvmlDeviceGetMigMode did not answer either"
    assert why["links.1.0.read"] == "nvmlDeviceGetP2PStatus did not answer within 0.5 s"
    assert {name for name, value in document["gpus"][1].items() if value is not None} == {"index"}
    assert document["gpus"][0]["memory"]["used"] == [0]
    assert document["gpus"][2]["processes"] == [{"pid": pid, "kind": "compute", "bytes": 5 * MIB}]
    assert [link["read"] for link in document["links"] if 1 not in (link["from"], link["to"])] == ["ok", "ok"]


def test_three_dead_gpus_of_eight_do_not_keep_the_others_waiting(tmp_path: Path) -> None:
    with FakeGpus(tmp_path) as eight:
        pid = eight.holder([7], 5)
        eight.say(*(f"hang {function} {index} 60" for function in [*OF_A_GPU, *OF_LINKS] for index in (0, 1, 6)))
        document = look(eight, samples=3, interval_s=0.02)
    assert [gpu["memory"] and gpu["memory"]["used"] for gpu in document["gpus"]] == [None, None, *[[0] * 3] * 4, None, [5 * MIB] * 3]
    assert [gpu["processes"] for gpu in document["gpus"]][2:6] == [[]] * 4
    assert document["gpus"][7]["processes"] == [{"pid": pid, "kind": "compute", "bytes": 5 * MIB}]
    assert [gpu["persistence"] for gpu in document["gpus"]] == [None, None, *[True] * 4, None, True]


def test_a_gpu_whose_handle_hangs(gpus: FakeGpus) -> None:
    gpus.say(f"hang {HANDLE} 0 60")
    document = look(gpus)
    assert told(document)["gpu.0.memory"] == told(document)["gpu.0"] == f"{HANDLE} did not answer within 0.5 s"
    assert [gpu["memory"] is None for gpu in document["gpus"]] == [True, False, False]


@pytest.mark.parametrize("function", INIT)
def test_a_driver_that_does_not_start(gpus: FakeGpus, function: str) -> None:
    gpus.say(f"hang {function} -1 60")
    pid = gpus.holder([0], 5)
    document = look(gpus)
    assert next(why for what, why in told(document).items() if what.startswith("nvml")) == f"{function} did not answer within 0.5 s"
    assert document["gpus"] == []
    assert pid in [process["pid"] for process in document["processes"]]  # it has the devices open
    assert document["host_memory"] is not None


@pytest.mark.parametrize("function", SYSTEM)
def test_a_version_that_does_not_come(gpus: FakeGpus, function: str) -> None:
    gpus.say(f"hang {function} -1 60")
    document = look(gpus)
    assert told(document)[SYSTEM[function]] == f"{function} did not answer within 0.5 s"
    assert [gpu["memory"]["used"] for gpu in document["gpus"]] == [[0], [0], [0]]


@pytest.mark.parametrize("function", OF_LINKS)
def test_links_that_hang(tmp_path: Path, function: str) -> None:
    with FakeGpus(tmp_path) as gpus:
        gpus.say(f"hang {function} -1 60")
        document = look(gpus)
    asked = OF_LINKS[function]
    other = "ancestor" if asked == "read" else "read"
    assert told(document)[f"links.0.1.{asked}"] == f"{function} did not answer within 0.5 s"
    assert {link[asked] for link in document["links"]} == {None}
    assert {link[other] for link in document["links"]} == ({"ok"} if other == "read" else {"hostbridge", "system"})
    assert [gpu["memory"]["used"] for gpu in document["gpus"]] == [[0]] * 8


def test_a_driver_that_crashes(gpus: FakeGpus) -> None:
    gpus.say("crash nvmlDeviceGetRemappedRows 1 0")
    document = look(gpus)
    assert told(document)["gpu.1.health.remap_pending"] == "nvmlDeviceGetRemappedRows ended the look with SIGABRT"
    assert document["gpus"][1]["health"]["ecc_uncorrected"] == 0
    assert document["gpus"][1]["memory"]["used"] == [0]
    assert document["gpus"][2]["health"]["remap_pending"] is False


@pytest.mark.parametrize(("function", "what"), [("nvmlInit_v2", "nvml"), (HANDLE, "gpu.0"), ("nvmlDeviceGetMemoryInfo_v2", "gpu.0.memory")])
def test_a_driver_that_crashes_early(gpus: FakeGpus, function: str, what: str) -> None:
    gpus.say(f"crash {function} {-1 if what == 'nvml' else 0} 0")
    pid = gpus.holder([2], 5)
    document = look(gpus)
    assert told(document)[what] == f"{function} ended the look with SIGABRT"
    assert [gpu["memory"] and gpu["memory"]["used"] for gpu in document["gpus"]] == ([] if what == "nvml" else [None, [0], [5 * MIB]])
    assert [process["pid"] for process in document["processes"] if process["device_fds"]] == [pid]


@pytest.mark.parametrize(("code", "name"), [(4, "NO_PERMISSION"), (15, "GPU_IS_LOST"), (16, "RESET_REQUIRED"), (777, "777")])
def test_calls_that_fail_say_how(gpus: FakeGpus, code: int, name: str) -> None:
    gpus.say(*(f"fail {function} 1 {code}" for function in OF_A_GPU))
    document = look(gpus)
    for function, what in OF_A_GPU.items():
        if not any(word in function for word in ("Graphics", "MPS", "LinkGeneration", "MaxPcie")):  # the first of several is named
            assert told(document)[f"gpu.1.{what}"] == f"{function} returned {name}"
    assert {key for key, value in document["gpus"][1].items() if value is not None} == {"index"}
    assert document["gpus"][2]["health"]["temperature_c"] == 31


def test_a_list_that_fails_is_not_an_empty_list(gpus: FakeGpus) -> None:
    gpus.say("fail nvmlDeviceGetMPSComputeRunningProcesses_v3 0 999", "fail nvmlDeviceGetGraphicsRunningProcesses_v3 1 3")
    document = look(gpus)
    assert document["gpus"][0]["processes"] == []
    assert told(document)["gpu.0.processes.mps"] == "nvmlDeviceGetMPSComputeRunningProcesses_v3 returned UNKNOWN"
    assert not [what for what in told(document) if what.startswith("gpu.1")]  # a GPU that cannot draw has nobody drawing


def test_a_call_that_starts_to_hang_between_samples(gpus: FakeGpus) -> None:
    """The list of processes stays the first one; `unseen` says that it is not the latest."""
    pid = gpus.holder([1], 7)
    with subprocess.Popen(["sh", "-c", f"sleep 0.6; echo 'hang nvmlDeviceGetMemoryInfo_v2 1 60' >> {gpus.library}.txt"]) as _:
        document = look(gpus, samples=20, interval_s=0.1)
    used = document["gpus"][1]["memory"]["used"]
    assert used
    assert set(used) == {7 * MIB}
    assert document["gpus"][1]["processes"][0]["pid"] == pid


def test_a_driver_that_writes_to_stdout(tmp_path: Path) -> None:
    with FakeGpus(tmp_path, count=1, flags=["-DLOUD"]) as gpus:
        assert look(gpus)["gpus"][0]["memory"]["used"] == [0]  # run_probe has checked what was printed


@pytest.mark.parametrize("deadline_s", [0, 0.05])
def test_no_time_at_all(gpus: FakeGpus, deadline_s: float) -> None:
    gpus.say("hang nvmlInit_v2 -1 60")
    document = run_probe(roots=gpus.roots, deadline_s=deadline_s)
    assert document["seconds"] < deadline_s + 0.5
    assert snapshot.parse(json.dumps(document)).gpus == ()
    assert {"nvml", "nvml.count", "links"} <= set(told(document)) | ({"nvml"} if deadline_s == 0 else set())
    if deadline_s == 0:
        assert document["processes"] is None
        assert told(document)["processes"] == "it was not reached within 0 s"


def test_a_child_that_is_stuck_is_not_waited_for(gpus: FakeGpus) -> None:
    """Nothing of the probe is left that keeps the asker's pipes open, or runs on."""
    gpus.say("hang nvmlDeviceGetName -1 60")
    look(gpus)
    leftovers = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(gpus.library) in (folder / "maps").read_text():
                leftovers.append(folder.name)
    assert leftovers == []


# Disks and processes


@contextlib.contextmanager
def dead_mount(folder: Path) -> Iterator[None]:
    """A file system whose server never answers, as NFS after its server died."""
    libc = ctypes.CDLL(None, use_errno=True)
    fuse = os.open("/dev/fuse", os.O_RDWR)
    try:
        options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
        if libc.mount(b"dead", os.fsencode(folder), b"fuse", 0, options):
            raise OSError(ctypes.get_errno(), "mount")
        try:
            yield
        finally:
            libc.umount2(os.fsencode(folder), 2)
    finally:
        os.close(fuse)


def _may_mount() -> bool:
    return os.getuid() == 0 and os.access("/dev/fuse", os.W_OK)


@pytest.mark.skipif(not _may_mount(), reason="needs root and FUSE")
def test_a_dead_mount(gpus: FakeGpus, tmp_path: Path) -> None:
    dead = tmp_path / "dead"
    dead.mkdir()
    with dead_mount(dead):
        document = look(gpus, paths=["/", str(dead), str(tmp_path), str(dead / "below")])
    assert [disk["path"] for disk in document["disks"]] == ["/", str(tmp_path)]
    assert told(document)[f"disk.{dead}"] == f"statvfs of {dead} did not answer within 0.5 s"
    assert told(document)[f"disk.{dead}/below"] == f"statvfs of {dead}/below did not answer within 0.5 s"
    assert [gpu["memory"]["used"] for gpu in document["gpus"]] == [[0], [0], [0]]


def fixture_process(proc: Path, pid: int, name: str = "python3", **files: str) -> Path:
    """/proc/PID as the kernel writes it, of a child of init with nvidia0 open."""
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "ns").mkdir()
    (folder / "ns" / "pid").symlink_to("pid:[4026531836]")
    numbers = f"1 {pid} {pid} 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 4242 1000 50"
    (folder / "stat").write_text(f"{pid} ({name}) S {numbers} 0 0\n")
    (folder / "status").write_text("Name:\tx\nUid:\t0\t0\t0\t0\n")
    for file, text in {"cgroup": "0::/\n", "cmdline": "python3\0serve.py\0", "environ": "", "maps": "", **files}.items():
        (folder / file).write_text(text)
    return folder


@pytest.mark.parametrize("file", ["cmdline", "stat", "status", "cgroup"])
def test_a_process_whose_files_hang(gpus: FakeGpus, tmp_path: Path, file: str) -> None:
    """A pipe that nobody writes to stands for a file of /proc whose process holds its own locks."""
    proc = tmp_path / "proc"
    for pid in (10, 11, 12):
        folder = fixture_process(proc, pid)
        (folder / "fd" / "5").symlink_to(gpus.dev / "nvidia0")
    (proc / "11" / file).unlink()
    os.mkfifo(proc / "11" / file)
    document = look(gpus, roots={"proc": str(proc)})
    processes = {process["pid"]: process for process in document["processes"]}
    assert processes[10]["command"] == processes[12]["command"] == "python3 serve.py"
    if file == "cmdline":
        assert told(document)["process.11.command"] == f"{proc}/11/cmdline did not answer within 0.5 s"
        assert processes[11]["device_fds"] == ["nvidia0"]
        assert processes[11]["command"] == ""
    else:
        assert re.fullmatch(rf"{proc}/11 did not answer within 0\.\d+ s", told(document)["process.11"])
        assert 11 not in processes


def test_processes_that_were_not_reached_are_not_taken_for_gone(gpus: FakeGpus, tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    for pid in range(10, 30):
        folder = fixture_process(proc, pid)
        (folder / "fd" / "5").symlink_to(gpus.dev / "nvidia0")
        if pid < 29:
            (folder / "status").unlink()
            os.mkfifo(folder / "status")
    document = look(gpus, roots={"proc": str(proc)})
    assert document["processes"] == []  # 29 is fine, but comes too late
    assert told(document)["process.10"].startswith(f"{proc}/10 did not answer within ")
    assert told(document)["processes"] == "it was not reached within 3 s"


def test_a_process_that_hangs_late_does_not_take_the_others_along(gpus: FakeGpus, tmp_path: Path) -> None:
    """The driver has used up its share of the time: what is left is divided anew."""
    proc = tmp_path / "proc"
    for pid in (10, 11, 12):
        folder = fixture_process(proc, pid)
        (folder / "fd" / "5").symlink_to(gpus.dev / "nvidia0")
    (proc / "11" / "status").unlink()
    os.mkfifo(proc / "11" / "status")
    gpus.say(*(f"hang {function} -1 60" for function in OF_A_GPU))
    document = run_probe(roots={**gpus.roots, "proc": str(proc)}, deadline_s=2, call_s=2)
    assert [process["pid"] for process in document["processes"]] == [10, 12]
    assert told(document)["process.11"].startswith(f"{proc}/11 did not answer within ")
    assert "processes" not in told(document)


@pytest.mark.parametrize("function", ["nvmlInit_v2", "nvmlDeviceGetMemoryInfo_v2"])
def test_everything_hangs_at_once(gpus: FakeGpus, tmp_path: Path, function: str) -> None:
    proc = tmp_path / "proc"
    for pid in range(10, 30):
        folder = fixture_process(proc, pid)
        for file in ("stat", "status", "cgroup", "cmdline", "maps", "environ"):
            (folder / file).unlink()
            os.mkfifo(folder / file)
    for file in ("meminfo", "mounts"):
        os.mkfifo(proc / file)
    gpus.say(f"hang {function} -1 60")
    document = look(gpus, roots={"proc": str(proc)}, paths=["/"])
    why = told(document)
    assert why["host_memory"] == f"{proc}/meminfo did not answer within 0.5 s"
    assert document["disks"][0]["path"] == "/"
    assert document["processes"] is None
    assert {"processes", "nvml" if function == "nvmlInit_v2" else "gpu.0.memory"} <= set(why)


def test_a_fault_of_the_probe_itself_still_gives_a_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(probe, "look", broken)
    assert probe.main([]) == 0
    begin, line, end = capsys.readouterr().out.splitlines()
    assert (begin, end) == (probe.BEGIN, probe.END)
    seen = snapshot.parse(line)
    assert seen.why_unseen("probe") == "the probe failed: ZeroDivisionError of ours"
    assert seen.why_unseen("nvml") is not None
    assert seen.processes is None


def test_engines_whose_environment_hangs(gpus: FakeGpus, tmp_path: Path) -> None:
    proc, records = tmp_path / "proc", tmp_path / "records"
    records.mkdir()
    (records / "a.json").write_text('{"token": "abc", "boot_id": "boot", "what": "vLLM", "run": "/runs/one"}')
    for pid in (10, 11, 12):
        fixture_process(proc, pid, environ="A=1\0DRAFTPROOF_ENGINE=abc\0")
    (proc / "sys" / "kernel" / "random").mkdir(parents=True)
    (proc / "sys" / "kernel" / "random" / "boot_id").write_text("boot\n")
    (proc / "11" / "environ").unlink()
    os.mkfifo(proc / "11" / "environ")
    document = look(gpus, roots={"proc": str(proc), "records": str(records)})
    assert [(process["pid"], process["engine"]) for process in document["processes"]] == [
        (10, {"what": "vLLM", "run": "/runs/one"}),
        (12, {"what": "vLLM", "run": "/runs/one"}),
    ]
    assert told(document)["process.11.engine"] == f"{proc}/11/environ did not answer within 0.5 s"
