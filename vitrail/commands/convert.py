"""`vitrail convert`: weights from any layout into any other, checked against the networks of the libraries."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor

from vitrail.config import ModelConfig, NetworkConfig, Size
from vitrail.errors import UserError, reason_of
from vitrail.interrupt import Interrupted, taken_signals
from vitrail.terminal import escape, make_console
from vitrail.weights import google, to_google, to_timm
from vitrail.weights.bundle import TRAINED_ON, Answering, Card, digest_tensor, read_bundle, read_trained_on
from vitrail.weights.output_path import free_place, staged
from vitrail.weights.read import Weights, read_tensors, read_weights
from vitrail.weights.reference_models import NoPeer, Run, Unloadable, ours, timm_folder, timm_npz, transformers_folder
from vitrail.weights.write import RECORD, TARGETS, LayoutName, check_expressible

TOLERANCE = 1e-4  # of the largest logit
COMPARED_AT = 224  # pixels a side, the most that a ResNet is compared at: its weights fit any size
OWNERS = {"vitrail": "vitrail's", "timm": "timm's", "huggingface": "transformers'", "google": "Google's"}
MOST_TOKENS, MOST_PIXELS = 4096, 1024 * 1024  # of an image that networks are compared on


def convert(
    source: str,
    target: str,
    to: LayoutName,
    *,
    image_size: Size | None = None,
    allow_pickle: bool = False,
    adopt_constants: bool = False,
    half: bool = False,
    licence: str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> None:
    """Read, check against the source's library, write, check against the target's; on any failure nothing is left.

    With `half`, numbers are stored in float16; `licence` replaces what the card says of it.
    """
    console = console or make_console()
    if half and to != "vitrail":
        raise UserError("--half is for --to vitrail, whose files are read in float32 again")
    path = free_place(source, target, to, overwrite)
    weights = read_weights(source, image_size=image_size, pickle=allow_pickle)
    if licence is not None:
        weights = replace(weights, card=weights.card.model_copy(update={"licence": licence}))
    card, plan = weights.card, TARGETS[to]
    console.print(f"read {escape(source)}: weights in {OWNERS[weights.layout]} layout")
    for line in describe(card):
        console.print(escape(line))
    if weights.assumed:
        console.print(f"assumed: {escape(weights.assumed)}")
    changes = check_expressible(card, to, adopt_constants)
    pixels = _pixels(card.model)
    _compare(console, "as read", weights.layout, weights.file, card, weights.state, pixels)
    for change in changes:
        console.print(f"changed to what {plan.library} fixes: {escape(change)}")
    if to == "huggingface" and card.preprocess.resize == "short_side":
        console.print("changed to what transformers fixes: its crop can lie one pixel beside ours")
    try:
        with _terminable(), staged(path, plan.folder) as place:
            state = _halved(weights.state, source) if half else weights.state
            plan.write(place, plan.adopted(card), {**state, **(_digests(weights) if to == "vitrail" else {})})
            _check_written(console, place, to, weights, pixels)
            if half and pixels is not None:
                _tell_rounding(console, place, weights, pixels)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write '{path}': {reason_of(error)}") from None
    if left := _left_out(card, to):
        console.print(f"left out, since {OWNERS[to]} layout has no place for it: {escape(', '.join(left))}")
    console.print(f"wrote [bold]{escape(str(path))}[/]")


class _Terminated(BaseException):
    """No Exception: those that libraries raise while they load weights are taken for their verdict on the weights."""

    def __init__(self, number: int):
        self.number = number


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM and a closed terminal as an exception, so that what is half written is removed."""

    def stop(number: int, _: FrameType | None) -> None:
        raise _Terminated(number)

    if threading.current_thread() is not threading.main_thread():  # Python allows handlers nowhere else
        yield
        return
    before: dict[int, Any] = {one: signal.signal(one, stop) for one in taken_signals() if one != signal.SIGINT}
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # an exception, too, even while a library is imported
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except _Terminated as ended:
        raise Interrupted(ended.number) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _digests(weights: Weights) -> dict[str, Tensor]:
    """The tensor by which `evaluate` recognises training images, of files that have one."""
    if weights.layout != "vitrail":
        return {}
    known = read_trained_on(weights.file)
    return {TRAINED_ON: digest_tensor(known)} if len(known) else {}


