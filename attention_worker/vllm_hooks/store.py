"""The key-value store of torch.distributed in an attention instance."""

import os
from pathlib import Path

from afd.config.roles import ROLE_FILE_ENV


def file_store(rank: int, ranks: int) -> str:
    """Returns the init method of a file store (torch.distributed: shared file-system init).

    vLLM's default is a TCPStore, which listens on all addresses without authentication. The file
    lies beside the role file, in a folder that only this user may enter. The ranks of an instance
    are children of one engine and share the file.

    On CPUs vLLM takes the text after the last colon for the name of its collectives in shared
    memory (cpu_worker.py). They spin, which takes the cores of whom the rank waits for, and a rank
    would spin forever if another one died. With names that differ it takes gloo instead
    (cpu_communicator.py).
    """
    folder = Path(os.environ[ROLE_FILE_ENV]).parent
    owner = os.getpid() if ranks == 1 else os.getppid()
    return f"file://{folder}/store-{owner}?name=:{rank}"
