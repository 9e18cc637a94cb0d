"""`evaluate`: how many tokens a target pass yields with the draft, measured by really drafting and verifying.

result.json holds what is the same on every run (the document of `--json evaluate`); timing.json the speeds.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftproof.artifact import Manifest, hash_file, write_json
from draftproof.draft.files import load_draft
from draftproof.errors import UsageError
from draftproof.evaluate.decode import Decoded, Drafter, EagleDrafter, PromptLookup, TargetAlone, acceptance, decode
from draftproof.evaluate.prompts import BenchPrompt, read_prompts
from draftproof.evaluate.serve import ServedAcceptance, serve, vllm_version
from draftproof.recipe import EvaluateSettings
from draftproof.records.mapping import load_mapping
from draftproof.stage import Outcome, StageTask
from draftproof.target.loaded import load_model
from draftproof.target.target import Target
from draftproof.target.tokenizer import load_tokenizer, stop_ids
from draftproof.target.weights import embedding_name

VERSION, NEEDS = 1, ("prepare", "vocab", "train", "export")

DECODING = "greedy, chain"


def ingredients(settings: EvaluateSettings, target: Target, inputs: Mapping[str, Manifest]) -> dict[str, Any]:
    """What the figures depend on; the bench files by content."""
    return {
        "target": target.fingerprint,
        "draft": inputs["train"].contents["draft"],
        "mapping": inputs["vocab"].contents["mapping"],
        "export": inputs["export"].contents["tensors"],
        "prompts": _prompt_source(settings, inputs),
        "evaluate": settings.model_dump(mode="json", exclude={"bench", "serve", "serve_timeout_s", "batch_size"}),
        "serves": serves(settings),
    }


def serves(settings: EvaluateSettings) -> bool:
    """Whether this machine will serve: `auto` does where vLLM is installed."""
    return settings.serve == "vllm" or (settings.serve == "auto" and vllm_version() is not None)


def run(task: StageTask, settings: EvaluateSettings, target: Target) -> Outcome:
    """Decode every prompt with the target alone, with the draft, and with prompt lookup; then serve, if asked."""
    tokenizer = load_tokenizer(target)
    stops = frozenset(stop_ids(tokenizer, target))
    longest = target.config.max_positions - settings.max_tokens
    prompts = read_prompts(settings, task.inputs["prepare"], tokenizer, longest)
    task.checkpoint("loading", None)
    reference = _reference(task, settings, target, prompts, stops)
    served = _serve(task, settings, target, prompts, stops, reference) if serves(settings) else None
    result, timing = _result(settings, prompts, reference, served)
    write_json(task.out / "result.json", result)
    write_json(task.out / "timing.json", timing)
    return Outcome(counts=result, contents={"result": hash_file(task.out / "result.json")}, actual=timing)


@dataclass(frozen=True)
class _Reference:
    """What the reference decoder gave, three ways."""

    alone: Decoded
    drafted: Decoded
    looked_up: Decoded
    dtype: str
    """What target and draft computed in."""


def _reference(
    task: StageTask, settings: EvaluateSettings, target: Target, prompts: list[BenchPrompt], stops: frozenset[int]
) -> _Reference:
    """Decode every prompt with the target alone, with the draft, and with prompt lookup. Leaves nothing on the device."""
    model = load_model(target, task.device)
    task.checkpoint("loaded", None)
    dtype = next(model.parameters()).dtype
    weights = target.weights()
    embedding = weights.read(embedding_name(weights, target.config)).to(task.device, dtype)
    draft, _ = load_draft(task.inputs["train"])
    draft.to(getattr(torch, target.dtype)).to(embedding.device, dtype)  # rounded as it is exported, then computed like the target
    kept = torch.from_numpy(load_mapping(task.inputs["vocab"]).kept).to(task.device)
    eagle = EagleDrafter(draft, embedding=embedding, kept=kept)

    K = settings.draft_tokens
    with task.progress.meter("evaluate", 3 * len(prompts), "prompts") as meter:

        def answer(drafter: Drafter, draft_tokens: int) -> Decoded:
            return decode(
                model,
                drafter,
                [prompt.token_ids for prompt in prompts],
                draft_tokens=draft_tokens,
                max_tokens=settings.max_tokens,
                stop_ids=stops,
                batch_size=settings.batch_size,
                done=meter.advance,
            )

        return _Reference(answer(TargetAlone(), 0), answer(eagle, K), answer(PromptLookup(), K), str(dtype).removeprefix("torch."))


def _serve(
    task: StageTask, settings: EvaluateSettings, target: Target, prompts: list[BenchPrompt], stops: frozenset[int], reference: _Reference
) -> ServedAcceptance:
    """The same prompts through vLLM, after giving the device back."""
    folder = task.inputs["export"] / "vllm"
    if not folder.is_dir():
        raise UsageError(
            "evaluate.serve needs the vLLM folder, which this run did not export.",
            where="export.formats",
            remedy="Add vllm to export.formats, or set evaluate.serve=none.",
        )
    gc.collect()
    if task.device == "cuda":
        torch.cuda.empty_cache()
    task.checkpoint("loading", None)
    return serve(
        folder,
        target,
        [prompt.token_ids for prompt in prompts],
        draft_tokens=settings.draft_tokens,
        max_tokens=settings.max_tokens,
        stop_ids=sorted(stops),
        dtype=reference.dtype,
        timeout_s=settings.serve_timeout_s,
    )


def _result(
    settings: EvaluateSettings, prompts: list[BenchPrompt], reference: _Reference, served: ServedAcceptance | None
) -> tuple[dict[str, Any], dict[str, float]]:
    """result.json and timing.json."""
    K, alone, drafted, looked_up = settings.draft_tokens, reference.alone, reference.drafted, reference.looked_up
    length, by_position, cycles = acceptance(drafted.accepted, K)
    lookup_length, lookup_by_position, _ = acceptance(looked_up.accepted, K)
    same = sum(a == b for a, b in zip(alone.outputs, drafted.outputs, strict=True))
    result = {
        "acceptance_length": length,
        "acceptance_by_position": by_position,
        "by_category": _by_category(prompts, drafted, K),
        "draft_tokens": K,
        "decoding": DECODING,
        "temperature": 0.0,
        "engine": f"transformers reference, {reference.dtype}",
        "prompts": len(prompts),
        "max_tokens": settings.max_tokens,
        "tokens": drafted.tokens,
        "cycles": cycles,
        "identical_to_target": same / len(prompts),
        "baselines": {"prompt_lookup": {"acceptance_length": lookup_length, "acceptance_by_position": lookup_by_position}},
        "served": None if served is None else _served(served, alone),
    }
    timing = {
        "target_alone_tokens_per_second": alone.tokens / alone.seconds,
        "draft_tokens_per_second": drafted.tokens / drafted.seconds,
        "prompt_lookup_tokens_per_second": looked_up.tokens / looked_up.seconds,
    }
    return result, timing


def _by_category(prompts: list[BenchPrompt], decoded: Decoded, draft_tokens: int) -> dict[str, dict[str, Any]]:
    table = {}
    for category in sorted({prompt.category for prompt in prompts}):
        chosen = [index for index, prompt in enumerate(prompts) if prompt.category == category]
        length, by_position, _ = acceptance([decoded.accepted[index] for index in chosen], draft_tokens)
        tokens = sum(len(decoded.outputs[index]) for index in chosen)
        table[category] = {"acceptance_length": length, "by_position": by_position, "prompts": len(chosen), "tokens": tokens}
    return table


def _served(served: ServedAcceptance, alone: Decoded) -> dict[str, Any]:
    """What the engine reported, and how many of its answers are the target's own greedy text."""
    same = sum(a == b for a, b in zip(alone.outputs, served.outputs, strict=True))
    return {
        "engine": f"{served.engine} {served.version}",
        "acceptance_length": served.acceptance_length,
        "acceptance_by_position": served.by_position,
        "drafts": served.drafts,
        "accepted": served.accepted,
        "identical_to_target": same / len(alone.outputs),
    }


def _prompt_source(settings: EvaluateSettings, inputs: Mapping[str, Manifest]) -> Any:
    if not settings.bench:
        return inputs["prepare"].contents["rows"]
    missing = [path for path in settings.bench if not Path(path).is_file()]
    if missing:
        raise UsageError("There is no such bench file.", where=missing[0], remedy="Mend evaluate.bench.")
    return [[Path(path).name, hash_file(Path(path))] for path in settings.bench]
