"""The probe that ships, run as it is run, before a fake NVML: each value against what the fake was told."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftproof.machine import snapshot
from fake_gpus import MIB, PROBE, PYTHON, FakeGpus, run_probe

TOTAL, RESERVED = 102_641_958_912, 644_874_240
"""97,887 and 615 MiB in bytes."""


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[FakeGpus]:
    with FakeGpus(tmp_path, count=2) as fake:
        yield fake


@contextlib.contextmanager
def sleepers(count: int) -> Iterator[None]:
    """So many processes that do nothing."""
    code = f"import os, time\nfor _ in range({count - 1}):\n if not os.fork(): break\nelse: print('ready', flush=True)\ntime.sleep(300)"
    with subprocess.Popen([PYTHON, "-IS", "-c", code], stdout=subprocess.PIPE, start_new_session=True) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == b"ready\n"
            yield
        finally:
            os.killpg(first.pid, signal.SIGKILL)


def why(document: dict[str, Any], what: str) -> str:
    """The one reason for this name."""
    (told,) = [entry["why"] for entry in document["unseen"] if entry["what"] == what]
    return str(told)


def unexplained(document: dict[str, Any]) -> list[str]:
    """Names of nulls that have no reason, where the contract asks for one."""
    nulls = [
        name for name in ("links", "xid", "processes", "host_memory", "shm", "limits", "clock", "iommu", "torch") if document[name] is None
    ]
    for gpu in document["gpus"]:
        nulls += [f"gpu.{gpu['index']}.{name}" for name, value in gpu.items() if value is None]
        nulls += [f"gpu.{gpu['index']}.health.{name}" for name, value in (gpu["health"] or {}).items() if value is None]
    for link in document["links"] or ():
        nulls += [f"links.{link['from']}.{link['to']}.{name}" for name in ("read", "write") if link[name] is None]
    told = [entry["what"] for entry in document["unseen"]]
    return [name for name in nulls if not any(what.startswith(name) for what in told)]


def test_an_idle_gpu_is_seen_as_it_is(gpus: FakeGpus) -> None:
    document = run_probe(roots=gpus.roots, samples=2, interval_s=0.01)
    assert document["nvml"] == {"present": True, "why": None, "driver": "580.65.06", "cuda": "13.0"}
    assert document["gpus"] == [
        {
            "index": index,
            "uuid": f"GPU-fake-{index}",
            "name": "NVIDIA RTX PRO 6000",
            "minor": index,
            "bus_id": ("0000:18:00.0", "0000:19:00.0")[index],
            "numa_node": 0,
            "compute_capability": [12, 0],
            "memory": {"version": 2, "total": TOTAL, "reserved": RESERVED, "used": [0, 0], "free": 101_997_084_672},
            "processes": [],
            "mig": {"enabled": False, "instances": 0},
            "health": {
                "ecc_uncorrected": 0,
                "remap_pending": False,
                "remap_failed": False,
                "recovery_action": "none",
                "slowdown": [],
                "temperature_c": 31,
            },
            "pcie": {"width": 16, "max_width": 16, "generation": 1, "max_generation": 5},
            "compute_mode": "default",
            "persistence": True,
        }
        for index in (0, 1)
    ]
    assert document["links"] == [
        {"from": 0, "to": 1, "read": "ok", "write": "ok", "ancestor": "hostbridge"},
        {"from": 1, "to": 0, "read": "ok", "write": "ok", "ancestor": "hostbridge"},
    ]
    assert document["processes"] == []
    assert not unexplained(document)


def test_what_is_wrong_with_a_gpu_is_seen(gpus: FakeGpus) -> None:
    gpus.say("set 0 ecc 3", "set 0 pending 1", "set 0 reasons 205", "set 0 width 8", "set 0 mode 3")  # 205 = 0x80 + 0x40 + 0x8 + 0x4 + 0x1
    gpus.say(
        "set 1 failed 1", "set 1 recovery 4", "set 1 reasons 68", "set 1 mode 2", "p2p 0 1 1", "p2p 1 0 4", "cuda 12040", "driver 999.1"
    )
    document = run_probe(roots=gpus.roots)
    first, second = document["gpus"]
    assert first["health"] == {
        "ecc_uncorrected": 3,
        "remap_pending": True,
        "remap_failed": False,
        "recovery_action": "none",
        "slowdown": ["hw_slowdown", "hw_thermal", "hw_power_brake"],
        "temperature_c": 31,
    }
    assert second["health"]["remap_failed"] is True
    assert second["health"]["recovery_action"] == "drain_and_reset"
    assert second["health"]["slowdown"] == ["hw_thermal"]  # 68 = 0x40 + 0x4, a power cap
    assert (first["pcie"]["width"], first["pcie"]["max_width"]) == (8, 16)
    assert (first["compute_mode"], second["compute_mode"]) == ("exclusive_process", "prohibited")
    assert [(link["from"], link["read"]) for link in document["links"]] == [(0, "chipset_not_supported"), (1, "disabled_by_regkey")]
    assert (document["nvml"]["driver"], document["nvml"]["cuda"]) == ("999.1", "12.4")


@pytest.mark.parametrize(
    ("number", "action"), [(1, "reset"), (2, "reboot"), (3, "drain_p2p"), (6, "reset"), (7, "reboot"), (5, None), (99, None)]
)
def test_recovery_actions(gpus: FakeGpus, number: int, action: str | None) -> None:
    gpus.say(f"set 0 recovery {number}")
    document = run_probe(roots=gpus.roots, gpus=[0], parts=["gpus"])
    assert document["gpus"][0]["health"]["recovery_action"] == action
    if action is None:  # unknown is not none
        assert str(number) in why(document, "gpu.0.health.recovery_action")


def test_eight_gpus_on_two_nodes(tmp_path: Path) -> None:
    with FakeGpus(tmp_path) as gpus:
        document = run_probe(roots=gpus.roots)
    assert [gpu["numa_node"] for gpu in document["gpus"]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert len(document["links"]) == 56
    assert {(link["from"], link["to"]) for link in document["links"] if link["ancestor"] == "system"} == {
        (a, b) for a in range(8) for b in range(8) if (a < 4) != (b < 4)
    }


def test_memory_is_that_of_living_processes(gpus: FakeGpus) -> None:
    pid = gpus.holder([1], 71_604)
    other = gpus.holder([0, 1], 100, kind="graphics")
    gpus.say("unowned 1 1000000")
    _, gpu = run_probe(roots=gpus.roots)["gpus"]
    assert gpu["memory"]["used"] == [71_604 * MIB + 100 * MIB + 1_000_000]
    assert gpu["memory"]["free"] == TOTAL - RESERVED - 71_704 * MIB - 1_000_000
    assert gpu["processes"] == [
        {"pid": pid, "kind": "compute", "bytes": 71_604 * MIB},
        {"pid": other, "kind": "graphics", "bytes": 100 * MIB},
    ]
    os.kill(pid, 9)
    os.kill(other, 9)
    _, gpu = run_probe(roots=gpus.roots)["gpus"]
    assert (gpu["memory"]["used"], gpu["processes"]) == ([1_000_000], [])


def test_samples_show_memory_that_changes_and_the_list_is_of_the_last(tmp_path: Path) -> None:
    with FakeGpus(tmp_path, count=1) as gpus:
        pid = gpus.holder([0], 500)
        request = json.dumps({"roots": gpus.roots, "samples": 4, "interval_s": 0.4})
        code = f"import json, sys; sys.path.insert(0, {str(Path(__file__).parents[1] / 'helpers')!r})\nfrom fake_gpus import run_probe\n"
        code += f"print(json.dumps(run_probe(**json.loads({request!r}))))"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as looking:
            time.sleep(0.9)
            os.kill(pid, 9)
            assert looking.stdout is not None
            document = json.loads(looking.stdout.read())
    used = document["gpus"][0]["memory"]["used"]
    assert len(used) == 4
    assert used[0] == 500 * MIB
    assert used[-1] == 0
    assert document["gpus"][0]["processes"] == []


@pytest.mark.parametrize("samples", [1, 2])
def test_memory_is_read_before_the_list(gpus: FakeGpus, samples: int) -> None:
    """So that what a caller takes between the two can make its own share look too large, and never somebody else's."""
    pid = gpus.holder([0], 500)
    gpus.say("hang nvmlDeviceGetComputeRunningProcesses_v3 0 1")  # a second, which is no stall here
    begun = time.monotonic()
    with subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {pid}"]) as _:
        (gpu,) = run_probe(roots=gpus.roots, parts=["gpus"], gpus=[0], call_s=3, deadline_s=10, samples=samples, interval_s=0)["gpus"]
    assert time.monotonic() - begun > samples
    assert gpu["memory"]["used"] == [500 * MIB, 0][:samples]
    assert gpu["processes"] == []


