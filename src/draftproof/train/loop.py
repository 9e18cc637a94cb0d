"""The training loop: from a batch plan to the best weights, resumable at every checkpoint, exact on a CPU."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.artifact import write_atomic
from draftproof.draft.eagle3 import Eagle3Draft
from draftproof.draft.loss import Teacher
from draftproof.errors import DraftproofError
from draftproof.progress import Meter
from draftproof.recipe import TrainSettings
from draftproof.train.batches import Batch, losses
from draftproof.train.checkpoint import Position, load_checkpoint, save_checkpoint
from draftproof.train.forecast import Acceptance, Forecast
from draftproof.train.optimizer import clip_gradients, learning_rate, make_optimizer

METRICS = "metrics.jsonl"


class NonFinite(DraftproofError):
    """Loss or gradient is not a number; the optimizer step was not taken."""


@dataclass(frozen=True)
class Trained:
    """What the loop ends with."""

    position: Position
    best: dict[str, Tensor]
    tokens_per_second: float | None
    """Packed tokens a second of this session, the loader and forecasts included; None when nothing was left to do."""


def train(
    draft: Eagle3Draft,
    *,
    batch: Callable[[int], Batch],
    total: int,
    settings: TrainSettings,
    embedding: Tensor,
    teacher: Teacher,
    measure: Callable[[], Forecast],
    out: Path,
    device: str,
    meter: Meter,
) -> Trained:
    """Train `draft` in place for `total` steps.

    `batch(step)` gives the packed batch of a step; `measure()` the held-out forecast. Writes metrics.jsonl and
    the resumable checkpoint into `out`, and goes on from the latter when it is there. Raises NonFinite with the
    batch's row keys before the optimizer could spread it.
    """
    parameters = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(parameters, settings)
    position, best = load_checkpoint(out, draft, optimizer) or (Position(0, 0, 0, 0.0), {})
    metrics = _Metrics(out / METRICS, keep_until=position.step)
    meter.resume(position.step)
    save_at, measure_at = _marks(total, settings.checkpoints), _marks(total, settings.evaluations)
    started, tokens = time.monotonic(), 0

    for step, packed in _ahead(batch, position.step, total):
        rate = learning_rate(step, total, settings)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        with autocast(device, settings):
            results = losses(draft, packed.to(device), embedding, teacher)
        loss = torch.stack([settings.decay**k * result.loss_sum / len(result.starts) for k, result in enumerate(results)]).sum()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own stub
        value, norm = loss.item(), clip_gradients(parameters, settings.clip).item()
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise NonFinite(
                f"Loss {value} and gradient norm {norm} at step {step}; the step was not taken.",
                where="rows " + ", ".join(key[:12] for key in packed.row_keys),
                remedy="Look at these rows in prepare/rows, or lower train.learning_rate; running again goes on before this step.",
            )
        optimizer.step()
        tokens += len(packed.token_ids)
        position = replace(position, step=step + 1, supervised_seen=position.supervised_seen + packed.plan.counted(0))
        metrics.write(
            kind="step",
            step=step + 1,
            loss=value,
            loss_by_step=[result.loss_sum.item() / len(result.starts) for result in results],
            accuracy_by_step=[float(result.hits.float().mean()) for result in results],
            learning_rate=rate,
            gradient_norm=norm,
            supervised_seen=position.supervised_seen,
            tokens_per_second=tokens / (time.monotonic() - started),
        )
        if step + 1 in measure_at:
            last = measure()
            metrics.write(
                kind="forecast", step=step + 1, by_walk=_shown(last.by_walk), by_start=_shown(last.by_start), loss_by_step=last.loss_by_step
            )
            chosen, selected_by = (last.by_walk, "walk") if last.by_walk.cycles else (last.by_start, "start")
            if chosen.length > position.best_length or not best:
                position = Position(position.step, position.supervised_seen, step + 1, chosen.length, selected_by)
                best = {name: value.detach().cpu().clone() for name, value in draft.state_dict().items()}
        if step + 1 in save_at:
            metrics.flush()
            save_checkpoint(out, position, draft, optimizer, best)
        meter.advance(1, note=f"loss {value:.3f}  length {position.best_length:.2f}")
    metrics.flush()
    return Trained(position, best, tokens / (time.monotonic() - started) if tokens else None)


def autocast(device: str, settings: TrainSettings) -> contextlib.AbstractContextManager[Any]:
    """bf16 compute over float32 masters where the recipe (or the device, with `auto`) says so."""
    bf16 = settings.precision == "bf16" or (settings.precision == "auto" and device == "cuda")
    return torch.autocast(device, dtype=torch.bfloat16) if bf16 else contextlib.nullcontext()


def _marks(total: int, count: int) -> set[int]:
    """`count` step numbers, evenly spread, the last one always among them."""
    return {max(1, round(total * (i + 1) / count)) for i in range(count)}


def _ahead(batch: Callable[[int], Batch], first: int, total: int) -> Iterator[tuple[int, Batch]]:
    """The batches from `first` on; the next one is read while this one is trained."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as pool:
        coming = pool.submit(batch, first) if first < total else None
        for step in range(first, total):
            assert coming is not None
            ready = coming.result()
            coming = pool.submit(batch, step + 1) if step + 1 < total else None
            yield step, ready


def _shown(acceptance: Acceptance) -> dict[str, Any]:
    return {"acceptance_length": acceptance.length, **asdict(acceptance)}


class _Metrics:
    """JSON lines; on resume, lines after the checkpoint are dropped, since those steps are taken again."""

    def __init__(self, path: Path, *, keep_until: int) -> None:
        kept = []
        if path.exists():
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # the torn last line of a killed run
                    if json.loads(line)["step"] <= keep_until:
                        kept.append(line + "\n")
        write_atomic(path, "".join(kept).encode())
        self._path, self._lines = path, list[str]()

    def write(self, **values: Any) -> None:
        self._lines.append(json.dumps(values) + "\n")
        if values["kind"] != "step" or len(self._lines) >= 20:
            self.flush()

    def flush(self) -> None:
        with self._path.open("a") as stream:
            stream.writelines(self._lines)
        self._lines.clear()
