"""Strict simulated loaders: what each engine would make of a folder, without the engine.

    loaded = load_vllm(folder, verifier, embedding)
    logits = loaded.chain(states, token_ids, steps=2)        # [2, V], by a forward of its own

vLLM raises on unknown tensors but not on missing ones and ignores some by flag; SGLang skips unknown names and never
looks for missing ones. Both then serve with random weights, and as verification keeps the text right, only the speed
tells. So these loaders read only the keys that the engine reads, with the engine's own defaults, and refuse what the
engine lets pass: a tensor that is unknown, missing, unused or of another shape or dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from draftproof.errors import DataError
from draftproof.export.files import EMBEDDING, mapping_of, read_config, read_tensors
from draftproof.export.forward import FREQUENCIES, EngineView, LoadedDraft
from draftproof.export.schema import Verifier


def load_vllm(folder: Path, verifier: Verifier, embedding: Tensor) -> LoadedDraft:
    """The folder as vLLM 0.32 would hold it. `embedding` [V, H] is the target's own.

    Raises DataError with every problem found.
    """
    return _load(folder, view_vllm(read_config(folder), verifier, str(folder)), verifier, embedding, lambda name: name)


def load_sglang(folder: Path, verifier: Verifier, embedding: Tensor) -> LoadedDraft:
    """The folder as SGLang would hold it. `embedding` [V, H] is the target's own.

    Raises DataError with every problem found.
    """
    view = view_sglang(read_config(folder), verifier, str(folder))
    return _load(folder, view, verifier, embedding, _from_sglang)


def folder_problems(folder: Path, engine: Literal["vllm", "sglang"]) -> list[str]:
    """What is wrong with a folder's tensors as far as it can be seen without the target, one sentence each.

    Raises DataError for a config or a file that cannot be read.
    """
    config, where = read_config(folder), str(folder)
    view = view_vllm(config, None, where) if engine == "vllm" else view_sglang(config, None, where)
    expected = expected_shapes(view)
    if engine == "vllm":
        expected[EMBEDDING] = (view.vocab_size, view.hidden_size)
    stored = {name if engine == "vllm" else _from_sglang(name): tensor for name, tensor in read_tensors(folder).items()}
    return _tensor_problems(view, {name: tensor for name, tensor in stored.items() if name not in ("d2t", "t2d")}, expected)


def view_vllm(config: Mapping[str, Any], verifier: Verifier | None, where: str) -> EngineView:
    """What vLLM 0.32 reads: `SpeculatorsConfig`, then `Eagle3LlamaForCausalLM` or `Eagle3Qwen3ForCausalLM`."""
    if config.get("model_type") not in (None, "speculators") or not config.get("speculators_config"):
        raise _refused("vLLM would not read this as a speculators folder: model_type or speculators_config is wrong", where)
    if config.get("speculators_model_type") != "eagle3" or not isinstance(config.get("transformer_layer_config"), dict):
        raise _refused("speculators_model_type is not eagle3, or transformer_layer_config is missing", where)
    if not config.get("architectures"):
        raise _refused("architectures is missing: readers cannot tell what this is", where)
    read = dict(config["transformer_layer_config"])
    kind = read.get("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        raise _refused(f"vLLM has no EAGLE-3 draft of model_type {kind!r}", where)
    read["draft_vocab_size"] = config.get("draft_vocab_size")
    for key, default in (("norm_before_residual", True), ("norm_before_fc", False), ("fc_norm", False), ("norm_output", False)):
        read[key] = config.get(key, default)
    for key in ("target_hidden_size", "eagle_aux_hidden_state_layer_ids"):
        if config.get(key):
            read[key] = config[key]
    nested = read.get("eagle_config") or {}
    ids = read.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
    counted = ids if kind == "qwen3" else nested.get("eagle_aux_hidden_state_layer_ids")
    own = read.get("num_aux_layers") if kind == "qwen3" else None
    aux = own or read.get("num_aux_hidden_states") or (len(counted) if counted else 3)
    sizes = _sizes(read, where)
    return EngineView(
        engine="vLLM",
        **sizes,
        draft_vocab_size=read["draft_vocab_size"] or sizes["vocab_size"],
        target_hidden_size=read.get("target_hidden_size", sizes["hidden_size"]),
        aux=aux,
        boundaries=tuple(ids) if ids else _default_boundaries(verifier),
        rope=_rope(read, default_theta=1e6 if kind == "qwen3" else 1e4, where=where),
        max_positions=read.get("max_position_embeddings", 8192),
        qk_norm=kind == "qwen3",
        norm_before_residual=bool(read["norm_before_residual"]),
        norm_before_fc=bool(nested.get("norm_before_fc", read["norm_before_fc"])),
        fc_norm=bool(read["fc_norm"]),
        norm_output=bool(read["norm_output"]),
        dtype=config.get("dtype"),
    )


def view_sglang(config: Mapping[str, Any], verifier: Verifier | None, where: str) -> EngineView:
    """What SGLang reads: transformers' `LlamaConfig`, then `LlamaForCausalLMEagle3` (norm_before_fc is not among it)."""
    if config.get("architectures") != ["LlamaForCausalLMEagle3"] or config.get("model_type") != "llama":
        raise _refused("SGLang picks the class by architectures [LlamaForCausalLMEagle3] and model_type llama", where)
    if config.get("draft_vocab_size") is None:
        raise _refused("draft_vocab_size is null: SGLang would take the target's head", where)
    if config.get("tie_word_embeddings", False):
        raise _refused("tie_word_embeddings is true: SGLang would use the embedding as head", where)
    if config.get("dtype") != config.get("torch_dtype", config.get("dtype")):
        raise _refused("dtype and torch_dtype differ", where)
    eagle = config.get("eagle_config") or {}
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    sizes = _sizes(config, where)
    return EngineView(
        engine="SGLang",
        **sizes,
        draft_vocab_size=config["draft_vocab_size"],
        target_hidden_size=config.get("target_hidden_size", sizes["hidden_size"]),
        aux=config.get("num_aux_hidden_states") or (len(ids) if ids else 3),
        # SGLang adds 1 to written ids, and not to its own default (`set_eagle3_layers_to_capture`).
        boundaries=tuple(layer_id + 1 for layer_id in ids) if ids else _default_boundaries(verifier),
        rope=_rope(config, default_theta=1e4, where=where),
        max_positions=config.get("max_position_embeddings", 2048),
        qk_norm=False,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
        dtype=config.get("dtype"),
    )


