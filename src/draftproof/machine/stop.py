"""Carries out the plan of one host: stops its units, ends its processes, and touches nothing else.

    python3 -I - REQUEST < stop.py    REQUEST: urlsafe base64 of zlib of {"plan": {...}, "roots": {...}, "kill_wait_s": 3.0}

One file, standard library only, Python 3.9 or newer: it is piped over ssh to machines on which nothing is installed.
It prints one line of JSON between two sentinel lines and exits 0; `refused` says why nothing at all was done. It ends
within twice the plan's deadline, `kill_wait_s` and 15 s.

Why a recycled pid cannot be hit. A pidfd stands for a process, a pid for whoever has the number now. So the pidfd is
opened first; then start time and uid are read under the number; then the pidfd is polled. If its process still lives,
the number was its own all the while, and what was read is true of it. Every signal goes through the pidfd. What stays
open: two processes that had one number *and* started in the same clock tick (10 ms), the first of which was planned in
between, look the same.

Children that a target bore since `made` (by this machine's clock) are ended with it. One that bears all the time is
held by SIGSTOP while they are looked for: the child of a parent that has died is nobody's.

SIGTERM and SIGINT end the waiting, not the answer: no KILL is sent after them, and every outcome is said. A connection
that is lost changes nothing: the plan was given, so it is carried out.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import math
import os
import pwd
import re
import resource
import select
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

BEGIN, END = "=====draftproof-begin=====", "=====draftproof-end====="
MOST_BYTES = 8 * 2**20
MOST_PID = 2**22
LOOK_EVERY_S = 0.1
FREEZE_S = 2.0
CLIENT_S = 4.0
"""What `systemctl` and `docker` get beyond the deadline, and again to say how a unit is."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
KERNEL_THREAD = 0x00200000

SYSTEM_PROGRAMS = ("nvidia-persiste", "nv-hostengine", "Xorg", "Xwayland", "dbus", "systemd", "sshd")
SYSTEM_UNITS = re.compile(
    r"(?:sshd?|dbus(?:-.*)?|systemd-.*|init|user|session-c?\d+|cron(?:d|ie)?|slurm.*|docker|containerd|podman|kubelet|k3s.*|crio|getty"
    r"|display-manager|greetd|(?:g|k|lx|sd|x|light)dm3?|nvidia-.*)(?:@.*)?\.(?:service|scope|socket)"
)
UNIT_NAME = re.compile(r"[A-Za-z0-9_:.\\][A-Za-z0-9_:.\\@-]*\.(?:service|scope)")
CONTAINER_ID = re.compile(r"[0-9a-f]{12,64}")


def main(argv: Sequence[str]) -> int:
    """Carry out the request and print the document. 0 if it was printed, 1 if nobody took it."""
    began = time.monotonic()
    interrupted: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: interrupted.append(received))
    signal.signal(signal.SIGHUP, lambda *_: None)
    with contextlib.suppress(OSError, ValueError):  # a pidfd for each target
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    document: dict[str, Any] = {"schema": 1, "refused": None, "units": [], "outcomes": []}
    try:
        job = read_job(argv)
    except Refusal as refusal:
        document["refused"] = str(refusal)
    else:
        document["units"], document["outcomes"] = apply(job, interrupted)
    document["seconds"] = round(time.monotonic() - began, 3)
    unsaid = f"{BEGIN}\n{json.dumps(document)}\n{END}\n".encode()
    try:
        while unsaid:
            unsaid = unsaid[os.write(1, unsaid) :]
    except OSError:  # the reader is gone
        return 1
    return 0


