"""Names of before for what moved to inference.runner and inference.device; to be removed with its last import."""

from vitrail.inference.device import device_of
from vitrail.inference.runner import Outputs

__all__ = ["Outputs", "device_of"]
