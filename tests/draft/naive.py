"""An independent draft: one token at a time with a growing cache, float64, written from the equations only.

It shares no code with `draftproof.draft`; the parity tests compare the two.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class NaiveDraft:
    """Weights by name (as in the checkpoint), in float64."""

    def __init__(self, tensors: dict[str, Tensor], config: Any, embedding: Tensor) -> None:
        self.w = {name: value.double() for name, value in tensors.items()}
        self.c, self.embedding = config, embedding.double()

    def rms(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + self.c.rms_norm_eps) * self.w[name + ".weight"]

    def rope(self, x: Tensor, position: int) -> Tensor:
        """x [heads, D]: the pairs (i, i + D/2) turn by position * theta^(-2i/D)."""
        half = self.c.head_dim // 2
        out = torch.empty_like(x)
        for i in range(half):
            angle = position * self.c.rope_parameters["rope_theta"] ** (-2 * i / self.c.head_dim)
            a, b = x[:, i], x[:, i + half]
            out[:, i], out[:, i + half] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
        return out

    def fuse(self, aux: Tensor) -> Tensor:
        parts = [aux[i].double() for i in range(self.c.aux)]
        if self.c.fc_norm:
            parts = [self.rms(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
        flat = torch.cat(parts)
        if self.c.norm_before_fc:
            flat = self.rms(flat, "input_norm")
        return self.w["fc.weight"] @ flat

    def inputs(self, token: int, state: Tensor) -> Tensor:
        return torch.cat([self.rms(self.embedding[token], "layers.0.input_layernorm"), self.rms(state, "layers.0.hidden_norm")])

    def heads(self, x: Tensor, which: str, count: int, position: int | None) -> Tensor:
        y = (self.w[f"layers.0.self_attn.{which}_proj.weight"] @ x).reshape(count, self.c.head_dim)
        if self.c.qk_norm and which in "qk":
            y = torch.stack([self.rms(head, f"layers.0.self_attn.{which}_norm") for head in y])
        return y if position is None else self.rope(y, position)

    def layer(self, token: int, state: Tensor, position: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Appends this token's key and value to the cache, attends to all of it, returns the layer's output [h]."""
        x = self.inputs(token, state)
        cache.append((self.heads(x, "k", self.c.kv_heads, position), self.heads(x, "v", self.c.kv_heads, None)))
        q = self.heads(x, "q", self.c.heads, position)
        group = self.c.heads // self.c.kv_heads
        out = []
        for head in range(self.c.heads):
            scores = torch.stack([(q[head] * k[head // group]).sum() / math.sqrt(self.c.head_dim) for k, _ in cache])
            weights = scores.softmax(0)
            out.append(sum(weight * v[head // group] for weight, (_, v) in zip(weights, cache, strict=True)))
        residual = state + self.w["layers.0.self_attn.o_proj.weight"] @ torch.cat(out)
        y = self.rms(residual, "layers.0.post_attention_layernorm")
        gate = self.w["layers.0.mlp.gate_proj.weight"] @ y
        up = self.w["layers.0.mlp.up_proj.weight"] @ y
        return residual + self.w["layers.0.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    def chain(self, tokens: list[int], aux: Tensor, start: int, fed: list[int]) -> list[Tensor]:
        """Draft from index `start` of one document: step 0 is fed tokens[start+1], step k fed[k]. States of all steps."""
        cache: list[tuple[Tensor, Tensor]] = []
        state = torch.zeros(0)
        for t in range(start + 1):
            state = self.layer(tokens[t + 1], self.fuse(aux[t]), t, cache)
        states = [state]
        for k in range(1, len(fed)):
            carried = self.rms(states[-1], "norm") if self.c.norm_output else states[-1]
            states.append(self.layer(fed[k], carried, start + k, cache))
        return states

    def logits(self, state: Tensor) -> Tensor:
        return self.w["lm_head.weight"] @ self.rms(state, "norm")
