"""The YAML file of a simulation: its keys, their defaults and their valid values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from afd.config.messages import sentence
from afd.errors import ConfigError

NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
MAX_TOKENS = 8192
Index = Annotated[int, Field(ge=0)]


class _Section(BaseModel):
    """Base of all sections: unknown keys and numbers written as text are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Pool(_Section):
    """x attention or y FFN instances of ``gpus`` accelerators each."""

    instances: Count
    gpus: Count = 1


class Linear(_Section):
    """The larger of at_least_us and fixed_us + per_row_us * rows + per_row_ktoken_us * rows *
    context / 1000 + per_row_beyond_us * max(0, rows - beyond_rows).

    The result is microseconds. The last term is for stages that become compute-bound. ``rows``: of
    one micro-batch on one attention instance; for ``ffn``, of one micro-batch on all attention
    instances; for ``rest``, of the whole step. ``context``: tokens that a row attends to, on
    average; for ``ffn`` and ``rest``, 0.
    """

    fixed_us: NotNegative = 0.0
    per_row_us: NotNegative = 0.0
    per_row_ktoken_us: NotNegative = 0.0
    at_least_us: NotNegative = 0.0
    beyond_rows: NotNegative = 0.0
    per_row_beyond_us: NotNegative = 0.0


class Scale(_Section):
    """Factors on stage times, for a host that is faster or slower than the measured one.

    ``ffn_prefill``: of the FFN in steps with prompts, as their times are measured apart.
    """

    attention: Positive = 1.0
    ffn: Positive = 1.0
    rest: Positive = 1.0
    prefill: Positive = 1.0
    ffn_prefill: Positive = 1.0


class Fewer(_Section):
    """Stage times of steps in which only ``active`` attention instances have requests.

    Roles that share processor cores leave more of them to each other then.
    """

    active: Count
    measured: Path
    scale: Scale = Scale()


class Times(_Section):
    """Stage times: stated, from a file of measured times (afd_planner/cost/measured.py), or both.

    If both have a stage, the stated time counts. ``fewer``: of steps with fewer than all attention
    instances; a number that is not listed takes the times of all.
    """

    attention: Linear | None = None
    ffn: Linear | None = None
    rest: Linear | None = None
    prefill: Linear | None = None  # default: attention without context
    measured: Path | None = None
    scale: Scale = Scale()
    fewer: tuple[Fewer, ...] = ()
    experts_held: Positive | None = None  # experts per FFN instance, to look up measured FFN times

    @model_validator(mode="after")
    def _complete(self) -> Times:
        if self.measured is None and (self.attention is None or self.ffn is None):
            raise ValueError("names no measured file, so it needs attention and ffn times")
        return self


class Wire(_Section):
    """The full-duplex network between the pools.

    ``delivery``: with ``broadcast``, every FFN instance gets every row. With ``routed``, only those
    that hold one of a row's top_k experts do; routing is assumed to be even. Without
    ``gbit_per_s``, a message takes the time measured for its size, and messages do not queue.
    """

    gbit_per_s: Positive | None = None  # of one accelerator's link
    latency_us: NotNegative = 0.0
    out_bytes_per_row: NotNegative
    back_bytes_per_row: NotNegative
    delivery: Literal["broadcast", "routed"] = "broadcast"
    top_k: Count | None = None

    @model_validator(mode="after")
    def _has_top_k(self) -> Wire:
        if self.delivery == "routed" and self.top_k is None:
            raise ValueError("delivery routed needs top_k, the number of experts per row")
        return self


class Jitter(_Section):
    """Random stage times: a factor of mean 1 on each time, and optional spikes.

    ``lognormal`` and ``uniform`` draw the factor with coefficient of variation ``variation``;
    ``values`` draws it from a list, e.g. of measured times, divided by its mean. With probability
    ``spike_chance``, a time is longer by ``spike_us``.
    """

    kind: Literal["none", "lognormal", "uniform", "values"] = "none"
    variation: NotNegative = 0.0
    values: tuple[Positive, ...] = ()
    spike_chance: Annotated[float, Field(ge=0, le=1)] = 0.0
    spike_us: NotNegative = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> Jitter:
        if self.kind == "values" and not self.values:
            raise ValueError("kind values needs the list values")
        if self.kind == "uniform" and self.variation > 3**-0.5:
            raise ValueError("a uniform factor has a variation of at most 0.577; use lognormal")
        return self


