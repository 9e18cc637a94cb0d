"""The face: commands, arguments, exit codes. No logic.

Every command prints for people on stderr and its result on stdout: a table, or with `--json` one JSON document
`{command, version, status, exit_code, message, ...}`.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftproof import __version__

if TYPE_CHECKING:
    from draftproof.gate.gate import GateReport
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

RecipeFile = Annotated[Path, typer.Argument(help="The recipe, a YAML file.", metavar="RECIPE")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Values that replace the recipe's: train.unroll=5", metavar="[KEY=VALUE ...]")]
Workdir = Annotated[str | None, typer.Option("--workdir", help="Run folder, instead of the recipe's run.dir.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress, no gates; errors only.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Every finding of every gate.")]


def main() -> None:
    """The console script."""
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):  # a click error: click's own class or typer's copy of it, by typer's version
            raise
        code = _refuse_arguments(error)
    sys.exit(code)


def _refuse_arguments(error: Any) -> int:
    """A wrong command line, said as every other error: one sentence, and a document if one was asked for."""
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message(), err=True)
        return 2
    path = error.ctx.command_path if error.ctx is not None else "draftproof"
    message = f"{' '.join(error.format_message().split()).rstrip('.')}. `{path} --help` shows what it takes."
    name = path.removeprefix("draftproof").strip()
    _report(_Result("--json" in sys.argv), name, "usage", 2, message)
    return 2


@app.command()
def run(
    recipe: RecipeFile,
    overrides: Overrides = None,
    first: Annotated[str | None, typer.Option("--from", help="Make this stage and all after it anew.")] = None,
    last: Annotated[str | None, typer.Option("--until", help="Stop after this stage.")] = None,
    workdir: Workdir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; change nothing.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Walk the whole line: recipe, gates, stages, report. Running again goes on."""
    if dry_run:
        _plan("run", recipe, overrides, workdir, as_json)
        return
    _run_line("run", recipe, overrides, workdir, as_json, quiet, verbose, first=first, last=last)


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


@app.command()
def report(
    run_folder: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")],
    as_json: AsJson = False,
) -> None:
    """Write or refresh the HTML report of a run."""
    with _command("report", as_json) as result:
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
    with _command("inspect", as_json) as result:
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
    with _command("recipe init", as_json) as result:
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
    with _command("recipe show", as_json) as result:
        from draftproof.recipe import load

        loaded = load(recipe, overrides or ())
        result.update(recipe=loaded.recipe.model_dump(mode="json"), provenance=loaded.provenance)
        result.say(loaded.resolved_yaml().rstrip())


@recipe_app.command("schema")
def recipe_schema(as_json: AsJson = False) -> None:
    """The JSON schema of a recipe."""
    with _command("recipe schema", as_json) as result:
        from draftproof.recipe import Recipe

        result.update(schema=Recipe.model_json_schema())
        result.say(json.dumps(result["schema"], indent=1))


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


