"""Boundaries: which hidden states of the target the draft reads, and how engines write them.

*Boundary k*, 0 <= k <= L, is the residual stream after k decoder blocks (0 = embeddings). Inside the
project there are only boundaries; the dialects of the engines live here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from draftproof.errors import UsageError


def default_boundaries(layers: int) -> tuple[int, ...]:
    """`(2, L // 2, L - 3)`, which published EAGLE-3 drafts use. Raises UsageError below 8 layers."""
    if layers < 8:
        raise UsageError(
            f"A target of {layers} layers has no default aux boundaries: they would collapse.",
            where="extract.boundaries",
            remedy=f"Write them out, for example extract.boundaries=[{', '.join(map(str, range(1, min(layers, 4))))}].",
        )
    return (2, layers // 2, layers - 3)


def check_boundaries(boundaries: Sequence[int], layers: int) -> tuple[int, ...]:
    """The boundaries, when they strictly increase inside 1..L-1; else UsageError.

    Boundary L is not an aux boundary: the final state is stored apart, always.
    """
    found = tuple(boundaries)
    where = "extract.boundaries"
    inside = f"aux boundaries lie in 1..{layers - 1} for {layers} layers"
    if not found:
        raise UsageError("There are no aux boundaries.", where=where, remedy=f"Write at least one; {inside}.")
    if wrong := [b for b in found if isinstance(b, bool) or not isinstance(b, int) or not 1 <= b < layers]:
        hint = " The final state is stored anyway." if layers in wrong else ""
        raise UsageError(f"There is no aux boundary {wrong[0]}: {inside}.{hint}", where=where, remedy="Remove or change it.")
    if any(later <= earlier for earlier, later in pairwise(found)):
        raise UsageError(f"The boundaries {list(found)} do not strictly increase.", where=where, remedy="Sort them and remove repeats.")
    return found


def to_vllm(boundaries: Sequence[int]) -> list[int]:
    """Ids for `eagle_aux_hidden_state_layer_ids` of vLLM: the boundaries themselves.

    Source: vLLM 0.32, model_executor/models/llama.py: `_maybe_add_hidden_state(aux, idx + 1, ...)` after block idx.
    """
    return list(boundaries)


def to_sglang(boundaries: Sequence[int]) -> list[int]:
    """Ids for `eagle_aux_hidden_state_layer_ids` of SGLang: boundary - 1, since it adds 1 to ids written in a config.

    Source: SGLang, srt/models/llama.py, qwen3.py and others: `layers_to_capture = [val + 1 for val in layer_ids]`; not so
    for its own default when no ids are written, hence they are always written. Its DeepSeek-V4 does not add 1; export
    refuses what it has not proven.
    """
    return [boundary - 1 for boundary in boundaries]
