"""The exported folder in real vLLM, against the target alone and the reference decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftproof.draft.eagle3 import Eagle3Draft, draft_config
from draftproof.evaluate.decode import EagleDrafter, TargetAlone, acceptance, decode
from draftproof.evaluate.serve import serve
from draftproof.export.files import target_embedding
from draftproof.export.proof import trained_chain
from draftproof.export.vllm import to_vllm
from draftproof.recipe import DraftSettings
from draftproof.records.mapping import VocabMapping
from draftproof.target.loaded import capture, load_model
from draftproof.target.target import Target
from draftproof.target.tokenizer import load_tokenizer, render, stop_ids
from tiny_draft import masters, target_in, tiny_draft

K, MAX_TOKENS = 3, 40
BOUNDARIES = (2, 15, 27)
QUESTIONS = ("Tell me a short story about a fox.", "Count from one to twenty.", "Explain why the sky is blue.")


@pytest.mark.slow
def test_vllm_serves_the_export_and_counts_what_the_reference_decoder_counts(smollm2: Path, tmp_path: Path) -> None:
    """A draft with random layers whose head was solved for some of the starts and steps of the target's own answers.

    So part of its drafts is right, at all positions, and only while states, layer ids, tokens and positions are those
    of the reference: vLLM must accept the very same ones. float32 in both, so that no near tie is decided by rounding.
    """
    target = target_in(smollm2, "float32")
    tokenizer = load_tokenizer(target)
    stops = stop_ids(tokenizer, target)
    prompts = [render(tokenizer, [{"role": "user", "content": text}], add_generation_prompt=True) for text in QUESTIONS]
    model = load_model(target, "cpu", torch.float32)
    alone = decode(model, TargetAlone(), prompts, draft_tokens=0, max_tokens=MAX_TOKENS, stop_ids=stops)
    embedding = target_embedding(target)
    kept = torch.tensor(sorted({token for output in alone.outputs for token in output}))
    mapping = VocabMapping.from_kept(kept.numpy(), target.config.vocab_size)
    draft = _solved_draft(target, model, embedding, mapping, prompts, alone.outputs)
    to_vllm(tmp_path / "vllm", masters(draft), draft.config, mapping, target, draft_tokens=K)
    drafted = decode(
        model, EagleDrafter(draft, embedding=embedding, kept=kept), prompts, draft_tokens=K, max_tokens=MAX_TOKENS, stop_ids=stops
    )
    length, by_position, cycles = acceptance(drafted.accepted, K)
    assert 1 > by_position[0] > by_position[2] > 0, "the comparison below would say little"
    del model

    log = tmp_path / "serve.log"
    served = serve(
        tmp_path / "vllm", target, prompts, draft_tokens=K, max_tokens=MAX_TOKENS, stop_ids=stops, log=log, kv_cache_gib=1, timeout_s=280
    )

    assert served.outputs == alone.outputs
    assert (served.drafts, served.accepted) == (cycles, sum(map(sum, drafted.accepted)))
    assert served.by_position == pytest.approx(by_position)
    assert served.acceptance_length == pytest.approx(length)
    assert (served.engine, served.draft_tokens) == ("vllm", K)


def _solved_draft(
    target: Target, model: Any, embedding: torch.Tensor, mapping: VocabMapping, prompts: list[list[int]], answers: list[list[int]]
) -> Eagle3Draft:
    """Random layers; a head that maps final states to the tokens that followed: of each five starts, all K steps, one, all, none, all."""
    probe, every = (
        _random_draft(target, target.config.hidden_size),
        VocabMapping.from_kept(np.arange(target.config.hidden_size), target.config.vocab_size),
    )
    with torch.no_grad():
        probe.lm_head.weight.copy_(torch.eye(target.config.hidden_size))  # its logits are the states that a head gets
    states, wanted = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        text = prompt + answer
        with capture(model, BOUNDARIES, final=False) as captured, torch.inference_mode():
            model(input_ids=torch.tensor([text]))
            aux = {boundary: state[0].clone() for boundary, state in captured.take().items()}
        for start in range(len(prompt) - 1, len(text) - 1 - K):
            steps = (K, 1, K, 0, K)[(start - len(prompt) + 1) % 5]
            seen = {boundary: state[: start + 1] for boundary, state in aux.items()}
            logits = trained_chain(probe, every, embedding, seen, text[1 : start + 1 + K])
            states.append(logits[:steps, : target.config.hidden_size])
            wanted.append(torch.from_numpy(np.searchsorted(mapping.kept, text[start + 2 : start + 2 + steps])))
    x, y = torch.cat(states).double(), torch.nn.functional.one_hot(torch.cat(wanted), mapping.d2t.size).double()
    assert len(x) < x.shape[1], "more equations than unknowns"
    draft = _random_draft(target, mapping.d2t.size)
    with torch.no_grad():
        draft.lm_head.weight.copy_((y.T @ torch.linalg.pinv(x).T).float())
    return draft


def _random_draft(target: Target, draft_vocab_size: int) -> Eagle3Draft:
    """The same layers for every size of vocabulary."""
    return tiny_draft(draft_config(target.config, DraftSettings(), boundaries=BOUNDARIES, draft_vocab_size=draft_vocab_size))
