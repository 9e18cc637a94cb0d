"""SmolLM2-135M through the real stage and gate: limits that suit a tiny random target must suit a trained one, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.extraction import gate_context, open_tm, row, stage_task

from draftproof.extract import stage
from draftproof.gate.parity import parity_batching, parity_boundaries, parity_logprobs, parity_rows
from draftproof.recipe import ExtractSettings
from draftproof.records.rows import write_rows
from draftproof.stage import CanaryEvidence, Point

TEXTS = (
    "What is a rainbow? Light is bent in drops of water, and each colour leaves at its own angle.",
    "What is a rainbow? It is a story about the ship that sailed to the end of the world and came back with nothing but rope.",
    "Two and two make four.",
)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["bf16", "fp8"])
def test_clean_states_pass_and_shifted_ones_are_named(tmp_path: Path, smollm2: Path, codec: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    write_rows(tmp_path / "prepare", [row(np.array(tokenizer.encode(text).ids, np.int32), text) for text in TEXTS])
    target = open_tm(smollm2, "auto")
    shown: list[CanaryEvidence] = []

    def keep(point: Point, evidence: Any) -> None:
        if point == "loaded":
            shown.append(evidence)

    settings = ExtractSettings.model_validate({"codec": codec})
    outcome = stage.run(stage_task(tmp_path / "prepare", tmp_path / "extract", keep), settings, target)
    assert outcome.counts["boundaries"] == [2, 15, 27]
    [evidence] = shown
    for check in (parity_rows, parity_logprobs, parity_batching, parity_boundaries):
        finding = check(gate_context(target, evidence))
        assert finding.status == "pass", finding

    shifted = replace(
        evidence,
        rows=tuple(replace(r, aux=r.reference[:, [3, 16, 28]]) for r in evidence.rows if r.reference is not None),
    )
    finding = parity_boundaries(gate_context(target, shifted))
    assert finding.status == "fail"
    assert "All are shifted by +1." in finding.evidence
    unnormed = replace(evidence, rows=tuple(replace(r, final=r.reference[:, 29]) for r in evidence.rows if r.reference is not None))
    assert parity_logprobs(gate_context(target, unnormed)).status == "fail"
