"""How the logits of trained weights become predictions."""

from __future__ import annotations

from pydantic import Field

from vitrail.config.network import Schema


class Postprocess(Schema):
    """What was found after training, and is no weight."""

    temperature: float = Field(default=1.0, gt=0)  # logits are divided by it
    threshold: float = Field(default=0.0, ge=0, le=1)  # of one label: below this probability, none of these
    thresholds: tuple[float, ...] = ()  # of any number of labels: one each; empty: a half
    measured_on: str = ""
    fitted_on: str = ""  # tells the very images it was found with, whatever their names
