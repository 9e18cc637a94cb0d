"""The recipe: one typed description of a run.

    loaded = load("examples/smollm2-cpu.yaml", ["train.unroll=5"])
    loaded.recipe.train.unroll          # 5
    loaded.provenance["train.unroll"]   # 'command line'

Pydantic is the only source: YAML keys, command-line overrides, the JSON schema and the reference in
the docs all come from the classes below. Unknown keys are refused with the nearest known one. Every
default says why it is that.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from draftproof.errors import UsageError


class Section(BaseModel):
    """A part of the recipe: immutable, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads `yes` and `on` as true, and Pydantic would take that for 1."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("must not be true or false")
        return value


class TargetSettings(Section):
    """The target LLM."""

    model: str
    """A folder in Hugging Face layout, a hub id, or a `.gguf` file (converted once, cached)."""
    revision: str | None = None
    """Hub revision. None: the default branch; what was taken is recorded in the target's fingerprint."""
    trust_remote_code: bool = False
    """Run Python code shipped with the target. Off, since a folder of weights should not run code unasked."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """`auto`: what the target's config says."""


class DataSettings(Section):
    """The conversations to train on."""

    train: tuple[str, ...] = ()
    """`messages` JSONL files. May be empty when `regenerate` makes the conversations."""
    validation: float | str = 0.02
    """A share of the conversations, chosen by content hash, or a file. 2 % is enough to rank checkpoints."""
    max_length: int = Field(4096, ge=8)
    """Longest row in tokens; longer ones are cut. 4096 holds most chat answers."""
    roles: dict[str, str] = {}
    """Map of unknown role names to system, user, assistant or tool."""
    skip_bad_lines: int = Field(0, ge=0)
    """Damaged lines that may be skipped (and counted). 0, since a damaged file is usually a lost one."""
    minimum_kept: float = Field(0.5, ge=0, le=1)
    """Fail when a smaller share of conversations is kept: then something is wrong with all of them."""

    @field_validator("train", mode="before")
    @classmethod
    def _one_file_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("validation")
    @classmethod
    def _share(cls, value: float | str) -> float | str:
        if isinstance(value, float | int) and not 0 < value < 1:
            raise ValueError("must be a share between 0 and 1, or a file")
        return value


class RegenerateSettings(Section):
    """Answers by the target itself, so that the draft learns what it will have to predict."""

    prompts: str
    """JSONL of `messages` that end with a user turn; a trailing assistant turn is replaced."""
    max_tokens: int = Field(512, ge=1)
    """Longest answer in tokens. 512 holds most chat answers; longer ones end with finish_reason `length`."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy, which is what greedy serving will ask the draft to predict."""
    batch_size: int = Field(32, ge=1)
    """Prompts answered together in process. 32 keeps a CPU busy and fits a small GPU."""


_AUTO_VOCABULARY = 32_000
"""Tokens of `vocab.size: auto`."""


class VocabSettings(Section):
    """The draft vocabulary."""

    size: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Tokens the draft can propose. auto: 32,000, which cover over 95 % of answers of most targets, or all that the
    tokenizer names where those are fewer. None: every row of the target's head."""

    def at_most(self, rows: int) -> int:
        """The size, for a target's LM head of so many rows; the tokenizer may name fewer ids than `auto` says here."""
        return rows if self.size is None else min(_AUTO_VOCABULARY, rows) if self.size == "auto" else self.size


class ExtractSettings(Section):
    """The hidden states of the target."""

    engine: Literal["transformers"] = "transformers"
    """What runs the target."""
    boundaries: tuple[int, ...] | None = None
    """Aux boundaries. None: (2, L // 2, L - 3), the ones published drafts use."""
    codec: Literal["bf16", "fp8"] = "bf16"
    """How aux states are stored. fp8 halves the bytes; the final boundary stays bf16."""
    shard_gb: float = Field(2.0, gt=0)
    """Size of a shard in GB. A crash loses at most the open one; 2 GB is minutes of work on one GPU."""
    batch_tokens: int = Field(8192, ge=1)
    """Tokens in one forward, padding included. 8,192 fills a GPU and bounds the memory. A CPU gets at most 1,024, which
    stay in its caches."""
    canary_rows: int = Field(10, ge=1)
    """Rows that must prove parity before the bulk runs. Ten cover lengths, repeats and a long one."""


