"""The target, known without being loaded.

    target = open_target(TargetSettings(model="path/or/hub-id/or/file.gguf"))
    target.config.layers, target.fingerprint          # well under a second
    target.weights().read_rows(...)                   # bytes of those rows

Opening does not complain about damaged weights (a gate lists all their problems, and stages that need only the
tokenizer can work without them); `weights()` does.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from draftproof.artifact import fingerprint, hash_file
from draftproof.errors import DataError, DraftproofError, UsageError
from draftproof.recipe import TargetSettings
from draftproof.target.config import Dtype, TargetConfig, read_config
from draftproof.target.weights import Weights, header_identity, open_weights

_IDENTITY_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "*.model",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "*.tiktoken",
    "additional_chat_templates/*.jinja",
    "*.safetensors.index.json",
    "gguf-source.json",
)
"""Files whose bytes make the target what it is, beside the weights."""


@dataclass(frozen=True)
class Target:
    """A target LLM on disk."""

    folder: Path
    """Hugging Face layout."""
    settings: TargetSettings
    config: TargetConfig
    fingerprint: str
    """Of config, tokenizer, template, index, GGUF source, code files and whether they run, hub commit, and of each shard's
    size, header and a sample of its bytes."""
    revision: str | None = None
    """The hub commit that was taken; None for local files."""
    _cache: dict[str, Weights] = field(default_factory=dict, repr=False, compare=False)

    @property
    def dtype(self) -> Dtype:
        """What the target computes in: the recipe's word, else the config's. Changes results, yet is not in the fingerprint."""
        return self.config.dtype if self.settings.dtype == "auto" else self.settings.dtype

    def weights(self) -> Weights:
        """Its weights; headers are read once. Raises DataError when files are missing or damaged."""
        if "weights" not in self._cache:
            self._cache["weights"] = open_weights(self.folder)
        return self._cache["weights"]


def open_target(settings: TargetSettings) -> Target:
    """Find the target's folder (fetch or convert it where needed) and read what its files say.

    Raises UsageError when there is no such target, DataError when its config cannot be used.
    """
    path = Path(os.path.expanduser(settings.model))
    revision = None
    if path.suffix == ".gguf":
        from draftproof.target.gguf import convert_gguf

        folder = convert_gguf(path, cache_dir())
    elif settings.model and path.is_dir():
        folder = path.resolve()
    elif path.is_file():
        raise UsageError(
            "The target is a file, but not a .gguf file.",
            where=str(path),
            remedy="Give the folder that holds config.json, or a .gguf file.",
        )
    elif _is_hub_id(settings.model):
        folder, revision = _fetch(settings)
    else:
        raise UsageError(
            "There is no such target.", where=settings.model, remedy="Give a folder, a .gguf file, or a hub id (ORGANISATION/NAME)."
        )
    return Target(folder, settings, read_config(folder), _fingerprint(folder, revision, trusted=settings.trust_remote_code), revision)


def cache_dir() -> Path:
    """Where converted targets lie: $DRAFTPROOF_CACHE, else $XDG_CACHE_HOME/draftproof, else ~/.cache/draftproof."""
    if own := os.environ.get("DRAFTPROOF_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "draftproof"


def code_files(folder: Path) -> dict[str, str]:
    """Python files that come with the target: name to BLAKE3. They run only with `trust_remote_code`."""
    return {path.relative_to(folder).as_posix(): hash_file(path) for path in sorted(folder.rglob("*.py")) if path.is_file()}


def _fingerprint(folder: Path, revision: str | None, *, trusted: bool) -> str:
    files = sorted({path for pattern in _IDENTITY_FILES for path in folder.glob(pattern) if path.is_file()})
    code = code_files(folder)
    return fingerprint(
        {
            "files": {path.relative_to(folder).as_posix(): hash_file(path) for path in files},
            "code": {"files": code, "runs": trusted} if code else {},  # with trust another class computes the states
            "shards": [list(shard) for shard in header_identity(folder)],
            "revision": revision,
        }
    )


_HUB_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")


def _is_hub_id(name: str) -> bool:
    parts = name.split("/")
    return len(parts) <= 2 and all(_HUB_NAME.fullmatch(part) for part in parts)


def _fetch(settings: TargetSettings) -> tuple[Path, str]:
    """The hub snapshot's folder and commit; files already there are not fetched again."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise UsageError(
            "There is no such folder, and hub ids need huggingface-hub.", where=settings.model, remedy="pip install 'draftproof[hub]'"
        ) from None
    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"] + (["*.py"] if settings.trust_remote_code else [])
    try:
        folder = Path(snapshot_download(settings.model, revision=settings.revision, allow_patterns=wanted))
    except LocalEntryNotFoundError:
        raise DraftproofError(
            "There is no such folder, and the hub cannot be reached.",
            where=settings.model,
            remedy="Check the name and the network, or give a local folder.",
        ) from None
    except HfHubHTTPError as error:
        raise DataError(
            f"The hub does not give this target: {str(error).splitlines()[0]}",
            where=f"{settings.model}@{settings.revision or 'main'}",
            remedy="Check the name and revision; for gated models log in first.",
        ) from None
    return folder, folder.name
