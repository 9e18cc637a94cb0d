"""machine/remote.py against this machine and a real sshd: a script of the probe's shape, and everything that can stand in its way."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sshd
from draftproof.errors import DraftproofError, Undecided, UsageError
from draftproof.machine import remote
from draftproof.machine.child import BEGIN
from draftproof.machine.remote import Answer, Reach, ask_all
from draftproof.machine.unreachable import Unreachable

_SCRIPT = """\
from __future__ import annotations

import base64
import json
import os
import sys
import time
import zlib


def main(arguments):
    request = json.loads(zlib.decompress(base64.urlsafe_b64decode(arguments[0]))) if arguments else {}
    if "journal" in request:
        with open(request["journal"], "a") as stream:
            stream.write(f"{os.getpid()}\\n")
    exec(request.get("first", ""))
    seen = {"script": NAME, "request": request, "isolated": sys.flags.isolated, "locale": os.environ.get("LC_ALL"),
            "python": sys.executable, "sudo": os.environ.get("STUB_SUDO")}
    print("=====draftproof-begin=====", json.dumps(seen), "=====draftproof-end=====", sep="\\n", flush=True)
    exec(request.get("then", ""))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
"""
"""Says what it was asked and how it was run; `first` and `then` of the request are trouble to make before and after."""

HANG = "time.sleep(120)"

SHIPPED = remote.SCRIPTS


@pytest.fixture(autouse=True)
def _scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script takes the place of all three."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name in ("probe", "stop", "copies"):
        (folder / f"{name}.py").write_text(_SCRIPT.replace("NAME", repr(name)))
    monkeypatch.setattr(remote, "SCRIPTS", folder)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.Server]:
    with sshd.running(tmp_path_factory.mktemp("sshd")) as running:
        running.alias("node7")
        yield running


@pytest.fixture
def sockets() -> Iterator[Path]:
    with sshd.socket_folder() as folder:
        yield folder


@pytest.fixture
def ssh(server: sshd.Server, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> sshd.Server:
    """The server, with our ssh on PATH and no connection open yet."""
    monkeypatch.setenv("PATH", server.path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(sockets))
    return server


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Path]:
    """Where scripts put their pids. Those that still live at the end, as hung ones on the far side do, are ended."""
    path = tmp_path / "journal"
    yield path
    for pid in _pids(path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _at(host: str | None = "node7", **more: Any) -> Reach:
    """A host whose Python is ours."""
    return Reach(host, **{"python": sys.executable, **more})


def _said(answer: Answer | DraftproofError) -> dict[str, Any]:
    assert isinstance(answer, Answer), answer
    document: dict[str, Any] = json.loads(answer.document)
    return document


def _pids(journal: Path) -> list[int]:
    return [int(line) for line in journal.read_text().split()] if journal.exists() else []


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _await_pids(journal: Path, number: int) -> list[int]:
    deadline = time.monotonic() + 10.0
    while len(_pids(journal)) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return _pids(journal)


def _assert_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + 5.0
    while any(map(_alive, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.01)


def _clients() -> list[str]:
    """Command lines of our ssh children that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"\nPPid:\t{os.getpid()}\n" in (folder / "status").read_text(errors="replace"):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                found += [str(words)] if b"-T" in words else []
    return found


