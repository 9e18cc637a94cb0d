"""The target's weights without loading them: headers, index, and the bytes of the tensors or rows asked for.

    weights = open_weights(folder)                       # headers and index only: milliseconds, also for 547 GB
    name = head_name(weights, config)
    weights.read_rows(name, kept_ids)                    # [len(kept_ids), H], reads those rows alone

Head, embedding and final norm are found by config and suffix, with exactly one match. What the files hold is
checked against the config first, so that packed integers are never taken for floats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from draftproof.errors import DataError, UsageError

if TYPE_CHECKING:
    import torch

    from draftproof.target.config import TargetConfig

_FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_OTHERS = {"F64": "float64", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
_OTHERS |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "U32": "uint32", "U16": "uint16", "U64": "uint64"}
_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "U32": 4, "U16": 2, "U64": 8}

_HEADS = frozenset({"lm_head", "embed_out", "output"})
_EMBEDDINGS = frozenset({"embed_tokens", "embeddings", "wte", "tok_embeddings", "word_embeddings", "embed_in"})
_FINAL_NORMS = frozenset({"norm", "norm_f", "final_layernorm", "final_norm", "ln_f", "embedding_norm"})
# Parts of a multimodal or multi-token target whose tensors are never the language model's own.
# fmt: off
_NOT_TEXT = frozenset({
    "vision_tower", "vision_model", "visual", "vision_encoder", "vision_embedder", "audio_tower", "audio_model",
    "multi_modal_projector", "mtp", "talker", "code2wav", "token2wav", "embed_vision", "embed_audio",
})
# fmt: on

_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors$")
_LARGEST_HEADER = 100_000_000
"""Bytes; the safetensors format's own limit."""
_SAMPLE = 64 * 1024
"""Bytes hashed at three places of a weight file's data."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: bytes `start` to `stop` of `file`."""

    file: Path
    dtype: str
    """The format's name, for example `BF16`."""
    shape: tuple[int, ...]
    start: int
    stop: int