class _Result(dict[str, Any]):
    """The JSON document of a command, and its lines for people."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self.as_json = as_json

    def say(self, line: str) -> None:
        """A line on stdout, unless the document goes there."""
        if not self.as_json:
            typer.echo(line)


@contextmanager
def _command(name: str, as_json: bool) -> Iterator[_Result]:
    """Turn what a command raises into one sentence, a document and an exit code."""
    result = _Result(as_json)
    status, code, message = "ok", 0, ""
    received: list[int] = []

    def stop(number: int, frame: Any) -> None:
        received.append(number)
        raise KeyboardInterrupt  # not an Exception, so that nothing on its way takes it for an error of its own

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell starts its background jobs deaf to Ctrl-C
            signal.signal(number, stop)
    try:
        yield result
    except BrokenPipeError:
        raise
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001  the last door: said in one sentence, never swallowed
        status, code, message = _explain(error, received)
    _report(result, name, status, code, message)
    if code:
        raise typer.Exit(code)


def _explain(error: BaseException, received: list[int]) -> tuple[str, int, str]:
    """Status, exit code and sentence of what ended a command. `received`: signals, whatever came of them on the way."""
    from draftproof.errors import DraftproofError

    if received or isinstance(error, KeyboardInterrupt):
        by_term = signal.SIGTERM in received
        return "stopped", 5 if by_term else 130, f"{'Stopped by SIGTERM' if by_term else 'Interrupted'}. {_GO_ON}"
    if isinstance(error, DraftproofError):
        return error.status, error.exit_code, str(error)
    if logging.getLogger("draftproof").isEnabledFor(logging.DEBUG):
        traceback.print_exception(error)
    if isinstance(error, OSError) and error.strerror:
        where = f" [{error.filename}]" if error.filename else ""
        return "failed", 1, f"The system refused: {error.strerror}.{where} Mend that and run the same command again."
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        "failed",
        1,
        f"{type(error).__name__}: {error} [{Path(place.filename).name}:{place.lineno}] "
        "This is a fault of draftproof, not of your input; -v shows the whole trace.",
    )


_GO_ON = "Run the same command again to go on from here."


def _report(result: _Result, name: str, status: str, code: int, message: str) -> None:
    """The sentence in one line on stderr, the document on stdout."""
    message = " ".join(message.split())
    if message:
        typer.echo(f"{status}: {message}", err=True)
    if result.as_json:
        document = {"command": name, "version": __version__, "status": status, "exit_code": code, "message": message, **result}
        typer.echo(json.dumps(document, ensure_ascii=False, default=str))


def _run_line(
    name: str,
    recipe: Path,
    overrides: list[str] | None,
    workdir: str | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **where: str | None,
) -> None:
    with _command(name, as_json) as result:
        _set_up_logging(quiet, verbose)
        from rich.console import Console

        from draftproof.pipeline import run_line
        from draftproof.progress import Progress
        from draftproof.recipe import load

        loaded = load(recipe, overrides or (), run_dir=workdir)
        result.update(run=loaded.recipe.run.dir, stages={}, findings=[])  # also of a walk that a gate ends
        console = Console(stderr=True, quiet=quiet, highlight=False)
        done = run_line(
            loaded,
            progress=Progress(quiet=quiet, console=console),
            announce=_announce(console, result),
            announce_gate=_announce_gate(console, verbose, result),
            **where,
        )
        result.update(report=str(done.report))
        if done.stages:
            result.update(done.stages[-1].manifest.counts)
        if not as_json:
            from draftproof.summary import print_summary

            print_summary(done, Console(highlight=False))


def _announce(console: Any, result: _Result) -> Callable[[StageDone], None]:
    from draftproof.summary import stage_line

    def announce(done: StageDone) -> None:
        result["stages"][done.name] = done.happened
        console.print(stage_line(done), soft_wrap=True)

    return announce


def _announce_gate(console: Any, verbose: bool, result: _Result) -> Callable[[GateReport], None]:
    from draftproof.summary import gate_lines

    def announce(report: GateReport) -> None:
        seen = [asdict(finding) for finding in report.findings if finding.status != "pass"]
        result["findings"] += [{"stage": report.stage, "point": report.point, **finding} for finding in seen]
        if verbose or report.point != "running" or report.verdict != "pass":
            console.print("\n".join(gate_lines(report, verbose=verbose)), soft_wrap=True)

    return announce


def _plan(name: str, recipe: Path, overrides: list[str] | None, workdir: str | None, as_json: bool) -> None:
    with _command(name, as_json) as result:
        from rich.console import Console

        from draftproof.pipeline import choose_device
        from draftproof.plan import make_plan, measure_flops
        from draftproof.recipe import load
        from draftproof.summary import plan_document, print_plan
        from draftproof.target.target import open_target

        chosen = load(recipe, overrides or (), run_dir=workdir).recipe
        planned = make_plan(chosen, open_target(chosen.target), Path(chosen.run.dir), flops=measure_flops(choose_device(chosen)))
        result.update(plan_document(planned))
        if not as_json:
            print_plan(planned, Console(highlight=False))


def _set_up_logging(quiet: bool, verbose: bool) -> None:
    level = logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    logging.getLogger("draftproof").setLevel(level)
