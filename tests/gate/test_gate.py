"""Verdicts, waivers, checks that break, and the catalog."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml
from tests.helpers.extraction import gate_context

from draftproof.errors import DataError, Refused, Undecided
from draftproof.gate import gate
from draftproof.gate.catalog import CHECKS
from draftproof.gate.finding import Finding, Status, failed, passed, unsure, warned
from draftproof.gate.gate import Check, GateContext, GateReport, check_name, enforce, run_gate
from draftproof.pipeline import STAGE_NAMES
from draftproof.recipe import GateSettings
from draftproof.stage import Point

ALL = [check for checks in CHECKS.values() for check in checks]


def disk_good(context: GateContext) -> Finding:
    return passed("disk.good", f"{context.stage} may go on")


def disk_so_so(context: GateContext) -> Finding:
    return warned("disk.so_so", "it is slow", "wait")


def disk_bad(context: GateContext) -> Finding:
    return failed("disk.bad", "it is full", "free some")


def disk_unclear(context: GateContext) -> Finding:
    return unsure("disk.unclear", "it does not answer", "ask again")


def disk_broken(context: GateContext) -> Finding:
    raise ZeroDivisionError("division by zero")


def disk_damaged(context: GateContext) -> Finding:
    raise DataError("The file ends early.", where="a.bin:7", remedy="Fetch it again.")


def _run(tmp_path: Path, *checks: Check, waive: dict[str, str] | None = None) -> GateReport:
    context = gate_context(None, None, out=tmp_path)
    recipe = context.recipe.model_copy(update={"gates": GateSettings(waive=waive or {})})
    return run_gate(gate.replace(context, recipe=recipe), checks, protects="18 min on 8 GPUs")


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        ((), "pass"),
        ((disk_good,), "pass"),
        ((disk_good, disk_so_so), "warn"),
        ((disk_unclear, disk_so_so, disk_good), "unknown"),
        ((disk_bad, disk_unclear, disk_so_so, disk_good), "fail"),
        ((disk_good, disk_broken), "unknown"),
        ((disk_broken, disk_bad), "fail"),
    ],
)
def test_the_verdict_is_the_worst_finding(tmp_path: Path, checks: tuple[Check, ...], verdict: Status) -> None:
    assert _run(tmp_path, *checks).verdict == verdict
    assert _run(tmp_path, *reversed(checks)).verdict == verdict


def test_every_check_runs_also_after_a_failure(tmp_path: Path) -> None:
    report = _run(tmp_path, disk_bad, disk_broken, disk_good)
    assert [(finding.check, finding.status) for finding in report.findings] == [
        ("disk.bad", "fail"),
        ("disk.broken", "unknown"),
        ("disk.good", "pass"),
    ]
    assert all(0 <= finding.seconds < 1 for finding in report.findings)
    assert report.protects == "18 min on 8 GPUs"


def test_a_check_that_breaks_is_unknown_and_says_how(tmp_path: Path) -> None:
    (finding,) = _run(tmp_path, disk_broken).findings
    assert (finding.check, finding.status) == ("disk.broken", "unknown")
    assert finding.evidence == "The check itself broke: ZeroDivisionError: division by zero"


def test_what_a_check_finds_damaged_is_a_failure_with_its_place(tmp_path: Path) -> None:
    (finding,) = _run(tmp_path, disk_damaged).findings
    assert (finding.status, finding.evidence, finding.remedy) == ("fail", "The file ends early. [a.bin:7]", "Fetch it again.")


def test_a_waiver_overrules_one_finding_and_stays_visible(tmp_path: Path) -> None:
    report = _run(tmp_path, disk_bad, disk_so_so, waive={"disk.bad": "the quota is larger"})
    assert report.verdict == "warn"
    assert (report.findings[0].status, report.findings[0].waived) == ("fail", "the quota is larger")
    enforce(report)
    assert _run(tmp_path, disk_bad, disk_unclear, waive={"disk.bad": "x"}).verdict == "unknown"
    assert _run(tmp_path, disk_broken, waive={"disk.broken": "known"}).verdict == "pass"
    assert _run(tmp_path, disk_bad, waive={"disk": "a subject is no check", "bad": "nor is this"}).verdict == "fail"
    assert _run(tmp_path, disk_good, waive={"disk.good": "x"}).findings[0].waived is None


@pytest.mark.parametrize("checks", [(), (disk_good,), (disk_so_so,)])
def test_pass_and_warn_go_on(tmp_path: Path, checks: tuple[Check, ...]) -> None:
    enforce(_run(tmp_path, *checks))


def test_a_failure_is_refused_with_exit_code_3(tmp_path: Path) -> None:
    with pytest.raises(Refused) as error:
        enforce(_run(tmp_path, disk_unclear, disk_bad, disk_damaged))
    assert (error.value.exit_code, error.value.status) == (3, "refused")
    assert error.value.what == "The gate before extract said no: disk.bad: it is full (1 more in the gate's report)"
    assert error.value.remedy.startswith("free some")


def test_what_cannot_be_told_stops_with_exit_code_4(tmp_path: Path) -> None:
    with pytest.raises(Undecided) as error:
        enforce(_run(tmp_path, disk_good, disk_unclear))
    assert (error.value.exit_code, error.value.status) == (4, "unknown")
    assert error.value.what == "The gate before extract could not tell: disk.unclear: it does not answer"


def test_the_remedy_shows_how_to_overrule(tmp_path: Path) -> None:
    """And what it shows is what the recipe takes."""
    with pytest.raises(Refused) as error:
        enforce(_run(tmp_path, disk_bad))
    shown = error.value.remedy.partition("gates: ")[2].rstrip(".")
    waive = GateSettings.model_validate(yaml.safe_load(shown)).waive
    assert waive == {"disk.bad": "REASON"}
    enforce(_run(tmp_path, disk_bad, waive=waive))


@pytest.mark.parametrize("check", sorted(set(ALL), key=check_name), ids=check_name)
def test_every_check_of_the_catalog_is_named_after_its_subject(tmp_path: Path, check: Check) -> None:
    name = check_name(check)
    assert re.fullmatch(r"[a-z]+\.[a-z_]+[a-z]", name)
    assert check.__module__ == f"draftproof.gate.{name.partition('.')[0]}"
    assert (check.__doc__ or "").strip(), "no docstring"
    # Without a target, artifacts, plan and evidence: whatever it says, it says it under its own name.
    (finding,) = run_gate(gate.replace(gate_context(None, None, out=tmp_path), plan=None), [check], protects="").findings
    assert finding.check == name


def test_names_and_places_of_the_catalog_are_unique() -> None:
    assert len({check_name(check) for check in ALL}) == len(set(ALL))
    for (stage, point), checks in CHECKS.items():
        assert stage in STAGE_NAMES
        assert point in get_args(Point)
        assert len(set(checks)) == len(checks), f"{stage}, {point}"
    assert {stage for stage, point in CHECKS if point == "before"} == set(STAGE_NAMES), "a gate before every stage"


def test_no_check_of_the_gates_files_is_forgotten() -> None:
    from draftproof.gate import data, parity, storage, target

    for module in (data, parity, storage, target):
        subject = module.__name__.rpartition(".")[2]
        own = {name for name, value in vars(module).items() if callable(value) and name.startswith(f"{subject}_")}
        assert own == {check.__name__ for check in ALL if check.__module__ == module.__name__}


def test_the_catalog_is_read_without_torch() -> None:
    code = "import draftproof.gate.catalog, sys, json; print(json.dumps('torch' in sys.modules))"
    assert json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) is False