@contextlib.contextmanager
def _silent_port() -> Iterator[int]:
    """A server that takes connections and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def _closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


# There and back


def test_here_and_there_the_same_document(ssh: sshd.Server) -> None:
    request = {"deadline_s": 4.0, "paths": ["/a b/'c'", '"$HOME"', "`id`", "ü\n"], "gpus": None}
    here, there = _at(None).ask("probe", request, 10.0), _at().ask("probe", request, 10.0)
    assert here.document == there.document
    assert _said(here) == {
        "script": "probe",
        "request": request,
        "isolated": 1,
        "locale": "C",
        "python": sys.executable,
        "sudo": None,
    }
    assert (here.partial, there.partial) == (None, None)
    assert 0 < here.seconds < 10.0
    assert (Reach().name, Reach("alice@node7").name) == ("this machine", "alice@node7")


@pytest.mark.parametrize("script", ["probe", "stop", "copies"])
def test_the_script_asked_for(script: remote.Script) -> None:
    assert _said(Reach().ask(script, {}, 10.0))["script"] == script


def test_the_scripts_that_ship(ssh: sshd.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each starts under `python3 -I -` here and there, and speaks of the same machine."""
    monkeypatch.setattr(remote, "SCRIPTS", SHIPPED)
    here, there = (_said(_at(host).ask("probe", {"parts": ["host"]}, 20.0)) for host in (None, "node7"))
    assert here["boot_id"] == there["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert here["host"] == there["host"] == os.uname().nodename
    for host in (None, "node7"):
        assert _said(_at(host).ask("stop", {"plan": {}}, 20.0))["refused"]
        assert _said(_at(host).ask("copies", {"gpus": [], "bytes": 4096}, 20.0))["pairs"] == []


def test_the_connection_is_kept(ssh: sshd.Server, sockets: Path) -> None:
    before = ssh.connections()
    cold = _at().ask("probe", {}, 10.0).seconds
    (master,) = (sockets / "draftproof").iterdir()
    warm = min(_at().ask("probe", {}, 10.0).seconds for _ in range(3))
    assert ssh.connections() == before + 1
    assert master.is_socket()
    assert (sockets / "draftproof").stat().st_mode & 0o777 == 0o700
    assert warm < cold / 2


def test_one_address_two_machines(ssh: sshd.Server) -> None:
    """Hosts of two sites may have address, port and user in common; ssh's own name for a connection is made of these alone."""
    ssh.alias("site-a", 'environment="STUB_SUDO=a"')
    ssh.alias("site-b", 'environment="STUB_SUDO=b"')
    answers = [_said(_at(host).ask("probe", {}, 10.0))["sudo"] for host in ("site-a", "site-b", "site-a")]
    assert answers == ["a", "b", "a"]


def test_through_a_jump_host(ssh: sshd.Server) -> None:
    """The jump host's ssh is a child of the one that goes; the open connection needs it to stay."""
    ssh.alias("far", host_config="ProxyJump node7")
    before = ssh.connections()
    for _ in range(3):
        assert _said(_at("far").ask("probe", {}, 10.0))["script"] == "probe"
    assert ssh.connections() == before + 2


def test_the_users_configuration_does_not_get_in_the_way(ssh: sshd.Server) -> None:
    with _silent_port() as taken:
        ssh.alias(
            "busy", host_config=f"RemoteCommand echo hello\nRequestTTY force\nLocalForward {taken} 127.0.0.1:1\nExitOnForwardFailure yes"
        )
        assert _said(_at("busy").ask("probe", {}, 10.0))["script"] == "probe"


def test_a_python_with_an_awkward_name(ssh: sshd.Server, tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s $(touch pwned) "python" `x` ü'
    folder.mkdir()
    (folder / "python3").write_text(f'#!/bin/sh\nSTUB_SUDO=awkward exec {sys.executable} "$@"\n')
    (folder / "python3").chmod(0o755)
    assert _said(Reach("node7", python=str(folder / "python3")).ask("probe", {}, 10.0))["sudo"] == "awkward"
    assert not (ssh.home / "pwned").exists()


# Noise


def test_a_login_script_that_prints(ssh: sshd.Server, tmp_path: Path) -> None:
    """Before, without an end of line, and after."""
    banner = tmp_path / "banner.sh"
    banner.write_text("echo Welcome; printf '{\"schema\": 1} Last login: '\ntrap 'echo; echo Goodbye' EXIT\n")
    ssh.alias("loud", f'command=". {banner}; eval \\"$SSH_ORIGINAL_COMMAND\\""')
    assert _said(_at("loud").ask("probe", {"a": 1}, 10.0))["request"] == {"a": 1}


def test_a_login_script_that_ends_the_session(ssh: sshd.Server) -> None:
    ssh.alias("closed", 'command="echo; echo This account is closed.; exit 3"')
    with pytest.raises(Unreachable) as raised:
        _at("closed").ask("probe", {}, 10.0)
    assert raised.value.what == "It answered with exit code 3 and no document; the first line was 'This account is closed'."
    assert "login script" in raised.value.remedy


def test_much_on_stderr(ssh: sshd.Server) -> None:
    """More than a pipe holds: it would block if nobody read it."""
    request = {"first": "sys.stderr.write('x' * 2**22)"}
    for host in (None, "node7"):
        assert _said(_at(host).ask("probe", request, 20.0))["script"] == "probe"


@pytest.mark.parametrize("host", [None, "node7"])
def test_a_whole_document_is_enough(ssh: sshd.Server, journal: Path, host: str | None) -> None:
    """What the script forgets behind itself, here a child with stdout open, keeps an ssh session up for ever."""
    request = {"then": "os.fork() or time.sleep(3)", "journal": str(journal)}
    started = time.monotonic()
    assert _said(_at(host).ask("probe", request, 10.0))["script"] == "probe"
    assert time.monotonic() - started < 2.5
    assert _clients() == []


# What ssh refuses


def _refusal(host: str, **more: Any) -> Unreachable:
    started = time.monotonic()
    with pytest.raises(Unreachable) as raised:
        _at(host, **more).ask("probe", {}, 10.0)
    assert time.monotonic() - started < 9.0
    error = raised.value
    assert (error.exit_code, error.status, error.where) == (4, "unknown", host)
    assert isinstance(error, Undecided)
    return error


def test_an_unknown_host_key(ssh: sshd.Server, tmp_path: Path) -> None:
    empty = tmp_path / "known_hosts"
    ssh.alias("stranger", host_config=f"UserKnownHostsFile {empty}")
    before = ssh.connections()
    error = _refusal("stranger")
    assert error.what == "ssh: Host key verification failed"
    assert "not known here: connect once by hand with `ssh stranger`" in error.remedy
    assert not empty.exists()
    assert ssh.connections() == before


def test_a_changed_host_key(ssh: sshd.Server, tmp_path: Path) -> None:
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    key = " ".join(other.with_suffix(".pub").read_text().split()[:2])
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{ssh.port} {key}\n")
    ssh.alias("changed", host_config=f"UserKnownHostsFile {known}")
    before = ssh.connections()
    assert "is another than last time: find out why" in _refusal("changed").remedy
    assert ssh.connections() == before


def test_no_key_is_accepted(ssh: sshd.Server) -> None:
    ssh.alias("nokey", accepted=False)
    error = _refusal("nokey")
    assert error.what.endswith("Permission denied (publickey)")
    assert "`ssh -o BatchMode=yes nokey true`" in error.remedy


def test_nobody_listens(ssh: sshd.Server) -> None:
    port = _closed_port()
    ssh.alias("down", host_config=f"Port {port}")
    error = _refusal("down")
    assert error.what == f"ssh: connect to host 127.0.0.1 port {port}: Connection refused"
    assert "No ssh server listens there" in error.remedy


def test_a_name_that_nobody_knows(ssh: sshd.Server) -> None:
    ssh.alias("misspelt", host_config="HostName nosuch.invalid")
    error = _refusal("misspelt")
    assert "Could not resolve hostname nosuch.invalid" in error.what
    assert "HostName" in error.remedy


def test_a_server_that_says_nothing(ssh: sshd.Server) -> None:
    with _silent_port() as port:
        ssh.alias("silent", host_config=f"Port {port}")
        error = _refusal("silent", connect_s=1.0)
    assert "timed out" in error.what
    assert "It does not answer on the network" in error.remedy


def test_a_server_that_hangs_up(ssh: sshd.Server) -> None:
    ssh.alias("rude", host_config="ProxyCommand echo SSH-2.0-Rude")
    assert "It hung up" in _refusal("rude").remedy


def test_a_broken_configuration(ssh: sshd.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bin"
    broken.mkdir()
    (tmp_path / "config").write_text("Host *\n  Prot 22\n")
    (broken / "ssh").write_text(f'#!/bin/sh\nexec {ssh.ssh} -F {tmp_path}/config "$@"\n')
    (broken / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken}:{os.environ['PATH']}")
    assert "Mend your ssh config" in _refusal("node7").remedy


def test_no_ssh_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sockets: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(sockets))
    monkeypatch.setenv("PATH", str(tmp_path))
    error = _refusal("node7")
    assert error.what == "A program is missing here: ssh: No such file or directory."
    assert "openssh-client" in error.remedy


# What the far side refuses


def test_no_python_there(ssh: sshd.Server, tmp_path: Path) -> None:
    error = _refusal("node7", python="/opt/nowhere/python3")
    assert error.what.startswith("There is no /opt/nowhere/python3 there: ")
    assert "Python 3.9 or newer" in error.remedy
    (tmp_path / "python3").write_text("")
    assert _refusal("node7", python=str(tmp_path / "python3")).what.startswith(f"{tmp_path}/python3 cannot be run there: ")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        # As said by 2.7.18, 3.6.15, and 3.8.18 for `x: dict[str, int]` at run time.
        ("Unknown option: -I\nusage: python [option] ... [-c cmd | -m mod | file | -] [arg] ...", 2),
        ('  File "<stdin>", line 26\nSyntaxError: future feature annotations is not defined', 1),
        ("Traceback (most recent call last):\n  File \"<stdin>\", line 1, in <module>\nTypeError: 'type' object is not subscriptable", 1),
    ],
)
def test_an_old_python(ssh: sshd.Server, tmp_path: Path, words: str, code: int) -> None:
    (tmp_path / "words").write_text(f"{words}\n")
    (tmp_path / "python3").write_text(f"#!/bin/sh\ncat {tmp_path}/words >&2\nexit {code}\n")
    (tmp_path / "python3").chmod(0o755)
    error = _refusal("node7", python=str(tmp_path / "python3"))
    assert error.what == f"{tmp_path}/python3 is too old there: {words.splitlines()[-1].rstrip('.')}"
    assert error.remedy == "Python 3.9 or newer is needed: give the path of one."