def test_an_old_driver_has_version_1_of_everything(tmp_path: Path) -> None:
    with FakeGpus(tmp_path, count=1, old=True) as gpus:
        pid = gpus.holder([0], 1_000)
        gpus.say("set 0 reasons 8")
        document = run_probe(roots=gpus.roots)
        (gpu,) = document["gpus"]
        assert gpu["memory"] == {
            "version": 1,
            "total": TOTAL,
            "reserved": None,
            "used": [1_000 * MIB + RESERVED],  # the driver's own share counts
            "free": TOTAL - RESERVED - 1_000 * MIB,
        }
        assert gpu["processes"] == [{"pid": pid, "kind": "compute", "bytes": 1_000 * MIB}]
        assert gpu["health"]["slowdown"] == ["hw_slowdown"]
        assert "version 1" in why(document, "gpu.0.memory.reserved")
        assert "nvmlDeviceGetMPSComputeRunningProcesses is missing" in why(document, "gpu.0.processes.mps")
    assert not unexplained(document)


@pytest.mark.parametrize(
    "flags",
    [
        ["-DWIDE"],
        [f"-DnvmlDeviceGet{kind}RunningProcesses_v3=hidden_{kind}" for kind in ("Compute", "Graphics", "MPSCompute")],
        [],
    ],
    ids=["lines of drivers 535.43 to 535.86", "lists of version 2", "lists of version 3"],
)
def test_process_lists_of_each_driver(tmp_path: Path, flags: list[str]) -> None:
    with FakeGpus(tmp_path, count=1, flags=flags) as gpus:
        pids = [gpus.holder([0], size, kind=kind) for size, kind in ((11, "compute"), (22, "compute"), (33, "compute"), (44, "mps"))]
        document = run_probe(roots=gpus.roots)
    assert [(line["pid"], line["kind"], line["bytes"]) for line in document["gpus"][0]["processes"]] == [
        (pids[0], "compute", 11 * MIB),
        (pids[1], "compute", 22 * MIB),
        (pids[2], "compute", 33 * MIB),
        (pids[3], "mps", 44 * MIB),
    ]


