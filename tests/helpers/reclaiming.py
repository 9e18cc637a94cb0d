"""Plays scenes of held GPUs: sets one up, lets a tool at it, and judges what became of everybody. The scenes: `scenarios.py`.

    row = play(live_holder, by_draftproof, folder)
    row.faults                                          # sentences; none: all right

Nothing that the tool says of its own success counts. Who lives is read from /proc by number and start time, and what is in
use is asked of the fake library without the project's probe.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import psutil

import sshd
from draftproof.check import check
from draftproof.errors import DraftproofError
from draftproof.machine.apply import apply_all
from draftproof.machine.holders import Kind
from draftproof.machine.look import Needs
from draftproof.machine.reclaim import ReclaimPlan, Selection, draw, load_plan
from draftproof.machine.remote import Reach
from fake_gpus import MIB, FakeGpus, control_group, ended, wait_for

GPUS = 9
WANTED = tuple(range(8))
"""These are to be given back; the last one is somebody else's and was not asked for."""
NOBODY = 65534
GRACE_S = 0.5
SETTLE_S = 0.3
"""After a tool: until all that it signalled have ended, and supervisors have started theirs again. Measured: below 0.05 s."""
STUBS = Path(__file__).resolve().parents[1] / "machine" / "stubs"
SCRIPT = Path(sys.executable).with_name("draftproof")


@dataclass(frozen=True)
class Scene:
    """What must come of what was set up. Whoever is in neither `must_end` nor `may_end` must live, the crowd above all."""

    named: Mapping[int | None, Kind]
    """All who hold wanted GPUs: pid (None: memory without a process) and kind. `check` and the plan must say just these."""
    must_end: Collection[int] = ()
    may_end: Collection[int] = ()
    blocker: str | None = None
    """A pattern that one of the sentences about what is left must hold. None: the memory must come back."""
    never_said: str | None = None
    """A pattern that none of them may hold."""
    selection: Selection = field(default_factory=lambda: wanted())
    meanwhile: Callable[[], object] = lambda: None
    """What happens between the plan and its being carried out."""
    asked: Asked = field(default_factory=lambda: AsLibrary(Reach()))


Build = Callable[["Host"], Scene]


def wanted(**changes: Any) -> Selection:
    """What is asked for."""
    return Selection(gpus=WANTED, grace_s=GRACE_S, **changes)


class Host:
    """Nine GPUs, and the crowd that must survive in every scene: a monitor with all devices open, a process called like an
    engine's core and one of Python, both without a GPU, another user's process, and a holder of the GPU that is not wanted.

    `quiet`: the clean twin. What a scene sets up is there, with the same names, parents and control groups, and without any GPU.
    """

    def __init__(self, gpus: FakeGpus, stack: contextlib.ExitStack, *, quiet: bool = False) -> None:
        self.gpus, self.stack, self.quiet = gpus, stack, quiet
        self.crowd = [
            gpus.exporter(range(GPUS)),
            gpus.bystander("VLLM::EngineCor"),
            gpus.bystander("python3", arguments=["tokenise.py"]),
            gpus.bystander("python3", uid=NOBODY, arguments=["notebook.py"]),
            gpus.holder([GPUS - 1], 40_000, name="VLLM::Worker_TP0"),
        ]

    @property
    def holder(self) -> Callable[..., int]:
        return self._of(self.gpus.holder)

    @property
    def forked(self) -> Callable[..., tuple[int, int]]:
        return self._of(self.gpus.forked)

    @property
    def orphan(self) -> Callable[..., tuple[int, int]]:
        return self._of(self.gpus.orphan)

    @property
    def respawner(self) -> Callable[..., tuple[int, int]]:
        return self._of(self.gpus.respawner)

    @property
    def engine(self) -> Callable[..., list[int]]:
        return self._of(self.gpus.engine)

    def unowned(self, gpu: int, mib: int) -> None:
        """Memory that the driver holds for nobody."""
        if not self.quiet:
            self.gpus.say(f"unowned {gpu} {mib * MIB}")

    def listed(self, gpu: int, pid: int, mib: int) -> None:
        """NVML lists a number with memory, whatever it is, until a process ends that no tool can know of."""
        if not self.quiet:
            number, start = identity(self.gpus.bystander("driver"))
            self.gpus.say(f"hold {gpu} {pid} {mib * MIB} compute {number}:{start}")

    def group(self, name: str) -> Path:
        """A control group of this name below system.slice."""
        return self.stack.enter_context(control_group(f"system.slice/{name}"))

    def unit(self, name: str, behaviour: str, *pids: int, state: str = "active") -> None:
        """A unit, or container, that the stubs of `systemctl` and `docker` know: see there."""
        stub = self.gpus.folder / "stub"
        stub.mkdir()
        (stub / name).write_text(behaviour)
        (stub / f"{name}.state").write_text(f"{state}\n")
        (stub / f"{name}.pids").write_text(" ".join(map(str, pids)))
        self.set(STUB=str(stub), PATH=f"{STUBS}:{os.environ['PATH']}")

    def set(self, **variables: str) -> None:
        """Environment for whatever is asked in this scene."""
        self.stack.enter_context(patch.dict(os.environ, variables))

    def _of(self, start: Callable[..., Any]) -> Callable[..., Any]:
        if not self.quiet:
            return start
        return lambda gpus, mib, **options: start([], None, **{**options, "uvm": False, "control": False})