@pytest.mark.parametrize("host", [None, "node7"])
def test_a_script_that_does_not_answer(ssh: sshd.Server, host: str | None) -> None:
    def failure(first: str) -> str:
        with pytest.raises(Unreachable) as raised:
            _at(host).ask("probe", {"first": first}, 10.0)
        return raised.value.what

    assert failure("sys.exit(3)") == "It answered with exit code 3 and no document."
    assert failure("sys.exit(0)") == "It answered with exit code 0 and no document."
    assert failure("raise KeyError('gpus')") == "The script failed there: KeyError: 'gpus'"
    assert failure(f"print({BEGIN.decode()!r}); print('{{'); sys.exit(1)").startswith("It answered with exit code 1 and no document")
    killed = failure("os.kill(os.getpid(), 9)")
    assert killed == "The script was killed by SIGKILL." if host is None else "or the script was killed there" in killed


def test_a_shell_that_reports_the_death(ssh: sshd.Server) -> None:
    ssh.alias("wrapped", 'command="sh -c \\"$SSH_ORIGINAL_COMMAND\\"; exit $?"')
    with pytest.raises(Unreachable, match=r"The script was killed by SIGKILL\."):
        _at("wrapped").ask("probe", {"first": "os.kill(os.getpid(), 9)"}, 10.0)


