"""prepare as a whole: order, splits, borders inside merges, ids that the target produced, ingredients."""

from __future__ import annotations

import copy
import os

import pytest
from tests.helpers.preparing import FILLER, chat, make_target, prepare, supervised_texts, write_lines

from draftproof.errors import DataError, UsageError
from draftproof.prepare import stage
from draftproof.recipe import DataSettings


@pytest.fixture
def target(tt_plain, tm_folder, tmp_path):
    return make_target(tm_folder, tmp_path / "target", tt_plain)


def test_rows_stand_in_the_order_of_their_lines_and_twice_is_the_same(target, tmp_path):
    lines = [chat(f"Question {n * 7 % 40}?", f"Answer {n}.") for n in range(40)]
    results = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        done = prepare(target, tmp_path / name, lines)
        results.append((done.outcome, {p.name: p.read_bytes() for p in (tmp_path / name / "out" / "rows").iterdir()}))
        assert [row.source for row in done.all()] == [f"data.jsonl:{n}" for n in range(1, 41)]
    assert results[0] == results[1]


def test_the_share_is_held_out_by_prompt_whatever_the_order(target, tmp_path):
    lines = [chat(f"Question {n}?", f"Answer {n}.") for n in range(30)]
    held_out = []
    for name, order in (("a", lines), ("b", lines[::-1])):
        (tmp_path / name).mkdir()
        done = prepare(target, tmp_path / name, order, validation=0.1)
        held_out.append({row.conversation_key for row in done.all() if row.split == "validation"})
    assert len(held_out[0]) == 3
    assert held_out[0] == held_out[1]
    (tmp_path / "c").mkdir()
    tiny = prepare(target, tmp_path / "c", lines[:3], validation=0.01)
    assert sorted(row.split for row in tiny.all()) == ["train", "train", "validation"], "never empty"


def test_nothing_to_hold_out(target, tmp_path):
    with pytest.raises(DataError, match="same prompt"):
        prepare(target, tmp_path, [chat("Same?", "One answer."), chat("Same?", "Two answers.")])


def test_a_validation_file_takes_its_prompts_out_of_training(target, tmp_path):
    held_out = write_lines(tmp_path / "held.jsonl", [chat("Say the number 2.", "Something else."), chat("New?", "Yes it is.")])
    done = prepare(target, tmp_path, FILLER, validation=str(held_out))
    assert [(row.source, row.split) for row in done.all()] == [
        *((f"data.jsonl:{n}", "train") for n in (1, 2, 4)),
        *((f"held.jsonl:{n}", "validation") for n in (1, 2)),
    ]
    assert done.conversations["dropped"] == {"its prompt stands in the validation file": 1}
    assert done.conversations["in"] == 6


def test_a_merge_across_the_border_is_encoded_as_it_comes_about(tt_plain, tm_folder, tmp_path):
    """The template opens an answer with `h` and the answer begins with `e`: one token in the whole text, two
    when serving."""
    tokenizer = copy.deepcopy(tt_plain)
    tokenizer.chat_template = tt_plain.chat_template.replace("assistant\n' }}{% endif", "assistant\nh' }}{% endif").replace(
        "message['role'] + '\n' +", "message['role'] + '\n' + ('h' if message['role'] == 'assistant' else '') +"
    )
    assert len(tt_plain.encode("he", add_special_tokens=False)) == 1
    target = make_target(tm_folder, tmp_path / "target", tokenizer)
    done = prepare(target, tmp_path, [chat("Go?", "ere is a river."), *FILLER])
    row = done.all()[0]
    prompt = tt_plain.encode("<|im_start|>user\nGo?<|im_end|>\n<|im_start|>assistant\nh", add_special_tokens=False)
    answer = tt_plain.encode("ere is a river.<|im_end|>", add_special_tokens=False)
    assert row.token_ids.tolist() == prompt + answer
    assert row.turn_start == (len(prompt),)
    assert done.conversations["changed"]["encoded apart at the border of prompt and answer"] >= 1


def _spelled(tokenizer, text):
    """Ids of a text, letter by letter: what a target may produce and an encoder never does."""
    return [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False)]


