"""Executes the steps of a Dockerfile on a folder with a Debian system: an image without a builder.

Understands what deploy/docker uses. RUN runs in a chroot as root; what the image would run runs as
its user. Needs root.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_PASSED = re.compile(r"^(PIP_|UV_|AFD_TORCH_INDEX$|SSL_CERT|REQUESTS_CA|.*_proxy$|.*_PROXY$)")
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "PIP_CERT", "REQUESTS_CA_BUNDLE")
_HOST_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs")


@dataclass
class Image:
    """A file system and what the Dockerfile says about running it."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)

    def run(self, *argv: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """Runs a command as the image's user, in its folder."""
        return self._chroot(self.user, argv, seconds)

    def shell(self, script: str) -> None:
        """One RUN. Raises CalledProcessError with its output."""
        done = self._chroot("0:0", ("/bin/sh", "-c", script), 900)
        assert done.returncode == 0, f"RUN {script}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"

    def _chroot(
        self, user: str, argv: tuple[str, ...], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        passed = {k: v for k, v in os.environ.items() if _PASSED.match(k)}
        home = {"HOME": "/root" if user == "0:0" else "/home/afd"}
        inside = f"cd {shlex.quote(self.workdir)} && exec {shlex.join(argv)}"
        return subprocess.run(
            ["chroot", f"--userspec={user}", str(self.root), "/bin/sh", "-c", inside],
            env={"PATH": path, "DEBIAN_FRONTEND": "noninteractive", **home, **passed, **self.env},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )


def build(dockerfile: Path, context: Path, base: Path, folder: Path) -> Image:
    """Returns the last stage. base: a Debian system, for every FROM. folder: for the stages."""
    stages: dict[str, Image] = {}
    image: Image | None = None
    for word, rest in _instructions(dockerfile.read_text()):
        if word == "FROM":
            name = rest.split()[2] if " AS " in rest else "last"
            root = folder / name
            subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(root)], check=True)
            give_network(root)
            image = stages[name] = Image(root)
        elif image is None or word in ("ARG", "EXPOSE", "CMD"):
            continue
        elif word == "RUN":
            image.shell(rest)
        elif word == "WORKDIR":
            image.workdir = rest
            (image.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "ENV":
            for pair in shlex.split(rest):
                key, _, value = pair.partition("=")
                known = image.env.get(key, "/usr/local/bin:/usr/bin:/bin")
                image.env[key] = value.replace(f"${key}", known)
        elif word == "USER":
            image.user = rest
        elif word == "COPY":
            _copy(image, stages, context, rest, dockerfile)
        elif word == "HEALTHCHECK":
            image.healthcheck = json.loads(rest.split("CMD", 1)[1])
        elif word == "ENTRYPOINT":
            image.entrypoint = json.loads(rest)
        else:
            raise AssertionError(f"{dockerfile.name}: {word} is not understood")
    assert image is not None
    return image


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word, rest.strip()


def _copy(
    image: Image, stages: dict[str, Image], context: Path, rest: str, dockerfile: Path
) -> None:
    words = rest.split()
    ignored: list[str] = []
    source = context
    if words[0].startswith("--from="):
        source = stages[words[0].removeprefix("--from=")].root
        words = words[1:]
    else:
        ignored = dockerfile.with_name(f"{dockerfile.name}.dockerignore").read_text().split()
    *froms, to = words
    target = image.root / (to if to.startswith("/") else f"{image.workdir}/{to}").lstrip("/")
    for one in froms:
        path = source / one.lstrip("/")
        if path.is_dir():
            left_out = shutil.ignore_patterns(*(rule.removeprefix("**/") for rule in ignored))
            shutil.copytree(path, target, symlinks=True, dirs_exist_ok=True, ignore=left_out)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)


def give_network(root: Path) -> None:
    """Gives a system this machine's name service, certificates and package indexes."""
    certificates = [os.environ[name] for name in _CERTIFICATES if name in os.environ]
    for name in (*_HOST_FILES, *certificates):
        path, target = Path(name), root / name.lstrip("/")
        if path.is_dir():
            shutil.copytree(path, target, symlinks=False, dirs_exist_ok=True)
        elif path.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    for path in Path("/etc/apt").glob("sources.list*"):
        if path.is_file():
            shutil.copy2(path, root / "etc" / "apt")
        else:
            shutil.copytree(path, root / "etc" / "apt" / path.name, dirs_exist_ok=True)
    subprocess.run(["cp", "-a", "/etc/apt/apt.conf.d", f"{root}/etc/apt/"], check=False)
