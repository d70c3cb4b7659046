"""Any weights, from a file, a folder, the package or the Hub, as one thing: a card and a state in our names."""

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
    """Weights ready for a network built from `card.model`."""

    card: Card
    state: dict[str, Tensor]
    origin: str  # where they were read, and where those came from: what weights made from them cite
    layout: str  # vitrail, timm, huggingface or google
    file: Path  # what holds the tensors, or the index of the files that do
    assumed: str  # what the file does not say and the reader had to take for granted
    tensors: TensorSource | None = None  # a foreign file's own, under the names they have there

    def __post_init__(self) -> None:
        """Whatever they are read from, every weight is a number: a network with NaN answers anything."""
        for name, tensor in self.state.items():
            # A sum takes a tenth of the time of a look at each number; large ones can be infinite together.
            if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
                what = "NaN" if torch.isnan(tensor).any() else "infinite numbers"
                raise UserError(f"'{self.file}': tensor '{name}' holds {what}: the network cannot answer")


def read_weights(spec: str | Path, *, image_size: Size | None = None, pickle: bool = False) -> Weights:
    """Weights from a path, `bundled` or `hf-hub:owner/name[@revision]`; the layout is told by the contents.

    `image_size` is for files that do not say theirs. With `pickle`, files of torch.save are opened too, in a way that
    lets them hold nothing but tensors.
    """
    local, name = local_path(spec), str(spec)
    if local is not None:
        path = _existing(name, local)
        source = "/".join(path.absolute().parts[-2:])  # enough to recognise it; a whole path tells about the machine
    elif name == BUNDLED:
        path = bundled_file()
        source = f"{BUNDLED} {path.stem}"
    else:
        path = download(name, PICKLES if pickle else ())
        commit = re.fullmatch(r"[0-9a-f]{40}", path.name)  # the Hub's cache names a folder by its commit
        source = f"{name.partition('@')[0]}@{path.name}" if commit else name
    file = _weights_file(path, pickle) if path.is_dir() else path
    kind, where = _kind(file), f"'{file}'"
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
    """Weights in the layout of another library."""
    for layout, form in formats().items():
        if form.read and form.matches(tensors):
            found = form.read(tensors, image_size)
            assumed = "; ".join(filter(None, (tensors.note, found.assumed)))
            card = found.card.model_copy(update={"source": f"{source} ({assumed})" if assumed else source})
            return Weights(card, found.state, card.source, layout, file, assumed, tensors)
    for form in formats().values():
        form.check_supported(tensors)
    *others, last = [form.owner for form in formats().values() if form.read]
    raise UserError(f"'{file}' holds no network that vitrail can read: not its own, {', '.join(others)} or {last}")


def _bundle(path: Path, image_size: Size | None, source: str) -> Weights:
    card, state = read_bundle(path)
    told = card.model.image_size
    if image_size and image_size != told:
        raise UserError(f"'{path}' is for {told[0]}x{told[1]} images, not {image_size[0]}x{image_size[1]}")
    origin = f"{source}, itself from {card.source}" if card.source else source
    return Weights(card, state, origin, "vitrail", path, "")


def _existing(spec: str, path: Path) -> Path:
    with os_errors_as(f"no weights at '{spec}'"):  # such as a name that is too long
        if spec and path.exists():
            return path
    hint = did_you_mean_path(path) or did_you_mean(spec, [BUNDLED])
    if not hint and re.fullmatch(r"[\w.-]+/[\w.-]+", spec):
        hint = f"; for a model of the Hugging Face Hub write '{HUB_PREFIX}{spec}'"
    raise UserError(f"no weights at '{spec}'{hint}")


def _weights_file(folder: Path, pickle: bool) -> Path:
    """The file that holds a folder's weights: ours, the Hub's usual name, an index of shards, or the only one."""
    for name in ("model.safetensors", INDEX):
        if (folder / name).is_file():
            return folder / name
    files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".npz"))
    pickles = sorted(file for file in folder.iterdir() if file.suffix in PICKLES)
    files = files or (pickles if pickle else [])
    if len(files) == 1:
        return files[0]
    if files:
        raise UserError(f"'{folder}' has {len(files)} weights files and no model.safetensors: name one of them")
    if pickles:
        raise _pickle_error(pickles[0])
    raise UserError(f"'{folder}' has no weights: no model.safetensors, no other .safetensors, no .npz")


def _shards(index: Path) -> list[Path]:
    """The files that hold the tensors: the file itself, or those an index names in its own folder."""
    if index.suffix != ".json":
        return [index]
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(name and Path(str(name)).name == name for name in names.values()):
        raise UserError(f"'{index}' is not an index of safetensors files")
    return [index.with_name(name) for name in sorted(set(names.values()))]


def _kind(file: Path) -> str:
    """npz, pickle or safetensors, by the contents. torch puts a pickle in an archive, too."""
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
            raise UserError(f"'{file}' is an archive without weights: neither of numpy's arrays nor of torch.save")
    except OSError as error:
        raise UserError(f"cannot read '{file}': {error_reason(error)}") from None
    except zipfile.BadZipFile:
        raise UserError(f"'{file}' is an archive that was cut short or damaged") from None
    # safetensors: eight bytes of length, then JSON
    return "pickle" if start.startswith(b"\x80") and not start.endswith(b"{") else "safetensors"


def _pickle_error(file: Path) -> UserError:
    return UserError(
        f"'{file}' is a pickle, which can run any code when opened: if you trust it, turn it into a safe file with "
        "vitrail convert SRC DST --to vitrail --allow-pickle"
    )
