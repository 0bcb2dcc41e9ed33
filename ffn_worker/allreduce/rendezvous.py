"""How the ranks of one FFN instance find each other: a shared file or a TCP address."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import urlsplit

from torch.distributed import FileStore, Store, TCPStore

from afd.errors import ConfigError, DeadlineExceeded, PeerLost


def host_of(address: str) -> str:
    """The host of a TCP rendezvous; the loopback address for a file."""
    return urlsplit(address).hostname or "127.0.0.1"


def open_store(address: str, rank: int, world: int, start_s: float) -> Store:
    """Opens the store through which the ranks exchange addresses and handles.

    Args:
        address: ``file:///PATH`` of a file that does not exist yet, or ``tcp://HOST:PORT`` where
            rank 0 listens. Every start needs a new file.
        start_s: how long to wait for the other ranks, in seconds.

    Raises:
        ConfigError: the address has neither form.
        DeadlineExceeded: the other ranks did not come.
    """
    parts = urlsplit(address)
    if parts.scheme == "file" and parts.path:
        store: Store = FileStore(parts.path, world)
        store.set_timeout(timedelta(seconds=start_s))
    elif parts.scheme == "tcp" and parts.hostname and parts.port:
        with named_errors("meeting the other ranks", rank, world, start_s):
            store = TCPStore(
                parts.hostname, parts.port, world, rank == 0, timedelta(seconds=start_s)
            )
    else:
        raise ConfigError(f"ranks cannot meet at {address!r}; give file:///PATH or tcp://HOST:PORT")
    return store


@contextmanager
def named_errors(doing: str, rank: int, world: int, deadline_s: float) -> Iterator[None]:
    """Turns errors of torch.distributed into PeerLost and DeadlineExceeded.

    doing: what this rank was doing, for the message.
    """
    try:
        yield
    except RuntimeError as err:  # torch's own errors derive from it
        reason = str(err).splitlines()[0]
        where = f"rank {rank} of {world}, {doing}"
        if any(word in reason.lower() for word in ("timed out", "timeout")):
            raise DeadlineExceeded(
                f"{where}: another rank did not take part within {deadline_s:g} s; look at that "
                f"rank's log ({reason})"
            ) from err
        raise PeerLost(f"{where}: another rank is gone; restart the instance ({reason})") from err