class DraftSettings(Section):
    """The shape of the draft. Sizes that are None follow the target."""

    intermediate_size: int | None = Field(None, ge=1)
    """MLP width. None: the target's."""
    qk_norm: bool = False
    """RMSNorm on each head of q and k (Qwen3 style)."""
    norm_before_fc: bool = False
    """EAGLE-3.1: one RMSNorm over the concatenated aux states."""
    fc_norm: bool = False
    """EAGLE-3.1: an RMSNorm on each aux state."""
    start: Literal["target", "state", "random"] = "target"
    """First weights: `state` passes the last aux boundary through; `target` does so into the target's last decoder
    layer, where its shapes fit; `random` is neither. docs/quality.md has the three side by side."""
    norm_output: bool = False
    """EAGLE-3.1: the state fed to the next step is taken after the final norm."""

    @model_validator(mode="after")
    def _one_norm(self) -> DraftSettings:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        return self


class TrainSettings(Section):
    """Training-time test: S unrolled steps from the target's states."""

    steps: int | None = Field(None, ge=1)
    """Optimizer steps. None: as many as `epochs` needs."""
    epochs: float = Field(2.0, gt=0)
    """Passes over the training rows. Two is where held-out acceptance of small runs flattens."""
    unroll: int = Field(7, ge=1, le=16)
    """S, the drafted steps seen in training. 7 follows the paper; use draft_tokens or more."""
    decay: float = Field(0.8, gt=0, le=1)
    """Weight of step k is decay**k: later steps count less since they are reached less often."""
    batch_tokens: int = Field(16384, ge=16)
    """Tokens of packed rows in one optimizer step."""
    learning_rate: float = Field(1e-3, gt=0)
    """Peak of the cosine schedule. 1e-3 won on SmolLM2; larger drafts want 1e-4 to 4e-4."""
    warmup: float = Field(0.03, ge=0, lt=1)
    """Share of the steps with a rising learning rate."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's. 0, since the draft sees each token only a few times."""
    clip: float = Field(0.5, gt=0)
    """Largest global gradient norm."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute dtype over fp32 masters. auto: bf16 on a GPU, fp32 on a CPU (faster there, and exact)."""
    head: Literal["frozen", "trainable"] = "trainable"
    """The draft's LM head starts from the target's rows; trainable wins at a small draft vocabulary."""
    evaluations: int = Field(8, ge=1)
    """Held-out forecasts over the whole training; the best one's weights are exported."""
    checkpoints: int = Field(8, ge=1)
    """Resumable checkpoints over the whole training; a crash loses at most the work between two."""


class EvaluateSettings(Section):
    """How well the draft works."""

    bench: tuple[str, ...] = ()
    """JSONL prompts ({id, category, turns}). Empty: the prompts of the validation rows."""
    draft_tokens: int = Field(3, ge=1, le=16)
    """K, drafted tokens a cycle (a chain). 3 is what published chain figures use."""
    max_tokens: int = Field(128, ge=1)
    """Longest answer. 128 tokens show the steady acceptance of an answer."""
    prompts: int | None = Field(None, ge=1)
    """At most this many prompts, evenly spread. None: all."""
    batch_size: int = Field(16, ge=1)
    """Prompts decoded together by the reference decoder. 16 keeps a CPU busy; a GPU takes 128."""
    serve: Literal["auto", "vllm", "none"] = "none"
    """Serve the exported draft and read the engine's own acceptance. auto: when vLLM is installed.
    none by default until the engine's gate stands before it."""
    serve_timeout_s: float = Field(3600.0, gt=0)
    """Longest time for starting the engine and serving all prompts. An hour covers a load of 20 minutes."""

    @field_validator("bench", mode="before")
    @classmethod
    def _one_file_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class ExportSettings(Section):
    """Which engines' folders to write."""

    formats: tuple[Literal["vllm", "sglang"], ...] = ("vllm", "sglang")
    """Both cost seconds; each is proven by a strict loader."""


