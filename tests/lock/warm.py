"""What commands import, by public names alone: imported once, in the process that all others are forked from."""

import contextlib
from importlib import import_module

import torch

import vitrail

torch.set_num_threads(1)
for name in vitrail.__all__:
    getattr(vitrail, name)
for name in ("vitrail.__main__", "jinja2", "matplotlib.backends.backend_svg", "torch._dynamo"):
    with contextlib.suppress(ImportError):
        import_module(name)
