"""The recipe: types, places of errors, overrides, paths, and what is written back."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from draftproof.errors import UsageError
from draftproof.recipe import STARTER, Recipe, known_keys, load

SMALL = "target: {model: acme/tiny}\ndata: {train: [/data/chat.jsonl]}\n"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """`write(text)`: the path of a recipe with this text."""

    def write(text: str, name: str = "recipe.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def _refused(path: Path, *overrides: str) -> UsageError:
    with pytest.raises(UsageError) as error:
        load(path, overrides)
    assert error.value.exit_code == 2
    return error.value


def test_a_small_recipe_has_the_documented_defaults(write: Any) -> None:
    recipe = load(write(SMALL, "first.yaml")).recipe
    assert (recipe.vocab.size, recipe.train.unroll, recipe.train.decay, recipe.evaluate.draft_tokens) == ("auto", 7, 0.8, 3)
    assert (recipe.data.validation, recipe.extract.boundaries, recipe.regenerate) == (0.02, None, None)
    assert recipe.run.dir == "runs/first"
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.unroll = 3  # type: ignore[misc]  # that is the test


@pytest.mark.parametrize(
    ("section", "key", "written", "meant"),
    [
        ("train", "learning_rate", "1e-3", 0.001),  # to YAML 1.1 a text
        ("train", "learning_rate", "4", 4.0),
        ("train", "steps", "null", None),
        ("vocab", "size", "~", None),
        ("vocab", "size", "auto", "auto"),
        ("vocab", "size", "16000", 16000),
        ("evaluate", "serve", "none", "none"),
        ("extract", "boundaries", "[2, 15, 27]", (2, 15, 27)),
        ("evaluate", "bench", "/a.jsonl", ("/a.jsonl",)),  # one file need not be a list
        ("draft", "norm_output", "yes", True),
    ],
)
def test_values_as_people_write_them(write: Any, section: str, key: str, written: str, meant: Any) -> None:
    recipe = load(write(SMALL + f"{section}: {{{key}: {written}}}\n")).recipe
    value = getattr(getattr(recipe, section), key)
    assert (value, type(value)) == (meant, type(meant))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("train: {unroll: seven}", "train.unroll: Input should be a valid integer"),
        ("train: {unroll: 0}", "train.unroll: Input should be greater than or equal to 1"),
        ("vocab: {size: 0}", "vocab.size: Input should be greater than or equal to 1"),
        ("vocab: {size: some}", "vocab.size: Input should be a valid integer"),
        ("train: {unroll: 7.5}", "train.unroll: Input should be a valid integer"),
        ("train: {unroll: yes}", "train.unroll: must not be true or false"),
        ("train: {steps: on}", "train.steps: must not be true or false"),
        ("train: {learning_rate: .inf}", "train.learning_rate: Input should be a finite number"),
        ("extract: {shard_gb: .nan}", "extract.shard_gb: Input should be"),
        ("extract: {codec: int8}", "extract.codec: Input should be 'bf16' or 'fp8'"),
        ("export: {formats: [vllm, gguf]}", "export.formats: Input should be 'vllm' or 'sglang'"),
        ("gates: {waive: {storage.bytes: ' '}}", "gates.waive: give the reason why storage.bytes is waived"),
        ("draft: {norm_before_fc: true, fc_norm: true}", "draft: norm_before_fc and fc_norm exclude each other"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(write: Any, line: str, sentence: str) -> None:
    error = _refused(write(SMALL + f"\n{line}\n"))
    assert sentence in error.what
    assert error.where == "recipe.yaml:4"


@pytest.mark.parametrize("validation", ["0.0", "1.0", "1", "-0.5", "2", "[a]"])
def test_a_share_that_is_none(write: Any, validation: str) -> None:
    error = _refused(write(f"target: {{model: acme/tiny}}\ndata:\n  train: a.jsonl\n  validation: {validation}\n"))
    assert error.what.startswith("data.validation: ")
    assert error.where == "recipe.yaml:4"


def test_contradictions_between_sections(write: Any) -> None:
    assert "give data.train (conversations) or regenerate.prompts" in _refused(write("target: {model: a/b}\n")).what
    assert "not both" in _refused(write(SMALL + "regenerate: {prompts: p.jsonl}\n")).what


@pytest.mark.parametrize(
    ("lines", "key", "nearest"),
    [
        ("train: {unrol: 5}", "train.unrol", "train.unroll"),
        ("trian: {unroll: 5}", "trian", "train"),
        ("evaluate: {max_token: 5}", "evaluate.max_token", "evaluate.max_tokens"),
        ("data: {train: a, skip_bad_line: 3}", "data.skip_bad_line", "data.skip_bad_lines"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(write: Any, lines: str, key: str, nearest: str) -> None:
    text = f"target: {{model: acme/tiny}}\n{'' if lines.startswith('data') else 'data: {train: a}'}\n{lines}\n"
    error = _refused(write(text))
    assert error.what == f"There is no recipe key {key!r}."
    assert (error.where, error.remedy) == ("recipe.yaml:3", f"Did you mean {nearest!r}?")


def test_every_problem_is_told_at_once(write: Any) -> None:
    error = _refused(write("target: {}\ndata: {train: a}\ntrain: {unroll: 0, decai: 1}\n"))
    assert "The recipe lacks 'target.model'." in error.what
    assert "train.unroll: " in error.what
    assert "There is no recipe key 'train.decai'." in error.what
    assert (error.where, error.remedy) == ("recipe.yaml:1", "Add target.model.")


def test_each_value_says_where_it_came_from(write: Any) -> None:
    loaded = load(
        write("target:\n  model: acme/tiny\n\ndata:\n  train:\n    - a.jsonl\ntrain: {unroll: 5,\n  decay: 0.7}\n"), ["train.decay=0.9"]
    )
    assert loaded.provenance["target.model"] == "recipe.yaml:2"
    assert loaded.provenance["data.train"] == "recipe.yaml:5"
    assert loaded.provenance["train.unroll"] == "recipe.yaml:7"
    assert loaded.provenance["train.decay"] == "command line"
    assert loaded.recipe.train.decay == 0.9
    shown = loaded.resolved_yaml().splitlines()
    assert "  unroll: 5  # recipe.yaml:7" in shown
    assert "  decay: 0.9  # command line" in shown
    assert "  epochs: 2.0  # default" in shown


def test_overrides_may_open_a_section(write: Any) -> None:
    loaded = load(
        write("target: {model: acme/tiny}\ntrain:\n"), ["regenerate.prompts=/p.jsonl", "train.steps=3", "extract.boundaries=[1,2,3]"]
    )
    assert loaded.recipe.regenerate is not None
    assert (loaded.recipe.regenerate.prompts, loaded.recipe.train.steps, loaded.recipe.extract.boundaries) == ("/p.jsonl", 3, (1, 2, 3))
    assert load(write(SMALL), ["gates.waive={storage.bytes: quota is larger}"]).recipe.gates.waive == {"storage.bytes": "quota is larger"}
    assert load(write(SMALL), ["train.steps=3", "train.steps=null"]).recipe.train.steps is None
    assert load(write(SMALL), run_dir="elsewhere").recipe.run.dir == "elsewhere"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.unroll", "'train.unroll' is not an override."),
        ("=5", "'=5' is not an override."),
        ("train.unrol=5", "There is no recipe key 'train.unrol'."),
        ("train=5", "There is no recipe key 'train'."),
        ("train.unroll=[", "The value of train.unroll is not valid YAML: '['."),
        ("run.dir=2025-13-01", "The value of run.dir is not valid YAML: '2025-13-01'."),
        ("train.unroll=99", "train.unroll: Input should be less than or equal to 16 (given: 99)."),
    ],
)
def test_a_wrong_override(write: Any, override: str, sentence: str) -> None:
    assert _refused(write(SMALL), override).what == sentence


def test_a_wrong_override_is_placed_on_the_command_line(write: Any) -> None:
    assert _refused(write(SMALL + "train: {unroll: 3}\n"), "train.unroll=99").where == "command line"
    assert "target is not a section" in _refused(write("target: tiny\ndata: {train: a}\n"), "target.model=b").what


def test_paths_are_taken_from_the_recipes_folder(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    text = (
        "target: {model: models}\ndata: {train: [a.jsonl, /b.jsonl], validation: held.jsonl}\n"
        "evaluate: {bench: ../bench.jsonl}\nrun: {dir: runs/x}\n"
    )
    recipe = load(write(text)).recipe
    assert recipe.target.model == str(tmp_path / "models")
    assert recipe.data.train == (str(tmp_path / "a.jsonl"), "/b.jsonl")
    assert recipe.data.validation == str(tmp_path / "held.jsonl")
    assert recipe.evaluate.bench == (str(tmp_path / "../bench.jsonl"),)
    assert recipe.run.dir == "runs/x"  # from where the command is given
    monkeypatch.setenv("HOME", "/home/ada")
    assert load(write("target: {model: ~/llm}\nregenerate: {prompts: p.jsonl}\n")).recipe.target.model == "/home/ada/llm"


@pytest.mark.parametrize(
    ("model", "anchored"),
    [("acme/tiny", False), ("tiny", False), ("./tiny", True), ("a/b/c", True), ("../tiny", True)],
)
def test_a_hub_id_is_no_path(write: Any, tmp_path: Path, model: str, anchored: bool) -> None:
    recipe = load(write(f"target: {{model: {model}}}\ndata: {{train: a}}\n")).recipe
    assert recipe.target.model == (str(tmp_path / model) if anchored else model)


def test_paths_of_overrides_are_taken_from_the_current_folder(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And written down in full, so that the recipe kept with the run means the same from anywhere."""
    here = tmp_path / "here"
    (here / "llm").mkdir(parents=True)
    monkeypatch.chdir(here)
    recipe = load(write(SMALL), ["data.train=[a.jsonl]", "target.model=llm", "evaluate.bench=b.jsonl"]).recipe
    assert (recipe.data.train, recipe.target.model, recipe.evaluate.bench) == (
        (str(here / "a.jsonl"),),
        str(here / "llm"),
        (str(here / "b.jsonl"),),
    )


