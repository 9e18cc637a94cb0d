"""B5: mapping or tokenised data reused after a setting changed.

For each stage every setting is changed, one at a time, against a finished artifact: it is refused with the field's
name. Contents, not names or time stamps, stand for files (`tests/prepare/test_stage.py` has the data and the template).
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from draftproof.artifact import Manifest, differing_fields, fingerprint, open_build, reusable, verify
from draftproof.errors import OtherRunsWork
from draftproof.recipe import (
    DataSettings,
    DraftSettings,
    EvaluateSettings,
    ExportSettings,
    ExtractSettings,
    RegenerateSettings,
    TrainSettings,
    VocabSettings,
)
from draftproof.stage import Outcome
from draftproof.target.target import Target

CONTENTS = {
    "prepare": {"token_ids": "t", "rows": "r", "supervised": "s", "prompts": "p", "validation": "v"},
    "vocab": {"mapping": "m"},
    "extract": {"states": "s"},
    "train": {"draft": "d"},
    "export": {"tensors": "x"},
}
CHANGES_NO_RESULT = {
    "data.skip_bad_lines",  # more may be skipped before it fails
    "data.minimum_kept",  # when it fails
    "extract.canary_rows",  # how much is proven before the bulk
    "train.checkpoints",  # how often it can go on
    "evaluate.serve_timeout_s",  # when it fails
    "evaluate.batch_size",  # how many prompts are decoded together
}
OTHERS = {"vocab.size": 64, "evaluate.serve": "vllm"}
"""Values that the rule of `_other` does not find."""
STAGES: dict[str, type[BaseModel]] = {
    "regenerate": RegenerateSettings,
    "prepare": DataSettings,
    "vocab": VocabSettings,
    "extract": ExtractSettings,
    "train": TrainSettings,
    "export": ExportSettings,
    "evaluate": EvaluateSettings,
}
SECTIONS = {"prepare": "data"}


def _other(value: Any, annotation: Any, file: Path) -> Any:
    """Some other value of the same type; None where there is only one."""
    choices = [c for part in (annotation, *get_args(annotation)) if get_origin(part) is Literal for c in get_args(part)]
    if len(choices) > 1:
        return next((choice for choice in choices if choice != value), None)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 if value else 0.5
    if isinstance(value, tuple):
        return (str(file),) if not value or "/" in str(value[0]) else value[:1]
    if isinstance(value, dict):
        return {"human": "user"}
    if isinstance(value, str):
        return str(file) if "/" in value else None
    return (1, 3, 5) if "tuple" in str(annotation) else 7


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Manifest]:
    """Finished artifacts, each with the contents that later stages depend on."""
    found = {}
    for name, contents in CONTENTS.items():
        (open_build(tmp_path / name, stage=name, ingredients={"stage_version": 1}).folder / "x").write_text(name)
        found[name] = open_build(tmp_path / name, stage=name, ingredients={"stage_version": 1}).finish(Outcome({}, contents))
    return found


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Two files of one size, which differ in a byte."""
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"n": 2}\n')
    return tmp_path / "a.jsonl", tmp_path / "b.jsonl"


def _base(stage: str, file: Path) -> BaseModel:
    given: dict[str, Any] = {"regenerate": {"prompts": str(file)}, "prepare": {"train": [str(file)]}, "evaluate": {"bench": [str(file)]}}
    return STAGES[stage](**given.get(stage, {}))


def _ingredients(stage: str, settings: BaseModel, target: Target, inputs: dict[str, Manifest], **extra: Any) -> dict[str, Any]:
    module = importlib.import_module(f"draftproof.{stage}.stage")
    shared = {"train": {"draft": DraftSettings(), "draft_tokens": 3}, "export": {"draft_tokens": 3}}
    needed = {name: inputs[name] for name in module.NEEDS if name in inputs}
    return dict(module.ingredients(settings, target, needed, **{**shared.get(stage, {}), **extra}))


