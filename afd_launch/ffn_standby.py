"""The process that waits to replace dead FFN ranks (afd_launch.standby)."""

from __future__ import annotations

import sys
from pathlib import Path

import ffn_worker.main  # noqa: F401  takes seconds
from afd.config.roles import load_role
from afd.errors import AfdError
from afd_launch.role import end_at_once, run_role
from afd_launch.standby_process import await_order
from ffn_worker.moe.late_imports import import_all


def main() -> int:
    """Waits for orders; each fork runs an FFN rank."""
    import_all()
    order = await_order()
    if order is None:
        return 0
    try:
        end_at_once(run_role(load_role(order.file), Path(order.file)))
    except AfdError as error:
        print(f"afd: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
