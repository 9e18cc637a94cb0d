"""The report: one HTML page that shows a whole run.

    write_report(Path("runs/smollm2-cpu"))      # -> runs/smollm2-cpu/report.html

The page is self-contained: one style sheet and SVG charts inside it, no script, no font, no request. Its
Content-Security-Policy says so to the browser, with the hash of the style sheet. Everything that comes from
data goes through Jinja's autoescape. An unfinished run gives a page too: it says what is there and what is next.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from draftproof import __version__
from draftproof.artifact import now, write_atomic
from draftproof.report.facts import RunFacts, StageFacts, read_document, read_lines, read_run
from draftproof.report.plots import Chart, Series, bar_chart, line_chart, thin

TEMPLATES = Path(__file__).parent / "templates"


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` from what the run folder holds, and return its path.

    Raises UsageError when `run_dir` is not a run folder, DamagedArtifact when a record in it cannot be read.
    """
    facts = read_run(run_dir)
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    result = read_document(facts.stage("evaluate"), "result.json")
    page = (
        _environment()
        .get_template("report.html")
        .render(
            run=facts,
            style=Markup(style),  # noqa: S704  our own file
            style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
            sentence=_sentence(facts),
            tiles=_tiles(facts, result),
            result=result,
            acceptance_charts=_acceptance_charts(result),
            categories=_categories(result),
            training_charts=_training_charts(facts.stage("train")),
            data=_data(facts.stage("prepare")),
            vocab=_vocab(facts.stage("vocab")),
            costs=_costs(facts),
            timing=_flat(read_document(facts.stage("evaluate"), "timing.json")),
            versions=_versions(facts),
            hosts=sorted({s.manifest.host for s in facts.stages if s.manifest is not None}),
            draftproof=__version__,
            written=now(),
        )
    )
    path = run_dir / "report.html"
    write_atomic(path, page.encode())
    return path


@dataclass(frozen=True)
class Tile:
    """One figure at the top of the page."""

    name: str
    value: str
    note: str


@dataclass(frozen=True)
class Cost:
    """A row of predicted against actual."""

    stage: str
    predicted_seconds: float | None
    seconds: float | None
    predicted_bytes: float | None
    bytes: int | None
    predicted_memory: float | None
    memory: float | None
    tokens_per_second: float | None


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(duration=duration, size=size, number=number, share=share)
    return environment


def _sentence(facts: RunFacts) -> str:
    """Where the run stands, in one sentence."""
    asked = [stage for stage in facts.stages if stage.state != "not asked for"]
    stage = next((stage for stage in asked if stage.state != "done"), None)
    if stage is None:
        waived = sum(len(s.waived) for s in facts.stages)
        over = f" {waived} finding{'s' if waived > 1 else ''} waived, see below." if waived else ""
        return f"Finished: all {len(asked)} stages are done, and every file is what its manifest says.{over}"
    done = sum(s.state == "done" for s in asked)
    return {
        "damaged": f"The {stage.name} artifact is damaged: {stage.problem}",
        "refused": f"Stopped before {stage.name}: its gate said no.",
        "undecided": f"Stopped before {stage.name}: its gate could not tell.",
        "unfinished": f"{done} of {len(asked)} stages are done; {stage.name} is unfinished. The same command goes on from there.",
        "missing": f"{done} of {len(asked)} stages are done; {stage.name} is next.",
    }[stage.state]


def _tiles(facts: RunFacts, result: Mapping[str, Any]) -> list[Tile]:
    tiles = []
    if "acceptance_length" in result:
        drafted = (
            f"tokens a target pass yields, drafting {result['draft_tokens']}, {result['decoding']}, {number(result['prompts'])} prompts"
        )
        tiles.append(Tile("Acceptance length", f"{result['acceptance_length']:.2f}", drafted))
        for name, baseline in (result.get("baselines") or {}).items():
            tiles.append(Tile(_words(name), f"{baseline['acceptance_length']:.2f}", "baseline, same prompts"))
        if served := result.get("served"):
            tiles.append(
                Tile("As served", f"{served['acceptance_length']:.2f}", f"reported by {served.get('engine', 'the engine')} itself")
            )
        if "identical_to_target" in result:
            prompts = int(result["prompts"])
            same = round(float(result["identical_to_target"]) * prompts)
            value = "identical" if same == prompts else f"{same} of {prompts}"
            tiles.append(Tile("Text", value, "the same as by the target alone, token for token"))
    seconds = [stage.seconds for stage in facts.stages if stage.seconds is not None]
    if seconds:
        tiles.append(Tile("Time", duration(sum(seconds)), f"{len(seconds)} stage{'s' if len(seconds) > 1 else ''}, added up"))
    return tiles


def _acceptance_charts(result: Mapping[str, Any]) -> list[Chart]:
    by_position = result.get("acceptance_by_position") or []
    if not by_position:
        return []
    sources = {"draft": by_position}
    for name, other in {"served": result.get("served"), **(result.get("baselines") or {})}.items():
        if other and other.get("acceptance_by_position"):
            sources[_words(name).lower()] = other["acceptance_by_position"]
    series = [Series(name, tuple(enumerate(map(float, values)))) for name, values in sources.items()]
    groups = [str(position) for position in range(1, len(by_position) + 1)]
    return [
        bar_chart(
            "Acceptance by position",
            groups,
            series,
            x_label="position in the draft",
            y_label="share of drafts accepted up to here",
            top=1.0,
        )
    ]


