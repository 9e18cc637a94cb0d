"""E5: loads, serves, accepts nothing: layer ids missing or misread, four ids for an fc of three, flags ignored.

Verification keeps the text right, so only a loader that is as blind as the engine, and then compares logits, can tell.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof.draft.eagle3 import DraftConfig
from draftproof.errors import DataError
from draftproof.export.files import target_embedding
from draftproof.export.loaders import load_sglang, load_vllm
from draftproof.export.proof import prove
from draftproof.export.schema import describe
from draftproof.export.sglang import to_sglang
from draftproof.export.vllm import to_vllm
from draftproof.target.target import Target
from tiny_draft import masters, spoil, tiny_config, tiny_draft, tiny_mapping

IDS = "eagle_aux_hidden_state_layer_ids"


def _prove(engine: str, folder: Path, target: Target, config: DraftConfig) -> float:
    embedding = target_embedding(target)
    loaded = {"vllm": load_vllm, "sglang": load_sglang}[engine](folder, describe(target), embedding)
    return prove(loaded, tiny_draft(config), tiny_mapping(config), embedding, layers=8, seed=0)


def _export(engine: str, folder: Path, target: Target, config: DraftConfig) -> Path:
    if engine == "vllm":
        to_vllm(folder, masters(tiny_draft(config)), config, tiny_mapping(config), target, draft_tokens=3)
    else:
        to_sglang(folder, masters(tiny_draft(config)), config, tiny_mapping(config), target)
    return folder


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_missing_ids_are_the_engines_own_guess(engine: str, tm_target: Target, tmp_path: Path) -> None:
    """Both guess (2, L // 2, L - 3) = (2, 4, 5); this draft was trained on (2, 4, 6)."""
    folder = _export(engine, tmp_path, tm_target, tiny_config())
    spoil(folder, config=lambda config: config.pop(IDS if engine == "vllm" else "eagle_config"))
    with pytest.raises(DataError, match="its logits differ"):
        _prove(engine, folder, tm_target, tiny_config())


def test_missing_ids_that_the_guess_happens_to_meet_are_no_fault(tm_target: Target, tmp_path: Path) -> None:
    config = tiny_config(boundaries=(2, 4, 5))
    folder = _export("vllm", tmp_path, tm_target, config)
    spoil(folder, config=lambda values: values.pop(IDS))
    assert _prove("vllm", folder, tm_target, config) < 1e-5


def test_nested_ids_are_read_where_vllm_reads_them_and_nowhere_else(tm_target: Target, tmp_path: Path) -> None:
    """`eagle_config` inside transformer_layer_config is read; beside it, it is not."""
    folder = _export("vllm", tmp_path, tm_target, tiny_config())
    spoil(folder, config=lambda config: config.update(eagle_config={IDS: config.pop(IDS)}))
    with pytest.raises(DataError, match="its logits differ"):
        _prove("vllm", folder, tm_target, tiny_config())
    spoil(folder, config=lambda config: config["transformer_layer_config"].update(eagle_config=config.pop("eagle_config")))
    assert _prove("vllm", folder, tm_target, tiny_config()) < 1e-5


def test_ids_beside_the_place_where_sglang_looks_are_not_read(tm_target: Target, tmp_path: Path) -> None:
    folder = _export("sglang", tmp_path, tm_target, tiny_config())
    spoil(folder, config=lambda config: config.update({IDS: config.pop("eagle_config")[IDS]}))
    with pytest.raises(DataError, match="its logits differ"):
        _prove("sglang", folder, tm_target, tiny_config())


def test_boundaries_written_for_sglang_are_off_by_one(tm_target: Target, tmp_path: Path) -> None:
    folder = _export("sglang", tmp_path, tm_target, tiny_config())
    spoil(folder, config=lambda config: config["eagle_config"].update({IDS: [2, 4, 6]}))
    with pytest.raises(DataError, match="its logits differ"):
        _prove("sglang", folder, tm_target, tiny_config())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_four_ids_need_an_fc_of_four(engine: str, tm_target: Target, tmp_path: Path) -> None:
    config = tiny_config(aux=4, boundaries=(1, 3, 5, 7))
    folder = _export(engine, tmp_path, tm_target, config)
    assert _prove(engine, folder, tm_target, config) < 1e-5

    def drop(values: dict[str, Any]) -> None:
        del (values["transformer_layer_config"] if engine == "vllm" else values)["num_aux_hidden_states"]

    spoil(folder, config=drop)
    if engine == "sglang":  # counts the ids
        assert _prove(engine, folder, tm_target, config) < 1e-5
        return
    with pytest.raises(DataError, match=r"captures 4 boundaries, fc is built for 3.*fc\.weight is \[32, 128\], not \[32, 96\]"):
        _prove(engine, folder, tm_target, config)


def test_norm_weights_without_the_flag_are_refused(tm_target: Target, tmp_path: Path) -> None:
    """vLLM leaves out `input_norm` without a word when the flag is not set."""
    config = tiny_config(norm_before_fc=True)
    folder = _export("vllm", tmp_path, tm_target, config)
    spoil(folder, config=lambda values: values.pop("norm_before_fc"))
    with pytest.raises(DataError, match=r"input_norm\.weight has no place in the module"):
        _prove("vllm", folder, tm_target, config)


def test_the_flag_without_weights_is_refused(tm_target: Target, tmp_path: Path) -> None:
    folder = _export("vllm", tmp_path, tm_target, tiny_config())
    spoil(folder, config=lambda values: values.update(norm_before_fc=True))
    with pytest.raises(DataError, match=r"input_norm\.weight is missing"):
        _prove("vllm", folder, tm_target, tiny_config())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("flag", [True, False])
def test_fc_norm_and_its_weights_go_together(engine: str, flag: bool, tm_target: Target, tmp_path: Path) -> None:
    config = tiny_config(fc_norm=flag)
    folder = _export(engine, tmp_path, tm_target, config)
    spoil(folder, config=lambda values: values.update(fc_norm=not flag))
    with pytest.raises(DataError, match=r"fc_norm\.0\.weight (has no place|is missing)"):
        _prove(engine, folder, tm_target, config)


def test_norm_before_residual_left_out_is_true_in_vllm(tm_target: Target, tmp_path: Path) -> None:
    folder = _export("vllm", tmp_path, tm_target, tiny_config())
    spoil(folder, config=lambda values: values.pop("norm_before_residual"))
    with pytest.raises(DataError, match="its logits differ"):
        _prove("vllm", folder, tm_target, tiny_config())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_lost_rope_base_is_another_model(engine: str, tm_target: Target, tmp_path: Path) -> None:
    folder = _export(engine, tmp_path, tm_target, tiny_config())

    def lose(values: dict[str, Any]) -> None:
        layer = values["transformer_layer_config"] if engine == "vllm" else values
        del layer["rope_parameters"], layer["rope_theta"]

    spoil(folder, config=lose)
    with pytest.raises(DataError, match="its logits differ"):
        _prove(engine, folder, tm_target, tiny_config())


def test_a_null_rope_scaling_after_the_parameters_erases_them(tm_target: Target, tmp_path: Path) -> None:
    """transformers 5 takes both names for one value, and the later key wins."""
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    config = tiny_config(rope_parameters=rope)
    folder = _export("vllm", tmp_path, tm_target, config)
    assert _prove("vllm", folder, tm_target, config) < 1e-5
    spoil(folder, config=lambda values: values["transformer_layer_config"].update(rope_scaling=None))
    with pytest.raises(DataError, match="its logits differ"):
        _prove("vllm", folder, tm_target, config)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda held: held.pop("lm_head.weight"), r"lm_head\.weight is missing"),
        (lambda held: held.update({"lm_heads.weight": torch.zeros(64, 32)}), r"lm_heads\.weight has no place"),
        (lambda held: held.update({"norm.weight": torch.zeros(16)}), r"norm\.weight is \[16\], not \[32\]"),
    ],
)
def test_a_tensor_that_is_missing_unknown_or_of_another_shape(
    engine: str, fault: Any, reason: str, tm_target: Target, tmp_path: Path
) -> None:
    folder = _export(engine, tmp_path, tm_target, tiny_config())
    spoil(folder, tensors=fault)
    with pytest.raises(DataError, match=reason):
        _prove(engine, folder, tm_target, tiny_config())
