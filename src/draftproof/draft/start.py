"""The draft's first weights.

The head is always the target's rows of the draft vocabulary. Two more things are known before the first step:

- `state`: fc starts as the identity on the last aux boundary (plus noise), since the target's late state is the best
  single guess of what comes next, and the head was made for states of that kind;
- `target`: that, and where the shapes fit the layer is the target's last decoder layer (its attention reads the
  state's half of the draft's input; the embedding's half starts as noise), with the target's final norm.

`benchmarks/quality.py starts` trains all three alike and prints their acceptance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.draft.eagle3 import Eagle3Draft
from draftproof.target.target import Target
from draftproof.target.weights import final_norm_name

NOISE = 0.02
"""Standard deviation of matrices that start from nothing, as in the target's own family."""

_SAME = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm")
_PLAIN = ("BF16", "F16", "F32")
_HALF = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def start_draft(draft: Eagle3Draft, *, start: str, seed: int, head: Tensor, target: Target) -> str:
    """Set every weight of a fresh draft; returns what it starts from, for people.

    `head` float32 [Vd, h]; `start` as in `DraftSettings.start`.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            elif name != "lm_head.weight":
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * NOISE)
        draft.lm_head.weight.copy_(head)
        if start == "random":
            return "random weights"
        width = min(draft.fc.weight.shape[1] // draft.config.aux, draft.config.hidden_size)
        draft.fc.weight[:width, -width:] += torch.eye(width)
        if start == "state":
            return "the target's late state"
        if (layer := _last_layer(draft, target)) is None:
            return "the target's late state (its last layer has other shapes)"
        h = draft.config.hidden_size
        own = dict(draft.layer.named_parameters())
        for name in _SAME:
            own[f"{name}.weight"].copy_(layer[name])
        for name in _HALF:
            own[f"{name}.weight"][:, h:].copy_(layer[name])
        draft.layer.hidden_norm.weight.copy_(layer["input_layernorm"])
        draft.norm.weight.copy_(layer["norm"])
    return "the target's last layer"


def _last_layer(draft: Eagle3Draft, target: Target) -> dict[str, Tensor] | None:
    """The target's last layer and final norm in float32, or None where it is another kind of layer: other tensors
    (biases, norms of its own), shapes, packings or activation."""
    weights, config = target.weights(), target.config
    if config.hidden_act != draft.config.hidden_act:
        return None
    ending = f"layers.{config.layers - 1}."
    h = draft.config.hidden_size
    own = dict(draft.layer.named_parameters())
    known = {f"{name}.weight" for name in (*_SAME, *_HALF, "input_layernorm")}
    if {name.partition(ending)[2] for name in weights.names if ending in name} != known:
        return None
    found: dict[str, Tensor] = {}
    for name in (*_SAME, *_HALF, "input_layernorm"):
        full = [there for there in weights.names if there.endswith(f"{ending}{name}.weight")]
        shape = list(own[f"{name}.weight"].shape)
        if name in _HALF:
            shape[1] = h
        if len(full) != 1 or list(weights.info(full[0]).shape) != shape or weights.info(full[0]).dtype not in _PLAIN:
            return None
        found[name] = weights.read(full[0]).float()
    found["norm"] = weights.read(final_norm_name(weights, config)).float()
    if config.norm_convention == "one_plus_weight":
        for name in ("post_attention_layernorm", "input_layernorm", "norm"):
            found[name] = found[name] + 1.0
    return found
