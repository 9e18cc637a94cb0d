"""Scenes of held GPUs: real processes over the fake NVML, with who must be named, who must end, and who must not.

    for scenario in SCENARIOS:
        row = play(scenario, by_draftproof, folder)     # or by_fuser, by_name

GPUs 0 to 2 are the ones that somebody wants back; GPU 3 is not asked for. In every scene stands the same crowd, which
must survive: a monitor that has the devices open, a process named like an engine's worker and one of Python without a GPU,
another user's process, and a holder of GPU 3.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from draftproof.gate.machine import judge
from draftproof.machine.apply import apply
from draftproof.machine.look import QUICK, Look, Needs, look_at
from draftproof.machine.reclaim import Selection, plan_host
from draftproof.machine.records import recorded
from draftproof.machine.remote import Reach
from fake_gpus import FakeGpus, control_group, ended, wait_for

WANTED = (0, 1, 2)
NOBODY = 65534
STUBS = Path(__file__).resolve().parents[1] / "machine" / "stubs"
GRACE_S = 0.5


@dataclass
class Scene:
    """What stands there, and what must come of it."""

    named: dict[int | None, str]
    """Who holds the wanted GPUs: process id (None: memory without one) and kind."""
    must_end: set[int] = field(default_factory=set)
    may_end: set[int] = field(default_factory=set)
    """Members of what is stopped that need not be named."""
    must_live: set[int] = field(default_factory=set)
    blocker: str | None = None
    """Words that must be said of what is left; None: the memory must come back."""
    selection: Selection = field(default_factory=lambda: Selection(gpus=WANTED, grace_s=GRACE_S))
    meanwhile: Callable[[], None] = lambda: None
    """Happens between the plan and its application."""
    asks: Callable[[], tuple[dict[int | None, str], list[str]]] | None = None
    """Another way to ask than in this process: who was named, and what was left."""


Build = Callable[[FakeGpus, contextlib.ExitStack], Scene]


@dataclass(frozen=True)
class Row:
    """How a scene went."""

    scenario: str
    named_right: bool | None
    """None: this tool names nobody."""
    wrong: int
    """Processes that ended and must not have."""
    freed: bool
    """The memory is back, or (draftproof only) what holds it is said by name, as the scene demands."""
    seconds: float

    @property
    def right(self) -> bool:
        return self.named_right is not False and not self.wrong and self.freed


def live_holder(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    pid = gpus.holder([0], 71_604, name="python3")
    return Scene({pid: "live"}, {pid})


def parent_killed_forked_child_lives(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    _, child = gpus.forked([1], 2566)
    return Scene({child: "forked"}, {child})


def holder_ignores_term(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    pid = gpus.holder([0], 900, ignore_term=True)
    return Scene({pid: "live"}, {pid})


def worker_of_a_killed_front_end(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    """Its port is free, its parent is init."""
    with socket.create_server(("127.0.0.1", 0)):
        pid = gpus.holder([0], 71_604, name="VLLM::Worker_TP0")
    return Scene({pid: "live"}, {pid})


def engine_over_all_wanted_gpus(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    pids = [gpus.holder([index], 71_604, name=f"VLLM::Worker_TP{index}") for index in WANTED]
    return Scene(dict.fromkeys(pids, "live"), set(pids))


def name_without_a_hint(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    """Nothing in its name says Python or vLLM."""
    pid = gpus.holder([2], 40_000, name="ray::Worker")
    return Scene({pid: "live"}, {pid})


def supervisor_bears_it_again(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    supervisor, first = gpus.respawner([0], 900)
    return Scene({first: "live"}, {first}, must_live={supervisor}, blocker=f"plan again with --tree {supervisor}")


def supervisor_and_all_below_it(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    supervisor, first = gpus.respawner([0], 900)
    return Scene({first: "live"}, {supervisor, first}, selection=Selection(gpus=WANTED, trees=(supervisor,), grace_s=GRACE_S))


def service(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    return _service(gpus, stack, "stops", "active")


def worker_left_by_a_stopped_service(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    return _service(gpus, stack, "forgets", "inactive")


def another_users_holder(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    pid = gpus.holder([0], 900, uid=NOBODY)
    return Scene({pid: "other_user"}, must_live={pid}, blocker="Ask its owner")


def another_users_holder_and_root_says_so(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    pid = gpus.holder([0], 900, uid=NOBODY)
    return Scene({pid: "other_user"}, {pid}, selection=Selection(gpus=WANTED, any_user=True, grace_s=GRACE_S))


def memory_without_an_owner(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    gpus.say(f"unowned 1 {700 * 2**20}")
    return Scene({None: "driver"}, blocker="no process owns")


def dead_process_still_listed(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    """The driver lists a process that is gone, and nobody has the device open."""
    keeper = gpus.bystander("keeper")
    start = Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[19]
    gone = subprocess.Popen(["true"])
    gone.wait()
    gpus.say(f"hold 1 {gone.pid} {700 * 2**20} compute {keeper}:{start}")
    return Scene({gone.pid: "dead"}, must_live={keeper}, blocker="no process was found that holds them")


def our_own_engine(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    """Known by its record; its front end has no GPU and goes with it."""
    engine = stack.enter_context(recorded("vLLM", run="runs/one"))
    worker = gpus.holder([0], 71_604, name="VLLM::Worker_TP0", env=engine.environment)
    front_end = gpus.bystander("vllm", env=engine.environment)
    return Scene({worker: "ours"}, {worker, front_end})


def stopped_holder(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    """By Ctrl-Z: a TERM alone would wait."""
    pid = gpus.holder([0], 900)
    os.kill(pid, signal.SIGSTOP)
    return Scene({pid: "live"}, {pid})


def holder_in_a_container(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    group = stack.enter_context(control_group(f"system.slice/docker-{'0123456789ab' * 5}cdef.scope"))
    pid = gpus.holder([0], 900, cgroup=group)
    return Scene({pid: "container"}, must_live={pid}, blocker="docker stop")


def holder_above_the_one_who_asks(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    """A shell that holds the GPU runs the command, as a notebook would."""
    script = Path(sys.executable).with_name("draftproof")
    said, plan, done = (gpus.folder / name for name in ("said", "plan", "done"))
    wanted = ",".join(map(str, WANTED))
    commands = (
        f"{script} check --gpus {wanted} --json >{said} 2>/dev/null; {script} reclaim --gpus {wanted} --any-user --out {plan} >/dev/null; "
        f"{script} reclaim --apply {plan} --json >{done} 2>/dev/null; touch {done}.all; sleep 600"
    )
    shell = subprocess.Popen(
        ["bash", "-c", f"exec 5<{gpus.dev}/nvidia0 6<{gpus.dev}/nvidia-uvm; read line; {commands}"],
        stdin=subprocess.PIPE,
        env={**os.environ, "DRAFTPROOF_FAKE": gpus.token},
    )
    start = Path(f"/proc/{shell.pid}/stat").read_text().rpartition(")")[2].split()[19]
    gpus.say(f"hold 0 {shell.pid} {900 * 2**20} compute {shell.pid}:{start}")
    wait_for(lambda: any(os.readlink(fd).endswith("nvidia-uvm") for fd in Path(f"/proc/{shell.pid}/fd").iterdir() if fd.is_symlink()))

    def asks() -> tuple[dict[int | None, str], list[str]]:
        assert shell.stdin is not None
        shell.stdin.write(b"go\n")
        shell.stdin.close()
        wait_for(Path(f"{done}.all").exists, 30)
        held = [holder for gpu in json.loads(said.read_text())["hosts"][0]["gpus"] for holder in gpu["holders"] if holder["blocking"]]
        return {holder["pid"]: holder["kind"] for holder in held}, json.loads(done.read_text())["blockers"]

    stack.callback(lambda: (shell.kill(), shell.wait()))
    return Scene({shell.pid: "self"}, must_live={shell.pid}, blocker="runs below it", asks=asks)


def holder_ended_before_the_plan_is_applied(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    pid = gpus.holder([0], 900)

    def meanwhile() -> None:
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: ended(pid))

    return Scene({pid: "live"}, {pid}, meanwhile=meanwhile)


def holder_replaced_by_another_with_the_same_command(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    pid, scene = gpus.holder([0], 900), Scene({})

    def meanwhile() -> None:
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: ended(pid))
        scene.must_live.add(gpus.holder([0], 900))

    scene.named, scene.must_end, scene.meanwhile, scene.blocker = {pid: "live"}, {pid}, meanwhile, "it was started after the plan"
    return scene


def holder_let_go_before_the_plan_is_applied(gpus: FakeGpus, stack: contextlib.ExitStack) -> Scene:
    """It lives on and holds nothing any more: there is no reason left to stop it."""
    pid = gpus.holder([0], 900)
    return Scene({pid: "live"}, must_live={pid}, meanwhile=lambda: gpus.unsay("hold 0"))


SCENARIOS: tuple[Build, ...] = (
    live_holder,
    parent_killed_forked_child_lives,
    holder_ignores_term,
    worker_of_a_killed_front_end,
    engine_over_all_wanted_gpus,
    name_without_a_hint,
    supervisor_bears_it_again,
    supervisor_and_all_below_it,
    service,
    worker_left_by_a_stopped_service,
    another_users_holder,
    another_users_holder_and_root_says_so,
    memory_without_an_owner,
    dead_process_still_listed,
    our_own_engine,
    stopped_holder,
    holder_in_a_container,
    holder_above_the_one_who_asks,
    holder_ended_before_the_plan_is_applied,
    holder_replaced_by_another_with_the_same_command,
    holder_let_go_before_the_plan_is_applied,
)

Tool = Callable[[FakeGpus, Scene], tuple[bool | None, list[str]]]
"""Takes the wanted GPUs back: whether it named everybody rightly (None: it names nobody), and what it said is left."""


def play(build: Build, tool: Tool, folder: Path) -> Row:
    """Set a scene, let a tool at it, and see what it did."""
    with _machine(folder) as gpus, contextlib.ExitStack() as stack:
        crowd = _crowd(gpus)
        scene = build(gpus, stack)
        began = time.monotonic()
        named, left = tool(gpus, scene)
        seconds = time.monotonic() - began
        wrong = [pid for pid in crowd | scene.must_live if ended(pid)]
        said = scene.blocker is not None and any(scene.blocker in line for line in left)
        back = all(ended(pid) for pid in scene.must_end) and _in_use() == 0
        freed = said and all(ended(pid) for pid in scene.must_end) if tool is by_draftproof and scene.blocker else back
        return Row(build.__name__.replace("_", " "), named, len(wrong), freed, seconds)


def false_alarms(folder: Path) -> list[str]:
    """The clean twin of every scene: the crowd alone. What `check` has to say against it."""
    with _machine(folder) as gpus:
        _crowd(gpus)
        look = look_at([Reach()], Needs(gpus=WANTED))[0]
        wrong = [f"{found.check}: {found.evidence}" for found in judge(look) if found.status in ("fail", "unknown")]
        return wrong + [holder.why for holder in look.blockers]


def by_draftproof(gpus: FakeGpus, scene: Scene) -> tuple[bool | None, list[str]]:
    """Look, plan, apply, verify."""
    if scene.asks is not None:
        named, left = scene.asks()
        return named == scene.named, left
    look = _look()
    named = {holder.pid: holder.kind for holder in look.blockers}
    plan = plan_host(look, scene.selection)
    scene.meanwhile()
    done = apply(plan, Reach())
    return named == scene.named, list(done.blockers)


def by_fuser(gpus: FakeGpus, scene: Scene) -> tuple[bool | None, list[str]]:
    """`fuser -k` on the wanted GPUs' device files alone, which is kinder than the usual `/dev/nvidia*`."""
    scene.meanwhile()
    nodes = [str(gpus.dev / f"nvidia{index}") for index in WANTED]
    subprocess.run(["fuser", "-k", *nodes], check=False, capture_output=True)
    time.sleep(GRACE_S)
    return None, []


