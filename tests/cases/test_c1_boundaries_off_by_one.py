"""C1: one written list of layer ids selects different layers in two engines; the gate names the shift."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.extraction import gate_checkpoint, open_tm, stage_task, write_random_rows

from draftproof.errors import Refused
from draftproof.extract import stage
from draftproof.extract.engines.transformers import TransformersEngine
from draftproof.recipe import ExtractSettings
from draftproof.target.boundaries import to_sglang, to_vllm

SETTINGS = ExtractSettings(boundaries=(2, 4, 5))


def _vllm_rule(written: Sequence[int]) -> list[int]:
    """Boundaries that vLLM reads for the ids written in a config."""
    return list(written)


def _sglang_rule(written: Sequence[int]) -> list[int]:
    """Boundaries that SGLang's Llama family reads for the ids written in a config."""
    return [i + 1 for i in written]


class _Rule(TransformersEngine):
    """An engine of one of the two conventions, given the same list."""

    shift = 0

    def __init__(self, target: Any, boundaries: Sequence[int], device: str) -> None:
        super().__init__(target, [b + self.shift for b in boundaries], device)


class _TakesOutputs(_Rule):
    shift = 1


class _TakesInputsOfEarlier(_Rule):
    shift = -1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("engine", "matches"), [(_TakesOutputs, (3, 5, 6)), (_TakesInputsOfEarlier, (1, 3, 4))])
def test_the_gate_names_the_shift_and_nothing_is_stored(
    tmp_path: Path, tm_folder: Path, monkeypatch: pytest.MonkeyPatch, engine: type[_Rule], matches: tuple[int, ...], dtype: str
) -> None:
    write_random_rows(tmp_path / "prepare", [20, 11, 17])
    monkeypatch.setattr(stage, "TransformersEngine", engine)
    target = open_tm(tm_folder, dtype)
    with pytest.raises(Refused) as refusal:
        stage.run(stage_task(tmp_path / "prepare", tmp_path / "out", gate_checkpoint(target)), SETTINGS, target)
    for wanted, found in zip((2, 4, 5), matches, strict=True):
        assert f"stored as boundary {wanted} " in refusal.value.what
        assert f"matches boundary {found} (shift {engine.shift:+d})" in refusal.value.what
    assert f"All are shifted by {engine.shift:+d}." in refusal.value.what
    assert not list((tmp_path / "out").glob("shard-*"))


def test_the_right_engine_passes(tmp_path: Path, tm_folder: Path) -> None:
    write_random_rows(tmp_path / "prepare", [20, 11, 17])
    target = open_tm(tm_folder, "float32")
    outcome = stage.run(stage_task(tmp_path / "prepare", tmp_path / "out", gate_checkpoint(target)), SETTINGS, target)
    assert outcome.counts["boundaries"] == [2, 4, 5]


def test_each_engine_reads_our_boundaries_from_its_own_spelling() -> None:
    assert _vllm_rule(to_vllm((2, 4, 5))) == [2, 4, 5]
    assert _sglang_rule(to_sglang((2, 4, 5))) == [2, 4, 5]
    assert _sglang_rule(to_vllm((2, 4, 5))) == [3, 5, 6]  # the fault
