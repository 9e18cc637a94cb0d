"""Artifacts: written whole or not at all, proven on reading, resumed only by what the journal proves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import blake3
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from draftproof import artifact
from draftproof.artifact import (
    MANIFEST,
    Journal,
    Manifest,
    differing_fields,
    discard,
    fingerprint,
    hash_bytes,
    hash_file,
    open_build,
    partial_folder,
    problems,
    read_manifest,
    reusable,
    verify,
    write_atomic,
    write_json,
)
from draftproof.errors import DamagedArtifact, OtherRunsWork
from draftproof.stage import Outcome

INGREDIENTS = {"size": 8, "rows": "abc", "train": {"unroll": 7, "boundaries": (2, 4)}}


class _Killed(BaseException):
    """Stands for a SIGKILL: nothing gets to clean up."""


def _make(final: Path, **changes: Any) -> Manifest:
    build = open_build(final, stage="vocab", ingredients={**INGREDIENTS, **changes}, predicted={"bytes": 10.0})
    (build.folder / "rows").mkdir(exist_ok=True)
    (build.folder / "rows" / "a.bin").write_bytes(b"0123456789")
    (build.folder / "empty").write_bytes(b"")
    (build.folder / "README.md").write_text("to be completed")
    return build.finish(Outcome({"size": 8}, {"mapping": "m"}, {"seconds": 1.0}, documents=("README.md",)))


# Writing


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "file.json"
    write_atomic(path, b"first")
    assert path.read_bytes() == b"first"
    assert path.stat().st_mode & 0o777 == 0o644

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_atomic(path, b"second, and longer")
    assert path.read_bytes() == b"first"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


def test_json_is_sorted_and_reads_back(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"b": 1, "a": "世"})
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == '{\n "a": "世",\n "b": 1\n}\n'
    (tmp_path / "x.json").write_text('{"a"')
    with pytest.raises(DamagedArtifact, match="does not hold JSON"):
        artifact.read_json(tmp_path / "x.json")


def test_hashes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"content")
    assert hash_file(tmp_path / "x") == blake3.blake3(b"content").hexdigest()
    (tmp_path / "empty").touch()
    assert hash_file(tmp_path / "empty") == blake3.blake3(b"").hexdigest()
    assert hash_bytes(b"ab", b"c") != hash_bytes(b"a", b"bc"), "borders count"


# The journal

RECORDS: list[dict[str, Any]] = [{"shard": 0, "file": "a"}, {"shard": 1, "name": "世界 \ufffd"}, {"shard": 2, "text": "two\nlines"}]


def _journal(folder: Path) -> Journal:
    journal = Journal(folder / "journal.jsonl")
    for record in RECORDS:
        journal.append(record)
    return journal


def test_a_journal_gives_back_what_was_appended(tmp_path: Path) -> None:
    assert Journal(tmp_path / "none.jsonl").read() == []
    assert _journal(tmp_path).read() == RECORDS
    assert Journal(tmp_path / "journal.jsonl").read() == RECORDS
    for line, record in zip((tmp_path / "journal.jsonl").read_bytes().splitlines(), RECORDS, strict=True):
        check, _, body = line.partition(b" ")
        assert check.decode() == blake3.blake3(body).hexdigest()[:8]
        assert json.loads(body) == record


def test_torn_at_every_byte_the_last_record_is_lost_and_no_other(tmp_path: Path) -> None:
    path = _journal(tmp_path).path
    whole = path.read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    for end in range(last, len(whole)):
        path.write_bytes(whole[:end])
        journal = Journal(path)
        assert journal.read() == RECORDS[:2], end
        journal.append({"shard": 2, "again": True})
        assert Journal(path).read() == [*RECORDS[:2], {"shard": 2, "again": True}], end


def test_what_a_crash_left_longer_than_the_next_record_is_gone(tmp_path: Path) -> None:
    path = _journal(tmp_path).path
    with path.open("ab") as stream:
        stream.write(b"0" * 500)  # blocks of a file that grew and was never filled
    Journal(path).append({})
    assert Journal(path).read() == [*RECORDS, {}]


@pytest.fixture(scope="module")
def journal_bytes(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    path = _journal(tmp_path_factory.mktemp("journal")).path
    return path.read_bytes(), path


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_damage_never_gives_another_record(journal_bytes: tuple[bytes, Path], data: st.DataObject) -> None:
    """One byte anywhere: refused, or the records before it. In the first line, always refused with its number."""
    whole, path = journal_bytes
    place = data.draw(st.integers(0, len(whole) - 1))
    new = data.draw(st.integers(0, 255).filter(lambda value: value != whole[place]))
    path.write_bytes(whole[:place] + bytes([new]) + whole[place + 1 :])
    line = whole[:place].count(b"\n")
    try:
        found: list[dict[str, Any]] | str | None = Journal(path).read()
    except DamagedArtifact as error:
        found = error.where
    refused = [f"{path}:{line + 1}", f"{path}:{line + 2}"]  # the line's own end may be what was damaged
    assert found in (refused if line == 0 else [*refused, RECORDS[:line]] if line == 1 else [RECORDS[:line]])


# Fingerprints


def test_a_fingerprint_is_of_the_canonical_json() -> None:
    assert fingerprint({"b": (1, 2), "a": "世"}) == blake3.blake3('{"a":"世","b":[1,2]}'.encode()).hexdigest()
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})


_VALUES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)
_INNER = st.dictionaries(st.sampled_from("xy"), _VALUES, max_size=2)
_TREES = st.dictionaries(st.sampled_from("abc"), _VALUES | _INNER, max_size=3)


@given(old=_TREES, new=_TREES)
@example(old={"a": None}, new={})
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_difference_is_named_and_nothing_else(old: dict[str, Any], new: dict[str, Any]) -> None:
    named = [sentence.partition(":")[0] for sentence in differing_fields(old, new)]
    assert bool(named) == (old != new)
    for key in "abc":
        told = [name for name in named if name == key or name.startswith(f"{key}.")]
        assert bool(told) == ((key in old, old.get(key)) != (key in new, new.get(key)))


def test_differing_fields_by_hand() -> None:
    old = {"train": {"unroll": 7, "decay": 0.8}, "rows": "abc", "gone": 1}
    new = {"train": {"unroll": 5, "decay": 0.8}, "rows": "x" * 60, "come": None}
    assert differing_fields(old, new) == [
        "come: nothing there, null wanted",
        "gone: 1 there, nothing wanted",
        f'rows: "abc" there, "{"x" * 36}... wanted',
        "train.unroll: 7 there, 5 wanted",
    ]


# Making, reusing, discarding


def test_a_finished_artifact_describes_itself(tmp_path: Path) -> None:
    made = _make(tmp_path / "vocab")
    assert not partial_folder(tmp_path / "vocab").exists()
    assert read_manifest(tmp_path / "vocab") == made == verify(tmp_path / "vocab", deep=True)
    assert {name: record.size for name, record in made.files.items()} == {"empty": 0, "rows/a.bin": 10}
    assert made.files["rows/a.bin"].hash == blake3.blake3(b"0123456789").hexdigest()
    assert (made.documents, made.counts, made.contents) == (["README.md"], {"size": 8}, {"mapping": "m"})
    assert made.fingerprint == fingerprint(INGREDIENTS)
    assert made.predicted == {"bytes": 10.0}
    assert "torch" in made.versions


def test_it_is_reused_for_the_same_ingredients_only(tmp_path: Path) -> None:
    final = tmp_path / "vocab"
    assert reusable(final, stage="vocab", ingredients=INGREDIENTS) is None
    made = _make(final)
    assert reusable(final, stage="vocab", ingredients=INGREDIENTS) == made
    with pytest.raises(OtherRunsWork) as error:
        reusable(final, stage="vocab", ingredients={**INGREDIENTS, "train": {"unroll": 5, "boundaries": [2, 4]}})
    assert error.value.what == "vocab/ holds work of other settings: train.unroll: 7 there, 5 wanted."
    assert "--from vocab" in error.value.remedy
    with pytest.raises(OtherRunsWork, match=r'stage: "vocab" there, "prepare" wanted'):
        reusable(final, stage="prepare", ingredients=INGREDIENTS)
    assert verify(final, deep=True) == made, "nothing was touched"


def test_unfinished_work_goes_on_only_with_the_same_ingredients(tmp_path: Path) -> None:
    final = tmp_path / "vocab"
    (open_build(final, stage="vocab", ingredients=INGREDIENTS).folder / "half").write_text("half")
    assert reusable(final, stage="vocab", ingredients=INGREDIENTS) is None
    with pytest.raises(OtherRunsWork, match="holds unfinished work of other settings: size: 8 there, 9 wanted"):
        open_build(final, stage="vocab", ingredients={**INGREDIENTS, "size": 9})
    build = open_build(final, stage="vocab", ingredients=INGREDIENTS)
    assert (build.folder / "half").read_text() == "half"


def test_work_that_never_said_what_it_is_is_started_anew(tmp_path: Path) -> None:
    partial = partial_folder(tmp_path / "vocab")
    partial.mkdir()
    (partial / "half").touch()
    assert [path.name for path in open_build(tmp_path / "vocab", stage="vocab", ingredients=INGREDIENTS).folder.iterdir()] == [
        "ingredients.json"
    ]


@pytest.mark.parametrize("moment", ["unlink", "replace"])
def test_a_kill_between_manifest_and_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """The work is whole and only lacks its name: the same run takes it, another is told whose it is."""
    final = tmp_path / "vocab"
    replace = os.replace

    def killed(source: Any, goal: Any) -> None:
        if goal == final:
            raise _Killed
        replace(source, goal)

    def killed_earlier(self: Path, missing_ok: bool = False) -> None:
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(*((Path, "unlink", killed_earlier) if moment == "unlink" else (os, "replace", killed)))
        with pytest.raises(_Killed):
            _make(final)
    assert not final.exists()
    assert (partial_folder(final) / MANIFEST).exists()

    other = {**INGREDIENTS, "size": 9}
    assert reusable(final, stage="vocab", ingredients=other) is None
    with pytest.raises(OtherRunsWork, match="size: 8 there, 9 wanted"):
        open_build(final, stage="vocab", ingredients=other)
    manifest = reusable(final, stage="vocab", ingredients=INGREDIENTS) if moment == "unlink" else None
    if manifest is None:  # the second look must not have lost whose work it was
        with pytest.raises(OtherRunsWork, match="size: 8 there, 9 wanted"):
            open_build(final, stage="vocab", ingredients=other)
        manifest = _make(final)
    assert verify(final, deep=True) == manifest


def test_sealed_work_that_lacks_only_its_name_gets_it(tmp_path: Path) -> None:
    final = tmp_path / "vocab"
    made = _make(final)
    os.replace(final, partial_folder(final))
    assert reusable(final, stage="vocab", ingredients=INGREDIENTS) == made
    assert (final / "rows" / "a.bin").is_file()
    assert not partial_folder(final).exists()


def test_discard_leaves_nothing_that_could_be_taken_for_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "vocab"
    _make(final)
    open_build(final, stage="vocab", ingredients=INGREDIENTS)

    def killed(path: Path) -> None:
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(_Killed):
            discard(final)
    assert not final.exists()
    discard(final)  # in the same process: in a container every run has the same number
    assert list(tmp_path.iterdir()) == []
    discard(final)


def test_discard_removes_a_link_and_not_what_it_points_to(tmp_path: Path) -> None:
    elsewhere = tmp_path / "big-disk"
    _make(elsewhere)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "vocab").symlink_to(elsewhere)
    assert verify(tmp_path / "run" / "vocab").stage == "vocab"
    discard(tmp_path / "run" / "vocab")
    assert list((tmp_path / "run").iterdir()) == []
    assert verify(elsewhere).stage == "vocab"


# Proof


def _damages() -> dict[str, tuple[Any, str]]:
    def change(folder: Path) -> None:
        (folder / "rows" / "a.bin").write_bytes(b"0123456780")

    def leave(folder: Path) -> None:
        outside = folder.parent / "outside"
        outside.write_bytes(b"0123456789")
        (folder / "rows" / "a.bin").unlink()
        (folder / "rows" / "a.bin").symlink_to(outside)

    def leave_above(folder: Path) -> None:
        (folder / "rows").rename(folder.parent / "rows")
        (folder / "rows").symlink_to(folder.parent / "rows")

    return {
        "added": (lambda folder: (folder / "rows" / "b.bin").touch(), "rows/b.bin is not in the manifest."),
        "dangling": (lambda folder: (folder / "x").symlink_to("nowhere"), "x is not in the manifest."),
        "removed": (lambda folder: (folder / "empty").unlink(), "empty is missing."),
        "document": (lambda folder: (folder / "README.md").unlink(), "README.md is missing."),
        "truncated": (lambda folder: os.truncate(folder / "rows" / "a.bin", 9), "rows/a.bin has 9 bytes, its manifest says 10."),
        "changed": (change, "rows/a.bin does not hash to what its manifest says."),
        "link": (leave, "rows/a.bin is a link that leaves the folder."),
        "linked folder": (leave_above, "rows/a.bin is a link that leaves the folder."),
    }


@pytest.mark.parametrize("damage", _damages())
def test_each_damage_is_named(tmp_path: Path, damage: str) -> None:
    spoil, sentence = _damages()[damage]
    _make(tmp_path / "vocab")
    spoil(tmp_path / "vocab")
    assert problems(tmp_path / "vocab", read_manifest(tmp_path / "vocab"))[0] == sentence
    with pytest.raises(DamagedArtifact) as error:
        verify(tmp_path / "vocab")
    assert error.value.what == f"The vocab artifact is damaged: {sentence}"
    assert "--from vocab" in error.value.remedy
    with pytest.raises(DamagedArtifact):
        reusable(tmp_path / "vocab", stage="vocab", ingredients=INGREDIENTS)


def test_a_byte_changed_behind_the_clocks_back_is_seen_by_deep(tmp_path: Path) -> None:
    _make(tmp_path / "vocab")
    path = tmp_path / "vocab" / "rows" / "a.bin"
    times = path.stat()
    path.write_bytes(b"0123456780")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    manifest = verify(tmp_path / "vocab")
    assert problems(tmp_path / "vocab", manifest, deep=True) == ["rows/a.bin does not hash to what its manifest says."]


def test_a_copy_with_new_times_and_a_completed_document_are_whole(tmp_path: Path) -> None:
    _make(tmp_path / "vocab")
    os.utime(tmp_path / "vocab" / "rows" / "a.bin", (1, 1))
    (tmp_path / "vocab" / "README.md").write_text("completed with what was measured")
    verify(tmp_path / "vocab")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda values: values["ingredients"].update(size=9), "fingerprint is not that of its ingredients"),
        (lambda values: values.update(schema_version=2), "schema version 2; this draftproof reads 1"),
        (lambda values: values.pop("files"), "The manifest is damaged: Field required"),
    ],
)
def test_a_manifest_that_was_changed(tmp_path: Path, change: Any, sentence: str) -> None:
    _make(tmp_path / "vocab")
    path = tmp_path / "vocab" / MANIFEST
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(DamagedArtifact, match=sentence):
        verify(tmp_path / "vocab")


def test_a_torn_or_absent_manifest(tmp_path: Path) -> None:
    _make(tmp_path / "vocab")
    path = tmp_path / "vocab" / MANIFEST
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DamagedArtifact, match="The manifest is damaged"):
        verify(tmp_path / "vocab")
    path.unlink()
    with pytest.raises(DamagedArtifact, match="not a finished artifact"):
        verify(tmp_path / "vocab")


def test_halves_of_two_devices_are_not_joined(tmp_path: Path) -> None:
    open_build(tmp_path / "train", stage="train", ingredients={"a": 1}, conditions={"device": "cuda"})
    with pytest.raises(OtherRunsWork, match=r'conditions\.device: "cuda" there, "cpu" wanted'):
        open_build(tmp_path / "train", stage="train", ingredients={"a": 1}, conditions={"device": "cpu"})
    build = open_build(tmp_path / "train", stage="train", ingredients={"a": 1}, conditions={"device": "cuda"})
    build.finish(Outcome({}, {}))
    assert reusable(tmp_path / "train", stage="train", ingredients={"a": 1}) is not None  # whole work may be used anywhere