def test_more_processes_than_there_was_room_for(gpus: FakeGpus) -> None:
    me = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    gpus.say(*(f"hold 0 {100_000 + number} 4096 compute {os.getpid()}:{me}" for number in range(300)))
    document = run_probe(roots=gpus.roots)
    assert [line["pid"] for line in document["gpus"][0]["processes"]] == list(range(100_000, 100_300))


def test_bytes_that_the_driver_does_not_say(gpus: FakeGpus) -> None:
    me = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    gpus.say(f"hold 0 {os.getpid()} {2**64 - 1} compute {os.getpid()}:{me}")
    document = run_probe(roots=gpus.roots)
    assert document["gpus"][0]["processes"] == [{"pid": os.getpid(), "kind": "compute", "bytes": None}]
    assert str(os.getpid()) in why(document, "gpu.0.processes.bytes")


@pytest.mark.parametrize("private", [0, 1], ids=["as root", "without leave to list the whole GPU"])
def test_processes_of_mig_instances_count_once(gpus: FakeGpus, private: int) -> None:
    gpus.say("set 0 mig 2", f"set 0 private {private}")
    pid, other = gpus.holder([0], 300, kind="compute/0"), gpus.holder([0], 20, kind="compute/1")
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    gpus.say(f"hold 0 {pid} {4 * MIB} compute/1 {pid}:{ticks}")  # it has something in both
    document = run_probe(roots=gpus.roots)
    gpu = document["gpus"][0]
    assert gpu["mig"] == {"enabled": True, "instances": 2}
    assert gpu["processes"] == [{"pid": pid, "kind": "compute", "bytes": 304 * MIB}, {"pid": other, "kind": "compute", "bytes": 20 * MIB}]