class Weights:
    """Tensors of a target folder by name. Reads only the bytes asked for."""

    def __init__(self, folder: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.folder = folder
        self._tensors = dict(tensors)

    @property
    def names(self) -> Sequence[str]:
        """All tensor names, sorted."""
        return sorted(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Where the tensor lies. Raises DataError when there is no such tensor."""
        if name not in self._tensors:
            raise DataError(
                f"The target has no tensor {name!r}.", where=str(self.folder), remedy="Check the folder with `draftproof inspect`."
            )
        return self._tensors[name]

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, in its stored dtype."""
        info = self.info(name)
        data = np.fromfile(info.file, dtype=np.uint8, count=info.stop - info.start, offset=info.start)
        return _as_tensor(data, info, info.shape)

    def read_rows(self, name: str, ids: Iterable[int] | np.ndarray[Any, Any]) -> torch.Tensor:
        """Rows `ids` of a tensor, in that order: `[len(ids), ...]`. Reads no other rows. Raises UsageError outside the tensor."""
        info = self.info(name)
        wanted = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        rows, row_shape = info.shape[0], info.shape[1:]
        if wanted.size and (wanted.min() < 0 or wanted.max() >= rows):
            raise UsageError(
                f"{name} has rows 0 to {rows - 1}; asked for {wanted.min()} to {wanted.max()}.",
                where=str(info.file),
                remedy="Take the vocabulary size from the LM head's rows.",
            )
        row_bytes = (info.stop - info.start) // max(rows, 1)
        stored = np.memmap(info.file, dtype=np.uint8, mode="r", offset=info.start, shape=(rows, row_bytes))
        return _as_tensor(np.ascontiguousarray(stored[wanted]).reshape(-1), info, (len(wanted), *row_shape))


def open_weights(folder: Path) -> Weights:
    """Read headers and index. Raises DataError for the first missing, truncated or surplus shard or tensor."""
    tensors, problems = _survey(folder)
    if problems:
        more = f" ({len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise DataError(f"The target's weights are not whole: {problems[0]}{more}", where=str(folder), remedy="Fetch the named file again.")
    return Weights(folder, tensors)


def shard_problems(folder: Path) -> list[str]:
    """Everything wrong with files and index, one sentence each."""
    return _survey(folder)[1]


def size_problems(weights: Weights, config: TargetConfig) -> list[str]:
    """Everything in which head, embedding or final norm disagree with the config, one sentence each."""
    found: list[str] = []
    for resolve in (head_name, embedding_name, final_norm_name):
        try:
            resolve(weights, config)
        except DataError as error:
            if error.what not in found:
                found.append(error.what)
    return found


def weight_problems(folder: Path) -> list[str]:
    """All of both kinds; sizes only when the files are whole."""
    from draftproof.target.config import read_config

    tensors, problems = _survey(folder)
    return problems or size_problems(Weights(folder, tensors), read_config(folder))


def head_name(weights: Weights, config: TargetConfig) -> str:
    """The LM head's tensor: its own, or the embedding when the config ties them.

    Raises DataError when config and files contradict each other, or when the head is not plain `[V, H]` floats.
    """
    modules = _candidates(weights, _HEADS)
    if not modules:
        if config.tied_head:
            return embedding_name(weights, config)
        raise DataError(
            "The config says that head and embedding are not tied, but the files hold no LM head.",
            where=str(weights.folder),
            remedy="Fetch the missing shard, or set tie_word_embeddings in config.json if the model is tied.",
        )
    name = _one_plain(weights, modules, "LM head", (config.vocab_size, config.hidden_size))
    if config.tied_head and not _same_rows(weights, name, embedding_name(weights, config)):
        raise DataError(
            f"The config ties head and embedding, but the files hold a head of its own, {name}, with other values.",
            where=str(weights.folder),
            remedy="Set tie_word_embeddings to false in config.json if the head is real.",
        )
    return name


def embedding_name(weights: Weights, config: TargetConfig) -> str:
    """The token embedding's tensor, plain `[V, H]` floats. Raises DataError otherwise."""
    return _one_plain(weights, _candidates(weights, _EMBEDDINGS), "token embedding", (config.vocab_size, config.hidden_size))


def final_norm_name(weights: Weights, config: TargetConfig) -> str:
    """The final norm's weight, plain `[H]` floats. Raises DataError otherwise, or when it has a bias (a LayerNorm)."""
    return _one_plain(weights, _candidates(weights, _FINAL_NORMS), "final norm", (config.hidden_size,))


def header_identity(folder: Path) -> list[tuple[str, int, str]]:
    """(name, size, hash) of every weight file: what a fingerprint takes instead of all the weights' bytes.

    The hash is of the header and of 64 KiB at start, middle and end of the data: two fine-tunes of one model have the
    same headers and sizes, and hardly a byte in common.
    """
    from draftproof.artifact import hash_bytes

    identity = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            parts = [stream.read(min(length, _LARGEST_HEADER))]
            start, stop = stream.tell(), path.stat().st_size
            for offset in (start, (start + stop - _SAMPLE) // 2, stop - _SAMPLE):
                stream.seek(max(offset, start))
                parts.append(stream.read(_SAMPLE))
        identity.append((path.name, stop, hash_bytes(*parts)))
    return identity


def float_dtype_of_files(folder: Path) -> str:
    """The dtype of the first float tensor, by name; `float32` when there is none to see. As transformers' `auto`."""
    tensors, _ = _survey(folder)
    return next((_FLOATS[info.dtype] for _, info in sorted(tensors.items()) if info.dtype in _FLOATS), "float32")


def _survey(folder: Path) -> tuple[dict[str, TensorInfo], list[str]]:
    """Tensors by name and problems of the files."""
    problems: list[str] = []
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    index = _read_index(folder, problems)
    if index is not None:
        named = sorted(set(index.values()))
        stems = {match["stem"] for name in named if (match := _SHARD.match(name))}
        problems += [f"the index names {name}, which is missing." for name in named if name not in present]
        problems += [
            f"{name} looks like a shard, but the index does not name it."
            for name in present
            if name not in named and (match := _SHARD.match(name)) and match["stem"] in stems
        ]
        files = [name for name in named if name in present]
    else:
        files = ["model.safetensors"] if "model.safetensors" in present else present
        if not files and not problems:
            other = next((p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in sorted(folder.glob(pattern))), None)
            problems.append(f"there are no .safetensors files (found {other})." if other else "there are no .safetensors files.")
        problems += _missing_numbers(files)

    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in _read_header(folder / file, problems).items():
            if name in tensors:
                problems.append(f"{name} lies in both {tensors[name].file.name} and {file}.")
            if index is not None and index.get(name) != file:
                problems.append(f"{file} holds {name}, which the index {_places(index, name)}.")
            tensors[name] = info
    if index is not None:
        unread = {file for file in files if not any(info.file.name == file for info in tensors.values())}
        problems += [
            f"the index names {name} in {file}, which does not hold it."
            for name, file in sorted(index.items())
            if name not in tensors and file in files and file not in unread
        ]
    return tensors, problems


def _places(index: Mapping[str, str], name: str) -> str:
    return f"puts in {index[name]}" if name in index else "does not name"


def _read_index(folder: Path, problems: list[str]) -> dict[str, str] | None:
    paths = sorted(folder.glob("*.safetensors.index.json"))
    if not paths:
        return None
    path = folder / "model.safetensors.index.json"
    path = path if path in paths else paths[0]
    try:
        index = json.loads(path.read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in index.items()}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, OSError) as error:
        problems.append(f"the index {path.name} cannot be read: {type(error).__name__} {error}.")
        return {}


def _missing_numbers(files: Sequence[str]) -> list[str]:
    """Shards that their neighbours' names promise (`-00002-of-00003`), where there is no index."""
    matches = [match for name in files if (match := _SHARD.match(name))]
    promised = {f"{m['stem']}-{n:05d}-of-{m['total']}.safetensors" for m in matches for n in range(1, int(m["total"]) + 1)}
    return [f"{name} is missing." for name in sorted(promised - set(files))]


def _read_header(path: Path, problems: list[str]) -> dict[str, TensorInfo]:
    """Tensors of one file; a damaged file gives a problem and no tensors."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            problems.append(f"{path.name} is cut short inside its header ({size} bytes).")
            return {}
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            base = 8 + length
            tensors = {
                name: TensorInfo(path, entry["dtype"], tuple(entry["shape"]), *(base + offset for offset in entry["data_offsets"]))
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{path.name} has a damaged header: {type(error).__name__} {error}.")
            return {}
    wanted = max((info.stop for info in tensors.values()), default=base)
    if size != wanted:
        problems.append(f"{path.name} has {size} bytes, its header says {wanted}: it is {'cut short' if size < wanted else 'too long'}.")
    for name, info in tensors.items():
        if info.dtype in _BYTES and info.stop - info.start != prod(info.shape) * _BYTES[info.dtype]:
            problems.append(f"{path.name}: the bytes of {name} do not fit {info.dtype} {list(info.shape)}.")
    return tensors


def _candidates(weights: Weights, last: frozenset[str]) -> dict[str, dict[str, TensorInfo]]:
    """Modules whose last name part is in `last`, outside numbered blocks and other towers: path -> attribute -> tensor."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name in weights.names:
        module, _, attribute = name.rpartition(".")
        parts = module.split(".")
        if parts[-1] in last and not any(part.isdigit() or part in _NOT_TEXT for part in parts):
            modules.setdefault(module, {})[attribute] = weights.info(name)
    return modules


def _one_plain(weights: Weights, modules: Mapping[str, Mapping[str, TensorInfo]], what: str, shape: tuple[int, ...]) -> str:
    """The name of the only candidate's weight, proven plain: float dtype, the config's shape, nothing beside it."""
    where = str(weights.folder)
    if not modules:
        raise DataError(
            f"The files hold no {what} under any known name.",
            where=where,
            remedy="Check that all shards are there; else this layout is not supported.",
        )
    if len(modules) > 1:
        raise DataError(
            f"More than one tensor could be the {what}: {', '.join(modules)}.", where=where, remedy="This layout is not supported."
        )
    [(module, attributes)] = modules.items()
    info = attributes.get("weight")
    beside = sorted(set(attributes) - {"weight"})
    if info is None or info.dtype not in _FLOATS or any(name != "bias" for name in beside):
        held = ", ".join(f"{attribute} {tensor.dtype} {list(tensor.shape)}" for attribute, tensor in sorted(attributes.items()))
        raise DataError(
            f"The {what} {module} is packed or quantised ({held}); only plain bf16, f16 or f32 is supported.",
            where=where,
            remedy="Use a target whose head, embedding and final norm are left unquantised, or the original one.",
        )
    if beside:
        raise DataError(f"The {what} {module} has a bias, which is not supported.", where=where, remedy="Choose another target.")
    if info.shape != shape:
        raise DataError(
            f"The {what} {module}.weight is {list(info.shape)}, the config says {list(shape)}.",
            where=where,
            remedy="Use the config.json that belongs to these weights.",
        )
    return f"{module}.weight"


def _same_rows(weights: Weights, name: str, other: str, sample: int = 64) -> bool:
    """Whether two tensors agree on rows spread over their length."""
    import torch

    first, second = weights.info(name), weights.info(other)
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    ids = np.unique(np.linspace(0, first.shape[0] - 1, sample).astype(np.int64))
    return bool(torch.equal(weights.read_rows(name, ids), weights.read_rows(other, ids)))


def _as_tensor(data: np.ndarray[Any, Any], info: TensorInfo, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    name = _FLOATS.get(info.dtype) or _OTHERS.get(info.dtype)
    dtype = getattr(torch, name, None) if name else None
    if dtype is None:
        raise DataError(f"The dtype {info.dtype} is not supported.", where=str(info.file), remedy="Use a target in bf16, f16 or f32.")
    if not data.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(shape)
