"""`draftproof check` and `draftproof reclaim` through the console script: documents, exit codes, hosts, plans."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from draftproof.machine.look import Needs, look_at
from draftproof.machine.remote import Reach
from fake_gpus import FakeGpus, ended, on_this_machine, wait_for
from line import draftproof, end, start, write_job
from sshd import running, socket_folder


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpus]:
    with on_this_machine(tmp_path, monkeypatch, count=4) as fake:
        yield fake


@pytest.fixture
def node7(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A host that ssh knows: this machine, by way of a real sshd."""
    with running(tmp_path / "sshd") as server, socket_folder() as sockets:
        server.alias("node7")
        monkeypatch.setenv("PATH", server.path)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(sockets))
        yield "node7"


def test_a_quiet_machine_passes_and_its_document_fits_the_published_schema(gpus: FakeGpus) -> None:
    schema = draftproof("check", "--schema", "--json").document()["schema"]
    ran = draftproof("check", "--json")
    document = ran.document()
    assert ran.code == 0
    jsonschema.validate({key: document[key] for key in schema["properties"]}, schema)
    assert document["verdict"] == "warn"  # the torch of the tests is a CPU build
    assert [(gpu["index"], gpu["used_mib"], gpu["free_mib"], gpu["total_mib"]) for gpu in document["hosts"][0]["gpus"]] == [
        (index, 0, 97_887 - 615, 97_887) for index in range(4)
    ]
    wrong = {finding["check"] for finding in document["findings"] if finding["status"] != "pass"}
    assert wrong == {"gpu.driver"}


def test_a_holder_is_named_and_the_verdict_is_no(gpus: FakeGpus) -> None:
    pid = gpus.holder([3], 71_604, name="VLLM::Worker_TP3")
    ran = draftproof("check", "--json")
    document = ran.document()
    assert (ran.code, document["verdict"], document["status"]) == (3, "fail", "refused")
    held = document["hosts"][0]["gpus"][3]
    assert (held["used_mib"], held["free_mib"]) == (71_604, 97_887 - 615 - 71_604)
    assert [(holder["pid"], holder["kind"], holder["mib"], holder["blocking"]) for holder in held["holders"]] == [
        (pid, "live", 71_604, True)
    ]
    assert [f["check"] for f in document["findings"] if f["status"] == "fail"] == ["gpu.holders", "gpu.memory"]
    for finding in document["findings"]:
        assert {"check", "status", "host", "evidence", "remedy"} == set(finding)


def test_what_is_printed_for_people_answers_the_question(gpus: FakeGpus) -> None:
    pid = gpus.holder([3], 71_604, name="VLLM::Worker_TP3")
    lines = draftproof("check").stdout.splitlines()
    assert "4 x NVIDIA RTX PRO 6000" in lines[0]
    assert lines[1].split() == ["GPU", "used", "MiB", "free", "MiB", "held", "by"]
    assert [line.split()[:3] for line in lines[2:5]] == [["0", "0", "97,272"], ["1", "0", "97,272"], ["2", "0", "97,272"]]
    assert lines[5].split()[:5] == ["3", "71,604", "25,668", "pid", str(pid)]
    assert any(line.strip() == "-> See what can be stopped: draftproof reclaim --gpus 3" for line in lines)
    assert lines[-1].split()[0] == "FAIL"


def test_only_the_gpus_that_were_asked_for(gpus: FakeGpus) -> None:
    gpus.holder([3], 71_604)
    assert draftproof("check", "--gpus", "0-2").code == 0
    assert draftproof("check", "--gpus", "2,3").code == 3
    ran = draftproof("check", "--gpus", "2-9", "--json")
    assert "GPU 4, 5, 6, 7, 8, 9 is not there; there are 4." in ran.document()["message"]


@pytest.mark.parametrize("text", ["", "x", "3-1", "1,,2", "-1", "0-99999999"])
def test_gpus_that_cannot_be_meant(text: str) -> None:
    ran = draftproof("check", f"--gpus={text}")
    assert ran.code == 2
    assert "Write numbers and ranges" in ran.sentence()


