"""The commands that look at machines and give their memory back; both are of use without a recipe."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftproof.command import AsJson, Overrides, Verbose, command

if TYPE_CHECKING:
    from draftproof.errors import DraftproofError
    from draftproof.machine.apply import Applied
    from draftproof.machine.remote import Reach

GpuList = Annotated[str | None, typer.Option("--gpus", help="GPUs by number: 0-3,6. All, if not given.")]
Hosts = Annotated[
    list[str] | None, typer.Option("--host", help="A host as ssh knows it; may be given several times. This machine, if not given.")
]
Sudo = Annotated[bool, typer.Option("--sudo", help="Look through `sudo -n`, which sees everybody's processes.")]
RemotePython = Annotated[str, typer.Option("--python", help="Python of the remote hosts, 3.9 or newer.")]
Allowance = Annotated[int, typer.Option("--allow-mib", min=0, help="Memory that may be in use on a free GPU.")]


def check(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe: check what it needs.", metavar="[RECIPE]")] = None,
    overrides: Overrides = None,
    stage: Annotated[str, typer.Option("--stage", help="With a recipe: the stage that is about to run.")] = "extract",
    host: Hosts = None,
    gpus: GpuList = None,
    path: Annotated[list[Path] | None, typer.Option("--path", help="A folder that must have room.")] = None,
    port: Annotated[list[int] | None, typer.Option("--port", min=1, max=65535, help="A TCP port that must be free.")] = None,
    allow_mib: Allowance = 0,
    deep: Annotated[bool, typer.Option("--deep", help="Also copy between each pair of GPUs, and compare.")] = False,
    sudo: Sudo = False,
    python: RemotePython = "python3",
    again: Annotated[
        float | None, typer.Option("--watch", min=0.2, max=3600, help="Look again every so many seconds, until Ctrl-C.")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of what --json prints, and look at nothing.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """The quiet checkpoint: who holds the GPUs, and is the machine fit?"""
    with command("check", as_json) as result:
        from rich.console import Console

        from draftproof.check import CheckDocument, check, check_recipe, parse_gpus
        from draftproof.errors import UsageError
        from draftproof.machine.look import DiskNeed, Needs
        from draftproof.screen import print_check

        if schema:
            result.update(schema=CheckDocument.model_json_schema())
            result.say(json.dumps(result["schema"], indent=1))
            return
        if again is not None and as_json:
            raise UsageError("--watch is for people, --json prints one document.", where="--watch", remedy="Leave one of them out.")
        reaches = _reaches(host, python, sudo)
        folders = path or ([Path.cwd()] if not host and recipe is None else [])  # a recipe has a folder of its own
        needs = Needs(parse_gpus(gpus), allow_mib, disks=tuple(map(DiskNeed, folders)), ports=tuple(port or ()))
        loaded = None
        if recipe is not None:
            from draftproof.recipe import load  # for which a look at the machine alone should not wait

            loaded = load(recipe, overrides or ())
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


def reclaim(
    host: Hosts = None,
    gpus: GpuList = None,
    unit: Annotated[
        list[str] | None, typer.Option("--unit", help="Stop this service or container: vllm.service, user:NAME, docker:ID.")
    ] = None,
    cgroup: Annotated[list[str] | None, typer.Option("--cgroup", help="Only processes of this control group.")] = None,
    session: Annotated[list[int] | None, typer.Option("--session", min=1, help="Only processes of this session id.")] = None,
    tree: Annotated[list[int] | None, typer.Option("--tree", min=1, help="Only this process and all below it.")] = None,
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
    with command("reclaim", as_json) as result:
        from rich.console import Console

        from draftproof.check import parse_gpus
        from draftproof.errors import UsageError
        from draftproof.machine.apply import applied_document, apply_all, enforce
        from draftproof.machine.reclaim import Selection, default_path, draw, load_plan, save
        from draftproof.screen import print_applied, print_plan

        console = Console(highlight=False, quiet=as_json)
        if apply is not None:
            if host or gpus or unit or cgroup or session or tree or any_user:
                raise UsageError(
                    "A plan names its hosts and processes itself; --apply takes no choice beside it.",
                    where=str(apply),
                    remedy="To choose others, make another plan, without --apply.",
                )
            told: list[Applied | DraftproofError] = []

            def announce(one: Applied | DraftproofError) -> None:
                told.append(one)
                print_applied(one, console)
                result.update(applied_document(told))

            done = apply_all(load_plan(apply), python=python, sudo=sudo, allowance_mib=allow_mib, announce=announce)
            enforce(done)
            return
        selection = Selection(
            parse_gpus(gpus), tuple(unit or ()), tuple(cgroup or ()), tuple(session or ()), tuple(tree or ()), any_user, grace
        )
        partial: list[str] = []
        plan = draw(_reaches(host, python, sudo), selection, tell=partial.append)
        for sentence in partial:
            console.print(sentence, soft_wrap=True, markup=False)
        where = out or default_path(plan)
        save(plan, where)
        for one in plan.hosts:
            print_plan(one, console)
        result.update(
            plan=plan.hosts[0].model_dump(mode="json"), plans=plan.model_dump(mode="json")["hosts"], path=str(where), partial=partial
        )
        if any(not one.empty for one in plan.hosts):
            console.print(f"Nothing was done. To carry it out: draftproof reclaim --apply {where}", soft_wrap=True)


def _reaches(hosts: list[str] | None, python: str, sudo: bool) -> list[Reach]:
    from draftproof.machine.remote import Reach

    return [Reach(name, python=python, sudo=sudo) for name in hosts or ()] or [Reach(python=python, sudo=sudo)]