class Jitters(_Section):
    attention: Jitter = Jitter()
    ffn: Jitter = Jitter()
    wire: Jitter = Jitter()
    rest: Jitter = Jitter()


class Imbalance(_Section):
    """Uneven expert loads: experts are drawn per row, and the busiest rank sets an instance's time.

    Attributes:
        routing: File of measured expert loads, as in afd_planner/data/routing.
        text: Name of a text in that file.
        ranks: Expert-parallel ranks per FFN instance; 1 means tensor parallelism.
        experts, top_k: Of the simulated model; default: those of the file.
    """

    routing: Path
    text: str
    ranks: Count = 1
    experts: Count | None = None
    top_k: Count | None = None


class Lengths(_Section):
    """Distribution of the tokens of prompts or answers, with mean ``tokens``.

    ``spread`` is the coefficient of variation of ``lognormal``, and the relative half width of
    ``uniform``: tokens * (1 +- spread).
    """

    kind: Literal["fixed", "uniform", "lognormal"] = "fixed"
    tokens: Positive
    spread: NotNegative = 0.0


class Arrivals(_Section):
    """Arrivals of requests.

    ``together``: all at time 0. ``steady``: 1 / per_s apart. ``poisson``: per_s on average.
    ``gamma``: gaps of gamma distribution with shape ``burstiness``, as `vllm bench serve
    --burstiness`; 1 is Poisson, less is burstier. ``bursty``: Poisson bursts of ``burst`` requests
    on average (geometric). ``trace``: a CSV file with the columns arrival_s, prompt, output.
    """

    kind: Literal["together", "steady", "poisson", "gamma", "bursty", "trace"]
    per_s: Positive | None = None
    burstiness: Positive = 1.0
    burst: Annotated[float, Field(ge=1)] = 8.0
    file: Path | None = None

    @model_validator(mode="after")
    def _complete(self) -> Arrivals:
        if self.kind == "trace" and self.file is None:
            raise ValueError("kind trace needs file")
        if self.kind not in ("together", "trace") and self.per_s is None:
            raise ValueError(f"kind {self.kind} needs per_s, requests per second")
        return self


class Constant(_Section):
    """The same decode batch in every step: rows per attention instance, context tokens per row."""

    rows: Count
    context: NotNegative = 0.0
    steps: Count = 50


class Requests(_Section):
    """A load of requests, batched continuously.

    ``prefill``: with ``here``, attention instances process the prompts. With ``elsewhere``,
    requests arrive with their KV cache. ``max_concurrency``: requests that the client has open at
    a time; the next is sent when one ends. ``client_ms``: time of a request outside the scheduler
    (HTTP, tokens to text), until it is in the queue. ``measure_from_s``, ``measure_until_s``: the
    result covers only the steps that begin and the requests that are sent in this time.
    """

    arrivals: Arrivals
    count: Count | None = None  # default for a trace: all its requests
    prompt: Lengths | None = None
    output: Lengths | None = None
    prefill: Literal["here", "elsewhere"] = "here"
    max_batch: Count = 256  # requests per attention instance
    max_tokens: Count = MAX_TOKENS  # tokens per step and attention instance
    kv_tokens: Count | None = None  # KV cache per attention instance; None: unlimited
    max_concurrency: Count | None = None
    client_ms: NotNegative = 0.0
    measure_from_s: NotNegative = 0.0
    measure_until_s: Positive | None = None
    max_steps: Count = 1_000_000

    @model_validator(mode="after")
    def _complete(self) -> Requests:
        if self.arrivals.kind != "trace":
            for name in ("count", "prompt", "output"):
                if getattr(self, name) is None:
                    raise ValueError(f"needs {name} unless arrivals come from a trace")
        if self.measure_until_s is not None and self.measure_until_s <= self.measure_from_s:
            raise ValueError("measure_until_s must be above measure_from_s")
        if self.max_tokens < self.max_batch:
            raise ValueError("max_tokens is below max_batch; a step needs a token per request")
        return self