def test_a_hanging_driver_is_unknown_within_the_deadline(gpus: FakeGpus) -> None:
    gpus.say("hang nvmlDeviceGetMemoryInfo_v2 2 600")
    began = time.monotonic()
    ran = draftproof("check", "--json")
    seconds = time.monotonic() - began
    assert ran.code == 4
    found = {finding["check"]: finding for finding in ran.document()["findings"]}
    assert found["gpu.memory"]["status"] == "unknown"
    assert "nvmlDeviceGetMemoryInfo_v2" in found["gpu.memory"]["evidence"]
    assert seconds < 5.5


def test_a_recipe_says_what_is_needed_and_what_is_at_stake(gpus: FakeGpus, tmp_path: Path, tm_folder: Path) -> None:
    recipe = write_job(tmp_path / "job", tm_folder)
    gpus.holder([1], 500)
    free = draftproof("check", recipe, "machine.gpus=[0,2]", "--json")
    assert free.code == 0, free.stderr
    assert free.document()["protects"].startswith("extract: a pass of the target over")
    assert {"storage.bytes", "target.shards", "gpu.holders"} <= {finding["check"] for finding in free.document()["findings"]}
    assert draftproof("check", recipe, "machine.gpus=[0,1]", "--stage", "train").code == 3
    wrong = draftproof("check", recipe, "--stage", "trian")
    assert wrong.code == 2
    assert "This recipe has no stage 'trian'." in wrong.sentence()


def test_a_waiver_of_the_recipe_counts_as_in_a_run(gpus: FakeGpus, tmp_path: Path, tm_folder: Path) -> None:
    recipe = write_job(tmp_path / "job", tm_folder)
    gpus.holder([0], 500)
    held = ("machine.gpus=[0]", "--json")
    assert draftproof("check", recipe, *held).code == 3
    waive = "gates.waive={gpu.holders: bob may stay, gpu.memory: bob may stay}"
    document = draftproof("check", recipe, waive, *held).document()
    assert (document["exit_code"], document["verdict"]) == (0, "warn")
    overruled = [finding for finding in document["findings"] if finding["status"] == "fail"]
    assert [finding["check"] for finding in overruled] == ["gpu.holders", "gpu.memory"]
    assert all(finding["evidence"].endswith("(waived: bob may stay)") for finding in overruled)


def test_hosts_of_a_recipe_are_looked_at_once_and_as_asked(gpus: FakeGpus, node7: str, tmp_path: Path, tm_folder: Path) -> None:
    recipe = write_job(tmp_path / "job", tm_folder)
    hosts = f"machine.hosts=[{node7},{node7}]"
    assert len(draftproof("check", recipe, hosts, "--host", node7, "--json").document()["hosts"]) == 1
    both = draftproof("check", recipe, hosts, "--python", "/nowhere/python3", "--json")
    assert both.code == 4
    unreached = [
        finding for finding in both.document()["findings"] if finding["check"] == "host.reached" and finding["status"] == "unknown"
    ]
    assert [finding["host"] for finding in unreached] == [node7]
    assert "/nowhere/python3" in unreached[0]["evidence"]


def test_a_slow_host_does_not_excuse_the_clocks_of_others(gpus: FakeGpus) -> None:
    here, nowhere = look_at([Reach(), Reach("nowhere.invalid")], Needs())
    assert here.snapshot is not None
    assert here.between[1] - here.between[0] == pytest.approx(here.seconds)
    assert nowhere.error is not None


def test_a_library_that_does_not_load_beside_devices_is_unknown(gpus: FakeGpus) -> None:
    """As after an update of the driver: the devices are there, and nobody can ask them."""
    gpus.library.write_bytes(b"no library")
    ran = draftproof("check", "--json")
    assert ran.code == 4
    found = {finding["check"]: finding for finding in ran.document()["findings"]}
    assert found["gpu.count"]["status"] == "unknown"
    assert "cannot be loaded" in found["gpu.count"]["evidence"]


