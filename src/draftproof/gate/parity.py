"""Are the states that the engine gives the target's states? Judged on the canary rows, before the bulk.

Four checks of a CanaryEvidence: rows are whole, the final state gives back the engine's own log-probabilities, a row
alone has the states that it has among others, and every boundary is the boundary that its number says. A check that
fails tries the faults that users reported (norm missing or doubled, ids off by one, mates swapped) and names the one
that fits.

Limits come from measured clean runs, with a margin of about six (SmolLM2-135M and a tiny random target): errors of
log-probabilities in units of the logits' standard deviation were at most 0.008 in float32 (from storing the final
state in bf16) and 0.024 in bf16, on average 0.0011 and 0.009; the nearest fault was at 0.3 on average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from draftproof.gate.finding import Finding, failed, passed, unsure, warned
from draftproof.gate.gate import GateContext
from draftproof.stage import CanaryEvidence, CanaryRow

if TYPE_CHECKING:
    import torch

    from draftproof.target.config import TargetConfig
    from draftproof.target.head import TargetHead
    from draftproof.target.target import Target

Array = np.ndarray[Any, Any]

AGREEMENT = 0.99
"""Least share of tokens whose most likely successor is the engine's, near-ties counted as equal."""
MOST_POSITIONS = 1024
"""Positions whose logits are recomputed: enough for 1 %, and at most a few seconds of a CPU."""
COSINE_MEDIAN, COSINE_LOW = 0.999, 0.98
"""Of a boundary against its reference: median and 1 % quantile over tokens. bf16 engines differ among themselves to 0.985
on their worst token; neighbouring boundaries of SmolLM2 are at 0.85 to 0.97."""
BATCHING = 0.999
_LOGITS_AT_ONCE = 1 << 26
_NO_EVIDENCE = "Report this as a fault of draftproof."


@dataclass(frozen=True)
class _Limits:
    """For log-probabilities, in standard deviations of the logits."""

    largest: float
    mean: float
    tie: float
    """Two logits closer than this are equal for the top-1."""


_LIMITS = {"float32": _Limits(0.05, 0.01, 0.02), "bfloat16": _Limits(0.25, 0.05, 0.05), "float16": _Limits(0.05, 0.01, 0.02)}


def parity_rows(context: GateContext) -> Finding:
    """Every row has as many states as tokens, finite, not zero, of plausible size, not copies of each other."""
    name, evidence = "parity.rows", _evidence(context)
    if evidence is None:
        return _missing(name)
    for row in evidence.rows:
        if problem := _row_problem(row, evidence.boundaries):
            return failed(
                name, f"Row {row.row_key}: {problem}", "Do not extract with this engine as it is set; prefix caching must be off."
            )
    tokens = sum(len(row.token_ids) for row in evidence.rows)
    return passed(name, f"{len(evidence.rows)} rows, {tokens:,} tokens: one state a token, finite, none zero or repeated.")


def parity_logprobs(context: GateContext) -> Finding:
    """The stored final state, through final norm and LM head read from the files, gives the engine's log-probabilities."""
    name, evidence, target = "parity.logprobs", _evidence(context), context.target
    if evidence is None or target is None or all(len(row.token_ids) < 2 for row in evidence.rows):
        return _missing(name)
    if problem := _misshapen(evidence):
        return unsure(name, problem, "See parity.rows.")
    import torch

    from draftproof.target.head import TargetHead

    device = "cuda" if context.recipe.run.device != "cpu" and torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if device == "cpu" else getattr(torch, evidence.dtype)
    head = TargetHead.from_weights(target.weights(), target.config, dtype, device)
    sample = _Sample.of(evidence)
    limits = _LIMITS[evidence.dtype]
    found = _judge(head.logits, sample, limits)
    if found.fits(limits):
        return passed(name, f"{found} over {len(sample.final)} tokens.")

    config = replace(target.config, norm_convention="weight" if target.config.norm_convention == "one_plus_weight" else "one_plus_weight")
    norm = head.norm.float() + (1.0 if target.config.norm_convention == "one_plus_weight" else 0.0)
    bare = TargetHead(torch.ones_like(head.norm), head.weight, replace(target.config, norm_convention="weight"))
    others: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "the stored state is already after the final norm": lambda x: _head_alone(head, x, target.config),
        # RMSNorm forgets scale: dividing by its weight undoes it up to that.
        "the final norm was applied twice to the stored state": lambda x: head.logits(x.to(device).float() / norm.square()),
        "the engine applies the final norm twice": lambda x: head.logits(head.normed(x)),
        f"the engine's final norm is of the other kind ({config.norm_convention})": TargetHead(head.norm, head.weight, config).logits,
        "the engine's final norm has no weight": bare.logits,
    }
    fitting = [sentence for sentence, logits in others.items() if _judge(logits, sample, limits).fits(limits)]
    which = f"This fits: {fitting[0]}." if fitting else f"None of these fits either: {'; '.join(others)}."
    return failed(name, f"{found}. {which}", "The final boundary is the state before the final norm, which the head applies exactly once.")


