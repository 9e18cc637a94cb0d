"""What a run will take, from shapes alone: tokens, bytes, memory, seconds, and how often the target is loaded.

    plan = make_plan(recipe, target, run_dir, flops=measure_flops("cpu"))
    plan.stages["extract"].bytes

Nothing is loaded. Before `prepare` has run, tokens are guessed from the size of the data; afterwards they are
those of its manifest. Seconds come from counted floating-point operations over the rate of a matrix product
measured here and now, so they are a forecast within a factor of two or so, and the report sets them beside
what was measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from draftproof.artifact import MANIFEST, read_manifest
from draftproof.recipe import Recipe
from draftproof.records.layout import StoreLayout, token_bytes
from draftproof.stage import StagePlan

if TYPE_CHECKING:
    from draftproof.target.config import TargetConfig
    from draftproof.target.target import Target

BYTES_PER_TOKEN_OF_TEXT = 4.0
"""English chat data in JSONL: measured 3.6 to 4.6 over common tokenizers."""
PREFILL_EFFICIENCY = 0.6
"""Share of the matrix-product rate that a transformers prefill reaches (measured on the demo: 0.5 to 0.7)."""
DECODE_EFFICIENCY = 0.25
"""The same for batched decoding, which waits for memory."""
LIBRARIES = 700 * 2**20
"""Resident bytes of Python with torch and transformers imported."""
TRAIN_EFFICIENCY = 0.5
"""The same for the training step."""


@dataclass(frozen=True)
class RunPlan:
    """The plan of every stage."""

    stages: Mapping[str, StagePlan]
    tokens: int
    """Tokens of all rows, prompts included."""
    supervised_tokens: int
    tokens_known: bool
    """True once `prepare` has counted them; before that they are guessed from the data's size."""
    target_loads: int
    """How often the target's weights are read into memory."""
    weight_bytes: int


