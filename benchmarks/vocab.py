"""Time to choose the draft vocabulary of 10 million tokens at V = 163,840 (goal: under 2 s).

    python benchmarks/vocab.py

The peer it stands beside is what several trainers do: a Counter over Python ints, then id lists built entry by entry
with a search in the list of kept ids. That search is timed on a sample of the vocabulary and scaled.
"""

from __future__ import annotations

import time
from collections import Counter

import numpy as np

from draftproof.vocab.build import choose, count_tokens

TOKENS, VOCAB, SIZE = 10_000_000, 163_840, 32_000
SEARCHED = 2_000  # ids of the vocabulary on which the peer's list search is timed


def main() -> None:
    ids = np.random.default_rng(0).zipf(1.2, TOKENS).clip(max=VOCAB).astype(np.int32) - 1
    started = time.process_time()
    counts = count_tokens(ids, VOCAB)
    chosen = choose(counts, SIZE, named=np.ones(VOCAB, np.bool_), always=(VOCAB - 1,))
    ours = time.process_time() - started

    started = time.process_time()
    kept = sorted(token for token, _ in Counter(ids.tolist()).most_common(SIZE))
    counting = time.process_time() - started
    seen = set(kept)
    kept += [token for token in range(VOCAB) if token not in seen][: SIZE - len(kept)]
    started = time.process_time()
    sum(token in kept for token in range(0, VOCAB, VOCAB // SEARCHED))
    peer = counting + (time.process_time() - started) * VOCAB / SEARCHED

    print(f"{'':24}{'cpu-s':>10}{'tokens/s':>14}")
    print(f"{'draftproof':24}{ours:10.2f}{TOKENS / ours:14,.0f}")
    print(f"{'counter and list search':24}{peer:10.2f}{TOKENS / peer:14,.0f}")
    print(f"ratio {peer / ours:.0f}x; {chosen.mapping.d2t.size:,} ids kept, {chosen.filled:,} of them never seen")


if __name__ == "__main__":
    main()
