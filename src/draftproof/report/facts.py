"""What a run folder says: read once, checked, and put into plain dataclasses for the page.

Reads only the run folder. An artifact that does not verify gives a stage in the state `damaged`, and none
of its figures are shown; work under way is read from its `.NAME.partial` folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from draftproof.artifact import MANIFEST, Manifest, partial_folder, problems, read_json, read_manifest
from draftproof.errors import DamagedArtifact, UsageError

LINE: tuple[tuple[str, str], ...] = (
    ("regenerate", "answers by the target itself"),
    ("prepare", "token rows and their mask"),
    ("vocab", "the draft's vocabulary"),
    ("extract", "the target's hidden states"),
    ("train", "the draft"),
    ("export", "folders for vLLM and SGLang"),
    ("evaluate", "acceptance, measured"),
)
"""The stages in order, and what each makes."""

_WORST_FIRST = ("fail", "unknown", "warn", "pass")


@dataclass(frozen=True)
class FindingFacts:
    """One line of a gate."""

    check: str
    status: str
    evidence: str
    remedy: str
    seconds: float
    waived: str | None


@dataclass(frozen=True)
class PointFacts:
    """A gate at one moment: before, loading, loaded, running."""

    point: str
    verdict: str
    findings: tuple[FindingFacts, ...]


@dataclass(frozen=True)
class StageFacts:
    """A stage with the gate before it."""

    name: str
    makes: str
    state: str
    """done, missing, unfinished, damaged, refused, undecided, or `not asked for`."""
    problem: str
    """Why it is damaged; else empty."""
    manifest: Manifest | None
    folder: Path | None
    """Where its files can be read; None when there are none, or none to trust."""
    protects: str
    points: tuple[PointFacts, ...]

    @property
    def verdict(self) -> str:
        """The worst verdict over the gate's points; `no checks` where the stage went on without, else `not reached`."""
        verdicts = [point.verdict for point in self.points]
        passed_freely = "no checks" if self.state in ("done", "unfinished", "damaged") else "not reached"
        return next((v for v in _WORST_FIRST if v in verdicts), passed_freely)

    @property
    def waived(self) -> tuple[FindingFacts, ...]:
        """Findings that the recipe overruled."""
        return tuple(f for point in self.points for f in point.findings if f.waived is not None)

    @property
    def seconds(self) -> float | None:
        """How long it took: as measured by the stage, else by the clock of its manifest."""
        if self.manifest is None:
            return None
        if "seconds" in self.manifest.actual:
            return self.manifest.actual["seconds"]
        return (datetime.fromisoformat(self.manifest.ended) - datetime.fromisoformat(self.manifest.started)).total_seconds()

    @property
    def bytes(self) -> int | None:
        """Size of its files."""
        return None if self.manifest is None else sum(record.size for record in self.manifest.files.values())


@dataclass(frozen=True)
class RecipeLine:
    """One value of the resolved recipe."""

    key: str
    value: str
    origin: str
    """`default`, `command line` or `FILE:LINE`."""


@dataclass(frozen=True)
class RunFacts:
    """The whole run folder."""

    name: str
    target: str
    stages: tuple[StageFacts, ...]
    recipe: tuple[tuple[str, tuple[RecipeLine, ...]], ...]
    """Sections in order, each with its lines."""
    settings: Mapping[str, Any]
    """The recipe as values."""

    def stage(self, name: str) -> StageFacts:
        """The stage of that name."""
        return next(stage for stage in self.stages if stage.name == name)


