"""F5: head and embedding looked up by fixed names in a fixed file layout; a random head used as teacher."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftproof.errors import DataError
from draftproof.recipe import TargetSettings
from draftproof.target.head import TargetHead
from draftproof.target.loaded import capture, load_model
from draftproof.target.target import Target, open_target
from draftproof.target.weights import embedding_name, final_norm_name, head_name, shard_problems

IDS = torch.randint(3, 300, (1, 20), generator=torch.Generator().manual_seed(0))


def saved(model: Any, folder: Path, rename: Callable[[str], str] = str, drop: str = "", **save: Any) -> Target:
    model.save_pretrained(folder, **save)
    if rename is not str or drop:
        tensors = load_file(folder / "model.safetensors")
        save_file({rename(name): tensor for name, tensor in tensors.items() if name != drop}, folder / "model.safetensors")
    return open_target(TargetSettings(model=str(folder)))


def logits(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with capture(model, ()) as captured:
        wanted = model(IDS).logits
        return captured.take()[8], wanted


def proven(target: Target, model: Any) -> list[str]:
    """The names found, proven by the logits they give."""
    weights, config = target.weights(), target.config
    final, wanted = logits(model)
    head = TargetHead.from_weights(weights, config, torch.float32, "cpu")
    assert torch.equal(head.logits(final), wanted)
    return [head_name(weights, config), embedding_name(weights, config), final_norm_name(weights, config)]


def test_single_file(tm: Any, tmp_path: Path) -> None:
    assert proven(saved(tm, tmp_path), tm) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


def test_shards_with_index(tm: Any, tmp_path: Path) -> None:
    target = saved(tm, tmp_path, max_shard_size="150KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert proven(target, tm) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


def test_tied_head_is_the_embedding(make_tm: Callable[..., Any], tmp_path: Path) -> None:
    model = make_tm(tie_word_embeddings=True)
    target = saved(model, tmp_path)
    assert "lm_head.weight" not in target.weights().names
    assert proven(target, model)[0] == "model.embed_tokens.weight"


def test_wrapper_prefix(tm: Any, tmp_path: Path) -> None:
    target = saved(tm, tmp_path, rename=lambda name: f"language_model.{name}")
    assert proven(target, tm) == [
        "language_model.lm_head.weight",
        "language_model.model.embed_tokens.weight",
        "language_model.model.norm.weight",
    ]


def test_other_names(tm: Any, tmp_path: Path) -> None:
    renamed = {"model.embed_tokens.weight": "backbone.embeddings.weight", "model.norm.weight": "backbone.norm_f.weight"}
    target = saved(tm, tmp_path, rename=lambda name: renamed.get(name, name.replace("model.", "backbone.")))
    assert proven(target, tm) == ["lm_head.weight", "backbone.embeddings.weight", "backbone.norm_f.weight"]


def test_index_naming_a_missing_shard(tm: Any, tmp_path: Path) -> None:
    target = saved(tm, tmp_path, max_shard_size="150KB")
    gone = sorted(tmp_path.glob("model-*.safetensors"))[0]
    gone.unlink()
    assert shard_problems(tmp_path) == [f"the index names {gone.name}, which is missing."]
    with pytest.raises(DataError, match=gone.name):
        target.weights()


def test_untied_by_config_but_no_head_in_the_files(tm: Any, tmp_path: Path) -> None:
    target = saved(tm, tmp_path, drop="lm_head.weight")
    with pytest.raises(DataError, match="not tied, but the files hold no LM head"):
        head_name(target.weights(), target.config)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"hold no lm_head\.weight"):
        load_model(target, "cpu")


def test_two_tensors_that_could_be_the_head(tm: Any, tmp_path: Path) -> None:
    target = saved(tm, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"draft.lm_head.weight": tensors["lm_head.weight"].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"More than one tensor could be the LM head: draft\.lm_head, lm_head"):
        head_name(target.weights(), target.config)


def test_heads_of_other_towers_and_of_blocks_do_not_count(tm: Any, tmp_path: Path) -> None:
    target = saved(tm, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    others = {"model.layers.8.embed_tokens.weight": (320, 32), "mtp.lm_head.weight": (320, 32), "vision_model.norm.weight": (48,)}
    others |= {"model.layers.0.attention.output.weight": (32, 32)}
    save_file(tensors | {name: torch.zeros(shape) for name, shape in others.items()}, tmp_path / "model.safetensors")
    assert proven(target, tm) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


def test_tied_stated_at_the_top_of_a_wrapper_only(make_tm: Callable[..., Any], tmp_path: Path) -> None:
    model = make_tm(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    inner = json.loads((tmp_path / "config.json").read_text())
    del inner["tie_word_embeddings"]
    outer = {
        "architectures": ["WrapperForConditionalGeneration"],
        "model_type": "wrapper",
        "tie_word_embeddings": True,
        "text_config": inner,
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert proven(open_target(TargetSettings(model=str(tmp_path))), model)[0] == "model.embed_tokens.weight"
