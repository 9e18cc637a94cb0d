"""What the report says of a run, without a browser."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from draftproof.errors import UsageError
from draftproof.pipeline import STAGE_NAMES
from draftproof.report.facts import LINE, read_run
from draftproof.report.plots import HEIGHT, TOP, WIDTH, Series, bar_chart, line_chart, thin, ticks
from draftproof.report.report import duration, size, write_report
from example_run import COUNTS, FINDINGS, STAGES

MakeRun = Callable[..., Path]


def page(run: Path) -> str:
    """The report's text, tags removed and spaces folded."""
    body = write_report(run).read_text().split("</style>", 1)[1]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body)).replace("&#39;", "'")


def test_a_finished_run(make_run: MakeRun) -> None:
    text = page(make_run())
    assert "Finished: all 7 stages are done, and every file is what its manifest says. 1 finding waived" in text
    assert "Acceptance length 1.68" in text
    assert "Prompt lookup 1.21" in text
    assert "Text 59 of 60 the same as by the target alone" in text
    assert "dropped: nothing supervised 5" in text
    assert "51,377 (68.6 %)" in text  # 51377 / 74902
    assert "<|im_end|> ↵ <|im_start|> assistant ↵ then supervised: Here ␣are ␣three ␣ideas :" in html.unescape(text)
    assert "extract 1 min 44 s 1 min 33 s 346 MB 4.3 kB 1.3 GB 1.1 GB 803" in text  # predicted 104 s, took 93.3 s
    assert "Reason: Short answers are cut on purpose in this demo." in text
    assert "batch_tokens 4096 command line" in text
    assert "unroll 3 smollm2-cpu.yaml:5" in text
    assert "max_length 4096 default" in text


@pytest.mark.parametrize("until", STAGES[:-1])
def test_an_unfinished_run_says_what_is_next(make_run: MakeRun, until: str) -> None:
    done = STAGES.index(until) + 1
    text = page(make_run(until=until))
    assert f"{done} of 7 stages are done; {STAGES[done]} is next." in text
    for stage in STAGES:
        assert f"Gate before {stage}" in text
    assert text.count("The line has not come to this gate.") == 7 - done


def test_training_under_way_shows_its_curve(make_run: MakeRun) -> None:
    run = make_run(until="extract", unfinished="train")
    metrics = run / ".train.partial" / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole[: len(whole) - 30])  # the writer is in the middle of a line
    text = page(run)
    assert "train is unfinished. The same command goes on from there." in text
    assert "Training loss" in text
    assert "Acceptance forecast on held-out rows" in text


def test_a_gate_that_could_not_tell(make_run: MakeRun) -> None:
    unsure = {"check": "storage.inodes", "status": "unknown", "evidence": "The file system does not count inodes."}
    run = make_run(until="vocab", findings={"extract": [unsure]})
    assert read_run(run).stage("extract").state == "undecided"
    assert "Stopped before extract: its gate could not tell." in page(run)


def test_a_damaged_artifact_is_named_and_its_figures_are_not_shown(make_run: MakeRun) -> None:
    run = make_run()
    result = run / "evaluate" / "result.json"
    result.write_text(result.read_text().replace("1.68", "9.68"))
    text = page(run)
    assert "The evaluate artifact is damaged: result.json does not hash to what its manifest says." in text
    assert "9.68" not in text


def test_a_run_that_did_not_ask_for_regenerate(make_run: MakeRun) -> None:
    run = make_run(recipe="target: {model: /models/x}\ndata: {train: [a.jsonl]}\nrun: {dir: runs/x}\n")
    assert read_run(run).stage("regenerate").state == "done"  # made once: shown
    for name in ("regenerate", "gates/01-regenerate.json"):
        (run / name).rename(run.parent / name.replace("/", "-"))
    assert read_run(run).stage("regenerate").state == "not asked for"
    assert "Finished: all 6 stages are done" in page(run)


def test_a_stage_without_checks_has_an_open_gate(make_run: MakeRun) -> None:
    run = make_run()
    (run / "gates" / "03-vocab.json").unlink()
    assert read_run(run).stage("vocab").verdict == "no checks"
    assert "No checks stand before this stage." in page(run)


def test_the_report_knows_the_line_of_the_pipeline() -> None:
    assert tuple(name for name, _ in LINE) == STAGE_NAMES


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no recipe\.yaml"):
        write_report(tmp_path)


def test_the_page_allows_itself_nothing_but_its_own_style(make_run: MakeRun) -> None:
    source = write_report(make_run()).read_text()
    style = re.search(r"<style>(.*?)</style>", source, re.DOTALL)
    assert style is not None
    wanted = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', source)
    assert policy is not None
    assert policy[1].startswith(f"default-src 'none'; style-src 'sha256-{wanted}'")
    assert "<script" not in source
    assert re.findall(r'(?:src|href)="(?!#|data:,)', source) == []
    assert " style=" not in source


def test_every_count_of_the_fixture_adds_up() -> None:
    conversations = COUNTS["prepare"]["conversations"]
    assert conversations["in"] == conversations["kept"] + sum(conversations["changed"].values()) + sum(conversations["dropped"].values())
    assert set(FINDINGS) == set(STAGES)


def test_a_line_lies_where_the_axes_say() -> None:
    chart = line_chart("loss", [Series("a", ((0.0, 0.0), (10.0, 1.0)))], x_label="step", y_label="loss", mark=(5.0, "here"))
    # 0..10 spans x 50..406, and 0..1 spans y 204..22 of the 420 x 250 box.
    assert 'points="50.0,204.0 406.0,22.0"' in chart.svg
    assert '<line class="mark" x1="228.0" x2="228.0"' in chart.svg
    assert (WIDTH, HEIGHT, TOP) == (420, 250, 22)
    assert chart.rows == (("0", "0"), ("10", "1"))


def test_a_bar_is_as_high_as_its_value() -> None:
    chart = bar_chart("by position", ["1", "2"], [Series("draft", ((0, 0.5), (1, 0.25)))], x_label="position", y_label="share", top=1.0)
    heights = [float(h) for h in re.findall(r'<rect class="bar tone-0"[^>]* height="([\d.]+)"', chart.svg)]
    assert heights == [91.0, 45.5]  # half and a quarter of 182
    assert chart.rows == (("1", "0.5"), ("2", "0.25"))


def test_names_in_charts_are_escaped() -> None:
    chart = bar_chart("<b>", ["<i>"], [Series("<u>", ((0, 1.0),))], x_label="<p>", y_label="&")
    assert "<b>" not in chart.svg
    assert "<i>" not in chart.svg
    assert "&lt;i&gt;" in chart.svg


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 120, [0, 50, 100, 150]),
        (1.2, 1.8, [1.2, 1.4, 1.6, 1.8]),
    ],
)
def test_ticks_are_round_and_cover(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_ticks_of_a_single_value_surround_it() -> None:
    found = ticks(3.0, 3.0)
    assert found[0] < 3.0 < found[-1]


def test_thin_averages_neighbours() -> None:
    assert thin([(1, 1.0), (2, 3.0), (3, 5.0)], most=2) == ((2, 2.0), (3, 5.0))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (3.21, "3.2 s"), (9.96, "10 s"), (59.6, "1 min 00 s"), (192, "3 min 12 s"), (3599.6, "1 h 00 min"), (7500, "2 h 05 min")],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(None, "–"), (812, "812 B"), (4_100_000, "4.1 MB"), (346_000_000, "346 MB"), (2.5e12, "2.5 TB")]
)
def test_size(count: float | None, text: str) -> None:
    assert size(count) == text