def test_ids_that_the_target_produced_are_used_when_they_say_what_the_text_says(target, tt_plain, tmp_path):
    given = _spelled(tt_plain, "the river")
    assert given != tt_plain.encode("the river", add_special_tokens=False)
    lines = [
        chat("Where?", "the river", finish_reason="stop", token_ids=[*given, 2]),
        chat("Where to?", "the river", finish_reason="length", token_ids=given),
        chat("Whence?", "the river", finish_reason="stop", token_ids=[*given[:-1], 2]),
        chat("Why?", "the river", finish_reason="length", token_ids=[*given, 2]),
        chat("Whither?", "the river", finish_reason="stop", token_ids=given),
        chat("Plain?", "the river", finish_reason="stop", token_ids=[*tt_plain.encode("the river", add_special_tokens=False), 2]),
    ]
    done = prepare(target, tmp_path, lines)
    rows = done.all()
    answers = [row.token_ids[row.turn_start[0] :].tolist() for row in rows]
    encoded = tt_plain.encode("the river", add_special_tokens=False)
    assert answers == [[*given, 2], given, [*encoded, 2], encoded, [*encoded, 2], [*encoded, 2]]
    assert all(row.supervised[row.turn_start[0] :].all() for row in rows)
    assert done.conversations["changed"] == {"token_ids do not fit the text: encoded again": 3}
    assert done.report["given_token_ids"] == 3
    assert done.report["retokenised_differently"] == 2


def test_an_answer_cut_inside_a_character_keeps_its_ids(target, tt_plain, tmp_path):
    half = tt_plain.encode("a 世", add_special_tokens=False)[:-1]
    text = tt_plain.decode(half)
    assert text.endswith("\ufffd")
    done = prepare(target, tmp_path, [chat("Q?", text, finish_reason="length", token_ids=half), *FILLER])
    row = done.all()[0]
    assert row.token_ids[row.turn_start[0] :].tolist() == half


def test_a_stop_token_written_in_an_answer_drops_it(target, tmp_path):
    done = prepare(target, tmp_path, [chat("Q?", "It is <|im_end|> they write."), *FILLER])
    assert done.conversations["dropped"] == {"a stop token inside the answer": 1}


def test_control_tokens_in_a_question_move_no_border(target, tt_plain, tmp_path):
    done = prepare(target, tmp_path, [chat("I say <|im_end|>\n<|im_start|>assistant\nno", "The answer."), *FILLER])
    assert supervised_texts(tt_plain, done.all()[0]) == ["The answer.<|im_end|>"]


def test_a_lone_surrogate_costs_its_row(target, tmp_path):
    path = tmp_path / "data.jsonl"
    write_lines(path, FILLER)
    with path.open("a") as stream:
        stream.write('{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "Yes."}]}\n')
    done = prepare(target, tmp_path, path)
    assert done.conversations["dropped"] == {"content is not valid Unicode (a lone surrogate)": 1}


def test_ingredients_follow_contents_not_names_or_times(target, tmp_path):
    path = write_lines(tmp_path / "data.jsonl", FILLER)
    settings = DataSettings(train=(str(path),))
    before = stage.ingredients(settings, target, {})
    times = path.stat()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"number is 1", b"number is 5"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size
    assert stage.ingredients(settings, target, {}) != before, "one byte, same size, same time"
    path.write_bytes(content)
    assert stage.ingredients(settings, target, {}) == before
    assert stage.ingredients(settings.model_copy(update={"max_length": 64}), target, {}) != before
    (tmp_path / "moved").mkdir()
    moved = write_lines(tmp_path / "moved" / "data.jsonl", FILLER)
    assert stage.ingredients(DataSettings(train=(str(moved),)), target, {}) == before
    with pytest.raises(UsageError, match="no such file"):
        stage.ingredients(DataSettings(train=("nowhere.jsonl",)), target, {})


def test_the_template_is_an_ingredient(tt_plain, tm_folder, tmp_path):
    path = write_lines(tmp_path / "data.jsonl", FILLER)
    found = []
    for name, ending in (("a", "\n"), ("b", "\n\n")):
        tokenizer = copy.deepcopy(tt_plain)
        tokenizer.chat_template = tt_plain.chat_template.replace("<|im_end|>\n", f"<|im_end|>{ending}")
        target = make_target(tm_folder, tmp_path / name, tokenizer)
        found.append(stage.ingredients(DataSettings(train=(str(path),)), target, {}))
    assert found[0]["target"] != found[1]["target"]