@pytest.mark.parametrize("host", [None, "node7"])
def test_endless_output(ssh: sshd.Server, journal: Path, host: str | None) -> None:
    """It is given up once there are 64 MiB of it, and does not go on."""
    request = {"first": "while True: print('yes' * 2**16)", "journal": str(journal)}
    with pytest.raises(Unreachable) as raised:
        _at(host).ask("probe", request, 30.0)
    assert raised.value.what.startswith("It printed more than 64 MiB, beginning with 'yesyes")
    assert len(raised.value.what) < 400
    _assert_ended(_pids(journal))
    assert _clients() == []


def test_words_of_others_stay_on_one_line(ssh: sshd.Server) -> None:
    """A terminal would obey them."""
    with pytest.raises(Unreachable) as raised:
        _at().ask("probe", {"first": r"print('\x1b[2J\x07gone\x9b1m'); sys.exit(1)"}, 10.0)
    assert raised.value.what.isprintable()
    assert "gone" in raised.value.what


# Time


def test_a_hang_here(journal: Path) -> None:
    """The script and what it started are killed."""
    request = {"first": "os.fork(); open(request['journal'], 'a').write(f'{os.getpid()}\\n'); " + HANG, "journal": str(journal)}
    started = time.monotonic()
    with pytest.raises(Unreachable, match=r"No answer within 1 s\."):
        Reach().ask("probe", request, 1.0)
    assert 1.0 <= time.monotonic() - started < 2.0
    assert len(set(_pids(journal))) == 2
    _assert_ended(_pids(journal))


