"""The target, loaded: the model by transformers, its parts, and its boundaries by forward hooks.

model = load_model(target, device="cpu")
with capture(model, boundaries=(2, 15, 27)) as captured:
    model(input_ids=ids, attention_mask=mask, use_cache=False)
    states = captured.take()                         # {2: [B, T, H], 15: ..., 27: ..., 30: ...}
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from draftproof.errors import DataError, UsageError
from draftproof.target.config import TargetConfig, parse_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from draftproof.target.target import Target


def load_model(target: Target, device: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The target in eval mode, without gradients, with SDPA attention; `dtype` None: `compute_dtype`.

    Raises DataError when a weight is missing from the files (transformers would fill it with random numbers) or when
    the model's parts are not those of the config.
    """
    import transformers

    library: Any = transformers  # its own types do not know `output_loading_info`
    library.utils.logging.disable_progress_bar()  # ours says what is going on
    trust = target.settings.trust_remote_code
    try:
        config = library.AutoConfig.from_pretrained(target.folder, trust_remote_code=trust)
        model, loading = _loader(library, config).from_pretrained(
            target.folder,
            config=config,
            dtype=dtype or getattr(torch, compute_dtype(target, device)),
            attn_implementation="sdpa",
            trust_remote_code=trust,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise DataError(
            f"transformers cannot load the target: {error}",
            where=str(target.folder),
            remedy="Check the folder with `draftproof inspect`; targets with code of their own need target.trust_remote_code.",
        ) from None
    if missing := sorted(loading["missing_keys"]):
        raise DataError(
            f"The files hold no {missing[0]} ({len(missing)} weights are missing): the model would run on random numbers.",
            where=str(target.folder),
            remedy="Fetch the missing shard, or mend tie_word_embeddings in config.json.",
        )
    if mismatched := loading["mismatched_keys"]:
        raise DataError(
            f"A weight has another shape than the model: {next(iter(mismatched))}.",
            where=str(target.folder),
            remedy="Fetch the folder again.",
        )
    text_parts(model, target.config)
    loaded: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    return loaded


def compute_dtype(target: Target, device: str) -> str:
    """What a loaded target computes in: the recipe's word; else the target's own on a GPU, and on a CPU float32.

    A CPU takes bf16 only where it multiplies it natively (AVX512-BF16 or AMX): on AVX2 alone (SmolLM2-135M, 2 cores,
    shared machine) float32 prefill ran at 450 tokens/s and bf16 at 80, and float32 states are the more exact ones.
    """
    if target.settings.dtype != "auto" or device != "cpu":
        return target.dtype
    native = bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return "bfloat16" if native and target.dtype == "bfloat16" else "float32"


@dataclass(frozen=True)
class TextParts:
    """The language model's parts inside a loaded target, with the path of each."""

    layers: nn.ModuleList
    embedding: nn.Embedding
    final_norm: nn.Module
    head: nn.Linear
    paths: dict[str, str]
    """`layers`, `embedding`, `final_norm`, `head` to the module path, for people."""


def text_parts(model: nn.Module, config: TargetConfig | None = None) -> TextParts:
    """Find layers, embedding, final norm and head by structure, through any wrapper; `config` None: the model's own.

    The decoder is the one module that holds a list of L blocks, an embedding `[V, H]` and a norm `[H]`; the head is
    the one linear map `[V, H]` outside it. Raises DataError when the model does not have exactly one of each.
    """
    config = config or _own_config(model)
    wanted = f"{config.layers} layers, hidden {config.hidden_size}, vocabulary {config.vocab_size}"
    found = [(path, parts) for path, module in model.named_modules() if (parts := _decoder_parts(module, config)) is not None]
    if len(found) != 1:
        lists = [f"{path} ({len(m)})" for path, m in model.named_modules() if isinstance(m, nn.ModuleList)]
        raise DataError(
            f"{len(found)} modules of the loaded target look like the config's decoder of {wanted}; "
            f"lists of blocks: {', '.join(lists) or 'none'}.",
            where=type(model).__name__,
            remedy="Use the config.json that belongs to these weights; else this architecture is not supported.",
        )
    [(root, names)] = found
    decoder = model.get_submodule(root)
    inside = {id(module) for module in decoder.modules()}
    heads = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and id(module) not in inside
        and tuple(module.weight.shape) == (config.vocab_size, config.hidden_size)
    }
    if len(heads) != 1:
        raise DataError(
            f"The loaded target has {len(heads)} LM heads of [{config.vocab_size}, {config.hidden_size}] outside {root or 'its decoder'}.",
            where=type(model).__name__,
            remedy="This architecture is not supported.",
        )
    [(head_path, head)] = heads.items()
    found_parts: dict[str, Any] = {key: getattr(decoder, name) for key, name in names.items()}
    paths = {key: f"{root}.{name}" if root else name for key, name in names.items()}
    return TextParts(**found_parts, head=head, paths={**paths, "head": head_path})


