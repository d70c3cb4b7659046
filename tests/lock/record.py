"""Write the baseline with the reference version of the code: `python -m tests.lock.record [CASE ...]`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.lock import world
from tests.lock.cases import CASES


def main(only: list[str]) -> None:
    baseline = world.read_baseline()[1] if only else {}
    with tempfile.TemporaryDirectory() as folder:
        template = world.prepare(Path(folder) / "template")
        for case in CASES:
            if only and case.name not in only:
                continue
            started = time.monotonic()
            observed = world.observed(case, world.enter(template, Path(folder) / case.name / "here"))
            baseline[case.name] = observed
            codes = observed["codes"], observed["errors"], observed["unmentioned"]
            print(f"{time.monotonic() - started:5.1f} s  {case.name}", *codes, flush=True)
            if only:
                for stream in ("out", "err"):
                    sys.stdout.write((Path(folder) / case.name / f"here.{stream}").read_text())
    world.write_baseline(baseline)


if __name__ == "__main__":
    main(sys.argv[1:])
