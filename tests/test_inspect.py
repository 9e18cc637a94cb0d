"""What `inspect` says of exported drafts and of targets that stand alone. Runs and artifacts: tests/test_bad_input.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof.artifact import write_json
from draftproof.export.sglang import to_sglang
from draftproof.export.vllm import to_vllm
from draftproof.inspect import describe
from draftproof.target.target import Target
from tiny_draft import TD, masters, spoil, tiny_draft, tiny_mapping

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def export(tm_target: Target, tmp_path: Path) -> Path:
    """TD for both engines, with the hashes beside them, as the export leaves them."""
    draft, mapping = tiny_draft(), tiny_mapping()
    hashes = {
        "vllm": to_vllm(tmp_path / "vllm", masters(draft), TD, mapping, tm_target, draft_tokens=3),
        "sglang": to_sglang(tmp_path / "sglang", masters(draft), TD, mapping, tm_target),
    }
    write_json(tmp_path / "tensors.json", hashes)
    return tmp_path


def _drop(tensors: Tensors) -> None:
    del tensors["fc.weight"]


def _nan(tensors: Tensors) -> None:
    tensors["lm_head.weight"][3, 1] = float("nan")


def _narrow(tensors: Tensors) -> None:
    tensors["norm.weight"] = tensors["norm.weight"][:-1].clone()


def _foreign(tensors: Tensors) -> None:
    tensors["layers.1.mlp.up_proj.weight"] = torch.ones(2, 2)


def _half(tensors: Tensors) -> None:
    tensors["norm.weight"] = tensors["norm.weight"].half()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (_drop, "fc.weight is missing."),
        (_nan, "lm_head.weight holds NaN or infinity."),
        (_narrow, "norm.weight is [31], not [32]."),
        (_foreign, "layers.1.mlp.up_proj.weight has no place in the module."),
        (_half, "norm.weight is float16, the config says float32."),
    ],
)
def test_a_draft_with_wrong_tensors_is_not_whole(export: Path, engine: str, fault: Callable[[Tensors], None], sentence: str) -> None:
    assert describe(export / engine)["whole"]
    spoil(export / engine, tensors=fault)
    facts = describe(export / engine)
    assert (facts["whole"], facts["problems"]) == (False, [sentence])


def test_a_draft_for_vllm_has_the_targets_embedding(export: Path) -> None:
    spoil(export / "vllm", tensors=lambda tensors: tensors.pop("embed_tokens.weight"))
    assert describe(export / "vllm")["problems"] == ["embed_tokens.weight is missing."]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_verify_compares_a_draft_with_what_was_exported(export: Path, engine: str) -> None:
    clean = describe(export / engine, deep=True)
    assert clean["whole"]
    assert f"tensors compared with {export / 'tensors.json'}" in clean["lines"][-1]

    def nudge(tensors: Tensors) -> None:
        tensors["norm.weight"][0] += 0.5

    spoil(export / engine, tensors=nudge)
    assert describe(export / engine)["whole"], "a number that could be right"
    assert describe(export / engine, deep=True)["problems"] == ["norm.weight is not what was exported."]
    (export / "tensors.json").unlink()
    alone = describe(export / engine, deep=True)
    assert alone["whole"]
    assert "compared with nothing" in alone["lines"][-1]


@pytest.mark.parametrize("deep", [False, True])
def test_a_target_is_proven_by_its_headers_and_it_says_so(tm_folder: Path, deep: bool) -> None:
    facts: dict[str, Any] = describe(tm_folder, deep=deep)
    assert facts["whole"]
    assert "nothing records what the bytes of its weights should be" in facts["lines"][-1]
