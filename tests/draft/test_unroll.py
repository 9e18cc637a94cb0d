"""Training-time test against drafting one token at a time, and the rules that masks and packing must keep."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.draft.eagle3 import DraftConfig, Eagle3Draft
from draftproof.draft.unroll import counted_steps, plan_unroll, unroll
from tests.conftest import TD_SIZES
from tests.draft.naive import NaiveDraft

LENGTHS = np.array([9, 4, 12])


def _packed(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = int(LENGTHS.sum())
    return (
        torch.randint(0, 320, (n,), generator=generator),
        torch.randn(n, 3, 32, generator=generator),
        torch.randn(320, 32, generator=generator),
    )


def _mask() -> tuple[np.ndarray, np.ndarray]:
    """Document 0: tokens 3..8 in one turn; document 1: none; document 2: 2..5 and 6..11, two adjacent turns."""
    supervised, begins = np.zeros(25, dtype=bool), np.zeros(25, dtype=bool)
    supervised[3:9] = supervised[13 + 2 : 13 + 12] = True
    begins[[3, 13 + 2, 13 + 6]] = True
    return supervised, begins


def _brute_force_steps(supervised: np.ndarray, begins: np.ndarray, lengths: np.ndarray, limit: int) -> list[int]:
    """The AND rule, spelled out: step k counts when x[t+1] ... x[t+2+k] are all supervised, in one turn of one document."""
    ends = np.cumsum(lengths)
    steps = []
    for t in range(len(supervised)):
        end = int(ends[np.searchsorted(ends, t, side="right")])
        count = 0
        for k in range(limit):
            span = range(t + 1, t + 3 + k)
            if span[-1] < end and all(supervised[i] for i in span) and not any(begins[i] for i in span[1:]):
                count = k + 1
            else:
                break
        steps.append(count)
    return steps


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_counted_steps_is_the_and_rule(data: st.DataObject) -> None:
    lengths = np.array(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    n = int(lengths.sum())
    supervised = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    begins = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n))) & supervised
    limit = data.draw(st.integers(1, 6))
    assert counted_steps(supervised, begins, lengths, limit).tolist() == _brute_force_steps(supervised, begins, lengths, limit)


def test_counted_steps_by_hand() -> None:
    supervised, begins = _mask()
    # Document 0: the first draft starts at the last prompt token (index 2); index 6 has one label left (x[8]); 7 none.
    assert counted_steps(supervised, begins, LENGTHS, 3).tolist()[:9] == [0, 0, 3, 3, 3, 2, 1, 0, 0]
    # Document 2: no span crosses from the first turn (2..5) into the second (6..11).
    assert counted_steps(supervised, begins, LENGTHS, 3).tolist()[13:] == [0, 3, 2, 1, 0, 3, 3, 3, 2, 1, 0, 0]


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}])
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_unrolled_states_equal_the_naive_loop(make_draft: Callable[..., Eagle3Draft], options: dict[str, bool], steps: int) -> None:
    draft = make_draft(**options)
    tokens, aux, embedding = _packed()
    supervised, begins = _mask()
    naive = NaiveDraft(draft.state_dict(), draft.config, embedding)
    compared = 0
    for out in unroll(draft, plan_unroll(supervised, begins, LENGTHS, steps), tokens, aux, embedding):
        for t, state in zip(out.starts.tolist(), out.state, strict=True):
            first = 0 if t < 9 else 13
            document = slice(first, first + (9 if t < 9 else 12))
            fed = [int(tokens[t + 1 + k]) for k in range(out.step + 1)]
            expected = naive.chain(tokens[document].tolist(), aux[document], t - first, fed)[-1]
            assert torch.allclose(state.double(), expected, atol=1e-5, rtol=1e-5)
            assert torch.allclose(draft.logits(state[None])[0].double(), naive.logits(expected), atol=1e-5, rtol=1e-5)
            compared += 1
    assert compared == sum(min(steps, depth) for depth in counted_steps(supervised, begins, LENGTHS, steps))


def test_a_packed_document_is_as_if_alone(make_draft: Callable[..., Eagle3Draft]) -> None:
    draft = make_draft()
    tokens, aux, embedding = _packed()
    supervised, begins = _mask()
    packed = list(unroll(draft, plan_unroll(supervised, begins, LENGTHS, 3), tokens, aux, embedding))
    alone = list(unroll(draft, plan_unroll(supervised[13:], begins[13:], LENGTHS[2:], 3), tokens[13:], aux[13:], embedding))
    for together, single in zip(packed, alone, strict=True):
        in_document = together.starts >= 13
        assert (together.starts[in_document] - 13).tolist() == single.starts.tolist()
        assert torch.allclose(together.state[in_document], single.state, atol=1e-5)


def test_gradients_reach_exactly_what_the_naive_loop_reaches(make_draft: Callable[..., Eagle3Draft]) -> None:
    """Every weight's gradient of a loss over all counted states equals that of the one-token-at-a-time loop."""
    draft = make_draft(qk_norm=True)
    tokens, aux, embedding = _packed()
    supervised, begins = _mask()
    target = torch.randn(64, generator=torch.Generator().manual_seed(5)).double()
    loss = sum(
        (draft.logits(out.state).double() @ target).tanh().sum()
        for out in unroll(draft, plan_unroll(supervised, begins, LENGTHS, 3), tokens, aux, embedding)
    )
    loss.backward()

    weights = {name: value.detach().double().requires_grad_() for name, value in draft.state_dict().items()}
    naive = NaiveDraft(weights, draft.config, embedding)
    naive.w = weights
    expected = torch.zeros((), dtype=torch.float64)
    for t, depth in enumerate(counted_steps(supervised, begins, LENGTHS, 3).tolist()):
        if depth:
            first = 0 if t < 9 else 13
            document = slice(first, first + (9 if t < 9 else 12))
            fed = [int(tokens[t + 1 + k]) for k in range(depth)]
            for state in naive.chain(tokens[document].tolist(), aux[document], t - first, fed):
                expected = expected + (naive.logits(state) @ target).tanh()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-4)
    for name, parameter in draft.named_parameters():
        reached, wanted = parameter.grad, weights[name].grad
        assert reached is not None, name
        assert wanted is not None, name
        assert torch.allclose(reached.double(), wanted, atol=2e-4, rtol=2e-3), name


