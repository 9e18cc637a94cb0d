"""The face: commands, arguments, exit codes. No logic.

Every command prints for people on stderr and its result on stdout: a table, or with `--json` one JSON document
`{command, version, status, exit_code, message, ...}`.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftproof import __version__
from draftproof.command import AsJson, Overrides, Quiet, RecipeFile, Result, Verbose, Workdir, command, refuse_arguments
from draftproof.machine_commands import check, reclaim

if TYPE_CHECKING:
    from draftproof.checkpoint import Freeing
    from draftproof.gate.gate import GateReport
    from draftproof.machine.reclaim import HostPlan
    from draftproof.pipeline import StageDone

app = typer.Typer(
    help="From a target LLM and prompts to an EAGLE-3 draft that is proven to speed it up.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
recipe_app = typer.Typer(help="Start, show and describe recipes.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(recipe_app, name="recipe")


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal of another encoding gets a question mark, not a traceback
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):  # a click error: click's own class or typer's copy of it, by typer's version
            raise
        code = refuse_arguments(error)
    sys.exit(code)


@app.command()
def run(
    recipe: RecipeFile,
    overrides: Overrides = None,
    first: Annotated[str | None, typer.Option("--from", help="Make this stage and all after it anew.")] = None,
    last: Annotated[str | None, typer.Option("--until", help="Stop after this stage.")] = None,
    workdir: Workdir = None,
    apply: Annotated[
        Path | None, typer.Option("--apply", help="A reclaim plan: stop what machine.units hold when a gate finds it.", metavar="PLAN")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; change nothing.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Walk the whole line: recipe, gates, stages, report. Running again goes on."""
    if dry_run:
        _plan("run", recipe, overrides, workdir, as_json)
        return
    _run_line("run", recipe, overrides, workdir, as_json, quiet, verbose, apply=apply, first=first, last=last)


@app.command()
def plan(recipe: RecipeFile, overrides: Overrides = None, workdir: Workdir = None, as_json: AsJson = False) -> None:
    """What a run will take: tokens, bytes, memory, minutes, before anything is loaded."""
    _plan("plan", recipe, overrides, workdir, as_json)


def _stage_command(name: str, summary: str) -> None:
    def command(
        recipe: RecipeFile,
        overrides: Overrides = None,
        workdir: Workdir = None,
        as_json: AsJson = False,
        quiet: Quiet = False,
        verbose: Verbose = False,
    ) -> None:
        _run_line(name, recipe, overrides, workdir, as_json, quiet, verbose, only=name)

    app.command(name, help=summary)(command)


_stage_command("regenerate", "Answer the prompts by the target itself.")
_stage_command("prepare", "Turn conversations into rows: token ids and a supervised mask.")
_stage_command("vocab", "Choose the draft vocabulary.")
_stage_command("extract", "Run the target over the rows and keep its hidden states.")
_stage_command("train", "Train the draft.")
_stage_command("export", "Write the folders that engines load.")
_stage_command("evaluate", "Draft and verify on prompts; report the acceptance.")


app.command()(check)
app.command()(reclaim)


