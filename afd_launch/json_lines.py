"""Orders and answers between the processes of `afd doctor`: one JSON value per line."""

from __future__ import annotations

import json
from typing import IO, Any

from afd.errors import AfdError


def say(out: IO[str], what: object) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()


def heard(stream: IO[str]) -> Any:
    """The next value. Raises AfdError if the other side has ended."""
    line = stream.readline()
    if not line:
        raise AfdError("the other side ended; see its output")
    return json.loads(line)
