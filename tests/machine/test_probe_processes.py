"""Who holds the GPUs: real processes of every kind, seen by the probe that ships."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_gpus import MIB, PYTHON, FakeGpus, control_group, run_probe, wait_for

AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="needs root")
NOBODY = 65_534


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[FakeGpus]:
    with FakeGpus(tmp_path, count=2) as fake:
        yield fake


def look(gpus: FakeGpus, **request: Any) -> dict[int, dict[str, Any]]:
    """The processes of a document, by pid."""
    roots = {**gpus.roots, **request.pop("roots", {})}
    document = run_probe(roots=roots, parts=["gpus", "processes"], **request)
    return {process["pid"]: process for process in document["processes"]}


def children(pid: int) -> list[int]:
    """Its children now."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_all_that_is_said_of_a_process(gpus: FakeGpus) -> None:
    before = time.time()
    pid = gpus.holder([1], 5, name="VLLM::Worker_TP3", arguments=["--port", "8000"])
    process = look(gpus)[pid]
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    assert abs(process.pop("started") - before) < 5
    assert abs(process.pop("rss") - pages * os.sysconf("SC_PAGE_SIZE")) < 4 * MIB
    assert process.pop("cgroup") is not None
    assert process.pop("unit_scope") in (None, "system", "user")
    process.pop("unit")
    assert process == {
        "pid": pid,
        "ppid": int(stat[1]),
        "start_ticks": int(stat[19]),
        "uid": os.getuid(),
        "user": subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip(),
        "comm": "VLLM::Worker_TP",
        "command": f"VLLM::Worker_TP3 -IS {gpus.folder}/hold.py --port 8000",
        "state": "S",
        "session": pid,
        "pgrp": pid,
        "container": None,
        "pid_namespace": int(os.readlink(f"/proc/{pid}/ns/pid")[5:-1]),
        "device_fds": ["nvidia-uvm", "nvidia1", "nvidiactl"],
        "engine": None,
    }


def test_a_forked_child_of_a_dead_parent_is_found_by_its_open_files(gpus: FakeGpus) -> None:
    parent, child = gpus.forked([0, 1], 2_566)
    document = run_probe(roots=gpus.roots)
    assert document["gpus"][0]["processes"] == [{"pid": parent, "kind": "compute", "bytes": 2_566 * MIB}]
    processes = {process["pid"]: process for process in document["processes"]}
    assert parent not in processes
    assert processes[child]["device_fds"] == ["nvidia-uvm", "nvidia0", "nvidia1", "nvidiactl"]
    assert not [entry for entry in document["unseen"] if entry["what"] == f"process.{parent}"]  # it is gone, which is no secret


def test_a_monitor_has_devices_open_and_no_memory(gpus: FakeGpus) -> None:
    pid = gpus.exporter([0])
    process = look(gpus)[pid]
    assert (process["comm"], process["device_fds"]) == ("dcgm-exporter", ["nvidia0", "nvidiactl"])


def test_ancestors_and_descendants_are_seen_and_others_not(gpus: FakeGpus, tmp_path: Path) -> None:
    supervisor, holder = gpus.respawner([0], 3)
    bystander = gpus.bystander("bystander")
    processes = look(gpus)
    assert processes[holder]["ppid"] == supervisor
    assert processes[supervisor]["device_fds"] == []
    assert bystander not in processes
    assert os.getpid() not in processes
    starter = gpus.holder([0], 3, runs="sleep 300")
    os.kill(starter, signal.SIGUSR1)
    wait_for(lambda: len(children(starter)) == 1 and len(children(children(starter)[0])) == 1)  # a shell, and what it runs
    (shell,) = children(starter)
    processes = look(gpus)
    assert {shell, *children(shell)} <= set(processes)
    assert processes[shell]["device_fds"] == []
    os.kill(holder, signal.SIGKILL)
    wait_for(lambda: children(supervisor) not in ([], [holder]))
    (again,) = children(supervisor)
    wait_for(lambda: f"hold 0 {again} " in (gpus.library.parent / f"{gpus.library.name}.txt").read_text())
    assert {supervisor, again} <= set(look(gpus)) - {holder}


def test_the_probe_does_not_find_itself(gpus: FakeGpus, tmp_path: Path) -> None:
    """Its child has the devices open, as NVML really does; here the library's folder stands for /dev."""
    library = gpus.dev / "nvidia-driver.so"
    library.write_bytes(gpus.library.read_bytes())
    Path(f"{library}.txt").write_text(Path(f"{gpus.library}.txt").read_text())
    assert look(gpus, roots={"nvml": str(library)}) == {}


