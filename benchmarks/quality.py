"""Acceptance on MT-bench, GSM8K and HumanEval prompts of a draft trained on a target's own answers.

    python benchmarks/quality.py train --target smollm2.gguf --data DATA --work WORK      # on a GPU
    python benchmarks/quality.py measure --target smollm2.gguf --data DATA --work WORK    # there too
    python benchmarks/quality.py serve --target smollm2.gguf --data DATA --work WORK      # where vLLM is installed

DATA holds `onpolicy/*.jsonl.gz` (conversations answered by the target, `sampling` greedy or not) and `bench/*.jsonl`.
Held out: greedy rows whose crc32(id) % 25 == 0; no other row with such an id is trained on. `measure` decodes with the
reference (greedy chain, K=3) the trained draft, the same draft before its first step, and prompt lookup; `serve`
asks vLLM itself. Both print a table and write JSON beside the run. `starts` trains the three kinds of first weights
alike, for a short while, and prints their held-out forecasts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import yaml

from draftproof.artifact import read_json, write_json
from draftproof.pipeline import run_line
from draftproof.progress import Progress
from draftproof.recipe import LoadedRecipe, load

BENCHES = ("mt_bench", "gsm8k", "humaneval")
K = 3
MAX_TOKENS = 256


def main() -> None:
    """Parse and dispatch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("train", "measure", "serve", "starts"))
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--set", dest="overrides", nargs="*", default=[], help="recipe overrides, section.key=value")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    loaded = recipe(args.target, args.data, args.work, args.overrides)
    {"train": train, "measure": measure, "serve": serve, "starts": starts}[args.what](loaded, args.work)


def recipe(target: str, data: Path, work: Path, overrides: list[str]) -> LoadedRecipe:
    """The run: small batches and a high learning rate, since steps count for more than tokens a step at this size."""
    train_file, held_out = split(data / "onpolicy", work)
    values = {
        "target": {"model": str(Path(target).resolve())},
        "data": {"train": [str(train_file)], "validation": str(held_out), "max_length": 1024},
        "vocab": {"size": 16384},
        "extract": {"shard_gb": 1.0, "batch_tokens": 32768},
        "train": {"epochs": 3.2, "unroll": 3, "batch_tokens": 2048, "learning_rate": 2e-3},
        "evaluate": {
            "bench": [str((data / "bench" / f"{name}.jsonl").resolve()) for name in BENCHES],
            "draft_tokens": K,
            "max_tokens": MAX_TOKENS,
            "batch_size": 128,
        },
        "run": {"dir": str(work / "run")},
    }
    path = work / "quality.yaml"
    path.write_text(yaml.safe_dump(values))
    return load(path, overrides)


def split(onpolicy: Path, work: Path) -> tuple[Path, Path]:
    """Training and held-out conversations as JSONL."""
    train_file, held_out = work / "train.jsonl", work / "held-out.jsonl"
    if train_file.exists() and held_out.exists():
        return train_file, held_out
    parts = train_file.with_suffix(".part"), held_out.with_suffix(".part")
    with parts[0].open("w") as into_train, parts[1].open("w") as into_held_out:
        for path in sorted(onpolicy.glob("*.jsonl.gz")):
            with gzip.open(path, "rt", encoding="utf-8") as stream:
                for line in stream:
                    row = json.loads(line)
                    if zlib.crc32(row["id"].encode()) % 25:
                        into_train.write(line)
                    elif row["sampling"] == "greedy":
                        into_held_out.write(line)
    parts[0].rename(train_file)
    parts[1].rename(held_out)
    return train_file, held_out


def train(loaded: LoadedRecipe, work: Path) -> None:
    """Walk the line until `train`."""
    done = run_line(loaded, progress=Progress(), last="train", announce=lambda stage: print(stage.name, stage.happened, flush=True))
    for stage in done.stages:
        print(stage.name, {key: round(value, 1) for key, value in stage.manifest.actual.items()}, stage.manifest.counts)
    lines = map(json.loads, (work / "run" / "train" / "metrics.jsonl").read_text().splitlines())
    forecasts = [line for line in lines if line["kind"] == "forecast"]
    print(table(["step", "by start", "by walk"], [[f["step"], _length(f["by_start"]), _length(f["by_walk"])] for f in forecasts]))


def starts(loaded: LoadedRecipe, work: Path) -> None:
    """The three first weights, trained alike."""
    rows = []
    for start in ("target", "state", "random"):
        overrides = [f"draft.start={start}", "train.steps=700", "train.evaluations=2"]
        chosen = load(work / "quality.yaml", overrides, run_dir=str(work / "starts"))
        run_line(chosen, progress=Progress(), first="train" if rows else None, last="train")
        for line in map(json.loads, (work / "starts" / "train" / "metrics.jsonl").read_text().splitlines()):
            if line["kind"] == "forecast":
                rows.append([start, line["step"], _length(line["by_start"]), _length(line["by_walk"])])
    print(table(["start", "steps", "by start", "by walk"], rows))


