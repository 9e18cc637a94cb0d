"""Training-time test: S unrolled drafting steps over packed documents, with queries only where a draft can start.

Index t stands for the draft that starts after token t+1 is known. At step k:

    token fed   x[t+1+k]              teacher: the target at index t+1+k
    state fed   k = 0: g[t]; else the output of step k-1 at t
    position    t + k                 label:   x[t+2+k]
    keys seen   step-0 keys of the document at indices <= t, and the keys of steps 1..k at t alone
    counted     x[t+1] ... x[t+2+k] all supervised, in one turn of one document

Indices that never count only supply step-0 keys and values. So the queries, the output projection, the MLP,
the head and all later steps run on counted indices alone, and the cost grows with the supervised tokens, not
with the length of the prompts. Exact for one layer. This is the plain reference in PyTorch.

Letters: N packed tokens, n rows (indices that can draft), n_k rows still counted at step k, S steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftproof.draft.eagle3 import Eagle3Draft


@dataclass(frozen=True)
class Group:
    """Some documents of like length, whose rows attend together, padded to R rows and Ld keys a document."""

    rows: Tensor
    """int64 [documents, R]: index among the step's rows; padded with the document's first row."""
    keys: Tensor
    """int64 [documents, Ld]: packed index of each key; padded ones lie behind every row's own index."""
    back: Tensor
    """int64 [rows of the group]: where each row stands in the flattened [documents, R]."""


@dataclass(frozen=True)
class StepPlan:
    """The rows of one unrolled step."""

    keep: Tensor
    """int64 [n_k]: which rows of the step before go on; all of them at step 0."""
    starts: Tensor
    """int64 [n_k]: t of each row, grouped by document."""
    groups: tuple[Group, ...]
    """Together all rows, in order."""


@dataclass(frozen=True)
class UnrollPlan:
    """Which indices draft, for how many steps, and which keys they see. Made on the CPU from masks alone."""

    positions: Tensor
    """int64 [N]: position of each packed token in its document."""
    depth: Tensor
    """int64 [N]: counted steps of each index, 0..S."""
    steps: tuple[StepPlan, ...]
    """At most S; no later step has a row."""

    def counted(self, step: int) -> int:
        """n_k"""
        return len(self.steps[step].starts) if step < len(self.steps) else 0


@dataclass(frozen=True)
class StepOutput:
    """What one unrolled step gives, for the rows still counted at it."""

    step: int
    starts: Tensor
    """int64 [n_k]: t of each row."""
    state: Tensor
    """[n_k, h]: the layer's output, to be normed and given to the head."""


def counted_steps(supervised: np.ndarray, turn_start: np.ndarray, lengths: np.ndarray, limit: int) -> np.ndarray:
    """How many steps count at each index, 0..limit: the AND rule over x[t+1] ... x[t+2+k].

    supervised bool [N]; turn_start bool [N], true where a supervised turn begins; lengths int64 of the packed
    documents. Returns int64 [N].
    """
    n = len(supervised)
    document = np.repeat(np.arange(len(lengths)), lengths)
    turn = np.cumsum(turn_start)
    index = np.arange(n)
    joined = np.append(supervised[:-1] & supervised[1:] & (turn[:-1] == turn[1:]) & (document[:-1] == document[1:]), False)[:n]
    last_of_run = np.minimum.accumulate(np.where(joined, n, index)[::-1])[::-1]
    run = np.append(np.where(supervised, last_of_run - index + 1, 0), 0)  # run[t]: supervised tokens from t on
    follows = np.append(document[1:] == document[:-1], False)[:n]
    return np.where(follows, np.clip(run[1:] - 1, 0, limit), 0)


def plan_unroll(supervised: np.ndarray, turn_start: np.ndarray, lengths: np.ndarray, steps: int) -> UnrollPlan:
    """The plan of a packed batch: shapes as in `counted_steps`; `steps` is S."""
    depth = counted_steps(supervised, turn_start, lengths, steps)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    order = np.array([d for d in np.argsort(-lengths, kind="stable") if depth[begins[d] : ends[d]].any()], dtype=np.int64)
    groups = _like_lengths(lengths[order].tolist())
    rows = [begins[d] + np.flatnonzero(depth[begins[d] : ends[d]]) for d in order]
    before = np.zeros(0, dtype=np.int64)
    planned: list[StepPlan] = []
    for k in range(steps):
        now = [starts[depth[starts] > k] for starts in rows]
        starts = np.concatenate(now) if now else before
        if not len(starts):
            break
        counts = np.array([len(document) for document in now])
        offsets = np.cumsum(counts) - counts
        planned.append(
            StepPlan(
                keep=torch.from_numpy(np.arange(len(starts)) if k == 0 else np.flatnonzero(depth[before] > k)),
                starts=torch.from_numpy(starts),
                groups=tuple(
                    _group(begins[kept], int(lengths[kept].max()), counts[chosen][there], offsets[chosen][there], len(supervised))
                    for chosen in groups
                    if (there := counts[chosen] > 0).any() and len(kept := order[chosen][there])
                ),
            )
        )
        before = starts
    positions = np.arange(len(supervised)) - np.repeat(begins, lengths)
    return UnrollPlan(torch.from_numpy(positions), torch.from_numpy(depth), tuple(planned))


