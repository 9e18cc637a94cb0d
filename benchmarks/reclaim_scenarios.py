"""Who is named, who ends and what comes back: `draftproof reclaim`, `fuser -k` and killing by name over the same scenes.

    python benchmarks/reclaim_scenarios.py [--clean 20] [--out FILE.json]

The scenes are those of the tests (`tests/helpers/scenarios.py`): real processes over a fake NVML, as root. In each a crowd
stands by that must survive. Exits with 1 unless draftproof is right in all, ends nobody wrongly, and raises no alarm where
only the crowd is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from scenarios import SCENARIOS, Row, by_draftproof, by_fuser, by_name, false_alarms, play

TOOLS = {"draftproof": by_draftproof, "fuser -k": by_fuser, "by name": by_name}


def main() -> int:
    """Play all scenes with all tools, and the clean twins."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clean", type=int, default=20, help="looks at the crowd alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows: dict[str, list[Row]] = {name: [play(build, tool, Path(folder)) for build in SCENARIOS] for name, tool in TOOLS.items()}
        alarms = [alarm for _ in range(options.clean) for alarm in false_alarms(Path(folder))]
    table = Table("scene", "named", *(f"{tool}: {what}" for tool in TOOLS for what in ("back", "wrong kills", "s")))
    for number, build in enumerate(SCENARIOS):
        cells = []
        for tool in TOOLS:
            row = rows[tool][number]
            cells += ["yes" if row.freed else "NO", str(row.wrong or ""), f"{row.seconds:.1f}"]
        table.add_row(build.__name__.replace("_", " "), "yes" if rows["draftproof"][number].named_right else "NO", *cells)
    totals = []
    for own in rows.values():
        totals += [
            f"{sum(row.freed for row in own)}/{len(own)}",
            str(sum(row.wrong for row in own)),
            f"{sum(row.seconds for row in own):.0f}",
        ]
    table.add_row("all", f"{sum(bool(row.named_right) for row in rows['draftproof'])}/{len(SCENARIOS)}", *totals, style="bold")
    console = Console(width=180)
    console.print(table)
    console.print(
        f"back: the memory is, or (draftproof) what holds it is said; {len(alarms)} alarms in {options.clean} looks at the crowd alone"
    )
    for alarm in alarms:
        console.print(alarm)
    if options.out is not None:
        options.out.write_text(json.dumps({tool: [asdict(row) for row in own] for tool, own in rows.items()}, indent=1))
    return 0 if all(row.right for row in rows["draftproof"]) and not alarms else 1


if __name__ == "__main__":
    raise SystemExit(main())
