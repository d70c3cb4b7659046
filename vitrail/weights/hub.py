"""Downloading models from the Hugging Face Hub and looking them up in its local cache. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitrail.errors import UserError
from vitrail.weights.names import HUB_PREFIX

# Appended to errors about a Hub that cannot be reached.
OFFLINE_HINT = "; pass --from bundled to start from the weights that come with vitrail"
HUB_FILES = ["config.json", "preprocessor_config.json", "*.safetensors", "*.safetensors.index.json"]


def is_cached(spec: str) -> bool:
    """Whether the weights of a Hub model are in the local cache."""
    from huggingface_hub import errors, snapshot_download

    name, _, revision = spec.removeprefix(HUB_PREFIX).partition("@")
    try:
        folder = snapshot_download(name, revision=revision or None, allow_patterns=HUB_FILES, local_files_only=True)
    except errors.LocalEntryNotFoundError:
        return False
    return any(file.exists() for file in Path(folder).glob("*.safetensors"))


def download(spec: str, more: Sequence[str] = ()) -> Path:
    """Return the folder of a Hub model; downloads what is not cached. `more`: suffixes of further files to download."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise UserError(f"'{spec}' needs the Hugging Face client: pip install 'vitrail[hub]'") from None
    name, _, revision = spec.removeprefix(HUB_PREFIX).partition("@")
    patterns = HUB_FILES + [f"*{suffix}" for suffix in more]
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except errors.HFValidationError:
        raise UserError(
            f"'{spec}' is not a valid Hub model: write {HUB_PREFIX}owner/name or {HUB_PREFIX}owner/name@revision"
        ) from None
    except errors.GatedRepoError:
        raise UserError(f"'{name}' is a gated model: request access on its Hub page, then run hf auth login") from None
    except errors.RepositoryNotFoundError:
        raise UserError(f"the Hub has no model '{name}'; if it is private, run hf auth login") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"Hub model '{name}' has no revision '{revision}'") from None
    except Exception as error:  # connection, single files, full disk: the client raises many types
        away = isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled)
        answer = error.__cause__ if away else error
        if away and not isinstance(answer, errors.HfHubHTTPError):
            raise UserError(
                f"'{name}' is not in the local cache, and the Hub cannot be reached{OFFLINE_HINT}"
            ) from None
        reason = " ".join(str(answer).split()).rstrip(".") or type(answer).__name__
        raise UserError(f"'{name}' could not be downloaded from the Hub: {reason}{OFFLINE_HINT}") from None