def test_a_hang_there(ssh: sshd.Server, journal: Path) -> None:
    """Whatever the far side does, we are back in time, and no ssh of ours waits on. The next question is answered."""
    _at().ask("probe", {}, 10.0)
    request = {"first": f"print('stuck', file=sys.stderr, flush=True); {HANG}", "journal": str(journal)}
    started = time.monotonic()
    with pytest.raises(Unreachable) as raised:
        _at().ask("probe", request, 1.0)
    assert 1.0 <= time.monotonic() - started < 2.0
    assert raised.value.what == "No answer within 1 s; it said 'stuck'."
    assert raised.value.remedy == "Try `ssh node7 true` by hand."
    assert _clients() == []
    assert _said(_at().ask("probe", {}, 10.0))["script"] == "probe"


def test_several_machines_one_dead(ssh: sshd.Server) -> None:
    """The others answer, in order, in the time of the slowest."""
    slow = {"slow": "time.sleep(1.0)"}
    with _silent_port() as port:
        ssh.alias("dead", host_config=f"Port {port}")
        ssh.alias("slow")
        ssh.alias("refused", host_config=f"Port {_closed_port()}")
        reaches = [_at("node7"), _at("dead", connect_s=2.0), _at("slow"), _at("refused"), _at(None)]
        started = time.monotonic()
        answers = ask_all(reaches, "probe", lambda reach: {"name": reach.name, "first": slow.get(reach.name, "")}, 8.0)
        seconds = time.monotonic() - started
    for i in (0, 2, 4):
        assert _said(answers[i])["request"]["name"] == reaches[i].name
    assert [isinstance(answer, Unreachable) for answer in answers] == [False, True, False, True, False]
    assert [str(answers[i].where) for i in (1, 3) if isinstance(answers[i], Unreachable)] == ["dead", "refused"]
    assert isinstance(answers[0], Answer)
    assert answers[0].seconds < 1.5
    assert 2.0 <= seconds < 4.0  # one after the other: 2 s + 1 s + the rest; the dead one alone takes 2 s


def test_no_machines() -> None:
    assert ask_all([], "probe", lambda _: {}, 1.0) == []


def test_several_machines_bad_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(remote.ROOTS_VARIABLE, "{")
    (answer,) = ask_all([Reach()], "probe", lambda _: {}, 10.0)
    assert isinstance(answer, UsageError)


