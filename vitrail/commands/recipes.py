"""`vitrail recipes`: what recipes there are, or one of them whole."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from vitrail import strict_json
from vitrail.config import flatten, read_recipe, read_recipe_file, recipe_folder, recipe_names
from vitrail.terminal import escape

# Families of recipes by how their names begin, in the order to show them; what is left is for every day.
EVERY_DAY = "every day"
FAMILIES: dict[str, tuple[str, ...]] = {
    EVERY_DAY: (),
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
    """The heading that a recipe stands under: the first whose names begin as its own does."""
    return next((heading for heading, starts in FAMILIES.items() if name.startswith(starts)), EVERY_DAY)


def show_recipes(console: Console, name: str | None) -> None:
    """What each recipe is, by families; or the whole text of one, and below it what it comes to with its bases."""
    if name is not None:
        _show_recipe(console, name)
        return
    names = sorted(recipe_names(), key=_by_number)
    column = max(map(len, names))
    for heading in FAMILIES:
        console.print(f"[bold]{heading}[/]")
        for known in (known for known in names if family(known) == heading):
            console.print(f"  {known:<{column}}  [dim]{escape(_about(known))}[/]")
    console.print("[dim]the command, cost and expected numbers of one: vitrail recipes NAME[/]")


def _by_number(name: str) -> list[str]:
    """In this order 90 comes before 150."""
    return [part.zfill(4) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _about(name: str) -> str:
    """The second line of a recipe says what it is; the first is its command."""
    lines: list[str] = (recipe_folder() / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    return lines[1].removeprefix("# ")


def _show_recipe(console: Console, name: str) -> None:
    """The file, and as comments what it inherits: the whole remains a recipe that can be saved and changed."""
    settings = read_recipe(name)  # a wrong name is reported with the right one
    file = recipe_folder() / f"{name}.toml" if name in recipe_names() else Path(name)
    console.print(file.read_text(encoding="utf-8"), markup=False, end="")
    bases = _bases(name)
    if not bases:
        return
    console.print(f"\n# base: {', over '.join(bases)}; with it, every setting of this recipe as --set takes it:")
    for key, value in sorted(flatten(settings).items()):
        console.print(f"#   {key}={strict_json.dumps(value)}", markup=False)


def _bases(name: str) -> list[str]:
    """The recipes below this one, nearest first."""
    base = read_recipe_file(name).get("base")
    return [] if base is None else [base, *_bases(base)]
