"""prepare: conversations to rows, each conversation kept, changed or dropped with a reason.

Two decisions worth knowing:

- *Exact duplicates* (same messages) are dropped after the first: kept twice they would weigh double, and one of them
  could be held out while the other is trained on.
- *The split* goes by the prompt, that is all that stands before the first answer: conversations with the same prompt
  lie in the same split. The held-out share is the prompts with the smallest hashes, so it does not depend on order,
  and it is never empty. With a validation file, training conversations whose prompt is in that file are dropped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof.artifact import Manifest, hash_file, write_atomic, write_json
from draftproof.errors import DataError, UsageError
from draftproof.prepare.formats import Dropped, read_conversations
from draftproof.prepare.template import Rendered, Renderer
from draftproof.recipe import DataSettings
from draftproof.records.conversations import CONVERSATIONS, Conversation
from draftproof.records.jsonl import BadLines
from draftproof.records.rows import Row, Split, make_row_key, write_rows
from draftproof.stage import Outcome, StageTask
from draftproof.target.tokenizer import decode, load_tokenizer, stop_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from draftproof.target.target import Target

VERSION, NEEDS = 1, ("regenerate",)
"""`regenerate` is there only when the recipe has that section; else the conversations are `data.train`."""

DROPPED, REPORT = "dropped.jsonl", "report.json"

_TOGETHER = 512  # conversations whose texts are encoded in one call
_SAMPLE = 5  # rows, and supervised tokens of each, shown in the report


def run(task: StageTask, settings: DataSettings, target: Target) -> Outcome:
    """Write `rows/`, `dropped.jsonl` and `report.json`. Raises DataError when too few conversations are kept."""
    tokenizer = load_tokenizer(target)
    longest = min(settings.max_length, target.config.max_positions)
    renderer = Renderer(tokenizer, stop_ids(tokenizer, target), longest, target.config.vocab_size)
    sources = _sources(settings, task.inputs)
    bad = BadLines(settings.skip_bad_lines)
    tally = _Tally(_held_out_prompts(settings, bad))
    with task.progress.meter("prepare", total=_count_lines(sources), unit="conversations") as meter:
        for chunk in _chunks(_read(sources, settings, bad)):
            fresh = [item for item in chunk if tally.admit(*item)]
            conversations = [conversation for conversation, _ in fresh if isinstance(conversation, Conversation)]
            for rendered, (_, split) in zip(renderer.render(conversations), fresh, strict=True):
                tally.settle(rendered, split)
            meter.advance(len(chunk))
    _write_dropped(task.out / DROPPED, tally.dropped)
    _check_kept(tally, settings.minimum_kept, task.out)
    rows = _with_splits(tally.rows, settings.validation)
    hashes = write_rows(task.out, rows)
    counts = _counts(tally, rows)
    write_json(task.out / REPORT, {**counts, "sample": _sample(rows, tokenizer)})
    return Outcome(counts=counts, contents=hashes)


def ingredients(settings: DataSettings, target: Target, inputs: Mapping[str, Manifest]) -> dict[str, Any]:
    """What the rows depend on: the contents of the data, never its time stamp. Raises UsageError when a file is missing."""
    held_out = settings.validation
    return {
        "train": inputs["regenerate"].contents["conversations"] if "regenerate" in inputs else _hashes(settings.train),
        "validation": _hashes((held_out,)) if isinstance(held_out, str) else held_out,
        "max_length": settings.max_length,
        "roles": dict(settings.roles),
        "target": target.fingerprint,
    }


@dataclass
class _Tally:
    """Everything collected and counted on the way: in = kept + changed + dropped."""

    held_out: frozenset[str]
    """Prompt keys of the validation file; empty when the split is a share."""
    rows: list[tuple[Row, str]] = field(default_factory=list)
    """Rows with their prompt key, in order; their split is final only with a validation file."""
    dropped: list[Dropped] = field(default_factory=list)
    total: int = 0
    kept: int = 0
    changed: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    """Of conversations that gave rows; `missing` where the source does not say."""
    given_ids: int = 0
    """Conversations whose answer came with the ids that the target produced."""
    retokenised: int = 0
    """Those of them whose text would encode to other ids."""
    seen: dict[str, str] = field(default_factory=dict)
    """Conversation key to the place of its first appearance."""

    def admit(self, item: Conversation | Dropped, split: Split) -> bool:
        """Count a line; True when it is a conversation that has not been there yet."""
        self.total += 1
        if isinstance(item, Dropped):
            self.dropped.append(item)
            return False
        if split == "train" and item.prompt_key in self.held_out:
            self.drop(item, "its prompt stands in the validation file")
        elif item.key in self.seen:
            self.drop(item, "exact duplicate", f" of {self.seen[item.key]}")
        else:
            self.seen[item.key] = item.source
            return True
        return False

    def drop(self, item: Conversation, reason: str, detail: str = "") -> None:
        self.dropped.append(Dropped(item.source, item.id, reason, detail))

    def settle(self, rendered: Rendered, split: Split) -> None:
        """Book a rendered conversation under its fate."""
        conversation = rendered.conversation
        if rendered.dropped is not None:
            self.drop(conversation, rendered.dropped)
            return
        if rendered.changes:
            self.changed["; ".join(rendered.changes)] += 1
        else:
            self.kept += 1
        self.finish_reasons[conversation.finish_reason or "missing"] += 1
        self.given_ids += rendered.given_ids
        self.retokenised += rendered.retokenised
        key = conversation.key
        for masked in rendered.rows:
            row = Row(
                row_key=make_row_key(masked.ids, key, masked.message),
                token_ids=masked.ids,
                supervised=masked.supervised,
                turn_start=masked.turn_start,
                conversation_key=key,
                split=split,
                category=conversation.category,
                finish_reason=conversation.finish_reason,
                source=conversation.source,
            )
            self.rows.append((row, conversation.prompt_key))


def _sources(settings: DataSettings, inputs: Mapping[str, Path]) -> list[tuple[Path, Split]]:
    train = [inputs["regenerate"] / CONVERSATIONS] if "regenerate" in inputs else [Path(path) for path in settings.train]
    found: list[tuple[Path, Split]] = [(path, "train") for path in train]
    return found + ([(Path(settings.validation), "validation")] if isinstance(settings.validation, str) else [])


def _read(sources: Iterable[tuple[Path, Split]], settings: DataSettings, bad: BadLines) -> Iterator[tuple[Conversation | Dropped, Split]]:
    for path, split in sources:
        for item in read_conversations([path], settings.roles, bad):
            yield item, split


def _held_out_prompts(settings: DataSettings, bad: BadLines) -> frozenset[str]:
    """Prompt keys of the validation file. It is read again for its rows, so its damaged lines are not counted here."""
    if not isinstance(settings.validation, str):
        return frozenset()
    items = read_conversations([Path(settings.validation)], settings.roles, BadLines(bad.allowed))
    return frozenset(item.prompt_key for item in items if isinstance(item, Conversation))


def _chunks(items: Iterator[tuple[Conversation | Dropped, Split]]) -> Iterator[list[tuple[Conversation | Dropped, Split]]]:
    while chunk := list(islice(items, _TOGETHER)):
        yield chunk


def _count_lines(sources: Iterable[tuple[Path, Split]]) -> int:
    """Lines of the plain files, for the progress bar; a compressed one counts as one line."""
    total = 0
    for path, _ in sources:
        if path.suffix == ".gz" or not path.is_file():
            total += 1
            continue
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                total += block.count(b"\n")
    return total


def _write_dropped(path: Path, dropped: Iterable[Dropped]) -> None:
    lines = (json.dumps({"source": d.source, "id": d.id, "reason": d.reason + d.detail}, ensure_ascii=False) for d in dropped)
    write_atomic(path, "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))


def _check_kept(tally: _Tally, minimum: float, out: Path) -> None:
    """Raise DataError when so few conversations give rows that something must be wrong with all of them."""
    used = tally.total - len(tally.dropped)
    if used and used >= minimum * tally.total:
        return
    reasons = Counter(item.reason for item in tally.dropped).most_common(5)
    shown = "; ".join(f"{count} x {reason}" for reason, count in reasons)
    raise DataError(
        f"Only {used} of {tally.total} conversations are kept, data.minimum_kept asks for {minimum:.0%}. Dropped: {shown}.",
        where=str(out / DROPPED),
        remedy="Mend the commonest reason (the file lists every line), or lower data.minimum_kept.",
    )


def _with_splits(rows: list[tuple[Row, str]], validation: float | str) -> list[Row]:
    """The rows with their final split. A share holds out the prompts with the smallest hashes, at least one."""
    if isinstance(validation, str):
        return [row for row, _ in rows]
    prompts = sorted({key for _, key in rows})
    if len(prompts) < 2:
        raise DataError(
            "All conversations have the same prompt, so none can be held out.",
            remedy="Add conversations, or give a file as data.validation.",
        )
    count = min(max(1, round(validation * len(prompts))), len(prompts) - 1)
    held_out = set(prompts[:count])
    return [replace(row, split="validation") if key in held_out else row for row, key in rows]


def _counts(tally: _Tally, rows: list[Row]) -> dict[str, Any]:
    dropped = Counter(item.reason for item in tally.dropped)
    return {
        "conversations": {"in": tally.total, "kept": tally.kept, "changed": dict(tally.changed), "dropped": dict(dropped)},
        "rows_out": len(rows),
        "tokens": sum(len(row.token_ids) for row in rows),
        "supervised_tokens": sum(int(row.supervised.sum()) for row in rows),
        "splits": dict(Counter(row.split for row in rows)),
        "categories": dict(Counter(row.category for row in rows)),
        "finish_reasons": dict(tally.finish_reasons),
        "given_token_ids": tally.given_ids,
        "retokenised_differently": tally.retokenised,
    }


def _sample(rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The first supervised tokens of some rows, evenly spread: where people look first when a mask is wrong."""
    sample = []
    for row in rows[:: max(1, len(rows) // _SAMPLE)][:_SAMPLE]:
        start = row.turn_start[0]
        before, first = row.token_ids[max(0, start - _SAMPLE) : start], row.token_ids[start : start + _SAMPLE]
        shown = {"before": before.tolist(), "first_supervised": first.tolist()}
        text = {f"{name}_text": [decode(tokenizer, [token]) for token in ids] for name, ids in shown.items()}
        sample.append({"source": row.source, **shown, **text})
    return sample


def _hashes(paths: Iterable[str]) -> list[list[str]]:
    """(name, content hash) of each file. The name counts, since rows say where they come from; the folder does not."""
    found = []
    for path in map(Path, paths):
        if not path.is_file():
            raise UsageError("There is no such file.", where=str(path), remedy="Mend data.train or data.validation in the recipe.")
        found.append([path.name, hash_file(path)])
    return found