_ASKER = """
import sys
from pathlib import Path
from draftproof.machine import remote

remote.SCRIPTS = Path(sys.argv[1])
reaches = [remote.Reach(), remote.Reach(), remote.Reach("node7", python=sys.executable)]
request = {"journal": sys.argv[2], "first": "time.sleep(120)"}
if sys.argv[3] == "all":
    remote.ask_all(reaches, "probe", lambda _: request, 60.0)
else:
    remote.Reach().ask("probe", request, 60.0)
"""


@pytest.mark.parametrize(("how", "number"), [("all", 3), ("one", 1)])
def test_ctrl_c(ssh: sshd.Server, journal: Path, how: str, number: int) -> None:
    """Ends what runs here at once; on the far side the script has its own deadline."""
    asker = subprocess.Popen([sys.executable, "-c", _ASKER, remote.SCRIPTS, journal, how], stderr=subprocess.PIPE, text=True)
    pids = _await_pids(journal, number)
    children = Path(f"/proc/{asker.pid}/task/{asker.pid}/children").read_text().split()
    here = [pid for pid in pids if f"\nPPid:\t{asker.pid}\n" in Path(f"/proc/{pid}/status").read_text(errors="replace")]
    assert len(here) == min(number, 2)
    asker.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, stderr = asker.communicate(timeout=20.0)
    assert time.monotonic() - started < 3.0
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    _assert_ended([*here, *map(int, children)])


# sudo

_GRANTS = '[ "$1" = -n ] || exit 9\nshift\nSTUB_SUDO=yes exec "$@"\n'


def _sudo(folder: Path, body: str) -> str:
    """A PATH whose sudo is a stub."""
    folder.mkdir()
    (folder / "sudo").write_text(f"#!/bin/sh\n{body}")
    (folder / "sudo").chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_sudo_granted(ssh: sshd.Server, tmp_path: Path) -> None:
    ssh.alias("granted", f'environment="PATH={_sudo(tmp_path / "bin", _GRANTS)}"')
    answer = _at("granted", sudo=True).ask("probe", {"a": 1}, 10.0)
    assert (_said(answer)["sudo"], _said(answer)["locale"], answer.partial) == ("yes", "C", None)
    assert _said(_at("granted").ask("probe", {}, 10.0))["sudo"] is None


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "sudo: a password is required"),
        (2, "Sorry, user alice is not allowed to execute '/usr/bin/python3 -I -' as root on node7."),
        (3, "alice is not in the sudoers file.  This incident will be reported."),
        (4, "sudo-rs: interactive authentication is required"),
    ],
)
def test_sudo_refused(ssh: sshd.Server, tmp_path: Path, journal: Path, number: int, words: str) -> None:
    (tmp_path / "words").write_text(f"{words}\n")
    host = ssh.alias(f"refused{number}", f'environment="PATH={_sudo(tmp_path / "bin", f"cat {tmp_path}/words >&2; exit 1")}"')
    answer = _at(host, sudo=True).ask("probe", {"journal": str(journal)}, 10.0)
    assert _said(answer)["sudo"] is None
    assert answer.partial == f"sudo was refused on {host} ({words.rstrip('.')}), so it was looked at without."
    assert len(_pids(journal)) == 1


def test_no_sudo_there(ssh: sshd.Server, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "env").symlink_to(str(shutil.which("env")))
    ssh.alias("nosudo", f'environment="PATH={tools}"')
    partial = _at("nosudo", sudo=True).ask("probe", {}, 10.0).partial
    assert partial is not None
    assert "sudo was refused on nosudo (env: " in partial
    assert "No such file or directory" in partial


def test_a_failure_under_sudo_is_no_refusal(ssh: sshd.Server, tmp_path: Path, journal: Path) -> None:
    """Asked again without sudo, stop.py would act twice."""
    ssh.alias("root-only", f'environment="PATH={_sudo(tmp_path / "bin", _GRANTS)}"')
    for first in ("sys.exit(1)", "raise ValueError('sudo: no')", "print('=====draftproof-begin====='); sys.exit('sudo: x')"):
        with pytest.raises(Unreachable):
            _at("root-only", sudo=True).ask("stop", {"first": first, "journal": str(journal)}, 10.0)
    assert len(_pids(journal)) == 3


