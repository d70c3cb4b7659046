"""Fine-tuning by the protocol of the paper, from runs of `vitrail train`.

Learning rates are compared on a part of the training images that is held out. With the best one, the network is trained
on all training images with several seeds, and each of these runs is measured on the test images once.
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

# The learning rates of the paper's Table 4, by the prefix of the recipe's name; and what its text adds for ResNets and
# hybrids on ImageNet.
RATES = {
    "paper-finetune-imagenet": (0.003, 0.01, 0.03),
    "paper-finetune-vtab": (0.01,),
    "paper-finetune": (0.001, 0.003, 0.01, 0.03),
}
WITH_CONVOLUTIONS = {"paper-finetune-imagenet": (0.06,)}
AROUND = (1 / 3, 1.0, 3.0)  # for other recipes: factors of their own rate


@dataclass(frozen=True)
class Transfer:
    """The result of the protocol; accuracies are fractions."""

    tried: dict[float, float]  # learning rate: accuracy on the held-out part of the training images
    rate: float  # the best learning rate
    test: list[float]  # accuracy of each seed on the test images
    tested: int  # number of test images
    seen_before: int = 0  # test images that the starting weights are known to have been trained on

    @property
    def mean(self) -> float:
        return statistics.fmean(self.test)

    @property
    def deviation(self) -> float | None:
        """The standard deviation over the seeds; None for one seed."""
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
    """Fine-tune by the paper's protocol. Each run has a folder in `out`. A repeated call uses the finished runs
    and resumes a stopped one."""
    folder = user_path(out) if out is not None else Path("runs") / f"{data_name(str(data))}-transfer"
    with process_group() as ranks:
        ranks.broadcast(lambda: refuse_foreign_files([(folder / "transfer.json", "")], "choose another --out"))
        console.quiet = console.quiet or not ranks.is_first
        chosen = tuple(rates) or ranks.broadcast(
            lambda: default_rates(recipe, read_weights(weights_spec(from_)).card.model)
        )
        splits, val_fraction = ranks.broadcast(lambda: _check(data, recipe, chosen, seeds, overrides))
        fixed = [] if "test" in splits else ["data.val_as_test=true"]
        if fixed:
            console.print("no test split: the validation split is used as test split, measured once")
        elif "val" in splits:
            console.print("the validation split is used to compare learning rates, then for training")
        made: list[tuple[str, str]] = []  # runs, and the fingerprints of their images

        def run_metrics(name: str, *settings: str) -> dict[str, Any]:
            settings = (*fixed, *settings)
            fixed_keys = {setting.partition("=")[0] for setting in settings}
            others = [setting for setting in overrides if setting.partition("=")[0] not in fixed_keys]
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
                if not stopped.advice or "resume with" in stopped.advice:  # otherwise the advice states what was lost
                    saved = " and saved" if stopped.advice else ""
                    stopped.advice = f"{saved}; resume with the same command"
                raise
            card = ranks.broadcast(lambda: read_card(result.weights))
            made.append((name, card.data["fingerprint"]))
            if made[0][1] != made[-1][1]:
                raise UserError(
                    f"{folder / made[0][0]} and {name} were trained on different images, because {data} changed "
                    "between them: choose another --out"
                )
            return card.metrics

        result = _protocol(run_metrics, chosen, seeds, val_fraction)
        ranks.broadcast(lambda: _write_result(result, str(data), str(from_), folder, console))
    return result


def _protocol(
    run_metrics: Callable[..., dict[str, Any]], rates: Sequence[float], seeds: int, val_fraction: float
) -> Transfer:
    """`run_metrics`: trains a run of a name with settings; `val_fraction`: of the images, to compare learning rates."""
    tried = {}
    if len(rates) > 1:
        for rate in rates:
            how = (f"optimizer.lr={rate:g}", "data.use_test=false", f"data.val_fraction={val_fraction:g}")
            tried[rate] = run_metrics(f"rate-{rate:g}", *how)
    # Of rates with equal accuracy, the one with the lower negative log-likelihood.
    best = max(tried, key=lambda rate: (tried[rate]["top1"], -tried[rate]["nll"])) if tried else rates[0]
    last = (f"optimizer.lr={best:g}", "data.val_fraction=0")
    tests = [run_metrics(f"seed-{seed}", *last, f"train.seed={seed}") for seed in range(seeds)]
    return Transfer(
        {rate: float(metrics["top1"]) for rate, metrics in tried.items()},
        best,
        [float(metrics["top1"]) for metrics in tests],
        int(tests[0]["n"]),
        int(tests[0].get("seen_before", 0)),
    )


def default_rates(recipe: str, network: NetworkConfig) -> tuple[float, ...]:
    """The learning rates to compare if --rates is not given."""
    name = recipe
    if recipe.endswith(".toml"):  # a recipe file
        values = read_recipe_file(recipe)
        name = "" if "lr" in values.get("optimizer", {}) else str(values.get("base", ""))
    convolutions = isinstance(network, ResNetConfig) or network.stem is not None
    for prefix, rates in RATES.items():
        if name.startswith(prefix):
            return rates + (WITH_CONVOLUTIONS.get(prefix, ()) if convolutions else ())
    rate = validate(RunConfig, read_recipe(recipe), recipe).optimizer.lr
    return tuple(float(f"{factor * rate:.2g}") for factor in AROUND)


def _check(
    data: str | Path, recipe: str, rates: Sequence[float], seeds: int, overrides: Sequence[str]
) -> tuple[Collection[str], float]:
    """Raise UserError if the protocol cannot be followed. Returns the splits of the data, and the fraction of images
    that learning rates are compared on."""
    if seeds < 1 or not all(0 < rate < math.inf for rate in rates):
        raise UserError("the protocol needs at least one seed (--seeds) and learning rates above 0 (--rates)")
    settings = parse_overrides(overrides)
    config = validate(RunConfig, merge(read_recipe(recipe), settings), "settings")
    if config.kind != "train":
        raise UserError(f"recipe '{recipe}' does not fine-tune: see `vitrail recipes`")
    for section, key in (("optimizer", "lr"), ("data", "use_test"), ("train", "seed")):
        if key in settings.get(section, {}):
            raise UserError(f"--set {section}.{key} has no effect: the protocol sets it (see --rates and --seeds)")
    source = read_source(data, [], labelled=True)
    splits = set(source.splits)
    if source.multilabel:
        raise UserError(f"the images of {data} are multilabel: the protocol needs exactly one label per image")
    if not splits & {"test", "val"}:
        raise UserError(
            f"{data} has no test or validation split, and the protocol needs test images: use vitrail train, which "
            "holds out images by itself"
        )
    return splits, config.data.val_fraction or DataConfig().val_fraction  # also for a recipe without a validation split


def _write_result(result: Transfer, data: str, weights: str, folder: Path, console: Console) -> None:
    facts = {"data": data_name(data), "weights": weights, **asdict(result)}
    facts |= {"mean": result.mean, "deviation": result.deviation}
    with atomic_write(folder / "transfer.json") as temporary:
        temporary.write_text(strict_json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    table = Table(box=box.SIMPLE, title=f"{escape(weights)} on {escape(data_name(data))}")
    if result.tried:
        for rate in result.tried:
            table.add_column(f"rate {rate:g}", justify="right")
    seeds = f"{len(result.test)} seed{'s' * (len(result.test) != 1)}"
    table.add_column(f"test, {seeds} at {result.rate:g}", justify="right", style="bold")
    table.add_row(*(f"{value:.1%}" for value in result.tried.values()), result.row)
    console.print(table)
    if result.seen_before:
        console.print(
            f"[yellow]the starting weights were trained on {result.seen_before:,} of the {result.tested:,} test "
            "images: the scores are too high[/]"
        )
    if result.tried:
        console.print("[dim]learning rates were compared on a held-out part of the training images[/]")
    console.print(f"result: [bold]{escape(str(folder / 'transfer.json'))}[/]")
