"""TLS of the gateway's port."""

from __future__ import annotations

import ssl
from pathlib import Path

from afd.errors import ConfigError


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Returns a context for TLS 1.2 and later.

    Args:
        certificate: PEM file with the certificate and the chain behind it. key: PEM file, without
            a password.

    Raises:
        ConfigError: a file cannot be read or is not PEM, or the two do not belong together.
    """
    for name, path in (("certificate", certificate), ("key", key)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"gateway.tls.{name}: cannot read {path}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def no_password() -> str:
        raise ConfigError(
            f"gateway.tls.key: {key} has a password; decrypt it with `openssl pkey -in FILE -out"
            " FILE`"
        )

    try:
        context.load_cert_chain(certificate, key, password=no_password)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        raise ConfigError(
            f"gateway.tls: {certificate} and {key} are not a PEM certificate and its key ({reason})"
        ) from None
    return context
