"""`vitrail models`: list the named networks and the pre-trained weights."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from vitrail.config import ModelConfig
from vitrail.errors import UserError
from vitrail.models.flops import count_macs, count_parameters
from vitrail.models.variants import AXIAL, BIT, HYBRIDS, PLAIN, config_from_name
from vitrail.terminal import escape
from vitrail.weights.backbones import BACKBONES, Backbone, bundled
from vitrail.weights.names import BUNDLED

KINDS = {"Vision Transformers": PLAIN, "hybrids": HYBRIDS, "BiT ResNets": BIT, "axial": AXIAL}


def list_models() -> list[dict[str, Any]]:
    """Return every named network with its cost, for 1,000 classes at 224 px."""
    rows = []
    for kind, names in KINDS.items():
        for name in names:
            config = config_from_name(name, 1000)
            row: dict[str, Any] = {
                "model": name,
                "kind": kind,
                "parameters": count_parameters(config),
                "macs": count_macs(config),
            }
            if isinstance(config, ModelConfig):
                row |= {
                    "width": config.width,
                    "layers": config.blocks,
                    "heads": config.heads,
                    "tokens": config.sequence,
                }
            else:
                row |= {"width": config.features, "layers": 3 * sum(config.blocks) + 2}
            rows.append(row)
    return rows


def show_models(console: Console) -> None:
    """Print tables of the networks and of the pre-trained weights."""
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
    console.print(
        "[dim]for 1,000 classes at 224 px; any patch size works, such as S/8; details: vitrail plan MODEL[/]\n"
    )
    console.print("[bold]pre-trained weights[/], for --from (chosen automatically by vitrail train)")
    for backbone in BACKBONES:
        _show_backbone(console, backbone)
    try:
        _show_backbone(console, bundled())
    except UserError as error:
        console.print(f"  {BUNDLED}: {escape(str(error))}")


def _show_backbone(console: Console, backbone: Backbone) -> None:
    console.print(f"  {backbone.spec}", soft_wrap=True)
    facts = f"{backbone.network}, {backbone.parameters:g} million parameters, {backbone.megabytes} MB"
    trained_on, licence = escape(backbone.pretrained_on), escape(backbone.licence)
    console.print(f"  [dim]{facts}; trained on {trained_on}; licence: {licence}[/]")
    if backbone.result:
        console.print(f"  [dim]{escape(backbone.result)}[/]")
