"""`afd` with an FFN instance whose expert calls sleep while the file SLEEPY names seconds in it."""

import contextlib
import os
import sys
import time
from pathlib import Path

from afd_launch import cli
from ffn_worker.experts.model import FfnModel

_FILE = Path(os.environ["SLEEPY"])
_forward = FfnModel.forward


def forward(self, *args, **named):
    out = _forward(self, *args, **named)
    with contextlib.suppress(OSError, ValueError):
        time.sleep(float(_FILE.read_text()))
    return out


if __name__ == "__main__":
    FfnModel.forward = forward
    sys.exit(cli.main())