def test_logits_get_gradient_only_where_they_count(make_draft: Callable[..., Eagle3Draft]) -> None:
    """Position by position: the rows that exist at step k are the indices whose span is supervised, no more, no less."""
    draft = make_draft()
    tokens, aux, embedding = _packed()
    supervised, begins = _mask()
    by_step = {}
    for out in unroll(draft, plan_unroll(supervised, begins, LENGTHS, 3), tokens, aux, embedding):
        logits = draft.logits(out.state)
        (gradient,) = torch.autograd.grad(logits.square().sum(), logits, retain_graph=True)
        touched = out.starts[gradient.abs().sum(-1) > 0]
        by_step[out.step] = sorted(touched.tolist())
    assert by_step == {
        0: [2, 3, 4, 5, 6, 14, 15, 16, 18, 19, 20, 21, 22],
        1: [2, 3, 4, 5, 14, 15, 18, 19, 20, 21],
        2: [2, 3, 4, 14, 18, 19, 20],
    }


def test_nothing_to_draft_gives_an_empty_plan(make_draft: Callable[..., Eagle3Draft]) -> None:
    tokens, aux, embedding = _packed()
    plan = plan_unroll(np.zeros(25, dtype=bool), np.zeros(25, dtype=bool), LENGTHS, 3)
    assert plan.steps == ()
    assert list(unroll(make_draft(), plan, tokens, aux, embedding)) == []


def test_a_weight_that_was_never_set_is_seen() -> None:
    assert all(torch.isnan(parameter).all() for parameter in Eagle3Draft(DraftConfig(**TD_SIZES)).parameters())
