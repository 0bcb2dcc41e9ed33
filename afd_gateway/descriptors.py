"""The limit of open files, and how many client connections it allows."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("afd.gateway")

LINGERING = 64  # refused connections that wait for their client to read the error
_OWN = 64  # control plane, probes, scrapes, log files
_FEW = 4096


def raise_descriptor_limit() -> int:
    """Raises the soft limit of open files to the hard limit and returns the result.

    Warns if it allows few connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = soft
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            limit = hard
        except (OSError, ValueError) as error:  # a sandbox, or above fs.nr_open
            log.warning("cannot raise the limit of open files from %d: %s", soft, error)
    log.info("limit of open files: %d (was %d, hard limit %d)", limit, soft, hard)
    if 0 <= limit < _FEW:
        log.warning(
            "the limit of open files (%d) allows only %d client connections; raise the hard limit"
            " (`ulimit -Hn`, or LimitNOFILE= of a systemd unit)",
            limit,
            connections_allowed(limit),
        )
    return limit


def connections_allowed(limit: int) -> int:
    """Returns the number of client connections for a limit of open files.

    Each connection may need a second descriptor, for its request's attention instance.
    """
    if limit < 0:  # RLIM_INFINITY
        limit = 2**20
    return max(1, (limit - _OWN - LINGERING) // 2)


def connections_allowed_now() -> int:
    """Returns the number of client connections for this process's limit of open files."""
    return connections_allowed(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
