"""The files that the gateway reads at its start."""

from afd.config.sections import Gateway
from afd_gateway.tls import server_context


def check_files(gateway: Gateway) -> None:
    """Reads the files once, so that a mistake in them shows before any role starts.

    Raises ConfigError.
    """
    if gateway.api_keys is not None:
        from afd_gateway.api_keys import read_api_keys  # late: it takes 0.2 s

        read_api_keys(gateway.api_keys)
    if gateway.tls is not None:
        server_context(gateway.tls.certificate, gateway.tls.key)
