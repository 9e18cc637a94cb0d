"""The target's checks on a good target and on each kind of bad one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof.errors import Refused
from draftproof.gate import target as checks
from draftproof.gate.catalog import CHECKS
from draftproof.gate.finding import Finding
from draftproof.gate.gate import GateContext, GateReport, enforce, run_gate
from draftproof.recipe import (
    DataSettings,
    DraftSettings,
    ExportSettings,
    ExtractSettings,
    Recipe,
    RunSettings,
    TargetSettings,
    VocabSettings,
)
from draftproof.target.target import open_target

ALL = (
    checks.target_shards,
    checks.target_sizes,
    checks.target_norm_convention,
    checks.target_boundaries,
    checks.target_draft,
    checks.target_tokenizer,
    checks.target_remote_code,
)


def gate(folder: Path, sections: dict[str, Any] | None = None, **settings: Any) -> GateReport:
    target = TargetSettings(model=str(folder), **settings)
    recipe = Recipe(target=target, data=DataSettings(train=("x",)), run=RunSettings(dir="r"), **(sections or {}))
    return run_gate(GateContext("extract", "before", recipe, open_target(target), {}, Path("out"), None), ALL, protects="the load")


def by_name(report: GateReport) -> dict[str, Finding]:
    return {finding.check: finding for finding in report.findings}


@pytest.fixture
def folder(tm_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(tm_folder, tmp_path / "target")
    return tmp_path / "target"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_good_target_passes_with_figures(tm_folder: Path) -> None:
    report = gate(tm_folder)
    assert report.verdict == "pass"
    found = by_name(report)
    assert list(found) == [
        "target.shards",
        "target.sizes",
        "target.norm_convention",
        "target.boundaries",
        "target.draft",
        "target.tokenizer",
        "target.remote_code",
    ]
    assert "1 weight file(s), 75 tensors" in found["target.shards"].evidence
    assert "8 layers, own head lm_head.weight F32 [320, 32]" in found["target.sizes"].evidence
    rope = "3 aux states, MLP 64, RoPE default at 10000, at most 320 of 320 tokens, for vllm, sglang"
    assert found["target.draft"].evidence == rope
    assert "300 tokens for 320 head rows" in found["target.tokenizer"].evidence
    assert "<|im_end|> (2)" in found["target.tokenizer"].evidence
    assert all(finding.seconds < 5 for finding in report.findings)


def test_a_missing_shard_is_refused_and_the_other_checks_still_answer(tm: Any, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    tm.save_pretrained(folder, max_shard_size="60KB")
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    report = gate(folder)
    found = by_name(report)
    assert found["target.shards"].status == "fail"
    assert found["target.shards"].evidence == f"the index names {gone.name}, which is missing."
    assert found["target.tokenizer"].status == found["target.boundaries"].status == "pass"
    with pytest.raises(Refused, match=gone.name):
        enforce(report)


def foreign_config(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=321)


def foreign_tokenizer(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=299)


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def no_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def shallow(folder: Path) -> None:
    edit(folder / "config.json", num_hidden_layers=7)


def dynamic_rope(folder: Path) -> None:
    edit(folder / "config.json", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})


def partial_rope(folder: Path) -> None:
    edit(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})


def code_elsewhere(folder: Path) -> None:
    edit(folder / "config.json", model_type="nobodys", auto_map={"AutoModelForCausalLM": "somebody/else--modeling.Model"})


@pytest.mark.parametrize(
    ("damage", "check", "sentence"),
    [
        (foreign_config, "target.sizes", "LM head lm_head.weight is [320, 32], the config says [321, 32]"),
        (foreign_tokenizer, "target.tokenizer", "ids beyond the LM head's 299 rows"),
        (no_template, "target.tokenizer", "no chat template"),
        (no_tokenizer, "target.tokenizer", "cannot be loaded"),
        (dynamic_rope, "target.draft", "RoPE type 'dynamic' is not supported"),
        (partial_rope, "target.draft", "rotates only a part of each head"),
        (shallow, "target.boundaries", "7 layers has no default aux boundaries"),
        (code_elsewhere, "target.remote_code", "needs code that comes with the target (somebody/else--modeling.Model)"),
    ],
)
def test_bad_targets(folder: Path, damage: Callable[[Path], None], check: str, sentence: str) -> None:
    damage(folder)
    finding = by_name(gate(folder))[check]
    assert finding.status == "fail"
    assert sentence in finding.evidence
    assert finding.remedy


@pytest.mark.parametrize(
    ("sections", "evidence", "remedy"),
    [
        ({"draft": DraftSettings(qk_norm=True)}, "no norms on q and k", "Set export.formats to [vllm], or change the draft."),
        ({"draft": DraftSettings(norm_before_fc=True)}, "never reads norm_before_fc", "Set export.formats to [vllm], or change the draft."),
        ({"extract": ExtractSettings(boundaries=(4,))}, "a single aux boundary", "Set export.formats to [vllm], or change the draft."),
        ({"vocab": VocabSettings(size=321)}, "321 tokens, the target's has 320", "Set vocab.size to at most 320, or to auto."),
        (
            {"draft": DraftSettings(qk_norm=True), "export": ExportSettings(formats=("sglang",))},
            "no norms on q and k",
            "Export for another engine, or change the draft.",
        ),
    ],
)
def test_a_draft_that_could_not_be_is_known_before_anything_is_spent(
    tm_folder: Path, sections: dict[str, Any], evidence: str, remedy: str
) -> None:
    finding = by_name(gate(tm_folder, sections))["target.draft"]
    assert finding.status == "fail"
    assert evidence in finding.evidence
    assert finding.remedy == remedy
    assert by_name(gate(tm_folder, sections | {"export": ExportSettings(formats=("vllm",))}))["target.draft"].status == (
        "fail" if "vocab" in sections else "pass"
    )


@pytest.mark.parametrize("stage", ["regenerate", "extract"])
def test_the_stages_that_spend_ask_for_the_draft_first(stage: str) -> None:
    assert checks.target_draft in CHECKS[stage, "before"]


def test_trusted_code_must_lie_in_the_folder(folder: Path) -> None:
    """What would be fetched at load time has no hash that anybody could have looked at."""
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "somebody/else--modeling.Model"})
    assert by_name(gate(folder))["target.remote_code"].status == "pass"  # built in, and nothing trusted
    assert by_name(gate(folder, trust_remote_code=True))["target.remote_code"].status == "fail"


def test_an_unread_norm_is_a_warning_that_names_the_type(folder: Path) -> None:
    edit(folder / "config.json", model_type="brand_new")
    finding = by_name(gate(folder))["target.norm_convention"]
    assert finding.status == "warn"
    assert "'brand_new'" in finding.evidence


def test_an_end_of_turn_that_no_config_declares_is_a_warning(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    edit(folder / "generation_config.json", eos_token_id=0)
    edit(folder / "config.json", eos_token_id=0)
    finding = by_name(gate(folder))["target.tokenizer"]
    assert finding.status == "warn"
    assert "closes answers with [2]" in finding.evidence


def test_no_target_is_unknown_not_pass() -> None:
    recipe = Recipe(target=TargetSettings(model="x"), data=DataSettings(train=("x",)), run=RunSettings(dir="r"))
    report = run_gate(GateContext("extract", "before", recipe, None, {}, Path("out"), None), ALL, protects="the load")
    assert [finding.status for finding in report.findings] == ["unknown"] * len(ALL)
