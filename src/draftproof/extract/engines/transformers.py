"""The target run by transformers, in this process: right on any machine, fast enough for small targets.

A batch is padded on the right and has no attention mask: under a causal mask nothing after a token can reach it,
so padding changes no state that is kept, and attention takes its plain causal kernel. The forward runs the decoder
alone; the LM head is applied afterwards in chunks of at most 2**26 logits (256 MiB in float32), since [T, V] of a
whole batch would be 1.6 GB at T = 8,192, V = 49,152.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from draftproof.extract.engines.base import RowStates
from draftproof.target.loaded import TextParts, capture, compute_dtype, load_model, text_parts

if TYPE_CHECKING:
    from draftproof.target.target import Target

LOGITS_AT_ONCE = 1 << 26


class TransformersEngine:
    """Engine protocol over `transformers`; see `base.py`."""

    name = "transformers"

    def __init__(self, target: Target, boundaries: Sequence[int], device: str) -> None:
        self.target, self.boundaries, self.device = target, tuple(boundaries), device
        self.dtype = compute_dtype(target, device)
        self.model: Any = None
        """The transformers model, between load and close."""

    def load(self) -> None:
        """Read the weights."""
        self.model = load_model(self.target, self.device)
        self._parts: TextParts = text_parts(self.model, self.target.config)
        self._decoder: nn.Module = self.model.get_submodule(self._parts.paths["layers"].rpartition(".")[0])

    def close(self) -> None:
        """Drop the model, and give the GPU its memory back."""
        self.model = None
        self.__dict__.pop("_parts", None)
        self.__dict__.pop("_decoder", None)
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def states(self, batch: Mapping[str, np.ndarray], *, logprobs: bool = False) -> dict[str, RowStates]:
        """One padded forward over the rows; see the protocol."""
        lengths = [len(ids) for ids in batch.values()]
        width = max(lengths)
        padded = np.zeros((len(batch), width), np.int64)  # [B, T]; any id pads, nothing looks at it
        for place, ids in enumerate(batch.values()):
            padded[place, : len(ids)] = ids
        inputs = torch.from_numpy(padded).to(self.device)
        kept = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).to(self.device)  # [B, T]

        with capture(self.model, self.boundaries) as captured:
            if logprobs:
                logits = self.model(input_ids=inputs, use_cache=False).logits[kept]  # [N, V]
            else:
                self._decoder(input_ids=inputs, use_cache=False)
            found = captured.take()
        aux = torch.stack([found[boundary][kept].to(torch.bfloat16) for boundary in self.boundaries], 1).cpu()  # [N, A, H]
        final = found[len(self._parts.layers)][kept]  # [N, H]
        following = torch.from_numpy(np.concatenate([np.append(ids[1:], 0) for ids in batch.values()])).to(self.device)  # [N]
        if logprobs:
            scores, top1 = _own_scores(logits, following)
        else:
            scores, top1 = None, self._top1(final)
        final = final.to(torch.bfloat16).cpu()
        answers = {}
        start = 0
        for key, length in zip(batch, lengths, strict=True):
            own = slice(start, start + length)
            row_scores = None if scores is None else scores[start : start + length - 1]
            answers[key] = RowStates(aux[own], final[own], top1[own], row_scores)
            start += length
        return answers

    def _top1(self, final: Tensor) -> Tensor:
        """int32 [N] from boundary L [N, H]. Logit scale and soft-cap keep the order, so the bare head will do."""
        top1 = torch.empty(len(final), dtype=torch.int32)
        step = max(1, LOGITS_AT_ONCE // self._parts.head.out_features)
        for start in range(0, len(final), step):
            logits = self._parts.head(self._parts.final_norm(final[start : start + step]))  # [n, V]
            top1[start : start + step] = logits.argmax(-1).to(torch.int32).cpu()
        return top1


def reference_boundaries(model: Any, token_ids: np.ndarray) -> Tensor | None:
    """float32 [T, L+1, H]: every boundary of one row, by transformers' own `output_hidden_states`.

    Another way than the hooks that the bulk uses. Its last entry is after the final norm, so boundary L is taken as
    the norm's input. None when this model does not return hidden states of every layer.
    """
    parts = text_parts(model)
    seen: list[Tensor] = []
    handle = parts.final_norm.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    try:
        with torch.inference_mode():
            inputs = torch.from_numpy(token_ids[None].astype(np.int64)).to(parts.embedding.weight.device)
            states = model(input_ids=inputs, use_cache=False, output_hidden_states=True).hidden_states
    finally:
        handle.remove()
    if states is None or len(states) != len(parts.layers) + 1:
        return None
    return torch.stack([*(state[0] for state in states[:-1]), seen[-1][0]], 1).float().cpu()


def _own_scores(logits: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each following token, float32 [N], and the most likely one, int32 [N], of logits [N, V]."""
    scores = torch.empty(len(logits), dtype=torch.float32)
    step = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    for start in range(0, len(logits), step):
        part = logits[start : start + step].float()
        chosen = part.gather(-1, following[start : start + step, None].long())[:, 0]
        scores[start : start + step] = (chosen - part.logsumexp(-1)).cpu()
    return scores, logits.argmax(-1).to(torch.int32).cpu()
