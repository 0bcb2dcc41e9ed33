"""Errors for the user. Each message is one sentence: the cause, then the remedy."""


class AfdError(Exception):
    """Base of every error that the command line prints as ``afd: error: ...`` (exit code 2)."""


class ConfigError(AfdError):
    """The configuration or the checkpoint cannot be used as written."""


class HandshakeRefused(AfdError):
    """The control plane refused a member; the message names both values."""


class PeerLost(AfdError):
    """A peer was lost and did not return within its deadline."""


class DeadlineExceeded(AfdError):
    """A wait exceeded its deadline; the message names what was awaited."""


class CapacityExceeded(AfdError):
    """More rows than a slot holds; the message names both numbers and the key to raise."""