@pytest.mark.parametrize(
    ("text", "sentence", "where"),
    [
        ("target: {model: a/b}\ndata: {train: x}\ndata: {train: y}\n", "The key data stands twice.", ":3"),
        ("target: {model: a/b}\ntrain:\n  steps: 1\n  unroll: 2\n  steps: 3\n", "The key train.steps stands twice.", ":5"),
        ("target: {model: a/b}\ngates: {waive: {a.b: x, a.b: y}}\n", "The key gates.waive.a.b stands twice.", ":2"),
        ("target: [\n", "The recipe is not valid YAML: ", ":2:1"),
        ("target: {model: a/b}\n\tdata: x\n", "The recipe is not valid YAML: ", ":2:1"),
        ("- a\n- b\n", "The recipe is not a mapping of sections.", ""),
        ("", "The recipe is not a mapping of sections.", ""),
        ("run: {dir: 2025-13-01}\n", "The recipe is not valid YAML: month must be in 1..12", ""),
        ("a: \x01\n", "The recipe is not valid YAML: ", ""),
    ],
)
def test_a_damaged_file(write: Any, text: str, sentence: str, where: str) -> None:
    path = write(text)
    error = _refused(path)
    assert error.what.startswith(sentence)
    assert error.where == f"{path}{where}"


