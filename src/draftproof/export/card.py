"""The model card, `README.md` of each folder: what it is, what it belongs to, how to serve it, what was measured.

Nothing is claimed before it is measured: `complete_card` replaces the one section that waits for figures.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from draftproof.artifact import write_atomic
from draftproof.draft.eagle3 import DraftConfig
from draftproof.errors import DataError
from draftproof.export.schema import Verifier

CARD = "README.md"
MEASURED = "## Measured acceptance"


def write_card(
    folder: Path,
    engine: Literal["vllm", "sglang"],
    config: DraftConfig,
    verifier: Verifier,
    *,
    draft_tokens: int,
    training: Mapping[str, Any],
) -> Path:
    """Write the card of a folder. `training` is a flat summary, shown as it is."""
    sections = [
        _front_matter(verifier),
        f"# EAGLE-3 draft for {verifier.name if verifier.hub else Path(verifier.name).name}",
        f"A draft model for speculative decoding. It proposes {draft_tokens} tokens a cycle, which the target verifies: "
        "the text is the target's own, only sooner.",
        "## The draft\n\n" + _table(_facts(config, verifier)),
        "## Training\n\n" + (_table(training) if training else "No summary was recorded."),
        "## Serving\n\n" + _serving(engine, verifier, draft_tokens),
        f"{MEASURED}\n\nNot measured yet.",
    ]
    path = folder / CARD
    write_atomic(path, ("\n\n".join(sections) + "\n").encode())
    return path


def complete_card(folder: Path, result: Mapping[str, Any]) -> Path:
    """Put measured figures into a folder's card; done twice, it says the last.

    `result` is `evaluate/result.json`: acceptance_length, acceptance_by_position, by_category, draft_tokens,
    decoding, engine, prompts; and `served`, what an engine reported while serving, or null.
    Raises DataError when the folder has no card.
    """
    path = folder / CARD
    text = path.read_text() if path.is_file() else ""
    if MEASURED not in text:
        raise DataError("The folder has no model card to complete.", where=str(path), remedy="Export again with --from export.")
    served = result.get("served")
    parts = [_measured(result), _measured({**result, "by_category": {}, **served}) if served else "While serving: not measured yet."]
    section = f"{MEASURED}\n\n" + "\n\n".join(parts) + "\n"
    completed = re.sub(rf"{re.escape(MEASURED)}\n.*?(?=\n## |\Z)", lambda _: section, text, flags=re.DOTALL)
    write_atomic(path, completed.encode())
    return path


def _front_matter(verifier: Verifier) -> str:
    lines = ["---", *([f"base_model: {verifier.name}"] if verifier.hub else [])]
    return "\n".join([*lines, "pipeline_tag: text-generation", "tags:", "- eagle3", "- speculative-decoding", "- draftproof", "---"])


def _facts(config: DraftConfig, verifier: Verifier) -> dict[str, Any]:
    options = [name for name in ("qk_norm", "norm_before_fc", "fc_norm", "norm_output") if getattr(config, name)]
    return {
        "base model": verifier.name,
        "base model architecture": verifier.architecture,
        "boundaries read (residual stream after that many blocks)": ", ".join(map(str, config.boundaries)),
        "hidden size": config.hidden_size,
        "heads, KV heads": f"{config.heads}, {config.kv_heads}",
        "MLP width": config.intermediate_size,
        "draft vocabulary": f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens",
        "options": ", ".join(options) or "none",
        "dtype": verifier.dtype,
    }


def _serving(engine: Literal["vllm", "sglang"], verifier: Verifier, draft_tokens: int) -> str:
    target = shlex.quote(verifier.name)
    if engine == "vllm":
        speculative = f'{{"model": ".", "method": "eagle3", "num_speculative_tokens": {draft_tokens}}}'
        command = f"vllm serve {target} --speculative-config '{speculative}'"
        name = "vLLM"
    else:
        command = (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path . --speculative-num-steps {draft_tokens} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {draft_tokens + 1}"
        )
        name = "SGLang"
    other = {"vllm": "SGLang reads another layout, exported as `sglang`.", "sglang": "vLLM reads another layout, exported as `vllm`."}[
        engine
    ]
    return f"With {name}, from inside this folder:\n\n```sh\n{command}\n```\n\n{other}"


def _measured(result: Mapping[str, Any]) -> str:
    by_position = ", ".join(f"{share:.3f}" for share in result["acceptance_by_position"])
    head = (
        f"Acceptance length **{result['acceptance_length']:.2f}** (1 + accepted tokens a cycle), K={result['draft_tokens']}, "
        f"{result['decoding']}, {result['prompts']} prompts, {result['engine']}. First i tokens all accepted, i = 1...: {by_position}."
    )
    if not (categories := result.get("by_category")):
        return head
    rows = {name: _category(value) for name, value in sorted(categories.items())}
    return f"{head}\n\n{_table(rows, ('category', 'acceptance length'))}"


def _category(value: Any) -> str:
    return f"{value['acceptance_length'] if isinstance(value, Mapping) else value:.2f}"


def _table(rows: Mapping[str, Any], head: tuple[str, str] = ("", "")) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join(lines + [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()])


def _cell(value: Any) -> str:
    text = (
        f"{value:.4g}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else str(value)
    )
    return text.replace("|", "\\|").replace("\n", " ")
