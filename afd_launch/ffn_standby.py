"""The process that waits to replace dead FFN ranks (afd_launch.standby)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from afd.config.roles import load_role
from afd.errors import AfdError
from afd.host.collector import collector_rests
from afd_launch.role import end_at_once, run_role
from afd_launch.standby_process import await_order, device_file


def main() -> int:
    """Waits for orders; each fork runs an FFN rank."""
    with collector_rests():
        import torch  # takes seconds, as the next one

        import ffn_worker.main  # noqa: F401
        from ffn_worker.moe.late_imports import import_all

        import_all()
    order = await_order()
    if order is None:
        return 0
    # An import that looked for GPUs saw all of the host, and the rank is meant for one of them.
    if device_file() is not None and torch.cuda.device_count() > 1:
        words = [sys.executable, "-m", "afd_launch.cli", "ffn", "--role-file", order.file]
        os.execve(sys.executable, words, order.environment)
    try:
        end_at_once(run_role(load_role(order.file), Path(order.file)))
    except AfdError as error:
        print(f"afd: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
