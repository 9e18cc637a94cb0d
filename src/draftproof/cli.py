"""The face: commands, arguments, exit codes. No logic.

Every command prints for people on stderr and its result on stdout: a table, or with `--json` one JSON document
`{command, version, status, exit_code, message, ...}`.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftproof import __version__

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


GpuList = Annotated[str | None, typer.Option("--gpus", help="GPUs by number: 0-3,6. All, if not given.")]
Hosts = Annotated[
    list[str] | None, typer.Option("--host", help="A host as ssh knows it; may be given several times. This machine, if not given.")
]
Sudo = Annotated[bool, typer.Option("--sudo", help="Look through `sudo -n`, which sees everybody's processes.")]
RemotePython = Annotated[str, typer.Option("--python", help="Python of the remote hosts, 3.9 or newer.")]
Allowance = Annotated[int, typer.Option("--allow-mib", min=0, help="Memory that may be in use on a free GPU.")]


@app.command()
def check(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe: check what it needs.", metavar="[RECIPE]")] = None,
    overrides: Overrides = None,
    stage: Annotated[str, typer.Option("--stage", help="With a recipe: the stage that is about to run.")] = "extract",
    host: Hosts = None,
    gpus: GpuList = None,
    path: Annotated[list[Path] | None, typer.Option("--path", help="A folder that must have room.")] = None,
    port: Annotated[list[int] | None, typer.Option("--port", help="A TCP port that must be free.")] = None,
    allow_mib: Allowance = 0,
    deep: Annotated[bool, typer.Option("--deep", help="Also copy between each pair of GPUs, and compare.")] = False,
    sudo: Sudo = False,
    python: RemotePython = "python3",
    again: Annotated[float | None, typer.Option("--watch", min=0.2, help="Look again every so many seconds, until Ctrl-C.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of what --json prints, and look at nothing.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """The quiet checkpoint: who holds the GPUs, and is the machine fit?"""
    with _command("check", as_json) as result:
        from rich.console import Console

        from draftproof.check import CheckDocument, check, check_recipe, parse_gpus
        from draftproof.machine.look import DiskNeed, Needs
        from draftproof.screen import print_check

        if schema:
            result.update(schema=CheckDocument.model_json_schema())
            result.say(json.dumps(result["schema"], indent=1))
            return
        reaches = _reaches(host, python, sudo)
        folders = path or ([Path.cwd()] if not host else [])
        needs = Needs(parse_gpus(gpus), allow_mib, disks=tuple(map(DiskNeed, folders)), ports=tuple(port or ()))
        loaded = _loaded(recipe, overrides) if recipe is not None else None
        console = Console(highlight=False, quiet=as_json)
        while True:
            checked = check(reaches, needs, deep=deep) if loaded is None else check_recipe(loaded, stage, reaches, needs, deep=deep)
            if again is not None:
                console.clear()
            print_check(checked, console, verbose=verbose)
            if again is None:
                break
            time.sleep(again)
        result.update(checked.document().model_dump(mode="json"))
        checked.enforce()


@app.command()
def reclaim(
    host: Hosts = None,
    gpus: GpuList = None,
    unit: Annotated[
        list[str] | None, typer.Option("--unit", help="Stop this service or container: vllm.service, user:NAME, docker:ID.")
    ] = None,
    cgroup: Annotated[list[str] | None, typer.Option("--cgroup", help="Only processes of this control group.")] = None,
    session: Annotated[list[int] | None, typer.Option("--session", help="Only processes of this session id.")] = None,
    tree: Annotated[list[int] | None, typer.Option("--tree", help="Only this process and all below it.")] = None,
    any_user: Annotated[bool, typer.Option("--any-user", help="Other users' processes, too (for root).")] = False,
    grace: Annotated[float, typer.Option("--grace", min=0, max=3600, help="Seconds between TERM and KILL.")] = 20.0,
    apply: Annotated[Path | None, typer.Option("--apply", help="Carry out this plan.", metavar="PLAN")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Where to write the plan.")] = None,
    allow_mib: Allowance = 0,
    sudo: Sudo = False,
    python: RemotePython = "python3",
    as_json: AsJson = False,
) -> None:
    """Give memory back: show who holds the GPUs and would be stopped. Nothing is done without --apply."""
    with _command("reclaim", as_json) as result:
        from rich.console import Console

        from draftproof.check import parse_gpus
        from draftproof.machine.apply import applied_document, apply_all, enforce
        from draftproof.machine.reclaim import Selection, default_path, draw, load_plan, save
        from draftproof.screen import print_applied, print_plan

        console = Console(highlight=False, quiet=as_json)
        if apply is not None:
            done = apply_all(load_plan(apply), python=python, sudo=sudo, allowance_mib=allow_mib)
            for applied in done:
                print_applied(applied, console)
            result.update(applied_document(done))
            enforce(done)
            return
        selection = Selection(
            parse_gpus(gpus), tuple(unit or ()), tuple(cgroup or ()), tuple(session or ()), tuple(tree or ()), any_user, grace
        )
        plan = draw(_reaches(host, python, sudo), selection)
        where = out or default_path(plan)
        save(plan, where)
        for one in plan.hosts:
            print_plan(one, console)
        result.update(plan=plan.hosts[0].model_dump(mode="json"), plans=plan.model_dump(mode="json")["hosts"], path=str(where))
        if any(not one.empty for one in plan.hosts):
            console.print(f"Nothing was done. To carry it out: draftproof reclaim --apply {where}", soft_wrap=True)


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
    *,
    apply: Path | None = None,
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
    from draftproof.checkpoint import Freeing
    from draftproof.machine.reclaim import load_plan
    from draftproof.screen import print_applied, print_plan

    def confirm(found: HostPlan) -> bool:
        print_plan(found, console)
        return typer.confirm("Stop them now, and go on?", default=False, err=True)

    return Freeing(
        plans=[] if plan is None else list(load_plan(plan).hosts),
        confirm=confirm if sys.stdin.isatty() and sys.stderr.isatty() else None,
        announce=lambda applied: print_applied(applied, console),
    )


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
        device = choose_device(chosen)
        planned = make_plan(chosen, open_target(chosen.target), Path(chosen.run.dir), flops=measure_flops(device), device=device)
        result.update(plan_document(planned))
        if not as_json:
            print_plan(planned, Console(highlight=False))


def _reaches(hosts: list[str] | None, python: str, sudo: bool) -> list[Any]:
    from draftproof.machine.remote import Reach

    return [Reach(name, python=python, sudo=sudo) for name in hosts or ()] or [Reach(sudo=sudo)]


def _loaded(recipe: Path, overrides: list[str] | None) -> Any:
    from draftproof.recipe import load

    return load(recipe, overrides or ())


def _set_up_logging(quiet: bool, verbose: bool) -> None:
    level = logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    logging.getLogger("draftproof").setLevel(level)
