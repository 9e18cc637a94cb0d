"""A14: answers stopped by the length limit are not complete, and are counted as such."""

from __future__ import annotations

import pytest
from tests.helpers.preparing import chat, make_target, prepare, supervised_texts

from draftproof.gate.data import data_finish_reasons
from draftproof.gate.gate import GateContext
from draftproof.recipe import Recipe

REASONS = ["stop"] * 6 + ["length"] * 3 + [None]


@pytest.fixture
def done(tt_plain, tm_folder, tmp_path):
    target = make_target(tm_folder, tmp_path / "target", tt_plain)
    lines = [chat(f"Question {n}?", f"Some answer {n}.", **({"finish_reason": r} if r else {})) for n, r in enumerate(REASONS)]
    return prepare(target, tmp_path, lines)


def test_the_end_token_is_supervised_only_where_the_target_produced_it(done, tt_plain):
    for row, reason in zip(done.all(), REASONS, strict=True):
        n = int(row.source.split(":")[1]) - 1
        wanted = f"Some answer {n}." + ("" if reason == "length" else "<|im_end|>")
        assert supervised_texts(tt_plain, row) == [wanted]
        assert row.finish_reason == (reason or "")


def test_each_reason_is_counted(done):
    assert done.report["finish_reasons"] == {"stop": 6, "length": 3, "missing": 1}


def test_the_gate_warns_above_ten_percent(done, tmp_path):
    recipe = Recipe.model_validate({"target": {"model": "x"}, "data": {"train": "x"}, "run": {"dir": "x"}})
    finding = data_finish_reasons(GateContext("extract", "before", recipe, None, {"prepare": tmp_path / "out"}, tmp_path, None))
    assert finding.status == "warn"
    assert "30%" in finding.evidence
    assert "length 3" in finding.evidence
    assert "missing 1" in finding.evidence


def test_an_unknown_reason_does_not_vouch_for_the_end_token(tt_plain, tm_folder, tmp_path):
    target = make_target(tm_folder, tmp_path / "target2", tt_plain)
    (tmp_path / "b").mkdir()
    lines = [chat(f"Question {n}?", f"Some answer {n}.", finish_reason="content_filter") for n in range(2)]
    rows = prepare(target, tmp_path / "b", lines).all()
    assert [supervised_texts(tt_plain, row) for row in rows] == [["Some answer 0."], ["Some answer 1."]]
