"""The transformers engine against transformers itself, one row at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.helpers.extraction import BOUNDARIES, open_tm

from draftproof.extract.engines import transformers as engine_module
from draftproof.extract.engines.transformers import TransformersEngine, reference_boundaries
from draftproof.target.loaded import compute_dtype

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def _rows() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    return {f"row-{n}": generator.integers(3, 300, n).astype(np.int32) for n in (7, 41, 13, 1)}


def test_states_are_those_of_transformers_for_each_row_alone(tm_folder: Path, tm: LlamaForCausalLM) -> None:
    engine = TransformersEngine(open_tm(tm_folder, "float32"), BOUNDARIES, "cpu")
    engine.load()
    rows = _rows()
    answers = engine.states(rows)
    assert list(answers) == list(rows)
    for key, ids in rows.items():
        output = tm(input_ids=torch.from_numpy(ids[None].astype(np.int64)), output_hidden_states=True)
        wanted = torch.stack([output.hidden_states[k][0] for k in BOUNDARIES], 1)
        assert answers[key].aux.dtype == torch.bfloat16
        torch.testing.assert_close(answers[key].aux.float(), wanted, rtol=2**-7, atol=1e-6)
        # hidden_states[8] is after the norm: TM's norm weight (0.2 to 3) and eps undo it
        final = answers[key].final.float()
        normed = final * torch.rsqrt(final.square().mean(-1, keepdim=True) + tm.config.rms_norm_eps) * tm.model.norm.weight
        torch.testing.assert_close(normed, output.hidden_states[8][0], rtol=2**-6, atol=1e-3)
        assert torch.equal(answers[key].teacher_top1.long(), output.logits[0].argmax(-1))
        assert answers[key].logprobs is None


def test_logprobs_are_those_of_the_models_own_logits(tm_folder: Path, tm: LlamaForCausalLM) -> None:
    engine = TransformersEngine(open_tm(tm_folder, "float32"), BOUNDARIES, "cpu")
    engine.load()
    rows = _rows()
    for key, answer in engine.states(rows, logprobs=True).items():
        ids = torch.from_numpy(rows[key].astype(np.int64))
        scores = torch.log_softmax(tm(input_ids=ids[None]).logits[0].double(), -1)
        assert answer.logprobs is not None
        assert answer.logprobs.shape == (len(ids) - 1,)
        wanted = torch.tensor([scores[t, ids[t + 1]] for t in range(len(ids) - 1)], dtype=torch.float64)
        torch.testing.assert_close(answer.logprobs.double(), wanted, rtol=0, atol=1e-5)
        assert torch.equal(answer.teacher_top1.long(), scores.argmax(-1))


def test_top1_does_not_depend_on_the_chunk_size(tm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformersEngine(open_tm(tm_folder, "float32"), BOUNDARIES, "cpu")
    engine.load()
    whole = engine.states(_rows())
    monkeypatch.setattr(engine_module, "LOGITS_AT_ONCE", 320 * 5)  # 5 tokens a chunk
    for key, answer in engine.states(_rows()).items():
        assert torch.equal(answer.teacher_top1, whole[key].teacher_top1)


def test_boundaries_after_the_last_block_and_the_embeddings_are_the_reference_ends(tm_folder: Path, tm: LlamaForCausalLM) -> None:
    ids = _rows()["row-13"]
    reference = reference_boundaries(tm, ids)
    assert reference is not None
    assert reference.shape == (13, 9, 32)
    assert torch.equal(reference[:, 0], tm.model.embed_tokens.weight[torch.from_numpy(ids.astype(np.int64))])
    torch.testing.assert_close(
        tm.lm_head(tm.model.norm(reference[:, 8])), tm(input_ids=torch.from_numpy(ids[None].astype(np.int64))).logits[0]
    )


def test_no_hook_is_left_on_the_model(tm_folder: Path) -> None:
    engine = TransformersEngine(open_tm(tm_folder, "float32"), BOUNDARIES, "cpu")
    engine.load()
    engine.states(_rows())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in engine.model.modules())
    reference_boundaries(engine.model, _rows()["row-7"])
    assert not engine.model.model.norm._forward_hooks  # transformers leaves its own on the blocks
    engine.close()
    engine.close()
    assert engine.model is None


@pytest.mark.parametrize(
    ("written", "native", "device", "computed"),
    [
        ("auto", False, "cpu", "float32"),
        ("auto", True, "cpu", "bfloat16"),
        ("auto", False, "cuda", "bfloat16"),
        ("bfloat16", False, "cpu", "bfloat16"),
        ("float32", True, "cuda", "float32"),
    ],
)
def test_compute_dtype(make_tm_bf16: Path, monkeypatch: pytest.MonkeyPatch, written: str, native: bool, device: str, computed: str) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: native)
    assert compute_dtype(open_tm(make_tm_bf16, written), device) == computed


@pytest.fixture(scope="module")
def make_tm_bf16(tm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TM whose config says bfloat16."""
    import json
    import shutil

    folder = tmp_path_factory.mktemp("tm-bf16") / "target"
    shutil.copytree(tm_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    return folder
