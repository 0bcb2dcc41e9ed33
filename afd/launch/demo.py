"""`afd demo`: the small trained model of this repository, served as configs/demo.yaml says."""

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

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "demo.yaml"
TRAINED = ROOT / "checkpoints" / "afd-tiny-chat"  # see docs/model.md
FAMILY = "qwen3_moe"
PRESET = "demo"
QUESTION = "Tell me a story about a fox and a lantern."


def demo(*, port: int | None, log_dir: Path | None, overrides: Sequence[str]) -> int:
    """Serve the trained model and say how to talk to it.

    With `--set model=DIRECTORY` another one is served; where that folder does not exist, a random
    model is made in it, to try the machinery at another size.
    """
    if not CONFIG.exists():
        raise ConfigError(f"{CONFIG} is missing; run afd demo from a checkout of the repository")
    settings = [*overrides, *([f"gateway.port={port}"] if port is not None else [])]
    deployment = load_config(CONFIG, settings)
    trained = deployment.model == TRAINED
    if not (deployment.model / "config.json").exists():
        if trained:
            raise ConfigError(f"{TRAINED} is missing; restore it with git checkout -- checkpoints")
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
    """How to ask a question, by curl and by Python. Pure."""
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