def make_plan(recipe: Recipe, target: Target, run_dir: Path, *, flops: float | None, device: str = "cpu") -> RunPlan:
    """The plan of a run on `device`. `flops`: its floating-point operations a second; None leaves seconds open."""
    config = target.config
    weight_bytes = sum(path.stat().st_size for path in target.folder.glob("*.safetensors"))
    parameters = weight_bytes // (4 if config.dtype == "float32" else 2)
    embedding = config.vocab_size * config.hidden_size
    active = parameters - embedding * (1 if config.tied_head else 2)  # per token, without the head
    tokens, supervised, prompts, known = _count_tokens(recipe, run_dir)
    aux = len(recipe.extract.boundaries or (0, 0, 0))
    width = config.hidden_size
    layout = StoreLayout(tuple(range(1, aux + 1)), width, recipe.extract.codec, config.vocab_size)
    draft_size = recipe.vocab.at_most(config.vocab_size)
    draft = _draft_parameters(config, recipe, aux, draft_size)

    def seconds(operations: float, efficiency: float) -> float | None:
        return None if flops is None else operations / (flops * efficiency)

    prefill = seconds(2 * (active + embedding) * tokens, PREFILL_EFFICIENCY)
    asked = _count_bench(recipe, run_dir, prompts)
    answered = min(recipe.evaluate.prompts or asked, asked) * recipe.evaluate.max_tokens
    epochs = recipe.train.epochs if recipe.train.steps is None else recipe.train.steps * recipe.train.batch_tokens / max(tokens, 1)
    trained = epochs * supervised * (6 * draft * recipe.train.unroll + 2 * draft_size * width)
    working = LIBRARIES + (2 * weight_bytes if config.dtype != "float32" else weight_bytes)  # float32 on a CPU
    store = tokens * token_bytes(layout)
    answer = seconds(2 * (active + embedding) * tokens, DECODE_EFFICIENCY)
    judge = seconds(3 * 2 * (active + embedding) * answered, DECODE_EFFICIENCY)
    pass_over = _time_at_risk(f"a pass of the target over {tokens:,} tokens", prefill)
    training = f"{recipe.train.unroll} unrolled steps over {int(epochs * supervised):,} supervised tokens"
    folder = 2 * (draft + embedding)
    formats = len(recipe.export.formats)
    stages = {
        "regenerate": StagePlan(tokens * 16, 4, answer, working, f"answers to {prompts:,} prompts"),
        "prepare": StagePlan(tokens * 6, 6, tokens / 100_000, None, f"rows of {tokens:,} tokens"),
        "vocab": StagePlan(9 * config.vocab_size, 3, tokens / 5_000_000, None, "the draft vocabulary"),
        "extract": StagePlan(
            store, 3 + _shards(tokens, prompts, int(recipe.extract.shard_gb * 1e9 // token_bytes(layout))), prefill, working, pass_over
        ),
        "train": StagePlan(36 * draft, 6, seconds(trained, TRAIN_EFFICIENCY), LIBRARIES + 40 * draft, training),
        "export": StagePlan(2 * formats * folder, 8 * formats, None, 2 * folder, "the folders that engines load"),
        "evaluate": StagePlan(2**20, 4, judge, working, f"answers of {answered:,} tokens, three ways"),
    }
    if recipe.regenerate is None:
        del stages["regenerate"]
    if device == "cuda":
        stages.update(
            {name: replace(stages[name], gpu_memory=weight_bytes) for name in ("regenerate", "extract", "evaluate") if name in stages}
        )
    loads = 2 + (recipe.regenerate is not None) + (recipe.evaluate.serve != "none")
    return RunPlan(stages, tokens, supervised, known, loads, weight_bytes)


def measure_flops(device: str) -> float:
    """Floating-point operations a second of a matrix product here, now: float32 on a CPU, bf16 on a GPU."""
    if device == "cpu":
        a = np.random.default_rng(0).standard_normal((768, 768), dtype=np.float32)
        return max(_rate(lambda: a @ a, 2 * 768**3) for _ in range(3))
    import torch

    b = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def product() -> None:
        _ = b @ b
        torch.cuda.synchronize()

    product()
    return max(_rate(product, 2 * 4096**3) for _ in range(3))


def _rate(work: Callable[[], object], operations: float) -> float:
    started = time.perf_counter()
    work()
    return operations / (time.perf_counter() - started)


def _time_at_risk(what: str, seconds: float | None) -> str:
    if seconds is None:
        return what
    return f"{what}, about {seconds / 60:.0f} min" if seconds >= 90 else f"{what}, about {seconds:.0f} s"


def _draft_parameters(config: TargetConfig, recipe: Recipe, aux: int, draft_size: int) -> int:
    """Weights that a row passes through in one step: q, k, v, o, MLP, head; fc once."""
    h, heads = config.hidden_size, config.heads * config.head_dim
    attention = 2 * h * heads + 4 * h * config.kv_heads * config.head_dim + heads * h
    mlp = 3 * h * (recipe.draft.intermediate_size or config.intermediate_size)
    return attention + mlp + draft_size * h + aux * h * h


def _count_bench(recipe: Recipe, run_dir: Path, prompts: int) -> int:
    """Prompts that `evaluate` finds: lines of the bench files, or held-out rows."""
    if recipe.evaluate.bench:
        return _size_and_lines(recipe.evaluate.bench)[1]
    if (run_dir / "prepare" / MANIFEST).is_file():
        return int(read_manifest(run_dir / "prepare").counts["splits"]["validation"])
    validation = recipe.data.validation
    return _size_and_lines([validation])[1] if isinstance(validation, str) else max(1, round(validation * prompts))


def _shards(tokens: int, rows: int, room: int) -> int:
    """Shards of `room` tokens at most; rows are not cut, so each shard may lack nearly one of mean length."""
    mean = tokens / max(rows, 1)
    return 1 + int(tokens / max(room - mean, mean, 1))


def _count_tokens(recipe: Recipe, run_dir: Path) -> tuple[int, int, int, bool]:
    """Tokens, supervised tokens, prompts, and whether `prepare` has counted them."""
    if (run_dir / "prepare" / MANIFEST).is_file():
        counts = read_manifest(run_dir / "prepare").counts
        return int(counts["tokens"]), int(counts["supervised_tokens"]), int(counts["rows_out"]), True
    if recipe.regenerate is not None:
        size, prompts = _size_and_lines([recipe.regenerate.prompts])
        answers = prompts * recipe.regenerate.max_tokens
        return int(size / BYTES_PER_TOKEN_OF_TEXT) + answers, answers, prompts, False
    size, lines = _size_and_lines(recipe.data.train)
    tokens = int(size / BYTES_PER_TOKEN_OF_TEXT)
    return tokens, int(tokens * 0.7), lines, False


def _size_and_lines(paths: tuple[str, ...] | list[str]) -> tuple[int, int]:
    size = lines = 0
    for path in map(Path, paths):
        if path.is_file():
            size += path.stat().st_size
            with path.open("rb") as stream:
                lines += sum(block.count(b"\n") for block in iter(lambda: stream.read(1 << 20), b""))
    return size, lines
