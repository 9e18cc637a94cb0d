"""Documents as the probe prints them, written by hand: what a test does not say is a quiet host of one idle H200.

document = host(gpus=[gpu(0, 2574, [listed(4099, 2566)])], processes=[process(4121, "VLLM::Worker_TP0")])
snapshot = seen(document)
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from draftproof.machine.snapshot import Snapshot, parse

MIB = 2**20
NOW = 1_800_000_000.0
"""Unix seconds of every look."""
ALICE, BOB, ROOT = 1000, 1001, 0
USERS = {ALICE: "alice", BOB: "bob", ROOT: "root"}
CUDA = ("nvidia-uvm", "nvidia0", "nvidiactl")
"""What a CUDA program has open on a host of one GPU."""
HOST_NAMESPACE = 4026531836


def seen(document: dict[str, Any]) -> Snapshot:
    """The snapshot of a document."""
    return parse(json.dumps(document))


def host(**changes: Any) -> dict[str, Any]:
    """The whole document. Alice looks, with pid 900, from draftproof (pid 800) in her shell (pid 700)."""
    return {
        "schema": 1,
        "host": "node7",
        "boot_id": "6e2c6a4e-0f5e-4f0e-9d0e-3b8f7a1c2d3e",
        "pid_namespace": HOST_NAMESPACE,
        "time": NOW,
        "uptime_s": 864_000.0,
        "seconds": 0.25,
        "python": "3.11.7",
        "viewer": viewer(),
        "unseen": [],
        "nvml": {"present": True, "why": None, "driver": "580.65.06", "cuda": "13.0"},
        "gpus": [gpu()],
        "links": [],
        "xid": [],
        "processes": [],
        "host_memory": {"total": 2**40, "available": 2**39, "swap_free": 0, "cgroup_limit": None, "cgroup_used": None},
        "shm": {"total": 2**39, "free": 2**39, "stale": []},
        "disks": [],
        "limits": {"nofile": [1024, 1_048_576], "memlock": [-1, -1], "nproc": [4096, -1]},
        "ports": [],
        "clock": {"synchronised": True},
        "iommu": {"groups": 0},
        "torch": {"path": "/venv/lib/python3.11/site-packages/torch", "version": "2.9.0+cu130", "cuda": "13.0"},
        **changes,
    }


def viewer(**changes: Any) -> dict[str, Any]:
    """Who looks."""
    return {
        "uid": ALICE,
        "user": "alice",
        "pid": 900,
        "ancestors": [800, 700, 600, 1],
        "initial_namespace": True,
        "container": None,
        **changes,
    }


def gpu(index: int = 0, used_mib: int | list[int] = 0, processes: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """An H200 with so many MiB in use (one number, or one per sample), and NVML's list."""
    used = used_mib if isinstance(used_mib, list) else [used_mib] * 3
    memory = {"version": 2, "total": 143_771 * MIB, "reserved": 615 * MIB, "used": [one * MIB for one in used]}
    return {
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "NVIDIA H200",
        "minor": index,
        "bus_id": f"0000:{0x18 + index:02x}:00.0",
        "numa_node": 0,
        "compute_capability": [9, 0],
        "memory": {**memory, "free": (143_771 - 615 - used[-1]) * MIB},
        "processes": processes or [],
        "mig": {"enabled": False, "instances": 0},
        "health": {
            "ecc_uncorrected": 0,
            "remap_pending": False,
            "remap_failed": False,
            "recovery_action": "none",
            "slowdown": [],
            "temperature_c": 31,
        },
        "pcie": {"width": 16, "max_width": 16, "generation": 5, "max_generation": 5},
        "compute_mode": "default",
        "persistence": True,
        **changes,
    }


def memory_v1(used_mib: int) -> dict[str, Any]:
    """The same GPU as an old driver reads it: what it reserves is in use."""
    total, used = 143_771 * MIB, used_mib * MIB
    return {"version": 1, "total": total, "reserved": None, "used": [used] * 3, "free": total - used}


def listed(pid: int, mib: int | None, kind: str = "compute") -> dict[str, Any]:
    """A line of NVML's list."""
    return {"pid": pid, "kind": kind, "bytes": None if mib is None else mib * MIB}


