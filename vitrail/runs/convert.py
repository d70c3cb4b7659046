"""`vitrail convert`: weights from any layout into any other, checked against the networks of the libraries."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from safetensors import SafetensorError
from torch import Tensor

from vitrail.atomic import whole_file
from vitrail.config import ModelConfig, NetworkConfig, Size
from vitrail.errors import UserError
from vitrail.runs.show import make_console
from vitrail.weights import google, to_google, to_timm
from vitrail.weights.bundle import Card
from vitrail.weights.peers import NoPeer, Run, Unloadable, ours, timm_folder, timm_npz, transformers_folder
from vitrail.weights.read import Weights, read_tensors, read_weights
from vitrail.weights.write import TARGETS, LayoutName, check_expressible

TOLERANCE = 1e-4  # of the largest logit
COMPARED_AT = 224  # pixels a side, the most that a ResNet is compared at: its weights fit any size
OWNERS = {"vitrail": "vitrail's", "timm": "timm's", "huggingface": "transformers'", "google": "Google's"}
# What a converted folder may hold; a folder with anything else in it is not ours to replace.
WRITTEN = {"config.json", "model.safetensors", "preprocessor_config.json"}


def convert(
    source: str,
    target: str,
    to: LayoutName,
    *,
    image_size: Size | None = None,
    allow_pickle: bool = False,
    adopt_constants: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> None:
    """Read, check against the source's library, write, check against the target's; on any failure nothing is left."""
    console = console or make_console()
    path = _free_place(source, target, to, overwrite)
    weights = read_weights(source, image_size=image_size, pickle=allow_pickle)
    card, plan = weights.card, TARGETS[to]
    console.print(f"read {escape(source)}: weights in {OWNERS[weights.layout]} layout")
    for line in describe(card):
        console.print(line)
    if weights.assumed:
        console.print(f"assumed: {escape(weights.assumed)}")
    changes = check_expressible(card, to, adopt_constants)
    pixels = _pixels(card.model)
    _compare(console, "as read", weights.layout, weights.file, card, weights.state, pixels)
    for change in changes:
        console.print(f"changed to what {plan.library} fixes: {change}")
    try:
        with _staged(path, plan.folder) as place:
            plan.write(place, plan.adopted(card), weights.state)
            _check_written(console, place, to, weights, pixels)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write '{path}': {getattr(error, 'strerror', None) or error}") from None
    if left := _left_out(card, to):
        console.print(f"left out, since {OWNERS[to]} layout has no place for it: {', '.join(left)}")
    console.print(f"wrote [bold]{escape(str(path))}[/]")


def describe(card: Card) -> list[str]:
    """The network, its images and its classes, a line for each."""
    model = card.model
    names = "" if card.classes else ", without names"
    return [
        f"network: {_network(model)}",
        f"images: {'x'.join(map(str, model.image_size))} pixels, {model.channels} channels",
        f"classes: {model.num_classes:,}{names}" if model.num_classes else "classes: none, it gives features",
    ]


POSITIONS = {
    "none": "no positions",
    "2d": "positions by row and column",
    "sincos": "fixed positions",
    "relative": "relative positions",
}


def _network(model: NetworkConfig) -> str:
    if not isinstance(model, ModelConfig):
        return f"BiT ResNet, blocks {model.blocks}, {model.width} channels at the root"
    patch = "x".join(map(str, model.patch))
    facts = [
        f"width {model.width}, depth {model.depth}, {model.heads} heads, MLP {model.mlp_dim}, patches of {patch}",
        "attention along rows and columns" if model.axial else "",
        POSITIONS.get(model.positions, ""),
        {"layers": "positions at every layer", "shared": "the same positions at every layer"}.get(model.positions_at),
        {"token": "class token", "gap": "mean of patches", "map": "attention pooling"}[model.pool],
        f"{model.registers} registers" if model.registers else "",
        "LayerScale" if model.layer_scale is not None else "",
        f"representation layer of {model.representation}" if model.representation else "",
    ]
    stem = f" on a stem with blocks {model.stem.blocks}" if model.stem else ""
    return ", ".join([f"Vision Transformer{stem}", *filter(None, facts)])


def _pixels(model: NetworkConfig) -> Tensor:
    """Two random images to compare networks on."""
    height, width = model.image_size
    if not isinstance(model, ModelConfig):
        height, width = min(height, COMPARED_AT), min(width, COMPARED_AT)
    return torch.randn(2, model.channels, height, width, generator=torch.Generator().manual_seed(0))


def _free_place(source: str, target: str, to: LayoutName, overwrite: bool) -> Path:
    """Where to write, once nothing stands there that should stay."""
    path, folder = Path(target).expanduser(), TARGETS[to].folder
    suffix = {"vitrail": ".safetensors", "google": ".npz"}.get(to, "")
    if not folder and path.suffix != suffix:
        raise UserError(f"--to {to} writes one file: give it a name that ends in {suffix}, not '{target}'")
    if folder and path.suffix in (".safetensors", ".npz", ".bin", ".pth", ".pt"):
        raise UserError(f"--to {to} writes a folder: give the name of one, not '{target}'")
    if not path.absolute().parent.is_dir():
        raise UserError(f"'{path.absolute().parent}' is not a folder: make it first")
    _check_apart(Path(source).expanduser(), path, target)
    if not path.exists():
        return path
    if path.is_dir() != folder or (folder and {entry.name for entry in path.iterdir()} - WRITTEN):
        raise UserError(f"'{target}' is there and holds something else: give another name")
    if not overwrite:
        raise UserError(f"'{target}' is there already: give another name, or --overwrite")
    return path


def _check_apart(source: Path, path: Path, target: str) -> None:
    """What is converted must stay as it is: the target is neither it, nor in it, nor around it."""
    if not source.exists():
        return  # which reading will say
    old, new = (Path(os.path.realpath(place)) for place in (source, path))  # which bears links that go in a circle
    if old == new or new in old.parents:
        raise UserError(f"'{target}' {'is' if old == new else 'holds'} what is converted: give another name")
    if old in new.parents:
        raise UserError(f"'{target}' is inside the folder that is converted: give a place outside it")


@contextmanager
def _staged(path: Path, folder: bool) -> Iterator[Path]:
    """Where to write for now; what is there when the block ends well takes the place of `path`, and else vanishes."""
    if not folder:
        with whole_file(path) as temporary:
            yield temporary
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    old = temporary.with_suffix(".old")
    try:
        temporary.mkdir()
        yield temporary
        if path.exists():
            path.replace(old)
        temporary.replace(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.replace(path)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _check_written(console: Console, place: Path, to: LayoutName, weights: Weights, pixels: Tensor) -> None:
    """What was written, against the target's library and against what it was made from."""
    card, state = weights.card, weights.state
    written = TARGETS[to].adopted(card)
    _compare(console, "as written", to, place, written, state, pixels)
    if written.model != card.model:
        cost = _difference(ours(written, state), ours(card, state), pixels)[0]
        console.print(f"cost of the changed constants: outputs differ by up to {cost:.1e} from before")
    if written.preprocess != card.preprocess:
        console.print("cost of the changed preprocessing: images alone can show it, see vitrail evaluate")
    if to == "google":
        _check_identical(place, written, weights)
        console.print("read back: every tensor is the same, bit for bit")


