"""Write the baseline: `python -m tests.lock.record [CASE ...]`. Only by the code that others are compared with."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.lock import world
from tests.lock.cases import CASES


def main(only: list[str]) -> None:
    kept = world.read_baseline()[1] if only else {}
    with tempfile.TemporaryDirectory() as place:
        template = world.prepare(Path(place) / "template")
        for case in CASES:
            if only and case.name not in only:
                continue
            started = time.monotonic()
            kept[case.name] = world.observed(case, world.enter(template, Path(place) / case.name / "here"))
            codes = kept[case.name]["codes"], kept[case.name]["errors"], kept[case.name]["unmentioned"]
            print(f"{time.monotonic() - started:5.1f} s  {case.name}", *codes, flush=True)
            if only:
                for end in ("out", "err"):
                    sys.stdout.write((Path(place) / case.name / f"here.{end}").read_text())
    world.write_baseline(kept)


if __name__ == "__main__":
    main(sys.argv[1:])
