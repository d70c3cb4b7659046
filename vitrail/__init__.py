"""vitrail: Vision Transformers as software people rely on. Importing this does not import torch."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