def apply(job: Job, interrupted: Sequence[int] = ()) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Units first, then TERM to all, one shared deadline, KILL to the rest. Returns `units` and `outcomes` of the document.

    Anything in `interrupted` ends the waiting, and forbids KILL.
    """
    found = [recognise(target, job) for target in job.plan["targets"]]
    try:
        units = stop_units(job, found, interrupted)
        end_processes(job, found, interrupted)
    finally:
        for one in found:
            if one.pidfd >= 0:
                os.close(one.pidfd)
    return units, [one.said() for one in found]


def end_processes(job: Job, found: list[Found], interrupted: Sequence[int]) -> None:
    """Ends what has no outcome yet, and adds the children born since to `found`. Afterwards all have an outcome."""
    if not interrupted:
        gather(job, found, freeze=False)
        for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped process acts on TERM only once it goes on
            for one in living(found):
                one.send(number)
        watch(job, found, job.plan["deadline_s"], "terminated", signal.SIGTERM, interrupted)
    if interrupted:
        for one in living(found):
            one.settle("survives", f"interrupted: {'TERM was sent, KILL was not' if one.signalled else 'nothing was sent'}")
    if living(found):
        gather(job, found, freeze=True)
        for path in job.plan["cgroups"]:
            kill_whole(job.cgroup + path, found)
        for one in living(found):
            one.send(signal.SIGKILL)
        watch(job, found, job.kill_wait_s, "killed", signal.SIGKILL, ())
    for one in living(found):
        one.settle("survives", f"KILL has been pending for {job.kill_wait_s:g} s; {stuck(job, one.pid)}")


def watch(job: Job, found: list[Found], seconds: float, outcome: str, number: int, interrupted: Sequence[int]) -> None:
    """Waits for the ends of all, at most so long; children that are born meanwhile get the same signal."""
    until, look_at = time.monotonic() + seconds, 0.0
    while waiting := {one.pidfd: one for one in living(found)}:
        poll = select.poll()
        for pidfd in waiting:
            poll.register(pidfd, select.POLLIN)
        for pidfd, _ in poll.poll(1000 * max(0.0, min(LOOK_EVERY_S, until - time.monotonic()))):
            waiting[pidfd].settle(outcome, zombie(job, waiting[pidfd]))
        now = time.monotonic()
        if now >= until or interrupted:
            return
        if now >= look_at:
            if born := gather(job, found, freeze=False):
                for child in born:
                    child.send(number)
                for one in living(found):
                    one.send(signal.SIGCONT)
            # On a machine with many processes a look takes a while: a tenth of the time at most goes there.
            look_at = time.monotonic() + max(LOOK_EVERY_S, 10 * (time.monotonic() - now))


# Who is a target


@dataclass
class Found:
    """A process that the plan names, or a child of one, and what became of it."""

    pid: int
    uid: int
    start_ticks: int
    unit: int | None = None
    """Which of the plan's units it belongs to."""
    born_of: int | None = None
    pidfd: int = -1
    signalled: bool = False
    outcome: str | None = None
    detail: str = ""
    seconds: float = 0.0
    since: float = field(default_factory=time.monotonic)

    def settle(self, outcome: str, detail: str) -> None:
        self.outcome, self.detail, self.seconds = outcome, detail, time.monotonic() - self.since

    def send(self, number: int) -> None:
        """Signals the process of the pidfd, whoever has its number by now."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
            self.signalled = True
        except ProcessLookupError:
            pass  # it has ended, as the next poll says
        except OSError as error:  # EPERM, by a security module too
            self.settle("forbidden", f"the kernel did not take the signal: {error.strerror}")

    def said(self) -> dict[str, Any]:
        born = f"born of {self.born_of} since the plan" if self.born_of is not None else ""
        detail = "; ".join(filter(None, (born, self.detail)))
        return {"pid": self.pid, "outcome": self.outcome, "detail": plain(detail), "seconds": round(self.seconds, 3)}


def living(found: Sequence[Found]) -> list[Found]:
    """Those whose outcome is still open."""
    return [one for one in found if one.outcome is None]


def recognise(target: dict[str, Any], job: Job) -> Found:
    """The planned process with its pidfd if it is still the same and may be ended; else it has an outcome already."""
    one = Found(target["pid"], target["uid"], target["start_ticks"], unit_of(target, job.plan["units"]))
    try:
        one.pidfd = os.pidfd_open(one.pid)
    except OSError as error:
        if isinstance(error, ProcessLookupError):
            one.settle("gone", "no process has this number")
        elif error.errno in (errno.EINVAL, errno.ENOENT):
            one.settle("changed", "the number is that of a thread now")
        else:
            one.settle("survives", f"not signalled: {error.strerror}")
        return one
    seen = see(job.proc, one.pid)
    over = ended(one.pidfd)  # after the look, see the top of this file
    if seen is None:
        one.settle(*("gone", "it ended while it was looked at") if over else ("forbidden", "it cannot be looked at in /proc"))
    elif seen.start_ticks != one.start_ticks:
        one.settle("changed", "another process has this number now")
    elif over:
        one.settle("gone", zombie(job, one) or "it ended while it was looked at")
    elif seen.uid != one.uid:
        one.settle("changed", f"it belongs to uid {seen.uid} now, to {one.uid} in the plan")
    elif why := protection(seen, job):
        one.settle("protected", why)
    elif not same_command(target["command"], seen.command):
        one.settle("changed", "it runs another command now")
    elif one.unit is None:
        check_owner(one, job)
    elif not in_unit(cgroups_of(job.proc, one.pid), job.plan["units"][one.unit]):
        one.settle("changed", f"it is no longer in {target['unit']}")
    return one


def check_owner(one: Found, job: Job) -> None:
    """For what is to be signalled. Who may stop a unit is for systemd or docker to say."""
    if not job.plan["any_user"] and one.uid != job.plan["uid"]:
        one.settle("forbidden", f"it belongs to uid {one.uid}, the plan to uid {job.plan['uid']}, and it is not for any user")


def protection(seen: Seen, job: Job) -> str | None:
    """Why a process is never ended, if it is one of those."""
    if seen.pid in job.keep_pids:
        return "it is this very process" if seen.pid == os.getpid() else "this runs below it"
    if seen.kernel:
        return "it is a thread of the kernel"
    if seen.exe.startswith(SYSTEM_PROGRAMS) or never_stopped(seen.comm, seen.uid):
        return f"it is a service of the system, {seen.exe or seen.comm}"
    return None


def never_stopped(name: str, uid: int | None = None) -> bool:
    """Whether a process (`comm`, and whose) or a unit (no uid) of this name serves the whole machine."""
    return bool(SYSTEM_UNITS.fullmatch(name)) if uid is None else uid == 0 and name.startswith(SYSTEM_PROGRAMS)


def same_command(planned: str, now: str) -> bool:
    """Whether a command line is the one of the plan, as `probe.py` writes it: secrets are ***, the end is cut off by an ellipsis."""
    cut = len(planned) == 300 and planned.endswith("…")
    start, *parts = (planned[:-1].rstrip("*") if cut else planned).split("***")
    if not now or not now.startswith(start):
        return not now  # its first thread has ended, others live: nothing to compare
    at = len(start)
    for part in parts:
        place = now.find(part, at)
        if place < 0:
            return False
        at = place + len(part)
    return cut or (now.endswith(parts[-1]) if parts else at == len(now))


def newborn(job: Job, found: list[Found]) -> list[Found]:
    """Adds to `found`, and returns, the children of living targets that were born since the plan, of the same uid; theirs too."""
    added: list[Found] = []
    for _ in range(8):  # generations at a time; what bears faster than this is held by `gather`
        parents = {one.pid: one for one in living(found)}
        known = {one.pid for one in found if one.outcome in (None, "protected", "forbidden", "left", "survives")}
        fresh = [child for pid in numbers(job.proc) if pid not in known and (child := child_of(parents, pid, job))] if parents else []
        if not fresh:
            break
        found += fresh
        added += fresh
    return added


def child_of(parents: dict[int, Found], pid: int, job: Job) -> Found | None:
    """The process with this number if it is a child, born since the plan, of one of these."""
    glance = stat_of(job.proc, pid)
    if glance is None or glance.ppid not in parents:
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    seen, parent = see(job.proc, pid), parents[glance.ppid]
    if (
        seen is not None
        and (seen.ppid, seen.uid) == (parent.pid, parent.uid)
        and time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + (seen.start_ticks + 1) * TICK_S >= job.made
        and protection(seen, job) is None
        and not ended(pidfd)
        and not ended(parent.pidfd)  # it lives, so the number that was seen as the parent's is its own
    ):
        return Found(pid, seen.uid, seen.start_ticks, born_of=parent.pid, pidfd=pidfd)
    os.close(pidfd)
    return None


def gather(job: Job, found: list[Found], *, freeze: bool) -> list[Found]:
    """`newborn`; where there are any, or with `freeze`, all are held by SIGSTOP until all stand still and no new one is found."""
    until = time.monotonic() + FREEZE_S
    added = newborn(job, found)
    quiet = not added and not freeze
    while not quiet and time.monotonic() < until:
        for one in living(found):
            one.send(signal.SIGSTOP)
        moving = living(found)
        held_by = time.monotonic() + LOOK_EVERY_S
        while moving and time.monotonic() < held_by:
            time.sleep(0.001)
            moving = [one for one in moving if moves(job, one, still="TtZX")]
        fresh = newborn(job, found)
        added += fresh
        quiet = not fresh and not any(moves(job, one, still="TtZXD") for one in moving)  # one in state D may stay so for ever
    return added


def moves(job: Job, one: Found, *, still: str) -> bool:
    """Whether a process lives and has a thread in none of these states."""
    return not ended(one.pidfd) and not set(threads(job.proc, one.pid).values()) <= set(still)


def kill_whole(folder: str, found: Sequence[Found]) -> None:
    """The kernel kills a whole control group at once, with children born this moment. Only if all its members are targets."""
    members: set[int] = set()
    with contextlib.suppress(OSError, ValueError):  # no cgroup.kill before Linux 5.14: each is killed by itself
        for place, _, _ in os.walk(folder):
            with open(os.path.join(place, "cgroup.procs"), "rb") as stream:
                members.update(map(int, stream.read().split()))
        if members and members <= {one.pid for one in living(found) if not ended(one.pidfd)}:
            with open(os.path.join(folder, "cgroup.kill"), "wb", buffering=0) as stream:
                stream.write(b"1")


# Units


def stop_units(job: Job, found: list[Found], interrupted: Sequence[int]) -> list[dict[str, Any]]:
    """Stops the plan's units, all at the same time. A process of one that is not inactive afterwards is settled, not signalled."""
    units = job.plan["units"]

    def stop(unit: dict[str, Any]) -> tuple[str, str]:
        members = [one for one in found if one.unit is not None and units[one.unit] is unit]
        if interrupted:
            return "left", "interrupted"
        return reason_to_keep(unit, members, job) or stop_unit(unit, living(members)[0].uid, job, interrupted)

    with ThreadPoolExecutor(len(units) or 1) as pool:
        ends = list(pool.map(stop, units))
    for one in living(found):
        if one.unit is None:
            continue
        name, (end, detail) = units[one.unit]["name"], ends[one.unit]
        if ended(one.pidfd):
            one.settle("terminated", "; ".join(filter(None, (f"with its unit {name}", zombie(job, one)))))
        elif end != "stopped":
            one.settle(end, f"{name}: {detail}")
        else:
            check_owner(one, job)
    said = [{"name": unit["name"], "scope": unit["scope"]} for unit in units]
    return [{**unit, "stopped": end == "stopped", "detail": detail} for unit, (end, detail) in zip(said, ends)]  # noqa: B905  (3.10)


