"""A real sshd on loopback, for the tests of the remote path.

    with running(folder) as server:
        server.alias("node7")                                              # now `ssh node7` gets there
        server.alias("loud", 'environment="BASH_ENV=/x/banner.sh"')        # with options of authorized_keys
        monkeypatch.setenv("PATH", server.path)

Server, client, keys and known_hosts are real. The shipped code knows nothing of all this: a script named `ssh`, first
on PATH, calls the real one with `-F` and the configuration of the test, which stands for the user's own.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_PATIENCE_S = 20.0

_SERVER = """\
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PermitUserEnvironment yes
AcceptEnv LANG LC_*
MaxStartups 100
LogLevel VERBOSE
"""


def sshd_binary() -> str:
    """The server's path (it wants to be called by it). Without one the test is skipped, in CI it fails."""
    found = shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))
    if found is None or shutil.which("ssh") is None:
        why = "OpenSSH's client and server are needed (Debian: apt-get install openssh-server)."
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    return found


@dataclass(frozen=True)
class Server:
    """A running sshd and the client configuration that leads to it."""

    folder: Path
    port: int
    ssh: str

    @property
    def path(self) -> str:
        """PATH with our `ssh` first."""
        return f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"

    @property
    def home(self) -> Path:
        """HOME of all logins."""
        return self.folder / "home"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def log(self) -> str:
        return (self.folder / "sshd.log").read_text()

    def alias(self, name: str, options: str = "", *, host_config: str = "", accepted: bool = True) -> str:
        """A host name with a key of its own. `options`: of that key in authorized_keys, such as `command="..."` or
        `environment="PATH=..."`. `host_config`: lines of its Host block, before ours. Not `accepted`: the server does not know the key.

        Logins find an empty home, so that the rc files of whoever runs the tests have no part in them.
        """
        key = self.folder / f"key_{name}"
        _keygen(key)
        if accepted:
            with (self.folder / "authorized_keys").open("a") as stream:
                home = f'environment="HOME={self.home}"'
                stream.write(f"{','.join(filter(None, [home, options]))} {key.with_suffix('.pub').read_text()}")
        lines = [
            *host_config.splitlines(),
            "HostName 127.0.0.1",
            f"Port {self.port}",
            f"User {getpass.getuser()}",
            f"IdentityFile {key}",
            "IdentitiesOnly yes",
            "IdentityAgent none",
            f"UserKnownHostsFile {self.known_hosts}",
            "GlobalKnownHostsFile /dev/null",
        ]
        with (self.folder / "config").open("a") as stream:
            stream.write(f"Host {name}\n" + "".join(f"  {line}\n" for line in lines))
        return name

    def connections(self) -> int:
        """How many keys the server has accepted so far: one for each connection, none for a shared one."""
        return self.log.count("Accepted publickey")


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Server]:
    """An sshd with its files under `folder`; it and its connections are gone afterwards."""
    binary, client = sshd_binary(), shutil.which("ssh")
    assert client is not None
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's own, where no service has made it
    folder.mkdir(parents=True, exist_ok=True)
    _keygen(folder / "host_key")
    for name in ("authorized_keys", "config", "sshd.log"):
        (folder / name).touch()
    process, port = _start(binary, folder)
    host_key = (folder / "host_key.pub").read_text().split()[:2]
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {' '.join(host_key)}\n")
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "home").mkdir(exist_ok=True)
    wrapper = folder / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {client} -F {folder}/config "$@"\n')
    wrapper.chmod(0o755)
    try:
        yield Server(folder, port, client)
    finally:
        process.terminate()
        process.wait(_PATIENCE_S)


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder for XDG_RUNTIME_DIR with a name short enough for sockets; the connections kept open in it are closed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="dp-"))
    try:
        yield folder
    finally:
        for path in (folder / "draftproof").glob("*"):
            subprocess.run(["ssh", "-F", "none", "-S", path, "-O", "exit", "any"], capture_output=True, timeout=_PATIENCE_S, check=False)
        shutil.rmtree(folder)


def _start(binary: str, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """sshd takes no port 0, so a free one is looked up; should another process be faster, again."""
    for _ in range(5):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (folder / "sshd_config").write_text(_SERVER.format(port=port, folder=folder))
        process = subprocess.Popen(
            [binary, "-D", "-f", folder / "sshd_config", "-E", folder / "sshd.log"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
                return process, port
            time.sleep(0.02)
        process.kill()
        process.wait(_PATIENCE_S)
    raise AssertionError(f"sshd did not start: {(folder / 'sshd.log').read_text()}")


def _keygen(path: Path) -> None:
    """An ed25519 pair without a passphrase."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", path]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True, timeout=_PATIENCE_S)
