"""Every check of a machine, on documents written by hand: passes when all is well, and says no for its own fault alone."""

# ruff: noqa: E501  (a table with a case a line reads best)

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from tests.helpers.snapshots import BOB, CUDA, MIB, NOW, documents, gpu, host, listed, memory_v1, process, seen

from draftproof.gate.finding import Finding, Status
from draftproof.gate.gate import check_name
from draftproof.gate.machine import MACHINE, judge
from draftproof.machine.look import DiskNeed, Look, Needs
from draftproof.machine.remote import Reach
from draftproof.machine.unreachable import Unreachable

NO_NVML = {"present": False, "why": "libnvidia-ml.so.1 was not found", "driver": None, "cuda": None}
LINK = {"from": 0, "to": 1, "read": "ok", "write": "ok", "ancestor": "node"}
DISK = {"path": "/data", "existing": "/data", "free_bytes": 50 * 10**9, "total_bytes": 10**12, "free_inodes": 10**6, "read_only": False}
CPU = Needs(gpus=())


def findings(document: dict[str, Any], needs: Needs | None = None, **changes: Any) -> dict[str, Finding]:
    """By check. The look took no time, and both clocks agree."""
    look = Look(Reach(), needs or Needs(), seen(document), between=(NOW - 0.1, NOW + 0.1))
    return {finding.check: finding for finding in judge(replace(look, **changes))}


def test_a_quiet_machine_passes_everything() -> None:
    found = findings(host(gpus=[gpu(0), gpu(1)], links=[LINK, {**LINK, "from": 1, "to": 0}]))
    assert {name: finding.status for name, finding in found.items()} == {check_name(check): "pass" for check in MACHINE}
    assert found["gpu.model"].evidence == "2 x NVIDIA H200, 143,771 MiB."
    assert found["gpu.memory"].evidence == "At most 0 MiB in use on each, steady; at least 143,156 MiB free."
    assert {finding.host for finding in found.values()} == {"this machine"}


def test_a_cpu_machine_passes_what_applies_and_says_so() -> None:
    found = findings(host(gpus=[], nvml=NO_NVML))
    assert {finding.status for finding in found.values()} == {"pass"}
    assert found["gpu.count"].evidence == "This machine has no NVIDIA GPU; what applies to a CPU was checked."
    assert found["host.memory"].evidence == "524,288 of 1,048,576 MiB available."


HELD = host(gpus=[gpu(0, 2574, [listed(4099, 2566)])], processes=[process(4121, fds=CUDA, session=4099, pgrp=4099)])