def _halved(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    found = {name: tensor.half() for name, tensor in state.items()}
    for name, tensor in found.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"'{source}': tensor '{name}' has numbers too large for half precision: leave out --half")
    return found


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


def _pixels(model: NetworkConfig) -> Tensor | None:
    """Two random images to compare networks on; none where that would take long."""
    height, width = model.image_size
    if not isinstance(model, ModelConfig):
        height, width = min(height, COMPARED_AT), min(width, COMPARED_AT)
    elif model.sequence > MOST_TOKENS or height * width > MOST_PIXELS:
        return None
    return torch.randn(2, model.channels, height, width, generator=torch.Generator().manual_seed(0))


def _check_written(console: Console, place: Path, to: LayoutName, weights: Weights, pixels: Tensor | None) -> None:
    """What was written, against the target's library and against what it was made from."""
    card, state = weights.card, weights.state
    written = TARGETS[to].adopted(card)
    _compare(console, "as written", to, place, written, state, pixels)
    if written.model != card.model and pixels is not None:
        cost = _difference(ours(written, state), ours(card, state), pixels)[0]
        console.print(f"cost of the changed constants: outputs differ by up to {cost:.1e} from before")
    if written.preprocess != card.preprocess:
        console.print("cost of the changed preprocessing: images alone can show it, see vitrail evaluate")
    if to == "google":
        _check_identical(place, written, weights)
        console.print("read back: every tensor is the same, bit for bit")


def _tell_rounding(console: Console, place: Path, weights: Weights, pixels: Tensor) -> None:
    """What half precision changes, from what was written."""
    cost, largest = _difference(ours(*read_bundle(place)), ours(weights.card, weights.state), pixels)
    console.print(f"cost of half precision: outputs differ by up to {cost:.1e} (the largest output is {largest:.2g})")


def _compare(
    console: Console, when: str, layout: str, path: Path, card: Card, state: Mapping[str, Tensor], pixels: Tensor | None
) -> None:
    """Our network beside that of the library whose layout this is, from a file that was read or a folder that was
    written; where both can run, they must agree."""
    library = LIBRARIES.get(layout)
    if library is None:
        return
    try:
        if pixels is None:
            raise NoPeer("images of this size would take long here")
        difference, largest = _difference(_peer(layout, path, card), ours(card, state), pixels)
    except NoPeer as reason:
        if isinstance(reason, Unloadable) and layout != "google":  # whose files timm is not at home with
            raise UserError(f"{reason}; nothing is written") from None
        console.print(f"{when}: not compared with {library}: {escape(str(reason))}")
        return
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
    folder, tensors = (path, None) if path.is_dir() else (path.parent, read_tensors(path))
    if layout == "huggingface":
        return transformers_folder(folder, card, tensors)
    return timm_folder(folder, tensors, None if tensors is None else card.model)


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
        RECORD: bool(card.recipe or card.data or card.metrics),
    }
    model, foreign = card.model, to != "vitrail"
    dropped = isinstance(model, ModelConfig) and (model.dropout or model.drop_path)
    others = {
        "the temperature and thresholds of its answers": foreign and card.answering != Answering(),
        "the background colour": foreign and set(card.preprocess.background) != {255},
        "dropout and drop_path, which matter to training alone": foreign and dropped,
        "the image size (give it with --image-size when reading)": to == "google" and _not_told(model),
    }
    return [thing for thing in TARGETS[to].drops if has[thing]] + [thing for thing, there in others.items() if there]


def _not_told(model: NetworkConfig) -> bool:
    """Whether the size is another than one would read off the weights alone."""
    return model.image_size[0] != model.image_size[1] if isinstance(model, ModelConfig) else True
