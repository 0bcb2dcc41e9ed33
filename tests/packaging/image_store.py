"""Builds images with buildah, without a daemon and without a registry.

The base is made from the Debian mirror that apt uses. It brings what this machine needs to reach a
package index: its own certificates, and uv's cache, which the image does not keep.
"""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
DEBIAN, VLLM = "localhost/afd-test-debian", "localhost/afd-test-vllm"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
MIRROR = "http://deb.debian.org/debian"
UV_CACHE = "/var/cache/afd-uv"

# What vLLM's images bring that the Dockerfiles need, but for torch and vLLM themselves.
LIKE_VLLM = """
FROM {debian}
RUN apt-get update \\
 && apt-get install -y --no-install-recommends ca-certificates libgomp1 python3 python3-pip \\
 && rm -rf /var/lib/apt/lists/* /usr/lib/python3*/EXTERNALLY-MANAGED
"""


@dataclass(frozen=True)
class Store:
    """A folder with images. uv_cache: of this machine; None if it has none."""

    folder: Path
    uv_cache: Path | None

    def run(self, *words: str, limit_s: float = 60.0) -> str:
        """Runs buildah; returns what it printed. A failure fails the test with its last lines."""
        where = ["--root", str(self.folder / "store"), "--runroot", str(self.folder / "run")]
        argv = ["buildah", "--storage-driver", "overlay", *where, *words]
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s
        )
        assert done.returncode == 0, f"buildah {' '.join(words)}\n{done.stdout[-6000:]}"
        return done.stdout

    def has(self, tag: str) -> bool:
        return tag in self.run("images", "--format", "{{.Name}}").split()

    def make_debian(self) -> None:
        """The stand-in for Debian's image."""
        if self.has(DEBIAN):
            return
        tar = self.folder / "debian.tar"
        subprocess.run(
            ["mmdebstrap", "--variant=minbase", "--quiet", "bookworm", str(tar), MIRROR],
            check=True,
            timeout=280,
        )
        container = self.run("from", "scratch").strip()
        self.run("add", container, str(tar), "/", limit_s=120)
        tar.unlink()
        own = sorted(Path("/usr/local/share/ca-certificates").glob("*.crt"))
        if own:
            self.run("copy", container, *map(str, own), "/usr/local/share/ca-certificates/")
        if "SSL_CERT_FILE" in os.environ:
            for name in ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE"):
                self.run("config", "--env", f"{name}={CERTIFICATES}", container)
        if self.uv_cache is not None:
            self.run("config", "--env", f"UV_CACHE_DIR={UV_CACHE}", container)
        self.run("config", "--cmd", "/bin/sh", container)
        self.run("commit", "--rm", "--format", "docker", container, DEBIAN, limit_s=120)

    def make_like_vllm(self) -> None:
        """The stand-in for vLLM's images."""
        self.make_debian()
        file = self.folder / "Dockerfile.vllm"
        file.write_text(LIKE_VLLM.format(debian=DEBIAN))
        self.build(file, VLLM, DEBIAN, DOCKER / "Dockerfile.dockerignore")

    def build(self, file: Path, tag: str, base: str, ignore: Path, target: str = "") -> None:
        volume = [] if self.uv_cache is None else ["--volume", f"{self.uv_cache}:{UV_CACHE}"]
        self.run(
            *("build", "--format", "docker", "--isolation", "chroot", "--layers", *volume),
            *("--build-arg", f"BASE={base}", "--ignorefile", str(ignore), "--file", str(file)),
            *(("--target", target) if target else ()),
            *("--tag", tag, str(ROOT)),
            limit_s=1500,
        )

    def config_of(self, tag: str) -> dict[str, Any]:
        """The configuration that a container of the image starts with."""
        found: dict[str, Any] = json.loads(self.run("inspect", "--type", "image", tag))["Docker"]
        return dict(found["config"])


@dataclass(frozen=True)
class Container:
    """A container of an image; its processes are in a chroot, in the host's network."""

    store: Store
    name: str

    def argv(self, command: Sequence[str], *, environment: Sequence[str] = ()) -> list[str]:
        """The command line that runs ``command`` as the user, and in the folder, of the image."""
        where = self.store.folder
        return [
            *("buildah", "--storage-driver", "overlay"),
            *("--root", str(where / "store"), "--runroot", str(where / "run")),
            *("run", "--isolation", "chroot", *(f"--env={word}" for word in environment)),
            *(self.name, "--", *command),
        ]

    def run(self, *command: str, environment: Sequence[str] = ()) -> tuple[int, str]:
        """Returns the exit status and what was printed."""
        done = subprocess.run(
            self.argv(command, environment=environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout


@contextlib.contextmanager
def container_of(store: Store, tag: str) -> Iterator[Container]:
    name = store.run("from", tag).strip()
    try:
        yield Container(store, name)
    finally:
        store.run("rm", name)


def uv_cache() -> Path | None:
    """uv's cache of this user."""
    given = os.environ.get("UV_CACHE_DIR")
    folder = Path(given) if given else Path.home() / ".cache" / "uv"
    return folder if folder.is_dir() else None


def missing() -> str:
    """Why no image can be built here; "" if one can."""
    tools = [tool for tool in ("buildah", "mmdebstrap") if shutil.which(tool) is None]
    if tools:
        return f"needs {' and '.join(tools)}; apt-get install buildah mmdebstrap"
    return "" if os.geteuid() == 0 else "chroot needs root"