def test_watching_prints_no_document(gpus: FakeGpus) -> None:
    ran = draftproof("check", "--watch", "1", "--json")
    assert (ran.code, ran.document()["status"]) == (2, "usage")


def test_check_looks_again_until_ctrl_c(gpus: FakeGpus) -> None:
    process = start("check", "--watch", "0.2", "--gpus", "0")
    time.sleep(2.5)
    process.send_signal(signal.SIGINT)
    ran = end(process)
    assert ran.code == 130
    assert ran.stdout.count("GPU  used MiB") >= 2


def test_a_plan_does_nothing_until_it_is_applied(gpus: FakeGpus, tmp_path: Path) -> None:
    worker, crowd = gpus.holder([0, 1], 40_000, ignore_term=True), gpus.exporter([0, 1])
    drawn = draftproof("reclaim", "--gpus", "0", "--grace", "0.3", "--json")
    document = drawn.document()
    assert drawn.code == 0
    assert document["plan"]["hash"]
    assert [target["pid"] for target in document["plan"]["targets"]] == [worker]
    assert not ended(worker)
    assert Path(document["path"]).parent == tmp_path / "state/draftproof/plans"

    done = draftproof("reclaim", "--apply", document["path"], "--json")
    assert done.code == 0, done.stderr
    assert done.document()["freed_mib"] == 40_000  # on GPU 0, which was asked for
    assert done.document()["blockers"] == []
    assert done.document()["hosts"][0]["outcomes"][0]["outcome"] == "killed"
    assert ended(worker)
    assert not ended(crowd)
    again = draftproof("reclaim", "--apply", document["path"], "--json")
    assert again.code == 0
    assert again.document()["freed_mib"] == 0


def test_one_that_is_born_again_is_named_with_who_bears_it(gpus: FakeGpus, tmp_path: Path) -> None:
    supervisor, first = gpus.respawner([2], 900)
    plan = tmp_path / "plan.json"
    draftproof("reclaim", "--out", plan)
    done = draftproof("reclaim", "--apply", plan, "--json")
    assert done.code == 1
    assert ended(first)
    assert not ended(supervisor)
    assert f"plan again with --tree {supervisor}" in done.document()["blockers"][0]
    draftproof("reclaim", "--tree", str(supervisor), "--out", plan)
    assert draftproof("reclaim", "--apply", plan).code == 0
    assert ended(supervisor)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("boot_id", "an earlier one", "The plan is of another boot: an earlier one"),
        ("host", "node9", "The plan is of another host: node9"),
        ("pid_namespace", 1, "The plan is of another process namespace: 1"),
    ],
)
def test_a_plan_of_elsewhere_is_refused(gpus: FakeGpus, tmp_path: Path, key: str, value: object, words: str) -> None:
    from draftproof.machine.reclaim import HostPlan

    worker, path = gpus.holder([0], 40_000), tmp_path / "plan.json"
    draftproof("reclaim", "--out", path)
    plan = json.loads(path.read_text())
    plan["hosts"][0] = HostPlan.model_validate_json(json.dumps(plan["hosts"][0] | {key: value})).sealed().model_dump(mode="json")
    path.write_text(json.dumps(plan))
    ran = draftproof("reclaim", "--apply", path)
    assert ran.code == 3
    assert words in ran.sentence()
    assert not ended(worker)


def test_who_only_belongs_to_one_that_let_go_is_left_alone(gpus: FakeGpus, tmp_path: Path) -> None:
    supervisor, child = gpus.respawner([2], 900)
    plan = tmp_path / "plan.json"
    drawn = draftproof("reclaim", "--tree", str(supervisor), "--out", plan, "--json").document()
    assert {target["pid"] for target in drawn["plan"]["targets"]} == {supervisor, child}
    gpus.unsay("hold 2")
    done = draftproof("reclaim", "--apply", plan, "--json")
    assert done.code == 0, done.stderr
    assert {outcome["outcome"] for outcome in done.document()["hosts"][0]["outcomes"]} == {"changed"}
    assert not ended(supervisor)
    assert not ended(child)


