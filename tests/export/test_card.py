"""The model card: what it says before and after anything was measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import pytest
import yaml

from draftproof.errors import DataError
from draftproof.export.card import complete_card, write_card
from tiny_draft import TD, VERIFIER

RESULT = {
    "acceptance_length": 2.125,
    "acceptance_by_position": (0.6, 0.35, 0.175),
    "by_category": {"writing": {"acceptance_length": 2.0}, "math": {"acceptance_length": 2.25}},
    "draft_tokens": 3,
    "decoding": "greedy, chain",
    "engine": "transformers reference, float32",
    "prompts": 20,
}


def _card(folder: Path, engine: Literal["vllm", "sglang"] = "vllm") -> str:
    folder.mkdir(exist_ok=True)
    return write_card(folder, engine, TD, VERIFIER, draft_tokens=3, training={"steps": 1200, "loss": 1.23456}).read_text()


def test_a_card_says_what_it_is_and_claims_nothing(tmp_path: Path) -> None:
    text = _card(tmp_path / "vllm")
    front = yaml.safe_load(text.split("---")[1])
    assert front["base_model"] == "acme/tiny"
    assert "| boundaries read (residual stream after that many blocks) | 2, 4, 6 |" in text
    assert "| draft vocabulary | 64 of 320 tokens |" in text
    assert "| steps | 1,200 |" in text
    assert "## Measured acceptance\n\nNot measured yet.\n" in text
    assert not re.search(r"TODO|TBD|<[A-Z]+>|\bXXX\b|\{\w*\}", text)


@pytest.mark.parametrize(
    ("engine", "command"),
    [
        ("vllm", """vllm serve acme/tiny --speculative-config '{"model": ".", "method": "eagle3", "num_speculative_tokens": 3}'"""),
        ("sglang", "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"),
    ],
)
def test_a_card_says_how_to_serve(tmp_path: Path, engine: Literal["vllm", "sglang"], command: str) -> None:
    assert command in _card(tmp_path / engine, engine)


def test_measured_figures_replace_what_was_not_measured(tmp_path: Path) -> None:
    before = _card(tmp_path)
    complete_card(tmp_path, RESULT)
    text = (tmp_path / "README.md").read_text()
    assert "Acceptance length **2.12**" in text
    assert "0.600, 0.350, 0.175" in text
    assert "| math | 2.25 |\n| writing | 2.00 |" in text
    assert "While serving: not measured yet." in text
    assert text.startswith(before.split("## Measured")[0])


def test_completing_twice_says_the_last(tmp_path: Path) -> None:
    _card(tmp_path)
    complete_card(tmp_path, RESULT)
    served = {"engine": "vllm 0.32.0", "acceptance_length": 2.5, "acceptance_by_position": [0.7, 0.5, 0.3], "drafts": 8, "accepted": 12}
    complete_card(tmp_path, RESULT | {"acceptance_length": 3.0, "served": served})
    text = (tmp_path / "README.md").read_text()
    assert text.count("## Measured acceptance") == 1
    assert text.count("Acceptance length **") == 2
    assert "**3.00**" in text
    assert "Acceptance length **2.50** (1 + accepted tokens a cycle), K=3, greedy, chain, 20 prompts, vllm 0.32.0." in text
    assert text.count("| math | 2.25 |") == 1
    assert "not measured yet" not in text.lower()


def test_a_folder_without_a_card_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"README\.md"):
        complete_card(tmp_path, RESULT)