def parity_batching(context: GateContext) -> Finding:
    """A row run alone has the states that it had among others, by what the engine gave: the codec has no part in it."""
    name, evidence = "parity.batching", _evidence(context)
    if evidence is None:
        return _missing(name)
    if problem := _misshapen(evidence):
        return unsure(name, problem, "See parity.rows.")
    cosines = {row.row_key: _cosine(row.batched_aux, row.rerun_aux) for row in evidence.rows}  # [T, A] each
    for row in evidence.rows:
        own = cosines[row.row_key]
        if not _same_run(own, evidence.dtype):
            twins = [o for o in evidence.rows if o is not row and o.aux.shape == row.aux.shape]
            owner = next((o.row_key for o in twins if _same_run(_cosine(row.batched_aux, o.rerun_aux), evidence.dtype)), None)
            token = int(np.argmin(own.min(1)))
            whose = f"; they are the states of row {owner}" if owner else ""
            return failed(
                name,
                f"Row {row.row_key} has other states in a batch than alone: cosine {own.min():.4f} at token {token}{whose}.",
                "The engine mixes rows up: do not extract with it.",
            )
    worst = min(float(own.min()) for own in cosines.values())
    if len(evidence.rows) == 1:
        return warned(name, "There is one row only, which has no batch mates.", "Give more rows.")
    equal = len({len(row.token_ids) for row in evidence.rows}) < len(evidence.rows)
    return passed(
        name, f"{len(evidence.rows)} rows together and singly: cosine at least {worst:.5f}{', equal lengths among them' if equal else ''}."
    )


def parity_boundaries(context: GateContext) -> Finding:
    """Every stored boundary is that boundary of the reference, and nearer to it than to any other."""
    name, evidence = "parity.boundaries", _evidence(context)
    if evidence is None:
        return _missing(name)
    if problem := _misshapen(evidence):
        return unsure(name, problem, "See parity.rows.")
    rows = [row for row in evidence.rows if row.reference is not None]
    if not rows:
        return warned(
            name, "The target is too large for reference states of every boundary.", "The log-probabilities prove the final state only."
        )
    reference = np.concatenate([row.reference for row in rows if row.reference is not None])  # [N, L+1, H]
    layers = reference.shape[1] - 1
    candidates = {f"boundary {k}": reference[:, k] for k in range(layers + 1)}
    if context.target is not None:
        candidates["boundary L after the final norm"] = _normed(reference[:, layers], context.target)
    slices = {f"boundary {k}": np.concatenate([row.aux[:, i] for row in rows]) for i, k in enumerate(evidence.boundaries)}
    slices[f"boundary {layers}"] = np.concatenate([row.final for row in rows])
    wrong: list[str] = []
    shifts: set[int] = set()
    worst = (1.0, 1.0)
    for wanted, states in slices.items():
        if wanted not in candidates:
            wrong.append(f"the target has no {wanted}")
            continue
        distance = {other: float(np.median(_distance(states, found))) for other, found in candidates.items()}
        nearest = min(distance, key=distance.__getitem__)
        quantiles = _quantiles(states, candidates[wanted])
        # A neighbour can be near, too: the wanted one must be as near as any, give or take rounding.
        if _fits(quantiles) and distance[wanted] <= 1.5 * distance[nearest] + 1e-6:
            worst = min(worst, quantiles)
            continue
        own = f"what is stored as {wanted} has cosine {quantiles[0]:.4f} (1 %: {quantiles[1]:.4f}) to it"
        best = _quantiles(states, candidates[nearest])
        if _fits(best):
            shift = int(nearest.split()[1]) - int(wanted.split()[1]) if nearest.split()[1].isdigit() else None
            shifts |= {shift} if shift is not None else set()
            wrong.append(f"{own} and matches {nearest}{f' (shift {shift:+d})' if shift is not None else ''}")
        else:
            wrong.append(f"{own} and matches none; nearest is {nearest} with {best[0]:.4f}")
    if not wrong:
        return passed(
            name,
            f"Boundaries {', '.join(s.split()[1] for s in slices)}: cosine {worst[0]:.5f} (1 %: {worst[1]:.5f}) or more to the reference.",
        )
    same = f" All are shifted by {next(iter(shifts)):+d}." if len(shifts) == 1 and len(wrong) >= len(evidence.boundaries) > 1 else ""
    return failed(
        name,
        f"{'; '.join(wrong)}.{same}",
        "Boundary k is the state after k blocks; engines that number layer outputs call it k-1.",
    )


