"""A draft as an engine would run it, in plain float32: few lines, no cache, no kernel.

Written from the engines' sources (vLLM 0.32 `models/llama_eagle3.py` and `layers/rotary_embedding`, SGLang
`models/llama_eagle3.py`). It shares nothing with `draft/eagle3.py`, which it is there to check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.records.mapping import VocabMapping


@dataclass(frozen=True)
class EngineView:
    """The module that an engine builds from a folder's config."""

    engine: str
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    aux: int
    """Boundaries that `fc` is built for."""
    boundaries: tuple[int, ...]
    """Boundaries that the engine captures; its own choice where the config names none."""
    eps: float
    rope: dict[str, Any]
    max_positions: int
    qk_norm: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    dtype: str | None


@dataclass(frozen=True)
class LoadedDraft:
    """A folder as an engine holds it, in float32."""

    view: EngineView
    weights: dict[str, Tensor]
    embedding: Tensor
    """[V, h]"""
    mapping: VocabMapping

    def chain(self, states: Mapping[int, Tensor], token_ids: Sequence[int], *, steps: int) -> Tensor:
        """Logits over the target's vocabulary of `steps` drafted tokens after a prompt, each [V], -inf outside the draft's.

        states: boundary -> [T, H]; token_ids: the T + steps - 1 tokens after the first, so that state t stands
        beside token t+1. float32 [steps, V].
        """
        view, T = self.view, next(iter(states.values())).shape[0]
        state = self._fuse(torch.cat([states[boundary].float() for boundary in view.boundaries], dim=-1))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for step in range(steps):
            positions = torch.arange(T) if step == 0 else torch.tensor([T + step - 1])
            tokens = torch.tensor(list(token_ids[:T]) if step == 0 else [token_ids[T + step - 1]])
            state = self._layer(self.embedding[tokens].float(), state, positions, keys, values)[-1:]
            normed = self._norm(state, "norm.weight")
            scattered = torch.full((view.vocab_size,), -torch.inf)
            scattered[torch.from_numpy(self.mapping.kept)] = (normed @ self.weights["lm_head.weight"].T)[0]
            logits.append(scattered)
            state = normed if view.norm_output else state
        return torch.stack(logits)

    def _fuse(self, aux: Tensor) -> Tensor:
        """[T, A*H] -> [T, h]"""
        if self.view.norm_before_fc:
            aux = self._norm(aux, "input_norm.weight")
        if self.view.fc_norm:
            aux = torch.cat([self._norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(aux.chunk(self.view.aux, -1))], -1)
        return aux @ self.weights["fc.weight"].T

    def _layer(self, embeds: Tensor, state: Tensor, positions: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """embeds, state [n, h] -> the layer's output [n, h]; each of the n sees all earlier keys and those up to itself."""
        view, w = self.view, self.weights
        normed = self._norm(state, "layers.0.hidden_norm.weight")
        residual = normed if view.norm_before_residual else state
        x = torch.cat([self._norm(embeds, "layers.0.input_layernorm.weight"), normed], -1)
        q, k, v = (
            (x @ w[f"layers.0.self_attn.{part}_proj.weight"].T).view(len(x), -1, view.head_dim).transpose(0, 1) for part in ("q", "k", "v")
        )
        if view.qk_norm:
            q, k = self._norm(q, "layers.0.self_attn.q_norm.weight"), self._norm(k, "layers.0.self_attn.k_norm.weight")
        keys.append(_rotate(k, positions, view))
        values.append(v)
        group = view.heads // view.kv_heads
        every_k, every_v = (torch.cat(part, 1).repeat_interleave(group, 0) for part in (keys, values))
        scores = _rotate(q, positions, view) @ every_k.transpose(1, 2) / math.sqrt(view.head_dim)
        unseen = torch.arange(every_k.shape[1])[None] > positions[:, None]  # a key's place is its position
        attended = scores.masked_fill(unseen, -torch.inf).softmax(-1) @ every_v
        hidden = residual + attended.transpose(0, 1).flatten(1) @ w["layers.0.self_attn.o_proj.weight"].T
        y = self._norm(hidden, "layers.0.post_attention_layernorm.weight")
        gated = torch.nn.functional.silu(y @ w["layers.0.mlp.gate_proj.weight"].T) * (y @ w["layers.0.mlp.up_proj.weight"].T)
        return hidden + gated @ w["layers.0.mlp.down_proj.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.view.eps) * self.weights[name]


def _rotate(x: Tensor, positions: Tensor, view: EngineView) -> Tensor:
    """[heads, n, D], rotated by halves."""
    frequencies, scale = FREQUENCIES[view.rope["rope_type"]](view.head_dim, view.rope)
    angle = positions[:, None].double() * frequencies[None]
    cos, sin = (angle.cos() * scale).float(), (angle.sin() * scale).float()
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _plain(head_dim: int, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    return rope["rope_theta"] ** -(torch.arange(0, head_dim, 2).double() / head_dim), 1.0


def _linear(head_dim: int, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    return _plain(head_dim, rope)[0] / rope["factor"], 1.0


def _llama3(head_dim: int, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Long waves are stretched by `factor`, short ones kept, those between blended (vLLM `llama3_rope.py`)."""
    frequencies = _plain(head_dim, rope)[0]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope["factor"]), 1.0


def _yarn(head_dim: int, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """As vLLM's `yarn_scaling_rope.py`: slow waves stretched, fast ones kept, and the whole scaled."""
    frequencies, factor = _plain(head_dim, rope)[0], rope["factor"]

    def dimension(turns: float) -> float:
        waves = rope["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(rope["rope_theta"]))

    def magnitude(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    low, high = dimension(rope.get("beta_fast", 32)), dimension(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    stretched = ((torch.arange(head_dim // 2).double() - low) / max(high - low, 0.001)).clamp(0, 1)
    if rope.get("attention_factor") is not None:
        scale = float(rope["attention_factor"])
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        scale = magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    else:
        scale = magnitude()
    return frequencies * (1 - stretched + stretched / factor), scale


FREQUENCIES: dict[str, Callable[[int, Mapping[str, Any]], tuple[Tensor, float]]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""rope_type -> (head_dim, rope_parameters) -> inverse wave lengths [head_dim / 2] and the scale of cos and sin."""
