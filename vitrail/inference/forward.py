"""Old names of what moved to inference.runner and inference.device; goes when nothing imports it."""

from vitrail.inference.device import device_of
from vitrail.inference.runner import Outputs

__all__ = ["Outputs", "device_of"]
