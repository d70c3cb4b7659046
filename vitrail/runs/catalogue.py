"""`vitrail models` and `vitrail recipes`: what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vitrail.config import ModelConfig, read_recipe, recipe_folder, recipe_names
from vitrail.model.cost import macs, parameters
from vitrail.model.variants import AXIAL, BIT, HYBRIDS, PLAIN, configure

KINDS = {"Vision Transformers": PLAIN, "hybrids": HYBRIDS, "BiT ResNets": BIT, "axial": AXIAL}


def list_models() -> list[dict[str, Any]]:
    """Every named network with its cost, with 1,000 classes at 224 px."""
    found = []
    for kind, names in KINDS.items():
        for name in names:
            config = configure(name, 1000)
            row: dict[str, Any] = {"model": name, "kind": kind, "parameters": parameters(config), "macs": macs(config)}
            if isinstance(config, ModelConfig):
                row |= {
                    "width": config.width,
                    "layers": config.blocks,
                    "heads": config.heads,
                    "tokens": config.sequence,
                }
            else:
                row |= {"width": config.features, "layers": 3 * sum(config.blocks) + 2}
            found.append(row)
    return found


def show_models(console: Console) -> None:
    table = Table(box=None, header_style="dim")
    for heading in ("model", "parameters", "GMAC", "width", "layers", "heads", "tokens"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    kind = ""
    for row in list_models():
        if row["kind"] != kind:
            kind = row["kind"]
            table.add_row(f"[bold]{kind}[/]")
        sizes = (str(row.get(key, "")) for key in ("width", "layers", "heads", "tokens"))
        table.add_row(row["model"], f"{row['parameters']:,}", f"{row['macs'] / 1e9:.2f}", *sizes)
    console.print(table)
    console.print("[dim]with 1,000 classes at 224 px; any patch size works, as in S/8; more: vitrail plan MODEL[/]")


def show_recipes(console: Console, name: str | None) -> None:
    """The first comment lines of each recipe, or the whole text of one."""
    if name is not None:
        read_recipe(name)  # a wrong name is reported with the right one
        file = recipe_folder() / f"{name}.toml" if name in recipe_names() else Path(name)
        console.print(file.read_text(encoding="utf-8"), markup=False, end="")
        return
    for known in recipe_names():
        lines = (recipe_folder() / f"{known}.toml").read_text(encoding="utf-8").splitlines()
        command, about = (line.removeprefix("# ") for line in lines[:2])
        console.print(f"[bold]{known}[/]  {about}")
        console.print(f"    [dim]{command}[/]")
