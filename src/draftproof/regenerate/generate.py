"""Batched answers of the target, in process.

`model.generate` keeps every row until the last one ends and grows its key-value cache by copying it at each token. On a
CPU both cost: this loop drops finished rows from the batch and writes keys and values into room made once. What all
prompts begin with (a default system turn is often half of them) runs once, for one row.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHRINK = 8  # the batch is packed anew once 1 / 8 of its rows have ended; packing copies the whole cache

_WORTH_SHARING = 8  # ids


@dataclass(frozen=True)
class Answer:
    """What the target produced after one prompt."""

    token_ids: list[int]
    """The stop token included, if it was produced."""
    finish_reason: str
    """`stop`, or `length` when the limit came first."""


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    stops: Collection[int],
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Answer]:
    """Answers to all prompts as one batch, left-padded; greedy at temperature 0, else sampled with `seed`.

    The same batch gives the same answers bit for bit on a CPU; other batch mates may change the last bits of a logit.
    """
    device = model.device
    cache = _make_cache(model, max(map(len, prompts)) + max_tokens)
    generator = torch.Generator(device=device).manual_seed(seed)
    only_last: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    shared = _shared_start(prompts) if isinstance(cache.layers[0], _RoomyLayer) else 0
    if shared:
        start = torch.tensor([list(prompts[0][:shared])], device=device)
        model(input_ids=start, past_key_values=cache, use_cache=True, **only_last)
        cache.batch_repeat_interleave(len(prompts))
    ids, mask = _left_padded([prompt[shared:] for prompt in prompts], device)
    mask = torch.cat([mask.new_ones(len(prompts), shared), mask], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, shared:]
    produced: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # which prompt each row of the batch answers
    for _ in range(max_tokens):
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, **only_last
        ).logits[:, -1]
        chosen = _choose(logits, temperature, generator)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if not _ended(produced[row], stops):
                produced[row].append(token)
        running = [index for index, row in enumerate(rows) if not _ended(produced[row], stops)]
        if not running:
            break
        if len(rows) - len(running) >= max(1, len(rows) // _SHRINK):
            kept = torch.tensor(running, device=device)
            cache.batch_select_indices(kept)
            chosen, mask, positions, rows = chosen[kept], mask[kept], positions[kept], [rows[index] for index in running]
        ids, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
    return [Answer(tokens, "stop" if _ended(tokens, stops) else "length") for tokens in produced]


class _RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' cache classes have no annotations
    """Keys and values [B, heads, T, head_dim] in room for `room` tokens made at the first update."""

    def __init__(self, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._room, self._used = room, 0
        self._buffers: list[torch.Tensor] = []

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._buffers:
            self.lazy_initialization(key_states, value_states)
            self._buffers = [new.new_empty(*new.shape[:2], self._room, new.shape[3]) for new in (key_states, value_states)]
        start, self._used = self._used, self._used + key_states.shape[2]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start : self._used] = new
        return self._show()

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._buffers = [buffer.repeat_interleave(repeats, dim=0) for buffer in self._buffers]
        self._show()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._buffers = [buffer[indices] for buffer in self._buffers]
        self._show()

    def _show(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (buffer[:, :, : self._used] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values


def _make_cache(model: PreTrainedModel, room: int) -> DynamicCache:
    """The cache that the model's config asks for; plain full-attention layers get their room at once."""
    cache = DynamicCache(config=model.config)
    if cache.layers and all(type(layer) is DynamicLayer for layer in cache.layers):
        cache.layers = [_RoomyLayer(room) for _ in cache.layers]
    return cache


def _shared_start(prompts: Sequence[Sequence[int]]) -> int:
    """How many ids all prompts begin with, leaving at least one of each; 0 when too few to matter.

    Padding then stands between the shared start and the rest. Masks and positions take care of that in full attention;
    a sliding window counts by place, so it is not done there.
    """
    first, last = min(map(list, prompts)), max(map(list, prompts))  # what these two share in order of their ids, all share
    limit = min(map(len, prompts)) - 1
    shared = next((index for index in range(limit) if first[index] != last[index]), limit)
    return shared if shared >= _WORTH_SHARING and len(prompts) > 1 else 0


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 ids and mask [B, longest prompt]; padding is masked, so its id does not matter."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    """int64 [B] from logits [B, V]."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    return torch.multinomial((logits.float() / temperature).softmax(dim=-1), 1, generator=generator)[:, 0]


def _ended(tokens: Sequence[int], stops: Collection[int]) -> bool:
    return bool(tokens) and tokens[-1] in stops
