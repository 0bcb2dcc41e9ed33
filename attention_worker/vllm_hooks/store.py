"""The key-value store of torch.distributed in an attention instance."""

import os
from pathlib import Path

from afd.config.roles import ROLE_FILE_ENV


def file_store(rank: int, ranks: int) -> str:
    """Returns the init method of a file store (torch.distributed: shared file-system init).

    vLLM's default may be a TCPStore, which listens on all addresses without authentication. The
    file lies beside the role file, in a folder that only this user may enter.

    The ranks of an instance are children of one engine, and each opens their common file through a
    link of its own. On CPUs vLLM makes the name of its shared memory of the path (cpu_worker.py:
    VLLM_DIST_IDENT), and takes gloo if the ranks have different names (cpu_communicator.py). Its
    collectives in shared memory spin: they take the cores of whom the rank waits for, and would
    spin forever if another rank died.
    """
    folder = Path(os.environ[ROLE_FILE_ENV]).parent
    if ranks == 1:
        return f"file://{folder}/store:{os.getpid()}"
    common = f"store-{os.getppid()}"
    own = folder / f"{common}:{rank}"
    own.unlink(missing_ok=True)  # of an engine that had the same number
    own.symlink_to(common)
    return f"file://{own}"