CASES: list[tuple[str, Status, str, dict[str, Any], Needs]] = [
    ("gpu.count", "fail", "There is no NVIDIA driver: libnvidia-ml.so.1 was not found.", host(gpus=[], nvml=NO_NVML), Needs(gpus=(0,))),
    ("gpu.count", "fail", "GPU 1, 2 is not there; there are 1.", host(), Needs(gpus=(0, 1, 2))),
    ("gpu.count", "fail", "The driver runs, but sees no GPU.", host(gpus=[]), Needs()),
    ("gpu.count", "fail", "GPU 0 is split by MIG.", host(gpus=[gpu(mig={"enabled": True, "instances": 2})]), Needs()),
    ("gpu.count", "fail", "GPU 0 is in compute mode prohibited.", host(gpus=[gpu(compute_mode="prohibited")]), Needs()),
    ("gpu.count", "fail", "There is no NVIDIA driver: libnvidia-ml.so.1 was not found.", host(gpus=[], nvml=NO_NVML), Needs(any_gpu=True)),
    ("gpu.count", "unknown", "/dev/nvidia0 is there, but the library cannot be loaded", host(gpus=[], nvml=NO_NVML, unseen=[{"what": "nvml", "why": "/dev/nvidia0 is there, but the library cannot be loaded"}]), Needs()),
    ("gpu.count", "unknown", "nvmlDeviceGetCount_v2 did not answer", host(gpus=[], unseen=[{"what": "nvml.count", "why": "nvmlDeviceGetCount_v2 did not answer"}]), Needs()),
    ("gpu.model", "fail", "The GPUs differ: A100, 143,771 MiB; NVIDIA H200, 143,771 MiB.", host(gpus=[gpu(), gpu(1, name="A100")]), Needs()),
    ("gpu.model", "unknown", "GPU 0 does not say what it is.", host(gpus=[gpu(name=None)]), Needs()),
    ("gpu.memory", "fail", "GPU 0: 2,574 MiB in use, 0 allowed.", HELD, Needs()),
    ("gpu.memory", "fail", "GPU 0: its memory moves, 0 to 40 MiB within the look.", host(gpus=[gpu(0, [0, 40, 0])]), Needs(allowance_mib=50)),
    ("gpu.memory", "fail", "GPU 0: 143,156 MiB free, at least 150,000 MiB needed.", host(), Needs(gpu_bytes=150_000 * MIB)),
    ("gpu.memory", "unknown", "GPU 0: 615 MiB in use, in which this old driver counts its own share.", host(gpus=[gpu(memory=memory_v1(615))]), Needs()),
    ("gpu.memory", "fail", "GPU 0: 1,700 MiB in use, 0 allowed.", host(gpus=[gpu(memory=memory_v1(1700))]), Needs()),
    ("gpu.memory", "unknown", "GPU 0: its memory could not be read: it did not answer.", host(gpus=[gpu(memory=None)], unseen=[{"what": "gpu.0.memory", "why": "it did not answer"}]), Needs()),
    ("gpu.holders", "fail", "GPU 0: pid 4121", HELD, Needs()),
    ("gpu.holders", "unknown", "GPU 0: its processes could not be read: not permitted.", host(gpus=[gpu(processes=None) | {"processes": None}], unseen=[{"what": "gpu.0.processes", "why": "not permitted"}]), Needs()),
    ("gpu.health", "fail", "GPU 0: 3 uncorrected memory errors since its reset.", host(gpus=[gpu(health={**gpu()["health"], "ecc_uncorrected": 3})]), Needs()),
    ("gpu.health", "fail", "GPU 0: a row remap waits for a reset.", host(gpus=[gpu(health={**gpu()["health"], "remap_pending": True})]), Needs()),
    ("gpu.health", "fail", "GPU 0: the driver asks for: drain_and_reset.", host(gpus=[gpu(health={**gpu()["health"], "recovery_action": "drain_and_reset"})]), Needs()),
    ("gpu.health", "fail", "GPU 0: its clocks are held down by the hardware (hw_thermal).", host(gpus=[gpu(health={**gpu()["health"], "slowdown": ["hw_thermal"]})]), Needs()),
    ("gpu.health", "warn", "1 Xid messages, the last 79 on 0000:18:00.0: GPU has fallen off the bus", host(xid=[{"time": NOW, "bus_id": "0000:18:00.0", "xid": 79, "text": "GPU has fallen off the bus"}]), Needs()),
    ("gpu.links", "warn", "GPU 0 has 8 of 16 PCIe lanes.", host(gpus=[gpu(pcie={"width": 8, "max_width": 16, "generation": 1, "max_generation": 5})]), Needs()),
    ("gpu.links", "warn", "1 of 1 directed pairs have no peer access (first: 0 to 1, chipset_not_supported).", host(gpus=[gpu(), gpu(1)], links=[{**LINK, "read": "chipset_not_supported"}]), Needs()),
    ("gpu.links", "unknown", "", host(gpus=[gpu(), gpu(1)], links=None), Needs()),
    ("gpu.links", "unknown", "nvmlDeviceGetP2PStatus did not answer", host(gpus=[gpu(), gpu(1)], links=[{**LINK, "write": None}], unseen=[{"what": "links.0.1.write", "why": "nvmlDeviceGetP2PStatus did not answer"}]), Needs()),
    ("gpu.driver", "fail", "Driver 570.86.10, CUDA 12.8, torch 2.9.0+cu130 for CUDA 13.0. CUDA 13 needs driver 580.", host(nvml={"present": True, "why": None, "driver": "570.86.10", "cuda": "12.8"}), Needs()),
    ("gpu.driver", "fail", "(sm_120) needs CUDA 12.8 or later", host(gpus=[gpu(compute_capability=[12, 0])], torch={"path": "/t", "version": "2.5.1+cu124", "cuda": "12.4"}), Needs()),
    ("gpu.driver", "fail", "(sm_70) is too old for CUDA 13", host(gpus=[gpu(compute_capability=[7, 0])]), Needs()),
    ("gpu.driver", "warn", "torch 2.9.0+cpu for CUDA none.", host(torch={"path": "/t", "version": "2.9.0+cpu", "cuda": None}), Needs()),
    ("host.memory", "fail", "524,288 MiB available, about 1,200,000 MiB expected.", host(), replace(CPU, host_bytes=1_200_000 * MIB)),
    ("host.memory", "warn", "524,288 MiB available, about 600,000 MiB expected.", host(), replace(CPU, host_bytes=600_000 * MIB)),
    ("host.memory", "fail", "100 MiB available, about 300 MiB expected.", host(host_memory={"total": 2**40, "available": 2**39, "swap_free": 0, "cgroup_limit": 200 * MIB, "cgroup_used": 100 * MIB}), replace(CPU, host_bytes=300 * MIB)),
    ("host.shm", "warn", "1 segments of dead programs, 64 MiB.", host(shm={"total": 2**30, "free": 2**29, "stale": [{"name": "psm_1a", "bytes": 64 * MIB, "age_s": 9.0}]}), CPU),
    ("host.disk", "fail", "50.0 GB free at /data. 105.0 GB needed.", host(disks=[DISK]), replace(CPU, disks=(DiskNeed(Path("/data"), 10**11),))),
    ("host.disk", "fail", "/data is mounted read-only.", host(disks=[{**DISK, "read_only": True}]), replace(CPU, disks=(DiskNeed(Path("/data")),))),
    ("host.disk", "unknown", "/data could not be looked at: statvfs did not answer", host(unseen=[{"what": "disk./data", "why": "statvfs did not answer"}]), replace(CPU, disks=(DiskNeed(Path("/data")),))),
    ("host.inodes", "fail", "12 inodes free at /data.", host(disks=[{**DISK, "free_inodes": 12}]), replace(CPU, disks=(DiskNeed(Path("/data")),))),
    ("host.limits", "fail", "Open files 256 (at most 512)", host(limits={"nofile": [256, 512], "memlock": [-1, -1], "nproc": [-1, -1]}), CPU),
    ("host.limits", "warn", "Open files 256 (at most unlimited)", host(limits={"nofile": [256, -1], "memlock": [-1, -1], "nproc": [-1, -1]}), CPU),
    ("host.ports", "fail", "In use: 8000 (pid 77 `nginx`).", host(ports=[{"port": 8000, "free": False, "why": "in use", "owner": {"pid": 77, "command": "nginx"}}]), CPU),
    ("host.clock", "fail", "Its clock is 60 s from this machine's.", host(time=NOW + 60.1), CPU),
]  # fmt: skip