@app.command()
def report(
    run_folder: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")],
    as_json: AsJson = False,
) -> None:
    """Write or refresh the HTML report of a run."""
    with command("report", as_json) as result:
        from draftproof.report.report import write_report

        path = write_report(run_folder)
        result.update(report=str(path))
        result.say(f"report  {path}")


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A run, an artifact, a draft or a target.", metavar="PATH")],
    deep: Annotated[bool, typer.Option("--verify", help="Hash every byte again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a folder is, and whether it is whole."""
    with command("inspect", as_json) as result:
        from draftproof.inspect import describe

        facts = describe(path, deep=deep)
        result.update(**facts)
        for line in facts["lines"]:
            result.say(line)
        if not facts["whole"]:
            from draftproof.errors import DamagedArtifact

            raise DamagedArtifact(facts["problems"][0], where=str(path), remedy=facts["remedy"])


@recipe_app.command("init")
def recipe_init(path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("recipe.yaml"), as_json: AsJson = False) -> None:
    """Write a small recipe to start from."""
    with command("recipe init", as_json) as result:
        from draftproof.errors import UsageError
        from draftproof.recipe import STARTER

        if path.exists():
            raise UsageError("The file exists already; nothing was written.", where=str(path), remedy="Give another name.")
        path.write_text(STARTER)
        result.update(path=str(path))
        result.say(f"wrote {path}; next: draftproof plan {path}")


@recipe_app.command("show")
def recipe_show(recipe: RecipeFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """The resolved recipe, with where each value came from."""
    with command("recipe show", as_json) as result:
        from draftproof.recipe import load

        loaded = load(recipe, overrides or ())
        result.update(recipe=loaded.recipe.model_dump(mode="json"), provenance=loaded.provenance)
        result.say(loaded.resolved_yaml().rstrip())


@recipe_app.command("schema")
def recipe_schema(as_json: AsJson = False) -> None:
    """The JSON schema of a recipe."""
    with command("recipe schema", as_json) as result:
        from draftproof.recipe import Recipe

        result.update(schema=Recipe.model_json_schema())
        result.say(json.dumps(result["schema"], indent=1))


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def _run_line(
    name: str,
    recipe: Path,
    overrides: list[str] | None,
    workdir: str | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    *,
    apply: Path | None = None,
    **where: str | None,
) -> None:
    with command(name, as_json) as result:
        _set_up_logging(quiet, verbose)
        from rich.console import Console

        from draftproof.pipeline import run_line
        from draftproof.progress import Progress
        from draftproof.recipe import load

        loaded = load(recipe, overrides or (), run_dir=workdir)
        result.update(run=loaded.recipe.run.dir, stages={}, findings=[])  # also of a walk that a gate ends
        console = Console(stderr=True, quiet=quiet, highlight=False)
        first, last, only = (where.get(name) for name in ("first", "last", "only"))
        done = run_line(
            loaded,
            first=first,
            last=last,
            only=only,
            freeing=_freeing(console, apply),
            progress=Progress(quiet=quiet, console=console),
            announce=_announce(console, result),
            announce_gate=_announce_gate(console, verbose, result),
        )
        result.update(report=str(done.report))
        if done.stages:
            result.update(done.stages[-1].manifest.counts)
        if not as_json:
            from draftproof.summary import print_summary

            print_summary(done, Console(highlight=False))


def _freeing(console: Any, plan: Path | None) -> Freeing:
    """What a run may do about holders of the recipe's units: a plan was given, or somebody sits here and is asked."""
    from rich.console import Console

    from draftproof.checkpoint import Freeing, plans_for_here
    from draftproof.screen import print_applied, print_plan

    def confirm(found: HostPlan) -> bool:
        print_plan(found, Console(stderr=True, highlight=False))  # nobody should say yes to what -q has hidden
        try:
            return typer.confirm("Stop them now, and go on?", default=False, err=True)
        except typer.Abort as abort:
            if isinstance(abort.__context__, EOFError):  # Ctrl-D
                return False
            raise

    return Freeing(
        plans=[] if plan is None else plans_for_here(plan),
        confirm=confirm if sys.stdin.isatty() and sys.stderr.isatty() else None,
        announce=lambda applied: print_applied(applied, console),
    )


def _announce(console: Any, result: Result) -> Callable[[StageDone], None]:
    from draftproof.summary import stage_line

    def announce(done: StageDone) -> None:
        result["stages"][done.name] = done.happened
        console.print(stage_line(done), soft_wrap=True)

    return announce


def _announce_gate(console: Any, verbose: bool, result: Result) -> Callable[[GateReport], None]:
    from draftproof.summary import gate_lines

    def announce(report: GateReport) -> None:
        seen = [asdict(finding) for finding in report.findings if finding.status != "pass"]
        result["findings"] += [{"stage": report.stage, "point": report.point, **finding} for finding in seen]
        if verbose or report.point != "running" or report.verdict != "pass":
            console.print("\n".join(gate_lines(report, verbose=verbose)), soft_wrap=True)

    return announce


def _plan(name: str, recipe: Path, overrides: list[str] | None, workdir: str | None, as_json: bool) -> None:
    with command(name, as_json) as result:
        from rich.console import Console

        from draftproof.pipeline import choose_device
        from draftproof.plan import make_plan, measure_flops
        from draftproof.recipe import load
        from draftproof.summary import plan_document, print_plan
        from draftproof.target.target import open_target

        chosen = load(recipe, overrides or (), run_dir=workdir).recipe
        device = choose_device(chosen)
        planned = make_plan(chosen, open_target(chosen.target), Path(chosen.run.dir), flops=measure_flops(device), device=device)
        result.update(plan_document(planned))
        if not as_json:
            print_plan(planned, Console(highlight=False))


def _set_up_logging(quiet: bool, verbose: bool) -> None:
    level = logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    logging.getLogger("draftproof").setLevel(level)