def _row_problem(row: CanaryRow, boundaries: Sequence[int]) -> str | None:
    T, A = len(row.token_ids), len(boundaries)
    for label, states in (("aux", row.aux), ("a second run's aux", row.rerun_aux), ("final", row.final)):
        wanted = (T, A) if states.ndim == 3 else (T,)
        if states.shape[:-1] != wanted:
            return f"{label} has states {list(states.shape[:-1])} for {T} tokens and {A} boundaries, not {list(wanted)}."
    named = [*((f"boundary {k}", row.aux[:, i]) for i, k in enumerate(boundaries)), ("the final state", row.final)]
    # A run of one token from the start has the same states throughout, whatever the positions.
    run = np.logical_and.accumulate(row.token_ids == row.token_ids[0])
    for label, states in named:
        size = np.sqrt(np.mean(np.square(states, dtype=np.float64), axis=-1))  # [T]
        if not np.isfinite(size).all():
            return f"{label} is not finite at token {int(np.argmin(np.isfinite(size)))}."
        if (size == 0).any():
            return f"{label} is all zero at token {int(np.argmax(size == 0))} ({int((size == 0).sum())} of {T} tokens are)."
        if size.min() < 1e-6 or size.max() > 1e6:
            return f"{label} has an implausible size: root mean square {size.min():.1e} to {size.max():.1e}."
        repeated = (states[1:] == states[:-1]).all(-1) & ~run[1:]
        if repeated.any():
            return f"{label} is the same at tokens {int(np.argmax(repeated))} and {int(np.argmax(repeated)) + 1}."
    for first in range(len(named)):
        for second in range(first + 1, len(named)):
            if np.array_equal(named[first][1], named[second][1]):
                return f"{named[first][0]} and {named[second][0]} are the same."
    return None


