"""The checks of a machine, as lists: for `draftproof check`, and for the gates.

A check of a machine is a function `(look: Look) -> Finding`, named like every check; `on_hosts` makes a gate's check of
it, over this machine and the recipe's `machine.hosts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, wraps

from draftproof.gate import gpu, host
from draftproof.gate.finding import SEVERITY, Finding, unsure
from draftproof.gate.gate import Check, GateContext, answer, check_name
from draftproof.machine.look import Look

MachineCheck = Callable[[Look], Finding]

FREE: tuple[MachineCheck, ...] = (host.host_reached, gpu.gpu_count, gpu.gpu_holders, gpu.gpu_memory, host.host_memory)
"""Asked again at the moment of spending."""
MACHINE: tuple[MachineCheck, ...] = (
    host.host_reached,
    gpu.gpu_count,
    gpu.gpu_model,
    gpu.gpu_holders,
    gpu.gpu_memory,
    gpu.gpu_health,
    gpu.gpu_links,
    gpu.gpu_driver,
    host.host_memory,
    host.host_shm,
    host.host_disk,
    host.host_inodes,
    host.host_limits,
    host.host_ports,
    host.host_clock,
)


def judge(look: Look, checks: Sequence[MachineCheck] = MACHINE) -> list[Finding]:
    """Every finding about one machine; of one that could not be looked at, `host.reached` alone."""
    asked = checks if look.snapshot is not None else (host.host_reached,)
    return [replace(answer(check, look), host=look.reach.name) for check in asked]


@cache
def on_hosts(check: MachineCheck) -> Check:
    """The same check as a gate's, over all hosts of the recipe: the worst answer, with the hosts that gave it."""

    @wraps(check)
    def over_hosts(context: GateContext) -> Finding:
        findings = [
            replace(answer(check, look), host=look.reach.name)
            for look in context.looks
            if look.snapshot is not None or check is host.host_reached
        ]
        if not findings:
            return unsure(check_name(check), "No host could be looked at.", "See host.reached.")
        worst = max(findings, key=lambda finding: SEVERITY[finding.status])
        if len(context.looks) == 1:
            return worst
        same = [finding for finding in findings if finding.status == worst.status]
        told = " ".join(f"{finding.host}: {finding.evidence}" for finding in same)
        return replace(worst, evidence=told, host=", ".join(str(finding.host) for finding in same))

    return over_hosts