class MachineSettings(Section):
    """The machine that works, and who else may hold it."""

    gpus: Literal["auto", "all"] | tuple[Annotated[int, Field(ge=0)], ...] = "auto"
    """GPUs that must be free, as NVML counts them. auto: the ones the run will use, none on a CPU."""
    units: tuple[str, ...] = ()
    """Services that may hold these GPUs and may be stopped for the run: `vllm.service`, `user:vllm.service`, `docker:ID`."""
    hosts: tuple[str, ...] = ()
    """Other hosts, as ssh knows them, whose machines must be fit as well."""
    watch_s: Annotated[float, Field(gt=0)] | None = 1.0
    """Seconds between two looks while a target loads; None: no watch."""

    @field_validator("units", "hosts", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class GateSettings(Section):
    """The checkpoints before each stage."""

    gpu_memory_mib: int = Field(0, ge=0)
    """Memory that may be in use on a free GPU, without what the driver keeps for itself. 0, since a stale worker can be small."""

    waive: dict[str, str] = {}
    """Check name to the reason why its verdict is overruled; the report shows it."""

    @field_validator("waive")
    @classmethod
    def _with_a_reason(cls, waive: dict[str, str]) -> dict[str, str]:
        for check, reason in waive.items():
            if not reason.strip():
                raise ValueError(f"give the reason why {check} is waived")
        return waive


class RunSettings(Section):
    """Where and how the run works."""

    dir: str
    """The run folder."""
    seed: int = 0
    """Seed of every random choice."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU when there is one."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of torch. None: all cores. Fixed threads make CPU results the same bit for bit."""


class Recipe(Section):
    """A run, whole."""

    target: TargetSettings
    data: DataSettings = DataSettings()
    regenerate: RegenerateSettings | None = None
    """Absent: `data.train` is used as it is."""
    vocab: VocabSettings = VocabSettings()
    extract: ExtractSettings = ExtractSettings()
    draft: DraftSettings = DraftSettings()
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    export: ExportSettings = ExportSettings()
    machine: MachineSettings = MachineSettings()
    gates: GateSettings = GateSettings()
    run: RunSettings

    @model_validator(mode="after")
    def _some_data(self) -> Recipe:
        if not self.data.train and self.regenerate is None:
            raise ValueError("give data.train (conversations) or regenerate.prompts (prompts to answer)")
        if self.data.train and self.regenerate is not None:
            raise ValueError("give data.train or regenerate, not both: regenerate makes the conversations")
        return self


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe with where each value came from."""

    recipe: Recipe
    provenance: dict[str, str]
    """Dotted key to `default`, `command line` or `FILE:LINE`."""

    def resolved_yaml(self) -> str:
        """The whole recipe as YAML, each value followed by its origin as a comment."""
        lines: list[str] = []
        for section, values in self.recipe.model_dump(mode="json").items():
            if not isinstance(values, dict):
                lines.append(f"{section}: {_scalar(values)}  # {self.provenance.get(section, 'default')}")
                continue
            lines.append(f"{section}:")
            for key, value in values.items():
                origin = self.provenance.get(f"{section}.{key}", "default")
                lines.append(f"  {key}: {_scalar(value)}  # {origin}")
        return "\n".join(lines) + "\n"


def load(path: str | Path, overrides: Sequence[str] = (), *, run_dir: str | None = None) -> LoadedRecipe:
    """Read a recipe file and apply `section.key=value` overrides.

    Relative paths are taken from the recipe's folder, those of overrides and `run.dir` from the current one.
    Raises UsageError with file, line and the nearest known key.
    """
    path = Path(path)
    values, lines = _read_yaml(path)
    provenance = {key: f"{path.name}:{line}" for key, line in lines.items()}
    _anchor_paths(values, path.parent.resolve())
    for section in [name for name, value in values.items() if value is None and name != "regenerate"]:
        del values[section]  # a section whose every line is commented out
    for override in overrides:
        key, value = _parse_override(override)
        _assign(values, key, _anchor(value, Path.cwd(), key) if key in _PATH_KEYS else value)
        provenance[key] = "command line"
    if run_dir is not None:
        _assign(values, "run.dir", run_dir)
        provenance["run.dir"] = "command line"
    values.setdefault("run", {})
    if isinstance(values["run"], dict):
        values["run"].setdefault("dir", f"runs/{path.stem}")
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise _explain(error, provenance, path) from None
    return LoadedRecipe(recipe, provenance)


def known_keys() -> list[str]:
    """Every dotted key a recipe may have."""
    return list(_walk(Recipe))


def _walk(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        section = _section_class(field.annotation)
        if section is None:
            yield prefix + name
        else:
            yield from _walk(section, f"{prefix}{name}.")


def _section_class(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Values, and the line of each dotted key."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError("There is no such recipe.", where=str(path), remedy="Start from one with `draftproof recipe init`.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The recipe cannot be read: {error}.", where=str(path), remedy="Give a text file.") from None
    try:
        values = yaml.safe_load(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2025-13-01
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise UsageError(f"The recipe is not valid YAML: {problem}.", where=where, remedy="Mend that line.") from None
    if not isinstance(values, dict):
        raise UsageError("The recipe is not a mapping of sections.", where=str(path), remedy="See `draftproof recipe schema`.")
    lines: dict[str, int] = {}

    def visit(node: yaml.Node | None, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode) and prefix.count(".") < _DEEPEST:
            for key, value in node.value:
                dotted = f"{prefix}{key.value}"
                if dotted in lines:
                    raise UsageError(f"The key {dotted} stands twice.", where=f"{path}:{key.start_mark.line + 1}", remedy="Keep one.")
                lines[dotted] = key.start_mark.line + 1
                visit(value, dotted + ".")

    visit(root, "")
    return values, lines


_DEEPEST = 3
"""Levels of keys that are looked at; a YAML alias can nest without end."""

_PATH_KEYS = ("target.model", "data.train", "data.validation", "regenerate.prompts", "evaluate.bench")


def _anchor_paths(values: dict[str, Any], folder: Path) -> None:
    for dotted in _PATH_KEYS:
        section, key = dotted.split(".")
        part = values.get(section)
        if not isinstance(part, dict):
            continue
        if key in part:
            part[key] = _anchor(part[key], folder, dotted)


def _anchor(value: Any, folder: Path, dotted: str) -> Any:
    if isinstance(value, list):
        return [_anchor(item, folder, dotted) for item in value]
    return _anchored(value, folder, hub_ids=dotted == "target.model") if isinstance(value, str) else value


def _anchored(value: str, folder: Path, *, hub_ids: bool = False) -> str:
    path = Path(value).expanduser()
    if path.is_absolute():
        return str(path)
    if hub_ids and not value.startswith(".") and value.count("/") <= 1 and not (folder / path).exists():
        return value  # ORGANISATION/NAME of the hub
    return str(folder / path)


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise UsageError(f"{text!r} is not an override.", remedy="Write section.key=value, for example train.unroll=5.")
    if key not in known_keys():
        raise UsageError(f"There is no recipe key {key!r}.", remedy=_nearest(key, known_keys()))
    try:
        return key, yaml.safe_load(raw)
    except (yaml.YAMLError, ValueError):
        raise UsageError(f"The value of {key} is not valid YAML: {raw!r}.", remedy="Quote it.") from None


def _assign(values: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, key = dotted.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if inner is None:
            inner = values[section] = {}
        if not isinstance(inner, dict):
            raise UsageError(f"{section} is not a section with keys.", remedy=f"Remove its value, then set {dotted}.")
        values = inner
    values[key] = value


def _nearest(name: str, known: Sequence[str]) -> str:
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"Did you mean {match[0]!r}?" if match else "`draftproof recipe schema` lists them all."


def _explain(error: ValidationError, provenance: dict[str, str], path: Path) -> UsageError:
    """All problems in one sentence each; the first one's place and remedy."""
    sentences, remedy, where = [], "`draftproof recipe schema` lists every key and its values.", str(path)
    for index, problem in enumerate(error.errors()):
        dotted = ".".join(str(part) for part in problem["loc"])
        if problem["type"] not in ("extra_forbidden", "missing"):
            dotted = _setting(dotted)
        if problem["type"] == "extra_forbidden":
            sentences.append(f"There is no recipe key {dotted!r}.")
            hint = _nearest(dotted, known_keys() + list(Recipe.model_fields))
        elif problem["type"] == "missing":
            sentences.append(f"The recipe lacks {dotted!r}.")
            hint = f"Add {dotted}."
        else:
            message = problem["msg"].removeprefix("Value error, ")
            sentences.append(f"{dotted or 'The recipe'}: {message} (given: {problem['input']!r})." if dotted else f"The recipe: {message}.")
            hint = remedy
        if index == 0:
            remedy, where = hint, next((provenance[key] for key in _upwards(dotted) if key in provenance), str(path))
    return UsageError(" ".join(dict.fromkeys(sentences)), where=where, remedy=remedy)


def _setting(dotted: str) -> str:
    """The recipe key that a place inside Pydantic's schema belongs to: `data.validation.float` is `data.validation`."""
    return next((key for key in _upwards(dotted) if key in known_keys() or key in Recipe.model_fields), "")


def _upwards(dotted: str) -> Iterator[str]:
    """`a.b.c`, `a.b`, `a`"""
    while dotted:
        yield dotted
        dotted = dotted.rpartition(".")[0]


def _scalar(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")  # not strip(): a name may end with a space that YAML does not know


STARTER = """\
# A draft for one target. `draftproof recipe schema` lists every key; `draftproof plan` says what it will take.
target: {model: PATH_OR_HUB_ID}
regenerate: {prompts: PROMPTS.jsonl, max_tokens: 512}   # or data: {train: [CONVERSATIONS.jsonl]}
vocab: {size: auto}   # 32000, or all tokens of a smaller tokenizer
train: {epochs: 2, unroll: 7}
evaluate: {draft_tokens: 3}
run: {dir: runs/first}
"""