def test_an_idle_level_that_is_allowed_is_free(gpus: FakeGpus, tmp_path: Path) -> None:
    worker, plan = gpus.holder([0], 900), tmp_path / "plan.json"
    gpus.say(f"unowned 0 {200 * 2**20}")
    draftproof("reclaim", "--gpus", "0", "--out", plan)
    done = draftproof("reclaim", "--apply", plan, "--allow-mib", "200", "--json")
    assert done.code == 0, done.stderr
    assert (done.document()["freed_mib"], done.document()["blockers"]) == (900, [])
    assert ended(worker)
    assert draftproof("check", "--gpus", "0", "--allow-mib", "200").code == 0
    assert draftproof("check", "--gpus", "0", "--allow-mib", "199").code == 3


def test_a_choice_beside_a_plan_is_refused(gpus: FakeGpus, tmp_path: Path) -> None:
    worker, plan = gpus.holder([0], 900), tmp_path / "plan.json"
    draftproof("reclaim", "--out", plan)
    ran = draftproof("reclaim", "--apply", plan, "--gpus", "3")
    assert ran.code == 2
    assert "--apply takes no choice beside it" in ran.sentence()
    assert not ended(worker)


def test_a_tampered_plan_is_refused(gpus: FakeGpus, tmp_path: Path) -> None:
    worker, bystander, path = gpus.holder([0], 40_000), gpus.bystander("python3"), tmp_path / "plan.json"
    draftproof("reclaim", "--out", path)
    path.write_text(path.read_text().replace(f'"pid": {worker}', f'"pid": {bystander}'))
    ran = draftproof("reclaim", "--apply", path)
    assert ran.code == 2
    assert "was changed after it was made" in ran.sentence()
    assert not ended(worker)
    assert not ended(bystander)


def test_the_same_over_ssh(gpus: FakeGpus, node7: str, tmp_path: Path) -> None:
    _, child = gpus.forked([2], 2566)
    checked = draftproof("check", "--host", node7, "--json")
    assert checked.code == 3
    assert {finding["host"] for finding in checked.document()["findings"]} == {node7}
    path = tmp_path / "plan.json"
    drawn = draftproof("reclaim", "--host", node7, "--out", path, "--json").document()
    assert drawn["plan"]["address"] == node7
    assert [(target["pid"], target["kind"]) for target in drawn["plan"]["targets"]] == [(child, "forked")]
    done = draftproof("reclaim", "--apply", path, "--json")
    assert done.code == 0, done.stderr
    assert done.document()["freed_mib"] == 2566
    assert ended(child)
    assert draftproof("check", "--host", node7).code == 0


def test_one_host_of_two_does_not_answer(gpus: FakeGpus, node7: str) -> None:
    ran = draftproof("check", "--host", node7, "--host", "nowhere.invalid", "--json")
    assert ran.code == 4
    by_host = {host["host"]: host["reached"] for host in ran.document()["hosts"]}
    assert by_host.pop("nowhere.invalid") is False
    assert list(by_host.values()) == [True]
    unknown = [finding for finding in ran.document()["findings"] if finding["status"] == "unknown"]
    assert [(finding["check"], finding["host"]) for finding in unknown] == [("host.reached", "nowhere.invalid")]


def test_a_plain_cpu_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    monkeypatch.setenv("DRAFTPROOF_PROBE_ROOTS", json.dumps({"nvml": str(tmp_path / "none.so"), "dev": str(tmp_path / "dev")}))
    ran = draftproof("check", "--json")
    assert ran.code == 0
    found = {finding["check"]: finding for finding in ran.document()["findings"]}
    assert found["gpu.count"]["evidence"] == "This machine has no NVIDIA GPU; what applies to a CPU was checked."
    assert draftproof("reclaim").stdout.strip() == "this machine: nothing to stop."


