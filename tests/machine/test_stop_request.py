"""Requests that `stop.py` must refuse whole: one sentence, nothing signalled, however they are made."""

from __future__ import annotations

import json
import os
import zlib
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftproof.machine.stop import Refusal, read_job
from stopping import IGNORE, SLEEP, Family, begin, document, packed, plan, sealed, stop, target, unit


@pytest.fixture(scope="module")
def victim() -> Iterator[int]:
    """A process that the plans name. It must outlive all these tests, and TERM would leave a mark on it."""
    family = Family()
    child = family.start("import signal, sys", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))", SLEEP)
    yield child.pid
    alive = child.poll() is None
    family.end()
    assert alive


def assert_refused(said: dict[str, Any], sentence: str = "") -> None:
    assert (said["units"], said["outcomes"]) == ([], [])
    assert said["refused"].startswith(sentence)
    assert said["refused"].endswith(".")
    assert "\n" not in said["refused"]
    assert len(said["refused"]) < 300


def raw(made: dict[str, Any], old: str, new: str) -> str:
    """A request with a piece of its text exchanged, since Python's json would not write it so."""
    text = json.dumps({"plan": made})
    assert old in text
    return packed(text.replace(old, new))


def test_a_request_that_is_none(victim: int) -> None:
    whole = packed(json.dumps({"plan": plan(victim)}))
    for arguments, sentence in (
        ([], "There is no plan: this takes one argument, the request."),
        ([whole, whole], "There is no plan: this takes one argument, the request."),
        (["{}"], "The request cannot be read: "),
        (["é"], "The request cannot be read: "),
        ([whole[:-1]], "The request cannot be read: "),
        ([whole[:-8]], "The request is cut off or too long."),
        ([urlsafe_b64encode(zlib.compress(b"{}")[:-4]).decode()], "The request is cut off or too long."),
        ([packed(b" " * 2**24 + b"{}")], "The request is cut off or too long."),
        ([packed("")], "The request cannot be read: "),
        ([packed("\ud800".encode("utf-8", "surrogatepass"))], "The request cannot be read: "),
        ([packed("[]")], "The request is missing or not an object."),
        ([packed("{}")], "The plan is missing or not an object."),
        ([packed('{"plan": []}')], "The plan is missing or not an object."),
    ):
        assert_refused(document(begin(*arguments)), sentence)


def test_what_json_lets_pass(victim: int) -> None:
    made = plan(victim)
    for request, sentence in (
        (raw(made, '"deadline_s": 5.0', '"deadline_s": NaN'), "The request holds a number that is not finite."),
        (raw(made, '"deadline_s": 5.0', '"deadline_s": -Infinity'), "The request holds a number that is not finite."),
        (raw(made, '"deadline_s": 5.0', '"deadline_s": 1e999'), "The request holds a number that is not finite."),
        (raw(made, '"version": 1', f'"version": {"9" * 100_000}'), "The request holds a number that is too long."),
        (raw(made, '"version": 1', '"version": 1, "version": 1'), "The request names a key twice."),
        (raw(made, '"pid": ', f'"pid": {os.getpid()}, "pid": '), "The request names a key twice."),
        (raw(made, '"left": []', '"left": ' + "[" * 100_000 + "]" * 100_000), "The request cannot be read: "),
        (raw(made, '"left": []', '"left": ' + '{"a":' * 100_000 + "1" + "}" * 100_000), "The request cannot be read: "),
    ):
        assert_refused(document(begin(request)), sentence)