def _load(folder: Path, view: EngineView, verifier: Verifier, embedding: Tensor, renamed: Callable[[str], str]) -> LoadedDraft:
    stored = {renamed(name): tensor for name, tensor in read_tensors(folder).items()}
    mapping = mapping_of(stored, vocab_size=view.vocab_size, draft_vocab_size=view.draft_vocab_size, where=str(folder))
    own = stored.pop(EMBEDDING, None)
    weights = {name: tensor for name, tensor in stored.items() if name not in ("d2t", "t2d")}
    wrong = (
        _view_problems(view, verifier) + _tensor_problems(view, weights, expected_shapes(view)) + _embedding_problems(view, own, embedding)
    )
    if wrong:
        shown = "; ".join(wrong[:6]) + (f"; and {len(wrong) - 6} more" if len(wrong) > 6 else "")
        raise _refused(f"{view.engine} would not serve this draft as it was trained: {shown}", str(folder))
    return LoadedDraft(view, {name: tensor.float() for name, tensor in weights.items()}, embedding if own is None else own, mapping)


def _view_problems(view: EngineView, verifier: Verifier) -> list[str]:
    wrong = []
    if view.vocab_size != verifier.vocab_size:
        wrong.append(f"vocab_size is {view.vocab_size}, the target's is {verifier.vocab_size}")
    if view.target_hidden_size != verifier.hidden_size:
        wrong.append(f"target_hidden_size is {view.target_hidden_size}, the target's is {verifier.hidden_size}")
    if not all(0 < boundary < verifier.layers for boundary in view.boundaries) or list(view.boundaries) != sorted(set(view.boundaries)):
        wrong.append(f"it captures boundaries {list(view.boundaries)} of {verifier.layers} layers")
    if len(view.boundaries) != view.aux:
        wrong.append(f"it captures {len(view.boundaries)} boundaries, fc is built for {view.aux}")
    if view.max_positions < verifier.max_positions:
        wrong.append(f"max_position_embeddings is {view.max_positions}, the target serves {verifier.max_positions}")
    if view.dtype != verifier.dtype:
        wrong.append(f"dtype is {view.dtype}, the target's is {verifier.dtype}")
    return wrong


