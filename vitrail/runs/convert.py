"""`vitrail convert`: weights from any layout into any other, checked against the networks of the libraries."""

from __future__ import annotations

import re
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
# What a converted folder may hold; a folder with anything else in it is not ours to replace.
WRITTEN = {"config.json", "model.safetensors", "preprocessor_config.json"}


def convert(
    source: str,
    target: str,
    to: LayoutName,
    *,
    image_size: str | None = None,
    allow_pickle: bool = False,
    adopt_constants: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> None:
    """Read, check against the source's library, write, check against the target's; on any failure nothing is left."""
    console = console or make_console()
    path = _free_place(source, target, to, overwrite)
    weights = read_weights(source, image_size=parse_size(image_size), pickle=allow_pickle)
    card, plan = weights.card, TARGETS[to]
    console.print(f"{weights.layout} weights: {describe(card)}")
    if weights.assumed:
        console.print(f"assumed: {escape(weights.assumed)}")
    changes = check_expressible(card, to, adopt_constants)
    pixels = torch.randn(2, card.model.channels, *card.model.image_size, generator=torch.Generator().manual_seed(0))
    _compare(console, weights.layout, weights.file, card, weights.state, pixels)
    if changes:
        console.print(f"constants of {plan.library}: {'; '.join(changes)}")
    try:
        with _staged(path, plan.folder) as place:
            plan.write(place, plan.adopted(card), weights.state)
            _check_written(console, place, to, weights, pixels)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write '{path}': {getattr(error, 'strerror', None) or error}") from None
    if left := _left_behind(card, to):
        console.print(f"left behind, for want of a place: {', '.join(left)}")
    console.print(f"wrote [bold]{escape(str(path))}[/]")


def parse_size(text: str | None) -> Size | None:
    """`224x320` as (height, width); `224` is a square."""
    if text is None:
        return None
    match = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", text)
    if not match:
        raise UserError(f"--image-size is HxW in pixels, such as 224x320, not '{text}'")
    return int(match[1]), int(match[2] or match[1])


def describe(card: Card) -> str:
    model = card.model
    size = "x".join(map(str, model.image_size))
    end = f"{model.num_classes:,} classes" if model.num_classes else "no classifier"
    return f"{_network(model)}, images of {size}, {end}"


def _network(model: NetworkConfig) -> str:
    if not isinstance(model, ModelConfig):
        return f"BiT ResNet, blocks {model.blocks}, {model.width} channels"
    stem = f" on a stem with blocks {model.stem.blocks}" if model.stem else ""
    patch = "x".join(map(str, model.patch))
    shape = f"width {model.width}, depth {model.depth}, {model.heads} heads, MLP {model.mlp_dim}, patches of {patch}"
    extras = [f"{model.registers} registers"] if model.registers else []
    extras += ["LayerScale"] if model.layer_scale is not None else []
    extras += [f"representation layer of {model.representation}"] if model.representation else []
    pooled = {"token": "class token", "gap": "mean of patches", "map": "attention pooling"}[model.pool]
    return ", ".join([f"Vision Transformer{stem}: {shape}", pooled, *extras])


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
    if not path.exists():
        return path
    if Path(source).exists() and path.samefile(source):
        raise UserError(f"'{target}' is what is converted: give another name")
    if path.is_dir() != folder or (folder and {entry.name for entry in path.iterdir()} - WRITTEN):
        raise UserError(f"'{target}' is there and holds something else: give another name")
    if not overwrite:
        raise UserError(f"'{target}' is there already: give another name, or --overwrite")
    return path


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
    _compare(console, to, place, written, state, pixels)
    if written.model != card.model:
        cost = _difference(ours(written, state), ours(card, state), pixels)[0]
        console.print(f"cost of these constants: outputs differ by up to {cost:.1e} from those before")
    if written.preprocess != card.preprocess:
        console.print("what other preprocessing changes, images alone can show: see vitrail evaluate")
    if to == "google":
        _check_identical(place, written, weights)
        console.print("read back: every tensor is the same, bit for bit")


def _compare(
    console: Console, layout: str, path: Path, card: Card, state: Mapping[str, Tensor], pixels: Tensor
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
        console.print(f"not compared with {library}: {escape(str(reason))}")
        return
    difference, largest = _difference(theirs, ours(card, state), pixels)
    console.print(f"{library}: outputs differ by at most {difference:.1e}, and are {largest:.1e} at most")
    if layout == "google" and to_timm.adopted(card).model != card.model:
        console.print("(timm has other constants than Google's code)")
    elif not difference <= TOLERANCE * largest:
        raise UserError(f"{library} and vitrail answer otherwise, by {difference:.1e}; nothing is written")


LIBRARIES = {"timm": "timm", "huggingface": "transformers", "google": "timm's reader of Google's files"}


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


def _left_behind(card: Card, to: LayoutName) -> list[str]:
    """What the card says that the target has no place for."""
    has = {
        "preprocessing": card.preprocess != google.preprocess_for(card.model),
        "class names": bool(card.classes),
        "the licence": bool(card.licence),
        "the record of training": bool(card.recipe or card.data or card.metrics),
    }
    background = [] if to == "vitrail" or set(card.preprocess.background) == {255} else ["the background colour"]
    return [thing for thing in TARGETS[to].drops if has[thing]] + background
