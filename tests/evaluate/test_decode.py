"""The reference decoder on the tiny target: its text, its acceptance, and its drafts, each against something slower."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from draftproof.draft.eagle3 import Eagle3Draft
from draftproof.evaluate.decode import EagleDrafter, PromptLookup, TargetAlone, Verified, acceptance, decode
from tests.draft.naive import NaiveDraft

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

PROMPTS = [[5, 9, 31, 77, 12], [200, 3, 4], [8, 8, 19, 23, 42, 11, 7, 300, 1], [60, 61]]


def _greedy(model: Any, prompt: list[int], count: int, stop: set[int]) -> list[int]:
    """The target's greedy text without any cache."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in stop:
                break
    return ids[len(prompt) :]


@pytest.fixture
def eagle(make_draft: Callable[..., Eagle3Draft], tm: LlamaForCausalLM) -> EagleDrafter:
    return EagleDrafter(make_draft(), embedding=tm.model.embed_tokens.weight, kept=torch.arange(0, 320, 5))


class Oracle:
    """Drafts the target's own greedy continuation: everything must be accepted."""

    boundaries: tuple[int, ...] = ()

    def __init__(self, model: Any, wrong_at: int | None = None) -> None:
        self.model, self.wrong_at = model, wrong_at

    def begin(self, batch: int) -> None:
        self.texts: list[list[int]] = [[] for _ in range(batch)]

    def propose(self, verified: Verified, draft_tokens: int) -> torch.Tensor:
        drafts = []
        for row, text in enumerate(self.texts):
            known = verified.positions[row] >= 0
            text += verified.tokens[row][known].tolist()
            newest = int(verified.following[row][known][-1])
            chain = _greedy(self.model, [*text, newest], draft_tokens, set())
            if self.wrong_at is not None:
                chain[self.wrong_at] = (chain[self.wrong_at] + 1) % 320
            drafts.append(chain)
        return torch.tensor(drafts)

    def keep(self, rows: torch.Tensor) -> None:
        self.texts = [self.texts[row] for row in rows.tolist()]


def _stop_seen_halfway(model: Any) -> set[int]:
    """A token that ends one of the answers early, so that rows finish at different times."""
    return {_greedy(model, PROMPTS[2], 9, set())[-1]}


@pytest.mark.parametrize("kind", ["alone", "eagle", "lookup", "oracle", "wrong"])
def test_text_is_the_targets_own_whatever_drafts(kind: str, tm: LlamaForCausalLM, eagle: EagleDrafter) -> None:
    stop = _stop_seen_halfway(tm)
    drafter = {"alone": TargetAlone(), "eagle": eagle, "lookup": PromptLookup(), "oracle": Oracle(tm), "wrong": Oracle(tm, wrong_at=1)}[
        kind
    ]
    decoded = decode(tm, drafter, PROMPTS, draft_tokens=0 if kind == "alone" else 3, max_tokens=20, stop_ids=stop, batch_size=3)
    assert decoded.outputs == [_greedy(tm, prompt, 20, stop) for prompt in PROMPTS]
    if kind == "oracle":
        assert {count for cycles in decoded.accepted for count in cycles} == {3}
        assert acceptance(decoded.accepted, 3)[0] == 4.0
    if kind == "wrong":
        assert {count for cycles in decoded.accepted for count in cycles} == {1}


def test_eagle_drafts_what_the_naive_loop_drafts(tm: LlamaForCausalLM, eagle: EagleDrafter) -> None:
    """Every chain of a whole answer, from states of a run of the target without cache."""
    chains: list[list[int]] = []

    class Spy(EagleDrafter):
        def propose(self, verified: Verified, draft_tokens: int) -> torch.Tensor:
            drafts = super().propose(verified, draft_tokens)
            chains.append(drafts[0].tolist())
            return drafts

    spy = Spy(eagle.draft, embedding=eagle.embedding, kept=eagle.kept)
    decoded = decode(tm, spy, PROMPTS[:1], draft_tokens=3, max_tokens=15, stop_ids=())
    text = PROMPTS[0] + decoded.outputs[0]
    with torch.inference_mode():
        hidden = tm(torch.tensor([text]), output_hidden_states=True).hidden_states
    aux = torch.stack([hidden[boundary][0] for boundary in (2, 4, 5)], dim=1)
    naive = NaiveDraft(eagle.draft.state_dict(), eagle.draft.config, eagle.embedding)
    start = len(PROMPTS[0]) - 1
    for chain, accepted in zip(chains, decoded.accepted[0], strict=True):
        fed = [text[start + 1]]
        for _ in range(3):
            state = naive.chain(text, aux, start, fed)[-1]
            fed.append(int(eagle.kept[int(naive.logits(state).argmax())]))
        assert chain == fed[1:]
        start += accepted + 1


def test_prompt_lookup_repeats_what_followed_the_last_time() -> None:
    lookup = PromptLookup()
    lookup.begin(2)
    tokens = torch.tensor([[1, 2, 3, 4, 1, 2], [0, 0, 0, 7, 8, 9]])
    following = torch.tensor([[2, 3, 4, 1, 2, 3], [0, 0, 7, 8, 9, 5]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [-1, -1, -1, 0, 1, 2]])
    drafts = lookup.propose(Verified(tokens, following, positions, None), 4)
    assert drafts.tolist() == [[4, 1, 2, 3], [-1, -1, -1, -1]]


def test_acceptance_is_the_joint_prefix() -> None:
    length, by_position, cycles = acceptance([[3, 0, 1], [2]], 3)
    assert by_position == (0.75, 0.5, 0.25)
    assert (length, cycles) == (2.5, 4)