def process(pid: int, comm: str = "python3", *, uid: int = ALICE, fds: tuple[str, ...] | None = (), **changes: Any) -> dict[str, Any]:
    """A process that runs for two hours, an orphan in a session of its own that is no longer there. No device is open."""
    return {
        "pid": pid,
        "ppid": 1,
        "start_ticks": 85_680_000 + pid,
        "started": NOW - 7200,
        "uid": uid,
        "user": USERS[uid],
        "comm": comm[:15],
        "command": comm,
        "state": "S",
        "session": 50,
        "pgrp": 50,
        "rss": 3 * 2**30,
        "cgroup": None,
        "unit": None,
        "unit_scope": None,
        "container": None,
        "pid_namespace": HOST_NAMESPACE,
        "device_fds": None if fds is None else sorted(fds),
        "engine": None,
        **changes,
    }


# Any document. Pids, users and sizes are few, so that they meet.

_TEXT = st.text(max_size=8)
_COUNT = st.integers(0, 2**63 - 1)
_PID = st.integers(0, 9)
_SIZE = st.one_of(st.integers(0, 300).map(lambda mib: mib * MIB), _COUNT)
_SECONDS = st.one_of(st.integers(-10, 10**9), st.floats(-1e15, 1e15))
_DEVICES = st.lists(st.sampled_from(["nvidia0", "nvidia1", "nvidia-uvm", "nvidiactl", "nvidia-modeset"]), unique=True).map(sorted)
_COMMS = st.sampled_from(
    ["python3", "VLLM::Worker_TP", "nvidia-cuda-mps", "nv-hostengine", "Xorg", "bash", "sudo", "draftproof", "sshd", ""]
)


def _or_null(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), strategy)


_LISTED = st.fixed_dictionaries({"pid": _PID, "kind": st.sampled_from(["compute", "graphics", "mps"]), "bytes": _or_null(_SIZE)})
_MEMORY = st.fixed_dictionaries(
    {
        "version": st.sampled_from([1, 2]),
        "total": _SIZE,
        "reserved": _or_null(_SIZE),
        "used": st.lists(_SIZE, min_size=1, max_size=3),
        "free": _SIZE,
    }
)
_HEALTH = st.fixed_dictionaries(
    {
        "ecc_uncorrected": _or_null(_COUNT),
        "remap_pending": _or_null(st.booleans()),
        "remap_failed": _or_null(st.booleans()),
        "recovery_action": _or_null(st.sampled_from(["none", "reset", "reboot", "drain_p2p", "drain_and_reset"])),
        "slowdown": _or_null(st.lists(_TEXT, max_size=2)),
        "temperature_c": _or_null(st.integers(-20, 120)),
    }
)
_GPU = st.fixed_dictionaries(
    {
        "index": st.integers(0, 3),
        "uuid": _or_null(_TEXT),
        "name": _or_null(_TEXT),
        "minor": _or_null(st.integers(0, 1)),
        "bus_id": _or_null(_TEXT),
        "numa_node": _or_null(_COUNT),
        "compute_capability": _or_null(st.lists(_COUNT, min_size=2, max_size=2)),
        "memory": _or_null(_MEMORY),
        "processes": _or_null(st.lists(_LISTED, max_size=6)),
        "mig": _or_null(st.fixed_dictionaries({"enabled": st.booleans(), "instances": _COUNT})),
        "health": _or_null(_HEALTH),
        "pcie": _or_null(st.fixed_dictionaries(dict.fromkeys(["width", "max_width", "generation", "max_generation"], _COUNT))),
        "compute_mode": _or_null(st.sampled_from(["default", "exclusive_process", "prohibited"])),
        "persistence": _or_null(st.booleans()),
    }
)
_PROCESS = st.fixed_dictionaries(
    {
        "pid": _PID,
        "ppid": _PID,
        "start_ticks": _COUNT,
        "started": _SECONDS,
        "uid": st.sampled_from([ALICE, BOB, ROOT]),
        "user": _TEXT,
        "comm": _COMMS,
        "command": st.one_of(_TEXT, st.sampled_from(["/venv/bin/draftproof run", "VLLM::Worker_TP3"])),
        "state": st.sampled_from("RSDZTtXI"),
        "session": _PID,
        "pgrp": _PID,
        "rss": _COUNT,
        "cgroup": _or_null(_TEXT),
        "unit": _or_null(_TEXT),
        "unit_scope": _or_null(st.sampled_from(["system", "user"])),
        "container": _or_null(st.sampled_from(["docker:0123456789ab", "podman:ba9876543210"])),
        "pid_namespace": _or_null(st.sampled_from([HOST_NAMESPACE, 4026532999])),
        "device_fds": _or_null(_DEVICES),
        "engine": _or_null(st.fixed_dictionaries({"what": _TEXT, "run": _TEXT})),
    }
)
_LIMIT = st.lists(st.integers(-1, 2**63 - 1), min_size=2, max_size=2)
_SEGMENT = st.fixed_dictionaries({"name": _TEXT, "bytes": _COUNT, "age_s": _SECONDS})


