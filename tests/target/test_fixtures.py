"""The shared fixtures are what they say they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def test_tiny_tokenizer_round_trips_and_stops_at_im_end(tt_plain: Any, tt_gen: Any) -> None:
    for tokenizer in (tt_plain, tt_gen):
        assert len(tokenizer) == 300
        assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|im_end|>", 2, 0)
        text = "The river, a ship: naïve 42!"
        assert tokenizer.decode(tokenizer.encode(text)) == text
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True)
        assert rendered == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


def test_only_the_generation_variant_gives_a_mask(tt_plain: Any, tt_gen: Any) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "river"}]
    sums = {}
    for name, tokenizer in (("plain", tt_plain), ("gen", tt_gen)):
        out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        sums[name] = sum(out["assistant_masks"])
        answer = len(tokenizer.encode("river<|im_end|>"))
    assert sums == {"plain": 0, "gen": answer}


def test_saved_target_loads_as_the_same_model(tm: Any, tm_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(tm_folder)
    assert loaded.state_dict().keys() == tm.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in tm.state_dict().items())
    assert 0.2 <= tm.model.norm.weight.min().item() < 1 < tm.model.norm.weight.max().item() <= 3.0
    assert AutoTokenizer.from_pretrained(tm_folder).eos_token_id == 2
