"""AMX, the matrix tiles of newer Intel processors."""

import torch


def ask_for_amx() -> bool:
    """Asks Linux for AMX tiles. Returns whether this process may use them.

    Linux grants them to a process that asks, and ends one that did not with SIGILL (arch_prctl(2),
    ARCH_REQ_XCOMP_PERM). A child of ``fork`` may use what its parent may.
    """
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
