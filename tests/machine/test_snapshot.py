"""The probe's document, read: what is refused and where, what is passed over, and what the helpers answer."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from draftproof.errors import DraftproofError
from draftproof.machine.snapshot import MAX_BYTES, Seen, Snapshot, parse
from snapshots import MIB, documents, gpu, host, listed, memory_v1, process, seen


def refusal(document: bytes | str) -> DraftproofError:
    with pytest.raises(DraftproofError) as caught:
        parse(document)
    assert type(caught.value) is DraftproofError
    assert caught.value.remedy
    return caught.value


def changed(path: str, value: Any) -> str:
    """A document of one GPU and one process, with another value at a path like `gpus.0.memory.total`."""
    document = host(gpus=[gpu(0, 5, [listed(7, 5)])], processes=[process(7)], unseen=[{"what": "xid", "why": "no"}])
    *way, last = path.split(".")
    place: Any = document
    for key in way:
        place = place[int(key) if key.isdigit() else key]
    place[int(last) if last.isdigit() else last] = value
    return json.dumps(document)


def test_a_document_is_read_with_its_values() -> None:
    document = host(
        gpus=[gpu(3, [100, 340, 101], [listed(4121, 90)])],
        processes=[process(4121, "VLLM::Worker_TP3", unit="vllm.service", unit_scope="system", fds=("nvidia3", "nvidia-uvm"))],
        links=[{"from": 0, "to": 1, "read": "ok", "write": "NVML_P2P_STATUS_CNS", "ancestor": "node"}],
        limits={"nofile": [1024, 4096], "memlock": [-1, -1], "nproc": [100, -1]},
    )
    snapshot = seen(document)
    assert (snapshot.schema_, snapshot.host, snapshot.viewer.ancestors) == (1, "node7", (800, 700, 600, 1))
    assert (snapshot.links or ())[0].from_ == 0
    assert (snapshot.links or ())[0].write == "NVML_P2P_STATUS_CNS"
    assert snapshot.limits is not None
    assert snapshot.limits.memlock == (-1, -1)
    worker = snapshot.process(4121)
    assert worker is not None
    assert (worker.comm, worker.command, worker.device_fds) == ("VLLM::Worker_TP", "VLLM::Worker_TP3", ("nvidia-uvm", "nvidia3"))
    assert snapshot.process(4122) is None
    assert [(one.index, one.compute_capability) for one in snapshot.gpus] == [(3, (9, 0))]


def test_memory_in_figures() -> None:
    memory = seen(host(gpus=[gpu(0, [100, 340, 101])])).gpus[0].memory
    assert memory is not None
    assert memory.used_now == 101 * MIB
    assert (memory.used_mib, memory.free_mib) == (101, 143_771 - 615 - 101)


def test_memory_rounds_so_that_nothing_looks_free_that_is_not() -> None:
    odd = {"version": 2, "total": 10 * MIB, "reserved": 0, "used": [1], "free": 2 * MIB - 1}
    memory = seen(host(gpus=[gpu(0, memory=odd)])).gpus[0].memory
    assert memory is not None
    assert (memory.used_mib, memory.free_mib) == (1, 1)


def test_an_old_reading_does_not_say_what_is_reserved() -> None:
    memory = seen(host(gpus=[gpu(0, memory=memory_v1(615))])).gpus[0].memory
    assert memory is not None
    assert (memory.used_mib, memory.reserved) == (615, None)


def test_bytes_of_a_pid_that_stands_in_several_lines() -> None:
    lines = [
        listed(10, 199),
        listed(10, 200, "graphics"),  # computes and draws: the same bytes, read twice
        listed(11, 30),
        listed(11, 40),  # in two MIG instances
        listed(12, None),
        listed(13, None),
        listed(13, 5, "mps"),
    ]
    one = seen(host(gpus=[gpu(0, 300, lines)])).gpus[0]
    assert one.listed == {10: 200 * MIB, 11: 70 * MIB, 12: None, 13: 5 * MIB}


def test_why_something_was_not_seen() -> None:
    told = [
        ("gpu.3.memory", "it hangs"),
        ("gpu.3.health", "it hangs"),
        ("gpu.30.memory", "thirty"),
        ("xid", "not root"),
        ("gpu.3", "lost"),
    ]
    snapshot = seen(host(unseen=[{"what": what, "why": why} for what, why in told]))
    assert snapshot.why_unseen("gpu.3") == "it hangs; lost"
    assert snapshot.why_unseen("gpu.3.memory") == "it hangs"
    assert snapshot.why_unseen("gpu.30") == "thirty"
    assert snapshot.why_unseen("gpu.") == "it hangs; thirty; lost"
    assert snapshot.why_unseen("gpu.0") is None
    assert snapshot.why_unseen("g.u") is None


def test_zombies_have_ended() -> None:
    states = seen(host(processes=[process(number, state=state) for number, state in enumerate("RSDZTX", 1)])).processes or ()
    assert "".join(one.state for one in states if one.ended) == "ZX"


def test_unknown_keys_are_passed_over() -> None:
    assert parse(changed("gpus.0.memory.bar1", {"used": 1})) == parse(changed("gpus.0.memory.version", 2))
    assert parse(changed("fabric", [1, None, 1.5])).host == "node7"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("time", "1"),
        ("time", True),
        ("host", 5),
        ("viewer.uid", "1"),
        ("viewer.uid", True),
        ("viewer.uid", 1.0),
        ("viewer.uid", -1),
        ("viewer.uid", 2**63),
        ("viewer.ancestors.0", "800"),
        ("viewer.initial_namespace", 1),
        ("unseen.0.why", None),
        ("nvml.present", "true"),
        ("gpus.0.index", None),
        ("gpus.0.compute_capability.1", False),
        ("gpus.0.memory.version", 3),
        ("gpus.0.memory.used", []),
        ("gpus.0.memory.used.2", -1),
        ("gpus.0.processes.0.kind", "G"),
        ("gpus.0.processes.0.bytes", "4 MiB"),
        ("gpus.0.health.temperature_c", 30.5),
        ("gpus.0.health.recovery_action", "pray"),
        ("processes.0.state", ""),
        ("processes.0.state", "SS"),
        ("processes.0.device_fds", "nvidia0"),
        ("processes.0.comm", "x" * 9000),
        ("processes.0.start_ticks", 10**30),
        ("limits.nofile.0", -2),
    ],
)
def test_a_wrong_value_is_refused_at_its_key(path: str, value: Any) -> None:
    assert refusal(changed(path, value)).where == path


@pytest.mark.parametrize("path", ["host", "gpus.0.memory.free", "processes.0.uid", "viewer.pid", "links", "gpus.0.mig"])
def test_a_missing_key_is_refused_and_named(path: str) -> None:
    document = json.loads(changed("host", "node7"))
    *way, last = path.split(".")
    place: Any = document
    for key in way:
        place = place[int(key) if key.isdigit() else key]
    del place[last]
    assert refusal(json.dumps(document)).where == path


def test_a_list_without_an_end_is_refused() -> None:
    assert refusal(changed("viewer.ancestors", [1] * 5000)).where == "viewer.ancestors"


@pytest.mark.parametrize(
    ("path", "entry"), [("gpus", gpu(0)), ("processes", process(7))], ids=["two GPUs of one index", "two processes of one pid"]
)
def test_what_must_be_unique_is(path: str, entry: dict[str, Any]) -> None:
    error = refusal(changed(path, [entry, entry]))
    assert error.where == path
    assert "two" in error.what


@pytest.mark.parametrize(
    ("document", "sentence", "where"),
    [
        (b"", "not JSON", "line 1, column 1"),
        (b'{"schema": 1,\n "host": }', "not JSON", "line 2, column 10"),
        (b'{"schema": 1} x', "not JSON", "line 1, column 15"),
        (b'\xff{"schema": 1}', "not UTF-8", "byte 0"),
        ('{"schema": 1}'.encode("utf-16"), "not UTF-8", "byte 0"),
        (b'\xef\xbb\xbf{"schema": 1}', "not JSON", "line 1, column 1"),
        (b'{"schema": NaN}', "NaN", None),
        (b'{"schema": 1, "x": -Infinity}', "-Infinity", None),
        (b'{"schema": 1, "x": 1e999}', "too large", "1e999"),
        (b'{"schema": 1, "x": ' + b"9" * 5000 + b"}", "too many digits", None),
        (b'{"schema": 1, "schema": 1}', "a key twice", "schema"),
        (b'{"schema": 1, "x": [{"uid": 0, "uid": 1}]}', "a key twice", "uid"),
        (b"[" * 200_000, "nested too deep", None),
        (b'{"a":' * 200_000, "nested too deep", None),
        (b'{"schema": 1, "x": ' + b"[" * 900 + b"]" * 900 + b"}", "does not hold", None),
        (b"[1]", "no schema number", "schema"),
        (b"{}", "no schema number", "schema"),
        (b'{"schema": "1"}', "no schema number", "schema"),
        (b'{"schema": true}', "no schema number", "schema"),
        (b'{"schema": 1.0}', "no schema number", "schema"),
    ],
)
def test_what_is_no_document_is_refused(document: bytes, sentence: str, where: str | None) -> None:
    error = refusal(document)
    assert sentence in error.what
    assert error.where == where


def test_another_schema_is_told_before_anything_else() -> None:
    error = refusal(b'{"schema": 7, "hosts": []}')
    assert error.what == "This draftproof reads schema 1, the host answered schema 7."


def test_the_size_is_bounded() -> None:
    padding = MAX_BYTES - len(host_json())
    assert parse(host_json() + b" " * padding).host == "node7"
    for document in (host_json() + b" " * (padding + 1), "ä" * (MAX_BYTES // 2 + 1)):
        assert "larger than 64 MB" in refusal(document).what


def host_json() -> bytes:
    return json.dumps(host()).encode()


def test_half_a_character_costs_a_question_mark_and_not_the_document() -> None:
    assert '"\\udcff"' in changed("processes.0.command", "\udcff")
    worker = parse(changed("processes.0.command", "a\udcffb \U0001f600")).process(7)
    assert worker is not None
    assert worker.command == "a?b \U0001f600"


def test_a_refusal_cannot_write_escapes_to_a_terminal() -> None:
    error = refusal(b'{"schema": 1, "\\u001b[2Jx": 1, "\\u001b[2Jx": 1}')
    assert error.where == "?[2Jx"


def test_nothing_can_be_changed() -> None:
    snapshot = seen(host())
    with pytest.raises(ValueError, match="frozen"):
        snapshot.host = "other"  # type: ignore[misc]


def test_every_field_says_what_it_is() -> None:
    models = {Snapshot}
    waiting: list[Any] = [Snapshot]
    while waiting:
        model = waiting.pop()
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
            assert field.is_required(), f"{model.__name__}.{name}"
            parts = [field.annotation]
            while parts:
                part = parts.pop()
                parts += get_args(part)
                if isinstance(part, type) and issubclass(part, Seen) and part not in models:
                    models.add(part)
                    waiting.append(part)
    assert models == set(Seen.__subclasses__())


@given(documents())
def test_any_document_goes_around(document: dict[str, Any]) -> None:
    snapshot = parse(json.dumps(document).encode())
    again = snapshot.model_dump_json(by_alias=True)
    assert json.loads(again) == document
    snapshot.by_pid  # noqa: B018  what is worked out once must not count as a part
    assert parse(again) == snapshot


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def read_or_refused(document: bytes | str) -> None:
    try:
        assert isinstance(parse(document), Snapshot)
    except DraftproofError as caught:
        error = caught
    else:
        return
    assert error.what
    assert error.remedy
    assert str(error).isprintable()


@given(st.one_of(st.binary(), st.text(st.characters()), _JSON.map(json.dumps)))
@example("\ud800")
@example(b"\x00")
def test_anything_else_is_refused_in_our_own_words(document: bytes | str) -> None:
    read_or_refused(document)


@st.composite
def spoilt(draw: st.DrawFn) -> str:
    """A document in which one value, anywhere, is another, or is gone."""
    document: Any = draw(documents())
    place: Any = document
    while True:
        keys = list(range(len(place))) if isinstance(place, list) else sorted(place)
        key = draw(st.sampled_from(keys))
        inner = place[key]
        if isinstance(inner, dict | list) and inner and draw(st.booleans()):
            place = inner
            continue
        if draw(st.booleans()):
            place[key] = draw(_JSON)
        else:
            del place[key]
        return json.dumps(document)


@given(spoilt())
def test_a_spoilt_document_is_read_or_refused_in_our_own_words(document: str) -> None:
    read_or_refused(document)


@given(documents().map(json.dumps), st.data())
def test_a_document_that_was_cut_short_is_refused(document: str, data: st.DataObject) -> None:
    refusal(document[: data.draw(st.integers(0, len(document) - 1))])
