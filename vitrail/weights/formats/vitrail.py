"""Vitrail's own layout, which stores the whole card. Files are recognized by their header and read by `read_bundle`."""

from __future__ import annotations

from vitrail.weights.bundle import write_bundle
from vitrail.weights.formats.base import Format

FORMAT = Format(
    "vitrail",
    "vitrail's",
    lambda path, card, state: write_bundle(path, state, card),
    lost_information=lambda _: {},
    suffix=".safetensors",
)
