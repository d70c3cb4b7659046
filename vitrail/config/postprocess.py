"""Schema of the postprocessing of logits into predictions."""

from __future__ import annotations

from pydantic import Field

from vitrail.config.network import Schema


class Postprocess(Schema):
    """Temperature and thresholds, fitted after training."""

    temperature: float = Field(default=1.0, gt=0)  # divides the logits
    threshold: float = Field(
        default=0.0, ge=0, le=1
    )  # single label: below this probability the prediction is "none of these"
    thresholds: tuple[float, ...] = ()  # multilabel: one per class; empty: 0.5
    measured_on: str = ""
    fitted_on: str = ""  # fingerprint of the images it was fitted on, independent of their names