# A scene, played


@dataclass(frozen=True)
class Said:
    """What a tool told."""

    seconds: float
    checked: dict[str, Any] | None = None
    """The document of `draftproof check`."""
    planned: Mapping[int | None, str] | None = None
    """Whom the plan names, and as what."""
    left: Sequence[str] = ()
    """Sentences about what is still held."""


Tool = Callable[["Host", Scene], Said]


@dataclass(frozen=True)
class Row:
    """How a scene went with a tool."""

    scenario: str
    named_right: bool | None
    """None: this tool names nobody."""
    wrong: tuple[str, ...]
    """The processes that it harmed and must not have."""
    back: bool
    """Nothing is in use on the wanted GPUs any more."""
    told: bool
    """What holds them is said by name, in a scene that demands it."""
    seconds: float
    """Of planning and carrying out."""
    faults: tuple[str, ...]
    """All that is not as it must be, in sentences; for draftproof alone."""


def play(build: Build, tool: Tool, folder: Path) -> Row:
    """Set a scene up, let a tool at it, and see what it did. Everything is gone afterwards, whatever happened."""
    with contextlib.ExitStack() as stack, FakeGpus(folder, count=GPUS) as gpus:  # processes end before their control groups
        host = _host(gpus, stack)
        scene = build(host)
        before: dict[tuple[int, int], str] = {}

        def meanwhile() -> None:
            scene.meanwhile()
            before.update({identity(pid): described(pid) for pid in gpus.alive()})

        said = tool(host, replace(scene, meanwhile=meanwhile))
        time.sleep(SETTLE_S)
        ends = {*scene.must_end, *scene.may_end}
        wrong = tuple(words for one, words in before.items() if one[0] not in ends and harmed(one, words))
        used = gpus.used_mib(WANTED)
        if said.checked is None:
            return Row(title(build), None, wrong, used == 0, False, round(said.seconds, 2), ())
        right = blocking(said.checked) == scene.named == said.planned
        told = scene.blocker is not None and _is_said(scene.blocker, said)
        return Row(title(build), right, wrong, used == 0, told, round(said.seconds, 2), tuple(_faults(scene, said, used, wrong)))


def false_alarms(build: Build, folder: Path) -> list[str]:
    """The clean twin of a scene: what `check` has to say against it, in sentences."""
    with contextlib.ExitStack() as stack, FakeGpus(folder, count=GPUS) as gpus:
        scene = build(_host(gpus, stack, quiet=True))
        document = scene.asked.check()
        # gpu.driver warns: the torch of these tests is built for a CPU.
        judged = [found for found in document["findings"] if found["check"].startswith("gpu.") and found["check"] != "gpu.driver"]
        assert len(judged) == 6, "the six checks of GPUs were not all made"
        return [f"{found['check']}: {found['evidence']}" for found in judged if found["status"] != "pass"]


