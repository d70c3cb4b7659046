"""The report in a real browser: nothing to complain about, nothing asked of the network, every image there."""

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
# What the page would tell if it could: images that did not load, how wide it is, what it asked of any network. (A log
# of the browser's own would have its calls home, too.)
ASK = """<script>addEventListener("load", async () => {
  const images = [...document.images];
  await Promise.all(images.map(one => one.decode().catch(() => 0)));
  const broken = images.filter(one => !one.naturalWidth).length;
  document.querySelector(".classes button").click();
  const first = document.querySelector(".classes tbody td").textContent;
  const asked = performance.getEntriesByType("resource").map(one => one.name).filter(one => !one.startsWith("data:"));
  const choice = document.querySelector(".decisions tbody td")?.clientWidth;
  const told = {images: images.length, broken, wide: document.documentElement.scrollWidth, first, asked, choice};
  document.body.insertAdjacentHTML("beforeend", "<output>" + JSON.stringify(told) + "</output>");
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


def opened(page: Path, width: int) -> tuple[dict[str, Any], str]:
    """What the page tells, and what the browser complains of."""
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", ASK + "</body>"), encoding="utf-8")
    options = [f"--window-size={width},900", f"--user-data-dir={page.with_suffix('.profile')}"]
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    for budget in (5_000, 30_000, 120_000):  # milliseconds of its clock: on a busy machine the page may need more
        command = [BROWSER, *fixed, f"--virtual-time-budget={budget}", *QUIET.split(), *options, "--dump-dom"]
        done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=90, check=True)
        told = json.loads(unescape(done.stdout.rpartition("<output>")[2].partition("</output>")[0]))
        if isinstance(told, dict):  # else it found only the script that is to tell
            break
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return told, console


@pytest.mark.parametrize("width", [1100, 500])
def test_the_page_opens(tmp_path: Path, width: int) -> None:
    page = tmp_path / "report.html"
    write_report(page, everything())
    told, console = opened(page, width)
    assert told["images"] == 5 and told["broken"] == 0
    assert told["first"] == "cat"  # sorted by its script, on a click
    assert told["wide"] <= width and told["choice"] > 60  # or it would break between letters
    assert console == "" and told["asked"] == []


def test_a_fault_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(
        '<body class="classes"><button>x</button><table class="classes"><tbody><tr><td>cat</td></tr></tbody></table>'
        '<img src="http://localhost:9/x.png"><script>console.error("oh")</script></body>'
    )
    told, console = opened(page, 1100)
    assert told["broken"] == 1 and "oh" in console and told["asked"] == ["http://localhost:9/x.png"]
