"""`train`: from stored states to a draft, chosen by held-out acceptance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from draftproof.artifact import Manifest, hash_bytes
from draftproof.draft.eagle3 import Eagle3Draft, draft_config
from draftproof.draft.files import save_draft
from draftproof.draft.loss import Teacher
from draftproof.draft.start import start_draft
from draftproof.errors import DataError
from draftproof.recipe import DraftSettings, TrainSettings
from draftproof.records.mapping import load_mapping
from draftproof.records.rows import read_rows
from draftproof.records.store import Store
from draftproof.stage import Outcome, StageTask
from draftproof.target.head import TargetHead
from draftproof.target.target import Target
from draftproof.target.weights import embedding_name
from draftproof.train.batches import BatchPlan, assemble, pack, trainable_rows
from draftproof.train.checkpoint import NAME as CHECKPOINT
from draftproof.train.forecast import forecast
from draftproof.train.loop import train

VERSION, NEEDS = 1, ("prepare", "vocab", "extract")


def ingredients(
    settings: TrainSettings, target: Target, inputs: Mapping[str, Manifest], *, draft: DraftSettings, draft_tokens: int
) -> dict[str, Any]:
    """What the weights depend on. `checkpoints` changes only how often we save, so it is left out."""
    return {
        "rows": inputs["prepare"].contents["rows"],
        "mapping": inputs["vocab"].contents["mapping"],
        "states": inputs["extract"].contents["states"],
        "target": target.fingerprint,
        "train": settings.model_dump(mode="json", exclude={"checkpoints"}),
        "draft": draft.model_dump(mode="json"),
        "draft_tokens": draft_tokens,
    }


def run(task: StageTask, settings: TrainSettings, target: Target, *, draft: DraftSettings, draft_tokens: int) -> Outcome:
    """Train; the best weights by held-out acceptance at K = `draft_tokens` (at most `unroll`) become
    `draft.safetensors`. Raises DataError when no row can draft."""
    rows = read_rows(task.inputs["prepare"])
    mapping = load_mapping(task.inputs["vocab"])
    store = Store(task.inputs["extract"])
    chosen, held_out = trainable_rows(rows, "train"), trainable_rows(rows, "validation")
    for split, indices in (("train", chosen), ("validation", held_out)):
        if not len(indices):
            raise DataError(
                f"No {split} row has two supervised tokens in a row, so no draft can start in it.",
                where=str(task.inputs["prepare"]),
                remedy="Look at prepare/report.json; raise data.validation if there are too few.",
            )

    task.checkpoint("loading", None)
    config = draft_config(target.config, draft, boundaries=store.layout.boundaries, draft_vocab_size=len(mapping.kept))
    weights = target.weights()
    compute = torch.float32 if task.device == "cpu" else torch.bfloat16
    embedding = weights.read(embedding_name(weights, target.config)).to(task.device, compute)
    head = TargetHead.from_weights(weights, target.config, compute, task.device, rows=mapping.kept)
    model = Eagle3Draft(config)
    started_from = start_draft(model, start=draft.start, seed=task.seed, head=head.weight.float().cpu(), target=target)
    model.lm_head.weight.requires_grad_(settings.head == "trainable")
    model.to(task.device)
    task.checkpoint("loaded", None)

    plan = BatchPlan(chosen, rows.lengths, batch_tokens=settings.batch_tokens, seed=task.seed)
    total = settings.steps or plan.steps(settings.epochs)
    teacher = Teacher(head, mapping.kept)
    K = min(draft_tokens, settings.unroll)
    held_out_batches = pack(held_out, rows.lengths, settings.batch_tokens)
    with task.progress.meter("train", total, "steps") as meter:
        trained = train(
            model,
            batch=lambda step: assemble(rows, store, plan.step(step), unroll=settings.unroll),
            total=total,
            settings=settings,
            embedding=embedding,
            teacher=teacher,
            measure=lambda: forecast(
                model,
                (assemble(rows, store, indices, unroll=K).to(task.device) for indices in held_out_batches),
                embedding,
                teacher,
                K,
            ),
            out=task.out,
            device=task.device,
            meter=meter,
        )
    save_draft(task.out, config, trained.best)
    (task.out / CHECKPOINT).unlink(missing_ok=True)  # the moments of a finished training are of no use to anybody
    position = trained.position
    return Outcome(
        counts={
            "steps": position.step,
            "best_step": position.best_step,
            "tokens_per_second": trained.tokens_per_second,
            "supervised_seen": position.supervised_seen,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "acceptance_length": position.best_length,
            "draft_tokens": K,
            "selected_by": position.selected_by,
            "unroll": settings.unroll,
            "started_from": started_from,
        },
        contents={"draft": _hash_weights(trained.best)},
        actual={} if trained.tokens_per_second is None else {"tokens_per_second": trained.tokens_per_second},
    )


def _hash_weights(tensors: dict[str, torch.Tensor]) -> str:
    parts: list[bytes] = []
    for name, tensor in sorted(tensors.items()):
        parts += [name.encode(), np.ascontiguousarray(tensor.float().numpy()).tobytes()]
    return hash_bytes(*parts)
