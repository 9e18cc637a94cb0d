"""The canary's gate: every seeded fault is refused by a message that names it, and the clean twin passes.

Faults are made from clean evidence of the real engine, on TM, computing in float32 and in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.extraction import canary, gate_context, open_tm, write_random_rows

from draftproof.gate.finding import Finding
from draftproof.gate.parity import parity_batching, parity_boundaries, parity_logprobs, parity_rows
from draftproof.records.codec import decode, encode
from draftproof.stage import CanaryEvidence, CanaryRow
from draftproof.target.target import Target

CHECKS = (parity_rows, parity_logprobs, parity_batching, parity_boundaries)
LENGTHS = (7, 33, 7, 30, 33, 60, 12)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def target(request: pytest.FixtureRequest, tm_folder: Path) -> Target:
    return open_tm(tm_folder, request.param)


@pytest.fixture(scope="module")
def clean(target: Target, tmp_path_factory: pytest.TempPathFactory) -> CanaryEvidence:
    rows = write_random_rows(tmp_path_factory.mktemp("rows"), LENGTHS, shared=5)
    return canary(target, rows)


def _with(evidence: CanaryEvidence, change: Callable[[CanaryRow], dict[str, Any]], rows: Sequence[int] | None = None) -> CanaryEvidence:
    """Evidence with some rows changed (all, if `rows` is None)."""
    wanted = range(len(evidence.rows)) if rows is None else rows
    return replace(evidence, rows=tuple(replace(row, **change(row)) if i in wanted else row for i, row in enumerate(evidence.rows)))


def _bf16(states: np.ndarray) -> np.ndarray:
    import torch

    rounded: np.ndarray = torch.from_numpy(states).to(torch.bfloat16).float().numpy()
    return rounded


def _final_norm(target: Target, states: np.ndarray) -> np.ndarray:
    """RMSNorm in plain numpy, with the weight from the file."""
    weight = target.weights().read("model.norm.weight").float().numpy()
    return _bf16((states / np.sqrt((states.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6) * weight).astype(np.float32))


def _findings(target: Target | None, evidence: Any) -> dict[str, Finding]:
    return {check.__name__: check(gate_context(target, evidence)) for check in CHECKS}


def test_clean_states_pass_every_check(target: Target, clean: CanaryEvidence) -> None:
    found = _findings(target, clean)
    assert {name: finding.status for name, finding in found.items()} == dict.fromkeys((c.__name__ for c in CHECKS), "pass"), found
    assert found["parity_rows"].check == "parity.rows"
    assert "182 tokens" in found["parity_rows"].evidence
    assert "equal lengths" in found["parity_batching"].evidence
    assert "Boundaries 2, 4, 5, 8" in found["parity_boundaries"].evidence


def test_clean_fp8_states_pass_every_check(target: Target, clean: CanaryEvidence) -> None:
    import torch

    def coarse(row: CanaryRow) -> dict[str, Any]:
        return {"aux": decode(encode(torch.from_numpy(row.aux), "fp8"), "fp8", torch.float32).numpy()}

    found = _findings(target, replace(_with(clean, coarse), codec="fp8"))
    assert all(finding.status == "pass" for finding in found.values()), found


def test_final_after_the_norm_is_named(target: Target, clean: CanaryEvidence) -> None:
    found = _findings(target, _with(clean, lambda row: {"final": _final_norm(target, row.final)}))
    assert found["parity_logprobs"].status == "fail"
    assert "This fits: the stored state is already after the final norm." in found["parity_logprobs"].evidence
    assert found["parity_boundaries"].status == "fail"
    assert "stored as boundary 8" in found["parity_boundaries"].evidence
    assert "matches boundary L after the final norm" in found["parity_boundaries"].evidence


def test_norm_applied_twice_is_named(target: Target, clean: CanaryEvidence) -> None:
    found = _findings(target, _with(clean, lambda row: {"final": _final_norm(target, _final_norm(target, row.final))}))
    assert found["parity_logprobs"].status == "fail"
    assert "This fits: the final norm was applied twice to the stored state." in found["parity_logprobs"].evidence


def test_the_boundary_before_as_final_is_named(target: Target, clean: CanaryEvidence) -> None:
    found = _findings(target, _with(clean, lambda row: {"final": _bf16(row.reference[:, 7])}))  # type: ignore[index]  # TM is small
    assert found["parity_logprobs"].status == "fail"
    assert "None of these fits" in found["parity_logprobs"].evidence
    assert "stored as boundary 8" in found["parity_boundaries"].evidence
    assert "matches boundary 7 (shift -1)" in found["parity_boundaries"].evidence


@pytest.mark.parametrize("shift", [-1, 1])
def test_all_boundaries_shifted_by_one_are_named(target: Target, clean: CanaryEvidence, shift: int) -> None:
    ids = [k + shift for k in clean.boundaries]
    found = _findings(target, _with(clean, lambda row: {"aux": _bf16(row.reference[:, ids])}))  # type: ignore[index]  # TM is small
    sentence = found["parity_boundaries"].evidence
    assert found["parity_boundaries"].status == "fail"
    assert "what is stored as boundary 2 has cosine 0." in sentence
    assert f"matches boundary {2 + shift} (shift {shift:+d})" in sentence
    assert f"matches boundary {5 + shift} (shift {shift:+d})" in sentence
    assert f"All are shifted by {shift:+d}." in sentence
    assert found["parity_logprobs"].status == "pass"


def test_one_shifted_boundary_is_named_alone(target: Target, clean: CanaryEvidence) -> None:
    found = _findings(target, _with(clean, lambda row: {"aux": _bf16(row.reference[:, [2, 5, 5]])}))  # type: ignore[index]  # TM is small
    sentence = found["parity_boundaries"].evidence
    assert "stored as boundary 4" in sentence
    assert "matches boundary 5 (shift +1)" in sentence
    assert "stored as boundary 2" not in sentence
    assert "All" not in sentence
    assert "boundary 4 and boundary 5 are the same" in found["parity_rows"].evidence


def test_swapped_batch_mates_are_named(target: Target, clean: CanaryEvidence) -> None:
    [a, b] = [i for i, row in enumerate(clean.rows) if len(row.token_ids) == 33]
    rows = list(clean.rows)
    mates = [(rows[a], rows[b]), (rows[b], rows[a])]
    rows[a], rows[b] = (replace(row, aux=mate.aux, batched_aux=mate.batched_aux, final=mate.final) for row, mate in mates)
    found = _findings(target, replace(clean, rows=tuple(rows)))
    assert found["parity_rows"].status == "pass"  # shapes are right
    assert found["parity_batching"].status == "fail"
    first, second = sorted((a, b))
    assert f"Row {rows[first].row_key}" in found["parity_batching"].evidence
    assert f"they are the states of row {rows[second].row_key}" in found["parity_batching"].evidence
    assert found["parity_logprobs"].status == "fail"
    assert found["parity_boundaries"].status == "fail"


def _zero_front(row: CanaryRow) -> dict[str, Any]:
    aux, final = row.aux.copy(), row.final.copy()
    aux[:4], final[:4] = 0, 0
    return {"aux": aux, "final": final}


def _short(row: CanaryRow) -> dict[str, Any]:
    return {"aux": row.aux[4:], "final": row.final[4:]}


def _stuck(row: CanaryRow) -> dict[str, Any]:
    aux = row.aux.copy()
    aux[3] = aux[2]
    return {"aux": aux}


def _not_finite(row: CanaryRow) -> dict[str, Any]:
    final = row.final.copy()
    final[5, 1] = np.nan
    return {"final": final}


def _one_boundary_twice(row: CanaryRow) -> dict[str, Any]:
    return {"aux": row.aux[:, [0, 1, 1]]}


def _huge(row: CanaryRow) -> dict[str, Any]:
    return {"aux": row.aux * 1e9}


def _axes_swapped(row: CanaryRow) -> dict[str, Any]:
    return {"aux": row.aux.transpose(1, 0, 2)}


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (_zero_front, "boundary 2 is all zero at token 0 (4 of {T} tokens are)"),
        (_short, "aux has states [{short}, 3] for {T} tokens and 3 boundaries"),
        (_stuck, "boundary 2 is the same at tokens 2 and 3"),
        (_not_finite, "the final state is not finite at token 5"),
        (_one_boundary_twice, "boundary 4 and boundary 5 are the same"),
        (_huge, "boundary 2 has an implausible size"),
        (_axes_swapped, "aux has states [3, {T}] for {T} tokens"),
    ],
)
def test_damaged_rows_are_named(target: Target, clean: CanaryEvidence, fault: Callable[[CanaryRow], dict[str, Any]], sentence: str) -> None:
    victim = clean.rows[1]
    finding = parity_rows(gate_context(target, _with(clean, fault, rows=[1])))
    assert finding.status == "fail"
    assert f"Row {victim.row_key}" in finding.evidence
    assert sentence.format(T=len(victim.token_ids), short=len(victim.token_ids) - 4) in finding.evidence


def test_checks_that_cannot_compare_say_so_and_do_not_pass(target: Target, clean: CanaryEvidence) -> None:
    found = _findings(target, _with(clean, _short, rows=[1]))
    assert [found[c.__name__].status for c in CHECKS] == ["fail", "unknown", "unknown", "unknown"]
    for evidence in (None, {"shard": 1}, replace(clean, rows=())):
        assert {finding.status for finding in _findings(target, evidence).values()} == {"unknown"}
    assert _findings(None, clean)["parity_logprobs"].status == "unknown"


def test_a_run_of_one_token_may_repeat_its_state(target: Target, tmp_path: Path) -> None:
    """Equal tokens from the start have equal values at every position, so attention gives equal outputs."""
    from tests.helpers.extraction import row

    from draftproof.records.rows import read_rows, write_rows

    write_rows(tmp_path, [row(np.full(9, 7, np.int32), "same"), row(np.arange(3, 20, dtype=np.int32), "other")])
    evidence = canary(target, read_rows(tmp_path))
    [same] = [r for r in evidence.rows if len(r.token_ids) == 9]
    assert np.allclose(same.aux[1:], same.aux[:-1], rtol=0.02, atol=1e-3)
    assert parity_rows(gate_context(target, _with(evidence, lambda r: {"aux": _held(r)}))).status == "pass"


def _held(row: CanaryRow) -> np.ndarray:
    """The exact repeats that such a row may have."""
    return np.repeat(row.aux[:1], len(row.aux), 0) if len(row.aux) == 9 else row.aux


def test_a_large_target_without_reference_and_a_single_row_are_warned_about(target: Target, clean: CanaryEvidence) -> None:
    blind = _with(clean, lambda row: {"reference": None})
    assert parity_boundaries(gate_context(target, blind)).status == "warn"
    assert parity_batching(gate_context(target, replace(clean, rows=clean.rows[:1]))).status == "warn"


def test_a_wrong_norm_convention_is_named(target: Target, clean: CanaryEvidence) -> None:
    """The config reader takes TM for a Gemma: w is used where the file means w, but 1 + w is computed."""
    wrong = replace(target, config=replace(target.config, norm_convention="one_plus_weight"))
    finding = parity_logprobs(gate_context(wrong, clean))
    assert finding.status == "fail"
    assert "the engine's final norm is of the other kind (weight)" in finding.evidence