def test_sudo_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root needs none."""
    monkeypatch.setenv("PATH", _sudo(tmp_path / "bin", _GRANTS))
    assert _said(Reach(sudo=True).ask("probe", {}, 10.0))["sudo"] == (None if os.geteuid() == 0 else "yes")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert _said(Reach(sudo=True).ask("probe", {}, 10.0))["sudo"] == "yes"
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = Reach(sudo=True).ask("probe", {}, 10.0)
    assert answer.partial == "sudo was refused on this machine (sudo: No such file or directory), so it was looked at without."


# Names


@pytest.mark.parametrize(
    "host",
    [
        *("", "-oProxyCommand=touch pwned", "alice@-oProxyCommand=x", "-l@node7", "ssh://-oProxyCommand=x@node7", "alice@"),
        *("node7 node8", "node7\n", "node7\t", "node7\0", "node7\x1b[2J", "node\u00a07", "node7;id", "node7|id", "$(id)", "`id`"),
        *("node7&", "a<b", "a>b", "a'b", 'a"b', "a\\b", "{a,b}", "node*", "(x)", "x" * 600),
    ],
)
def test_what_cannot_be_a_host(host: str) -> None:
    with pytest.raises(UsageError, match="cannot be a host"):
        Reach(host)


@pytest.mark.parametrize(
    "host",
    ["node7", "alice@node7", "alice.b@node_7.example.org", "ssh://alice@node7:2222", "10.0.0.5", "fe80::1%eth0", "::1", "DOM\\alice@node7"],
)
def test_what_can_be_a_host(host: str) -> None:
    assert Reach(host).name == host


@pytest.mark.parametrize("python", ["", "-c", "python3\n", "LD_PRELOAD=x", "a\0b"])
def test_what_cannot_be_a_python(python: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a Python"):
        Reach("node7", python=python)


def test_a_request_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux would say "Argument list too long"; just below the limit all is well, over ssh too."""
    noise = [os.urandom(32).hex() for _ in range(4000)]
    with pytest.raises(UsageError, match="The request is too long to hand over"):
        Reach().ask("stop", {"noise": noise}, 10.0)


def test_a_long_request(ssh: sshd.Server) -> None:
    noise = [os.urandom(32).hex() for _ in range(2300)]
    assert 100_000 < len(remote._encode({"noise": noise})) <= remote.MOST_REQUEST
    assert _said(_at().ask("stop", {"noise": noise}, 10.0))["request"]["noise"] == noise


# The folder of sockets


def _refused_folder(server: sshd.Server, folder: Path) -> None:
    before = server.connections()
    with pytest.raises(Unreachable) as raised:
        _at().ask("probe", {}, 10.0)
    assert raised.value.where == str(folder)
    assert "XDG_RUNTIME_DIR" in raised.value.remedy
    assert server.connections() == before


def test_the_folder_is_a_link(ssh: sshd.Server, sockets: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (sockets / "draftproof").symlink_to(tmp_path)
    _refused_folder(ssh, sockets / "draftproof")


def test_the_folder_is_a_file(ssh: sshd.Server, sockets: Path) -> None:
    (sockets / "draftproof").touch(0o600)
    _refused_folder(ssh, sockets / "draftproof")


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o722, 0o1777])
def test_the_folder_is_open_to_others(ssh: sshd.Server, sockets: Path, mode: int) -> None:
    (sockets / "draftproof").mkdir()
    (sockets / "draftproof").chmod(mode)
    _refused_folder(ssh, sockets / "draftproof")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_the_folder_is_anothers(ssh: sshd.Server, sockets: Path) -> None:
    (sockets / "draftproof").mkdir(0o700)
    os.chown(sockets / "draftproof", 12345, 12345)
    _refused_folder(ssh, sockets / "draftproof")