def _categories(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Categories, best first, with a bar length in percent of the longest possible acceptance."""
    most = float(result.get("draft_tokens", 0)) + 1
    rows = [
        {"name": name, "bar": round(100 * float(values["acceptance_length"]) / most, 1), **values}
        for name, values in (result.get("by_category") or {}).items()
    ]
    return sorted(rows, key=lambda row: (-row["acceptance_length"], row["name"]))


def _training_charts(train: StageFacts) -> list[Chart]:
    lines = read_lines(train, "metrics.jsonl")
    steps = [line for line in lines if line.get("kind") == "step"]
    forecasts = [line for line in lines if line.get("kind") == "forecast"]
    charts = []
    if steps:
        series = [Series("all drafted tokens", thin([(s["step"], s["loss"]) for s in steps]))]
        unroll = min(len(s.get("loss_by_step") or []) for s in steps)
        for k in sorted({0, unroll - 1}) if unroll > 1 else []:
            series.append(Series(_ordinal(k + 1) + " drafted token", thin([(s["step"], s["loss_by_step"][k]) for s in steps])))
        charts.append(line_chart("Training loss", series, x_label="optimizer step", y_label="KL divergence from the target"))
    if forecasts:
        by = {name: tuple((f["step"], f[key]["acceptance_length"]) for f in forecasts) for name, key in _FORECASTS.items()}
        best = (train.manifest.counts if train.manifest else {}).get("best_step")
        charts.append(
            line_chart(
                "Acceptance forecast on held-out rows",
                [Series(name, points) for name, points in by.items()],
                x_label="optimizer step",
                y_label="acceptance length",
                mark=(float(best), "exported") if best is not None else None,
            )
        )
    return charts


_FORECASTS = {"by walk, as an engine goes": "by_walk", "by start, the mean over all": "by_start"}


def _data(prepare: StageFacts) -> dict[str, Any]:
    """Counts of `prepare`: every conversation is kept, changed or dropped, with its reason."""
    if prepare.manifest is None:
        return {}
    counts = prepare.manifest.counts
    conversations = counts.get("conversations", {})
    fates = [("kept as it is", "", conversations.get("kept", 0))]
    for fate in ("changed", "dropped"):
        fates += [(fate, reason, n) for reason, n in sorted((conversations.get(fate) or {}).items(), key=lambda item: -item[1])]
    tokens, supervised = counts.get("tokens", 0), counts.get("supervised_tokens", 0)
    return {
        "in": conversations.get("in", 0),
        "fates": fates,
        "rows": counts.get("rows_out", 0),
        "tokens": tokens,
        "supervised": supervised,
        "supervised_share": supervised / tokens if tokens else 0.0,
        "splits": counts.get("splits") or {},
        "finish_reasons": counts.get("finish_reasons") or {},
        "sample": [
            {
                "source": row["source"],
                **{side: [_visible(token) for token in row[f"{side}_text"]] for side in ("before", "first_supervised")},
            }
            for row in read_document(prepare, "report.json").get("sample", ())
        ],
    }


def _vocab(vocab: StageFacts) -> dict[str, Any]:
    if vocab.manifest is None:
        return {}
    counts = vocab.manifest.counts
    return {"size": counts.get("size"), "target_size": counts.get("target_size"), "coverage": counts.get("coverage") or {}}


def _costs(facts: RunFacts) -> list[Cost]:
    rows = []
    for stage in facts.stages:
        if stage.manifest is not None:
            predicted, actual = stage.manifest.predicted, stage.manifest.actual
            rows.append(
                Cost(
                    stage=stage.name,
                    predicted_seconds=predicted.get("seconds"),
                    seconds=stage.seconds,
                    predicted_bytes=predicted.get("bytes"),
                    bytes=stage.bytes,
                    predicted_memory=predicted.get("memory"),
                    memory=actual.get("memory"),
                    tokens_per_second=actual.get("tokens_per_second", actual.get("draft_tokens_per_second")),
                )
            )
    return rows


def _versions(facts: RunFacts) -> list[tuple[str, str]]:
    """Each library with its version; several, with their stages, when a run was made in parts."""
    found: dict[str, dict[str, list[str]]] = {}
    for stage in facts.stages:
        for name, version in (stage.manifest.versions if stage.manifest else {}).items():
            found.setdefault(name, {}).setdefault(version, []).append(stage.name)
    rows = []
    for name, versions in found.items():
        text = next(iter(versions)) if len(versions) == 1 else "; ".join(f"{v} ({', '.join(stages)})" for v, stages in versions.items())
        rows.append((name, text))
    return rows


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """A JSON document as (name, text) lines."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{_words(key) if not prefix else _words(key).lower()}"
        if isinstance(value, Mapping):
            rows += _flat(value, f"{name}, ")
        elif isinstance(value, float):
            rows.append((name, f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"))
        elif isinstance(value, int) and not isinstance(value, bool):
            rows.append((name, number(value)))
        else:
            rows.append((name, ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)))
    return rows


def duration(seconds: float | None) -> str:
    """`3.2 s`, `48 s`, `3 min 12 s`, `2 h 05 min`; a dash when unknown."""
    if seconds is None:
        return "–"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(count: float | None) -> str:
    """Bytes in decimal units: `812 B`, `4.1 MB`; a dash when unknown."""
    if count is None:
        return "–"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def number(value: float | None) -> str:
    """With thousands separators; a dash when unknown."""
    return "–" if value is None else f"{value:,.0f}"


def share(value: float | None) -> str:
    """Percent with one decimal; a dash when unknown."""
    return "–" if value is None else f"{100 * value:.1f} %"


def _visible(token: str) -> str:
    """White space as signs, so that every token can be seen: where a mask begins is often a matter of one newline."""
    return token.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣")


def _ordinal(n: int) -> str:
    return f"{n}{'th' if 10 <= n % 100 <= 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"


def _words(key: str) -> str:
    """`prompt_lookup` -> `Prompt lookup`."""
    return key.replace("_", " ").capitalize()
