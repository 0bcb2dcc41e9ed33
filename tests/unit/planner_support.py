"""Requests that several planner tests share."""

from dataclasses import replace

from afd.planner.facts.hardware import load_accelerator
from afd.planner.facts.model_hf import load_model
from afd.planner.sizing.context import fixed
from afd.planner.sizing.request import Request


def request(model="step-3", accelerator="h800", ffn=None, context=4096, **changes) -> Request:
    first = load_accelerator(accelerator)
    second = load_accelerator(ffn) if ffn else first
    return Request(load_model(model), (first,), (second,), fixed(context), **changes)


def scaled(asked: Request, field: str, factor: float) -> Request:
    """The same request on accelerators with ``factor`` times the rate called ``field``."""

    def better(gpu):
        return replace(gpu, **{field: getattr(gpu, field) * factor})

    return replace(
        asked,
        attention=tuple(better(gpu) for gpu in asked.attention),
        ffn=tuple(better(gpu) for gpu in asked.ffn),
    )
