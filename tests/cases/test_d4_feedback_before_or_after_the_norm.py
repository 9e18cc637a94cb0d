"""D4: which state is fed to the next step, before or after the final norm. The head always gets the normalised one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftproof.errors import DataError
from draftproof.export.files import target_embedding
from draftproof.export.forward import LoadedDraft
from draftproof.export.loaders import load_sglang, load_vllm
from draftproof.export.proof import prove, trained_chain
from draftproof.export.schema import describe
from draftproof.export.sglang import to_sglang
from draftproof.export.vllm import to_vllm
from draftproof.target.target import Target
from tiny_draft import masters, spoil, tiny_config, tiny_draft, tiny_mapping


def _exported(engine: str, folder: Path, target: Target, *, norm_output: bool) -> None:
    config = tiny_config(norm_output=norm_output)
    if engine == "vllm":
        to_vllm(folder, masters(tiny_draft(config)), config, tiny_mapping(), target, draft_tokens=3)
    else:
        to_sglang(folder, masters(tiny_draft(config)), config, tiny_mapping(), target)


def _load(engine: str, folder: Path, target: Target) -> LoadedDraft:
    return {"vllm": load_vllm, "sglang": load_sglang}[engine](folder, describe(target), target_embedding(target))


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_two_steps_of_an_independent_forward_follow_the_flag(engine: str, norm_output: bool, tm_target: Target, tmp_path: Path) -> None:
    _exported(engine, tmp_path, tm_target, norm_output=norm_output)
    assert json.loads((tmp_path / "config.json").read_text())["norm_output"] is norm_output
    draft, embedding = tiny_draft(tiny_config(norm_output=norm_output)), target_embedding(tm_target)
    assert prove(_load(engine, tmp_path, tm_target), draft, tiny_mapping(), embedding, layers=8, seed=0) < 1e-5


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_other_flag_in_the_config_is_another_model(engine: str, norm_output: bool, tm_target: Target, tmp_path: Path) -> None:
    """The first step is the same with either flag: only the second tells."""
    _exported(engine, tmp_path, tm_target, norm_output=norm_output)
    spoil(tmp_path, config=lambda config: config.update(norm_output=not norm_output))
    draft, embedding = tiny_draft(tiny_config(norm_output=norm_output)), target_embedding(tm_target)
    loaded = _load(engine, tmp_path, tm_target)
    import torch

    states = {boundary: torch.randn(5, 32, generator=torch.Generator().manual_seed(boundary)) for boundary in range(1, 8)}
    tokens = [7, 300, 12, 0, 44, 9]
    kept = torch.from_numpy(tiny_mapping().kept)
    ours, theirs = trained_chain(draft, tiny_mapping(), embedding, states, tokens)[:, kept], loaded.chain(states, tokens, steps=2)[:, kept]
    assert torch.allclose(ours[0], theirs[0], rtol=1e-4, atol=1e-4)
    assert (ours[1] - theirs[1]).abs().max() > 0.05
    with pytest.raises(DataError, match="its logits differ"):
        prove(loaded, draft, tiny_mapping(), embedding, layers=8, seed=0)


@pytest.mark.parametrize("norm_output", [False, True])
def test_the_head_always_gets_the_normalised_state(norm_output: bool) -> None:
    """By hand: lm_head of x / rms(x) * weight."""
    import torch

    draft = tiny_draft(tiny_config(norm_output=norm_output))
    state = torch.randn(3, 32, generator=torch.Generator().manual_seed(5)) * 7
    normed = state / (state.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * draft.norm.weight
    assert torch.allclose(draft.logits(state), normed @ draft.lm_head.weight.T, rtol=1e-4, atol=1e-4)
    assert torch.allclose(draft.feedback(state), normed if norm_output else state, rtol=1e-5, atol=1e-5)
