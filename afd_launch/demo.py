"""`afd demo`: serves the small trained model that comes with afd (afd_launch/data/demo)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from afd.config.deployment import Deployment, load_config
from afd.config.resolve import check_model
from afd.devices import device_named
from afd.errors import ConfigError
from afd.host.package_data import data_folder
from afd_demo.make_model import make_model
from afd_demo.sizes import resolve
from afd_launch.installation import demo_settings, find_gpus, vllm_build
from afd_launch.role_log import say
from afd_launch.serve import serve

FOLDER = data_folder("afd_launch") / "demo"
CONFIG = FOLDER / "demo.yaml"
TRAINED = FOLDER / "afd-tiny-chat"  # see docs/model.md
FAMILY = "qwen3_moe"
PRESET = "demo"
QUESTION = "Tell me a story about a fox and a lantern."


def demo(*, port: int | None, log_dir: Path | None, overrides: Sequence[str]) -> int:
    """Serve the trained model and print example requests. Returns the exit status.

    It runs on the GPUs of this host where vLLM is built for them, else on the CPU. With
    ``--set model=DIRECTORY`` it serves the model in that folder; if the folder does not exist, it
    first writes a random model there.

    Raises:
        ConfigError: vLLM or the model is missing, or an override is wrong.
    """
    settings = [*overrides, *([f"gateway.port={port}"] if port is not None else [])]
    deployment = _load(settings)
    trained = deployment.model == TRAINED
    if not (deployment.model / "config.json").exists():
        if trained:
            raise ConfigError(
                f"{TRAINED} is missing; reinstall afd, or restore it with git checkout"
            )
        say(f"creating a random {FAMILY} model in {deployment.model}")
        make_once(deployment.model)
    check_model(deployment)
    name = deployment.served_model_name
    return serve(deployment, log_dir=log_dir, on_ready=lambda url: print(hints(url, name)))


def _load(settings: Sequence[str]) -> Deployment:
    """The demo's deployment on the device of this host; the user's ``settings`` win."""
    gpus, build = find_gpus(), vllm_build()
    device = demo_settings(gpus, build)
    deployment = load_config(CONFIG, [*device, *settings])
    if not device or not device_named(deployment.attention.device).visible_variables:
        return deployment
    attention = deployment.attention
    wanted = attention.instances * attention.tp + deployment.ffn.ranks
    if deployment.gpus is None and gpus.count < wanted:
        say(f"{wanted} processes share {gpus.count} GPU{'s' if gpus.count > 1 else ''}")
        # Each vLLM process otherwise claims most of its GPU.
        shared = [f"gpus={gpus.count}", f"attention.vllm_args={_arguments(deployment, gpus.count)}"]
        deployment = load_config(CONFIG, [*device, *shared, *settings])
    return deployment


def _arguments(deployment: Deployment, gpus: int) -> list[str]:
    """vLLM's arguments, with the share of GPU memory that an attention instance may use."""
    per_gpu = -(-deployment.attention.instances // gpus)
    return [*deployment.attention.vllm_args, f"--gpu-memory-utilization={0.4 / per_gpu:.2f}"]


def make_once(directory: Path) -> None:
    """Write the random model into a temporary folder, then rename it to ``directory``.

    So a model whose writing was interrupted is never served.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        make_model(FAMILY, scratch, resolve(FAMILY, PRESET))
        scratch.chmod(0o755)
        os.rename(scratch, directory)
    except OSError as err:
        raise ConfigError(f"cannot write the demo model to {directory}: {err.strerror}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def hints(url: str, model: str) -> str:
    """Example requests with curl and with Python. Pure."""
    messages = f'[{{"role": "user", "content": "{QUESTION}"}}]'
    body = f'{{"model": "{model}", "messages": {messages}, "max_tokens": 200}}'
    python = messages.replace('"', "'")
    return f"""
  The model is very small: it knows some words, short stories and sums, and is often wrong.

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'

  python -c "from openai import OpenAI; print(OpenAI(base_url='{url}/v1', api_key='none')\
.chat.completions.create(model='{model}', messages={python}, max_tokens=200)\
.choices[0].message.content)"

  Ctrl-C stops it.
"""