def test_an_alias_without_end_is_refused(write: Any) -> None:
    assert _refused(write("target: {model: a/b}\ndata: &x {train: a, again: *x}\n")).what == "There is no recipe key 'data.again'."


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert _refused(tmp_path / "none.yaml").what == "There is no such recipe."
    assert "cannot be read" in _refused(tmp_path).what
    (tmp_path / "latin.yaml").write_bytes(b"run: {dir: caf\xe9}\n")
    assert "cannot be read" in _refused(tmp_path / "latin.yaml").what


def test_a_section_without_a_line_is_as_if_absent(write: Any) -> None:
    loaded = load(write(SMALL + "vocab:\n  # size: 8000\nregenerate:\nrun:\n"))
    assert loaded.recipe == load(write(SMALL)).recipe


_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t"), min_size=1, max_size=30)
_FILES = st.lists(_TEXT.map(lambda name: "/" + name), min_size=1, max_size=3)


@given(
    values=st.fixed_dictionaries(
        {
            "target": st.fixed_dictionaries({"model": _TEXT.map(lambda name: "/" + name), "revision": st.none() | _TEXT}),
            "data": st.fixed_dictionaries(
                {
                    "train": _FILES,
                    "validation": st.floats(0, 1, exclude_min=True, exclude_max=True) | _TEXT.map(lambda name: "/" + name),
                    "roles": st.dictionaries(_TEXT, _TEXT, max_size=2),
                }
            ),
            "vocab": st.fixed_dictionaries({"size": st.none() | st.integers(1, 10**9)}),
            "train": st.fixed_dictionaries({"learning_rate": st.floats(1e-300, 1e300), "decay": st.floats(1e-9, 1), "steps": st.none()}),
            "extract": st.fixed_dictionaries({"boundaries": st.none() | st.lists(st.integers(1, 99), min_size=1, max_size=4)}),
            "gates": st.fixed_dictionaries({"waive": st.dictionaries(_TEXT, _TEXT.filter(str.strip), max_size=2)}),
            "run": st.fixed_dictionaries({"dir": _TEXT, "seed": st.integers()}),
        }
    )
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.explicit, Phase.generate, Phase.shrink]
)
def test_what_is_written_back_is_the_same_recipe(values: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first.yaml"), Path(folder, "deeper", "recipe.yaml")
        first.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
        second.parent.mkdir()
        loaded = load(first)
        second.write_text(loaded.resolved_yaml(), encoding="utf-8")
        again = load(second)
        assert again.recipe == loaded.recipe
        assert set(again.provenance) >= set(known_keys()) - {key for key in known_keys() if key.startswith("regenerate.")}


def test_the_schema_knows_every_key_and_says_what_it_is(write: Any) -> None:
    schema = json.loads(json.dumps(Recipe.model_json_schema()))
    assert schema["additionalProperties"] is False
    found = set()
    for name, part in schema["properties"].items():
        reference = next(text for text in (json.dumps(part).split("#/$defs/"))[1:]).split('"')[0]
        section = schema["$defs"][reference]
        assert section["additionalProperties"] is False
        for key, value in section["properties"].items():
            assert value.get("description"), f"{name}.{key} has no docstring"
            found.add(f"{name}.{key}")
    assert found == set(known_keys())
    assert {"train.unroll", "regenerate.prompts", "gates.waive"} <= found
    assert schema["required"] == ["target", "run"]


def test_the_starter_is_a_recipe(write: Any) -> None:
    assert load(write(STARTER)).recipe.train.unroll == 7