@pytest.fixture
def temporary(ssh: sshd.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of its own, used since there is no XDG_RUNTIME_DIR."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with sshd.socket_folder() as folder:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        yield folder / f"draftproof-{os.getuid()}"
        (folder / f"draftproof-{os.getuid()}").rename(folder / "draftproof")  # where its connections are closed


def test_without_a_runtime_folder(ssh: sshd.Server, temporary: Path) -> None:
    temporary.parent.chmod(0o1777)
    _at().ask("probe", {}, 10.0)
    assert temporary.stat().st_mode & 0o777 == 0o700
    assert [path.is_socket() for path in temporary.iterdir()] == [True]


def test_a_temporary_folder_where_others_may_rename(ssh: sshd.Server, temporary: Path) -> None:
    """Without the sticky bit ours can be moved away and another put in its place."""
    temporary.parent.chmod(0o777)
    _refused_folder(ssh, temporary)


@pytest.mark.parametrize("runtime", ["/nowhere", "/", "{open}"])
def test_a_runtime_folder_that_is_not_ours(
    ssh: sshd.Server, temporary: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime: str
) -> None:
    """After `su` the variable is still the other user's."""
    tmp_path.chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime.format(open=tmp_path))
    _at().ask("probe", {}, 10.0)
    assert len(list(temporary.iterdir())) == 1


def test_a_folder_with_a_long_name(ssh: sshd.Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A socket's path is short by law of the system. Then nothing is shared, and all goes on."""
    folder = tmp_path / ("long" * 20)
    folder.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    before = ssh.connections()
    for _ in range(2):
        _at().ask("probe", {}, 10.0)
    assert ssh.connections() == before + 2
    assert list(folder.iterdir()) == []


# DRAFTPROOF_PROBE_ROOTS


def test_roots(ssh: sshd.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each script gets those it knows; stop.py, which acts, none."""
    monkeypatch.setenv(remote.ROOTS_VARIABLE, '{"nvml": "/opt/nvml.so", "cuda": "/opt/cuda.so", "proc": "/tmp/proc"}')
    request = {"roots": {"nvml": "libnvidia-ml.so.1", "sys": "/sys"}, "a": 1}
    for host in (None, "node7"):
        assert _said(_at(host).ask("probe", request, 10.0))["request"] == {
            "roots": {"nvml": "/opt/nvml.so", "sys": "/sys", "proc": "/tmp/proc"},
            "a": 1,
        }
        assert _said(_at(host).ask("copies", {}, 10.0))["request"] == {"roots": {"cuda": "/opt/cuda.so"}}
        assert _said(_at(host).ask("stop", request, 10.0))["request"] == request
    assert request["roots"] == {"nvml": "libnvidia-ml.so.1", "sys": "/sys"}
    monkeypatch.setenv(remote.ROOTS_VARIABLE, "")
    assert _said(Reach().ask("probe", request, 10.0))["request"] == request


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("/opt/nvml.so", "It is not JSON"),
        ("[]", "not an object"),
        ('{"nvlm": "/x"}', "There is no root 'nvlm'; there are cuda, dev, nvml, proc, records, shm, sys."),
        ('{"nvml": 3}', "The root 'nvml' is not a path: 3."),
        ('{"nvml": ""}', "The root 'nvml' is not a path: ''."),
        ('{"nvml": null}', "The root 'nvml' is not a path: None."),
    ],
)
def test_roots_that_cannot_be_meant(monkeypatch: pytest.MonkeyPatch, value: str, what: str) -> None:
    monkeypatch.setenv(remote.ROOTS_VARIABLE, value)
    with pytest.raises(UsageError) as raised:
        Reach("node7").ask("probe", {}, 10.0)
    assert what in raised.value.what
    assert raised.value.where == remote.ROOTS_VARIABLE
