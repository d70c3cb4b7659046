"""Printing of JSON results."""

from __future__ import annotations

import os

from vitrail import strict_json


def print_json(values: object) -> None:
    """Print JSON on standard output, from rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(strict_json.dumps(values))