def reason_to_keep(unit: dict[str, Any], members: Sequence[Found], job: Job) -> tuple[str, str] | None:
    """Why a unit is not to be stopped: the outcome of its processes, and a sentence."""
    if never_stopped(unit["name"]):
        return "protected", "a unit of this kind is never stopped"
    if in_unit(job.keep_cgroups, unit) or any(within(path, unit["cgroup"]) for path in job.keep_cgroups):
        return "protected", "this runs inside it"
    if any(one.outcome == "protected" for one in members):
        return "left", "one of its processes is protected"
    if not living(members):
        return "left", "none of the processes that the plan names in it is there any more"
    return None


def stop_unit(unit: dict[str, Any], owner: int, job: Job, interrupted: Sequence[int]) -> tuple[str, str]:
    """Stop one unit and ask how it is: "stopped" or "left", and a sentence."""
    tool, name, deadline = unit["scope"], unit["name"], job.plan["deadline_s"]
    question, dead = "is-active", {"inactive", "failed", "unknown"}
    if tool in ("system", "user"):
        client = ["systemctl"] if tool == "system" else ["systemctl", "--user"]
        if tool == "user" and owner != os.getuid():
            try:
                client.append(f"--machine={pwd.getpwuid(owner).pw_name}@.host")
            except KeyError:  # without it, a unit of ours would be stopped
                return "left", f"uid {owner} has no name, so its manager cannot be asked"
        stop = [*client, "stop", "--no-ask-password", "--job-mode=replace", "--", name]
        ask = [*client, "is-active", "--", name]
    else:
        stop = [tool, "stop", "--time", str(max(1, int(deadline))), name]
        ask = [tool, "inspect", "--format", "{{.State.Running}}", name]
        question, dead = "running", {"false"}
    said, state = run(stop, deadline + CLIENT_S, interrupted)[:1], "".join(run(ask, CLIENT_S, ())[-1:])
    if state in dead or (question == "running" and "no such" in state.lower()):
        return "stopped", f"{question}: {state}"
    return "left", "; ".join([f"{question}: {state or 'no answer'}", *(f"stop: {line}" for line in said)])