def _unique(strategy: st.SearchStrategy[Any], key: str, size: int) -> st.SearchStrategy[Any]:
    return st.lists(strategy, max_size=size, unique_by=lambda one: one[key])


def documents() -> st.SearchStrategy[dict[str, Any]]:
    """Any document that the schema allows."""
    return st.fixed_dictionaries(
        {
            "schema": st.just(1),
            "host": _TEXT,
            "boot_id": _TEXT,
            "pid_namespace": _or_null(st.sampled_from([HOST_NAMESPACE, 4026532999])),
            "time": _SECONDS,
            "uptime_s": _SECONDS,
            "seconds": _SECONDS,
            "python": _TEXT,
            "viewer": st.fixed_dictionaries(
                {
                    "uid": st.sampled_from([ALICE, ROOT]),
                    "user": _TEXT,
                    "pid": _PID,
                    "ancestors": st.lists(_PID, max_size=4),
                    "initial_namespace": st.sampled_from([True, True, False, None]),
                    "container": _or_null(st.just("docker:0123456789ab")),
                }
            ),
            "unseen": st.lists(
                st.fixed_dictionaries({"what": st.sampled_from(["gpu.0.processes", "processes", "process.3", "gpu.1"]), "why": _TEXT}),
                max_size=2,
            ),
            "nvml": st.fixed_dictionaries(
                {"present": st.booleans(), "why": _or_null(_TEXT), "driver": _or_null(_TEXT), "cuda": _or_null(_TEXT)}
            ),
            "gpus": _unique(_GPU, "index", 3),
            "links": _or_null(
                st.lists(
                    st.fixed_dictionaries(
                        {
                            "from": _COUNT,
                            "to": _COUNT,
                            "read": _or_null(_TEXT),
                            "write": _or_null(_TEXT),
                            "ancestor": _or_null(st.sampled_from(["internal", "single", "multiple", "hostbridge", "node", "system"])),
                        }
                    ),
                    max_size=2,
                )
            ),
            "xid": _or_null(
                st.lists(st.fixed_dictionaries({"time": _or_null(_SECONDS), "bus_id": _TEXT, "xid": _COUNT, "text": _TEXT}), max_size=2)
            ),
            "processes": _or_null(_unique(_PROCESS, "pid", 8)),
            "host_memory": _or_null(
                st.fixed_dictionaries(
                    {
                        "total": _COUNT,
                        "available": _COUNT,
                        "swap_free": _COUNT,
                        "cgroup_limit": _or_null(_COUNT),
                        "cgroup_used": _or_null(_COUNT),
                    }
                )
            ),
            "shm": _or_null(st.fixed_dictionaries({"total": _COUNT, "free": _COUNT, "stale": st.lists(_SEGMENT, max_size=2)})),
            "disks": st.lists(
                st.fixed_dictionaries(
                    {
                        "path": _TEXT,
                        "existing": _TEXT,
                        "free_bytes": _COUNT,
                        "total_bytes": _COUNT,
                        "free_inodes": _or_null(_COUNT),
                        "read_only": st.booleans(),
                    }
                ),
                max_size=2,
            ),
            "limits": _or_null(st.fixed_dictionaries({"nofile": _LIMIT, "memlock": _LIMIT, "nproc": _LIMIT})),
            "ports": st.lists(
                st.fixed_dictionaries(
                    {
                        "port": st.integers(0, 65535),
                        "free": st.booleans(),
                        "why": _or_null(_TEXT),
                        "owner": _or_null(st.fixed_dictionaries({"pid": _COUNT, "command": _TEXT})),
                    }
                ),
                max_size=2,
            ),
            "clock": _or_null(st.fixed_dictionaries({"synchronised": _or_null(st.booleans())})),
            "iommu": _or_null(st.fixed_dictionaries({"groups": _COUNT})),
            "torch": _or_null(st.fixed_dictionaries({"path": _TEXT, "version": _TEXT, "cuda": _or_null(_TEXT)})),
        }
    )
