"""GGUF targets: converted once into a cached folder in Hugging Face layout, bf16 safetensors.

The key of the cached folder is the hash of the GGUF's bytes and CONVERTER_VERSION. The folder appears by rename, so
it is whole or absent; a file lock lets one of several processes convert while the others wait.

Special tokens need care: readers of GGUF files disagree on which token ends an answer, and a wrong one makes answers
that never stop. What the chat template writes after an assistant turn is taken, and the file's own eos beside it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blake3

from draftproof.artifact import hash_file, sync_folder, write_json
from draftproof.errors import DataError, Stopped, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONVERTER_VERSION = 1
"""Raised whenever the converted folder would differ."""

_SOURCE = "gguf-source.json"


def convert_gguf(path: Path, cache_dir: Path) -> Path:
    """The converted folder of a GGUF file; made when it is not there. Needs 2 bytes a parameter of disk, about 6 of memory.

    Raises UsageError or DataError for files that cannot be read or are of a kind not proven to convert right.
    """
    if not path.is_file():
        raise UsageError("There is no such GGUF file.", where=str(path), remedy="Check target.model.")
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise DataError("The file is not a GGUF file.", where=str(path), remedy="Fetch it again.")
    digest = hash_file(path)
    key = blake3.blake3(f"{digest} {CONVERTER_VERSION}".encode()).hexdigest()[:16]
    final = cache_dir / "gguf" / f"{path.stem}-{key}"
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.parent / f".{final.name}.lock"):
        if final.is_dir():
            return final  # another process converted it while this one waited
        for stale in final.parent.glob(f".{final.name}.*.tmp"):
            shutil.rmtree(stale)  # of a converter that was killed: the lock is ours, so nobody writes there
        meta = _read_metadata(path)
        _check_space(final.parent, meta.parameters)
        folder = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}.", suffix=".tmp"))
        try:
            _convert(path, folder, meta)
            write_json(folder / _SOURCE, {"file": path.name, "blake3": digest, "converter_version": CONVERTER_VERSION})
            _flush(folder)
            os.replace(folder, final)
            sync_folder(final.parent)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return final


@dataclass(frozen=True)
class _Metadata:
    """What we read from the GGUF ourselves rather than trust a reader's choice."""

    architecture: str
    tokenizer_model: str
    pre_tokenizer: str
    eos_id: int | None
    parameters: int


def _read_metadata(path: Path) -> _Metadata:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise DataError(f"The GGUF file is damaged or cut short: {error}.", where=str(path), remedy="Fetch it again.") from None

    def value(name: str) -> Any:
        found = reader.fields.get(name)
        return None if found is None else found.contents()

    if (value("split.count") or 1) > 1:
        raise UsageError("GGUF files in several parts are not supported.", where=str(path), remedy="Merge them with `gguf-split --merge`.")
    eos = value("tokenizer.ggml.eos_token_id")
    meta = _Metadata(
        architecture=str(value("general.architecture")),
        tokenizer_model=str(value("tokenizer.ggml.model")),
        pre_tokenizer=str(value("tokenizer.ggml.pre")),
        eos_id=None if eos is None else int(eos),
        parameters=sum(int(tensor.n_elements) for tensor in reader.tensors),
    )
    if meta.tokenizer_model != "gpt2" or meta.pre_tokenizer not in _PRE_TOKENIZERS:
        raise UsageError(
            f"GGUF tokenizers of kind {meta.tokenizer_model}/{meta.pre_tokenizer} are not supported: a wrong split goes unseen.",
            where=str(path),
            remedy=f"Use the original safetensors folder. Supported: gpt2 with {', '.join(_PRE_TOKENIZERS)}.",
        )
    if not value("tokenizer.chat_template"):
        raise UsageError("The GGUF file has no chat template.", where=str(path), remedy="Use the GGUF of an instruction-tuned model.")
    return meta


def _convert(path: Path, folder: Path, meta: _Metadata) -> None:
    import torch
    import transformers

    library: Any = transformers  # its own types do not know `output_loading_info`
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        with _no_bars():
            model, loading = library.AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                quantization_config=library.GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
                output_loading_info=True,
            )
    except (ValueError, KeyError, NotImplementedError, OSError, RuntimeError) as error:
        raise DataError(
            f"transformers cannot read this GGUF file ({meta.architecture}): {error}.",
            where=str(path),
            remedy="Use the original safetensors folder.",
        ) from None
    missing = sorted(set(loading["missing_keys"]) - set(getattr(model, "_tied_weights_keys", None) or ()))
    if missing:
        raise DataError(f"The GGUF file lacks the tensor {missing[0]}.", where=str(path), remedy="Use the original safetensors folder.")

    _mend_tokenizer(tokenizer, meta)
    stop = _stop_token(tokenizer, meta)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stop)
    model.config.eos_token_id = stop
    stops = [stop] + [meta.eos_id] * (meta.eos_id is not None and meta.eos_id != stop)
    model.generation_config = library.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=stops,
        pad_token_id=stop if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )
    model.config._name_or_path = ""
    with _no_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _mend_tokenizer(tokenizer: PreTrainedTokenizerFast, meta: _Metadata) -> None:
    """Give the tokenizer the pre-tokenizer that the GGUF names; transformers 5.19 always writes plain GPT-2's."""
    tokenizer.backend_tokenizer.pre_tokenizer = _pre_tokenizer(_PRE_TOKENIZERS[meta.pre_tokenizer])


# Kinds of `tokenizer.ggml.pre`, as llama.cpp defines them: whether every digit stands alone before GPT-2's split.
_PRE_TOKENIZERS = {"smollm": True, "gpt-2": False}


def _pre_tokenizer(single_digits: bool) -> Any:
    from tokenizers import pre_tokenizers

    bytes_of_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if not single_digits:
        return bytes_of_gpt2
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of_gpt2])


def _stop_token(tokenizer: PreTrainedTokenizerFast, meta: _Metadata) -> int:
    """The control token that the chat template writes right after an assistant's answer; else the file's eos.

    Raises DataError when neither is there.
    """
    answer = "Probe-answer-7"
    text: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": answer}], tokenize=False
    )
    control = {int(token_id) for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    after = tokenizer.encode(text.rpartition(answer)[2], add_special_tokens=False)
    found = next((int(token_id) for token_id in after if token_id in control), meta.eos_id)
    if found is None:
        raise DataError(
            "The GGUF file names no stop token, and its chat template writes none.", remedy="Use the original safetensors folder."
        )
    return found


def _check_space(folder: Path, parameters: int) -> None:
    needed, free = 2 * parameters + 64_000_000, shutil.disk_usage(folder).free
    if free < needed:
        raise Stopped(
            f"Converting the GGUF needs {needed / 1e9:.1f} GB of disk; {free / 1e9:.1f} GB are free.",
            where=str(folder),
            remedy="Free some space, or set DRAFTPROOF_CACHE to a larger disk, and run again.",
        )


def _flush(folder: Path) -> None:
    """Everything on disk and readable by others before the folder gets its name."""
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o644)
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    folder.chmod(0o755)
    sync_folder(folder)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An exclusive lock that the system releases when its holder dies. The file stays: removing it would let two in."""
    with path.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without the library's own progress bars, which would land in `--json` logs."""
    from transformers.utils import logging as library_logging

    logging: Any = library_logging
    was = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was:
            logging.enable_progress_bar()
