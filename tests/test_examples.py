"""The examples are what their generators make."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_demos_prompts_are_those_of_the_script():
    made = runpy.run_path(str(EXAMPLES / "make_prompts.py"))["rendered"]()
    assert (EXAMPLES / "prompts" / "demo.jsonl").read_text(encoding="utf-8") == made


def test_the_demos_prompts_differ_and_are_spread_over_kinds():
    rows = [json.loads(line) for line in (EXAMPLES / "prompts" / "demo.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({row["id"] for row in rows}) == len({row["messages"][0]["content"] for row in rows}) == len(rows) > 300
    kinds = Counter(row["category"] for row in rows)
    assert len(kinds) == 8
    assert min(kinds.values()) >= 36