def _compare(
    console: Console, when: str, layout: str, path: Path, card: Card, state: Mapping[str, Tensor], pixels: Tensor
) -> None:
    """Our network beside that of the library whose layout this is, from a file that was read or a folder that was
    written; where both can run, they must agree."""
    library = LIBRARIES.get(layout)
    if library is None:
        return
    try:
        theirs = _peer(layout, path, card)
    except NoPeer as reason:
        if isinstance(reason, Unloadable) and path.is_dir():
            raise UserError(f"{reason}; nothing is written") from None
        console.print(f"{when}: not compared with {library}: {escape(str(reason))}")
        return
    difference, largest = _difference(theirs, ours(card, state), pixels)
    if layout == "google" and to_timm.adopted(card).model != card.model:
        words = "has other constants than Google's code, and differs by"
    elif difference <= TOLERANCE * largest:
        words = "gives the same outputs, within"
    else:
        raise UserError(f"{library} and vitrail answer otherwise, by {difference:.1e}; nothing is written")
    console.print(f"{when}: {library} {words} {difference:.1e} (the largest output is {largest:.2g})")


LIBRARIES = {"timm": "timm", "huggingface": "transformers", "google": "timm (reading Google's file)"}


def _peer(layout: str, path: Path, card: Card) -> Run:
    if layout == "google":
        return timm_npz(path, card)
    folder = path if path.is_dir() else path.parent
    if layout == "huggingface":
        return transformers_folder(folder, card)
    return timm_folder(folder, None if path.is_dir() else read_tensors(path))


@torch.inference_mode()
def _difference(one: Run, other: Run, pixels: Tensor) -> tuple[float, float]:
    """The largest difference of two networks' outputs, and the largest output."""
    first, second = one(pixels), other(pixels)
    return (first - second).abs().max().item(), second.abs().max().item()


def _check_identical(place: Path, card: Card, weights: Weights) -> None:
    """A file of Google's, read back: the same tensors, bit for bit, in the form that its layout has them."""
    read = read_weights(str(place), image_size=card.model.image_size)
    expected = to_google.expressed(card.model, weights.state)[1]
    same = read.state.keys() == expected.keys()
    if not same or not all(torch.equal(tensor, expected[name]) for name, tensor in read.state.items()):
        raise UserError("what was written does not read back the same; nothing is written")


def _left_out(card: Card, to: LayoutName) -> list[str]:
    """What the card says that the target has no place for."""
    has = {
        "preprocessing": card.preprocess != google.preprocess_for(card.model),
        "class names": bool(card.classes),
        "the licence": bool(card.licence),
        "the record of training": bool(card.recipe or card.data or card.metrics),
    }
    background = [] if to == "vitrail" or set(card.preprocess.background) == {255} else ["the background colour"]
    return [thing for thing in TARGETS[to].drops if has[thing]] + background
