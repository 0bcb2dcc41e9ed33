"""Whether the ranks of an attention instance (``attention.tp``) can divide the checkpoint."""

from __future__ import annotations

from afd.config.deployment import Deployment
from afd.errors import ConfigError
from afd.models import fields, read_config, read_model


def check_ranks(deployment: Deployment) -> None:
    """Raises ConfigError if they cannot. Reads config.json only."""
    tp = deployment.attention.tp
    if tp == 1:
        return
    family, model = read_model(deployment.model)
    if family.split:
        raise ConfigError(
            f"attention.tp is {tp}, but {model.architecture} runs split ({family.split}), which one"
            " rank does; set attention.tp to 1 and use attention.instances"
        )
    heads = fields.text_config(read_config(deployment.model)).get("num_attention_heads", tp)
    if isinstance(heads, int) and heads % tp:
        fits = max(ranks for ranks in range(1, tp) if heads % ranks == 0)
        raise ConfigError(
            f"attention.tp is {tp}, but the {heads} attention heads of {model.architecture} cannot"
            f" be divided by that; set attention.tp to {fits}"
        )