def title(build: Build) -> str:
    """A scene's name, for tables."""
    return getattr(build, "__name__", "?").replace("_", " ")


def _host(gpus: FakeGpus, stack: contextlib.ExitStack, *, quiet: bool = False) -> Host:
    stack.enter_context(patch.dict(os.environ, {**gpus.environment, "XDG_STATE_HOME": str(gpus.folder / "state")}))
    return Host(gpus, stack, quiet=quiet)


def _is_said(pattern: str, said: Said) -> bool:
    return any(re.search(pattern, line) for line in said.left)


def _faults(scene: Scene, said: Said, used_mib: int, wrong: Collection[str]) -> list[str]:
    """Everything that is not as it must be."""
    assert said.checked is not None
    faults = [f"`check` passes {name}" for name in ("gpu.holders", "gpu.memory") if status(said.checked, name) != "fail"]
    if blocking(said.checked) != scene.named:
        faults.append(f"`check` names {blocking(said.checked)}, not {dict(scene.named)}")
    if said.planned != scene.named:
        faults.append(f"the plan names {said.planned}, not {dict(scene.named)}")
    faults += [f"pid {pid} lives" for pid in scene.must_end if not ended(pid)]
    faults += [f"harmed: {one}" for one in wrong]
    if scene.blocker is None:
        faults += [f"{used_mib:,} MiB are still in use"] if used_mib else []
        faults += [f"said to be left: {line}" for line in said.left]
    elif not _is_said(scene.blocker, said):
        faults.append(f"/{scene.blocker}/ is not said, but {list(said.left)}")
    if scene.never_said is not None and _is_said(scene.never_said, said):
        faults.append(f"/{scene.never_said}/ is said: {list(said.left)}")
    return faults


def blocking(document: Mapping[str, Any]) -> dict[int | None, str]:
    """Whom `check --json` names as in the way, and as what."""
    holders = [holder for host in document["hosts"] for gpu in host["gpus"] for holder in gpu["holders"]]
    return {holder["pid"]: holder["kind"] for holder in holders if holder["blocking"]}


def status(document: Mapping[str, Any], name: str) -> str:
    """The verdict of one check."""
    return next(str(found["status"]) for found in document["findings"] if found["check"] == name)


# Processes


def identity(pid: int) -> tuple[int, int]:
    """A process by number and start time: the number alone may be another's later."""
    return pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def described(pid: int) -> str:
    """For a fault: who that was, and whether it stood still."""
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    words = " ".join([command[0], *command[3:]]).strip()  # without -IS and the program of the fake
    return f"pid {pid} {words}{', stopped' if state == 'T' else ''}"


def harmed(one: tuple[int, int], before: str) -> bool:
    """Whether a process has ended, is another one now, or was left standing still."""
    try:
        return ended(one[0]) or identity(one[0]) != one or described(one[0]) != before
    except OSError:
        return True


# Tools


def by_draftproof(host: Host, scene: Scene) -> Said:
    """Check, plan, carry out."""
    checked = scene.asked.check()
    began = time.monotonic()
    plan = scene.asked.plan(scene.selection)
    seconds = time.monotonic() - began
    scene.meanwhile()
    began = time.monotonic()
    left = scene.asked.apply(plan)
    seconds += time.monotonic() - began
    (one,) = plan.hosts
    named: dict[int | None, str] = {target.pid: target.kind for target in one.targets if target.mib}
    return Said(seconds, checked, named | {rest.pid: rest.kind for rest in one.left}, left)


def by_fuser(host: Host, scene: Scene) -> Said:
    """`fuser -k /dev/nvidia*`, which is what people type."""
    return _fuser(scene, sorted(host.gpus.dev.glob("nvidia*")))


def by_careful_fuser(host: Host, scene: Scene) -> Said:
    """The same on the device files of the wanted GPUs alone."""
    return _fuser(scene, [host.gpus.dev / f"nvidia{gpu}" for gpu in WANTED])