class Failure(_Section):
    """One instance fails at ``at_s`` and is back ``back_after_s`` later, or never without it.

    Give ffn or attention. An FFN instance that is lost for good ends the run: its experts are on no
    other instance.
    """

    at_s: NotNegative
    back_after_s: Positive | None = None
    ffn: Index | None = None
    attention: Index | None = None

    @property
    def back_at_s(self) -> float:
        """Moment at which the instance is back; inf if never."""
        return math.inf if self.back_after_s is None else self.at_s + self.back_after_s

    @model_validator(mode="after")
    def _names_one(self) -> Failure:
        if (self.ffn is None) == (self.attention is None):
            raise ValueError("a failure needs either ffn or attention, the number of an instance")
        return self


class Spec(_Section):
    """One simulation. :func:`load_spec` makes its paths absolute."""

    name: str = Field(min_length=1)
    sources: tuple[str, ...] = ()  # origin of the numbers, printed with the result
    attention: Pool
    ffn: Pool
    layers: Count  # layers with a remote FFN; put the time of other layers into rest
    depth: Annotated[int, Field(ge=1, le=3)] = 3
    min_rows: Count = 1  # per micro-batch; pipeline.min_rows of a deployment
    attention_pattern: tuple[Positive, ...] = (1.0,)  # relative attention time per layer, repeated
    times: Times
    wire: Wire | None = None  # None: transfers take no time
    jitter: Jitters = Jitters()
    imbalance: Imbalance | None = None
    constant: Constant | None = None
    requests: Requests | None = None
    failures: tuple[Failure, ...] = ()
    detect_s: NotNegative = 0.0  # until the FFN stops waiting for a dead attention instance

    @model_validator(mode="after")
    def _consistent(self) -> Spec:
        if (self.constant is None) == (self.requests is None):
            raise ValueError("give the load as either constant or requests")
        if self.wire and self.wire.gbit_per_s is None and self.times.measured is None:
            raise ValueError("wire needs gbit_per_s where times names no measured file")
        listed = [fewer.active for fewer in self.times.fewer]
        if len(set(listed)) < len(listed) or max(listed, default=0) >= self.attention.instances:
            raise ValueError(
                f"times.fewer needs different numbers of active instances below"
                f" {self.attention.instances}, the attention instances"
            )
        for failure in self.failures:
            for pool, index in (("ffn", failure.ffn), ("attention", failure.attention)):
                count = (self.ffn if pool == "ffn" else self.attention).instances
                if index is not None and index >= count:
                    raise ValueError(
                        f"failures name {pool} instance {index}; there are 0 to {count - 1}"
                    )
        if self.constant and any(f.attention is not None for f in self.failures):
            raise ValueError(
                "a failing attention instance needs a load of requests, not a constant one"
            )
        return self

    @property
    def gpus(self) -> int:
        """Number of accelerators of both pools."""
        return self.attention.instances * self.attention.gpus + self.ffn.instances * self.ffn.gpus


_PATHS = (("times", "measured"), ("imbalance", "routing"), ("requests", "arrivals", "file"))


def load_spec(path: Path) -> Spec:
    """Reads a simulation file. Paths in it are relative to its folder. Raises ConfigError."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigError(f"cannot read {path} ({err.strerror}); give a simulation YAML") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path.name} is not a text file; give a simulation YAML") from None
    except yaml.YAMLError as err:
        raise ConfigError(f"{path.name} is not YAML: {' '.join(str(err).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path.name} is not a simulation; it must have keys such as layers:")
    base = path.absolute().parent
    for place in _PATHS:
        _make_absolute(data, place, base)
    times = data.get("times")
    fewer = times.get("fewer") if isinstance(times, dict) else None
    for entry in fewer if isinstance(fewer, list) else ():
        _make_absolute({"fewer": entry}, ("fewer", "measured"), base)
    return parse_spec(data, path.name)


def parse_spec(data: dict[str, Any], name: str) -> Spec:
    """Returns the spec of a parsed file; ``name`` names it in messages. Raises ConfigError."""
    try:
        return Spec.model_validate_json(json.dumps(data, default=str))
    except ValidationError as err:
        raise ConfigError(sentence(err, Spec, name)) from None


def _make_absolute(data: dict[str, Any], place: tuple[str, ...], base: Path) -> None:
    section: Any = data
    for name in place[:-1]:
        section = section.get(name)
        if not isinstance(section, dict):
            return
    if isinstance(section.get(place[-1]), str):
        section[place[-1]] = str((base / section[place[-1]]).resolve())