def run(command: Sequence[str], seconds: float, interrupted: Sequence[int]) -> list[str]:
    """The lines that a command printed, or why there are none. It has no terminal and no input, so it cannot ask."""
    environment = {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **os.environ, "LC_ALL": "C"}
    try:
        with open(os.memfd_create("output"), "r+b") as output:  # a pipe would be held open by a forgotten grandchild
            child = subprocess.Popen(  # noqa: S603  (a list of words, no shell)
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
            until = time.monotonic() + seconds
            while child.poll() is None:
                if time.monotonic() >= until or interrupted:
                    os.killpg(child.pid, signal.SIGKILL)  # not reaped, so the number is still its own
                    child.wait()
                    return ["interrupted" if interrupted else f"no answer within {seconds:g} s"]
                time.sleep(0.01)
            lines = os.pread(output.fileno(), 2**16, 0).decode(errors="replace").split("\n")
            return [plain(line)[:300] for line in lines if plain(line)]
    except OSError as error:
        return [f"{command[0]}: {error.strerror}"]


def plain(text: str) -> str:
    """Without what would move a terminal's cursor or change its colours: programs and users choose these words."""
    return "".join(filter(str.isprintable, text)).strip()


def in_unit(paths: frozenset[str], unit: dict[str, Any]) -> bool:
    """Whether one of these control groups is the unit's, or below it."""
    if unit["scope"] in ("docker", "podman"):
        return any(unit["name"][:12] in path for path in paths)
    return any(
        found
        and ("/user@" in above) == (unit["scope"] == "user")
        and (unit["cgroup"] is None or within(unit["cgroup"], above + found[:-1]))
        for above, found, _ in ((path + "/").partition(f"/{unit['name']}/") for path in paths)
    )


def unit_of(target: dict[str, Any], units: Sequence[dict[str, Any]]) -> int | None:
    """Which unit a target means. Two users may have units of one name: the control group tells them apart."""
    fits = [index for index, unit in enumerate(units) if unit["name"] == target["unit"]]
    return next((index for index in fits if in_unit(frozenset([target["cgroup"] or ""]), units[index])), fits[0] if fits else None)


def within(path: str, folder: str | None) -> bool:
    """Whether a control group is this one or below it."""
    return folder is not None and (path + "/").startswith(folder.rstrip("/") + "/")


# /proc


@dataclass(frozen=True)
class Seen:
    """What /proc says under a number, for whoever has it at that moment."""

    pid: int
    comm: str
    state: str
    ppid: int
    kernel: bool
    start_ticks: int
    uid: int = -1
    exe: str = ""
    """Name of the program's file; empty where it cannot be seen."""
    command: str = ""


def see(proc: str, pid: int) -> Seen | None:
    """All of it; None where it is gone or hidden."""
    seen = stat_of(proc, pid)
    uid = re.search(rb"^Uid:\s+(\d+)", read(f"{proc}/{pid}/status") or b"", re.MULTILINE)
    command = read(f"{proc}/{pid}/cmdline")
    if seen is None or uid is None or command is None:
        return None
    exe = ""
    with contextlib.suppress(OSError):  # only root sees other users'
        exe = os.path.basename(os.readlink(f"{proc}/{pid}/exe"))
    words = command[:4096].rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")  # as much as the probe reads
    return replace(seen, uid=int(uid[1]), exe=exe, command=words)


def stat_of(proc: str, pid: int | str) -> Seen | None:
    """What its `stat` says: the rest stays empty."""
    text = read(f"{proc}/{pid}/stat")
    if not text:
        return None
    number, _, rest = text.partition(b" (")
    comm, _, rest = rest.rpartition(b") ")  # the name may hold anything, brackets too
    words = rest.decode().split()
    kernel = bool(int(words[6]) & KERNEL_THREAD)
    return Seen(int(number), comm.decode(errors="replace"), words[0], int(words[1]), kernel, int(words[19]))


def read(path: str) -> bytes | None:
    """A file of /proc; None where there is none to be had."""
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError:  # it is gone, or not for our eyes
        return None


def numbers(folder: str) -> list[int]:
    """The processes of /proc, or the threads of a process."""
    return [int(name) for name in os.listdir(folder) if name.isdigit()]


def threads(proc: str, pid: int) -> dict[int, str]:
    """The state of each thread: the first one may have ended while others live and hold the memory."""
    with contextlib.suppress(OSError):
        seen = {thread: stat_of(proc, f"{pid}/task/{thread}") for thread in numbers(f"{proc}/{pid}/task")}
        return {thread: stat.state for thread, stat in seen.items() if stat is not None}
    return {}


def stuck(job: Job, pid: int) -> str:
    """What a process hangs on that KILL does not end."""
    states = threads(job.proc, pid)
    worst = min(states, key=lambda thread: states[thread] != "D", default=pid)
    state = states.get(worst, "unknown")
    wchan = (read(f"{job.proc}/{pid}/task/{worst}/wchan") or b"unknown").decode(errors="replace")
    return f"state {state}{' (uninterruptible)' if state == 'D' else ''}, wchan {wchan}"


def zombie(job: Job, one: Found) -> str:
    """A sentence if that is what is left of it."""
    seen = stat_of(job.proc, one.pid)
    if seen is not None and seen.start_ticks == one.start_ticks and seen.state in "ZX":
        return f"a zombie: it holds nothing, but its parent {seen.ppid} has not taken note of its end"
    return ""


def ended(pidfd: int) -> bool:
    """Whether all threads of a process have ended; a zombie has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def cgroups_of(proc: str, pid: int) -> frozenset[str]:
    """Its control groups: of version 2, and of version 1 the one that systemd keeps."""
    lines = (read(f"{proc}/{pid}/cgroup") or b"").decode(errors="replace").splitlines()
    return frozenset(line.split(":", 2)[2] for line in lines if line.startswith("0::") or ":name=systemd:" in line)


# The request


class Refusal(Exception):
    """Why nothing at all is done."""


@dataclass(frozen=True)
class Job:
    """A plan that is sound and meant for this machine, and what is never touched."""

    plan: dict[str, Any]
    made: float
    proc: str
    cgroup: str
    kill_wait_s: float
    keep_pids: frozenset[int]
    keep_cgroups: frozenset[str]
    """Those that this runs in: its own and its ancestors'."""


def read_job(argv: Sequence[str]) -> Job:
    """Raises Refusal unless the request is whole, its plan of this machine as it is now, and pidfds are to be had."""
    try:
        request = unpack(argv)
        plan = need(request.get("plan"), "The plan")
        check_shape(plan)
        body = {key: value for key, value in plan.items() if key != "hash"}
        digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()).hexdigest()
        made = datetime.fromisoformat(plan["made"].replace("Z", "+00:00"))
    except (ValueError, RecursionError, zlib.error) as error:
        raise Refusal(f"The request cannot be read: {str(error)[:200]}.") from None
    if digest != plan["hash"]:
        raise Refusal("The plan is not what its hash says: it was changed after it was made.")
    roots = {"proc": "/proc", "cgroup": "/sys/fs/cgroup", **need(request.get("roots", {}), "The request's roots")}
    wait = request.get("kill_wait_s", 3.0)
    usable = all(type(path) is str and path.isprintable() for path in roots.values())
    if not usable or type(wait) not in (int, float) or not 0 <= wait <= 60 or made.tzinfo is None:
        raise Refusal("The roots, kill_wait_s or the time of the plan (it needs a time zone) cannot be meant.")
    check_place(plan, roots["proc"])
    return make_job(plan, made.timestamp(), roots["proc"], roots["cgroup"], wait)