def by_name(host: Host, scene: Scene) -> Said:
    """What `pkill -9 -f 'VLLM|python'` does, to this scene's processes alone."""
    scene.meanwhile()
    began = time.monotonic()
    mark = host.gpus.token
    for pid in host.gpus.alive():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.environ().get("DRAFTPROOF_FAKE") == mark and re.search("VLLM|python", " ".join(process.cmdline())):
                process.kill()
    return Said(time.monotonic() - began)


def _fuser(scene: Scene, files: Sequence[Path]) -> Said:
    scene.meanwhile()
    began = time.monotonic()
    subprocess.run(["fuser", "-k", *files], check=False, capture_output=True)
    return Said(time.monotonic() - began)


TOOLS: dict[str, Tool] = {
    "draftproof": by_draftproof,
    "fuser -k /dev/nvidia*": by_fuser,
    "fuser -k, wanted GPUs": by_careful_fuser,
    "by name": by_name,
}


# Ways to ask draftproof


class Asked(Protocol):
    """The three questions."""

    def check(self) -> dict[str, Any]:
        """The document of `draftproof check --json` for the wanted GPUs."""

    def plan(self, selection: Selection) -> ReclaimPlan:
        """Who would be stopped."""

    def apply(self, plan: ReclaimPlan) -> list[str]:
        """Carry it out; sentences about what is left."""


@dataclass(frozen=True)
class AsLibrary:
    """In this process, about this machine or one behind ssh."""

    reach: Reach

    def check(self) -> dict[str, Any]:
        return check([self.reach], Needs(gpus=WANTED)).document().model_dump(mode="json")

    def plan(self, selection: Selection) -> ReclaimPlan:
        return draw([self.reach], selection)

    def apply(self, plan: ReclaimPlan) -> list[str]:
        (done,) = apply_all(plan, python=self.reach.python)
        if isinstance(done, DraftproofError):
            raise done
        return list(done.blockers)


@dataclass(frozen=True)
class AsScript:
    """The console script, run by this process or, as a notebook would, by a holder that runs a job at SIGUSR1."""

    folder: Path
    above: int | None = None

    @staticmethod
    def job_in(folder: Path) -> Path:
        """What that holder must run."""
        return folder / "job.sh"

    def check(self) -> dict[str, Any]:
        document, _ = self._run("check", "--gpus", f"0-{WANTED[-1]}")
        return document

    def plan(self, selection: Selection) -> ReclaimPlan:
        assert selection == wanted(), "of selections, the script is given the GPUs alone here"
        file = self.folder / "plan.json"
        _, code = self._run("reclaim", "--gpus", f"0-{WANTED[-1]}", "--grace", str(GRACE_S), "--out", str(file))
        assert code == 0
        return load_plan(file)

    def apply(self, plan: ReclaimPlan) -> list[str]:
        document, code = self._run("reclaim", "--apply", str(self.folder / "plan.json"))
        assert (code == 0) is (document["blockers"] == []), "exit code 0 says that nothing is left"
        return list(document["blockers"])

    def _run(self, *words: str) -> tuple[dict[str, Any], int]:
        command = [str(SCRIPT), *words, "--json"]
        if self.above is None:
            ran = subprocess.run(command, capture_output=True, check=False)
            return json.loads(ran.stdout), ran.returncode
        out, code = (self.folder / f"{secrets.token_hex(4)}.{name}" for name in ("out", "code"))
        self.job_in(self.folder).write_text(f"{shlex.join(command)} >{out} 2>/dev/null; echo $? >{code}.new; mv {code}.new {code}\n")
        os.kill(self.above, signal.SIGUSR1)
        wait_for(lambda: code.exists() and not psutil.Process(self.above).children(), 30)
        return json.loads(out.read_text()), int(code.read_text())


def over_ssh(host: Host) -> AsLibrary:
    """By way of a real sshd on loopback, at the end of which stands this machine."""
    server = host.stack.enter_context(sshd.running(host.gpus.folder / "sshd"))
    host.set(PATH=server.path, XDG_RUNTIME_DIR=str(host.stack.enter_context(sshd.socket_folder())))
    return AsLibrary(Reach(server.alias("node7"), python=sys.executable))
