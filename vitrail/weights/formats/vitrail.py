"""Our own layout, which holds everything that a card says. Its files are known by their header, and read by
`read_bundle`."""

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
