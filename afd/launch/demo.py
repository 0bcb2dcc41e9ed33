"""`afd demo`: a small random model, made once, and the deployment of configs/demo.yaml."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from afd.config import check_model, load_config
from afd.demo.make_model import make_model
from afd.demo.sizes import resolve
from afd.errors import ConfigError
from afd.launch.logs import say
from afd.launch.serve import serve

CONFIG = Path(__file__).parents[2] / "configs" / "demo.yaml"
FAMILY = "qwen3_moe"
PRESET = "demo"


def demo(*, port: int | None, log_dir: Path | None, overrides: Sequence[str]) -> int:
    """Make the model if it is missing, serve it, and say how to talk to it."""
    if not CONFIG.exists():
        raise ConfigError(f"{CONFIG} is missing; run afd demo from a checkout of the repository")
    settings = [*overrides, *([f"gateway.port={port}"] if port is not None else [])]
    deployment = load_config(CONFIG, settings)
    if not (deployment.model / "config.json").exists():
        say(f"making a random {FAMILY} model in {deployment.model}")
        make_once(deployment.model)
    check_model(deployment)
    name = deployment.served_model_name
    return serve(deployment, log_dir=log_dir, on_ready=lambda url: print(hints(url, name)))


def make_once(directory: Path) -> None:
    """Write the model beside ``directory`` and rename it: an interrupted one is never used."""
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
    """How to ask for a completion, by curl and by Python. Pure."""
    body = f'{{"model": "{model}", "prompt": "Once upon a time", "max_tokens": 32}}'
    return f"""
  The weights are random: the answers are nonsense, the machinery is real.

  curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'

  python -c "from openai import OpenAI; print(OpenAI(base_url='{url}/v1', api_key='none')\
.completions.create(model='{model}', prompt='Once upon a time', max_tokens=32).choices[0].text)"

  Ctrl-C stops it.
"""
