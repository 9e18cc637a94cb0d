"""A child that starts children of its own: none of them may outlive the call, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from draftproof.errors import DraftproofError
from draftproof.machine import supervised
from draftproof.machine.supervised import first_error, run_supervised

ENGINE = """
import os, signal, subprocess, sys, time
pids, how = sys.argv[1], sys.argv[2]
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"
worker = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, start_new_session=how == "leave session")
worker.stdout.readline()
open(pids, "w").write(f"{os.getpid()} {worker.pid}")
if how.startswith("leave"): sys.exit(0)
if how == "fail": raise ValueError("no room for the cache")
time.sleep(300)
"""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "GRACE_S", 0.5)


def _run(tmp_path: Path, how: str, timeout_s: float = 60) -> None:
    command = [sys.executable, "-c", ENGINE, str(tmp_path / "pids"), how]
    run_supervised(command, env=os.environ, log=tmp_path / "log", timeout_s=timeout_s, what="The engine")


def _gone(tmp_path: Path) -> bool:
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_a_child_that_leaves_a_worker_behind(tmp_path: Path) -> None:
    _run(tmp_path, "leave")
    assert _gone(tmp_path)


def test_a_worker_that_left_the_session_is_known_by_the_token(tmp_path: Path) -> None:
    _run(tmp_path, "leave session")
    assert _gone(tmp_path)


def test_the_record_lasts_as_long_as_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    old = tmp_path / "state/draftproof/engines/old.json"
    old.parent.mkdir(parents=True)
    old.write_text('{"boot_id": "an earlier one"}')
    look = (
        "import os, pathlib, sys; files = list(pathlib.Path(sys.argv[1]).glob('*.json')); "
        "print(len(files), os.environ['DRAFTPROOF_ENGINE'] in files[0].name)"
    )
    log = tmp_path / "log"
    run_supervised([sys.executable, "-c", look, str(old.parent)], env=os.environ, log=log, timeout_s=60, what="The engine")
    assert log.read_text() == "1 True\n"
    assert not list(old.parent.iterdir())


def test_a_child_that_fails(tmp_path: Path) -> None:
    with pytest.raises(DraftproofError, match="The engine failed: ValueError: no room for the cache"):
        _run(tmp_path, "fail")
    assert _gone(tmp_path)


def test_a_child_that_takes_too_long(tmp_path: Path) -> None:
    with pytest.raises(DraftproofError, match="did not finish within 2 s"):
        _run(tmp_path, "stay", timeout_s=2)
    assert _gone(tmp_path)


def test_ctrl_c(tmp_path: Path) -> None:
    """SIGINT to this process alone: the child has a session of its own and does not get it."""
    script = f"import os\nfrom pathlib import Path\nfrom draftproof.machine import supervised\nsupervised.GRACE_S = 0.5\n_E = {ENGINE!r}\n"
    script += "import sys\nsupervised.run_supervised([sys.executable, '-c', _E, sys.argv[1] + '/pids', 'stay'], env=os.environ, "
    script += "log=Path(sys.argv[1], 'log'), timeout_s=60, what='The engine')"
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stderr=subprocess.PIPE)
    _wait_for(tmp_path / "pids")
    parent.send_signal(2)
    _, errors = parent.communicate(timeout=30)
    assert b"KeyboardInterrupt" in errors
    assert _gone(tmp_path)


def test_a_parent_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL leaves the parent no chance: the child sees it and ends its session, the stubborn worker included."""
    child = (
        "from draftproof.machine import supervised; import os, sys; supervised.GRACE_S = 0.5; supervised.end_with_parent(os.getppid())\n"
    )
    script = (
        "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2], 'stay'], start_new_session=True)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script + "time.sleep(300)", child + ENGINE, str(tmp_path / "pids")])
    _wait_for(tmp_path / "pids")
    assert not _gone(tmp_path)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while not _gone(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _gone(tmp_path)


def test_the_first_real_error_of_an_engine_log(tmp_path: Path) -> None:
    """Written by hand in the form of vLLM 0.32: the cause stands first, the front end's own complaint last."""
    log = tmp_path / "log"
    log.write_text(
        "INFO 12-01 07:00:00 [utils.py:233] non-default args\n"
        "(MainProcess pid=9) WARNING 12-01 07:00:01 [base.py:380] Traceback (most recent call last):\n"
        "(MainProcess pid=9) WARNING 12-01 07:00:01 [base.py:380] ValueError: Tokenizer not available\n"
        "(EngineCore pid=12) ERROR 12-01 07:00:09 [core.py:1133] EngineCore failed to start.\n"
        "(EngineCore pid=12) ERROR 12-01 07:00:09 [core.py:1133] Traceback (most recent call last):\n"
        '(EngineCore pid=12) ERROR 12-01 07:00:09 [core.py:1133]   File "core.py", line 1, in run\n'
        "(EngineCore pid=12) ERROR 12-01 07:00:09 [core.py:1133]     raise ValueError()\n"
        "(EngineCore pid=12) ERROR 12-01 07:00:09 [core.py:1133] ValueError: there is no parameter named 'extra'\n"
        "Traceback (most recent call last):\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert first_error(log) == "ValueError: there is no parameter named 'extra'"


def test_a_log_without_a_traceback_gives_its_error_line_or_its_last(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("INFO 12-01 07:00:00 [a.py:1] starting\n/bin/python: error: no such option\ngoodbye\n")
    assert first_error(log) == "/bin/python: error: no such option"
    log.write_text("Killed\n\n")
    assert first_error(log) == "Killed"
    log.write_text("")
    assert first_error(log) == "it wrote nothing"


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not (path.exists() and len(path.read_text().split()) == 2):
        assert time.monotonic() < deadline, "the child did not start"
        time.sleep(0.05)
