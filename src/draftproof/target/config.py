"""What a target's `config.json` says, read as JSON: no torch, no transformers, no weights.

    config = read_config(folder)
    config.layers, config.hidden_size, config.vocab_size

Sizes of the language model may lie one level deeper (`text_config` of a multimodal wrapper); `nesting`
says where they were found. Anything that the rest of the project would have to guess is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from draftproof.errors import DataError
from draftproof.target.weights import float_dtype_of_files

NormConvention = Literal["weight", "one_plus_weight"]
Dtype = Literal["bfloat16", "float16", "float32"]

# fmt: off
# Read in transformers 5.19, models/*/modeling_*.py: which RMSNorm the final norm of the model type is.
ONE_PLUS_WEIGHT = frozenset({
    "gemma", "gemma2", "gemma3", "gemma3_text", "minimax_m3_vl", "minimax_m3_vl_text", "qwen3_5", "qwen3_5_text", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_next", "recurrent_gemma", "step3p7", "step3p7_text", "vaultgemma",
})
PLAIN_WEIGHT = frozenset({
    "afmoe", "apertus", "arcee", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32", "ernie4_5", "ernie4_5_moe", "exaone4",
    "falcon_h1", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "glm", "glm4", "glm4_moe", "gpt_oss", "granite", "granitemoe",
    "helium", "hunyuan_v1_dense", "kimi_linear", "lfm2", "llama", "llama4", "llama4_text", "mimo_v2_flash", "minicpm3", "minimax",
    "minimax_m2", "ministral", "mistral", "mistral3", "mixtral", "mllama_text_model", "olmo2", "olmo3", "phi3", "qwen2", "qwen2_moe",
    "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe",
    "qwen3_vl_moe_text", "seed_oss", "smollm3",
})
# Families whose config classes tie head and embedding when the file does not say (transformers 5.19).
_TIED_BY_DEFAULT = frozenset({
    "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "recurrent_gemma", "vaultgemma",
})
# fmt: on

_TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class TargetConfig:
    """The language model inside a target, by its config."""

    architecture: str
    model_type: str
    """Of the language model itself, not of a wrapper."""
    nesting: tuple[str, ...]
    """Keys from the top of the config to the language model's sizes; empty when they are at the top."""
    layers: int
    hidden_size: int
    vocab_size: int
    """Rows of the LM head. `len(tokenizer)` may be smaller."""
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    """Flat: `rope_theta`, `rope_type`, and what the type needs."""
    max_positions: int
    tied_head: bool
    norm_convention: NormConvention
    logit_softcap: float | None
    """Logits are `cap * tanh(logits / cap)`, after `logit_scale`."""
    logit_scale: float
    """Logits are multiplied by this."""
    dtype: Dtype
    quantization: str | None
    """`quant_method` of a quantised target."""

    @property
    def norm_convention_known(self) -> bool:
        """Whether somebody read this model type's norm; otherwise plain weight is assumed."""
        return self.model_type in ONE_PLUS_WEIGHT or self.model_type in PLAIN_WEIGHT


def read_config(folder: Path) -> TargetConfig:
    """The config of a target folder. Raises DataError naming the file and the key."""
    path = folder / "config.json"
    values = read_json_file(path)
    return parse_config(values, where=str(path), folder=folder)