@AS_ROOT
def test_processes_of_another_user(gpus: FakeGpus) -> None:
    pid = gpus.holder([0], 5, uid=NOBODY)
    nameless = gpus.holder([0], 5, uid=54_321)
    processes = look(gpus)
    assert (processes[pid]["uid"], processes[pid]["user"]) == (NOBODY, "nobody")
    assert (processes[nameless]["uid"], processes[nameless]["user"]) == (54_321, "54321")
    assert processes[pid]["device_fds"] == processes[nameless]["device_fds"] == ["nvidia-uvm", "nvidia0", "nvidiactl"]


@pytest.fixture
def open_gpus() -> Iterator[FakeGpus]:
    """A GPU in a folder that other users may enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with FakeGpus(Path(folder), count=1) as fake:
            yield fake


@AS_ROOT
def test_what_a_user_may_not_see_is_said(open_gpus: FakeGpus) -> None:
    pid = open_gpus.holder([0], 5)
    document = run_probe(uid=NOBODY, roots=open_gpus.roots)
    (process,) = [process for process in document["processes"] if process["pid"] == pid]
    assert process["device_fds"] is None
    assert process["pid_namespace"] is None
    assert process["command"].endswith("hold.py")
    assert document["viewer"]["uid"] == NOBODY
    assert any(entry["what"] == "processes.device_fds" and "of other users" in entry["why"] for entry in document["unseen"])


@AS_ROOT
def test_a_process_that_proc_hides_is_not_taken_for_dead(open_gpus: FakeGpus) -> None:
    pid = open_gpus.bystander("hidden")
    visible = open_gpus.holder([0], 5, uid=NOBODY)
    ticks = Path(f"/proc/{visible}/stat").read_text().rpartition(")")[2].split()[19]
    open_gpus.say(f"hold 0 {pid} 4096 compute {visible}:{ticks}")  # the fake looks into the same /proc
    python = open_gpus.folder / "python"
    python.write_text(f"""#!/bin/sh
exec unshare --mount sh -c 'mount -t proc -o hidepid=2 proc /proc && exec "$@"' \\
    sh setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups {PYTHON} "$@"
""")
    python.chmod(0o755)
    document = run_probe(str(python), roots=open_gpus.roots)
    assert {line["pid"] for line in document["gpus"][0]["processes"]} == {pid, visible}
    assert [process["pid"] for process in document["processes"]] == [visible]
    (why,) = [entry["why"] for entry in document["unseen"] if entry["what"] == f"process.{pid}"]
    assert "hidepid" in why


@pytest.mark.parametrize(
    "name",
    [
        "two\nlines (and) S 1 1 1",
        ") R 1 1 1 0 -1 4194560",
        ") Z 1 1",
        "\x1b]0;owned\x07\x1b[2J",
        "\udcff\udcfe\x01",
        "日本語のプロセス",
        "  ",
        "a\tb\\n\u2028",
        "=====draftproof-end=====",
    ],
    ids=[
        *("newline", "brackets", "a zombie's", "escape sequences", "not UTF-8", "cut within a letter", "blanks", "line separator"),
        "sentinel",
    ],
)
def test_hostile_names(gpus: FakeGpus, name: str) -> None:
    pid = gpus.holder([0], 5, name=name)
    process = look(gpus)[pid]
    raw = os.fsencode(name)
    assert process["comm"] == raw[:15].decode("utf-8", "replace")
    assert process["command"] == f"{raw.decode('utf-8', 'replace')} -IS {gpus.folder}/hold.py"
    assert process["device_fds"] == ["nvidia-uvm", "nvidia0", "nvidiactl"]
    assert process["state"] == "S"


def test_long_commands_are_cut(gpus: FakeGpus) -> None:
    begin = f"python3 -IS {gpus.folder}/hold.py "
    for text in ("x" * 100_000, "a\nb\n" * 2_500):
        pid = gpus.holder([0], 5, arguments=[text])
        command = look(gpus)[pid]["command"]
        assert len(command) == 300
        assert command == (begin + text)[:299] + "…"


def test_secrets_are_masked_in_what_is_printed(gpus: FakeGpus) -> None:
    pid = gpus.holder([0], 5, name="python3", arguments=["--api-key", "sk-topsecret", "--port", "8000", "HF_TOKEN=hf_topsecret"])
    assert look(gpus)[pid]["command"] == f"python3 -IS {gpus.folder}/hold.py --api-key *** --port 8000 HF_TOKEN=***"


def test_zombies_hold_nothing(open_gpus: FakeGpus) -> None:
    gpus = open_gpus
    with subprocess.Popen([PYTHON, "-c", f"import os; f = open({str(gpus.dev / 'nvidia0')!r})"]) as ended:
        wait_for(lambda: Path(f"/proc/{ended.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
        ticks = Path(f"/proc/{ended.pid}/stat").read_text().rpartition(")")[2].split()[19]
        keeper = gpus.holder([0], 1)
        kept = Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[19]
        gpus.say(f"hold 0 {ended.pid} 4096 compute {keeper}:{kept}")  # NVML still lists it
        process = look(gpus)[ended.pid]
        assert os.getuid() != 0 or look(gpus, uid=NOBODY)[ended.pid]["device_fds"] == []  # also to who may not look into it
    assert (process["state"], process["device_fds"], process["command"], process["start_ticks"]) == ("Z", [], "", int(ticks))


def test_processes_that_come_and_go_while_it_looks(gpus: FakeGpus) -> None:
    pid = gpus.holder([0], 5)
    storm = f"""
