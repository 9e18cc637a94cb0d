"""What the probe makes of text that cannot be had here: control groups of every kind, command lines with secrets, sockets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftproof.machine.probe import command_of, container_of, mask, parse_cgroup, read_stat, sockets_of, unit_of

ID = "3f1c9d0e5b7a48d2a6c4f0e1b2d3c4a5968778695a4b3c2d1e0f1a2b3c4d5e6f"
SHORT = "3f1c9d0e5b7a"

RECORDED = [
    # /proc/PID/cgroup, the path, unit, its scope, container
    ("0::/system.slice/vllm.service\n", "/system.slice/vllm.service", "vllm.service", "system", None),
    ("0::/system.slice/vllm.service/workers/3\n", "/system.slice/vllm.service/workers/3", "vllm.service", "system", None),
    ("0::/ml.slice/ml-serve.slice/vllm@8000.service\n", "/ml.slice/ml-serve.slice/vllm@8000.service", "vllm@8000.service", "system", None),
    ("0::/system.slice/_cpu.service\n", "/system.slice/_cpu.service", "cpu.service", "system", None),
    (
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/vllm.service\n",
        "/user.slice/user-1000.slice/user@1000.service/app.slice/vllm.service",
        "vllm.service",
        "user",
        None,
    ),
    (
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-gnome.slice/run-r3f.scope\n",
        "/user.slice/user-1000.slice/user@1000.service/app.slice/app-gnome.slice/run-r3f.scope",
        "run-r3f.scope",
        "user",
        None,
    ),
    (
        "0::/user.slice/user-1000.slice/user@1000.service/init.scope\n",
        "/user.slice/user-1000.slice/user@1000.service/init.scope",
        "init.scope",
        "user",
        None,
    ),
    (
        "0::/user.slice/user-1000.slice/user@1000.service\n",
        "/user.slice/user-1000.slice/user@1000.service",
        "user@1000.service",
        "system",
        None,
    ),
    ("0::/user.slice/user-1000.slice/session-3.scope\n", "/user.slice/user-1000.slice/session-3.scope", "session-3.scope", "system", None),
    ("0::/init.scope\n", "/init.scope", "init.scope", "system", None),
    ("0::/\n", "/", None, None, None),
    ("", None, None, None, None),
    # Docker with systemd's driver, with its own, rootless, and a systemd inside
    (f"0::/system.slice/docker-{ID}.scope\n", f"/system.slice/docker-{ID}.scope", None, None, f"docker:{SHORT}"),
    (f"0::/docker/{ID}\n", f"/docker/{ID}", None, None, f"docker:{SHORT}"),
    (
        f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{ID}.scope\n",
        f"/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{ID}.scope",
        None,
        None,
        f"docker:{SHORT}",
    ),
    (f"0::/docker/{ID}/system.slice/vllm.service\n", f"/docker/{ID}/system.slice/vllm.service", None, None, f"docker:{SHORT}"),
    (
        f"0::/system.slice/docker-{ID}.scope/system.slice/vllm.service\n",
        f"/system.slice/docker-{ID}.scope/system.slice/vllm.service",
        None,
        None,
        f"docker:{SHORT}",
    ),
    # podman as root, and rootless
    (f"0::/machine.slice/libpod-{ID}.scope/container\n", f"/machine.slice/libpod-{ID}.scope/container", None, None, f"podman:{SHORT}"),
    (
        f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope\n",
        f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope",
        None,
        None,
        f"podman:{SHORT}",
    ),
    (f"0::/libpod_parent/libpod-{ID}\n", f"/libpod_parent/libpod-{ID}", None, None, f"podman:{SHORT}"),
    # Kubernetes with containerd and with CRI-O, by systemd's driver and by the file system's
    (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1a2b.slice/cri-containerd-{ID}.scope\n",
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1a2b.slice/cri-containerd-{ID}.scope",
        None,
        None,
        f"kubernetes:{SHORT}",
    ),
    (
        f"0::/kubepods.slice/kubepods-pod1a2b.slice/crio-{ID}.scope/container\n",
        f"/kubepods.slice/kubepods-pod1a2b.slice/crio-{ID}.scope/container",
        None,
        None,
        f"kubernetes:{SHORT}",
    ),
    (f"0::/kubepods/besteffort/pod1a2b-3c4d/{ID}\n", f"/kubepods/besteffort/pod1a2b-3c4d/{ID}", None, None, f"kubernetes:{SHORT}"),
    # containerd by itself
    (f"0::/system.slice/nerdctl-{ID}.scope\n", f"/system.slice/nerdctl-{ID}.scope", None, None, f"containerd:{SHORT}"),
    (f"0::/default/{ID}\n", f"/default/{ID}", None, None, f"containerd:{SHORT}"),
    # LXC with a systemd inside; another container's view of the host; Slurm
    ("0::/lxc.payload.web/system.slice/vllm.service\n", "/lxc.payload.web/system.slice/vllm.service", None, None, None),
    ("0::/../../system.slice/vllm.service\n", "/../../system.slice/vllm.service", None, None, None),
    (
        "0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0\n",
        "/system.slice/slurmstepd.scope/job_12/step_0/user/task_0",
        None,
        None,
        None,
    ),
    # Version 1, alone and beside version 2
    (
        "12:memory:/system.slice/vllm.service\n3:cpu,cpuacct:/system.slice/vllm.service\n1:name=systemd:/system.slice/vllm.service\n",
        "/system.slice/vllm.service",
        "vllm.service",
        "system",
        None,
    ),
    (f"11:memory:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/\n", f"/docker/{ID}", None, None, f"docker:{SHORT}"),
    (
        f"1:name=systemd:/docker/{ID}\n0::/system.slice/containerd.service\n",
        "/system.slice/containerd.service",
        "containerd.service",
        "system",
        None,
    ),
    ("1:name=systemd:/\n0::/\n", "/", None, None, None),
]


@pytest.mark.parametrize(("text", "path", "unit", "scope", "container"), RECORDED, ids=[case[1] or "nothing" for case in RECORDED])
def test_control_groups(text: str, path: str | None, unit: str | None, scope: str | None, container: str | None) -> None:
    assert parse_cgroup(text) == path
    assert unit_of(path)[:2] == (unit, scope)
    assert container_of(path) == container


def test_a_units_own_path_leaves_out_what_is_below() -> None:
    assert unit_of("/system.slice/vllm.service/workers/3")[2] == "/system.slice/vllm.service"
    assert unit_of("/user.slice/user-7.slice/user@7.service/app.slice/a.service/b.service")[2] == (
        "/user.slice/user-7.slice/user@7.service/app.slice/a.service"
    )


@pytest.mark.parametrize(
    ("words", "masked"),
    [
        (["vllm", "serve", "m", "--api-key", "abc"], "vllm serve m --api-key ***"),
        (["vllm", "serve", "m", "--api-key=abc", "--port", "1"], "vllm serve m --api-key=*** --port 1"),
        (["vllm", "--api-key", "abc", "def", "--port", "1"], "vllm --api-key *** *** --port 1"),
        (["x", "--token", "abc", "serve"], "x --token *** serve"),
        (["x", "--hf-token", "a b c"], "x --hf-token ***"),
        (["x", "--hf_token=a b c"], "x --hf_token=***"),
        (["x", "--password", "-dash", "y"], "x --password *** y"),
        (["x", "--apiKey", "abc"], "x --apiKey ***"),
        (["env", "HF_TOKEN=abc", "OPENAI_API_KEY=def", "A=1"], "env HF_TOKEN=*** OPENAI_API_KEY=*** A=1"),
        (["env", "AWS_SECRET_ACCESS_KEY=abc", "A=1"], "env AWS_SECRET_ACCESS_KEY=*** A=1"),
        (["bash", "-c", "HF_TOKEN=abc vllm serve --api-key def --port 1"], "bash -c HF_TOKEN=***"),  # a secret may hold blanks
        (["bash", "-c", "vllm serve --api-key def --port 1"], "bash -c vllm serve --api-key *** --port 1"),
        (["bash", "-c", "export TOKEN='a b'; run"], "bash -c export TOKEN=***; run"),
        (["curl", "-H", "Authorization: Bearer abc.def"], "curl -H Authorization: *** ***"),
        (["git", "clone", "https://me:secret@host/x"], "git clone https://***@host/x"),
        (["x", "https://host/?token=abc&page=2"], "x https://host/?token=***&page=2"),
        (["x", "https://host/v1?bearer=abc&x=1"], "x https://host/v1?bearer=***&x=1"),
        (["x", "wss://host/?auth=Bearer abc"], "x wss://host/?auth=*** ***"),
        (["x", "https://u:p@a/?key=k https://u:p@b/"], "x https://***@a/?key=*** https://***@b/"),
        (["x", "--header=Authorization: Bearer abc"], "x --header=Authorization: *** ***"),
        (["x", '{"api_key": "abc", "port": 1}'], 'x {"api_key": ***, "port": 1}'),
        (["x", "hf_abcdefghijklmnopqrstuvwxyz012345"], "x hf_***"),
        (["x", "sk-abcdefghijklmnop"], "x sk-***"),
        # What holds no secret stays as it is
        (["x", "--tokenizer", "gpt2", "--max-num-batched-tokens", "8192"], "x --tokenizer gpt2 --max-num-batched-tokens 8192"),
        (["x", "--eos-token-id", "2", "--api-key-file", "/etc/key"], "x --eos-token-id 2 --api-key-file /etc/key"),
        (["python3", "serve.py", "--model=/models/llama", "--port=8000"], "python3 serve.py --model=/models/llama --port=8000"),
        (["x", "--token"], "x --token"),
        ([], ""),
    ],
)  # fmt: skip
def test_secrets_are_masked(words: list[str], masked: str) -> None:
    assert mask(words) == masked


@given(st.text(alphabet=st.characters(exclude_categories=["Z", "C"]), min_size=6).filter(lambda text: not text.startswith("-")))
def test_no_value_of_a_secret_option_survives(value: str) -> None:
    for words in (["x", "--api-key", value], ["x", f"--password={value}"], ["x", f"MY_TOKEN={value}"]):
        assert value not in mask(words).removeprefix("x ").replace("--api-key", "").replace("--password=", "").replace("MY_TOKEN=", "")


@given(st.lists(st.text(), max_size=6))
def test_masking_takes_any_words(words: list[str]) -> None:
    assert len(mask(words).split("***")) >= 1


@pytest.mark.parametrize("name", ["token", "HF_TOKEN", "api-key", "apiKey", "X-Auth", "dbPassword2", "PWD", "client_secret", "TOKEN_1"])
def test_names_of_secrets(name: str) -> None:
    assert mask(["x", f"--{name}", "abc"]) == f"x --{name} ***"
    assert mask(["x", f"{name}=abc def"]) == f"x {name}=***"


@pytest.mark.parametrize("name", ["tokenizer", "max-tokens", "author", "keyboard", "pad-token-id", "passwd-file", "bypass", "secretary"])
def test_names_that_are_none(name: str) -> None:
    assert mask(["x", f"--{name}", "abc"]) == f"x --{name} abc"
    assert mask(["x", f"{name}=abc"]) == f"x {name}=abc"


def test_the_names_in_stat_may_hold_anything(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    numbers = "5 6 7 0 -1 4194560 " + "0 " * 12 + "987654 1000 250 18446744073709551615"
    (tmp_path / "7" / "stat").write_bytes(b"7 (a) R 1 (b)\n\xff) D " + numbers.encode() + b"\n")
    assert read_stat(str(tmp_path), 7) == {
        "comm": "a) R 1 (b)\n�",
        "state": "D",
        "ppid": 5,
        "pgrp": 6,
        "session": 7,
        "kernel": False,
        "start": 987654,
        "rss": 250,
    }


def test_kernel_threads_are_known_by_their_flag(tmp_path: Path) -> None:
    """A recorded kworker: flags 69238880 = 0x4208060 with PF_KTHREAD, 0x200000."""
    (tmp_path / "9").mkdir()
    line = "9 (kworker/0:0H) I 2 0 0 0 -1 69238880 0 0 0 0 0 0 0 0 0 -20 1 0 44 0 0 18446744073709551615 0\n"
    (tmp_path / "9" / "stat").write_text(line)
    assert read_stat(str(tmp_path), 9)["kernel"] is bool(69238880 & 0x200000)


@pytest.mark.parametrize("text", ["", "9 (x", "9 (x) S 1 2\n"])
def test_a_stat_that_was_cut_off_is_a_process_that_ended(tmp_path: Path, text: str) -> None:
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "stat").write_text(text)
    with pytest.raises(FileNotFoundError):
        read_stat(str(tmp_path), 9)


def test_a_name_that_overwrote_its_arguments(tmp_path: Path) -> None:
    """setproctitle leaves one word and many zero bytes."""
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "cmdline").write_bytes(b"VLLM::EngineCore" + b"\0" * 200)
    assert command_of(str(tmp_path), 9) == "VLLM::EngineCore"
    assert command_of(str(tmp_path), 10) == ""


def test_sockets_of_a_port(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   0: {} 00000000:0000 {} 00000000:00000000 00:00000000 00000000     0        0 {} 1 0000 100 0 0 10 0\n"
    (tmp_path / "net" / "tcp").write_text(
        head
        + row.format("00000000:1F40", "0A", 111)  # 8000 listens
        + row.format("0100007F:1F40", "01", 222)  # 8000, a connection
        + row.format("0100007F:1F41", "01", 333)  # 8001, a connection alone
        + row.format("0100007F:0016", "0A", 444)  # 22 was not asked for
    )
    assert sockets_of(str(tmp_path), [8000, 8001, 8002]) == {"socket:[111]": 8000}
    (tmp_path / "net" / "tcp6").write_text(head + row.format("00000000000000000000000000000000:1F42", "0A", 555))
    assert sockets_of(str(tmp_path), [8002]) == {"socket:[555]": 8002}
