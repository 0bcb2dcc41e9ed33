"""Format of our log lines."""

import logging

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
PHASE = "afd: start-up: "
"""Before what a starting role is doing, "PHASE" or "PHASE: DETAIL"; at last "ready"."""


def say_phase(logger: logging.Logger, phase: str) -> None:
    """phase: completes "the role is ...", such as "reading experts"."""
    logger.info("%s%s", PHASE, phase)


def print_our_logs() -> None:
    """Print the logger ``afd`` in a vLLM process, where vLLM configures only its own logger."""
    ours = logging.getLogger("afd")
    if not ours.handlers:  # a forked process inherits its parent's handlers
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
        ours.propagate = False