def measure(loaded: LoadedRecipe, work: Path) -> None:
    """The reference decoder's figures, by bench file, with the baselines beside."""
    import torch

    from draftproof.draft.eagle3 import Eagle3Draft
    from draftproof.draft.files import load_draft
    from draftproof.draft.start import start_draft
    from draftproof.evaluate.decode import EagleDrafter, PromptLookup, TargetAlone, acceptance, decode
    from draftproof.pipeline import choose_device
    from draftproof.records.mapping import load_mapping
    from draftproof.target.head import TargetHead
    from draftproof.target.loaded import load_model
    from draftproof.target.target import open_target
    from draftproof.target.tokenizer import load_tokenizer, stop_ids
    from draftproof.target.weights import embedding_name

    run_dir, device = work / "run", choose_device(loaded.recipe)
    target = open_target(loaded.recipe.target)
    prompts, stops = bench_prompts(loaded), frozenset(stop_ids(load_tokenizer(target), target))
    model = load_model(target, device, torch.float32)  # so that one token at a time and four at once agree
    weights, kept = target.weights(), load_mapping(run_dir / "vocab").kept
    embedding = weights.read(embedding_name(weights, target.config)).to(device, torch.float32)
    trained, config = load_draft(run_dir / "train")
    untrained = Eagle3Draft(config)
    head = TargetHead.from_weights(weights, target.config, torch.float32, "cpu", rows=kept).weight
    start_draft(untrained, start=loaded.recipe.draft.start, seed=loaded.recipe.run.seed, head=head, target=target)

    def eagle(draft: Eagle3Draft) -> EagleDrafter:
        rounded = draft.to(getattr(torch, target.dtype)).to(device, torch.float32)
        return EagleDrafter(rounded, embedding=embedding, kept=torch.from_numpy(kept).to(device))

    drafters: dict[str, Any] = {
        "target alone": TargetAlone(),
        "draft": eagle(trained),
        "untrained": eagle(untrained),
        "prompt lookup": PromptLookup(),
    }
    results: dict[str, Any] = {}
    texts: dict[str, list[list[int]]] = {}
    for name, drafter in drafters.items():
        depth = 0 if name == "target alone" else K
        found = decode(
            model, drafter, [p.token_ids for p in prompts], draft_tokens=depth, max_tokens=MAX_TOKENS, stop_ids=stops, batch_size=128
        )
        texts[name] = found.outputs
        print(f"{name}: {found.tokens:,} tokens in {found.seconds:.0f} s", flush=True)
        for bench in BENCHES if depth else ():
            length, by_position, cycles = acceptance([found.accepted[i] for i, p in enumerate(prompts) if p.category == bench], K)
            results.setdefault(bench, {})[name] = {"acceptance_length": length, "by_position": by_position, "cycles": cycles}
    same = sum(a == b for a, b in zip(texts["draft"], texts["target alone"], strict=True))
    print(f"same text as the target alone: {same} of {len(prompts)}")
    show(results, ("draft", "untrained", "prompt lookup"))
    write_json(work / "reference.json", {"results": results, "same_text": same, "prompts": len(prompts), "outputs": texts["target alone"]})


def serve(loaded: LoadedRecipe, work: Path) -> None:
    """vLLM's own figures, a bench file at a time, for the exported folder."""
    from draftproof.evaluate.serve import serve as serve_draft
    from draftproof.target.target import open_target
    from draftproof.target.tokenizer import load_tokenizer, stop_ids

    run_line(loaded, progress=Progress(), only="export")
    target = open_target(loaded.recipe.target)
    prompts, stops = bench_prompts(loaded), sorted(stop_ids(load_tokenizer(target), target))
    reference = read_json(work / "reference.json") if (work / "reference.json").exists() else None
    results: dict[str, Any] = dict(reference["results"]) if reference else {}
    for bench in BENCHES:
        chosen = [index for index, prompt in enumerate(prompts) if prompt.category == bench]
        served = serve_draft(
            work / "run" / "export" / "vllm",
            target,
            [prompts[index].token_ids for index in chosen],
            draft_tokens=K,
            max_tokens=MAX_TOKENS,
            stop_ids=stops,
            dtype="float32",
        )
        key = f"served, {served.engine} {served.version}"
        results.setdefault(bench, {})[key] = {
            "acceptance_length": served.acceptance_length,
            "by_position": served.by_position,
            "cycles": served.drafts,
        }
        if reference:
            same = sum(served.outputs[place] == reference["outputs"][index] for place, index in enumerate(chosen))
            print(f"{bench}: {same} of {len(chosen)} answers are the reference's, token for token", flush=True)
    show(results, ("draft", key, "untrained", "prompt lookup"))
    write_json(work / "served.json", results)


def bench_prompts(loaded: LoadedRecipe) -> list[Any]:
    """The prompts, each with its bench file's name as category."""
    from dataclasses import replace

    from draftproof.evaluate.prompts import read_prompts
    from draftproof.target.target import open_target
    from draftproof.target.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(open_target(loaded.recipe.target))
    return [
        replace(prompt, category=Path(path).stem)
        for path in loaded.recipe.evaluate.bench
        for prompt in read_prompts(loaded.recipe.evaluate.model_copy(update={"bench": (path,)}), Path(), tokenizer)
    ]


def show(results: dict[str, Any], columns: tuple[str, ...]) -> None:
    """Lengths of all, positions of each."""
    rows = []
    for bench in BENCHES:
        for name in columns:
            if name in results[bench]:
                found = results[bench][name]
                rows.append(
                    [
                        bench,
                        name,
                        f"{found['acceptance_length']:.3f}",
                        *(f"{share:.3f}" for share in found["by_position"]),
                        f"{found['cycles']:,}",
                    ]
                )
    print(table(["bench", "what", "length", *(f"P({i})" for i in range(1, K + 1)), "cycles"], rows))


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _length(acceptance: dict[str, Any]) -> str:
    return f"{acceptance['acceptance_length']:.3f}"


if __name__ == "__main__":
    sys.exit(main())