@pytest.mark.parametrize("key", sorted(plan()))
def test_a_plan_without_one_of_its_keys(victim: int, key: str) -> None:
    made = {name: value for name, value in plan(victim).items() if name != key}
    assert_refused(stop(made if key == "hash" else sealed(made)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": True}, "The plan has version True; this carries out version 1."),
        ({"version": "1"}, "The plan has version 1; this carries out version 1."),
        ({"any_user": 1}, "The plan has no usable 'any_user'."),
        ({"uid": False}, "The plan has no usable 'uid'."),
        ({"deadline_s": True}, "The plan has no usable 'deadline_s'."),
        ({"deadline_s": -1}, "The plan's deadline_s is not between 0 and 3,600."),
        ({"deadline_s": 10**12}, "The plan's deadline_s is not between 0 and 3,600."),
        ({"targets": {}}, "The plan has no usable 'targets'."),
        ({"targets": [None]}, "A target of the plan is missing or not an object."),
        ({"made": "yesterday"}, "The request cannot be read: "),
        ({"made": "2026-01-01T00:00:00"}, "The roots, kill_wait_s or the time of the plan (it needs a time zone) cannot be meant."),
        ({"cgroups": ["/"]}, "The plan names a control group that cannot be one."),
        ({"cgroups": ["relative"]}, "The plan names a control group that cannot be one."),
        ({"cgroups": ["/a/../.."]}, "The plan names a control group that cannot be one."),
        ({"cgroups": ["/a//b"]}, "The plan names a control group that cannot be one."),
        ({"cgroups": ["/a\0b"]}, "The plan names a control group that cannot be one."),
        ({"cgroups": ["/a\ud800"]}, "The plan names a control group that cannot be one."),
        ({"cgroups": [7]}, "The plan names a control group that cannot be one."),
        *(
            ({"units": [unit(name)]}, "The plan names a unit that cannot be one.")
            for name in (
                "*.service",
                "system.slice",
                "-Hnode7.service",
                "a/b.service",
                "a b.service",
                "vllm",
                "",
                "a.service\n",
                "é.service",
            )
        ),
        ({"units": [unit("vllm.service", "global")]}, "The plan names a unit that cannot be one."),
        ({"units": [unit("vllm.service", "docker")]}, "The plan names a unit that cannot be one."),
        ({"units": [unit("--all", "docker")]}, "The plan names a unit that cannot be one."),
        ({"units": [{"name": "vllm.service"}]}, "A unit of the plan has no usable 'scope'."),
        ({"units": ["vllm.service"]}, "A unit of the plan is missing or not an object."),
    ],
)
def test_a_plan_with_what_cannot_be_meant(victim: int, changes: dict[str, Any], sentence: str) -> None:
    assert_refused(stop(sealed({**plan(victim), **changes})), sentence)


@pytest.mark.parametrize(
    "changes",
    [
        *({"pid": pid} for pid in (0, 1, -1, -2, 2**22 + 1, 2**63, 10**19, True, 4.0, "7", None, [7])),
        *({"start_ticks": ticks} for ticks in (-1, 2**64, 1.5, None, "1")),
        *({"uid": uid} for uid in (-1, 2**32, False, "root")),
        {"command": None},
        {"cgroup": 7},
        {"unit": "vllm.service"},
        {"unit": 3},
        {"why": None},
    ],
    ids=repr,
)
def test_a_target_that_cannot_be_one_spoils_the_whole_plan(victim: int, changes: dict[str, Any]) -> None:
    """Pid -1 would be everybody, 0 the own group. The sound target beside it is not touched either."""
    assert_refused(stop(plan(victim, {**target(os.getppid()), **changes})))


def test_a_process_that_is_named_twice(victim: int) -> None:
    assert_refused(stop(plan(victim, victim)), "The plan names a process twice.")


@pytest.mark.parametrize(
    "request_",
    [{"kill_wait_s": -1}, {"kill_wait_s": "3"}, {"kill_wait_s": True}, {"kill_wait_s": 1e9}, {"roots": []}, {"roots": {"proc": 3}}],
    ids=repr,
)
def test_a_request_with_what_cannot_be_meant(victim: int, request_: dict[str, Any]) -> None:
    assert_refused(stop(plan(victim), **request_))


def test_a_place_that_is_no_proc(victim: int, tmp_path: os.PathLike[str]) -> None:
    assert_refused(stop(plan(victim), roots={"proc": str(tmp_path)}), f"There is no usable {tmp_path} here.")


def test_unknown_keys_do_no_harm_while_the_hash_holds() -> None:
    """A later version may say more."""
    family = Family()
    try:
        child = family.start(IGNORE, SLEEP)
        said = stop(plan({**target(child.pid), "rack": 4}, deadline_s=0.1, colour="green"), and_more=True)
        assert [one["outcome"] for one in said["outcomes"]] == ["killed"]
    finally:
        family.end()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=JSON)
def test_any_value_anywhere_is_refused_or_sound(victim: int, data: st.DataObject, value: Any) -> None:
    """In the place of any value of a plan; the hash fits, as an attacker's would. Never another error, and never a wrong type."""
    made = plan(target(victim), units=[unit("vllm.service", cgroup="/system.slice/vllm.service")], cgroups=["/a"])
    places: list[tuple[Any, Any]] = [(made, key) for key in made if key != "hash"]
    places += [(made["targets"][0], key) for key in made["targets"][0]] + [(made["units"][0], key) for key in made["units"][0]]
    places += [(made["targets"], 0), (made["units"], 0), (made["cgroups"], 0)]
    thing, key = data.draw(st.sampled_from(places))
    thing[key] = value
    try:
        targets = read_job([packed(json.dumps({"plan": sealed(made)}))]).plan["targets"]
    except Refusal:
        return
    assert all(type(one["pid"]) is int and 2 <= one["pid"] <= 4194304 for one in targets)


@given(st.binary(max_size=200) | st.text(max_size=50).map(str.encode))
def test_any_bytes_are_refused(noise: bytes) -> None:
    for argument in (packed(noise), noise.decode("latin-1")):
        with pytest.raises(Refusal):
            read_job([argument])
