"""Checks of the rows: is there something to learn, and is it what the target produced?

They look at the finished rows alone and ask the chat template anew, so a fault in `prepare` does not hide itself.
"""

from __future__ import annotations

import numpy as np

from draftproof.gate.finding import Finding, failed, passed, unsure, warned
from draftproof.gate.gate import GateContext

LOW_SHARE, HIGH_SHARE = 0.02, 0.98
"""Supervised share of all tokens outside which the mask is hardly what was meant: chat rows lie between 10 and 90 %."""
LENGTH_WARNING = 0.10
"""Share of answers cut by the length limit above which somebody should look."""
ENDED = ("", "stop")
"""Finish reasons after which an answer has its stop token; `` is a source that does not say."""
SAMPLE = 64
"""Rows whose borders are looked at, evenly spread."""


def data_supervised_share(context: GateContext) -> Finding:
    """Every row has supervised tokens and others, and the share over all rows is believable."""
    name = "data.supervised_share"
    rows = context.rows
    if rows is None:
        return _no_rows(name)
    if not len(rows):
        return failed(name, "There are no rows.", "Add conversations and make them again with --from prepare.")
    supervised = rows.supervised_counts()
    empty, full = np.flatnonzero(supervised == 0), np.flatnonzero(supervised == rows.lengths)
    share = float(supervised.sum() / rows.lengths.sum())
    for wrong, what in ((empty, "supervises nothing"), (full, "supervises its prompt, too")):
        if wrong.size:
            first = rows.row(int(wrong[0]))
            return failed(
                name,
                f"{wrong.size} of {len(rows)} rows: the mask {what}; the first is {first.source}.",
                "Make them again with --from prepare.",
            )
    evidence = f"{share:.1%} of {int(rows.lengths.sum()):,} tokens in {len(rows):,} rows are supervised."
    if not LOW_SHARE <= share <= HIGH_SHARE:
        return warned(name, evidence, "Look at the sample in prepare/report.json: are prompts that long, or is the mask wrong?")
    return passed(name, evidence)


def data_template(context: GateContext) -> Finding:
    """In a sample, each answer starts right after what the template's generation prompt ends with, and ends with a stop
    token unless it was cut."""
    name = "data.template"
    rows = context.rows
    if rows is None or context.target is None:
        return _no_rows(name)
    from draftproof.target.tokenizer import decode, encode, inserted_text, load_tokenizer, render_text, stop_ids

    tokenizer = load_tokenizer(context.target)
    stops = set(stop_ids(tokenizer, context.target))
    limit = min(context.recipe.data.max_length, context.target.config.max_positions)
    probe = [{"role": "user", "content": "One."}]
    opened = render_text(tokenizer, probe, add_generation_prompt=True)
    closed = render_text(tokenizer, probe, add_generation_prompt=False)
    if not opened.startswith(closed) or opened == closed:
        return unsure(name, "The template has no generation prompt after the user's turn.", "Check the target's chat template.")
    opening = opened[len(closed) :]
    accepted = (opening, opening + inserted_text(tokenizer))
    reach = len(encode(tokenizer, accepted[1])) + 8  # tokens to decode: those of the opening and some to spare
    sample = range(0, len(rows), max(1, len(rows) // SAMPLE))
    for index in sample:
        row = rows.row(index)
        length = len(row.token_ids)
        cut = length >= limit or row.finish_reason not in ENDED
        for start in row.turn_start:
            if not decode(tokenizer, row.token_ids[max(0, start - reach) : start].tolist()).endswith(accepted):
                return failed(
                    name,
                    f"{row.source}: the answer at token {start} does not follow the generation prompt {opening!r}.",
                    "Make the rows again with --from prepare; if it stays, the template is not supported.",
                )
            end = start + int(np.argmin(np.append(row.supervised[start:], False)))
            if int(row.token_ids[end - 1]) not in stops and not (cut and end == length):
                return failed(name, f"{row.source}: the answer that ends at token {end - 1} has no stop token.", "Make the rows again.")
    return passed(name, f"{len(sample)} rows: every answer follows {opening!r} and ends as the target ends it.")


def data_split(context: GateContext) -> Finding:
    """Both splits have rows, and no conversation has rows in both."""
    name = "data.split"
    rows = context.rows
    if rows is None:
        return _no_rows(name)
    train, held_out = (rows.indices("train"), rows.indices("validation"))
    if not train.size or not held_out.size:
        return failed(name, f"{train.size} training rows and {held_out.size} held-out rows.", "Add conversations, or set data.validation.")
    keys = rows.conversation_keys()
    shared = set(keys[train]) & set(keys[held_out])
    if shared:
        row = rows.row(int(np.flatnonzero(keys == min(shared))[0]))
        return failed(
            name, f"{len(shared)} conversations are in both splits; one is {row.source}.", "Make the rows again with --from prepare."
        )
    return passed(name, f"{train.size:,} training rows, {held_out.size:,} held out, no conversation in both.")


def data_finish_reasons(context: GateContext) -> Finding:
    """How the answers ended; many that were cut teach the draft nothing about endings."""
    name = "data.finish_reasons"
    rows = context.rows
    if rows is None:
        return _no_rows(name)
    reasons = rows.finish_reasons()
    counts = {reason or "missing": int((reasons == reason).sum()) for reason in sorted(set(reasons))}
    shown = ", ".join(f"{reason} {count}" for reason, count in counts.items())
    share = counts.get("length", 0) / max(1, len(rows))
    if share > LENGTH_WARNING:
        return warned(
            name, f"{share:.0%} of the answers were cut by the length limit ({shown}).", "Raise regenerate.max_tokens if that is not meant."
        )
    return passed(name, f"Answers ended by: {shown}.")


def _no_rows(name: str) -> Finding:
    return unsure(name, "There are no rows to look at.", "Run `draftproof prepare` first.")