@pytest.mark.parametrize(("check", "status", "words", "document", "needs"), CASES)
def test_a_fault_is_found_by_its_check(check: str, status: Status, words: str, document: dict[str, Any], needs: Needs) -> None:
    found = findings(document, needs)[check]
    assert found.status == status, found
    assert words in found.evidence
    assert found.remedy


def test_memory_of_the_run_itself_is_no_fault() -> None:
    """draftproof (pid 800, the probe's parent) has a CUDA context of its own when the next stage asks."""
    document = host(gpus=[gpu(0, 510, [listed(800, 510)])], processes=[process(800, "draftproof", fds=CUDA)])
    found = findings(document)
    assert found["gpu.memory"].status == "pass"
    assert found["gpu.holders"].evidence == "Nobody holds them (1 watch or are this run)."


def test_an_idle_level_within_the_allowance_stands_in_nobodys_way() -> None:
    idle = host(gpus=[gpu(0, 300)])
    assert findings(idle)["gpu.holders"].status == findings(idle)["gpu.memory"].status == "fail"
    allowed = findings(idle, Needs(allowance_mib=300))
    assert {finding.status for finding in allowed.values()} == {"pass"}
    assert allowed["gpu.holders"].evidence == "Nobody holds them."
    # It is for the driver, not for a worker that happens to be small.
    held = host(gpus=[gpu(0, 300, [listed(4000, 300)])], processes=[process(4000, fds=CUDA)])
    assert findings(held, Needs(allowance_mib=300))["gpu.holders"].status == "fail"


def test_what_others_hold_beside_the_run_is_one() -> None:
    document = host(
        gpus=[gpu(0, 610, [listed(800, 510), listed(4000, 100)])],
        processes=[process(800, "draftproof", fds=CUDA), process(4000, uid=BOB, fds=None)],
    )
    assert findings(document)["gpu.memory"].evidence == "GPU 0: 100 MiB in use, 0 allowed."


def test_gpus_that_are_not_needed_are_not_judged() -> None:
    document = host(gpus=[gpu(0), gpu(1, 900, [listed(4000, 900)])], processes=[process(4000, fds=("nvidia-uvm", "nvidia1"))])
    assert {finding.status for finding in findings(document, Needs(gpus=(0,))).values()} == {"pass"}
    assert findings(document, Needs(gpus=(1,)))["gpu.holders"].status == "fail"


def test_a_width_that_is_not_told_is_not_called_full() -> None:
    assert findings(host(gpus=[gpu(pcie=None)]))["gpu.links"].evidence.startswith("PCIe width not told; 0 directed pairs")
    assert findings(host())["gpu.links"].evidence == "Full PCIe width; 0 directed pairs, NUMA node 0."


def test_a_host_that_does_not_answer_is_unknown() -> None:
    error = Unreachable("node7 did not answer within 12 s.", remedy="Check that it is up.")
    look = Look(Reach("node7"), Needs(), None, error)
    assert judge(look) == [Finding("host.reached", "unknown", "node7 did not answer within 12 s.", "Check that it is up.", host="node7")]


@given(documents())
def test_no_document_breaks_a_check(document: dict[str, Any]) -> None:
    for finding in judge(Look(Reach(), Needs(), seen(document), between=(NOW, NOW))):
        assert finding.status in ("pass", "warn", "fail", "unknown")
        assert finding.evidence
        assert finding.remedy or finding.status == "pass"