def by_name(gpus: FakeGpus, scene: Scene) -> tuple[bool | None, list[str]]:
    """What `pkill -9 -f 'VLLM|python'` would match, of this scene's processes."""
    scene.meanwhile()
    for pid in gpus.alive():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if any(word in " ".join([process.name(), *process.cmdline()[:1]]) for word in ("VLLM", "python")):
                process.kill()
    time.sleep(GRACE_S)
    return None, []


def _look() -> Look:
    return look_at([Reach()], Needs(gpus=WANTED), parts=QUICK, samples=1)[0]


def _in_use() -> int:
    """Bytes on the wanted GPUs."""
    return sum(gpu.memory.used_now for gpu in _look().gpus if gpu.memory is not None)


def _crowd(gpus: FakeGpus) -> set[int]:
    """Who has nothing to do with it."""
    return {
        gpus.exporter([0, 1, 2, 3]),
        gpus.bystander("VLLM::EngineCor"),
        gpus.bystander("python3"),
        gpus.bystander("python3", uid=NOBODY),
        gpus.holder([3], 20_000, name="python3"),
    }


def _service(gpus: FakeGpus, stack: contextlib.ExitStack, behaviour: str, state: str) -> Scene:
    """A systemd unit with Restart=, whose worker holds the GPU."""
    group = stack.enter_context(control_group("system.slice/vllm.service"))
    worker = gpus.holder([0], 71_604, name="VLLM::Worker_TP0", cgroup=group)
    stub = gpus.folder / "stub"
    stub.mkdir()
    (stub / "vllm.service").write_text(behaviour)
    (stub / "vllm.service.state").write_text(f"{state}\n")
    (stub / "vllm.service.pids").write_text(str(worker))
    stack.enter_context(_environment({"PATH": f"{STUBS}:{os.environ['PATH']}", "STUB": str(stub)}))
    return Scene({worker: "live"}, {worker}, selection=Selection(gpus=WANTED, units=("vllm.service",), grace_s=GRACE_S))


@contextlib.contextmanager
def _machine(folder: Path) -> Iterator[FakeGpus]:
    """Four GPUs that every look of this process sees."""
    with FakeGpus(folder, count=4) as gpus, _environment({**gpus.environment, "XDG_STATE_HOME": str(gpus.folder / "state")}):
        yield gpus


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
