"""vocab: which target tokens the draft can propose, from the supervised tokens of the training rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftproof.artifact import Manifest, hash_bytes, write_json
from draftproof.recipe import VocabSettings
from draftproof.records.mapping import save_mapping
from draftproof.records.rows import read_rows
from draftproof.stage import Outcome, StageTask
from draftproof.target.tokenizer import load_tokenizer, named_ids, stop_ids
from draftproof.vocab.build import choose, count_tokens, coverage

if TYPE_CHECKING:
    from draftproof.target.target import Target

VERSION, NEEDS = 1, ("prepare",)

COVERAGE = "coverage.json"


def run(task: StageTask, settings: VocabSettings, target: Target) -> Outcome:
    """Write `mapping.safetensors` and `coverage.json`. Raises UsageError when vocab.size cannot be met."""
    rows = read_rows(task.inputs["prepare"])
    vocab_size = target.config.vocab_size
    tokenizer = load_tokenizer(target)
    train = count_tokens(rows.supervised_ids("train"), vocab_size)
    validation = count_tokens(rows.supervised_ids("validation"), vocab_size)
    named, stops = named_ids(tokenizer, vocab_size), stop_ids(tokenizer, target)
    size = settings.at_most(int(named.sum())) if settings.size == "auto" else settings.size
    chosen = choose(train, size, named=named, always=stops)
    mapping = chosen.mapping
    save_mapping(task.out, mapping)
    counts = {
        "size": mapping.d2t.size,
        "target_size": vocab_size,
        "coverage": {"train": coverage(train, mapping), "validation": coverage(validation, mapping)},
        "filled": chosen.filled,
    }
    write_json(task.out / COVERAGE, counts)
    return Outcome(counts=counts, contents={"mapping": hash_bytes(mapping.d2t.tobytes(), mapping.t2d.tobytes())})


def ingredients(settings: VocabSettings, target: Target, inputs: Mapping[str, Manifest]) -> dict[str, Any]:
    """What the mapping depends on."""
    return {"size": settings.size, "rows": inputs["prepare"].contents["rows"], "target": target.fingerprint}
