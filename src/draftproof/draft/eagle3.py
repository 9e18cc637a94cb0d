"""The EAGLE-3 draft, whole (arXiv 2503.01840; layout of vLLM's `llama_eagle3.py`, read at 0.32).

    g[t]   = fc(concat(aux boundaries at t))                         once per target token
    x      = concat(input_layernorm(embed(token)), hidden_norm(state))        2h wide
    state' = state + o_proj(attention(q(x), k(x), v(x)))
    state' = state' + mlp(post_attention_layernorm(state'))
    logits = lm_head(norm(state'))                                   draft vocabulary

Features: one decoder layer; grouped-query attention; RoPE with the target's base and scaling; options
qk_norm, norm_before_fc, fc_norm, norm_output (EAGLE-3.1). The embedding is the target's, frozen, and
therefore not a parameter here: rows of it are given to `inputs`. Attention itself is left to the caller,
since training (`unroll.py`) and decoding (`evaluate/decode.py`) keep different sets of keys.

Letters: N rows, h draft hidden size, D head_dim, A aux boundaries, H target hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftproof.errors import UsageError
from draftproof.recipe import DraftSettings
from draftproof.target.config import TargetConfig

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies do not depend on the length of the request."""


@dataclass(frozen=True)
class DraftConfig:
    """The draft's shape: everything that is needed to build and to serve it."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    """V, rows of the target's LM head."""
    draft_vocab_size: int
    aux: int
    """A, number of aux boundaries."""
    boundaries: tuple[int, ...]
    hidden_act: Literal["silu"]
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_positions: int
    qk_norm: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


def draft_config(target: TargetConfig, settings: DraftSettings, *, boundaries: tuple[int, ...], draft_vocab_size: int) -> DraftConfig:
    """The draft that fits a target: its widths, heads and RoPE unless the recipe says otherwise.

    Raises UsageError for a RoPE that the draft, or the engines that serve it, do not have.
    """
    rope_type = target.rope_parameters.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise UsageError(
            f"A draft with RoPE type {rope_type!r} is not supported.", where="target config", remedy=f"Supported: {', '.join(ROPE_TYPES)}."
        )
    if target.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UsageError(
            "The target rotates only a part of each head; engines' draft layers rotate all of it.",
            where="target config, partial_rotary_factor",
            remedy="This target is not supported.",
        )
    return DraftConfig(
        hidden_size=target.hidden_size,
        intermediate_size=settings.intermediate_size or target.intermediate_size,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux=len(boundaries),
        boundaries=tuple(boundaries),
        hidden_act="silu",
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=dict(target.rope_parameters),
        max_positions=target.max_positions,
        qk_norm=settings.qk_norm,
        norm_before_fc=settings.norm_before_fc,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
    )


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32, returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), float("nan")))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """The projections of the attention; the caller attends."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        wide = 2 * config.hidden_size
        self.q_proj = _linear(wide, config.heads * config.head_dim)
        self.k_proj = _linear(wide, config.kv_heads * config.head_dim)
        self.v_proj = _linear(wide, config.kv_heads * config.head_dim)
        self.o_proj = _linear(config.heads * config.head_dim, config.hidden_size)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def query(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """x [N, 2h] -> rotated queries [N, heads, D]"""
        q = self.q_proj(x).unflatten(-1, (self.config.heads, self.config.head_dim))
        return rotate(self.q_norm(q) if self.config.qk_norm else q, rotation)

    def key_value(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [N, 2h] -> rotated keys and values, each [N, kv_heads, D]"""
        k = self.k_proj(x).unflatten(-1, (self.config.kv_heads, self.config.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.config.kv_heads, self.config.head_dim))
        return rotate(self.k_norm(k) if self.config.qk_norm else k, rotation), v


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[N, h] -> [N, h]"""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """The draft's decoder layer, cut where the attention stands."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def inputs(self, embedding: Tensor, state: Tensor) -> Tensor:
        """embedding [N, h], state [N, h] -> x [N, 2h]"""
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(state)], dim=-1)

    def finish(self, state: Tensor, attended: Tensor) -> Tensor:
        """state [N, h] (the residual), attended [N, heads, D] -> the layer's output [N, h]"""
        state = state + self.self_attn.o_proj(attended.flatten(-2))
        out: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return out


class Eagle3Draft(nn.Module):
    """The draft. Weights start as NaN, so that one that was never set is seen at once."""

    def __init__(self, config: DraftConfig, target_hidden_size: int | None = None) -> None:
        super().__init__()
        self.config = config
        fused = config.aux * (target_hidden_size or config.hidden_size)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(fused, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(fused // config.aux, config.rms_norm_eps) for _ in range(config.aux))
        self.fc = _linear(fused, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = _linear(config.hidden_size, config.draft_vocab_size)
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.hidden_size,
                num_attention_heads=config.heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_positions,
                rope_parameters=dict(config.rope_parameters),
            )
        )

    @property
    def layer(self) -> Layer:
        """The one decoder layer."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def fuse(self, aux: Tensor) -> Tensor:
        """The target's aux states [N, A, H] -> g [N, h]"""
        if self.config.fc_norm:
            aux = torch.stack([norm(part) for norm, part in zip(self.fc_norm, aux.unbind(-2), strict=True)], dim=-2)
        flat = aux.flatten(-2)
        if self.config.norm_before_fc:
            flat = self.input_norm(flat)
        g: Tensor = self.fc(flat)
        return g

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [N] -> cos and sin, each float32 [N, 1, D]"""
        cos, sin = self.rotary(torch.empty(0, dtype=torch.float32, device=positions.device), positions[None])
        return cos[0, :, None], sin[0, :, None]

    def feedback(self, state: Tensor) -> Tensor:
        """What the next step gets as state: the layer's output, or (norm_output) its norm. [N, h] -> [N, h]"""
        out: Tensor = self.norm(state) if self.config.norm_output else state
        return out

    def logits(self, state: Tensor) -> Tensor:
        """The layer's output [N, h] -> float32 [N, Vd]"""
        out: Tensor = self.lm_head(self.norm(state)).float()
        return out


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE on halves (Llama's layout): x [N, heads, D], cos and sin [N, 1, D]; in float32, returned in x's dtype."""
    cos, sin = rotation
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        linear.weight.fill_(float("nan"))
    return linear
