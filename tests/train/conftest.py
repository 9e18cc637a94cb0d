"""A tiny target's own answers with its own states, as `train` gets them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from draftproof.progress import Progress
from draftproof.records.layout import StoreLayout
from draftproof.records.mapping import VocabMapping, save_mapping
from draftproof.records.rows import Row, make_row_key, write_rows
from draftproof.records.store import StoreWriter
from draftproof.stage import StageTask

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

BOUNDARIES = (2, 4, 5)
ANSWER = 24


@dataclass(frozen=True)
class TinyRun:
    """Artifact folders, and what they were made from."""

    folders: dict[str, Path]
    prompts: list[list[int]]
    """Of the validation rows."""
    answers: list[list[int]]
    kept: np.ndarray

    def task(self, out: Path, seed: int = 0) -> StageTask:
        return StageTask(self.folders, out, seed, "cpu", lambda point, evidence: None, Progress(quiet=True))


def _answer(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(ANSWER):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def tiny_run(tm: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """24 rows to train on and 6 held out, each a random prompt and the tiny target's own greedy answer."""
    root = tmp_path_factory.mktemp("tiny-run")
    random = np.random.default_rng(0)
    rows, states = [], []
    for number in range(30):
        prompt = random.integers(3, 320, size=int(random.integers(4, 11))).tolist()
        answer = _answer(tm, prompt)
        ids = np.array(prompt + answer, dtype=np.int32)
        supervised = np.arange(len(ids)) >= len(prompt)
        split = "train" if number < 24 else "validation"
        key = make_row_key(ids, str(number), 0)
        rows.append(Row(key, ids, supervised, (len(prompt),), str(number), split, "tiny", "length", f"made:{number}"))
        with torch.inference_mode():
            layers = {}
            hook = tm.model.norm.register_forward_pre_hook(lambda module, args, layers=layers: layers.update(final=args[0][0]))
            out = tm(torch.tensor(ids[None], dtype=torch.int64), output_hidden_states=True)
            hook.remove()
        aux = torch.stack([out.hidden_states[boundary][0] for boundary in BOUNDARIES], dim=1)
        states.append((aux, layers["final"], out.logits[0].argmax(-1)))

    for name in ("prepare", "vocab", "extract"):
        (root / name).mkdir()
    write_rows(root / "prepare", rows)
    counts = np.bincount(np.concatenate([row.token_ids[row.supervised] for row in rows]), minlength=320)
    mapping = VocabMapping.from_kept(np.sort(np.argsort(-counts, kind="stable")[:96]), 320)
    save_mapping(root / "vocab", mapping)
    layout = StoreLayout(boundaries=BOUNDARIES, hidden_size=32, codec="bf16", vocab_size=320)
    with StoreWriter(root / "extract", layout, [list(range(30))]) as writer:
        writer.write_shard(
            0,
            [row.row_key for row in rows],
            [len(row.token_ids) for row in rows],
            torch.from_numpy(np.concatenate([row.token_ids for row in rows])),
            torch.cat([aux for aux, _, _ in states]),
            torch.cat([final for _, final, _ in states]),
            torch.cat([top1 for _, _, top1 in states]),
        )
    held_out = rows[24:]
    return TinyRun(
        {name: root / name for name in ("prepare", "vocab", "extract")},
        [row.token_ids[: row.turn_start[0]].tolist() for row in held_out],
        [row.token_ids[row.turn_start[0] :].tolist() for row in held_out],
        mapping.kept,
    )
