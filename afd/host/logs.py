"""Format of our log lines."""

import logging

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def print_our_logs() -> None:
    """Print the logger ``afd`` in a vLLM process, where vLLM configures only its own logger."""
    ours = logging.getLogger("afd")
    if not ours.handlers:  # a forked process inherits its parent's handlers
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
        ours.propagate = False
