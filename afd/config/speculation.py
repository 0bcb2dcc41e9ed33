"""The section ``attention.speculation`` of a deployment file: drafts and what makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from afd.config.transport import Section


class Speculation(Section):
    """Speculative decoding: a step verifies draft tokens of its requests (docs/vllm-features.md).

    The names are those of vLLM's ``--speculative-config``.
    """

    # ngram: drafts are what followed the same tokens earlier in the request; no draft model.
    # mtp: the checkpoint's draft layers make them. eagle, eagle3: a draft model does, which every
    # attention instance holds
    method: Literal["ngram", "mtp", "eagle", "eagle3"] = "ngram"
    # Folder of the draft model of eagle and eagle3, relative to the deployment file
    model: Path | None = Field(default=None, description="the path of an EAGLE head, or null")
    num_speculative_tokens: int = Field(default=3, ge=1, le=16)  # drafts per request and step
    prompt_lookup_min: int = Field(default=2, ge=1)  # ngram: tokens of the shortest match
    prompt_lookup_max: int = Field(default=5, ge=1)  # ngram: tokens of the longest match

    @model_validator(mode="after")
    def _consistent(self) -> Speculation:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} is above prompt_lookup_max"
                f" {self.prompt_lookup_max}; lower prompt_lookup_min"
            )
        if (self.model is not None) is not self.has_model:
            raise ValueError(
                f"method {self.method} needs a draft model; set model to its folder"
                if self.has_model
                else f"method {self.method} has no draft model of its own; remove model"
            )
        return self

    @property
    def has_model(self) -> bool:
        """Whether the drafts come from a model beside the checkpoint."""
        return self.method in ("eagle", "eagle3")

    @property
    def has_draft_layers(self) -> bool:
        """Whether layers compute the drafts, of the checkpoint or of a model beside it."""
        return self.method != "ngram"
