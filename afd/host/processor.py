"""What kind of processor this host has."""

import platform


def is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64", "i386", "i686")
