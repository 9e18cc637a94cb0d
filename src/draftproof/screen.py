"""What machines, reclaim plans and their outcomes look like on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftproof.errors import DraftproofError, printable
from draftproof.machine.snapshot import MIB
from draftproof.summary import COLOURS

if TYPE_CHECKING:  # a look at a machine should not wait for what only plans need
    from draftproof.check import Checked
    from draftproof.machine.apply import Applied
    from draftproof.machine.look import Look
    from draftproof.machine.reclaim import HostPlan


def print_check(checked: Checked, console: Console, *, verbose: bool = False) -> None:
    """The GPUs and who holds them, what is wrong, and the verdict last."""
    for look in checked.looks:
        _print_host(look, console)
    for finding in checked.findings:
        if verbose or finding.status != "pass":
            host = f"[dim]{_clean(finding.host)}[/] " if finding.host and len(checked.looks) > 1 else ""
            colour = COLOURS[finding.status]
            console.print(f"[{colour}]{finding.status.upper():>7}[/]  {host}{finding.check}: {_clean(finding.said)}", soft_wrap=True)
            if finding.remedy:
                console.print(f"         -> {_clean(finding.remedy)}", soft_wrap=True)
    colour = COLOURS[checked.verdict]
    console.print(
        f"[{colour}]{checked.verdict.upper():>7}[/]  {len(checked.findings)} checks; protects {_clean(checked.protects)}", soft_wrap=True
    )


def print_plan(plan: HostPlan, console: Console) -> None:
    """Who would be stopped on a host, and who not."""
    place = _clean(plan.address or "this machine")
    if plan.empty:
        console.print(f"{place}: nothing to stop.")
    for unit in plan.units:
        how = "systemctl stop" if unit.scope == "system" else "systemctl --user stop" if unit.scope == "user" else f"{unit.scope} stop"
        console.print(f"{place}: {how} {_clean(unit.name)}  [dim]({_clean(unit.why)})[/]", soft_wrap=True)
    if plan.targets:
        table = Table(
            box=None, pad_edge=False, title=f"{place}: TERM, and KILL after {plan.deadline_s:.0f} s", title_justify="left", title_style=""
        )
        for column in ("pid", "user", "GPU MiB", "what"):
            table.add_column(column, justify="right" if column in ("pid", "GPU MiB") else "left", overflow="fold")
        for target in plan.targets:
            memory = ", ".join(f"{gpu}: {'?' if mib is None else f'{mib:,}'}" for gpu, mib in sorted(target.mib.items()))
            after = f" (if it outlives {target.unit})" if target.unit else ""
            table.add_row(str(target.pid), _clean(target.user), memory, _clean(f"{' '.join(target.command.split())[:80]}{after}"))
        console.print(table)
    for left in plan.left:
        console.print(f"  left: GPU {left.gpu}: {_clean(left.why)}", soft_wrap=True)
        console.print(f"         -> {_clean(left.remedy)}", soft_wrap=True)


def print_applied(applied: Applied | DraftproofError, console: Console) -> None:
    """What a plan came to."""
    if isinstance(applied, DraftproofError):
        console.print(f"[bold red]failed[/]  {_clean(str(applied))}", soft_wrap=True)
        return
    for unit in applied.units:
        console.print(
            f"  {'stopped' if unit.stopped else '[bold red]not stopped[/]'}: {_clean(unit.name)} {_clean(unit.detail)}", soft_wrap=True
        )
    counts: dict[str, int] = {}
    for outcome in applied.outcomes:
        counts[outcome.outcome] = counts.get(outcome.outcome, 0) + 1
        if outcome.outcome not in ("terminated", "killed", "gone"):
            console.print(f"  pid {outcome.pid} {outcome.outcome}: {_clean(outcome.detail)}", soft_wrap=True)
    told = ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing to stop"
    times = f"stopped in {applied.stop_s:.1f} s, steady {applied.verify_s:.1f} s later"
    console.print(f"{_clean(applied.host)}: {told}; {applied.freed_mib:,} MiB came back; {times}", soft_wrap=True)
    for blocker in applied.blockers:
        console.print(f"[bold red]  still held:[/] {_clean(blocker)}", soft_wrap=True)
    if applied.free:
        console.print("[green]  free[/]")


def _print_host(look: Look, console: Console) -> None:
    if look.snapshot is None:
        console.print(f"[bold]{_clean(look.reach.name)}[/]  not reached")
        return
    snapshot = look.snapshot
    models = sorted({gpu.name or "GPU" for gpu in look.gpus})
    what = f"{len(look.gpus)} x {', '.join(models)}  driver {snapshot.nvml.driver or 'not told'}" if look.gpus else "no GPU looked at"
    memory = snapshot.host_memory
    host = f"  host {memory.available / MIB:,.0f} of {memory.total / MIB:,.0f} MiB available" if memory else ""
    console.print(
        f"[bold]{_clean(snapshot.host)}[/]  {_clean(what)}{host}  [dim]as {_clean(snapshot.viewer.user)}, {look.seconds:.2f} s[/]",
        soft_wrap=True,
    )
    if not look.gpus:
        return
    table = Table(box=None, pad_edge=False)
    for column in ("GPU", "used MiB", "free MiB", "held by"):
        table.add_column(column, justify="left" if column == "held by" else "right", overflow="fold")
    for gpu in look.gpus:
        blockers = [holder for holder in look.blockers if holder.gpu == gpu.index]
        rows = [f"[red]{_clean(holder.why)}[/]" for holder in blockers] or [""]
        used = "?" if gpu.memory is None else f"{gpu.memory.used_mib:,}"
        free = "?" if gpu.memory is None else f"{gpu.memory.free_mib:,}"
        for number, row in enumerate(rows):
            table.add_row(*((str(gpu.index), used, free) if number == 0 else ("", "", "")), row)
    console.print(table)


def _clean(text: str) -> str:
    """Fit for a terminal, markup included."""
    return escape(printable(text))