def make_job(plan: dict[str, Any], made: float, proc: str, cgroup: str, kill_wait_s: float) -> Job:
    """A job that spares the processes from which this runs: a shell, an ssh session, init; and the units around them.

    Not their sessions: a worker that outlived its server is in that of the shell from which it was started, often this one.
    """
    above: dict[int, Seen] = {}
    pid = os.getpid()
    while pid > 0 and pid not in above and (seen := stat_of(proc, pid)):
        above[pid] = seen
        pid = seen.ppid
    groups = frozenset(path for pid in above if pid > 1 for path in cgroups_of(proc, pid))
    return Job(plan, made, proc, cgroup, kill_wait_s, frozenset(above) | {1}, groups)


def unpack(argv: Sequence[str]) -> dict[str, Any]:
    """The request from the command line. Raises Refusal or ValueError for whatever could be read in two ways."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise Refusal("The request names a key twice.")
        return dict(pairs)

    def finite(text: str) -> float:
        if not math.isfinite(float(text)):
            raise Refusal("The request holds a number that is not finite.")
        return float(text)

    def whole(digits: str) -> int:
        if len(digits) > 20:
            raise Refusal("The request holds a number that is too long.")
        return int(digits)

    if len(argv) != 1:
        raise Refusal("There is no plan: this takes one argument, the request.")
    inflating = zlib.decompressobj()
    text = inflating.decompress(base64.b64decode(argv[0].encode(), b"-_", validate=True), MOST_BYTES)
    if not inflating.eof:
        raise Refusal("The request is cut off or too long.")
    return need(json.loads(text, object_pairs_hook=once, parse_int=whole, parse_float=finite, parse_constant=finite), "The request")


def need(thing: Any, what: str, **kinds: type | tuple[type, ...]) -> dict[str, Any]:
    """`thing` if it is an object with these keys of exactly these types. Raises Refusal else."""
    if type(thing) is not dict:
        raise Refusal(f"{what} is missing or not an object.")
    for key, kind in kinds.items():
        if key not in thing or type(thing[key]) not in (kind if isinstance(kind, tuple) else (kind,)):
            raise Refusal(f"{what} has no usable {key!r}.")
    return thing


def check_shape(plan: dict[str, Any]) -> None:
    """Raises Refusal unless each value has its type and range."""
    text = (str, type(None))
    if type(plan.get("version")) is not int or plan["version"] != 1:
        raise Refusal(f"The plan has version {str(plan.get('version'))[:20]}; this carries out version 1.")
    need(plan, "The plan", host=str, address=text, boot_id=str, pid_namespace=(int, type(None)), made=str, uid=int, any_user=bool)
    need(plan, "The plan", gpus=list, deadline_s=(int, float), units=list, cgroups=list, targets=list, left=list, hash=str)
    if not 0 <= plan["deadline_s"] <= 3600:
        raise Refusal("The plan's deadline_s is not between 0 and 3,600.")
    for path in plan["cgroups"]:
        if type(path) is not str or not path.isprintable() or not re.fullmatch(r"(?:/[^/]+)+", path) or {".", ".."} & {*path.split("/")}:
            raise Refusal("The plan names a control group that cannot be one.")
    for unit in plan["units"]:
        need(unit, "A unit of the plan", name=str, scope=str, cgroup=text, why=str)
        named = {"system": UNIT_NAME, "user": UNIT_NAME, "docker": CONTAINER_ID, "podman": CONTAINER_ID}.get(unit["scope"])
        if named is None or not named.fullmatch(unit["name"]):
            raise Refusal("The plan names a unit that cannot be one.")
    for target in plan["targets"]:
        need(target, "A target of the plan", pid=int, start_ticks=int, uid=int, command=str, cgroup=text, unit=text, kind=str, why=str)
        if not (2 <= target["pid"] <= MOST_PID and 0 <= target["uid"] < 2**32 and 0 <= target["start_ticks"] < 2**63):
            raise Refusal("The plan names a process by numbers that none can have.")
        if target["unit"] is not None and unit_of(target, plan["units"]) is None:
            raise Refusal("The plan names a process of a unit that is not in the plan.")
    if len({target["pid"] for target in plan["targets"]}) != len(plan["targets"]):
        raise Refusal("The plan names a process twice.")


def check_place(plan: dict[str, Any], proc: str) -> None:
    """Raises Refusal unless the plan's pids mean the same here and now, and pidfds are to be had."""
    try:
        boot_id = (read(f"{proc}/sys/kernel/random/boot_id") or b"").decode().strip()
        namespace = os.stat(f"{proc}/self/ns/pid").st_ino
        own = os.path.basename(os.path.realpath(f"{proc}/self"))
    except (OSError, ValueError):
        raise Refusal(f"There is no usable {proc} here.") from None
    if plan["host"] != os.uname().nodename:
        raise Refusal(f"The plan is for {plan['host'][:100]!r}, this is {os.uname().nodename!r}.")
    if plan["boot_id"] != boot_id:
        raise Refusal("The machine was started anew since the plan was made.")
    if plan["pid_namespace"] != namespace:
        raise Refusal("The plan was made in another pid namespace: its numbers mean other processes here.")
    if own != str(os.getpid()):
        raise Refusal(f"{proc} shows another pid namespace than the one this runs in.")
    bare = "and a signal to a bare pid could hit another process"
    try:
        pidfd = os.pidfd_open(os.getpid())
        signal.pidfd_send_signal(pidfd, 0)
        os.close(pidfd)
    except AttributeError:
        raise Refusal(f"This Python knows no pidfd, {bare}: use one that does (3.9 or newer).") from None
    except OSError as error:
        raise Refusal(f"This kernel gives no pidfd ({error.strerror}), {bare}.") from None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