def read_run(run_dir: Path) -> RunFacts:
    """Everything the report shows. Raises UsageError when `run_dir` is not a run folder."""
    recipe_file = run_dir / "recipe.yaml"
    if not recipe_file.is_file():
        raise UsageError(
            "This is not a run folder: it has no recipe.yaml.", where=str(run_dir), remedy="Give the folder that `draftproof run` printed."
        )
    text = recipe_file.read_text(encoding="utf-8")
    settings = yaml.safe_load(text)
    if not isinstance(settings, dict):
        raise DamagedArtifact("The recipe of the run is not a mapping.", where=str(recipe_file), remedy="Start the run again.")
    stages = tuple(_read_stage(run_dir, name, makes, settings) for name, makes in LINE)
    return RunFacts(
        name=Path(str((settings.get("run") or {}).get("dir") or run_dir)).name or run_dir.resolve().name,
        target=str((settings.get("target") or {}).get("model", "")),
        stages=stages,
        recipe=_recipe_lines(text),
        settings=settings,
    )


def read_document(stage: StageFacts, name: str) -> dict[str, Any]:
    """A JSON file of a stage; empty when the stage has not made it."""
    if stage.folder is None or not (stage.folder / name).is_file():
        return {}
    found = read_json(stage.folder / name)
    return found if isinstance(found, dict) else {}


def read_lines(stage: StageFacts, name: str) -> list[dict[str, Any]]:
    """A JSON-lines file of a stage. A last line that is still being written is left out."""
    if stage.folder is None or not (stage.folder / name).is_file():
        return []
    *lines, rest = (stage.folder / name).read_text(encoding="utf-8", errors="replace").split("\n")
    if rest.strip():
        lines.append(rest)
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            if number == len(lines):
                break
            raise DamagedArtifact(
                "A line does not hold JSON.", where=f"{stage.folder / name}:{number}", remedy=f"Make it again with --from {stage.name}."
            ) from None
    return found


def _read_stage(run_dir: Path, name: str, makes: str, settings: Mapping[str, Any]) -> StageFacts:
    protects, points = _read_gate(run_dir, name)
    final = run_dir / name
    manifest, folder, problem = None, None, ""
    verdicts = {point.verdict for point in points}
    if final.exists():
        try:
            manifest = read_manifest(final)
            problem = next(iter(problems(final, manifest)), "")
        except DamagedArtifact as error:
            problem = error.what
        state = "damaged" if problem else "done"
        manifest, folder = (None, None) if problem else (manifest, final)
    elif "fail" in verdicts:
        state = "refused"
    elif "unknown" in verdicts:
        state = "undecided"
    elif partial_folder(final).is_dir() and not (partial_folder(final) / MANIFEST).exists():
        folder, state = partial_folder(final), "unfinished"
    elif name == "regenerate" and settings.get("regenerate") is None:
        state = "not asked for"
    else:
        state = "missing"
    return StageFacts(name, makes, state, problem, manifest, folder, protects, points)


def _read_gate(run_dir: Path, stage: str) -> tuple[str, tuple[PointFacts, ...]]:
    files = sorted((run_dir / "gates").glob(f"*-{stage}.json"))
    if not files:
        return "", ()
    record = read_json(files[-1])
    return record.get("protects", ""), tuple(
        PointFacts(
            point["point"],
            point["verdict"],
            tuple(
                FindingFacts(f["check"], f["status"], f["evidence"], f.get("remedy") or "", float(f.get("seconds") or 0.0), f.get("waived"))
                for f in point["findings"]
            ),
        )
        for point in record["points"]
    )


def _recipe_lines(text: str) -> tuple[tuple[str, tuple[RecipeLine, ...]], ...]:
    """The resolved recipe: `section:` lines, and `  key: value  # origin` lines below them."""
    sections: list[tuple[str, list[RecipeLine]]] = []
    for line in text.splitlines():
        body, mark, origin = line.rpartition("  # ")
        if not mark:
            body, origin = line, ""
        key, _, value = body.strip().partition(":")
        if not line.startswith(" "):
            sections.append((key, []))
        if sections and (line.startswith(" ") or value.strip()):
            sections[-1][1].append(RecipeLine(key, value.strip(), origin.strip()))
    return tuple((name, tuple(lines)) for name, lines in sections)
