"""Gate checks of the rows: each passes on good rows and speaks up on rows that are wrong in its way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.helpers.preparing import THINKING, chat, make_target, prepare

from draftproof.gate import data
from draftproof.gate.gate import GateContext, run_gate
from draftproof.recipe import Recipe
from draftproof.records.rows import write_rows

RECIPE = Recipe.model_validate({"target": {"model": "x"}, "data": {"train": "x"}, "run": {"dir": "x"}})
CHECKS = (data.data_supervised_share, data.data_template, data.data_split, data.data_finish_reasons)


@pytest.fixture
def good(tt_plain, tm_folder, tmp_path):
    target = make_target(tm_folder, tmp_path / "target", tt_plain)
    lines = [chat(f"Question {n}?", f"The answer {n}.", "And then?", "Then the end.", finish_reason="stop") for n in range(8)]
    return target, prepare(target, tmp_path, lines).all()


def _findings(target, rows, tmp_path, max_length=4096):
    folder = tmp_path / "spoilt"
    write_rows(folder, rows)
    recipe = RECIPE.model_copy(update={"data": RECIPE.data.model_copy(update={"max_length": max_length})})
    context = GateContext("extract", "before", recipe, target, {"prepare": folder}, tmp_path, None)
    return {finding.check: finding for finding in run_gate(context, CHECKS, protects="x").findings}


def test_good_rows_pass(good, tmp_path):
    findings = _findings(*good, tmp_path)
    assert {name: finding.status for name, finding in findings.items()} == {
        "data.supervised_share": "pass",
        "data.template": "pass",
        "data.split": "pass",
        "data.finish_reasons": "pass",
    }


def test_nothing_supervised(good, tmp_path):
    target, rows = good
    rows[3] = replace(rows[3], supervised=np.zeros_like(rows[3].supervised), turn_start=())
    finding = _findings(target, rows, tmp_path)["data.supervised_share"]
    assert finding.status == "fail"
    assert "1 of 8 rows" in finding.evidence
    assert "data.jsonl:4" in finding.evidence


def test_everything_supervised(good, tmp_path):
    target, rows = good
    rows[0] = replace(rows[0], supervised=np.ones_like(rows[0].supervised), turn_start=(0,))
    findings = _findings(target, rows, tmp_path)
    assert findings["data.supervised_share"].status == "fail"
    assert findings["data.template"].status == "fail"


def test_hardly_anything_supervised(good, tmp_path):
    target, rows = good
    long = [
        replace(row, token_ids=np.resize(row.token_ids, 5000), supervised=np.append(np.zeros(4997, bool), [True] * 3), turn_start=(4997,))
        for row in rows
    ]
    assert _findings(target, long, tmp_path)["data.supervised_share"].status == "warn"


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_mask_that_is_off_by_one(shift, good, tmp_path):
    target, rows = good
    rows[0] = replace(rows[0], supervised=np.roll(rows[0].supervised, shift), turn_start=tuple(t + shift for t in rows[0].turn_start))
    finding = _findings(target, rows, tmp_path)["data.template"]
    assert finding.status == "fail"
    assert "data.jsonl:1" in finding.evidence


def test_an_answer_in_the_middle_without_its_end(good, tmp_path):
    target, rows = good
    mask = rows[0].supervised.copy()
    end = rows[0].turn_start[0] + int(np.argmin(mask[rows[0].turn_start[0] :])) - 1
    mask[end] = False
    rows[0] = replace(rows[0], supervised=mask)
    finding = _findings(target, rows, tmp_path)["data.template"]
    assert (finding.status, "no stop token" in finding.evidence) == ("fail", True)


@pytest.mark.parametrize(
    ("reason", "max_length", "status"),
    [("stop", 4096, "fail"), ("", 4096, "fail"), ("length", 4096, "pass"), ("content_filter", 4096, "pass"), ("stop", None, "pass")],
    ids=["stop", "missing", "length", "other", "cut to max_length"],
)
def test_a_last_answer_without_its_end(reason, max_length, status, good, tmp_path):
    target, rows = good
    short = replace(rows[0], token_ids=rows[0].token_ids[:-1], supervised=rows[0].supervised[:-1], finish_reason=reason)
    rows[0] = short
    finding = _findings(target, rows, tmp_path, max_length or len(short.token_ids))["data.template"]
    assert finding.status == status
    assert ("no stop token" in finding.evidence) == (status == "fail")


def test_a_last_answer_that_fills_the_targets_positions_needs_no_end(good, tmp_path):
    target, rows = good
    mask = np.arange(256) >= rows[0].turn_start[0]
    ids = np.append(rows[0].token_ids[: rows[0].turn_start[0]], np.full(int(mask.sum()), 70, np.int32))
    rows[0] = replace(rows[0], token_ids=ids, supervised=mask, turn_start=rows[0].turn_start[:1])
    assert _findings(target, rows, tmp_path)["data.template"].status == "pass"


def test_the_rows_are_read_once_for_all_checks(good, tmp_path, monkeypatch):
    from draftproof.records import rows as records

    reads = []
    read_rows = records.read_rows
    monkeypatch.setattr(records, "read_rows", lambda folder: reads.append(folder) or read_rows(folder))
    assert len(_findings(*good, tmp_path)) == len(CHECKS)
    assert reads == [tmp_path / "spoilt"]


def test_the_thinking_template_passes(tt_plain, tm_folder, tmp_path):
    import copy

    tokenizer = copy.deepcopy(tt_plain)
    tokenizer.chat_template = THINKING
    target = make_target(tm_folder, tmp_path / "thinking", tokenizer)
    lines = [chat(f"Question {n}?", f"The answer {n}.") for n in range(4)]
    lines[0]["messages"][1]["reasoning_content"] = "So."
    rows = prepare(target, tmp_path, lines).all()
    assert _findings(target, rows, tmp_path)["data.template"].status == "pass"


def test_a_conversation_in_both_splits(good, tmp_path):
    target, rows = good
    held_out = next(row for row in rows if row.split == "validation")
    rows.append(replace(held_out, split="train", row_key="other"))
    finding = _findings(target, rows, tmp_path)["data.split"]
    assert finding.status == "fail"
    assert held_out.source in finding.evidence


def test_one_split_is_empty(good, tmp_path):
    target, rows = good
    finding = _findings(target, [replace(row, split="train") for row in rows], tmp_path)["data.split"]
    assert (finding.status, "0 held-out rows" in finding.evidence) == ("fail", True)


def test_without_rows_it_cannot_be_told(tmp_path):
    context = GateContext("extract", "before", RECIPE, None, {}, tmp_path, None)
    assert {finding.status for finding in run_gate(context, CHECKS, protects="x").findings} == {"unknown"}
