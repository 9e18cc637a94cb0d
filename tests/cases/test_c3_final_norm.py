"""C3: the final norm missing, or applied twice: captures before, after and after-twice; the gate says which fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.extraction import gate_checkpoint, open_tm, stage_task, write_random_rows

from draftproof.errors import Refused
from draftproof.extract import stage
from draftproof.extract.engines.base import RowStates
from draftproof.extract.engines.transformers import TransformersEngine
from draftproof.recipe import ExtractSettings


class _Normed(TransformersEngine):
    """Captures the final state after the target's own norm module, once or twice."""

    times = 1

    def states(self, batch: Mapping[str, np.ndarray], *, logprobs: bool = False) -> dict[str, RowStates]:
        answers = {}
        for key, answer in super().states(batch, logprobs=logprobs).items():
            final = answer.final.to(self.model.dtype)
            with torch.inference_mode():
                for _ in range(self.times):
                    final = self.model.model.norm(final)
            answers[key] = replace(answer, final=final.to(torch.bfloat16))
        return answers


class _NormedTwice(_Normed):
    times = 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        (_Normed, "This fits: the stored state is already after the final norm"),
        (_NormedTwice, "This fits: the final norm was applied twice to the stored state"),
    ],
)
def test_the_gate_says_how_often_the_norm_was_applied(
    tmp_path: Path, tm_folder: Path, monkeypatch: pytest.MonkeyPatch, engine: type[_Normed], sentence: str, dtype: str
) -> None:
    write_random_rows(tmp_path / "prepare", [20, 20])
    monkeypatch.setattr(stage, "TransformersEngine", engine)
    target = open_tm(tm_folder, dtype)
    with pytest.raises(Refused, match=sentence):
        stage.run(stage_task(tmp_path / "prepare", tmp_path / "out", gate_checkpoint(target)), ExtractSettings(), target)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_state_before_the_norm_passes(tmp_path: Path, tm_folder: Path, dtype: str) -> None:
    write_random_rows(tmp_path / "prepare", [20, 20])
    target = open_tm(tm_folder, dtype)
    stage.run(stage_task(tmp_path / "prepare", tmp_path / "out", gate_checkpoint(target)), ExtractSettings(), target)