import os, time
end = time.time() + 30
while time.time() < end:
    child = os.fork()
    if not child:
        file = open({str(gpus.dev / "nvidia1")!r})
        os._exit(0)
    os.waitpid(child, 0)
"""
    with subprocess.Popen([PYTHON, "-I", "-S", "-c", storm]) as stormy:
        for _ in range(8):
            document = run_probe(roots=gpus.roots, parts=["gpus", "processes"])
            assert pid in [process["pid"] for process in document["processes"]]
            assert [entry for entry in document["unseen"] if entry["what"].startswith(("process", "gpu"))] == []
        stormy.kill()


def test_engines_of_ours_are_known_by_their_token(gpus: FakeGpus, tmp_path: Path) -> None:
    token, old = secrets.token_hex(16), secrets.token_hex(16)
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    records = tmp_path / "records"
    records.mkdir()
    (records / "a.json").write_text(json.dumps({"token": token, "boot_id": boot_id, "what": "vLLM", "run": "/runs/one", "session": 1}))
    (records / "b.json").write_text(json.dumps({"token": old, "boot_id": "another", "what": "vLLM", "run": "/runs/two", "session": 1}))
    (records / "c.json").write_text("{")
    ours = gpus.bystander("engine", env={"DRAFTPROOF_ENGINE": token})
    holding = gpus.holder([0], 5, env={"DRAFTPROOF_ENGINE": token})
    earlier = gpus.holder([1], 5, env={"DRAFTPROOF_ENGINE": old})
    document = run_probe(roots={**gpus.roots, "records": str(records)}, parts=["gpus", "processes"])
    engines = {process["pid"]: process["engine"] for process in document["processes"]}
    assert engines[ours] == engines[holding] == {"what": "vLLM", "run": "/runs/one"}
    assert engines[earlier] is None
    assert any(entry["what"] == "engines.c.json" for entry in document["unseen"])


def _may_group() -> bool:
    return os.getuid() == 0 and any(os.access(folder, os.W_OK) for folder in ("/sys/fs/cgroup/systemd", "/sys/fs/cgroup/cgroup.procs"))


@pytest.mark.skipif(not _may_group(), reason="needs root and a control group hierarchy of its own")
def test_all_members_of_a_holders_unit_are_seen(gpus: FakeGpus) -> None:
    name = f"draftproof-test-{secrets.token_hex(4)}"
    with control_group(f"{name}.slice/vllm.service") as group:
        (group / "workers").mkdir()
        holder = gpus.holder([0], 5, cgroup=group / "workers")
        idle = gpus.bystander("api-server", cgroup=group)
        other = gpus.bystander("bystander")
        processes = look(gpus)
        for pid in gpus.alive():
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not (group / "workers" / "cgroup.procs").read_text())
        (group / "workers").rmdir()
    assert processes[holder]["cgroup"] == f"/{name}.slice/vllm.service/workers"
    assert processes[idle]["cgroup"] == f"/{name}.slice/vllm.service"
    for pid in (holder, idle):
        assert (processes[pid]["unit"], processes[pid]["unit_scope"], processes[pid]["container"]) == ("vllm.service", "system", None)
    assert other not in processes


# Ports and shared memory


def _listen(family: socket.AddressFamily, address: str) -> socket.socket:
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((address, 0))
    server.listen()
    return server


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::"), (socket.AF_INET6, "::1")]
)
def test_ports_and_their_owners(family: socket.AddressFamily, address: str) -> None:
    try:
        server = _listen(family, address)
    except OSError:
        pytest.skip("no IPv6 here")
    with server:
        port = server.getsockname()[1]
        (seen,) = run_probe(parts=[], ports=[port])["ports"]
        command = Path(f"/proc/{os.getpid()}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
    assert (seen["port"], seen["free"], seen["why"]) == (port, False, "Address already in use")
    assert seen["owner"]["pid"] == os.getpid()
    assert seen["owner"]["command"].startswith(command[0])
    (after,) = run_probe(parts=[], ports=[port])["ports"]
    assert after == {"port": port, "free": True, "why": None, "owner": None}


@AS_ROOT
def test_a_port_that_only_root_may_bind() -> None:
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 83:
        pytest.skip("here everybody may")
    assert run_probe(uid=NOBODY, parts=[], ports=[83])["ports"] == [{"port": 83, "free": False, "why": "Permission denied", "owner": None}]
    assert run_probe(parts=[], ports=[83])["ports"][0]["free"] is True


def test_a_port_in_time_wait_is_free_as_it_is_to_a_server() -> None:
    with _listen(socket.AF_INET, "127.0.0.1") as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # this side closes first and lingers
            client.recv(1)
    lingering = [line for line in Path("/proc/net/tcp").read_text().splitlines() if f":{port:04X} " in line and line.split()[3] == "06"]
    assert lingering
    assert run_probe(parts=[], ports=[port])["ports"][0]["free"] is True


def test_segments_that_nobody_holds_are_stale(tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        pytest.skip("no /dev/shm")
    key = secrets.token_hex(6)
    prefixes = {"left": "psm_", "open": "psm_", "mapped": "nccl-", "other": "x_", "sem": "sem.", **({} if os.getuid() else {"his": "psm_"})}
    names = {kind: f"{prefix}{key}{kind}" for kind, prefix in prefixes.items()}
    for name in names.values():
        (shm / name).write_bytes(b"\0" * 8192)
    code = """
