"""F4: sizes and layers one level deeper in multimodal wrappers; the trust flag reached one loader only."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from draftproof.errors import DataError
from draftproof.gate.gate import GateContext
from draftproof.gate.target import target_remote_code
from draftproof.recipe import DataSettings, Recipe, RunSettings, TargetSettings
from draftproof.target.head import TargetHead
from draftproof.target.loaded import capture, load_model, text_parts
from draftproof.target.target import open_target
from draftproof.target.tokenizer import load_tokenizer
from draftproof.target.weights import embedding_name, final_norm_name, head_name

IDS = torch.randint(3, 300, (1, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole tiny Llava: text hidden 32, 6 layers, vocabulary 320; vision with other sizes everywhere."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"num_hidden_layers": 6, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    text = LlamaConfig(**sizes, vocab_size=320, max_position_embeddings=256)
    vision = CLIPVisionConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=96, image_size=16, patch_size=8, projection_dim=48
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=319)).eval()
    with torch.no_grad():
        model.model.language_model.norm.weight.uniform_(0.2, 3.0)
    folder = tmp_path_factory.mktemp("llava")
    model.save_pretrained(folder)
    return folder


def test_sizes_come_from_the_text_part(llava: Path) -> None:
    assert "hidden_size" not in json.loads((llava / "config.json").read_text())
    config = open_target(TargetSettings(model=str(llava))).config
    assert config.nesting == ("text_config",)
    assert (config.hidden_size, config.layers, config.vocab_size, config.intermediate_size) == (32, 6, 320, 64)
    assert (config.architecture, config.model_type) == ("LlavaForConditionalGeneration", "llama")


def test_weights_layers_and_logits_of_the_wrapped_text_model(llava: Path) -> None:
    target = open_target(TargetSettings(model=str(llava)))
    weights, config = target.weights(), target.config
    names = [resolve(weights, config) for resolve in (head_name, embedding_name, final_norm_name)]
    assert [name.rpartition("language_model.")[2] for name in names] == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    model = load_model(target, "cpu")
    parts = text_parts(model)
    assert len(parts.layers) == 6
    assert parts.paths["layers"] == "model.language_model.layers"
    with torch.no_grad(), capture(model, (2, 4)) as captured:
        wanted = model(input_ids=IDS, output_hidden_states=True)
        states = captured.take()
    assert torch.equal(states[4], wanted.hidden_states[4])
    head = TargetHead.from_weights(weights, config, torch.float32, "cpu")
    assert torch.allclose(head.logits(states[6]), wanted.logits, atol=1e-6)


def test_a_wrapper_of_somebody_elses_shape(make_tm: Callable[..., Any], tm_target: Any) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(8)), "embed": nn.Embedding(320, 48)})
            self.language_model = make_tm()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.language_model(ids).logits

    wrapper = Wrapper()
    parts = text_parts(wrapper, tm_target.config)
    assert parts.paths == {
        "layers": "language_model.model.layers",
        "embedding": "language_model.model.embed_tokens",
        "final_norm": "language_model.model.norm",
        "head": "language_model.lm_head",
    }
    assert parts.layers is wrapper.language_model.model.layers


@pytest.fixture
def shipped(tmp_path: Path, tt_plain: Any) -> Path:
    """A folder whose config, model and tokenizer are Python files of its own."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    files = {
        "configuration_tiny.py": """
            from transformers import LlamaConfig

            class TinyConfig(LlamaConfig):
                model_type = "tiny_shipped"
        """,
        "modeling_tiny.py": """
            from transformers import LlamaForCausalLM
            from .configuration_tiny import TinyConfig

            class TinyForCausalLM(LlamaForCausalLM):
                config_class = TinyConfig
        """,
        "tokenization_tiny.py": """
            from transformers import PreTrainedTokenizerFast

            class TinyTokenizer(PreTrainedTokenizerFast):
                pass
        """,
    }
    for name, text in files.items():
        (folder / name).write_text(textwrap.dedent(text))
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 8, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 320}
    LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=2)).save_pretrained(folder)
    tt_plain.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    shipped = {"AutoConfig": "configuration_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
    config |= {"model_type": "tiny_shipped", "architectures": ["TinyForCausalLM"], "auto_map": shipped}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "TinyTokenizer", "auto_map": {"AutoTokenizer": [None, "tokenization_tiny.TinyTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def ask(settings: TargetSettings) -> Any:
    recipe = Recipe(target=settings, data=DataSettings(train=("x",)), run=RunSettings(dir="r"))
    return target_remote_code(GateContext("extract", "before", recipe, open_target(settings), {}, Path("out"), None))


def test_without_the_flag_nothing_of_the_folder_runs(shipped: Path) -> None:
    (shipped / "configuration_tiny.py").write_text("raise SystemExit('this code ran')\n")
    settings = TargetSettings(model=str(shipped))
    finding = ask(settings)
    assert finding.status == "fail"
    assert "'tiny_shipped' needs code that comes with the target" in finding.evidence
    with pytest.raises(DataError, match="cannot load the target"):
        load_model(open_target(settings), "cpu")


def test_with_the_flag_every_loader_gets_it(shipped: Path) -> None:
    settings = TargetSettings(model=str(shipped), trust_remote_code=True)
    finding = ask(settings)
    assert finding.status == "pass"
    assert all(name in finding.evidence for name in ("configuration_tiny.py", "modeling_tiny.py", "tokenization_tiny.py"))
    target = open_target(settings)
    model = load_model(target, "cpu")
    assert [type(model).__name__, type(model.config).__name__] == ["TinyForCausalLM", "TinyConfig"]
    assert type(load_tokenizer(target)).__name__ == "TinyTokenizer"


def test_changed_code_is_another_target(shipped: Path) -> None:
    settings = TargetSettings(model=str(shipped), trust_remote_code=True)
    before = open_target(settings).fingerprint
    (shipped / "modeling_tiny.py").write_text((shipped / "modeling_tiny.py").read_text() + "\n")
    assert open_target(settings).fingerprint != before
