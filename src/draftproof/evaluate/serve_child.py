"""The child process of `serve.py`: one engine, one batch of prompts, its counters before and after.

    python -m draftproof.evaluate.serve_child REQUEST.json

The engine starts processes that import this module again, hence the guard at the end.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, cast

from draftproof.artifact import write_json
from draftproof.evaluate.serve import ServeRequest
from draftproof.machine.supervised import end_with_parent

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


def main(request_file: Path) -> None:
    """Serve what the request asks for and write the result."""
    request = ServeRequest(**json.loads(request_file.read_text()))
    end_with_parent(request.parent)

    import torch
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=request.target,
        trust_remote_code=request.trust_remote_code,
        dtype=cast("Any", request.dtype),
        max_model_len=request.max_model_len,
        skip_tokenizer_init=True,
        generation_config="vllm",  # the folder's own would add penalties and stop tokens of its own
        enable_prefix_caching=False,
        enforce_eager=not torch.cuda.is_available(),  # compiling costs a CPU more than this run takes
        disable_log_stats=False,
        seed=0,
        speculative_config={"model": request.draft, "method": "eagle3", "num_speculative_tokens": request.draft_tokens},
    )
    greedy = SamplingParams(
        temperature=0.0, max_tokens=request.max_tokens, stop_token_ids=request.stop_ids, ignore_eos=True, detokenize=False
    )
    before, started = counters(llm.get_metrics()), time.monotonic()
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in request.prompts]
    answers = llm.generate(prompts, greedy, use_tqdm=False)
    seconds = time.monotonic() - started
    result = {
        "before": before,
        "after": counters(llm.get_metrics()),
        "outputs": [list(answer.outputs[0].token_ids) for answer in answers],
        "version": vllm.__version__,
        "seconds": seconds,
    }
    write_json(Path(request.result), result)


def counters(metrics: list[Any]) -> dict[str, Any]:
    """vLLM's metrics -> {drafts, drafted, accepted, positions: [K]}, added over engines."""
    found: dict[str, Any] = {**dict.fromkeys(COUNTERS.values(), 0), "positions": []}
    for metric in metrics:
        if metric.name in COUNTERS:
            found[COUNTERS[metric.name]] += metric.value
        elif metric.name == BY_POSITION:
            found["positions"] = [a + b for a, b in zip(found["positions"] or [0] * len(metric.values), metric.values, strict=True)]
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
