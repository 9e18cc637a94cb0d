"""The report in a real browser: Chromium, driven through Playwright, with the machine's own build."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from draftproof.report.report import write_report
from example_run import FINDINGS, RESULT, STAGES

MakeRun = Callable[..., Path]

FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

CONTRAST = """
() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const linear = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || node.closest("title") || !node.getClientRects().length) continue;
    const style = getComputedStyle(node);
    const ink = light(parse(node instanceof SVGElement ? style.fill : style.color)), paper = light(ground(node));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (ratio < 4.5) poor.push(`${node.tagName} ${node.getAttribute("class")} ${ratio.toFixed(2)} ${node.textContent.trim().slice(0, 40)}`);
  }
  return poor;
}
"""

CUT = """
() => [...document.querySelectorAll("body *")]
  .filter((node) => !node.closest(".scroll, .sr, svg") && node.getClientRects().length)
  .filter((node) => node.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
  .map((node) => `${node.tagName}.${node.className}`)
"""


@dataclass
class Seen:
    """What the browser did besides drawing."""

    requests: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.fail("Chromium is not installed: `make browser` installs it or says how.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, chromium_sandbox=os.geteuid() != 0, args=list(FLAGS))
        yield browser
        browser.close()


def open_page(browser: Browser, report: Path, *, width: int, scheme: str = "light") -> tuple[Page, Seen]:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]  # a Literal there
    seen = Seen()
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("console", lambda message: seen.console.append(message.text))
    page.on("pageerror", lambda error: seen.console.append(str(error)))
    page.goto(report.as_uri())
    page.wait_for_load_state("networkidle")
    return page, seen


def open_all(page: Page) -> None:
    """Unfold every folded part by its summary, as a reader would."""
    for summary in page.query_selector_all("details:not([open]) > summary"):
        summary.click()


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_finished_run_is_whole_readable_and_quiet(browser: Browser, make_run: MakeRun, tmp_path: Path, width: int, scheme: str) -> None:
    report = write_report(make_run())
    page, seen = open_page(browser, report, width=width, scheme=scheme)
    page.screenshot(path=tmp_path / f"finished-{width}-{scheme}.png", full_page=True)
    open_all(page)
    page.screenshot(path=tmp_path / f"unfolded-{width}-{scheme}.png", full_page=True)

    assert seen.console == []
    assert [url for url in seen.requests if url != report.as_uri() and not url.startswith("data:")] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CUT) == []
    assert page.evaluate(CONTRAST) == []

    text = page.inner_text("main")
    for stage in STAGES:
        assert page.locator(".line .stop h3", has_text=stage).is_visible()
        assert page.locator(f"#gate-{stage} summary").inner_text().startswith(f"Gate before {stage}")
    for finding in (finding for findings in FINDINGS.values() for finding in findings):
        assert finding["check"] in text
        assert finding["evidence"] in text
    assert page.locator("svg.chart").count() == 3
    assert page.locator("svg.chart[aria-label]").count() == 3


@pytest.mark.parametrize("width", [390, 1280])
def test_a_refused_run_says_where_it_stands(browser: Browser, make_run: MakeRun, tmp_path: Path, width: int) -> None:
    full = {
        "check": "storage.bytes",
        "status": "fail",
        "evidence": "346 MB wanted, 12 MB free on /data.",
        "remedy": "Free 334 MB on /data.",
    }
    page, seen = open_page(browser, write_report(make_run(until="vocab", findings={"extract": [full]})), width=width)
    page.screenshot(path=tmp_path / f"refused-{width}.png", full_page=True)
    assert seen.console == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert "Stopped before extract: its gate said no." in page.inner_text("header")
    assert page.locator(".line .stop.is-done").count() == 3
    assert page.locator(".line .stop.is-refused h3").inner_text() == "extract"
    assert page.locator("#gate-extract").inner_text().count("346 MB wanted, 12 MB free on /data. Free 334 MB on /data.") == 1


def test_hostile_strings_stay_text(browser: Browser, make_run: MakeRun, tmp_path: Path) -> None:
    evil = "</style></svg></title><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    long = "W" * 300
    result = copy.deepcopy(RESULT)
    result["by_category"] = {evil: result["by_category"]["list"], long: result["by_category"]["story"]}
    result["baselines"] = {evil: result["baselines"]["prompt_lookup"]}
    result["engine"] = evil
    findings = {"extract": [{"check": evil, "status": "fail", "evidence": evil + long, "remedy": evil, "waived": evil}]}
    recipe = f"target: {{model: {json.dumps(evil)}}}\ndata: {{train: [{json.dumps(long)}]}}\nrun: {{dir: runs/{long}}}\n"
    report = write_report(make_run(recipe=recipe, result=result, findings=findings))
    for width in (390, 1280):
        page, seen = open_page(browser, report, width=width)
        open_all(page)
        page.screenshot(path=tmp_path / f"hostile-{width}.png", full_page=True)
        assert seen.console == []
        assert len(seen.requests) <= 2  # the page, and its empty icon
        assert "owned" not in page.title()
        assert page.locator("script, img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert evil in page.inner_text("main")
