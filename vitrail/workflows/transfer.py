"""Fine-tuning as the paper measures it.

Learning rates are tried on a part of the training images; with the best one, networks are trained on all of them, with
several seeds, and only those see the test images, each once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vitrail import strict_json
from vitrail.atomic import atomic_write
from vitrail.config import (
    DataConfig,
    NetworkConfig,
    ResNetConfig,
    RunConfig,
    merge,
    parse_overrides,
    read_recipe,
    read_recipe_file,
    validate,
)
from vitrail.data.sources.read import read_source
from vitrail.distributed import process_group
from vitrail.errors import UserError, user_path
from vitrail.interrupt import Interrupted
from vitrail.terminal import escape
from vitrail.weights.bundle import read_card
from vitrail.weights.names import weights_spec
from vitrail.weights.read import read_weights
from vitrail.workflows.show import data_name
from vitrail.workflows.train_run import train
from vitrail.workflows.vitrail_files import refuse_foreign_files

# The learning rates of the paper's Table 4, by the beginning of a recipe's name; and what its text adds for ImageNet to
# those of ResNets and hybrids.
RATES = {
    "paper-finetune-imagenet": (0.003, 0.01, 0.03),
    "paper-finetune-vtab": (0.01,),
    "paper-finetune": (0.001, 0.003, 0.01, 0.03),
}
WITH_CONVOLUTIONS = {"paper-finetune-imagenet": (0.06,)}
AROUND = (1 / 3, 1.0, 3.0)  # times the rate of any other recipe


@dataclass(frozen=True)
class Transfer:
    """What the protocol found; accuracies are shares."""

    tried: dict[float, float]  # learning rate: accuracy on the part of the training images that was left out
    rate: float  # the best of them
    test: list[float]  # accuracy of each seed on the test images
    tested: int  # how many they are
    seen_before: int = 0  # of them, those that the starting weights are known to have been trained on

    @property
    def mean(self) -> float:
        return statistics.fmean(self.test)

    @property
    def deviation(self) -> float | None:
        """Of the seeds; none where there is only one."""
        return statistics.stdev(self.test) if len(self.test) > 1 else None

    @property
    def row(self) -> str:
        spread = "" if self.deviation is None else f" ± {100 * self.deviation:.2f}"
        return f"{100 * self.mean:.2f}{spread}"


def run_transfer(
    data: str | Path,
    *,
    from_: str | Path,
    recipe: str,
    rates: Sequence[float] = (),
    seeds: int,
    out: str | Path | None,
    overrides: Sequence[str],
    console: Console,
) -> Transfer:
    """Fine-tune by the paper's protocol. Every run has its folder in `out`; called again, finished ones are taken as
    they are, and one that was stopped goes on."""
    folder = user_path(out) if out is not None else Path("runs") / f"{data_name(str(data))}-transfer"
    with process_group() as ranks:
        ranks.broadcast(lambda: refuse_foreign_files([(folder / "transfer.json", "")], "choose another --out"))
        console.quiet = console.quiet or not ranks.is_first
        chosen = tuple(rates) or ranks.broadcast(
            lambda: default_rates(recipe, read_weights(weights_spec(from_)).card.model)
        )
        splits, watched = ranks.broadcast(lambda: _check(data, recipe, chosen, seeds, overrides))
        fixed = [] if "test" in splits else ["data.val_as_test=true"]
        if fixed:
            console.print("the data has no test split: its validation split is looked at once, as one")
        elif "val" in splits:
            console.print("the validation split of the data tells learning rates apart, and is trained on in the end")
        made: list[tuple[str, str]] = []  # runs, and the fingerprints of their images

        def measured(name: str, *settings: str) -> dict[str, Any]:
            settings = (*fixed, *settings)
            own = {setting.partition("=")[0] for setting in settings}
            others = [setting for setting in overrides if setting.partition("=")[0] not in own]
            console.rule(f"[bold]{escape(name)}[/]", align="left")
            try:
                result = train(
                    data,
                    from_=from_,
                    recipe=recipe,
                    out=folder / name,
                    overrides=[*others, *settings],
                    resume=True,
                    console=console,
                )
            except Interrupted as stopped:
                if not stopped.advice or "resume with" in stopped.advice:  # else it says what was lost
                    saved = " and saved" if stopped.advice else ""
                    stopped.advice = f"{saved}; the same command goes on"
                raise
            card = ranks.broadcast(lambda: read_card(result.weights))
            made.append((name, card.data["fingerprint"]))
            if made[0][1] != made[-1][1]:
                raise UserError(
                    f"{folder / made[0][0]} was trained when the images of {data} were others than for {name}: "
                    "numbers of both do not go together; choose another --out"
                )
            return card.metrics

        found = _protocol(measured, chosen, seeds, watched)
        ranks.broadcast(lambda: _tell(found, str(data), str(from_), folder, console))
    return found


def _protocol(measured: Callable[..., dict[str, Any]], rates: Sequence[float], seeds: int, watched: float) -> Transfer:
    """`measured`: what a run of this name and these settings comes to; `watched`: the share of images for the rates."""
    tried = {}
    if len(rates) > 1:
        for rate in rates:
            how = (f"optimizer.lr={rate:g}", "data.use_test=false", f"data.val_fraction={watched:g}")
            tried[rate] = measured(f"rate-{rate:g}", *how)
    # The likelihood tells equals apart.
    best = max(tried, key=lambda rate: (tried[rate]["top1"], -tried[rate]["nll"])) if tried else rates[0]
    last = (f"optimizer.lr={best:g}", "data.val_fraction=0")
    tests = [measured(f"seed-{seed}", *last, f"train.seed={seed}") for seed in range(seeds)]
    return Transfer(
        {rate: float(metrics["top1"]) for rate, metrics in tried.items()},
        best,
        [float(metrics["top1"]) for metrics in tests],
        int(tests[0]["n"]),
        int(tests[0].get("seen_before", 0)),
    )


def default_rates(recipe: str, network: NetworkConfig) -> tuple[float, ...]:
    """What to choose from, if nobody says."""
    name = recipe
    if recipe.endswith(".toml"):  # the user's own
        said = read_recipe_file(recipe)
        name = "" if "lr" in said.get("optimizer", {}) else str(said.get("base", ""))
    convolutions = isinstance(network, ResNetConfig) or network.stem is not None
    for beginning, rates in RATES.items():
        if name.startswith(beginning):
            return rates + (WITH_CONVOLUTIONS.get(beginning, ()) if convolutions else ())
    own = validate(RunConfig, read_recipe(recipe), recipe).optimizer.lr
    return tuple(float(f"{factor * own:.2g}") for factor in AROUND)


def _check(
    data: str | Path, recipe: str, rates: Sequence[float], seeds: int, overrides: Sequence[str]
) -> tuple[Collection[str], float]:
    """That the protocol can be kept; returns the splits of the data, and the share of images that tells rates apart."""
    if seeds < 1 or not all(0 < rate < math.inf for rate in rates):
        raise UserError("the protocol needs one seed or more, and learning rates above 0")
    given = parse_overrides(overrides)
    config = validate(RunConfig, merge(read_recipe(recipe), given), "settings")
    if config.kind != "train":
        raise UserError(f"recipe '{recipe}' does not fine-tune: see `vitrail recipes`")
    for section, key in (("optimizer", "lr"), ("data", "test"), ("train", "seed")):
        if key in given.get(section, {}):
            raise UserError(f"--set {section}.{key}: the protocol sets it itself (--rates, --seeds)")
    source = read_source(data, [], labelled=True)
    splits = set(source.splits)
    if source.multilabel:
        raise UserError(f"the images of {data} have any number of labels: the protocol is for exactly one")
    if not splits & {"test", "val"}:
        raise UserError(
            f"{data} has no test split, and no validation split to take for one: the protocol chooses on training "
            "images and looks at test images once; "
            "vitrail train holds images out by itself"
        )
    return splits, config.data.val_fraction or DataConfig().val_fraction  # of a recipe that watches none, too


def _tell(found: Transfer, data: str, weights: str, folder: Path, console: Console) -> None:
    facts = {"data": data_name(data), "weights": weights, **asdict(found)}
    facts |= {"mean": found.mean, "deviation": found.deviation}
    with atomic_write(folder / "transfer.json") as temporary:
        temporary.write_text(strict_json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    table = Table(box=box.SIMPLE, title=f"{escape(weights)} on {escape(data_name(data))}")
    if found.tried:
        for rate in found.tried:
            table.add_column(f"rate {rate:g}", justify="right")
    seeds = f"{len(found.test)} seed{'s' * (len(found.test) != 1)}"
    table.add_column(f"test, {seeds} at {found.rate:g}", justify="right", style="bold")
    table.add_row(*(f"{value:.1%}" for value in found.tried.values()), found.row)
    console.print(table)
    if found.seen_before:
        console.print(
            f"[yellow]the starting weights were trained on {found.seen_before:,} of the {found.tested:,} test images: "
            "the numbers are too good[/]"
        )
    if found.tried:
        console.print("[dim]learning rates were compared on a part of the training images that was left out[/]")
    console.print(f"written to [bold]{escape(str(folder / 'transfer.json'))}[/]")
