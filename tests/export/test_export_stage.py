"""The stage on real inputs: the tiny target, a draft as `train` leaves it, a mapping as `vocab` leaves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftproof.artifact import open_build, verify
from draftproof.draft.eagle3 import DraftConfig
from draftproof.draft.files import save_draft
from draftproof.errors import DataError, UsageError
from draftproof.export import stage, vllm
from draftproof.export.files import tensor_hash
from draftproof.progress import Progress
from draftproof.recipe import ExportSettings
from draftproof.records.mapping import save_mapping
from draftproof.stage import Outcome, StageTask
from tiny_draft import TD, masters, spoil, target_in, tiny_config, tiny_draft, tiny_mapping

Runner = Callable[..., tuple[Outcome, Path]]


@pytest.fixture
def run_export(tm_folder: Path, tmp_path: Path) -> Runner:
    """Runs the stage into a fresh artifact folder and seals it."""

    def run(config: DraftConfig = TD, formats: tuple[str, ...] = ("vllm", "sglang"), dtype: str = "bfloat16") -> tuple[Outcome, Path]:
        if not (tmp_path / "train").exists():
            build = open_build(tmp_path / "train", stage="train", ingredients={})
            save_draft(build.folder, config, masters(tiny_draft(config)))
            build.finish(Outcome(counts={"steps": 40, "acceptance_length": 1.75}, contents={"draft": "d"}))
            build = open_build(tmp_path / "vocab", stage="vocab", ingredients={})
            save_mapping(build.folder, tiny_mapping(config))
            build.finish(Outcome(counts={}, contents={"mapping": "m"}))
        target, settings = target_in(tm_folder, dtype), ExportSettings.model_validate({"formats": formats})
        inputs = {name: tmp_path / name for name in stage.NEEDS}
        manifests = {name: verify(path) for name, path in inputs.items()}
        ingredients = stage.ingredients(settings, target, manifests, draft_tokens=3)
        build = open_build(tmp_path / "export", stage="export", ingredients=ingredients)
        task = StageTask(inputs, build.folder, 0, "cpu", lambda point, evidence: None, Progress(quiet=True))
        outcome = stage.run(task, settings, target, draft_tokens=3)
        build.finish(outcome)
        return outcome, tmp_path / "export"

    return run


def test_both_folders_are_written_and_proven(run_export: Runner) -> None:
    outcome, folder = run_export()
    manifest = verify(folder, deep=True)
    assert set(manifest.files) == {"tensors.json", *(f"{f}/{n}" for f in ("vllm", "sglang") for n in ("config.json", "model.safetensors"))}
    assert manifest.documents == ["sglang/README.md", "vllm/README.md"]
    assert outcome.counts["largest_difference"].keys() == {"vllm", "sglang"}
    assert all(0 <= difference < 1e-5 for difference in outcome.counts["largest_difference"].values())
    # 13 weights; d2t and t2d in both, the embedding in vLLM's alone.
    assert outcome.counts["tensors"] == 13 + 3 + 13 + 2
    assert list(outcome.contents) == ["tensors"]


def test_the_recorded_hashes_are_those_of_the_files(run_export: Runner) -> None:
    import json

    _, folder = run_export(formats=("vllm",))
    recorded = json.loads((folder / "tensors.json").read_text())
    assert recorded == {"vllm": {name: tensor_hash(tensor) for name, tensor in load_file(folder / "vllm/model.safetensors").items()}}


def test_the_same_inputs_give_the_same_folder(run_export: Runner, tmp_path: Path) -> None:
    first, folder = run_export()
    before = {name: record.hash for name, record in verify(folder).files.items()}
    (tmp_path / "export").rename(tmp_path / "kept")
    second, folder = run_export()
    assert first.contents == second.contents
    assert {name: record.hash for name, record in verify(folder).files.items()} == before


def test_left_overs_of_a_killed_try_do_not_stay(run_export: Runner, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "prove", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            run_export()
    partial = tmp_path / ".export.partial"
    (partial / "sglang" / "stray.bin").write_bytes(b"x")
    _, folder = run_export()
    assert not (folder / "sglang/stray.bin").exists()


def test_another_target_dtype_or_k_is_other_work(run_export: Runner, tm_folder: Path, tmp_path: Path) -> None:
    run_export()
    manifests = {name: verify(tmp_path / name) for name in stage.NEEDS}
    settings = ExportSettings()
    base = stage.ingredients(settings, target_in(tm_folder, "bfloat16"), manifests, draft_tokens=3)
    assert stage.ingredients(settings, target_in(tm_folder, "float16"), manifests, draft_tokens=3) != base
    assert stage.ingredients(settings, target_in(tm_folder, "bfloat16"), manifests, draft_tokens=4) != base


def test_what_sglang_cannot_serve_is_refused_before_anything_is_written(run_export: Runner, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"norm_before_fc.*Set export\.formats to \[vllm\]"):
        run_export(tiny_config(norm_before_fc=True))
    assert not list((tmp_path / ".export.partial").glob("*/"))


def test_vllm_alone_takes_every_option(run_export: Runner) -> None:
    outcome, _ = run_export(tiny_config(norm_before_fc=True, qk_norm=True, norm_output=True), formats=("vllm",))
    assert outcome.counts["largest_difference"]["vllm"] < 1e-5


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"tensors": lambda held: held.update({"fc.weight": held["fc.weight"] * 1.01})}, r"differs from the trained draft in fc\.weight"),
        ({"config": lambda config: config.update(eagle_aux_hidden_state_layer_ids=[2, 4, 5])}, "layer ids"),
    ],
)
def test_a_folder_that_is_not_the_trained_draft_is_not_reported(
    run_export: Runner, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], reason: str
) -> None:
    """A fault put between writing and reading, as a bad disk or another writer would."""

    def faulty(folder: Path, *args: Any, **keywords: Any) -> dict[str, str]:
        hashes = vllm.to_vllm(folder, *args, **keywords)
        spoil(folder, **fault)
        return hashes

    monkeypatch.setattr(stage, "to_vllm", faulty)
    with pytest.raises(DataError, match=reason):
        run_export(formats=("vllm",))


def test_the_masters_are_rounded_once(run_export: Runner) -> None:
    _, folder = run_export(formats=("sglang",), dtype="float16")
    written = load_file(folder / "sglang/model.safetensors")
    assert torch.equal(written["midlayer.mlp.up_proj.weight"], masters(tiny_draft())["layers.0.mlp.up_proj.weight"].half())