@dataclass(frozen=True)
class _Sample:
    """Positions spread over all canary rows, each row's first and last included."""

    final: Array
    """float32 [N, H]"""
    following: Array
    """int64 [N]: token t+1"""
    logprobs: Array
    """float32 [N], of the engine"""
    top1: Array
    """int64 [N], of the engine"""

    @classmethod
    def of(cls, evidence: CanaryEvidence) -> _Sample:
        each = max(2, MOST_POSITIONS // len(evidence.rows))
        rows = [row for row in evidence.rows if len(row.token_ids) > 1]
        places = [np.unique(np.linspace(0, len(row.token_ids) - 2, each, dtype=np.int64)) for row in rows]
        pairs = list(zip(rows, places, strict=True))
        return cls(
            np.concatenate([row.final[at] for row, at in pairs]),
            np.concatenate([row.token_ids[at + 1] for row, at in pairs]).astype(np.int64),
            np.concatenate([row.engine_logprobs[at] for row, at in pairs]),
            np.concatenate([row.engine_top1[at] for row, at in pairs]),
        )


@dataclass(frozen=True)
class _Judged:
    """How recomputed log-probabilities compare with the engine's; errors in standard deviations of the logits."""

    agreement: float
    mean: float
    largest: float
    nats: float

    def fits(self, limits: _Limits) -> bool:
        return self.agreement >= AGREEMENT and self.largest <= limits.largest and self.mean <= limits.mean

    def __str__(self) -> str:
        off = f"log-probabilities off by at most {self.nats:.4f} ({self.largest:.4f} of the logits' deviation)"
        return f"Top-1 agreement {self.agreement:.4f}, {off}"


def _judge(logits_of: Callable[[torch.Tensor], torch.Tensor], sample: _Sample, limits: _Limits) -> _Judged:
    import torch

    errors, gaps, variances = [], [], []
    start, step = 0, 64
    while start < len(sample.final):
        part = slice(start, start + step)
        logits = logits_of(torch.from_numpy(sample.final[part])).cpu()  # [n, V]
        scores = logits - logits.logsumexp(-1, keepdim=True)
        chosen = scores.gather(-1, torch.from_numpy(sample.following[part])[:, None])[:, 0]
        best = logits.gather(-1, torch.from_numpy(sample.top1[part])[:, None])[:, 0]
        errors.append((chosen.numpy() - sample.logprobs[part]).astype(np.float64))
        gaps.append((logits.max(-1).values - best).numpy())
        variances.append(logits.var(-1).numpy())
        start, step = start + step, max(1, min(1024, _LOGITS_AT_ONCE // logits.shape[-1]))
    deviation = float(np.sqrt(np.mean(np.concatenate(variances)))) or 1.0
    error = np.abs(np.concatenate(errors))
    agreement = float(np.mean(np.concatenate(gaps) <= limits.tie * deviation))
    if not np.isfinite(error).all():
        return _Judged(agreement, np.inf, np.inf, np.inf)
    return _Judged(agreement, float(error.mean()) / deviation, float(error.max()) / deviation, float(error.max()))


def _head_alone(head: TargetHead, final: torch.Tensor, config: TargetConfig) -> torch.Tensor:
    """float32 [N, V]: the LM head without the norm before it."""
    import torch

    logits = torch.nn.functional.linear(final.to(head.weight.device, head.weight.dtype), head.weight).float() * config.logit_scale
    return logits if config.logit_softcap is None else config.logit_softcap * torch.tanh(logits / config.logit_softcap)


def _normed(final: Array, target: Target) -> Array:
    """float32 [N, H] after the final norm; only the norm's own weights are read."""
    import torch

    from draftproof.target.head import TargetHead

    head = TargetHead.from_weights(target.weights(), target.config, torch.float32, "cpu", rows=np.zeros(1, np.int64))
    normed: Array = head.normed(torch.from_numpy(final)).numpy()
    return normed


def _same_run(cosine: Array, dtype: str) -> bool:
    """Float32 must agree at every token; in half precision a batch changes the order of sums, so 1 % may be a little lower."""
    if dtype == "float32":
        return bool(cosine.min() > BATCHING)
    return bool(np.quantile(cosine, 0.01) > BATCHING and cosine.min() > COSINE_LOW)


def _cosine(a: Array, b: Array) -> Array:
    """Over the last axis, in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    size = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    cosine: Array = (a * b).sum(-1) / np.maximum(size, 1e-300)
    return cosine


def _distance(states: Array, reference: Array) -> Array:
    """[N]: length of the difference over the length of the reference."""
    distance: Array = np.linalg.norm(states - reference, axis=-1) / np.maximum(np.linalg.norm(reference, axis=-1), 1e-30)
    return distance


def _quantiles(states: Array, reference: Array) -> tuple[float, float]:
    """Median and 1 % quantile of the cosine over tokens."""
    cosine = _cosine(states, reference)
    return float(np.median(cosine)), float(np.quantile(cosine, 0.01))


def _fits(quantiles: tuple[float, float]) -> bool:
    return quantiles[0] >= COSINE_MEDIAN and quantiles[1] >= COSINE_LOW


def _misshapen(evidence: CanaryEvidence) -> str | None:
    """Comparisons token by token need one state a token; parity.rows reports the rest."""
    for row in evidence.rows:
        T, A = len(row.token_ids), len(evidence.boundaries)
        if row.aux.shape[:2] != (T, A) or {row.batched_aux.shape, row.rerun_aux.shape} != {row.aux.shape} or len(row.final) != T:
            return f"Row {row.row_key} has another number of states than tokens, so they cannot be compared."
    return None


def _evidence(context: GateContext) -> CanaryEvidence | None:
    found = context.evidence
    return found if isinstance(found, CanaryEvidence) and found.rows else None


def _missing(name: str) -> Finding:
    return unsure(name, "There are no canary rows to judge.", _NO_EVIDENCE)
