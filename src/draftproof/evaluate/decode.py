"""Draft and verify, the reference: what a serving engine does, on transformers, greedy, as a chain of K.

    result = decode(model, EagleDrafter(...), prompts, draft_tokens=3, max_tokens=128, stop_ids={2})

Each cycle feeds the target the last known token and K drafts, accepts the drafts that equal the target's own
argmax, and takes the target's next token as a bonus. So the text is the target's own greedy text, token for
token, whatever the draft says; only the number of cycles changes. Several prompts run together: rejected
drafts stay in the target's cache as masked columns, so rows may accept differently.

Letters: B prompts, T tokens fed at once, K drafted tokens, A boundaries, H hidden size, C cache columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from draftproof.draft.eagle3 import Eagle3Draft
from draftproof.target.loaded import Captured, capture


@dataclass(frozen=True)
class Verified:
    """What one target pass settled, for the drafter. Rows are padded on either side to T."""

    tokens: Tensor
    """int64 [B, T]: the tokens fed."""
    following: Tensor
    """int64 [B, T]: the token known to come after each."""
    positions: Tensor
    """int64 [B, T]: position of each fed token; -1 where it is padding or was rejected."""
    aux: Tensor | None
    """[B, T, A, H]: the target's aux states of the fed tokens, if the drafter asked for boundaries."""


class Drafter(Protocol):
    """Proposes tokens. A new one: `boundaries` (which aux states it wants; none for none), `begin(B)`,
    `propose(verified, K)` and `keep(rows)`; see PromptLookup for the smallest."""

    boundaries: tuple[int, ...]

    def begin(self, batch: int) -> None:
        """Forget everything; B new prompts."""

    def propose(self, verified: Verified, draft_tokens: int) -> Tensor:
        """int64 [B, K]: drafts after the newest known token of each row; -1 for no proposal."""

    def keep(self, rows: Tensor) -> None:
        """Only these rows (int64) go on, in this order."""


@dataclass(frozen=True)
class Decoded:
    """Answers of all prompts, and what the drafts did. Lists are by prompt, in the order given."""

    outputs: list[list[int]]
    """Token ids of each answer, its stop token included."""
    accepted: list[list[int]]
    """For each prompt, accepted drafts of each cycle, 0..K."""
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens answered."""
        return sum(len(output) for output in self.outputs)


def acceptance(accepted: Sequence[Sequence[int]], draft_tokens: int) -> tuple[float, tuple[float, ...], int]:
    """Acceptance length, P(first i accepted) for i = 1..K, and the number of cycles.

    The joint prefix: length = 1 + accepted drafts / cycles = 1 + sum of the P(i).
    """
    flat = [count for cycles in accepted for count in cycles]
    by_position = tuple(sum(count >= i for count in flat) / max(len(flat), 1) for i in range(1, draft_tokens + 1))
    return 1.0 + sum(by_position), by_position, len(flat)


@torch.inference_mode()
def decode(
    model: Any,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    draft_tokens: int,
    max_tokens: int,
    stop_ids: Collection[int],
    batch_size: int = 16,
    done: Callable[[int], None] = lambda prompts: None,
) -> Decoded:
    """Answer every prompt greedily.

    `model` is a transformers causal LM in eval mode; prompts are token ids. `draft_tokens` 0 is the target
    alone. Prompts of like length run together, `batch_size` at a time; `done` hears how many were answered.
    """
    outputs: list[list[int]] = [[] for _ in prompts]
    accepted: list[list[int]] = [[] for _ in prompts]
    started = time.monotonic()
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    with capture(model, drafter.boundaries, final=False) as captured:
        target = _Pass(model, captured, drafter.boundaries)
        for first in range(0, len(order), batch_size):
            group = order[first : first + batch_size]
            _decode_group(target, drafter, prompts, group, outputs, accepted, draft_tokens, max_tokens, frozenset(stop_ids))
            done(len(group))
    return Decoded(outputs, accepted, time.monotonic() - started)


@dataclass(frozen=True)
class _Pass:
    """A pass of the target: its choices, and the aux states the drafter wants."""

    model: Any
    captured: Captured
    boundaries: tuple[int, ...]

    def __call__(
        self, cache: DynamicCache, fed: Tensor, positions: Tensor, valid: Tensor, *, logits: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Feed [B, T] after the cached columns; `valid` bool [B, C]. Returns its argmax after each fed token, int64
        [B, T] (of the last `logits` only, since those of a long prompt would fill the memory), and aux [B, T, A, H]."""
        out = self.model(
            input_ids=fed,
            attention_mask=valid,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=logits,
        )
        states = self.captured.take() if self.boundaries else {}
        aux = torch.stack([states[boundary] for boundary in self.boundaries], dim=2) if self.boundaries else None
        return out.logits.argmax(-1), aux


