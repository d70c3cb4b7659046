"""Names of before for what moved to data.loader.memory and inference.runner; to be removed with its last import."""

from vitrail.data.loader.memory import reader_of, waiting_advice
from vitrail.inference.runner import network_outputs as outputs_of

__all__ = ["outputs_of", "reader_of", "waiting_advice"]
