"""Any weights, from a file, a folder or the Hugging Face Hub, as one thing: a card and a state in our names."""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.config import Size
from vitrail.errors import UserError, did_you_mean
from vitrail.weights import google, huggingface, timm
from vitrail.weights.bundle import KEY, Card, created_with, read_bundle, read_header
from vitrail.weights.foreign import Foreign, read_json, shards

HUB = "hf-hub:"
HUB_FILES = ["config.json", "preprocessor_config.json", "*.safetensors", "*.safetensors.index.json"]
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Weights:
    """Weights ready for a network built from `card.model`."""

    card: Card
    state: dict[str, Tensor]
    origin: str  # where they were read, and where those came from: what weights made from them cite


def read_weights(spec: str, *, image_size: Size | None = None) -> Weights:
    """Weights from a path or `hf-hub:owner/name[@revision]`; the layout is told by the contents, not by the name.

    `image_size` is for files that do not say theirs.
    """
    if spec.startswith(HUB):
        path = _download(spec)
        commit = re.fullmatch(r"[0-9a-f]{40}", path.name)  # the Hub's cache names a folder by its commit
        source = f"{spec.partition('@')[0]}@{path.name}" if commit else spec
    else:
        path = _existing(spec)
        source = "/".join(path.absolute().parts[-2:])  # enough to recognise it; a whole path tells about the machine
    file = _weights_file(path) if path.is_dir() else path
    if file.suffix != ".json" and _is_archive(file):
        return _weights(google.read(file, image_size), source)
    names: set[str] = set()
    for shard in shards(file):
        header = read_header(shard)
        if KEY in header.metadata:
            return _bundle(shard, image_size, source)
        names |= set(header.shapes)
    config = _config_beside(file)
    if timm.MARK in names:
        ours = config if config and ("architecture" in config or "pretrained_cfg" in config) else None
        return _weights(timm.read(file, ours, image_size), source)
    if {huggingface.MARK, f"vit.{huggingface.MARK}"} & names:
        if config is None:
            raise UserError(f"'{file}' is in transformers' layout, which needs its config.json beside it")
        return _weights(huggingface.read(file, config, image_size), source)
    raise UserError(
        f"'{file}' holds no Vision Transformer that vitrail can read: not its own, timm's, transformers' or Google's"
    )


def _weights(foreign: Foreign, source: str) -> Weights:
    note = f" ({foreign.assumed})" if foreign.assumed else ""
    card = Card(
        model=foreign.model,
        preprocess=foreign.preprocess,
        classes=foreign.classes,
        source=source + note,
        licence=foreign.licence,
        created_with=created_with(),
    )
    return Weights(card, foreign.state, card.source)


def _bundle(path: Path, image_size: Size | None, source: str) -> Weights:
    card, state = read_bundle(path)
    told = card.model.image_size
    if image_size and image_size != told:
        raise UserError(f"'{path}' is for {told[0]}x{told[1]} images, not {image_size[0]}x{image_size[1]}")
    return Weights(card, state, f"{source}, itself from {card.source}" if card.source else source)


def _existing(spec: str) -> Path:
    path = Path(spec).expanduser()
    if path.exists():
        return path
    siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = did_you_mean(path.name, siblings)
    if not hint and re.fullmatch(r"[\w.-]+/[\w.-]+", spec):
        hint = f"; for a model of the Hugging Face Hub write '{HUB}{spec}'"
    raise UserError(f"no weights at '{spec}'{hint}")


def _weights_file(folder: Path) -> Path:
    """The file that holds a folder's weights: ours, the Hub's usual name, an index of shards, or the only one."""
    for name in ("model.safetensors", INDEX):
        if (folder / name).is_file():
            return folder / name
    files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".npz"))
    if len(files) == 1:
        return files[0]
    if files:
        raise UserError(f"'{folder}' has {len(files)} weights files and no model.safetensors: name one of them")
    pickles = sorted(file for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        raise _pickle_error(pickles[0])
    raise UserError(f"'{folder}' has no weights: no model.safetensors, no other .safetensors, no .npz")


def _is_archive(file: Path) -> bool:
    """Whether it is an .npz. A pickle, which torch puts in an archive too, is refused by its contents."""
    try:
        with open(file, "rb") as stream:
            start = stream.read(9)
        if start.startswith(b"PK\x03\x04"):
            with zipfile.ZipFile(file) as archive:
                names = archive.namelist()
            if any(name.endswith(".npy") for name in names):
                return True
            raise _pickle_error(file)
    except OSError as error:
        raise UserError(f"cannot read '{file}': {error.strerror}") from None
    except zipfile.BadZipFile:
        raise UserError(f"'{file}' is an archive that was cut short or damaged") from None
    if start.startswith(b"\x80") and not start.endswith(b"{"):  # safetensors: eight bytes of length, then JSON
        raise _pickle_error(file)
    return False


def _pickle_error(file: Path) -> UserError:
    return UserError(
        f"'{file}' is a pickle, which can run any code when opened: vitrail does not read it; "
        "load it where you trust it and save its state dict with safetensors.torch.save_file"
    )


def _config_beside(file: Path) -> dict[str, Any] | None:
    config = file.with_name("config.json")
    return read_json(config) if config.is_file() else None


def _download(spec: str) -> Path:
    """The folder where a model of the Hub lies, after fetching what is not in the local cache."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise UserError(f"'{spec}' needs the Hugging Face client: pip install 'vitrail[hub]'") from None
    name, _, revision = spec.removeprefix(HUB).partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=HUB_FILES))
    except errors.HFValidationError:
        raise UserError(
            f"'{spec}' is not a model of the Hub: write {HUB}owner/name or {HUB}owner/name@revision"
        ) from None
    except errors.GatedRepoError:
        raise UserError(
            f"'{name}' is closed on the Hub: ask for access on its page and log in with hf auth login"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(f"the Hub has no model '{name}', or it is private and you are not logged in") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"the Hub's '{name}' has no revision '{revision}'") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise UserError(f"'{name}' is not in the local cache, and the Hub cannot be reached from here") from None
    except OSError as error:
        raise UserError(f"cannot fetch '{name}' from the Hub: {error}") from None
