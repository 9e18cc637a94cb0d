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
class UnrollPlan:
    """Which indices draft, for how many steps, and where their keys lie. Made on the CPU from masks alone."""

    starts: Tensor
    """int64 [n]: the indices that draft, grouped by document, in each the ones with most steps first."""
    depth: Tensor
    """int64 [n]: counted steps of each row, 1..S."""
    positions: Tensor
    """int64 [N]: position of each packed token in its document."""
    documents: tuple[tuple[int, int], ...]
    """First and one-past-last packed index of each document that drafts."""
    rows_by_step: tuple[tuple[int, ...], ...]
    """For each step k, for each drafting document: how many of its rows are still counted."""

    @property
    def steps(self) -> int:
        """S of this plan: no later step has a counted row."""
        return len(self.rows_by_step)

    def counted(self, step: int) -> int:
        """n_k"""
        return sum(self.rows_by_step[step])


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
    starts: list[np.ndarray] = []
    documents: list[tuple[int, int]] = []
    rows: list[np.ndarray] = []
    for begin, end in zip(begins, ends, strict=True):
        local = np.flatnonzero(depth[begin:end])
        if len(local):
            local = local[np.argsort(-depth[begin:end][local], kind="stable")] + begin
            starts.append(local)
            documents.append((int(begin), int(end)))
            rows.append(np.array([(depth[local] > k).sum() for k in range(steps)]))
    by_step = [tuple(int(r[k]) for r in rows) for k in range(steps)]
    flat = np.concatenate(starts) if starts else np.zeros(0, dtype=np.int64)
    return UnrollPlan(
        starts=torch.from_numpy(flat),
        depth=torch.from_numpy(depth[flat]),
        positions=torch.from_numpy(
            np.concatenate([np.arange(length) for length in lengths]) if len(lengths) else np.zeros(0, dtype=np.int64)
        ),
        documents=tuple(documents),
        rows_by_step=tuple(counts for counts in by_step if sum(counts)),
    )


def unroll(draft: Eagle3Draft, plan: UnrollPlan, token_ids: Tensor, aux: Tensor, embedding: Tensor) -> Iterator[StepOutput]:
    """Run the steps of a plan.

    token_ids int64 [N]; aux [N, A, H] in the compute dtype; embedding [V, h], the target's. Yields one
    StepOutput a step; states keep their graph, so that losses of all steps can be summed and sent back.
    """
    layer, attention = draft.layer, draft.layer.self_attn
    dtype = draft.fc.weight.dtype if not torch.is_autocast_enabled(aux.device.type) else torch.get_autocast_dtype(aux.device.type)
    starts, positions = plan.starts.to(aux.device), plan.positions.to(aux.device)
    g = draft.fuse(aux.to(dtype))

    following = torch.cat([token_ids[1:], token_ids[-1:]])  # x[t+1]; the last has none and is never attended
    x = layer.inputs(embedding[following].to(dtype), g)
    prefix_k, prefix_v = attention.key_value(x, draft.rotation(positions))  # [N, kv_heads, D]

    state = g[starts]
    chain: list[tuple[Tensor, Tensor]] = []  # keys and values of steps 1..k, one a row: [n_k, kv_heads, D]
    depth = plan.depth.to(aux.device)
    for k in range(plan.steps):
        if k == 0:
            x = x[starts]
        else:
            keep = torch.nonzero(depth > k)[:, 0]
            starts, depth, state = starts[keep], depth[keep], draft.feedback(state[keep])
            chain = [(key[keep], value[keep]) for key, value in chain]
            x = layer.inputs(embedding[token_ids[starts + 1 + k]].to(dtype), state)
        rotation = draft.rotation(positions[starts] + k)
        query = attention.query(x, rotation)
        if k > 0:
            chain.append(attention.key_value(x, rotation))
        attended = _attend(query, starts, prefix_k, prefix_v, chain, plan.documents, plan.rows_by_step[k])
        state = layer.finish(state, attended)
        yield StepOutput(k, starts, state)


def _attend(
    query: Tensor,
    starts: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    chain: list[tuple[Tensor, Tensor]],
    documents: tuple[tuple[int, int], ...],
    rows: tuple[int, ...],
) -> Tensor:
    """Each row attends to its document's step-0 keys up to its own index, and to its own later keys.

    query [n_k, heads, D] grouped by document as `rows` says; prefix [N, kv_heads, D]; chain of [n_k, kv_heads, D].
    Returns [n_k, heads, D]. One document at a time: the scores of a document need rows x length, never N x N.
    """
    kv_heads, head_dim = prefix_k.shape[1:]
    query = query.reshape(len(query), kv_heads, -1, head_dim).float() * head_dim**-0.5  # [n_k, kv_heads, group, D]
    own = torch.stack([torch.einsum("nhgd,nhd->nhg", query, key.float()) for key, _ in chain], dim=-1) if chain else None
    parts: list[Tensor] = []
    first = 0
    for (begin, end), count in zip(documents, rows, strict=True):
        if not count:
            continue
        chosen = slice(first, first + count)
        scores = torch.einsum("nhgd,lhd->nhgl", query[chosen], prefix_k[begin:end].float())
        future = torch.arange(begin, end, device=starts.device)[None] > starts[chosen, None]  # [count, length]
        scores = scores.masked_fill(future[:, None, None], float("-inf"))
        if own is not None:
            scores = torch.cat([scores, own[chosen]], dim=-1)
        weights = scores.softmax(dim=-1)
        attended = torch.einsum("nhgl,lhd->nhgd", weights[..., : end - begin], prefix_v[begin:end].float())
        for j, (_, value) in enumerate(chain):
            attended = attended + weights[..., end - begin + j, None] * value[chosen, :, None].float()
        parts.append(attended)
        first += count
    return torch.cat(parts).flatten(1, 2).to(prefix_v.dtype)