def unroll(draft: Eagle3Draft, plan: UnrollPlan, token_ids: Tensor, aux: Tensor, embedding: Tensor) -> Iterator[StepOutput]:
    """Run the steps of a plan.

    token_ids int64 [N]; aux [N, A, H]; embedding [V, h], the target's. Yields one StepOutput a step; states keep
    their graph, so that losses of all steps can be summed and sent back.
    """
    device = aux.device
    layer, attention = draft.layer, draft.layer.self_attn
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else draft.fc.weight.dtype
    positions = plan.positions.to(device)
    state = draft.fuse(aux.to(dtype))  # g

    following = torch.cat([token_ids[1:], token_ids[-1:]])  # x[t+1]; the last has none and is never attended
    x = layer.inputs(embedding[following].to(dtype), state)
    prefix = attention.key_value(x, draft.rotation(positions))  # each [N, kv_heads, D]
    chain: list[tuple[Tensor, Tensor]] = []  # keys and values of steps 1..k, one a row: each [n_k, kv_heads, D]
    for k, step in enumerate(plan.steps):
        starts = step.starts.to(device)
        rotation = draft.rotation(positions[starts] + k)
        if k == 0:
            x, state = x[starts], state[starts]
            query = attention.query(x, rotation)
        else:
            keep = step.keep.to(device)
            state = draft.feedback(state[keep])
            x = layer.inputs(embedding[token_ids[starts + 1 + k]].to(dtype), state)
            query = attention.query(x, rotation)
            chain = [(key[keep], value[keep]) for key, value in chain] + [attention.key_value(x, rotation)]
        state = layer.finish(state, _attend(query, starts, prefix, chain, step.groups))
        yield StepOutput(k, starts, state)


def _attend(
    query: Tensor, starts: Tensor, prefix: tuple[Tensor, Tensor], chain: list[tuple[Tensor, Tensor]], groups: tuple[Group, ...]
) -> Tensor:
    """Each row attends to its document's step-0 keys up to its own index, and to its own later keys.

    query [n_k, heads, D]; prefix [N, kv_heads, D] each; chain of [n_k, kv_heads, D] each. Returns [n_k, heads, D].
    Scores need rows x length of each document, never N x N. Softmax in float32.
    """
    keys, values = prefix
    kv_heads, head_dim = keys.shape[1:]
    query = query.reshape(len(query), kv_heads, -1, head_dim) * head_dim**-0.5  # [n_k, kv_heads, per kv head, D]
    own = torch.stack([(query * key[:, :, None]).sum(-1, dtype=torch.float32) for key, _ in chain], dim=-1) if chain else None
    parts: list[Tensor] = []
    for group in groups:
        row, key = group.rows.to(starts.device), group.keys.to(starts.device)
        scores = torch.einsum("brhgd,blhd->brhgl", query[row], keys[key]).float()
        future = key[:, None] > starts[row][..., None]  # [documents, R, Ld]
        scores = scores.masked_fill(future[:, :, None, None], float("-inf"))
        length = scores.shape[-1]
        if own is not None:
            scores = torch.cat([scores, own[row]], dim=-1)
        weights = scores.softmax(dim=-1).to(values.dtype)
        attended = torch.einsum("brhgl,blhd->brhgd", weights[..., :length], values[key])
        for j, (_, value) in enumerate(chain):
            attended = attended + weights[..., length + j, None] * value[row][:, :, :, None]
        parts.append(attended.flatten(0, 1)[group.back.to(starts.device)])
    return torch.cat(parts).flatten(1, 2)


LIKE = 1.5
"""Documents attend together when the longest is at most this many times the shortest: few groups, little padding."""


def _like_lengths(descending: list[int]) -> list[slice]:
    groups: list[slice] = []
    for index, length in enumerate(descending):
        if groups and descending[groups[-1].start] <= LIKE * length:
            groups[-1] = slice(groups[-1].start, index + 1)
        else:
            groups.append(slice(index, index + 1))
    return groups


def _group(begins: np.ndarray, longest: int, counts: np.ndarray, offsets: np.ndarray, tokens: int) -> Group:
    """`begins`: first packed index of each document; `counts` (at least 1) and `offsets`: its rows among the step's."""
    column = np.arange(counts.max())
    inside = column[None] < counts[:, None]  # [documents, R]
    rows = np.where(inside, offsets[:, None] + column[None], offsets[:, None])
    keys = np.minimum(begins[:, None] + np.arange(longest)[None], tokens - 1)
    return Group(torch.from_numpy(rows), torch.from_numpy(keys), torch.from_numpy(np.flatnonzero(inside)))
