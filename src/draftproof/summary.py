"""What a run and a plan look like on a terminal."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from draftproof.gate.gate import GateReport
    from draftproof.pipeline import RunDone, StageDone
    from draftproof.plan import RunPlan

COLOURS = {"pass": "green", "warn": "yellow", "fail": "red", "unknown": "magenta"}
"""Of a status."""

_SPEEDS = {
    "regenerate": ("tokens_per_second", "answer tokens/s"),
    "prepare": ("tokens", "tokens"),
    "vocab": ("size", "tokens kept"),
    "extract": ("tokens_per_second", "tokens/s"),
    "train": ("tokens_per_second", "tokens/s"),
    "export": ("tensors", "tensors"),
    "evaluate": ("draft_tokens_per_second", "tokens/s with the draft"),
}


def gate_lines(report: GateReport, *, verbose: bool) -> list[str]:
    """The verdict in a line, then every finding that somebody should see (`verbose`: all of them)."""
    verdict = f"[{COLOURS[report.verdict]}]{report.verdict:>8}[/]"
    lines = [f"{verdict} gate {report.stage} ({report.point}), {len(report.findings)} checks; protects {escape(report.protects)}"]
    for finding in report.findings:
        if verbose or finding.status != "pass":
            lines.append(f"           [{COLOURS[finding.status]}]{finding.status:>7}[/] {finding.check}: {escape(finding.said)}")
            if finding.remedy:
                lines.append(f"                   -> {escape(finding.remedy)}")
    return lines


def stage_line(done: StageDone) -> str:
    """One line for a stage that is done."""
    if done.happened == "kept":
        return f"    kept {done.name}"
    return f"    made {done.name} in {done.manifest.actual.get('seconds', 0.0):.1f} s"


def print_summary(done: RunDone, console: Console) -> None:
    """The table that a run ends with."""
    table = Table(box=None, pad_edge=False)
    for column in ("stage", "", "seconds", "speed", "peak MiB"):
        table.add_column(column, justify="right" if column in ("seconds", "peak MiB") else "left")
    for stage in done.stages:
        actual, counts = stage.manifest.actual, stage.manifest.counts
        key, unit = _SPEEDS[stage.name]
        value = actual.get(key, counts.get(key))
        speed = f"{value:,.0f} {unit}" if isinstance(value, int | float) else ""
        table.add_row(stage.name, stage.happened, f"{actual['seconds']:.1f}", speed, f"{actual.get('memory', 0) / 2**20:,.0f}")
    console.print(table, soft_wrap=True)
    for stage in done.stages:
        if stage.name == "evaluate":
            for line in acceptance_lines(stage.manifest.counts):
                console.print(line, soft_wrap=True)
    console.print(f"report             {done.report}", soft_wrap=True)


def acceptance_lines(result: dict[str, Any]) -> list[str]:
    """The figures of an evaluation."""
    positions = "  ".join(f"{share:.3f}" for share in result["acceptance_by_position"])
    how = f"K={result['draft_tokens']}, {result['decoding']}, {result['prompts']} prompts, {result['engine']}"
    lines = [
        f"acceptance length  {result['acceptance_length']:.2f}  ({how})",
        f"  by position      {positions}",
        f"  prompt lookup    {result['baselines']['prompt_lookup']['acceptance_length']:.2f}",
        f"  same text as the target alone: {result['identical_to_target']:.0%} of the answers",
    ]
    if served := result.get("served"):
        lines.append(f"  served           {served['acceptance_length']:.2f}  (as {served['engine']} reports it)")
    return lines


def print_plan(plan: RunPlan, console: Console) -> None:
    """The plan as a table."""
    table = Table(box=None, pad_edge=False)
    for column in ("stage", "minutes", "disk MiB", "files", "memory MiB", "at risk"):
        table.add_column(column, justify="left" if column in ("stage", "at risk") else "right")
    for name, stage in plan.stages.items():
        minutes = "?" if stage.seconds is None else f"{stage.seconds / 60:.1f}"
        memory = "?" if stage.memory is None else f"{stage.memory / 2**20:,.0f}"
        table.add_row(name, minutes, f"{stage.bytes / 2**20:,.0f}", str(stage.files), memory, stage.protects)
    console.print(table)
    guess = "" if plan.tokens_known else " (guessed from the size of the data)"
    console.print(f"{plan.tokens:,} tokens, {plan.supervised_tokens:,} supervised{guess}")
    console.print(f"the target ({plan.weight_bytes / 2**20:,.0f} MiB) is loaded {plan.target_loads} times")


def plan_document(plan: RunPlan) -> dict[str, Any]:
    """The plan for `--json`."""
    return asdict(plan)