def test_nothing_is_left_of_a_check(gpus: FakeGpus) -> None:
    """No process of the probe survives the look, also where it hung."""
    gpus.say("hang nvmlInit_v2 -1 600")
    before = set(os.listdir("/proc"))
    assert draftproof("check").code == 4
    wait_for(lambda: not [pid for pid in set(os.listdir("/proc")) - before if pid.isdigit() and _is_probe(pid)], 5)


def _is_probe(pid: str) -> bool:
    try:
        return b"\0-I\0-\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_a_plan_is_written_over_nothing_but_a_file(gpus: FakeGpus, tmp_path: Path) -> None:
    gpus.holder([0], 900)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("fifo", "link", "."):
        ran = draftproof("reclaim", "--out", tmp_path / name)
        assert ran.code == 2
        assert "no ordinary file" in ran.sentence()
    assert (tmp_path / "fifo").is_fifo()
    assert (tmp_path / "link").is_symlink()


def test_a_plan_from_others_hands_is_refused(gpus: FakeGpus, tmp_path: Path) -> None:
    worker, path = gpus.holder([0], 900), tmp_path / "plan.json"
    draftproof("reclaim", "--out", path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o666)
    assert "Others may write this plan" in draftproof("reclaim", "--apply", path).sentence()
    path.chmod(0o600)
    if os.getuid() == 0:
        os.chown(path, 65534, 65534)
        assert "Others may write this plan" in draftproof("reclaim", "--apply", path).sentence()
    assert not ended(worker)


def test_who_cannot_see_the_gpus_plans_nothing(gpus: FakeGpus) -> None:
    gpus.holder([0], 900)
    assert draftproof("reclaim", "--gpus", "99").code == 4
    gpus.say("hang nvmlInit_v2 -1 600")
    ran = draftproof("reclaim")
    assert ran.code == 4
    assert "Who holds the GPUs cannot be told" in ran.sentence()


def test_a_choice_reaches_only_what_holds_the_gpus_that_were_asked_for(gpus: FakeGpus) -> None:
    here, elsewhere = gpus.holder([0], 900), gpus.holder([1], 900)
    plan = draftproof("reclaim", "--gpus", "0", "--session", str(os.getsid(here)), "--session", str(os.getsid(elsewhere)), "--json")
    assert [target["pid"] for target in plan.document()["plan"]["targets"]] == [here]
    for whole in (("--tree", "1"), ("--cgroup", "/"), ("--cgroup", "/../x")):
        assert draftproof("reclaim", *whole).code == 2


def test_names_of_processes_do_not_steer_the_terminal(gpus: FakeGpus, tmp_path: Path) -> None:
    gpus.holder([0], 900, name="\x1b]0;PWNED\x07\x1b[31m[red]x[/]", arguments=["\x1b[2J\x9b\u202e"])
    plan = tmp_path / "plan.json"
    for ran in (draftproof("check"), draftproof("reclaim", "--out", plan), draftproof("check", "--json"), draftproof("reclaim", "--json")):
        for letter in ("\x1b", "\x07", "\x9b", "\u202e"):
            assert letter not in ran.stdout + ran.stderr
    assert "[red]x[/]" in draftproof("reclaim", "--out", plan).stdout


def test_ctrl_c_while_one_ignores_term(gpus: FakeGpus, tmp_path: Path) -> None:
    worker, plan = gpus.holder([0], 900, ignore_term=True), tmp_path / "plan.json"
    draftproof("reclaim", "--grace", "30", "--out", plan)
    process = start("reclaim", "--apply", plan, "--json")
    wait_for(lambda: b"\0-I\0-\0" in b"".join(path.read_bytes() for path in _children(process.pid)))
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    ran = end(process)
    assert time.monotonic() - began < 10
    assert ran.code == 130
    assert ran.document()["hosts"][0]["outcomes"][0]["outcome"] == "survives"
    assert not ended(worker)


def _children(pid: int) -> list[Path]:
    """Command lines of the processes below."""
    return [child / "cmdline" for child in Path("/proc").glob("[0-9]*") if _parent(child) == pid]


def _parent(process: Path) -> int | None:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
