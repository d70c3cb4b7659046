"""`vitrail recipes`: list the recipes, or print one of them."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from vitrail import strict_json
from vitrail.config import flatten, read_recipe, read_recipe_file, recipe_folder, recipe_names
from vitrail.terminal import escape

# Groups of recipes by the prefixes of their names, in the order of the list.
GENERAL = "general"
FAMILIES: dict[str, tuple[str, ...]] = {
    GENERAL: (),
    "small data from random weights": ("cifar", "tiny-imagenet"),
    "the paper's fine-tuning (Table 4)": ("paper-finetune",),
    "the paper's pre-training (Table 3)": ("paper-",),
    "the paper's self-supervision": ("masked",),
    "BiT-HyperRule": ("bit",),
    "Better plain ViT baselines": ("better-vit",),
    "AugReg: How to train your ViT": ("augreg",),
    "DeiT": ("deit",),
}


def family(name: str) -> str:
    """Return the group of a recipe by the prefix of its name."""
    return next((heading for heading, starts in FAMILIES.items() if name.startswith(starts)), GENERAL)


def show_recipes(console: Console, name: str | None) -> None:
    """Print all recipes by group, or the text of one recipe with all settings it inherits."""
    if name is not None:
        _show_recipe(console, name)
        return
    names = sorted(recipe_names(), key=_by_number)
    column = max(map(len, names))
    for heading in FAMILIES:
        console.print(f"[bold]{heading}[/]")
        for recipe in (recipe for recipe in names if family(recipe) == heading):
            console.print(f"  {recipe:<{column}}  [dim]{escape(_description(recipe))}[/]")
    console.print("[dim]command, cost and expected accuracy of a recipe: vitrail recipes NAME[/]")


def _by_number(name: str) -> list[str]:
    """Sort key: 90 comes before 150."""
    return [part.zfill(4) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _description(name: str) -> str:
    """Return the second line of a recipe, which describes it. The first line is its command."""
    lines: list[str] = (recipe_folder() / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    return lines[1].removeprefix("# ")


def _show_recipe(console: Console, name: str) -> None:
    """Print the file, and as comments all inherited settings. The output is a valid recipe."""
    settings = read_recipe(name)  # an unknown name is an error with a suggestion
    file = recipe_folder() / f"{name}.toml" if name in recipe_names() else Path(name)
    console.print(file.read_text(encoding="utf-8"), markup=False, end="")
    bases = _bases(name)
    if not bases:
        return
    console.print(f"\n# base: {', over '.join(bases)}; all settings of this recipe, in the form of --set:")
    for key, value in sorted(flatten(settings).items()):
        console.print(f"#   {key}={strict_json.dumps(value)}", markup=False)


def _bases(name: str) -> list[str]:
    """Return the base recipes of a recipe, nearest first."""
    base = read_recipe_file(name).get("base")
    return [] if base is None else [base, *_bases(base)]
