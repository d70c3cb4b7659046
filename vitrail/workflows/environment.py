"""The versions and hardware of a run, which the last digits of its results depend on."""

from __future__ import annotations

import platform

import numpy as np
import PIL
import torch
from rich.console import Console

from vitrail import __version__
from vitrail.terminal import escape


def environment(device: torch.device) -> dict[str, str]:
    """Versions and hardware that the last bits of a result depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "vitrail": __version__,
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "device": f"{device.type} {name}",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "numpy": np.__version__,
        "pillow": PIL.__version__,
    }


def warn_machine_changed(then: dict[str, str], now: dict[str, str], console: Console) -> None:
    """Print a warning if versions or hardware changed since the run was started (`environment`)."""
    changed = [f"{key} {then.get(key)} -> {value}" for key, value in now.items() if then.get(key) != value]
    if changed:
        console.print(
            f"[yellow]the machine or a library changed ({escape('; '.join(changed))}): the last digits may differ[/]"
        )
