"""Runs `prepare` on lines or files as the pipeline would, for tests of prepare, of the gate and of users' cases."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.prepare import stage
from draftproof.progress import Progress
from draftproof.recipe import DataSettings, TargetSettings
from draftproof.records.rows import Row, RowTable, read_rows
from draftproof.stage import Outcome, StageTask
from draftproof.target.target import Target, open_target

THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\n' + (m.get('reasoning_content') or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A5's template: a think block only for assistants after the last user turn, printed empty where there is no reasoning."""

THINKING_SUPPLIED = THINKING.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n\n</think>\n\n'")
"""The same, with the empty pair in the generation prompt."""


@dataclass(frozen=True)
class Prepared:
    """What a run of `prepare` left."""

    outcome: Outcome
    rows: RowTable
    dropped: list[dict[str, Any]]
    report: dict[str, Any]

    @property
    def conversations(self) -> dict[str, Any]:
        return self.outcome.counts["conversations"]

    def all(self) -> list[Row]:
        return [self.rows.row(index) for index in range(len(self.rows))]


def make_target(tm_folder: Path, folder: Path, tokenizer: Any) -> Target:
    """TM with another tokenizer."""
    shutil.copytree(tm_folder, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    return open_target(TargetSettings(model=str(folder)))


def task_in(out: Path, inputs: dict[str, Path] | None = None, seed: int = 0) -> StageTask:
    """A stage's task on the CPU whose checkpoints let everything pass."""
    out.mkdir(parents=True, exist_ok=True)
    return StageTask(inputs or {}, out, seed, "cpu", lambda point, evidence: None, Progress(quiet=True))


def write_lines(path: Path, lines: list[Any]) -> Path:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    """A conversation whose turns are user, assistant, user, ... in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)], **more}


FILLER = [chat(f"Say the number {n}.", f"The number is {n}, and the other is {n + 1}.") for n in range(4)]
"""Four good conversations: both splits have something, whatever the case under test does."""


def prepare(target: Target, folder: Path, data: list[Any] | Path, **settings: Any) -> Prepared:
    """Run the stage on lines or on a file; minimum_kept is 0 unless given."""
    path = data if isinstance(data, Path) else write_lines(folder / "data.jsonl", data)
    settings = {"train": (str(path),), "minimum_kept": 0.0, "validation": 0.2, "max_length": 512, **settings}
    out = folder / "out"
    outcome = stage.run(task_in(out), DataSettings(**settings), target)
    dropped = [json.loads(line) for line in (out / "dropped.jsonl").read_text().splitlines()]
    return Prepared(outcome, read_rows(out), dropped, json.loads((out / "report.json").read_text()))


def supervised_texts(tokenizer: Any, row: Row) -> list[str]:
    """The text of each supervised turn, each starting at its `turn_start`."""
    texts = []
    for start in row.turn_start:
        end = start
        while end < len(row.token_ids) and row.supervised[end] and (end == start or end not in row.turn_start):
            end += 1
        texts.append(tokenizer.decode(row.token_ids[start:end].tolist(), skip_special_tokens=False))
    assert sum(len(tokenizer.encode(t, add_special_tokens=False)) for t in texts) <= len(row.token_ids)
    return texts
