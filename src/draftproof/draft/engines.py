"""Which drafts an engine could not serve as they were trained. No torch, so that a gate may ask first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from draftproof.draft.eagle3 import DraftConfig


def unsupported(draft: DraftConfig, architecture: str, engine: Literal["vllm", "sglang"]) -> str | None:
    """Why an engine could not serve a draft of this shape for this target, in one sentence; None when it can."""
    if engine == "vllm":
        return None
    if architecture.startswith("DeepseekV4"):
        return "SGLang counts captured layers of DeepSeek-V4 differently, which is not proven here"
    if draft.norm_before_fc:
        return "SGLang never reads norm_before_fc and would skip the norm"
    if draft.qk_norm:
        return "SGLang's EAGLE-3 draft has no norms on q and k and would skip them"
    if draft.aux == 1:
        return "SGLang skips fc when there is a single aux boundary"
    return None
