"""C1: two conventions for layer ids; a list that is right for one engine reads other layers in the other."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from draftproof.target.boundaries import default_boundaries, to_sglang, to_vllm
from draftproof.target.loaded import capture

IDS = torch.randint(3, 300, (1, 20), generator=torch.Generator().manual_seed(0))
AUX = (2, 4, 5)


def streams(model: Any) -> list[torch.Tensor]:
    """The residual stream before each block and after the last one, by calling the blocks one by one."""
    hidden = model.model.embed_tokens(IDS)
    positions = torch.arange(IDS.shape[1])[None]
    rotary = model.model.rotary_emb(hidden, positions)
    mask = torch.full((IDS.shape[1], IDS.shape[1]), float("-inf")).triu(1)[None, None]
    found = [hidden]
    for block in model.model.layers:
        hidden = block(hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        found.append(hidden)
    return found


def vllm_reads(found: Sequence[torch.Tensor], written: Sequence[int] | None) -> list[torch.Tensor]:
    """vLLM 0.32, models/llama.py: the mixin is asked with 0 before the blocks and with idx + 1 after block idx."""
    mixin = pytest.importorskip("vllm.model_executor.models.interfaces").EagleModelMixin()
    layers = len(found) - 1
    mixin.aux_hidden_state_layers = tuple(written) if written is not None else (2, layers // 2, layers - 3)
    taken: list[torch.Tensor] = []
    mixin._maybe_add_hidden_state(taken, 0, found[0], None)
    for index in range(layers):
        mixin._maybe_add_hidden_state(taken, index + 1, found[index + 1], None)
    return taken


def sglang_reads(found: Sequence[torch.Tensor], written: Sequence[int] | None) -> list[torch.Tensor]:
    """SGLang, srt/models/llama.py: written ids get 1 added, the default none; block i hands out its input when i is listed."""
    layers = len(found) - 1
    listed = [2, layers // 2, layers - 3] if written is None else [index + 1 for index in written]
    return [found[index] for index in range(layers) if index in listed]


def same(taken: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return len(taken) == len(wanted) and all(torch.allclose(a, b, atol=1e-5) for a, b in zip(taken, wanted, strict=True))


def captured(model: Any, boundaries: Sequence[int]) -> list[torch.Tensor]:
    with capture(model, boundaries, final=False) as states:
        model(IDS)
        return list(states.take().values())


def test_captured_boundaries_are_the_streams_of_that_number(tm: Any) -> None:
    found = streams(tm)
    assert same(captured(tm, range(9)), found)


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm")
def test_vllm_reads_what_was_captured(tm: Any) -> None:
    found = streams(tm)
    assert same(vllm_reads(found, to_vllm(AUX)), captured(tm, AUX))
    assert same(vllm_reads(found, None), captured(tm, default_boundaries(8)))
    assert not same(vllm_reads(found, to_sglang(AUX)), captured(tm, AUX))


def test_sglang_reads_what_was_captured(tm: Any) -> None:
    found = streams(tm)
    assert same(sglang_reads(found, to_sglang(AUX)), captured(tm, AUX))
    assert same(sglang_reads(found, None), captured(tm, default_boundaries(8)))


def test_the_list_of_one_engine_reads_other_layers_in_the_other(tm: Any) -> None:
    assert same(sglang_reads(streams(tm), to_vllm(AUX)), captured(tm, (3, 5, 6)))
