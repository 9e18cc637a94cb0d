"""Batched generation against a loop that runs one prompt at a time without any cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftproof.regenerate.generate import _shared_start, generate

PROMPTS = [[5, 9, 3], [7], [11, 4, 8, 15, 16, 23, 42], [100, 200, 300, 31], [8, 8], [250, 3, 17, 99, 120]]


def _naive(model, prompt, stops, limit):
    ids = list(prompt)
    while len(ids) - len(prompt) < limit:
        with torch.inference_mode():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def stops(tm):
    """Ids that end some answers early, at different lengths, and others never."""
    free = [_naive(tm, prompt, (), 24) for prompt in PROMPTS]
    return frozenset({free[0][2], free[2][5], free[3][9]})


def test_greedy_is_what_one_prompt_alone_gives(tm, stops):
    wanted = [_naive(tm, prompt, stops, 24) for prompt in PROMPTS]
    answers = generate(tm, PROMPTS, stops=stops, max_tokens=24)
    assert [answer.token_ids for answer in answers] == wanted
    assert [answer.finish_reason for answer in answers] == ["stop" if ids[-1] in stops else "length" for ids in wanted]
    assert len({len(ids) for ids in wanted}) > 2, "rows leave the batch at different times"
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}


def test_a_shared_start_changes_no_answer(tm):
    """Ten ids in front of every prompt run once for all; one prompt is nothing but them and one id more."""
    start = [9, 30, 12, 44, 7, 61, 20, 3, 18, 5]
    prompts = [start + prompt for prompt in PROMPTS]
    assert _shared_start(prompts) == 10
    assert _shared_start([start, [*start, 1]]) == 9, "one id is left to ask for"
    assert _shared_start(PROMPTS) == _shared_start(prompts[:1]) == 0
    free = [_naive(tm, prompt, (), 24) for prompt in prompts]
    stops = {free[0][2], free[2][5]}
    assert [a.token_ids for a in generate(tm, prompts, stops=stops, max_tokens=24)] == [_naive(tm, p, stops, 24) for p in prompts]


def test_a_limit_of_one_token(tm):
    assert [a.token_ids for a in generate(tm, PROMPTS[:2], stops=(), max_tokens=1)] == [_naive(tm, p, (), 1) for p in PROMPTS[:2]]


def test_sliding_windows_keep_their_own_cache():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    config = MistralConfig(**sizes, vocab_size=320, sliding_window=4)
    model = MistralForCausalLM(config).eval().requires_grad_(False)
    wanted = [_naive(model, prompt, (), 12) for prompt in PROMPTS]
    assert [a.token_ids for a in generate(model, PROMPTS, stops=(), max_tokens=12)] == wanted


def test_sampling_depends_on_the_seed_alone_and_follows_the_distribution(tm):
    first = generate(tm, PROMPTS, stops=(), max_tokens=8, temperature=1.0, seed=3)
    assert generate(tm, PROMPTS, stops=(), max_tokens=8, temperature=1.0, seed=3) == first
    assert generate(tm, PROMPTS, stops=(), max_tokens=8, temperature=1.0, seed=4) != first
    with torch.inference_mode():
        wanted = (tm(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.7).softmax(-1).numpy()
    many = generate(tm, [PROMPTS[0]] * 4000, stops=(), max_tokens=1, temperature=0.7, seed=0)
    found = np.bincount([a.token_ids[0] for a in many], minlength=320) / 4000
    assert np.abs(found - wanted).sum() < 0.35, "total variation of 4,000 draws over 320 tokens"
    top = wanted.argsort()[-5:]
    np.testing.assert_allclose(found[top], wanted[top], atol=5 * np.sqrt(wanted[top].max() / 4000))
