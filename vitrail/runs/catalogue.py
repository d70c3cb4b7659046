"""`vitrail models` and `vitrail recipes`: what there is."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from vitrail.config import read_recipe, recipe_folder, recipe_names
from vitrail.model.cost import macs, parameters
from vitrail.model.variants import COMMON, configure


def show_models(console: Console) -> None:
    table = Table(box=None, header_style="dim")
    for heading in ("model", "parameters", "GMAC", "width", "layers", "heads", "tokens"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name in COMMON:
        config = configure(name, 1000)
        sizes = (config.width, config.depth, config.heads, config.sequence)
        table.add_row(name, f"{parameters(config):,}", f"{macs(config) / 1e9:.2f}", *map(str, sizes))
    console.print(table)
    console.print("[dim]with 1,000 classes at 224 px; any patch size works, as in S/8[/]")


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
