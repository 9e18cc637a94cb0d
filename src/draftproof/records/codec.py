"""How aux hidden states are stored: bf16, or fp8 with a scale for each token and boundary.

fp8 is e4m3 (three mantissa bits, largest value 448). With s = max|x| / 448 over the H values of one token at
one boundary, x is stored as round(x / s). The error of each value is at most

    max(|x| * 2**-4, s * 2**-10)

the first for normal e4m3 numbers (half a step of 2**-3 relative), the second for those below 2**-6 * s, whose
steps are 2**-9 * s. One scale per token and boundary, since a few tokens (the first of a document above all)
carry values a hundred times larger than the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draftproof.errors import DataError
from draftproof.records.layout import CODECS

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_CHUNK = 16_384  # tokens encoded at once: bounds the float32 copy to a few hundred MB at H = 7,168, A = 3


def encode(states: Tensor, codec: str) -> dict[str, Tensor]:
    """The tensors that stand for `states` [N, A, H] (any float dtype) in a shard.

    bf16: {"aux": bfloat16 [N, A, H]}. fp8: {"aux": float8_e4m3fn [N, A, H], "aux_scale": float32 [N, A]}.
    """
    if codec == "bf16":
        return {"aux": states.to(torch.bfloat16)}
    if codec == "fp8":
        values = torch.empty(states.shape, dtype=FP8, device=states.device)
        scales = torch.empty(states.shape[:2], dtype=torch.float32, device=states.device)
        for start in range(0, len(states), _CHUNK):
            part = states[start : start + _CHUNK].float()  # [n, A, H]
            scale = (part.abs().amax(-1) / FP8_LARGEST).clamp_min(_SMALLEST_SCALE)  # [n, A]
            values[start : start + _CHUNK] = (part / scale[..., None]).clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8)
            scales[start : start + _CHUNK] = scale
        return {"aux": values, "aux_scale": scales}
    raise DataError(f"There is no codec {codec!r}.", remedy=f"Use one of {', '.join(CODECS)}.")


def decode(tensors: Mapping[str, Tensor], codec: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The states [N, A, H] in `dtype` from what `encode` made (or equal slices of it along N)."""
    if codec == "bf16":
        return tensors["aux"].to(dtype)
    if codec == "fp8":
        return (tensors["aux"].float() * tensors["aux_scale"][..., None]).to(dtype)
    raise DataError(f"There is no codec {codec!r}.", remedy=f"Use one of {', '.join(CODECS)}.")
