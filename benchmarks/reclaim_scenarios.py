"""Who is named, who ends and what comes back: `draftproof reclaim`, `fuser -k` and killing by name over the same scenes.

    python benchmarks/reclaim_scenarios.py [--out FILE.json]

The scenes are those of the tests (`tests/helpers/scenarios.py`): real processes over a fake NVML, as root. In each a crowd
stands by that must survive, and each has a clean twin, against which `check` must have nothing to say. Exits with 1 unless
draftproof is right in all of them and harms nobody; with 2, and why, where the scenes cannot be played.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from reclaiming import TOOLS, Row, false_alarms, title
from scenarios import SCENARIOS, play_anywhere


def main() -> int:
    """Play all scenes with all tools, and their clean twins."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    missing = [program for program in ("cc", "fuser", "ssh", "unshare") if shutil.which(program) is None]
    if os.getuid() != 0 or missing:
        print(f"The scenes need {', '.join(missing) or 'root: other users and control groups'}.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # another user's process starts there
        rows = {tool: [play_anywhere(build, act, folder) for build in SCENARIOS] for tool, act in TOOLS.items()}
        alarms = {title(build): false_alarms(build, folder) for build in SCENARIOS}
    console = Console(width=170)
    console.print(table(rows))
    for row in rows["draftproof"]:
        for fault in row.faults:
            console.print(f"{row.scenario}: {fault}", soft_wrap=True, markup=False)
    told = [f"{twin}: {alarm}" for twin, all_of_it in alarms.items() for alarm in all_of_it]
    console.print(f"draftproof, look to steady memory: median {statistics.median(row.seconds for row in rows['draftproof']):.2f} s a scene")
    console.print(f"{len(alarms)} clean twins, {sum(map(bool, alarms.values()))} false alarms")
    for alarm in told:
        console.print(alarm, soft_wrap=True, markup=False)
    if options.out is not None:
        tools = {tool: [asdict(row) for row in own] for tool, own in rows.items()}
        options.out.write_text(json.dumps({"tools": tools, "false_alarms": alarms}, indent=1))
    return int(bool(told) or any(row.faults for row in rows["draftproof"]))


def table(rows: dict[str, list[Row]]) -> Table:
    """A line for each scene, and the sums. For each tool: whether the memory came back, and how many it harmed."""
    own = rows["draftproof"]
    drawn = Table(
        "scene", "named", "s", *rows, title="back: the memory is; said: what holds it is, as it must be; harmed: ended, or left stopped"
    )
    for number, row in enumerate(own):
        cells = [_cell(all_of_it[number]) for all_of_it in rows.values()]
        last = number + 1 == len(own)
        drawn.add_row(row.scenario, "right" if row.named_right else "WRONG", f"{row.seconds:.2f}", *cells, end_section=last)
    good = [f"{sum(row.told or row.back for row in all_of_it)}/{len(all_of_it)}" for all_of_it in rows.values()]
    drawn.add_row("back, or said", f"{sum(bool(row.named_right) for row in own)}/{len(own)}", "", *good)
    drawn.add_row("harmed", "", "", *(str(sum(len(row.wrong) for row in all_of_it)) for all_of_it in rows.values()))
    drawn.add_row("seconds", "", "", *(f"{sum(row.seconds for row in all_of_it):.1f}" for all_of_it in rows.values()))
    return drawn


def _cell(row: Row) -> str:
    harmed = f", {len(row.wrong)} harmed" if row.wrong else ""
    return ("said" if row.told else "back" if row.back else "NOT BACK") + harmed


if __name__ == "__main__":
    raise SystemExit(main())
