"""The report in a real browser: no errors, no requests, every image loads."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_page import EVIL, full, picture, tuned, with_map
from vitrail.report.page import ReportFacts, write_report

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
QUIET = "--no-first-run --disable-background-networking --disable-component-update --disable-sync --disable-extensions"
# Reports images that did not load, the page width, and requests. (The browser's own log also has its own requests.)
PROBE = """<script>addEventListener("load", async () => {
  const images = [...document.images];
  await Promise.all(images.map(image => image.decode().catch(() => 0)));
  const broken = images.filter(image => !image.naturalWidth).length;
  document.querySelector(".classes button").click();
  const first = document.querySelector(".classes tbody td").textContent;
  const addresses = performance.getEntriesByType("resource").map(entry => entry.name);
  const requests = addresses.filter(address => !address.startsWith("data:"));
  const choice = document.querySelector(".decisions tbody td")?.clientWidth;
  const report = {images: images.length, broken, wide: document.documentElement.scrollWidth, first, requests, choice};
  document.body.insertAdjacentHTML("beforeend", "<output>" + JSON.stringify(report) + "</output>");
});</script>"""

pytestmark = [pytest.mark.full, pytest.mark.skipif(not BROWSER, reason="there is no browser here")]


def everything() -> ReportFacts:
    parts = full(["zebra", "dog", "owl"])
    facts = tuned(300, 0.9)
    pictures = {
        "confident_errors": [
            with_map(picture((32, 32, 3)), "dog rather than cat"),
            with_map(picture((90, 300, 3)), "dog"),
        ],
        "label_errors": parts.label_errors,
        "num_label_errors": 1,
        "commands": parts.commands,
        "notes": EVIL,
        "history": parts.history,
        "decisions": [
            ("precision", "a network of some size with its terms " * 4, "because " + "of this and that " * 12)
        ],
    }
    return replace(facts, **pictures)


def open_page(page: Path, width: int) -> tuple[dict[str, Any], str]:
    """Return the report of the page, and the console messages of the browser."""
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>"), encoding="utf-8")
    options = [f"--window-size={width},900", f"--user-data-dir={page.with_suffix('.profile')}"]
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    for budget in (5_000, 30_000, 120_000):  # milliseconds of virtual time: a busy machine may need more
        command = [BROWSER, *fixed, f"--virtual-time-budget={budget}", *QUIET.split(), *options, "--dump-dom"]
        done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=90, check=True)
        report = json.loads(unescape(done.stdout.rpartition("<output>")[2].partition("</output>")[0]))
        if isinstance(report, dict):  # else the output is the script itself
            break
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return report, console


@pytest.mark.parametrize("width", [1100, 500])
def test_the_page_loads(tmp_path: Path, width: int) -> None:
    page = tmp_path / "report.html"
    write_report(page, everything())
    report, console = open_page(page, width)
    assert report["images"] == 5 and report["broken"] == 0
    assert report["first"] == "cat"  # sorted by its script, on a click
    assert report["wide"] <= width and report["choice"] > 60  # narrower cells would break inside words
    assert console == "" and report["requests"] == []


def test_faults_are_detected(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(
        '<body class="classes"><button>x</button><table class="classes"><tbody><tr><td>cat</td></tr></tbody></table>'
        '<img src="http://localhost:9/x.png"><script>console.error("oh")</script></body>'
    )
    report, console = open_page(page, 1100)
    assert report["broken"] == 1 and "oh" in console and report["requests"] == ["http://localhost:9/x.png"]
