"""Codecs: what comes back differs from what went in by no more than the format's own steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.errors import DataError
from draftproof.records.codec import decode, encode


def _e4m3_values() -> np.ndarray:
    """Every non-negative e4m3fn number, from the definition: exponent bias 7, 3 mantissa bits, S.1111.111 is NaN."""
    values = [m * 2.0**-9 for m in range(8)]
    values += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if not (e == 15 and m == 7)]
    return np.array(values)


def test_bf16_gives_back_bf16_states_bit_for_bit() -> None:
    states = torch.randn(5, 3, 7, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert torch.equal(decode(encode(states, "bf16"), "bf16"), states)


def test_fp8_takes_the_nearest_e4m3_number_of_the_scaled_value() -> None:
    states = torch.randn(11, 3, 16, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 30.0, 0.01])[:, None]
    states[0, :, 3] = 4000.0  # an outlier, as first tokens have
    grid = _e4m3_values()
    back = decode(encode(states, "fp8"), "fp8", torch.float32).double().numpy()
    for token in range(11):
        for boundary in range(3):
            x = states[token, boundary].double().numpy()
            scale = np.abs(x).max() / 448
            best = np.abs(np.abs(x / scale)[:, None] - grid[None]).min(1) * scale  # distance to the nearest number
            assert np.abs(back[token, boundary] - x) == pytest.approx(best, rel=1e-4, abs=1e-6 * np.abs(x).max())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), spread=st.floats(0, 12), size=st.floats(1e-20, 1e20))
def test_fp8_error_stays_within_the_documented_bound(seed: int, spread: float, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(4, 2, 9, generator=generator) * torch.exp(spread * torch.randn(4, 2, 9, generator=generator)) * size
    states = states.clamp(-1e37, 1e37)
    error = (decode(encode(states, "fp8"), "fp8", torch.float32).double() - states.double()).abs()
    scale = states.double().abs().amax(-1, keepdim=True) / 448
    bound = torch.maximum(states.double().abs() * 2**-4, scale * 2**-10)
    assert bool((error <= bound * (1 + 1e-5) + 1e-43).all())


def test_fp8_keeps_zeros_and_the_largest_value_finite() -> None:
    states = torch.zeros(2, 1, 4)
    states[1, 0] = torch.tensor([3.3e38, -3.3e38, 1.0, 0.0])
    back = decode(encode(states, "fp8"), "fp8", torch.float32)
    assert torch.equal(back[0], torch.zeros(1, 4))
    assert bool(back.isfinite().all())
    assert back[1, 0, 0].item() == pytest.approx(3.3e38, rel=1e-6)


def test_fp8_is_at_most_half_the_bytes_plus_the_scales() -> None:
    states = torch.randn(6, 3, 576)
    stored = encode(states, "fp8")
    assert stored["aux"].element_size() == 1
    assert stored["aux_scale"].shape == (6, 3)
    assert stored["aux_scale"].dtype == torch.float32


def test_unknown_codec_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="'int3'"):
        encode(torch.zeros(1, 1, 1), "int3")
    with pytest.raises(DataError, match="'int3'"):
        decode({}, "int3")
