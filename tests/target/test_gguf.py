"""GGUF targets: a tiny one written here by the format's own library, and the real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftproof.errors import DataError, UsageError
from draftproof.target.gguf import convert_gguf

IM_START, IM_END = 1, 2


def write_gguf(path: Path, model: Any, tokenizer: Any, *, eos: int = IM_START, pre: str = "smollm", template: bool = True) -> Path:
    """A Llama in F32 with a GPT-2 tokenizer. By default its eos is wrong, as some readers take it."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if index <= IM_END else 1 for _, index in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in core["model"]["merges"]])
    writer.add_bos_token_id(IM_START)
    writer.add_eos_token_id(eos)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    if template:
        writer.add_chat_template(tokenizer.chat_template)

    def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
        """GGUF interleaves the two rotary halves of q and k."""
        return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)

    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"}
    names |= {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if ".layers." in name:
            _, _, index, rest = name.removesuffix(".weight").split(".", 3)
            heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}.get(rest)
            writer.add_tensor(f"blk.{index}.{names[rest]}.weight", permuted(values, heads) if heads else values)
        else:
            outer = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}[name]
            writer.add_tensor(f"{outer}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny_model(make_tm: Callable[..., Any]) -> Any:
    return make_tm(vocab_size=300)


@pytest.fixture(scope="module")
def tiny(tiny_model: Any, tt_plain: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model, tt_plain)


@pytest.fixture(scope="module")
def converted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_gguf(tiny, tmp_path_factory.mktemp("cache"))


def test_converted_model_is_the_one_that_was_written(converted: Path, tiny_model: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(converted)
    assert model.dtype == torch.bfloat16
    wanted = tiny_model.state_dict()
    assert model.state_dict().keys() == wanted.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, wanted[name].bfloat16()), name


def test_the_stop_token_is_the_templates_whatever_the_file_says(converted: Path, tt_plain: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", IM_END)
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == [IM_END, IM_START]
    assert json.loads((converted / "config.json").read_text())["eos_token_id"] == IM_END
    assert tokenizer.chat_template == tt_plain.chat_template


def test_text_is_split_as_the_gguf_names_it(converted: Path) -> None:
    """`smollm` sets every digit apart before anything else; GPT-2's split would join the spaces with the digit."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    pieces = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  42 b")]
    assert pieces == ["a", "ĠĠ", "4", "2", "Ġb"]
    assert tokenizer.decode(tokenizer.encode("a  42 b")) == "a  42 b"


def test_same_bytes_same_folder_other_bytes_another(tiny: Path, converted: Path, tmp_path: Path) -> None:
    cache = converted.parent.parent
    started = time.perf_counter()
    copy = tmp_path / "tiny.gguf"
    shutil.copy(tiny, copy)
    assert convert_gguf(copy, cache) == converted
    assert time.perf_counter() - started < 0.5


def start_converter(path: Path, cache: Path) -> subprocess.Popen[str]:
    """A process of its own, as another `draftproof` would be."""
    code = f"print(convert_gguf(Path({str(path)!r}), Path({str(cache)!r})))"
    code = f"from pathlib import Path; from draftproof.target.gguf import convert_gguf; {code}"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.slow
def test_two_processes_at_once_give_one_whole_folder(tiny: Path, tmp_path: Path) -> None:
    workers = [start_converter(tiny, tmp_path) for _ in range(2)]
    found = {worker.communicate(timeout=180)[0].strip() for worker in workers}
    assert [worker.returncode for worker in workers] == [0, 0]
    assert len(found) == 1
    assert sorted(path.name for path in (tmp_path / "gguf").iterdir() if path.is_dir()) == [Path(found.pop()).name]


def test_killed_while_converting_leaves_nothing_that_counts(tiny: Path, tmp_path: Path) -> None:
    worker = start_converter(tiny, tmp_path)
    while not list(tmp_path.glob("gguf/.*.tmp")):
        assert worker.poll() is None
        time.sleep(0.002)
    worker.kill()
    worker.communicate()
    assert not [path for path in (tmp_path / "gguf").iterdir() if not path.name.startswith(".")]
    folder = convert_gguf(tiny, tmp_path)
    assert sorted(path.name for path in folder.parent.iterdir() if path.is_dir()) == [folder.name]


def test_bad_files(tiny: Path, tiny_model: Any, tt_plain: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such GGUF"):
        convert_gguf(tmp_path / "none.gguf", tmp_path)
    (tmp_path / "zip.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(DataError, match="not a GGUF"):
        convert_gguf(tmp_path / "zip.gguf", tmp_path)
    whole = tiny.read_bytes()
    for cut in (6, 100, 5_000, len(whole) // 2, len(whole) - 200):
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        with pytest.raises(DataError, match="damaged or cut short"):
            convert_gguf(tmp_path / "cut.gguf", tmp_path)
    other = write_gguf(tmp_path / "pre.gguf", tiny_model, tt_plain, pre="deepseek-coder")
    with pytest.raises(UsageError, match="gpt2/deepseek-coder are not supported"):
        convert_gguf(other, tmp_path)
    silent = write_gguf(tmp_path / "base.gguf", tiny_model, tt_plain, template=False)
    with pytest.raises(UsageError, match="no chat template"):
        convert_gguf(silent, tmp_path)
    assert not [path for path in (tmp_path / "gguf").iterdir() if path.is_dir()]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs")
def test_too_little_disk_is_said_before_anything_is_written(tiny: Path, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from draftproof.errors import Stopped; from draftproof.target.gguf import convert_gguf\n"
        f"cache = Path({str(tmp_path)!r})\n"
        f"try: convert_gguf(Path({str(tiny)!r}), cache)\n"
        "except Stopped as error: print(error.what, [p for p in (cache / 'gguf').iterdir() if p.is_dir()])"
    )
    mounted = f'mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec "$0" -c "$1"'
    done = subprocess.run(["unshare", "-m", "sh", "-c", mounted, sys.executable, code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Converting the GGUF needs 0.1 GB of disk; 0.0 GB are free. []"


@pytest.mark.slow
def test_smollm2_special_tokens(smollm2: Path) -> None:
    """What the hub's own SmolLM2-135M-Instruct says: eos 2, ids of a rendered prompt, digits one by one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, len(tokenizer)) == ("<|im_end|>", 2, 49152)
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == [2]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "2024"}], tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\n2024<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(text)
    assert ids.count(1) == 3
    assert ids.count(2) == 2
    assert len(tokenizer.encode("2024")) == 4
