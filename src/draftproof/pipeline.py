"""The line: stages in order, a gate before each, an artifact after each.

    recipe -> regenerate -> prepare -> vocab -> extract -> train -> export -> evaluate -> report

`run_line` walks it. A stage whose artifact is there, whole, and made of the same ingredients is skipped; one
whose folder holds other work is refused with the name of the field that differs; one that was interrupted goes on
from what its own journal proves.
"""

from __future__ import annotations

import difflib
import importlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from draftproof.artifact import Manifest, discard, open_build, read_json, reusable, verify, write_atomic, write_json
from draftproof.checkpoint import Checkpoint, Freeing
from draftproof.errors import DraftproofError, Refused, Undecided, UsageError
from draftproof.gate.gate import GateReport, check_name
from draftproof.plan import make_plan, measure_flops
from draftproof.progress import Progress
from draftproof.recipe import LoadedRecipe, Recipe
from draftproof.runfolder import drop_worthless, locked, stops_on_full_disk, sweep
from draftproof.stage import Outcome, StagePlan, StageTask
from draftproof.target.target import Target, open_target


@dataclass(frozen=True)
class Stage:
    """One place on the line."""

    name: str
    settings: Callable[[Recipe], Any]
    """Its own section of the recipe."""
    extra: Callable[[Recipe], dict[str, Any]] = field(default=lambda recipe: {})
    """What it needs from a section that it shares."""
    absent: Callable[[Recipe], bool] = field(default=lambda recipe: False)
    """True where the recipe leaves the stage out."""
    progress_file: str | None = None
    """What unfinished work goes on from; None where the stage starts over."""
    seeded: bool = False
    """True where the seed changes the result."""

    def module(self) -> ModuleType:
        """Its `stage.py`, imported when it is needed: most commands need no torch."""
        return importlib.import_module(f"draftproof.{self.name}.stage")


def _of_train(recipe: Recipe) -> dict[str, Any]:
    return {"draft": recipe.draft, "draft_tokens": recipe.evaluate.draft_tokens}


LINE: tuple[Stage, ...] = (
    Stage(
        "regenerate",
        lambda recipe: recipe.regenerate,
        absent=lambda recipe: recipe.regenerate is None,
        progress_file="journal.jsonl",
        seeded=True,
    ),
    Stage("prepare", lambda recipe: recipe.data),
    Stage("vocab", lambda recipe: recipe.vocab),
    Stage("extract", lambda recipe: recipe.extract, progress_file="journal.jsonl"),
    Stage("train", lambda recipe: recipe.train, _of_train, progress_file="resume.safetensors", seeded=True),
    Stage("export", lambda recipe: recipe.export, lambda recipe: {"draft_tokens": recipe.evaluate.draft_tokens}),
    Stage("evaluate", lambda recipe: recipe.evaluate),
)
STAGE_NAMES = tuple(stage.name for stage in LINE)

Happened = Literal["made", "kept"]


@dataclass(frozen=True)
class StageDone:
    """What became of one stage."""

    name: str
    happened: Happened
    """`kept`: its artifact was there already, proven whole and of the same ingredients."""
    manifest: Manifest


@dataclass(frozen=True)
class RunDone:
    """A walked line."""

    run_dir: Path
    stages: list[StageDone]
    report: Path


