"""Old names of functions that moved to data.loader.memory and inference.runner; goes when nothing imports it."""

from vitrail.data.loader.memory import reader_of, waiting_advice
from vitrail.inference.runner import network_outputs as outputs_of

__all__ = ["outputs_of", "reader_of", "waiting_advice"]