def _changes(stage: str, file: Path) -> Iterator[tuple[str, BaseModel]]:
    settings = _base(stage, file)
    for name, field in STAGES[stage].model_fields.items():
        found = _other(getattr(settings, name), field.annotation, file.with_name("b.jsonl"))
        value = OTHERS.get(f"{SECTIONS.get(stage, stage)}.{name}", found)
        if value is not None:
            yield name, settings.model_copy(update={name: value})


@pytest.mark.parametrize("stage", STAGES)
def test_each_setting_is_named_when_it_changed(
    stage: str, tm_target: Target, inputs: dict[str, Manifest], files: tuple[Path, Path], tmp_path: Path
) -> None:
    before = _ingredients(stage, _base(stage, files[0]), tm_target, inputs)
    final = tmp_path / "again" / stage
    made = open_build(final, stage=stage, ingredients=before).finish(Outcome({}, {}))
    changed = 0
    for name, settings in _changes(stage, files[0]):
        after = _ingredients(stage, settings, tm_target, inputs)
        if f"{SECTIONS.get(stage, stage)}.{name}" in CHANGES_NO_RESULT:
            assert after == before, name
            continue
        assert fingerprint(after) != made.fingerprint, name
        with pytest.raises(OtherRunsWork) as error:
            reusable(final, stage=stage, ingredients=after)
        assert {"bench": "prompts"}.get(name, name) in error.value.what, name
        assert len(differing_fields(before, after)) == 1, name
        changed += 1
    assert changed >= 1
    assert verify(final) == made
    assert reusable(final, stage=stage, ingredients=_ingredients(stage, _base(stage, files[0]), tm_target, inputs)) == made


@pytest.mark.parametrize("name", DraftSettings.model_fields)
def test_the_drafts_shape_is_a_setting_of_training(
    name: str, tm_target: Target, inputs: dict[str, Manifest], files: tuple[Path, Path]
) -> None:
    value = _other(getattr(DraftSettings(), name), DraftSettings.model_fields[name].annotation, files[1])
    settings = TrainSettings()
    before = _ingredients("train", settings, tm_target, inputs)
    after = _ingredients("train", settings, tm_target, inputs, draft=DraftSettings().model_copy(update={name: value}))
    (sentence,) = differing_fields(before, after)
    assert sentence.startswith(f"draft.{name}: ")


@pytest.mark.parametrize("stage", ["vocab", "extract", "train", "export", "evaluate"])
def test_other_inputs_or_another_target_are_other_work(
    stage: str, tm_target: Target, inputs: dict[str, Manifest], files: tuple[Path, Path]
) -> None:
    settings = _base(stage, files[0])
    before = _ingredients(stage, settings, tm_target, inputs)
    other = dataclasses.replace(tm_target, fingerprint="f" * 64)
    assert [sentence.partition(":")[0] for sentence in differing_fields(before, _ingredients(stage, settings, other, inputs))] == ["target"]
    needs = [name for name in importlib.import_module(f"draftproof.{stage}.stage").NEEDS if name in inputs]
    for name in needs:
        contents = {key: value + "2" for key, value in inputs[name].contents.items()}
        changed = {**inputs, name: inputs[name].model_copy(update={"contents": contents})}
        seen = _ingredients(stage, settings, tm_target, changed) != before
        assert seen or (stage, name) == ("evaluate", "prepare"), f"{name} of {stage}"  # with bench files no row is read


def test_an_artifact_made_anew_with_the_same_contents_is_the_same_input(
    tm_target: Target, inputs: dict[str, Manifest], files: tuple[Path, Path]
) -> None:
    """Contents count, not how or when they were made: a change of mask costs no extraction."""
    later = {name: manifest.model_copy(update={"ended": "later", "host": "elsewhere"}) for name, manifest in inputs.items()}
    masked = inputs["prepare"].model_copy(update={"contents": {**CONTENTS["prepare"], "rows": "another mask"}})
    for stage in ("vocab", "extract", "train", "export", "evaluate"):
        settings = _base(stage, files[0])
        assert _ingredients(stage, settings, tm_target, later) == _ingredients(stage, settings, tm_target, inputs)
    extract = [_ingredients("extract", ExtractSettings(), tm_target, {**inputs, "prepare": rows}) for rows in (inputs["prepare"], masked)]
    assert extract[0] == extract[1]
