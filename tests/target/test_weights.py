"""Weights by header and byte range."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftproof.errors import DataError, UsageError
from draftproof.target.config import read_config
from draftproof.target.target import Target
from draftproof.target.weights import head_name, header_identity, open_weights, shard_problems, weight_problems


@pytest.fixture
def sharded(tm: Any, tmp_path: Path) -> Path:
    """TM in several shards with an index."""
    tm.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("model-*-of-*.safetensors"))) >= 3
    return tmp_path / "sharded"


def test_every_tensor_is_read_as_the_library_reads_it(tm: Any, sharded: Path) -> None:
    weights = open_weights(sharded)
    wanted = tm.state_dict()
    assert list(weights.names) == sorted(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(weights.read(name), tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.bool])
def test_rows_in_any_order_and_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    table = torch.randn(50, 3, 4).to(dtype)
    save_file({"a": torch.zeros(3), "table": table}, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    ids = np.array([49, 0, 7, 7, 23])
    assert torch.equal(weights.read_rows("table", ids).view(torch.uint8), table[torch.from_numpy(ids)].view(torch.uint8))
    assert weights.read_rows("table", []).shape == (0, 3, 4)
    assert weights.read("table").dtype == dtype


def test_only_the_asked_rows_are_read(tmp_path: Path) -> None:
    """A sparse file of 4 TB: reading it whole would not end."""
    rows, width = 1_000_000_000, 1024
    header = json.dumps({"big": {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, rows * width * 4]}}).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + rows * width * 4)
        stream.seek(8 + len(header) + 999_999_998 * width * 4)
        stream.write(np.full(width, 2.5, np.float32).tobytes())
    got = open_weights(tmp_path).read_rows("big", [999_999_998, 5])
    assert got[0].eq(2.5).all()
    assert got[1].eq(0).all()


def test_ids_outside_and_unknown_names(tm_target: Target) -> None:
    weights = tm_target.weights()
    for wrong in ([320], [-1]):
        with pytest.raises(UsageError, match="rows 0 to 319"):
            weights.read_rows("lm_head.weight", wrong)
    with pytest.raises(DataError, match=r"no tensor 'lm_head\.bias'"):
        weights.info("lm_head.bias")


def damage_missing(folder: Path) -> str:
    victim = sorted(folder.glob("model-*.safetensors"))[1]
    victim.unlink()
    return f"the index names {victim.name}, which is missing."


def damage_truncated(folder: Path) -> str:
    victim = sorted(folder.glob("model-*.safetensors"))[1]
    size = victim.stat().st_size
    with victim.open("r+b") as stream:
        stream.truncate(size - 100)
    return f"{victim.name} has {size - 100} bytes, its header says {size}: it is cut short."


def damage_header(folder: Path) -> str:
    victim = sorted(folder.glob("model-*.safetensors"))[1]
    with victim.open("r+b") as stream:
        stream.truncate(20)
    return f"{victim.name} is cut short inside its header (20 bytes)."


def damage_empty(folder: Path) -> str:
    victim = sorted(folder.glob("model-*.safetensors"))[1]
    victim.write_bytes(b"")
    return f"{victim.name} is cut short inside its header (0 bytes)."


def damage_extra(folder: Path) -> str:
    save_file({"x": torch.zeros(1)}, folder / "model-00099-of-00099.safetensors")
    return "model-00099-of-00099.safetensors looks like a shard, but the index does not name it."


def damage_index_names_more(folder: Path) -> str:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00099.safetensors"
    first = sorted(folder.glob("model-*.safetensors"))[0].name
    index["weight_map"]["model.ghost.weight"] = first
    path.write_text(json.dumps(index))
    return f"the index names model.ghost.weight in {first}, which does not hold it."


def damage_index_names_less(folder: Path) -> str:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = index["weight_map"].pop("model.norm.weight")
    path.write_text(json.dumps(index))
    return f"{file} holds model.norm.weight, which the index does not name."


def damage_index_json(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
    return "the index model.safetensors.index.json cannot be read"


def damage_bytes_do_not_fit(folder: Path) -> str:
    path = sorted(folder.glob("model-*.safetensors"))[0]
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(n for n in header if n != "__metadata__")
    header[name]["shape"][0] += 1
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return f"{path.name}: the bytes of {name} do not fit F32"


@pytest.mark.parametrize(
    "damage",
    [
        damage_missing,
        damage_truncated,
        damage_header,
        damage_empty,
        damage_extra,
        damage_index_names_more,
        damage_index_names_less,
        damage_index_json,
        damage_bytes_do_not_fit,
    ],
)
def test_damaged_folders_name_the_file(sharded: Path, damage: Any) -> None:
    assert shard_problems(sharded) == []
    sentence = damage(sharded)
    assert any(problem.startswith(sentence) for problem in shard_problems(sharded))
    with pytest.raises(DataError, match="not whole"):
        open_weights(sharded)


def test_all_problems_are_listed_not_the_first(sharded: Path) -> None:
    first, second, *_ = sorted(sharded.glob("model-*.safetensors"))
    first.unlink()
    with second.open("r+b") as stream:
        stream.truncate(second.stat().st_size // 2)
    found = weight_problems(sharded)
    assert len(found) == 2
    assert first.name in found[0]
    assert second.name in found[1]


def test_a_shard_missing_without_an_index_is_known_by_its_neighbours(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert shard_problems(sharded) == []
    gone = sorted(sharded.glob("model-*.safetensors"))[1]
    gone.unlink()
    assert shard_problems(sharded) == [f"{gone.name} is missing."]


def test_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert shard_problems(tmp_path) == ["there are no .safetensors files (found pytorch_model.bin)."]


def test_config_of_another_model(tm_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tm_folder, folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "vocab_size": 321}))
    found = weight_problems(folder)
    assert found == [
        "The LM head lm_head.weight is [320, 32], the config says [321, 32].",
        "The token embedding model.embed_tokens.weight is [320, 32], the config says [321, 32].",
    ]


def test_tied_config_with_a_head_of_its_own(tm_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tied"
    shutil.copytree(tm_folder, folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": True}))
    with pytest.raises(DataError, match="other values"):
        head_name(open_weights(folder), read_config(folder))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert head_name(open_weights(folder), read_config(folder)) == "lm_head.weight"


def test_identity_is_of_header_size_and_a_sample_not_of_every_value(tmp_path: Path) -> None:
    values = torch.zeros(1 << 20)  # 4 MiB

    def identity(tensor: torch.Tensor) -> object:
        save_file({"w": tensor}, tmp_path / "model.safetensors")
        return header_identity(tmp_path)

    before = identity(values)
    values[1 << 18] = 1.0
    assert identity(values) == before, "a quarter into the file nothing is read, however large it is"
    assert identity(values.bfloat16()) != before
    assert identity(values.view(1024, 1024)) != before
    values[0] = 1.0
    assert identity(values) != before
