"""regenerate as a whole: answers in the order of the prompts, resume at batch borders with the same bytes."""

from __future__ import annotations

import json
import shutil

import pytest
from tests.helpers.preparing import task_in, write_lines

from draftproof.errors import DataError, UsageError
from draftproof.prepare import stage as prepare_stage
from draftproof.recipe import DataSettings, RegenerateSettings, TargetSettings
from draftproof.records.rows import read_rows
from draftproof.regenerate import stage
from draftproof.regenerate.prompts import batches
from draftproof.target.target import open_target


@pytest.fixture(scope="module")
def target(tm_folder):
    return open_target(TargetSettings(model=str(tm_folder)))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    lines = [
        {
            "id": f"p{n}",
            "category": "even" if n % 2 == 0 else "odd",
            "messages": [{"role": "user", "content": f"Say {'the ' * (n % 4)}{n}."}],
        }
        for n in range(11)
    ]
    lines[3]["messages"].append({"role": "assistant", "content": "an older answer"})
    lines.insert(5, {"id": "none", "messages": [{"role": "system", "content": "Be kind."}]})
    lines.insert(7, {"id": "long", "messages": [{"role": "user", "content": "xq " * 200}]})
    return write_lines(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", lines)


def _settings(prompts, **changes):
    return RegenerateSettings(prompts=str(prompts), **{"max_tokens": 12, "batch_size": 4, **changes})


@pytest.fixture(scope="module")
def done(target, prompts, tmp_path_factory):
    out = tmp_path_factory.mktemp("regenerate") / "out"
    return out, stage.run(task_in(out), _settings(prompts), target)


def test_each_prompt_is_answered_in_place(done, tt_plain):
    out, outcome = done
    records = [json.loads(line) for line in (out / "conversations.jsonl").read_text().splitlines()]
    assert [record["id"] for record in records] == [f"p{n}" for n in range(11)]
    for record in records:
        user, answer = record["messages"]
        assert user["role"] == "user"
        body = [token for token in record["token_ids"] if token != 2]
        assert answer == {"role": "assistant", "content": tt_plain.decode(body)}
        assert record["finish_reason"] == ("stop" if record["token_ids"][-1] == 2 else "length")
        prompt = tt_plain.encode(f"<|im_start|>user\n{user['content']}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
        assert record["usage"] == {"prompt_tokens": len(prompt), "completion_tokens": len(record["token_ids"])}
    assert outcome.counts["prompts"] == {
        "in": 13,
        "answered": 11,
        "dropped": {"it does not end with a user turn": 1, "the prompt leaves no room for max_tokens within the target's positions": 1},
    }
    dropped = [json.loads(line) for line in (out / "dropped.jsonl").read_text().splitlines()]
    assert [(item["id"], item["source"]) for item in dropped] == [("none", "prompts.jsonl:6"), ("long", "prompts.jsonl:8")]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_kill_at_any_batch_goes_on_with_the_same_bytes(temperature, target, prompts, tmp_path):
    settings = _settings(prompts, temperature=temperature)
    whole = tmp_path / "whole"
    wanted = stage.run(task_in(whole, seed=5), settings, target).contents
    journal = (whole / "journal.jsonl").read_bytes().splitlines(keepends=True)
    assert len(journal) == 3
    for batches_left in range(4):
        again = tmp_path / f"again{batches_left}"
        again.mkdir()
        torn = journal[batches_left][:-9] if batches_left < 3 else b""
        (again / "journal.jsonl").write_bytes(b"".join(journal[:batches_left]) + torn)
        assert stage.run(task_in(again, seed=5), settings, target).contents == wanted
        assert (again / "journal.jsonl").read_bytes() == b"".join(journal)
        assert (again / "conversations.jsonl").read_bytes() == (whole / "conversations.jsonl").read_bytes()


def test_a_finished_journal_needs_no_model(target, prompts, done, tmp_path):
    out, outcome = done
    (tmp_path / "out").mkdir()
    shutil.copy(out / "journal.jsonl", tmp_path / "out")
    folder = tmp_path / "target"
    shutil.copytree(target.folder, folder)
    (folder / "model.safetensors").unlink()
    lame = open_target(TargetSettings(model=str(folder)))
    assert stage.run(task_in(tmp_path / "out"), _settings(prompts), lame).contents == outcome.contents


def test_prepare_takes_the_ids_as_they_were_produced(done, target, tmp_path):
    out, _ = done
    records = {record["id"]: record for record in map(json.loads, (out / "conversations.jsonl").read_text().splitlines())}
    settings = DataSettings(validation=0.2, minimum_kept=0.0)
    outcome = prepare_stage.run(task_in(tmp_path / "prepare", {"regenerate": out}), settings, target)
    table = read_rows(tmp_path / "prepare")
    assert outcome.counts["given_token_ids"] == len(table) > 5
    for index in range(len(table)):
        row = table.row(index)
        record = list(records.values())[int(row.source.split(":")[1]) - 1]
        assert row.token_ids[row.supervised].tolist() == record["token_ids"]
        assert row.category == record["category"]


def test_batches_are_fixed_by_prompts_and_size():
    plan = batches([3, 9, 9, 1, 5], 2)
    assert plan == [[1, 2], [4, 0], [3]]
    assert batches([], 4) == []


def test_nothing_to_answer(target, tmp_path):
    path = write_lines(tmp_path / "p.jsonl", [{"messages": [{"role": "system", "content": "x"}]}])
    with pytest.raises(DataError, match="None of 1 prompts can be answered"):
        stage.run(task_in(tmp_path / "out"), _settings(path), target)


def test_ingredients(target, prompts):
    base = stage.ingredients(_settings(prompts), target, {})
    for change in ({"max_tokens": 13}, {"batch_size": 5}, {"temperature": 0.5}):
        assert stage.ingredients(_settings(prompts, **change), target, {}) != base
    with pytest.raises(UsageError, match="no such file of prompts"):
        stage.ingredients(_settings("nowhere.jsonl"), target, {})
