"""Reading weights of any supported layout from a file, a folder, the package or the Hub."""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitrail.config import Size
from vitrail.errors import UserError, did_you_mean, did_you_mean_path, error_reason, os_errors_as
from vitrail.weights.bundle import METADATA_KEY, Card, read_bundle
from vitrail.weights.formats import formats
from vitrail.weights.hub import download
from vitrail.weights.names import BUNDLED, HUB_PREFIX, bundled_file, local_path
from vitrail.weights.pickles import pickle_source
from vitrail.weights.safetensors_file import check_regular_file, read_header
from vitrail.weights.tensors import TensorSource, npz_source, read_json, safetensors_source

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Weights:
    """A state dict for the network that `card.model` describes."""

    card: Card
    state: dict[str, Tensor]
    origin: str  # what weights trained from these cite as their source
    layout: str  # vitrail, timm, huggingface or google
    file: Path  # weights file, or the index of a sharded one
    assumed: str  # settings that the file does not store, so that defaults were used
    tensors: TensorSource | None = None  # of another library's file, under their original names

    def __post_init__(self) -> None:
        """Raise UserError for NaN/Inf weights."""
        for name, tensor in self.state.items():
            # The sum is ten times faster to test; it can overflow to inf, so then every number is tested.
            if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
                what = "NaN" if torch.isnan(tensor).any() else "infinite values"
                raise UserError(f"'{self.file}': tensor '{name}' contains {what}; use an earlier checkpoint")


def read_weights(spec: str | Path, *, image_size: Size | None = None, pickle: bool = False) -> Weights:
    """Read weights; the layout is detected from the contents.

    Parameters
    ----------
    spec
        A file or folder, `bundled` or `hf-hub:owner/name[@revision]`.
    image_size
        (height, width), for files that do not store it.
    pickle
        Also read files of torch.save, with weights_only=True.
    """
    local, name = local_path(spec), str(spec)
    if local is not None:
        path = _existing(name, local)
        source = "/".join(path.absolute().parts[-2:])  # recognizable, without the paths of this machine
    elif name == BUNDLED:
        path = bundled_file()
        source = f"{BUNDLED} {path.stem}"
    else:
        path = download(name, PICKLES if pickle else ())
        commit = re.fullmatch(r"[0-9a-f]{40}", path.name)  # the Hub's cache names folders by commit
        source = f"{name.partition('@')[0]}@{path.name}" if commit else name
    file = _weights_file(path, pickle) if path.is_dir() else path
    kind, where = _file_type(file), f"'{file}'"
    if kind == "pickle" and not pickle:
        raise _pickle_error(file)
    if kind == "npz":
        tensors = npz_source(file, where)
    elif kind == "pickle":
        tensors = pickle_source(file, where)
    else:
        shards = _shards(file)
        for shard in shards:
            if METADATA_KEY in read_header(shard).metadata:
                return _bundle(shard, image_size, source)
        tensors = safetensors_source(shards, where)
    return _foreign(tensors, file, image_size, source)


def _foreign(tensors: TensorSource, file: Path, image_size: Size | None, source: str) -> Weights:
    """Read weights in the layout of another library."""
    for layout, form in formats().items():
        if form.read and form.matches(tensors):
            weights = form.read(tensors, image_size)
            assumed = "; ".join(filter(None, (tensors.note, weights.assumed)))
            card = weights.card.model_copy(update={"source": f"{source} ({assumed})" if assumed else source})
            return Weights(card, weights.state, card.source, layout, file, assumed, tensors)
    for form in formats().values():
        form.check_supported(tensors)
    *others, last = [form.owner for form in formats().values() if form.read]
    raise UserError(f"'{file}' has no known layout: its tensor names are not vitrail's, {', '.join(others)} or {last}")


def _bundle(path: Path, image_size: Size | None, source: str) -> Weights:
    card, state = read_bundle(path)
    size = card.model.image_size
    if image_size and image_size != size:
        raise UserError(
            f"'{path}' is for {size[0]}x{size[1]} images, not {image_size[0]}x{image_size[1]}; remove --image-size"
        )
    origin = f"{source}, itself from {card.source}" if card.source else source
    return Weights(card, state, origin, "vitrail", path, "")


def _existing(spec: str, path: Path) -> Path:
    with os_errors_as(f"no weights at '{spec}'"):  # such as a path that is too long
        if spec and path.exists():
            return path
    hint = did_you_mean_path(path) or did_you_mean(spec, [BUNDLED])
    if not hint and re.fullmatch(r"[\w.-]+/[\w.-]+", spec):
        hint = f"; for a model of the Hugging Face Hub write '{HUB_PREFIX}{spec}'"
    raise UserError(f"no weights at '{spec}'{hint}")


def _weights_file(folder: Path, pickle: bool) -> Path:
    """The weights file of a folder: model.safetensors, its index of shards, or the only weights file."""
    for name in ("model.safetensors", INDEX):
        if (folder / name).is_file():
            return folder / name
    files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".npz"))
    pickles = sorted(file for file in folder.iterdir() if file.suffix in PICKLES)
    files = files or (pickles if pickle else [])
    if len(files) == 1:
        return files[0]
    if files:
        raise UserError(
            f"'{folder}' has {len(files)} weights files and no model.safetensors; pass one, such as '{files[0]}'"
        )
    if pickles:
        raise _pickle_error(pickles[0])
    raise UserError(f"'{folder}' has no weights file (model.safetensors, another .safetensors, or .npz)")


def _shards(index: Path) -> list[Path]:
    """The files with the tensors: the file itself, or those that an index of shards names."""
    if index.suffix != ".json":
        return [index]
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(name and Path(str(name)).name == name for name in names.values()):
        raise UserError(
            f"'{index}' is not an index of safetensors shards: 'weight_map' must map tensors to files of its folder"
        )
    return [index.with_name(name) for name in sorted(set(names.values()))]


def _file_type(file: Path) -> str:
    """npz, pickle or safetensors, by the contents. Files of torch.save are zip archives too."""
    try:
        check_regular_file(file)
        with open(file, "rb") as stream:
            start = stream.read(9)
        if start.startswith(b"PK\x03\x04"):
            with zipfile.ZipFile(file) as archive:
                names = archive.namelist()
            if any(name.endswith(".npy") for name in names):
                return "npz"
            if any(name.endswith("data.pkl") for name in names):
                return "pickle"
            raise UserError(
                f"'{file}' is a zip archive without weights: it was written neither by numpy.savez nor by torch.save"
            )
    except OSError as error:
        raise UserError(f"cannot read '{file}': {error_reason(error)}") from None
    except zipfile.BadZipFile:
        raise UserError(f"'{file}' is a damaged or truncated zip archive; get the file again") from None
    # safetensors: eight bytes of length, then JSON
    return "pickle" if start.startswith(b"\x80") and not start.endswith(b"{") else "safetensors"


def _pickle_error(file: Path) -> UserError:
    return UserError(
        f"'{file}' is a pickle, which can run code when opened. If you trust its source, convert it with "
        "vitrail convert SRC DST --to vitrail --allow-pickle"
    )