def run_line(
    loaded: LoadedRecipe,
    *,
    progress: Progress,
    first: str | None = None,
    last: str | None = None,
    only: str | None = None,
    announce: Callable[[StageDone], None] = lambda done: None,
    announce_gate: Callable[[GateReport], None] = lambda report: None,
    freeing: Freeing | None = None,
) -> RunDone:
    """Walk the line of a recipe, from `first` (its work and all after it is made anew) until `last`.

    `only` runs one stage on the finished artifacts before it; `freeing` says whether holders of the GPUs that belong to
    the recipe's units may be stopped. Raises Refused or Undecided when a gate says so,
    Stopped on a full disk, and what the stages raise; everything finished so far stays.
    """
    recipe = loaded.recipe
    run_dir = Path(recipe.run.dir)
    names = [stage.name for stage in LINE if not stage.absent(recipe)]
    for name in (first, last, only):
        if name is not None and name not in names:
            raise UsageError(f"This recipe has no stage {name!r}.", remedy=f"Its stages: {', '.join(names)}.")
    if first is not None and last is not None and names.index(first) > names.index(last):
        raise UsageError(f"--from {first} stands after --until {last}.", remedy="Swap them.")
    _check_waivers(recipe)
    if freeing is not None and freeing.plans and not recipe.machine.units:
        raise UsageError(
            "--apply stops what the recipe's units hold, and this recipe names none.",
            where="machine.units",
            remedy="Name them there, or carry the plan out with `draftproof reclaim --apply`.",
        )
    with stops_on_full_disk(run_dir), locked(run_dir):
        sweep(run_dir)
        device = choose_device(recipe)
        target = open_target(recipe.target)
        anew = tuple(names[names.index(first) :]) if first is not None else ()
        line = _Line(loaded, target, device, progress, announce_gate, anew, freeing or Freeing())
        done: list[StageDone] = []
        try:
            for stage in LINE:
                if stage.name not in names or (only is not None and stage.name != only):
                    continue
                done.append(line.do(stage))
                announce(done[-1])
                if stage.name == last:
                    break
        except (Refused, Undecided):
            _finish(run_dir)  # the report shows what the gate saw
            raise
        line.write_recipe()
        (run_dir / _ANEW).unlink(missing_ok=True)
        return RunDone(run_dir, done, _finish(run_dir))


_ANEW = ".anew.json"
"""Which stages a walk that has not ended yet makes anew: the same --from, given again, goes on."""


def _check_waivers(recipe: Recipe) -> None:
    """A waiver of a check that does not exist would be a surprise at the worst moment."""
    from draftproof.gate.catalog import CHECKS

    known = sorted({check_name(check) for checks in CHECKS.values() for check in checks})
    for name in recipe.gates.waive:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise UsageError(
                f"There is no check {name!r} to waive.",
                where="gates.waive",
                remedy=f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(known)}.",
            )


def _finish(run_dir: Path) -> Path:
    """Complete the model cards once there are figures, and write the report."""
    from draftproof.export.card import complete_card
    from draftproof.report.report import write_report

    result = run_dir / "evaluate" / "result.json"
    for card in sorted((run_dir / "export").glob("*/README.md")) if result.is_file() else ():
        complete_card(card.parent, read_json(result))
    return write_report(run_dir)