def _tensor_problems(view: EngineView, weights: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    wrong = [f"{name} is missing" for name in expected if name not in weights]
    wrong += [f"{name} has no place in the module" for name in weights if name not in expected]
    for name, tensor in weights.items():
        if name in expected and tuple(tensor.shape) != expected[name]:
            wrong.append(f"{name} is {list(tensor.shape)}, not {list(expected[name])}")
        elif str(tensor.dtype) != f"torch.{view.dtype}":
            wrong.append(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, the config says {view.dtype}")
        elif not bool(torch.isfinite(tensor).all()):
            wrong.append(f"{name} holds NaN or infinity")
    return wrong


def _embedding_problems(view: EngineView, own: Tensor | None, target: Tensor) -> list[str]:
    """The draft's embedding is the target's: absent where widths agree, or the same bit for bit."""
    if own is None:
        return [f"{EMBEDDING} is missing, and the target's is {target.shape[1]} wide"] if target.shape[1] != view.hidden_size else []
    if tuple(own.shape) != (view.vocab_size, view.hidden_size):
        return [f"{EMBEDDING} is {list(own.shape)}, not {[view.vocab_size, view.hidden_size]}"]
    if str(own.dtype) != f"torch.{view.dtype}":
        return [f"{EMBEDDING} is {str(own.dtype).removeprefix('torch.')}, the config says {view.dtype}"]
    if target.shape[1] == view.hidden_size and not torch.equal(own, target):
        return [f"{EMBEDDING} is not the target's"]
    return []


def expected_shapes(view: EngineView) -> dict[str, tuple[int, ...]]:
    """Name and shape of each parameter of the module, but for the embedding and the tables."""
    h, wide, I = view.hidden_size, view.target_hidden_size, view.intermediate_size  # noqa: E741  I as in the papers
    q, kv, layer = view.heads * view.head_dim, view.kv_heads * view.head_dim, "layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, view.aux * wide),
        "norm.weight": (h,),
        "lm_head.weight": (view.draft_vocab_size, h),
    }
    shapes |= {f"{layer}{name}.weight": (h,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    shapes |= {f"{layer}self_attn.{part}_proj.weight": (rows, 2 * h) for part, rows in (("q", q), ("k", kv), ("v", kv))}
    shapes |= {f"{layer}self_attn.o_proj.weight": (h, q), f"{layer}mlp.down_proj.weight": (h, I)}
    shapes |= {f"{layer}mlp.{part}_proj.weight": (I, h) for part in ("gate", "up")}
    if view.norm_before_fc:
        shapes["input_norm.weight"] = (view.aux * wide,)
    if view.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (wide,) for i in range(view.aux)}
    if view.qk_norm:
        shapes |= {f"{layer}self_attn.{part}_norm.weight": (view.head_dim,) for part in ("q", "k")}
    return shapes


def _sizes(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The sizes that both engines read under the same names, with transformers' defaults for the two optional ones."""
    names = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "heads": "num_attention_heads",
        "eps": "rms_norm_eps",
    }
    if absent := [key for key in (*names.values(), "hidden_act") if config.get(key) is None]:
        raise _refused(f"The config lacks {', '.join(absent)}", where)
    if config["hidden_act"] != "silu" or config.get("num_hidden_layers") != 1 or config.get("attention_bias") or config.get("mlp_bias"):
        raise _refused("Only one decoder layer with silu and without biases can be checked", where)
    sizes = {ours: config[key] for ours, key in names.items()}
    sizes["kv_heads"] = config.get("num_key_value_heads") or sizes["heads"]
    sizes["head_dim"] = config.get("head_dim") or sizes["hidden_size"] // sizes["heads"]
    return sizes


def _rope(config: Mapping[str, Any], *, default_theta: float, where: str) -> dict[str, Any]:
    """RoPE as transformers 5 settles it: `rope_scaling` is another name of `rope_parameters`, and the later key wins."""
    settled: dict[str, Any] = {}
    for key, value in config.items():
        if key in ("rope_parameters", "rope_scaling"):
            settled = dict(value or {})
    settled.setdefault("rope_type", settled.get("type", "default"))
    settled.setdefault("rope_theta", config.get("rope_theta") or default_theta)
    if settled.get("partial_rotary_factor", 1.0) != 1.0 or settled["rope_type"] not in FREQUENCIES:
        raise _refused(f"rope_parameters {settled} cannot be checked", where)
    return settled


def _default_boundaries(verifier: Verifier | None) -> tuple[int, ...]:
    """What both engines capture when the config names nothing.

    Not `target/boundaries.py`, whose numbers are ours to change: these are the engines'.
    """
    return (2, verifier.layers // 2, verifier.layers - 3) if verifier is not None else ()


def _from_sglang(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


def _refused(what: str, where: str) -> DataError:
    return DataError(f"{what}.", where=where, remedy="Export again with --from export.")