import ctypes, sys, time
kept = open(sys.argv[1])
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
with open(sys.argv[2], "r+b") as file:  # Python's own mmap keeps the file open
    assert libc.mmap(None, ctypes.c_size_t(4096), 3, 1, file.fileno(), ctypes.c_long(0)) != ctypes.c_void_p(-1).value
print("ready", flush=True)
time.sleep(60)
"""
    command = [PYTHON, "-I", "-c", code, str(shm / names["open"]), str(shm / names["mapped"])]
    try:
        os.utime(shm / names["left"], (time.time() - 500,) * 2)
        if "his" in names:
            os.chown(shm / names["his"], NOBODY, NOBODY)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            seen = run_probe(parts=["host"])["shm"]
            holder.kill()
        stale = {segment["name"]: segment for segment in seen["stale"] if key in segment["name"]}
        assert set(stale) == {names["left"], names["sem"]}
        assert stale[names["left"]]["bytes"] == 8192
        assert 495 < stale[names["left"]]["age_s"] < 520
        after = run_probe(parts=["host"])["shm"]["stale"]
        mine = {name for kind, name in names.items() if kind not in ("other", "his")}
        assert {segment["name"] for segment in after if key in segment["name"]} == mine
    finally:
        for name in names.values():
            (shm / name).unlink()
    at = os.statvfs(shm)
    assert seen["total"] == at.f_blocks * at.f_frsize


@pytest.mark.slow
def test_three_thousand_processes(gpus: FakeGpus) -> None:
    """One pass, whatever else runs: how long it takes is printed."""
    pid = gpus.holder([0], 5)
    code = """
import os, time
for _ in range(3000):
    if not os.fork():
        time.sleep(120)
        os._exit(0)
print("ready", flush=True)
time.sleep(120)
"""
    with subprocess.Popen([PYTHON, "-I", "-S", "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True) as many:
        try:
            assert many.stdout is not None
            if many.stdout.readline() != "ready\n":
                pytest.skip("so many processes may not run here")
            document = run_probe(roots=gpus.roots, parts=["gpus", "processes"])
        finally:
            os.killpg(many.pid, signal.SIGKILL)
    print(f"{len(os.listdir('/proc')):,} entries in /proc: {document['seconds']:.3f} s")
    assert pid in [process["pid"] for process in document["processes"]]
    assert document["seconds"] < 2