class _Line:
    """The state of a walk: manifests so far, and what every stage is given."""

    def __init__(
        self,
        loaded: LoadedRecipe,
        target: Target,
        device: str,
        progress: Progress,
        announce_gate: Callable[[GateReport], None],
        anew: Sequence[str],
        freeing: Freeing,
    ) -> None:
        self.freeing = freeing
        self.loaded, self.recipe, self.run_dir = loaded, loaded.recipe, Path(loaded.recipe.run.dir)
        self.target, self.device, self.progress, self.announce_gate, self.anew = target, device, progress, announce_gate, anew
        self._flops: float | None = None
        self._threads_set = False
        if not (self.run_dir / "recipe.yaml").exists():
            self.write_recipe()

    def write_recipe(self) -> None:
        """Say in the folder what it holds. Not before this recipe was found to fit what is there."""
        write_atomic(self.run_dir / "recipe.yaml", self.loaded.resolved_yaml().encode())

    def do(self, stage: Stage) -> StageDone:
        """Skip, go on with, or make one stage."""
        module, settings, extra = stage.module(), stage.settings(self.recipe), stage.extra(self.recipe)
        folders = {name: self.run_dir / name for name in module.NEEDS if not self._is_absent(name)}
        manifests = {name: verify(folder) for name, folder in folders.items()}
        ingredients = {
            "stage_version": module.VERSION,
            **({"seed": self.recipe.run.seed} if stage.seeded else {}),
            **module.ingredients(settings, self.target, manifests, **extra),
        }
        final = self.run_dir / stage.name
        if self.anew and stage.name == self.anew[0]:  # only now is it sure that its inputs are there
            self._make_anew()
        if (manifest := reusable(final, stage=stage.name, ingredients=ingredients)) is not None:
            return StageDone(stage.name, "kept", manifest)

        plan = self._plan(stage.name)
        checkpoint = Checkpoint(
            stage.name,
            recipe=self.recipe,
            target=self.target,
            device=self.device,
            inputs=folders,
            out=final,
            plan=plan if isinstance(plan, StagePlan) else None,
            file=self._gate_file(stage.name),
            announce=self.announce_gate,
            freeing=self.freeing,
        )
        checkpoint("before", None)
        if not isinstance(plan, StagePlan):  # and no gate had anything to say about it
            raise plan
        predicted = {"bytes": float(plan.bytes), **({"seconds": plan.seconds} if plan.seconds is not None else {})}
        if plan.memory is not None:
            predicted["memory"] = float(plan.memory)
        drop_worthless(final, stage.progress_file)
        conditions = self._conditions() if stage.progress_file is not None else None
        build = open_build(final, stage=stage.name, ingredients=ingredients, conditions=conditions, predicted=predicted)
        self.write_recipe()
        self._set_threads()
        task = StageTask(
            inputs=folders, out=build.folder, seed=self.recipe.run.seed, device=self.device, checkpoint=checkpoint, progress=self.progress
        )
        started = time.monotonic()
        _reset_peak_memory()
        with checkpoint.watched():
            outcome: Outcome = module.run(task, settings, self.target, **extra)
        cost = {"seconds": time.monotonic() - started, **_peak_memory()}
        cost["bytes"] = float(sum(path.stat().st_size for path in build.folder.rglob("*") if path.is_file()))
        outcome.actual.update(cost)
        return StageDone(stage.name, "made", build.finish(outcome))

    def _plan(self, name: str) -> StagePlan | DraftproofError:
        """The plan of a stage, or why there is none: a damaged target cannot be planned, but its gate still names all that is wrong."""
        try:
            return make_plan(self.recipe, self.target, self.run_dir, flops=self._rate(), device=self.device).stages[name]
        except DraftproofError as error:
            return error

    def _make_anew(self) -> None:
        """Discard the stages of --from, unless the walk that did so was interrupted and is now going on."""
        marker = self.run_dir / _ANEW
        if marker.is_file() and read_json(marker) == list(self.anew):
            return
        for name in reversed(self.anew):
            discard(self.run_dir / name)
            self._gate_file(name).unlink(missing_ok=True)
        write_json(marker, list(self.anew))

    def _gate_file(self, name: str) -> Path:
        return self.run_dir / "gates" / f"{STAGE_NAMES.index(name) + 1:02d}-{name}.json"

    def _conditions(self) -> dict[str, str]:
        """What unfinished work must go on under."""
        from draftproof.target.loaded import compute_dtype

        return {"device": self.device, "dtype": compute_dtype(self.target, self.device)}

    def _is_absent(self, name: str) -> bool:
        return any(stage.name == name and stage.absent(self.recipe) for stage in LINE)

    def _rate(self) -> float:
        if self._flops is None:
            self._flops = measure_flops(self.device)
        return self._flops

    def _set_threads(self) -> None:
        if self.recipe.run.threads is not None and not self._threads_set:
            import torch

            torch.set_num_threads(self.recipe.run.threads)
            self._threads_set = True


def choose_device(recipe: Recipe) -> str:
    """`cuda` or `cpu`; raises UsageError when the recipe wants a GPU that torch does not see."""
    if recipe.run.device == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if recipe.run.device == "cuda":
        raise UsageError(
            "The recipe asks for a GPU, but torch sees none.", where="run.device", remedy="Set run.device=cpu, or mend the driver."
        )
    return "cpu"


def _reset_peak_memory() -> None:
    """Start a new peak for this process, where the kernel lets us (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _peak_memory() -> dict[str, float]:
    """Peak resident bytes of this process since the reset, and of the GPU if torch is loaded."""
    found: dict[str, float] = {}
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    if match := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE):
        found["memory"] = float(match.group(1)) * 1024
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpu_memory"] = float(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
    return found
