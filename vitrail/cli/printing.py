"""What commands print on standard output for scripts."""

from __future__ import annotations

import os

from vitrail import strict_json


def print_json(values: object) -> None:
    """Of several processes only the first prints."""
    if os.environ.get("RANK", "0") == "0":
        print(strict_json.dumps(values))
