"""Finds checkpoints by their name on the Hugging Face Hub, in huggingface_hub's cache."""

import re
from pathlib import Path

from afd.errors import ConfigError

_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def is_hub_name(text: str) -> bool:
    """Whether text may be ORGANISATION/NAME or ORGANISATION/NAME@REVISION."""
    return _NAME.fullmatch(text) is not None and not text.startswith(".")


def cached_folder(name: str) -> Path:
    """Returns the folder of a downloaded snapshot. Uses no network, whatever HF_HUB_OFFLINE says.

    A server starts many processes, so none of them downloads; ``hf download`` does. The cache is
    where HF_HUB_CACHE or HF_HOME says.

    Args:
        name: ORGANISATION/NAME, or ORGANISATION/NAME@REVISION; default revision: main.

    Raises:
        ConfigError: the cache has no such snapshot, or huggingface_hub is not installed.
    """
    repository, _, revision = name.partition("@")
    remedy = f"run: hf download {repository}" + (f" --revision {revision}" if revision else "")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(
            f"model {name} is not a folder, and to find it in the Hugging Face cache"
            " huggingface_hub is needed; install it, or give the checkpoint's folder"
        ) from None
    try:
        found = snapshot_download(repository, revision=revision or None, local_files_only=True)
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError):
        raise ConfigError(
            f"model {name} is neither a folder nor in the Hugging Face cache; {remedy}, or give"
            " the checkpoint's folder"
        ) from None
    return Path(found)