class Captured:
    """Boundaries of the latest forward."""

    def __init__(self, wanted: Sequence[int]) -> None:
        self.wanted = tuple(wanted)
        self._states: dict[int, torch.Tensor] = {}

    def take(self) -> dict[int, torch.Tensor]:
        """Boundary to `[B, T, H]`, in the model's dtype, ascending; they are handed over, not kept.

        Raises RuntimeError when no forward ran since the last take.
        """
        if missing := [boundary for boundary in self.wanted if boundary not in self._states]:
            raise RuntimeError(f"boundaries {missing} were not captured: run the model once before each take()")
        states, self._states = self._states, {}
        return {boundary: states[boundary] for boundary in self.wanted}

    def keep(self, boundary: int, state: torch.Tensor) -> None:
        """Called by the hooks."""
        self._states[boundary] = state.detach()


@contextmanager
def capture(model: nn.Module, boundaries: Sequence[int], final: bool = True) -> Iterator[Captured]:
    """Hooks that record boundaries 0..L of every forward; `final` adds boundary L, before the final norm.

    Boundary k < L equals `hidden_states[k]` of transformers; its `hidden_states[L]` is after the final norm instead.
    Raises UsageError for a boundary outside 0..L.
    """
    parts = text_parts(model)
    layers = len(parts.layers)
    wanted = sorted({*boundaries, *([layers] if final else [])})
    if wrong := [boundary for boundary in wanted if not 0 <= boundary <= layers]:
        raise UsageError(f"There is no boundary {wrong[0]}: the target has boundaries 0..{layers}.", remedy="See extract.boundaries.")
    captured = Captured(wanted)
    handles = []
    for boundary in wanted:
        if boundary == layers:
            handles.append(parts.final_norm.register_forward_pre_hook(_input_hook(captured, boundary), with_kwargs=True))
        elif boundary == 0:
            handles.append(parts.layers[0].register_forward_pre_hook(_input_hook(captured, 0), with_kwargs=True))
        else:
            handles.append(parts.layers[boundary - 1].register_forward_hook(_output_hook(captured, boundary)))
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def _input_hook(captured: Captured, boundary: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured.keep(boundary, args[0] if args else kwargs["hidden_states"])

    return hook


def _output_hook(captured: Captured, boundary: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        captured.keep(boundary, output[0] if isinstance(output, tuple) else output)

    return hook


_NORM_NAMES = ("norm", "final_norm", "norm_f", "final_layernorm", "ln_f", "embedding_norm")


def _decoder_parts(module: nn.Module, config: TargetConfig) -> dict[str, str] | None:
    """Names of the children that are layers, embedding and final norm, when the module is the decoder."""
    children = dict(module.named_children())
    layers = [n for n, m in children.items() if isinstance(m, nn.ModuleList) and len(m) == config.layers]
    sizes = (config.vocab_size, config.hidden_size)
    embeddings = [n for n, m in children.items() if isinstance(m, nn.Embedding) and tuple(m.weight.shape) == sizes]
    norms = [n for n in _NORM_NAMES if tuple(getattr(getattr(children.get(n), "weight", None), "shape", ())) == (config.hidden_size,)]
    if len(layers) == len(embeddings) == len(norms) == 1:
        return {"layers": layers[0], "embedding": embeddings[0], "final_norm": norms[0]}
    return None


def _loader(library: Any, config: Any) -> Any:
    """The auto class that knows the config: causal, or image-text-to-text for multimodal wrappers."""
    plain, wrapper = library.AutoModelForCausalLM, library.AutoModelForImageTextToText
    shipped = getattr(config, "auto_map", None) or {}
    if type(config) in plain._model_mapping or plain.__name__ in shipped:
        return plain
    return wrapper if type(config) in wrapper._model_mapping or wrapper.__name__ in shipped else plain


def _own_config(model: nn.Module) -> TargetConfig:
    values = model.config.to_dict()  # type: ignore[union-attr, operator]  # every transformers model has one
    values["architectures"] = values.get("architectures") or [type(model).__name__]
    return parse_config(values, where=type(model).__name__)
