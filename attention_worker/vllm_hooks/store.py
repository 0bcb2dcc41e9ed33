"""The key-value store of torch.distributed in an attention instance, a group of one rank."""

import os
from pathlib import Path

from afd.config.roles import ROLE_FILE_ENV


def file_store() -> str:
    """Returns the init method of a file store (torch.distributed: shared file-system init).

    vLLM's default is a TCPStore, which listens on all addresses without authentication. The file
    lies beside the role file, in a folder that only this user may enter.
    """
    folder = Path(os.environ[ROLE_FILE_ENV]).parent
    # vLLM reads the text after the last colon as the instance's name (cpu_worker.py).
    return f"file://{folder}/store:{os.getpid()}"