def parse_config(values: Mapping[str, Any], *, where: str, folder: Path | None = None) -> TargetConfig:
    """The same from a config's values; `folder` serves to find a dtype that the config does not state."""
    nesting = _find_text(values)
    text: Mapping[str, Any] = values
    for key in nesting:
        text = text[key]
    get = _Reader(text, ".".join(nesting), where)

    hidden, heads = get.count("hidden_size"), get.count("num_attention_heads")
    model_type = str(text.get("model_type") or values.get("model_type") or "")
    architectures = values.get("architectures") or text.get("architectures") or []
    if not architectures:
        raise DataError("The target's config names no architecture.", where=where, remedy="Add `architectures`, as the hub page shows.")
    if "rms_norm_eps" not in text and ("layer_norm_eps" in text or "layer_norm_epsilon" in text):
        raise DataError(
            f"The target ({model_type}) uses LayerNorm; only targets with an RMS final norm are supported.",
            where=where,
            remedy="Choose another target.",
        )
    quantization = text.get("quantization_config") or values.get("quantization_config")
    return TargetConfig(
        architecture=str(architectures[0]),
        model_type=model_type,
        nesting=nesting,
        layers=get.count("num_hidden_layers"),
        hidden_size=hidden,
        vocab_size=get.count("vocab_size"),
        intermediate_size=get.count("intermediate_size"),
        heads=heads,
        kv_heads=get.count("num_key_value_heads", default=heads),
        head_dim=get.count("head_dim", default=hidden // heads),
        hidden_act=str(text.get("hidden_act") or text.get("hidden_activation") or "silu"),
        rms_norm_eps=get.number("rms_norm_eps"),
        rope_parameters=_rope(text),
        max_positions=get.count("max_position_embeddings"),
        tied_head=_tied(text, values, model_type),
        norm_convention="one_plus_weight" if model_type in ONE_PLUS_WEIGHT else "weight",
        logit_softcap=get.number("final_logit_softcapping", default=0.0) or None,
        logit_scale=_logit_scale(get, hidden),
        dtype=_dtype(text, values, folder, where),
        quantization=str(quantization.get("quant_method", "unnamed")) if isinstance(quantization, Mapping) else None,
    )


def read_json_file(path: Path) -> dict[str, Any]:
    """A JSON object of a target folder; raises DataError with line and column."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"The target folder has no {path.name}.", where=str(path.parent), remedy="Give a folder in Hugging Face layout."
        ) from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path.name} is not JSON: {error.msg}.", where=f"{path}:{error.lineno}:{error.colno}", remedy="Fetch the file again."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path.name} cannot be read: {error}.", where=str(path), remedy="Fetch the file again.") from None
    if not isinstance(values, dict):
        raise DataError(f"{path.name} does not hold a JSON object.", where=str(path), remedy="Fetch the file again.")
    return values


@dataclass(frozen=True)
class _Reader:
    """Typed reads from one level of a config, with errors that name the key."""

    values: Mapping[str, Any]
    prefix: str
    where: str

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number that is not negative."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise self._wrong(key, value, "a number")
        return float(value)

    def _wrong(self, key: str, value: Any, wanted: str) -> DataError:
        dotted = f"{self.prefix}.{key}" if self.prefix else key
        said = f"has no {dotted}" if value is None else f"says {dotted} = {value!r}, not {wanted}"
        return DataError(f"The target's config {said}.", where=self.where, remedy=f"Write {dotted} into config.json.")


def _find_text(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Where the language model's sizes are: the deepest text section, else the top.

    A wrapper may repeat some sizes at its top, so a text section that states its own wins.
    """
    for key in _TEXT_SECTIONS:
        inner = values.get(key)
        if isinstance(inner, Mapping):
            return (key, *_find_text(inner))
    return ()


def _tied(text: Mapping[str, Any], values: Mapping[str, Any], model_type: str) -> bool:
    for level in (text, values):
        if isinstance(level.get("tie_word_embeddings"), bool):
            return cast(bool, level["tie_word_embeddings"])
    return model_type in _TIED_BY_DEFAULT


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """One flat set of rope values from the new form (`rope_parameters`) or the older one (`rope_theta`, `rope_scaling`)."""
    new = text.get("rope_parameters")
    if isinstance(new, Mapping) and new:
        # Models with several kinds of layers have one set a kind; the draft attends to everything.
        flat = new.get("full_attention", new)
        rope = dict(flat) if isinstance(flat, Mapping) else dict(new)
    else:
        scaling = text.get("rope_scaling")
        rope = dict(scaling) if isinstance(scaling, Mapping) else {}
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    rope.setdefault("rope_theta", text.get("rope_theta") or 10000.0)
    rope["rope_theta"] = float(rope["rope_theta"])
    return rope


def _logit_scale(get: _Reader, hidden: int) -> float:
    """The factor on the logits: Cohere and Falcon-H1 multiply, Granite divides, MiniCPM scales by width."""
    if get.values.get("logit_scale") is not None:
        return get.number("logit_scale")
    if get.values.get("lm_head_multiplier") is not None:
        return get.number("lm_head_multiplier")
    if get.values.get("logits_scaling"):
        return 1.0 / get.number("logits_scaling")
    if get.values.get("dim_model_base"):
        return get.number("dim_model_base") / hidden
    return 1.0


def _dtype(text: Mapping[str, Any], values: Mapping[str, Any], folder: Path | None, where: str) -> Dtype:
    for level in (text, values):
        stated = level.get("dtype") or level.get("torch_dtype")
        if stated is not None:
            break
    else:
        stated = float_dtype_of_files(folder) if folder else "float32"
    name = str(stated).removeprefix("torch.")
    if name not in _DTYPES:
        raise DataError(f"The target's dtype {name!r} is not supported.", where=where, remedy=f"Supported: {', '.join(_DTYPES)}.")
    return cast(Dtype, name)
