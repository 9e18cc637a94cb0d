"""`export`: the trained draft as folders that engines serve, each proven before it is reported.

For every format: write from the float32 masters, rounded once; read the file back bit by bit; load it as the engine
would; and compare two chained steps with the trained draft. A folder that does not pass is not reported.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from draftproof.artifact import Manifest, hash_bytes, read_manifest, write_json
from draftproof.draft.eagle3 import DraftConfig, Eagle3Draft
from draftproof.draft.engines import unsupported
from draftproof.draft.files import load_draft
from draftproof.errors import DataError, UsageError
from draftproof.export.card import CARD, write_card
from draftproof.export.files import EMBEDDING, ReadBack, round_once, target_embedding
from draftproof.export.loaders import load_sglang, load_vllm
from draftproof.export.proof import prove
from draftproof.export.schema import Verifier, describe
from draftproof.export.sglang import from_sglang, to_sglang
from draftproof.export.vllm import from_vllm, to_vllm
from draftproof.recipe import ExportSettings
from draftproof.records.mapping import VocabMapping, load_mapping
from draftproof.stage import Outcome, StageTask
from draftproof.target.target import Target

VERSION, NEEDS = 1, ("vocab", "train")

HASHES = "tensors.json"
"""format -> tensor -> hash of what was written."""


def ingredients(settings: ExportSettings, target: Target, inputs: Mapping[str, Manifest], *, draft_tokens: int) -> dict[str, Any]:
    """What the folders depend on. The target's name is among it, since the vLLM folder points to it."""
    return {
        "formats": sorted(settings.formats),
        "draft_tokens": draft_tokens,
        "target": target.fingerprint,
        "target_name": describe(target).name,
        "dtype": target.dtype,
        "vocab": inputs["vocab"].contents,
        "train": inputs["train"].contents,
    }


def run(task: StageTask, settings: ExportSettings, target: Target, *, draft_tokens: int) -> Outcome:
    """Write and prove a folder per format. `draft_tokens` is K of `evaluate`, which the vLLM folder proposes as default.

    Raises UsageError before anything is written when an engine could not serve this draft, DataError when a folder
    is not the trained draft.
    """
    mapping = load_mapping(task.inputs["vocab"])
    draft, config = load_draft(task.inputs["train"])
    verifier = describe(target)
    _check(config, mapping, settings, verifier)
    embedding = target_embedding(target)
    masters = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    rounded = round_once(masters, verifier.dtype)
    _set(draft, rounded)
    training = read_manifest(task.inputs["train"]).counts
    hashes: dict[str, dict[str, str]] = {}
    proofs: dict[str, float] = {}
    with task.progress.meter("export", total=len(settings.formats), unit="folders") as meter:
        for form in sorted(settings.formats):
            folder = task.out / form
            if folder.exists():
                shutil.rmtree(folder)  # of an earlier, unfinished try
            if form == "vllm":
                hashes[form] = to_vllm(folder, masters, config, mapping, target, draft_tokens=draft_tokens)
                _check_bits(folder, from_vllm(folder), rounded, config, mapping, embedding)
                loaded = load_vllm(folder, verifier, embedding)
            else:
                hashes[form] = to_sglang(folder, masters, config, mapping, target)
                _check_bits(folder, from_sglang(folder), rounded, config, mapping, None)
                loaded = load_sglang(folder, verifier, embedding)
            proofs[form] = prove(loaded, draft, mapping, embedding, layers=verifier.layers, seed=task.seed)
            summary = {name: value for name, value in training.items() if isinstance(value, int | float | str)}
            write_card(folder, form, config, verifier, draft_tokens=draft_tokens, training=summary)
            meter.advance(1)
    write_json(task.out / HASHES, hashes)
    files = [path for form in settings.formats for path in (task.out / form).iterdir() if path.name != CARD]
    return Outcome(
        counts={
            "formats": sorted(settings.formats),
            "tensors": sum(len(of_form) for of_form in hashes.values()),
            "bytes": sum(path.stat().st_size for path in files),
            "dtype": verifier.dtype,
            "largest_difference": proofs,
        },
        contents={"tensors": _hash_all(hashes)},
        documents=tuple(f"{form}/{CARD}" for form in sorted(settings.formats)),
    )


def _check(config: DraftConfig, mapping: VocabMapping, settings: ExportSettings, verifier: Verifier) -> None:
    """Nothing is written when it could not be served."""
    if (config.draft_vocab_size, config.vocab_size) != (mapping.d2t.size, mapping.t2d.size):
        raise DataError(
            f"The draft proposes {config.draft_vocab_size} of {config.vocab_size} tokens, "
            f"the draft vocabulary has {mapping.d2t.size} of {mapping.t2d.size}.",
            where="train, vocab",
            remedy="Train again with --from train.",
        )
    for form in sorted(settings.formats):
        if reason := unsupported(config, verifier.architecture, form):
            others: list[Literal["vllm", "sglang"]] = [
                other for other in settings.formats if not unsupported(config, verifier.architecture, other)
            ]
            raise UsageError(f"{reason}.", where="export.formats", remedy=f"Set export.formats to [{', '.join(others)}].")


def _check_bits(
    folder: Path, back: ReadBack, rounded: Mapping[str, Tensor], config: DraftConfig, mapping: VocabMapping, embedding: Tensor | None
) -> None:
    """The way back must give what went in: every weight rounded once, no more, no less, and the target's own embedding."""
    wrong = sorted(set(rounded) ^ set(back.tensors))
    wrong += [name for name, tensor in rounded.items() if name in back.tensors and not _same(tensor, back.tensors[name])]
    if (embedding is None) != (back.embedding is None) or (embedding is not None and not _same(embedding, back.embedding)):
        wrong.append(EMBEDDING)
    if not (mapping.d2t == back.mapping.d2t).all() or back.config.boundaries != config.boundaries:
        wrong.append("d2t or the layer ids")
    if wrong:
        raise DataError(
            f"The written folder differs from the trained draft in {', '.join(wrong)}.", where=str(folder), remedy="Export again."
        )


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.dtype == other.dtype and torch.equal(one, other)


@torch.no_grad()
def _set(draft: Eagle3Draft, weights: Mapping[str, Tensor]) -> None:
    for name, parameter in draft.named_parameters():
        parameter.copy_(weights[name])


def _hash_all(hashes: Mapping[str, Mapping[str, str]]) -> str:
    lines = [f"{form}/{name} {value}" for form, of_form in sorted(hashes.items()) for name, value in sorted(of_form.items())]
    return hash_bytes(*(line.encode() for line in lines))