def _decode_group(
    target: _Pass,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    group: list[int],
    outputs: list[list[int]],
    accepted: list[list[int]],
    draft_tokens: int,
    max_tokens: int,
    stop_ids: frozenset[int],
) -> None:
    """One batch, from prefill to the last answer; results go into `outputs` and `accepted`."""
    device = next(target.model.parameters()).device
    alive = list(group)
    drafter.begin(len(alive))
    width = max(len(prompts[index]) for index in group)
    fed = torch.zeros(len(group), width, dtype=torch.int64, device=device)
    valid = torch.zeros(len(group), width, dtype=torch.bool, device=device)
    for row, index in enumerate(group):
        fed[row, width - len(prompts[index]) :] = torch.tensor(prompts[index], device=device)
        valid[row, width - len(prompts[index]) :] = True
    positions = (valid.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache()
    choices, aux = target(cache, fed, positions, valid, logits=1)
    bonus = choices[:, -1]
    following = torch.cat([fed[:, 1:], bonus[:, None]], dim=1)
    length = valid.sum(-1)
    for row, index in enumerate(alive):
        outputs[index].append(int(bonus[row]))
    verified = Verified(fed, following, torch.where(valid, positions, -1), aux)

    while True:
        going = [row for row, index in enumerate(alive) if outputs[index][-1] not in stop_ids and len(outputs[index]) < max_tokens]
        if not going:
            return
        if len(going) < len(alive):
            rows = torch.tensor(going, device=device)
            alive = [alive[row] for row in going]
            cache.batch_select_indices(rows)
            drafter.keep(rows)
            valid, length, bonus = valid[rows], length[rows], bonus[rows]
            verified = _select(verified, rows)
        drafts = drafter.propose(verified, draft_tokens)
        fed = torch.cat([bonus[:, None], drafts.clamp(min=0)], dim=1)  # [B, K+1]
        offsets = torch.arange(fed.shape[1], device=device)
        positions = length[:, None] + offsets
        choices, aux = target(cache, fed, positions, torch.cat([valid, torch.ones_like(fed, dtype=torch.bool)], 1))
        agreed = (drafts == choices[:, :-1]).cumprod(-1).sum(-1)  # [B]: leading drafts that are the target's own
        settled = offsets[None] <= agreed[:, None]  # the bonus of last time and the accepted drafts
        valid = torch.cat([valid, settled], dim=1)
        verified = Verified(fed, choices, torch.where(settled, positions, -1), aux)
        length = length + agreed + 1
        bonus = choices.gather(1, agreed[:, None])[:, 0]
        for row, index in enumerate(alive):
            count = int(agreed[row])
            accepted[index].append(count)
            _extend(outputs[index], choices[row, : count + 1].tolist(), max_tokens, stop_ids)


def _extend(output: list[int], tokens: list[int], max_tokens: int, stop_ids: frozenset[int]) -> None:
    for token in tokens:
        if len(output) >= max_tokens or output[-1] in stop_ids:
            return
        output.append(token)


def _select(verified: Verified, rows: Tensor) -> Verified:
    aux = None if verified.aux is None else verified.aux[rows]
    return Verified(verified.tokens[rows], verified.following[rows], verified.positions[rows], aux)


class TargetAlone:
    """No drafts: the baseline whose text every other drafter must give."""

    boundaries: tuple[int, ...] = ()

    def begin(self, batch: int) -> None:
        """Nothing to forget."""

    def propose(self, verified: Verified, draft_tokens: int) -> Tensor:
        """int64 [B, 0]"""
        return verified.tokens[:, :0]

    def keep(self, rows: Tensor) -> None:
        """Nothing kept."""


class PromptLookup:
    """Drafts what followed the last occurrence of the newest n-gram (n = 3, 2, 1) in the text so far: the
    baseline that costs no training."""

    boundaries: tuple[int, ...] = ()
    longest = 3

    def begin(self, batch: int) -> None:
        """B empty texts."""
        self._texts: list[list[int]] = [[] for _ in range(batch)]

    def propose(self, verified: Verified, draft_tokens: int) -> Tensor:
        """int64 [B, K], -1 where no n-gram came before."""
        known = verified.positions >= 0
        for row, text in enumerate(self._texts):
            text += verified.tokens[row][known[row]].tolist()
        newest = verified.following.gather(1, _last(known)[:, None])[:, 0].tolist()
        drafts = [_lookup([*text, token], draft_tokens, self.longest) for text, token in zip(self._texts, newest, strict=True)]
        return torch.tensor(drafts, dtype=torch.int64, device=verified.tokens.device).reshape(len(drafts), draft_tokens)

    def keep(self, rows: Tensor) -> None:
        """Drop the texts of finished rows."""
        self._texts = [self._texts[row] for row in rows.tolist()]


class EagleDrafter:
    """The draft under test, with a growing cache of its step-0 keys and values."""

    def __init__(self, draft: Eagle3Draft, *, embedding: Tensor, kept: Tensor) -> None:
        """`embedding` [V, h], the target's; `kept` int64 [Vd], target ids of the draft vocabulary."""
        self.draft, self.embedding, self.kept = draft, embedding, kept
        self.boundaries = draft.config.boundaries

    def begin(self, batch: int) -> None:
        """Empty caches [B, 0, kv_heads, D]."""
        shape = (batch, 0, self.draft.config.kv_heads, self.draft.config.head_dim)
        self._keys = torch.zeros(shape, dtype=self.embedding.dtype, device=self.embedding.device)
        self._values = torch.zeros_like(self._keys)

    def propose(self, verified: Verified, draft_tokens: int) -> Tensor:
        """Write the keys of the newly settled indices, then draft K tokens from the newest."""
        assert verified.aux is not None
        known = verified.positions >= 0
        batch = len(known)
        g = self.draft.fuse(verified.aux[known].to(self.embedding.dtype))
        positions = verified.positions[known]
        x = self.draft.layer.inputs(self.embedding[verified.following[known]], g)
        keys, values = self.draft.layer.self_attn.key_value(x, self.draft.rotation(positions))
        self._grow(int(positions.max()) + 1)
        row = torch.arange(batch, device=known.device)[:, None].expand_as(known)[known]
        self._keys[row, positions], self._values[row, positions] = keys, values

        last = _last(known)
        flat = known.flatten().cumsum(0).reshape(known.shape) - 1  # index among the known ones
        newest = flat.gather(1, last[:, None])[:, 0]
        start = verified.positions.gather(1, last[:, None])[:, 0]
        x, state = x[newest], g[newest]
        own: list[tuple[Tensor, Tensor]] = []
        drafts: list[Tensor] = []
        for step in range(draft_tokens):
            rotation = self.draft.rotation(start + step)
            if step:
                x = self.draft.layer.inputs(self.embedding[drafts[-1]], state)
                own.append(self.draft.layer.self_attn.key_value(x, rotation))
            attended = self._attend(self.draft.layer.self_attn.query(x, rotation), start, own)
            output = self.draft.layer.finish(state, attended)
            drafts.append(self.kept[self.draft.logits(output).argmax(-1)])
            state = self.draft.feedback(output)
        return torch.stack(drafts, dim=1)

    def keep(self, rows: Tensor) -> None:
        """Drop the caches of finished rows."""
        self._keys, self._values = self._keys[rows], self._values[rows]

    def _grow(self, columns: int) -> None:
        if columns > self._keys.shape[1]:
            extra = self._keys.new_zeros(len(self._keys), max(columns - self._keys.shape[1], 64), *self._keys.shape[2:])
            self._keys, self._values = torch.cat([self._keys, extra], 1), torch.cat([self._values, extra], 1)

    def _attend(self, query: Tensor, start: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
        """query [B, heads, D]; step-0 keys at positions <= start, then this chain's own. Returns [B, heads, D]."""
        kv_heads, head_dim = self._keys.shape[2:]
        grouped = query.reshape(len(query), kv_heads, -1, head_dim) * head_dim**-0.5
        keys = torch.cat([self._keys, *(key[:, None] for key, _ in own)], dim=1)
        values = torch.cat([self._values, *(value[:, None] for _, value in own)], dim=1)
        scores = torch.einsum("bhgd,blhd->bhgl", grouped.float(), keys.float())
        column = torch.arange(self._keys.shape[1], device=start.device)
        hidden = torch.cat([column[None] > start[:, None], torch.zeros(len(start), len(own), dtype=torch.bool, device=start.device)], 1)
        weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
        return torch.einsum("bhgl,blhd->bhgd", weights, values.float()).flatten(1, 2).to(query.dtype)


def _last(known: Tensor) -> Tensor:
    """int64 [B]: index of the last true of each row of a bool [B, T]."""
    return known.shape[1] - 1 - known.flip(1).int().argmax(1)


def _lookup(text: list[int], draft_tokens: int, longest: int) -> list[int]:
    for n in range(min(longest, len(text) - 1), 0, -1):
        pattern = text[-n:]
        for begin in range(len(text) - n - 1, -1, -1):
            if text[begin : begin + n] == pattern:
                found = text[begin + n : begin + n + draft_tokens]
                return found + [-1] * (draft_tokens - len(found))
    return [-1] * draft_tokens
