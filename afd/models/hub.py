"""Finds checkpoints by their name on the Hugging Face Hub, in huggingface_hub's cache."""

import re
from pathlib import Path

_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")


def is_hub_name(text: str) -> bool:
    """Whether text may be ORGANISATION/NAME or ORGANISATION/NAME@REVISION."""
    return _NAME.fullmatch(text) is not None


def cached_folder(name: str) -> Path | None:
    """Returns the folder of a downloaded snapshot; None if the cache has none.

    Uses no network, whatever HF_HUB_OFFLINE says: a server starts many processes, so none of them
    downloads; ``hf download`` does. The cache is where HF_HUB_CACHE or HF_HOME says.

    Args:
        name: ORGANISATION/NAME, or ORGANISATION/NAME@REVISION; default revision: main.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:  # comes with vLLM
        return None
    repository, _, revision = name.partition("@")
    try:
        found = snapshot_download(repository, revision=revision or None, local_files_only=True)
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None
    return Path(found)
