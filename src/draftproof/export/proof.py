"""Proof that a written folder is the trained draft: two chained steps of both, on states that nobody has seen.

The trained draft is run by `draft/eagle3.py`, the folder by its engine's simulated loader (`forward.py`). Both get
the same random states of *every* boundary and pick their own, so that a wrong layer id shows; both answer over the
target's vocabulary, so that a wrong mapping shows; the second step is fed by the first, so that a state taken on
the wrong side of the final norm shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from draftproof.draft.eagle3 import Eagle3Draft
from draftproof.errors import DataError
from draftproof.export.forward import LoadedDraft
from draftproof.records.mapping import VocabMapping

ROW_LENGTHS = (1, 4, 7)
STEPS = 2
TOLERANCE = 1e-4
"""Of the largest logit. Two float32 forwards differ by about 1e-6; the smallest real fault seen here by 1e-2."""


def prove(loaded: LoadedDraft, draft: Eagle3Draft, mapping: VocabMapping, embedding: Tensor, *, layers: int, seed: int) -> float:
    """The largest difference of logits over 3 rows and two steps, relative to the largest logit.

    `draft` must hold the rounded weights, since rounding is checked elsewhere, bit by bit. `embedding` [V, H] is the
    target's. Raises DataError when the two are not the same model.
    """
    generator = torch.Generator().manual_seed(seed)
    target_hidden = draft.fc.weight.shape[1] // draft.config.aux
    worst = 0.0
    for length in ROW_LENGTHS:
        states = {boundary: torch.randn(length, target_hidden, generator=generator) for boundary in range(1, layers)}
        tokens = torch.randint(0, draft.config.vocab_size, (length + STEPS - 1,), generator=generator).tolist()
        ours = trained_chain(draft, mapping, embedding, states, tokens)
        theirs = loaded.chain(states, tokens, steps=STEPS)
        kept = torch.isfinite(ours)
        if not torch.equal(kept, torch.isfinite(theirs)):
            raise _another_model(loaded, "it can propose other tokens")
        difference = float((ours[kept] - theirs[kept]).abs().max() / ours[kept].abs().max())
        if not difference <= TOLERANCE:  # NaN fails too
            raise _another_model(loaded, f"its logits differ by {difference:.1e} of the largest")
        worst = max(worst, difference)
    return worst


@torch.no_grad()
def trained_chain(
    draft: Eagle3Draft, mapping: VocabMapping, embedding: Tensor, states: Mapping[int, Tensor], token_ids: list[int]
) -> Tensor:
    """What the trained draft says in the place of `LoadedDraft.chain`: float32 [steps, V], -inf outside its vocabulary."""
    config, layer = draft.config, draft.layer
    length = next(iter(states.values())).shape[0]
    state = draft.fuse(torch.stack([states[boundary] for boundary in config.boundaries], dim=1))
    keys, values, logits = [], [], []
    for step in range(len(token_ids) - length + 1):
        at = slice(0, length) if step == 0 else slice(length + step - 1, length + step)
        rotation = draft.rotation(torch.arange(len(token_ids))[at])
        x = layer.inputs(embedding[token_ids[at]].float(), state)
        query = layer.self_attn.query(x, rotation)[-1]
        key, value = layer.self_attn.key_value(x, rotation)
        keys.append(key)
        values.append(value)
        output = layer.finish(state[-1:], _attend(query, torch.cat(keys), torch.cat(values))[None])
        spread = torch.full((config.vocab_size,), -torch.inf)
        spread[torch.from_numpy(mapping.kept)] = draft.logits(output)[0]
        logits.append(spread)
        state = draft.feedback(output)
    return torch.stack(logits)


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """query [heads, D], keys and values [n, kv_heads, D] -> [heads, D]"""
    heads, kv_heads = query.shape[0], keys.shape[1]
    grouped = query.view(kv_heads, heads // kv_heads, -1)
    weights = torch.einsum("kgd,nkd->kgn", grouped, keys).div(math.sqrt(query.shape[-1])).softmax(-1)
    return torch.einsum("kgn,nkd->kgd", weights, values).flatten(0, 1)


def _another_model(loaded: LoadedDraft, how: str) -> DataError:
    return DataError(
        f"As {loaded.view.engine} reads it, the exported draft is not the trained one: {how}.",
        remedy="Do not serve this folder; export again with --from export, and report it if it happens again.",
    )
