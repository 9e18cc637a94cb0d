"""A13: cut lines, NUL bytes, byte-order mark, array, empty file, CRLF: each has its own sentence with file, line and byte."""

from __future__ import annotations

import gzip
import json

import pytest
from tests.helpers.preparing import FILLER, chat, make_target, prepare

from draftproof.errors import DataError, UsageError
from draftproof.records.jsonl import BadLines, read_jsonl

LINES = [json.dumps(chat(f"Question {n}?", f"The answer {n}.")).encode() for n in range(5)]


def _file(tmp_path, content: bytes, name="f.jsonl"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


def _fails(path, bad=None):
    with pytest.raises(DataError) as caught:
        list(read_jsonl(path, bad))
    return caught.value


def test_a_cut_last_line_has_its_own_message(tmp_path):
    path = _file(tmp_path, b"\n".join(LINES)[:-20])
    error = _fails(path)
    assert "The last line is cut" in error.what
    assert error.where == f"{path}:5, byte {sum(len(line) + 1 for line in LINES[:4])}"
    assert error.remedy == "Mend or remove the line.", "prompts and benches have no other way"


def test_prepare_offers_to_skip_the_line(tt_plain, tm_folder, tmp_path):
    target = make_target(tm_folder, tmp_path / "target", tt_plain)
    with pytest.raises(DataError) as caught:
        prepare(target, tmp_path, _file(tmp_path, b"\n".join(LINES)[:-20]))
    assert "data.skip_bad_lines" in caught.value.remedy


def test_a_whole_last_line_needs_no_line_break(tmp_path):
    assert len(list(read_jsonl(_file(tmp_path, b"\n".join(LINES))))) == 5


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (LINES[2][:30], r"not JSON \(column \d+\)"),
        (b"\0" * 64, "a run of 64 NUL bytes"),
        (b'["a"]', "holds a list, not an object"),
        (b"12", "holds a int, not an object"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
    ],
    ids=["cut", "nul", "array", "number", "latin-1", "deep"],
)
def test_a_damaged_line_in_the_middle(line, sentence, tmp_path):
    path = _file(tmp_path, b"\n".join([*LINES[:2], line, *LINES[3:]]) + b"\n")
    error = _fails(path)
    assert error.where == f"{path}:3, byte {len(LINES[0]) + len(LINES[1]) + 2}"
    import re

    assert re.search(sentence, error.what)
    bad = BadLines(1)
    assert [line.where for line in read_jsonl(path, bad)] == ["f.jsonl:1", "f.jsonl:2", "f.jsonl:4", "f.jsonl:5"]
    assert len(bad.skipped) == 1


def test_more_damage_than_allowed_stops(tmp_path):
    path = _file(tmp_path, b"\n".join([LINES[0], b"{", LINES[1], b"{", LINES[2]]) + b"\n")
    assert "f.jsonl:4" in str(_fails(path, BadLines(1)).where)


def test_marks_blank_lines_and_line_endings_do_no_harm(tmp_path):
    path = _file(tmp_path, b"\xef\xbb\xbf" + LINES[0] + b"\r\n\r\n \n" + LINES[1] + b"\r\n")
    found = list(read_jsonl(path))
    assert [line.where for line in found] == ["f.jsonl:1", "f.jsonl:4"]
    assert [line.value for line in found] == [json.loads(line) for line in LINES[:2]]
    first_blank = _file(tmp_path, b"\xef\xbb\xbf\n" + LINES[0] + b"\n")
    assert [line.where for line in read_jsonl(first_blank)] == ["f.jsonl:2"]


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_is_refused_with_the_way_to_convert_it(indent, tmp_path):
    path = _file(tmp_path, json.dumps([json.loads(line) for line in LINES], indent=indent).encode())
    error = _fails(path, BadLines(100))
    assert "one JSON array" in error.what
    assert "jq -c" in error.remedy


@pytest.mark.parametrize(("content", "sentence"), [(b"", "is empty"), (b"\n\r\n", "only blank lines"), (b"\xef\xbb\xbf", "only blank")])
def test_an_empty_file(content, sentence, tmp_path):
    assert sentence in _fails(_file(tmp_path, content)).what


def test_a_cut_gzip_file(tmp_path):
    whole = gzip.compress(b"\n".join(LINES * 50) + b"\n")
    assert len(list(read_jsonl(_file(tmp_path, whole, "f.jsonl.gz")))) == 250
    assert "compressed file is damaged" in _fails(_file(tmp_path, whole[:-30], "f.jsonl.gz")).what


def test_a_missing_file_and_another_kind(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        list(read_jsonl(tmp_path / "none.jsonl"))
    with pytest.raises(UsageError, match="not a JSONL file"):
        list(read_jsonl(_file(tmp_path, b"PAR1", "f.parquet")))


def test_prepare_counts_what_it_was_allowed_to_skip(tt_plain, tm_folder, tmp_path):
    target = make_target(tm_folder, tmp_path / "target", tt_plain)
    good = [json.dumps(line).encode() for line in FILLER]
    path = _file(tmp_path, b"\n".join([good[0], b"\0" * 64, *good[1:], LINES[0][:-20]]))
    with pytest.raises(DataError, match="64 NUL bytes"):
        prepare(target, tmp_path, path)
    with pytest.raises(DataError, match="The last line is cut"):
        prepare(target, tmp_path, path, skip_bad_lines=1)
    done = prepare(target, tmp_path, path, skip_bad_lines=2)
    assert done.conversations == {"in": 6, "kept": 4, "changed": {}, "dropped": {"damaged line": 2}}
    assert [item["source"] for item in done.dropped] == ["f.jsonl:2", "f.jsonl:6"]
