"""regenerate: the target answers the prompts itself, so that the draft learns what it will have to predict.

Each finished batch is one journal record. A kill loses at most the open batch, and since a batch's prompts and seed
depend on the recipe alone, going on gives the same bytes as never having stopped.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof.artifact import Journal, Manifest, hash_file, write_atomic
from draftproof.errors import DataError, UsageError
from draftproof.recipe import RegenerateSettings
from draftproof.records.conversations import CONVERSATIONS, Unusable
from draftproof.regenerate.generate import Answer, generate
from draftproof.regenerate.prompts import Prompt, Unanswerable, batches, encode_prompt, read_prompts
from draftproof.stage import Outcome, StageTask
from draftproof.target.loaded import load_model
from draftproof.target.tokenizer import decode, load_tokenizer, stop_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from draftproof.target.target import Target

VERSION = 1
NEEDS: tuple[str, ...] = ()

JOURNAL, DROPPED = "journal.jsonl", "dropped.jsonl"


def run(task: StageTask, settings: RegenerateSettings, target: Target) -> Outcome:
    """Write `conversations.jsonl`, in the order of the prompts, and `dropped.jsonl`. Raises DataError when no prompt
    can be answered."""
    tokenizer = load_tokenizer(target)
    stops = stop_ids(tokenizer, target)
    read = read_prompts(Path(settings.prompts))
    prompts, ids, dropped = _encode(read, tokenizer, target.config.max_positions - settings.max_tokens)
    _write_lines(task.out / DROPPED, [{"source": d.source, "id": d.id, "reason": d.reason} for d in dropped])
    if not prompts:
        raise DataError(
            f"None of {len(read)} prompts can be answered. The first: {dropped[0].reason}.",
            where=settings.prompts,
            remedy="Mend the prompts, or lower regenerate.max_tokens.",
        )
    answers, rate = _answer(task, settings, target, ids, stops)
    path = task.out / CONVERSATIONS
    _write_lines(path, [_record(*given, tokenizer, stops, settings) for given in zip(prompts, ids, answers, strict=True)])
    counts = {
        "prompts": {"in": len(read), "answered": len(prompts), "dropped": dict(Counter(d.reason for d in dropped))},
        "finish_reasons": dict(Counter(answer.finish_reason for answer in answers)),
        "tokens": sum(len(answer.token_ids) for answer in answers),
    }
    return Outcome(counts=counts, contents={"conversations": hash_file(path)}, actual=rate)


def ingredients(settings: RegenerateSettings, target: Target, inputs: Mapping[str, Manifest]) -> dict[str, Any]:
    """What the answers depend on. Raises UsageError when the prompts are missing."""
    path = Path(settings.prompts)
    if not path.is_file():
        raise UsageError("There is no such file of prompts.", where=str(path), remedy="Mend regenerate.prompts in the recipe.")
    return {
        "prompts": hash_file(path),
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "batch_size": settings.batch_size,
        "target": target.fingerprint,
        "dtype": target.dtype,
    }


def _encode(
    read: Sequence[Prompt | Unanswerable], tokenizer: PreTrainedTokenizerBase, longest: int
) -> tuple[list[Prompt], list[list[int]], list[Unanswerable]]:
    """Prompts that can be answered, their ids, and the others with their reasons."""
    prompts, ids, dropped = [], [], []
    for item in read:
        if isinstance(item, Unanswerable):
            dropped.append(item)
            continue
        try:
            ids.append(encode_prompt(tokenizer, item, longest))
            prompts.append(item)
        except Unusable as reason:
            dropped.append(Unanswerable(item.source, item.id, str(reason)))
    return prompts, ids, dropped


def _answer(
    task: StageTask, settings: RegenerateSettings, target: Target, ids: Sequence[list[int]], stops: Sequence[int]
) -> tuple[list[Answer], dict[str, float]]:
    """An answer to each prompt, going on from the journal; and the rate of this session."""
    plan = batches([len(prompt) for prompt in ids], settings.batch_size)
    journal = Journal(task.out / JOURNAL)
    done = journal.read()
    answers: dict[int, Answer] = {}
    for record in done:
        answers.update(_from_record(record))
    tokens, seconds = 0, 0.0
    with task.progress.meter("regenerate", total=len(ids), unit="answers") as meter:
        meter.resume(len(answers))
        if len(done) < len(plan):
            task.checkpoint("loading", None)
            model = load_model(target, task.device)
            task.checkpoint("loaded", None)
        for number in range(len(done), len(plan)):
            batch, started = plan[number], time.monotonic()
            made = generate(
                model,
                [ids[index] for index in batch],
                stops=stops,
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                seed=task.seed * 1_000_003 + number,
            )
            journal.append({"batch": number, "answers": [[i, a.finish_reason, a.token_ids] for i, a in zip(batch, made, strict=True)]})
            answers.update(zip(batch, made, strict=True))
            tokens += sum(len(answer.token_ids) for answer in made)
            seconds += time.monotonic() - started
            meter.advance(len(batch), f"{tokens / seconds:,.0f} tokens/s")
    return [answers[index] for index in range(len(ids))], ({"tokens_per_second": tokens / seconds} if seconds else {})


def _from_record(record: Mapping[str, Any]) -> dict[int, Answer]:
    return {index: Answer(token_ids, reason) for index, reason, token_ids in record["answers"]}


def _record(
    prompt: Prompt, ids: list[int], answer: Answer, tokenizer: PreTrainedTokenizerBase, stops: Sequence[int], settings: RegenerateSettings
) -> dict[str, Any]:
    """One line of `conversations.jsonl`. `token_ids` are what the target produced: their text may encode to others."""
    body = answer.token_ids[:-1] if answer.token_ids[-1] in stops else answer.token_ids
    return {
        "id": prompt.id,
        "category": prompt.category,
        "messages": [*prompt.messages, {"role": "assistant", "content": decode(tokenizer, body)}],
        "finish_reason": answer.finish_reason,
        "sampling": {"temperature": settings.temperature, "max_tokens": settings.max_tokens},
        "usage": {"prompt_tokens": len(ids), "completion_tokens": len(answer.token_ids)},
        "token_ids": answer.token_ids,
    }


def _write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    write_atomic(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode("utf-8"))