def test_only_the_gpus_that_were_asked_for(tmp_path: Path) -> None:
    with FakeGpus(tmp_path, count=4) as gpus:
        gpus.say("fail nvmlDeviceGetHandleByIndex_v2 0 15")
        document = run_probe(roots=gpus.roots, gpus=[3, 1, 9])
    assert [gpu["index"] for gpu in document["gpus"]] == [1, 3]
    assert [(link["from"], link["to"]) for link in document["links"]] == [(1, 3), (3, 1)]
    assert why(document, "gpu.9") == "NVML counts 4 GPUs here"
    assert not [entry for entry in document["unseen"] if entry["what"].startswith("gpu.0")]


def test_a_machine_without_gpus_lacks_nothing(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    document = run_probe(roots={"nvml": str(tmp_path / "none.so"), "dev": str(tmp_path / "dev")})
    assert document["nvml"]["present"] is False
    assert (document["gpus"], document["links"]) == ([], [])
    assert not [entry for entry in document["unseen"] if entry["what"].startswith(("nvml", "gpu", "links"))]


def test_devices_without_the_library_are_unseen_gpus(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    document = run_probe(roots={"nvml": str(tmp_path / "none.so"), "dev": str(tmp_path / "dev")})
    assert (document["nvml"]["present"], document["gpus"]) == (False, [])
    assert f"{tmp_path}/dev/nvidia0 is there" in why(document, "nvml")


def test_a_library_without_its_driver(gpus: FakeGpus) -> None:
    gpus.say("fail nvmlInit_v2 -1 18")
    document = run_probe(roots=gpus.roots)
    assert why(document, "nvml") == document["nvml"]["why"] == "nvmlInit_v2 returned LIB_RM_VERSION_MISMATCH"
    assert document["gpus"] == []


def test_parts_that_are_not_asked_for(gpus: FakeGpus) -> None:
    document = run_probe(roots=gpus.roots, parts=["gpus"])
    assert len(document["gpus"]) == 2
    for name in ("links", "processes", "host_memory", "shm", "limits", "clock", "iommu", "torch", "xid"):
        assert document[name] is None
        assert why(document, name) == "it was not asked for"
    assert len(document["boot_id"]) == 36


def test_who_looks_and_from_where() -> None:
    document = run_probe(parts=[])
    viewer = document["viewer"]
    assert viewer["uid"] == os.getuid()
    assert viewer["ancestors"][0] == os.getpid()
    assert viewer["ancestors"][1] == os.getppid()
    assert viewer["ancestors"][-1] == 1 or os.getpid() == 1
    assert document["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert f"pid:[{document['pid_namespace']}]" == os.readlink("/proc/self/ns/pid")
    assert viewer["initial_namespace"] is (document["pid_namespace"] == 4_026_531_836)
    assert document["host"] == socket.gethostname()
    assert abs(document["time"] - time.time()) < 10
    assert abs(document["uptime_s"] - float(Path("/proc/uptime").read_text().split()[0])) < 10


def test_the_host(tmp_path: Path) -> None:
    asked = [str(tmp_path), str(tmp_path / "not" / "yet" / "there"), "/proc"]
    document = run_probe(parts=["host"], paths=asked)
    memory = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text().splitlines())
    assert document["host_memory"]["total"] == int(memory["MemTotal:"]) * 1024
    assert abs(document["host_memory"]["available"] - int(memory["MemAvailable:"]) * 1024) < 2**31
    at = os.statvfs(tmp_path)
    for disk, path in zip(document["disks"], asked, strict=True):
        assert disk["path"] == path
    assert [disk["existing"] for disk in document["disks"]] == [str(tmp_path), str(tmp_path), "/proc"]
    assert document["disks"][1]["total_bytes"] == at.f_blocks * at.f_frsize
    assert abs(document["disks"][1]["free_bytes"] - at.f_bavail * at.f_frsize) < 2**30
    assert abs(document["disks"][0]["free_inodes"] - at.f_favail) < 100_000
    assert document["disks"][2]["free_inodes"] is None  # /proc has no such limit
    assert document["disks"][0]["read_only"] is False
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert document["limits"]["nofile"] == [soft, hard]
    assert isinstance(document["clock"]["synchronised"], bool)


def test_a_control_group_limits_memory(tmp_path: Path) -> None:
    """Version 2, three levels. The least room is not at the lowest limit: 8 GiB with 6 in use, of which 0.25 can be dropped."""
    proc, group = tmp_path / "proc", tmp_path / "sys" / "fs" / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       16777216 kB\nMemAvailable:   8388608 kB\nSwapFree:       1024 kB\n")
    (proc / "self" / "cgroup").write_text("0::/user.slice/job\n")
    for folder, most, used, file in (
        ("user.slice", str(8 * 2**30), 6 * 2**30, 2**28),
        ("user.slice/job", "max", 2**30, 0),
        (".", str(7 * 2**30), 2**30, 0),
    ):
        (group / folder).mkdir(parents=True, exist_ok=True)
        (group / folder / "memory.max").write_text(f"{most}\n")
        (group / folder / "memory.current").write_text(f"{used}\n")
        (group / folder / "memory.stat").write_text(f"anon 1\ninactive_file {file}\n")
    document = run_probe(parts=["host"], roots={"proc": str(proc), "sys": str(tmp_path / "sys")})
    assert document["host_memory"] == {
        "total": 16 * 2**30,
        "available": 8 * 2**30,
        "swap_free": 2**20,
        "cgroup_limit": 8 * 2**30,
        "cgroup_used": 6 * 2**30 - 2**28,
    }


def test_a_control_group_of_version_1_limits_memory(tmp_path: Path) -> None:
    proc, group = tmp_path / "proc", tmp_path / "sys" / "fs" / "cgroup" / "memory" / "docker" / "job"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       16777216 kB\nMemAvailable:   8388608 kB\nSwapFree:       0 kB\n")
    (proc / "self" / "cgroup").write_text("4:cpu:/other\n3:hugetlb,memory:/docker/job\n1:name=systemd:/docker/job\n")
    group.mkdir(parents=True)
    for name, text in (("limit_in_bytes", f"{2**30}"), ("usage_in_bytes", f"{2**29}"), ("stat", "cache 5\ntotal_inactive_file 4096")):
        (group / f"memory.{name}").write_text(f"{text}\n")
    memory = run_probe(parts=["host"], roots={"proc": str(proc), "sys": str(tmp_path / "sys")})["host_memory"]
    assert (memory["cgroup_limit"], memory["cgroup_used"]) == (2**30, 2**29 - 4096)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_folder_that_is_mounted_read_only(tmp_path: Path) -> None:
    folder = tmp_path / "sealed"
    folder.mkdir()
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
exec unshare --mount sh -c 'mount -t tmpfs -o ro,size=4096k,nr_inodes=77 none {folder} && exec {PYTHON} "$@"' sh "$@"
""")
    python.chmod(0o755)
    sealed, above = run_probe(str(python), parts=[], paths=[str(folder / "below"), str(tmp_path)])["disks"]
    assert sealed == {
        "path": str(folder / "below"),
        "existing": str(folder),
        "free_bytes": 4096 * 1024,
        "total_bytes": 4096 * 1024,
        "free_inodes": 76,  # the root has one
        "read_only": True,
    }
    assert above["read_only"] is False


def test_half_characters_in_a_path_do_not_spoil_the_document() -> None:
    (disk,) = run_probe(parts=[], paths=["/\udcffx"])["disks"]
    assert (disk["path"], disk["existing"]) == ("/?x", "/")


def test_driver_errors_in_the_kernel_log(gpus: FakeGpus) -> None:
    log = """6,1,1000000,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.65.06
3,2,62500000,-,caller=T77;NVRM: Xid (PCI:0000:18:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
 SUBSYSTEM=pci
4,3,63000000,-;usb 1-1: Xid (PCI:0000:18:00): 13
3,4,70000000,-;NVRM: Xid (0000:AF:00): 31, Ch 00000008
"""
    (gpus.dev / "kmsg").write_text(log)
    first, second = run_probe(roots=gpus.roots, parts=["host"])["xid"]
    booted = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    assert (first["bus_id"], first["xid"]) == ("0000:18:00.0", 79)
    assert first["text"].endswith("GPU has fallen off the bus.")
    assert abs(first["time"] - booted - 62.5) < 1
    assert (second["bus_id"], second["xid"]) == ("0000:af:00.0", 31)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may read it")
def test_the_real_kernel_log_is_read_to_its_end() -> None:
    assert run_probe(parts=["host"])["xid"] is not None


def test_torch_is_read_not_imported(tmp_path: Path) -> None:
    site = tmp_path / "lib"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    (site / "torch" / "version.py").write_text(
        "from typing import Optional\n\n__version__ = '2.9.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n"
    )
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
exec {PYTHON} -I -c 'import sys; sys.path.insert(0, "{site}"); sys.argv[:] = sys.argv[2:]; exec(sys.stdin.read())' "$@"
""")
    python.chmod(0o755)
    document = run_probe(str(python), parts=["host"])
    assert document["torch"] == {"path": str(site / "torch"), "version": "2.9.0+cu130", "cuda": "13.0"}


@pytest.mark.parametrize("argument", ["%%%", "eJyrVkrLz1eyUkpKLFKqBQA4dgYG", "eJyLjgUAARUAuQ=="], ids=["no base64", "no zlib", "a list"])
def test_a_garbled_request_sees_nothing_and_says_so(argument: str) -> None:
    ran = subprocess.run([PYTHON, "-I", "-", argument], input=PROBE.read_bytes(), capture_output=True, check=True)
    document = json.loads(ran.stdout.split(b"\n")[1])
    assert why(document, "probe").startswith("the probe failed: ")
    assert (document["gpus"], document["processes"], document["host_memory"]) == ([], None, None)
    assert not unexplained(document)


@pytest.mark.parametrize(
    "wrong",
    [{"samples": 0}, {"deadline_s": "soon"}, {"ports": ["http"]}, {"gpus": 3}, {"call_s": -1}, {"roots": {"proc": 3}}, {"colour": 1}],
)
def test_whatever_is_asked_gets_a_document(wrong: dict[str, Any]) -> None:
    document = run_probe(**{"parts": ["gpus", "processes"], **wrong})
    assert snapshot.parse(json.dumps(document)).host == socket.gethostname()
    assert not unexplained(document)


def test_by_hand_without_a_request() -> None:
    ran = subprocess.run([PYTHON, "-I", "-"], input=PROBE.read_bytes(), capture_output=True, check=True)
    assert json.loads(ran.stdout.split(b"\n")[1])["schema"] == 1


def test_the_document_is_what_the_snapshot_reads(gpus: FakeGpus, tmp_path: Path) -> None:
    pid = gpus.holder([0], 10)
    gpus.say("fail nvmlDeviceGetUUID 1 15")
    document = run_probe(roots=gpus.roots, paths=[str(tmp_path)], ports=[1, 70_000])
    seen = snapshot.parse(json.dumps(document))
    assert seen.gpus[0].listed == {pid: 10 * MIB}
    assert seen.process(pid) is not None
    assert seen.why_unseen("gpu.1.uuid") == "nvmlDeviceGetUUID returned GPU_IS_LOST"
    assert "0-65535" in why(document, "port.70000")


def test_it_runs_on_python_3_9_with_the_standard_library_alone() -> None:
    tree = ast.parse(PROBE.read_text(), feature_version=(3, 9))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Match)]
    old = Path.home() / ".pyenv/versions"
    for python in sorted(old.glob("3.9.*/bin/python3")):
        assert run_probe(str(python), parts=["host"])["python"].startswith("3.9.")


@pytest.mark.slow
def test_fifty_looks_at_eight_busy_gpus_among_300_sleeping_processes(tmp_path: Path) -> None:
    with sleepers(300), FakeGpus(tmp_path) as gpus:
        for index in range(8):
            gpus.holder([index], 90_000)
        took, inside = [], []
        for _ in range(50):
            begun = time.monotonic()
            document = run_probe(roots=gpus.roots, samples=3, paths=[str(tmp_path)], ports=[8000])
            took.append(time.monotonic() - begun)
            inside.append(document["seconds"])
            assert not [entry for entry in document["unseen"] if entry["what"].startswith(("gpu", "nvml", "process"))]
            assert [len(gpu["processes"]) for gpu in document["gpus"]] == [1] * 8
    p95 = statistics.quantiles(took, n=20)[-1]
    median = statistics.median(took)
    print(f"8 GPUs, 300 sleepers, 3 samples: median {median:.3f} s, p95 {p95:.3f} s; inside {statistics.median(inside):.3f} s")
    assert p95 < 1.0
