"""The section ``prefill`` of a deployment file: instances that compute prompts for the others."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from afd.config.transport import Section
from afd.config.vllm_arguments import refusal

Connector = Literal["NixlConnector", "MoRIIOConnector"]
_OF_COLOCATED = ("kv_cache_gib", "host", "port", "vllm_args")


class Prefill(Section):
    """Prefill/decode disaggregation (docs/prefill-decode.md)."""

    # Instances that compute prompts only; their KV cache goes to the attention instance that
    # generates the answer. 0: every attention instance computes its own prompts
    instances: int = Field(default=0, ge=0)
    # colocated: vLLM servers with the whole model. afd: the last of attention.instances
    by: Literal["colocated", "afd"] = "colocated"
    connector: Connector = "NixlConnector"  # vLLM's KV connector that moves the KV cache
    # More keys of vLLM's kv_connector_extra_config
    connector_config: dict[str, str | int | float | bool] = Field(default_factory=dict)
    # Seconds that the KV cache of a prompt is kept for an attention instance that does not fetch it
    lease_s: int = Field(default=30, ge=6)
    # The other keys are those of colocated instances, which have attention.vllm_args, too
    kv_cache_gib: float = Field(default=1.0, gt=0)  # GiB per instance
    host: str = "127.0.0.1"  # address on which the instances listen
    port: Annotated[int, Field(ge=0, le=65535)] = 8200  # instance i: port + i; 0: any free port
    vllm_args: tuple[str, ...] = ()  # extra arguments, behind attention.vllm_args

    @model_validator(mode="after")
    def _consistent(self) -> Prefill:
        if refused := refusal(self.vllm_args):
            raise ValueError(f"vllm_args has {refused}")
        values, keys = self.model_dump(), type(self).model_fields
        idle = [key for key in _OF_COLOCATED if values[key] != keys[key].default]
        if self.by == "afd" and idle:
            raise ValueError(
                f"{idle[0]} is for colocated instances, but by is afd: these instances have the"
                f" settings of attention; remove {idle[0]}"
            )
        return self

    @property
    def colocated(self) -> int:
        """Number of colocated instances."""
        return self.instances if self.by == "colocated" else 0

    def api_ports(self) -> tuple[int, ...]:
        """One port per colocated instance; all 0 if any free port may be used."""
        return tuple(self.port + i if self.port else 0 for i in range(self.colocated))
