"""What a folder is, and whether it is whole: a run, an artifact, a draft for an engine, a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml

from draftproof.artifact import MANIFEST, Manifest, partial_folder, problems, read_json, read_manifest
from draftproof.errors import DamagedArtifact, DraftproofError, UsageError
from draftproof.pipeline import STAGE_NAMES


def describe(path: Path, *, deep: bool = False) -> dict[str, Any]:
    """`{kind, whole, problems, lines, ...}` of a path. Raises UsageError when nothing is there, or nothing we know."""
    if not path.exists():
        raise UsageError("There is nothing at this path.", where=str(path), remedy="Check the spelling.")
    if (path / "recipe.yaml").is_file():
        return _run(path, deep=deep)
    if (path / MANIFEST).is_file():
        return _artifact(path, deep=deep)
    if (path / "config.json").is_file():
        config = read_json(path / "config.json")
        if isinstance(config, dict) and ("speculators_model_type" in config or "eagle_config" in config):
            return _export(path, config, deep=deep)
        return _target(path)
    if path.name.startswith(".") and path.name.endswith(".partial"):
        return _facts(
            "unfinished artifact", ["It was not finished; running the same command again goes on from it."], [f"{path}: unfinished"]
        )
    raise UsageError(
        "This is no run, artifact, exported draft or target.", where=str(path), remedy="A run has recipe.yaml, an artifact manifest.json."
    )


def _run(path: Path, *, deep: bool) -> dict[str, Any]:
    wrong: list[str] = []
    try:
        recipe = yaml.safe_load((path / "recipe.yaml").read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError):
        recipe = None
    if not isinstance(recipe, dict):
        wrong.append("recipe.yaml is damaged.")
        recipe = {"regenerate": (path / "regenerate").exists()}
    wanted = [name for name in STAGE_NAMES if name != "regenerate" or recipe.get("regenerate")]
    lines = [f"run {path}"]
    stages: dict[str, dict[str, Any]] = {}
    for name in wanted:
        stages[name] = state = _stage_state(path / name, deep=deep)
        wrong += [f"{name}: {problem}" for problem in state["problems"]]
        lines.append(f"  {name:<11} {state['state']:<11} {state['summary']}")
    report = path / "report.html"
    lines.append(f"  {'report':<11} {'there' if report.is_file() else 'missing':<11} {report if report.is_file() else ''}")
    facts = _facts("run", wrong, lines)
    if all(state["state"] in ("whole", "missing", "unfinished") for state in stages.values()):
        facts["remedy"] = "Run the same command again: it goes on from here."
    return {**facts, "stages": stages}


def _stage_state(folder: Path, *, deep: bool) -> dict[str, Any]:
    if not folder.exists():
        begun = partial_folder(folder).is_dir()
        return {
            "state": "unfinished" if begun else "missing",
            "problems": ["it was begun and not finished." if begun else "it was not made."],
            "summary": "",
        }
    try:
        manifest = read_manifest(folder)
        wrong = problems(folder, manifest, deep=deep)
    except DraftproofError as error:
        return {"state": "damaged", "problems": [error.what], "summary": error.what}
    summary = wrong[0] if wrong else _summary(manifest)
    return {"state": "damaged" if wrong else "whole", "problems": wrong, "summary": summary, "fingerprint": manifest.fingerprint}


def _summary(manifest: Manifest) -> str:
    size = sum(record.size for record in manifest.files.values())
    shown = [
        f"{key} {_short(value)}" for key, value in manifest.counts.items() if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return f"{len(manifest.files)} files, {size / 2**20:,.1f} MiB; " + ", ".join(shown[:4])


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def _artifact(path: Path, *, deep: bool) -> dict[str, Any]:
    try:
        manifest = read_manifest(path)
    except DamagedArtifact as error:
        return _facts("artifact", [error.what], [f"artifact {path}: {error.what}"])
    wrong = problems(path, manifest, deep=deep)
    lines = [f"{manifest.stage} artifact {path}: {'damaged' if wrong else 'whole'}", f"  {_summary(manifest)}"]
    lines += [
        f"  made {manifest.ended} on {manifest.host}, fingerprint {manifest.fingerprint[:16]}",
        *(f"  {problem}" for problem in wrong),
    ]
    return {**_facts(f"{manifest.stage} artifact", wrong, lines), "manifest": manifest.model_dump(mode="json")}


def _export(path: Path, config: dict[str, Any], *, deep: bool) -> dict[str, Any]:
    """A draft folder for an engine. The strict loaders also want the target; here the folder is judged by itself.

    `deep` compares every tensor with what the export recorded beside the folder.
    """
    from draftproof.export.loaders import folder_problems
    from draftproof.export.sglang import from_sglang
    from draftproof.export.vllm import from_vllm

    engine: Literal["vllm", "sglang"] = "vllm" if "speculators_model_type" in config else "sglang"
    compared = ""
    try:
        (from_vllm if engine == "vllm" else from_sglang)(path)
        wrong = [f"{problem}." for problem in folder_problems(path, engine)]
        if deep:
            changed, compared = _changed_tensors(path)
            wrong += changed
    except DraftproofError as error:
        wrong = [error.what]
    lines = [f"EAGLE-3 draft for {engine}, {path}: {'whole' if not wrong else 'damaged'}", *(f"  {problem}" for problem in wrong)]
    lines += [f"  {compared}"] if compared else []
    return {**_facts(f"{engine} draft", wrong, lines), "config": config}


def _changed_tensors(path: Path) -> tuple[list[str], str]:
    """Problems, and a line for people: what an export folder was compared with."""
    from draftproof.export.files import read_tensors, tensor_hash
    from draftproof.export.stage import HASHES

    record = path.parent / HASHES
    recorded = read_json(record).get(path.name) if record.is_file() else None
    if recorded is None:
        return [], f"Its bytes were compared with nothing: there is no {HASHES} of its export beside it."
    found = {name: tensor_hash(tensor) for name, tensor in read_tensors(path).items()}
    wrong = [f"{name} is not what was exported." for name in sorted({*recorded, *found}) if recorded.get(name) != found.get(name)]
    return wrong, f"{len(found)} tensors compared with {record}."


def _target(path: Path) -> dict[str, Any]:
    from draftproof.target.config import read_config
    from draftproof.target.weights import weight_problems

    try:
        config = read_config(path)
        wrong = weight_problems(path)
    except DraftproofError as error:
        return _facts("target", [error.what], [f"target {path}: {error.what}"])
    lines = [
        f"target {path}: {'damaged' if wrong else 'whole'}",
        f"  {config.architecture}, {config.layers} layers, hidden {config.hidden_size}, vocabulary {config.vocab_size:,}, {config.dtype}"
        + (f", quantised ({config.quantization})" if config.quantization else ""),
        "  Proven are the index, the sizes and the headers of its files; nothing records what the bytes of its weights should be.",
        *(f"  {problem}" for problem in wrong),
    ]
    return {**_facts("target", wrong, lines), "config": config.__dict__}


def _facts(kind: str, wrong: list[str], lines: list[str]) -> dict[str, Any]:
    return {
        "kind": kind,
        "whole": not wrong,
        "problems": wrong,
        "lines": lines,
        "remedy": "Make it again, for a run with --from STAGE." if wrong else "",
    }
