"""The deployment file a user writes: its keys, their defaults, and what they may be.

``load_config`` reads the YAML and answers a frozen ``Deployment``; whatever is wrong with the file
is a ``ConfigError`` of one sentence. ``check_model`` compares it with the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from afd.config_messages import sentence, subsection
from afd.config_transport import Section, Transport
from afd.errors import ConfigError
from afd.topology import width_slices

Port = Annotated[int, Field(ge=0, le=65535)]
Cores = tuple[Annotated[int, Field(ge=0)], ...]
CoreLists = Literal["auto"] | tuple[Cores, ...]
Device = Literal["cpu", "cuda"]

MAX_DEPTH = 3
CORE_LISTS = "auto or a list of core lists, one per process, such as [[0, 1], [2, 3]]"


def _check_core_lists(cpus: CoreLists, processes: int) -> None:
    if cpus == "auto":
        return
    if len(cpus) != processes:
        raise ValueError(
            f"cpus has {len(cpus)} core lists for {processes} processes; give one list each"
        )
    if any(not cores for cores in cpus):
        raise ValueError("cpus has an empty core list; name at least one core for every instance")


class Attention(Section):
    """The attention pool: x vLLM servers that hold everything but the experts."""

    instances: int = Field(default=1, ge=1)
    device: Device = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: the checkpoint's
    max_model_len: int = Field(default=2048, ge=1)  # tokens, prompt and answer together
    max_num_seqs: int = Field(default=64, ge=1)  # requests per step
    max_num_batched_tokens: int = Field(default=1024, ge=1)  # tokens per step
    kv_cache_gib: float = Field(default=1.0, gt=0)  # per instance; on CPUs resident from the start
    enable_prefix_caching: bool = True
    host: str = "127.0.0.1"
    port: Port = 8100  # instance i serves at port + i; 0 = any free
    cpus: CoreLists = Field(default="auto", description=CORE_LISTS)
    # of decode: vLLM's choice, or ours for an FP8 cache of one key/value head (docs/gpu.md)
    kernel: Literal["vllm", "mqa"] = "vllm"
    vllm_args: tuple[str, ...] = ()  # given to vLLM's server unchanged

    @model_validator(mode="after")
    def _consistent(self) -> Attention:
        _check_core_lists(self.cpus, self.instances)
        if self.kernel == "mqa" and self.device != "cuda":
            raise ValueError(
                f"kernel mqa runs on device cuda, not {self.device}; leave kernel at vllm"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs"
                f" {self.max_num_seqs}; a step needs at least one token per request"
            )
        if self.port + self.instances - 1 > 65535:
            raise ValueError(
                f"port {self.port} + {self.instances} instances passes 65535; lower port"
            )
        return self

    def api_ports(self) -> tuple[int, ...]:
        """One port per instance; all 0 where any free port will do."""
        return tuple(self.port + i if self.port else 0 for i in range(self.instances))


class Ffn(Section):
    """The FFN pool: y instances that share every layer's experts among them, of ``tp`` processes
    each."""

    instances: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)  # ranks of an instance: each holds a slice of every expert
    # how the ranks of an instance add up their partial results: exactly, or in fewer bytes
    reduce: Literal["exact", "int8", "int6", "int4", "fp4"] = "exact"
    device: Device = "cpu"
    backend: Literal[
        "auto",
        "torch",
        "reference",
        "vllm_cpu",
        "vllm_cuda",
        "aiter",
        "triton",
        "deep_gemm",
        "grouped",
        "hopper",
    ] = "auto"
    weights: Literal["auto", "plain", "fp8_block", "mxfp4"] = "auto"  # of experts; auto: as stored
    load: Literal["checkpoint", "dummy"] = "checkpoint"  # dummy: random experts, for benchmarks
    threads: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="auto (one per core of the instance) or a whole number of at least 1",
    )
    cpus: CoreLists = Field(default="auto", description=CORE_LISTS)
    # how long a step waits for active attention instances
    step_wait_ms: float = Field(default=10.0, ge=0)
    late_ms: float = Field(default=1000.0, gt=0)  # later than this inside a step: served on its own
    redundant_experts: int = Field(default=0, ge=0)  # spare slots per instance and layer (copies)
    placement: Path | None = Field(  # which instance holds which expert; null: in order
        default=None, description="the path of a file made by afd placement, or null"
    )
    # A slice of every shared expert on each instance, or all of it for the rows that an instance
    # computes the first expert of; auto: rows where rows are routed
    shared_experts: Literal["auto", "slices", "rows"] = "auto"

    @model_validator(mode="after")
    def _consistent(self) -> Ffn:
        _check_core_lists(self.cpus, self.ranks)
        if self.reduce != "exact" and self.tp == 1:
            raise ValueError(
                f"reduce {self.reduce} is how the ranks of an instance add up, but tp is 1 and"
                " there is nothing to add; set tp to 2 or more, or leave reduce at exact"
            )
        fitting = {"vllm_cpu": "cpu", "vllm_cuda": "cuda"}.get(self.backend, self.device)
        if self.device != fitting:
            raise ValueError(
                f"backend {self.backend} runs on device {fitting}, not {self.device};"
                " use backend auto"
            )
        if self.late_ms < self.step_wait_ms:
            raise ValueError(
                f"late_ms {self.late_ms:g} is below step_wait_ms {self.step_wait_ms:g};"
                " an instance cannot be late before the step has waited for it"
            )
        return self

    @property
    def ranks(self) -> int:
        """Processes of the pool, one device each."""
        return self.instances * self.tp


class Pipeline(Section):
    # micro-batches in flight per step; auto: as measured step times say (docs/depth.md)
    depth: Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_DEPTH)] = Field(
        default=3, description=f"auto or a whole number from 1 to {MAX_DEPTH}"
    )
    tpot_ms: float | None = Field(  # time per output token asked for, where depth is auto
        default=None, gt=0, description="a number of milliseconds above 0, or null"
    )
    min_rows: int = Field(default=4, ge=1)  # fewest rows worth a micro-batch of their own
    graphs: bool = True  # GPUs: replay decode steps as captured graphs, on both sides
    lookahead: bool = False  # prepare a step while one is replayed; what it costs: docs/gpu.md

    @property
    def max_depth(self) -> int:
        """Most micro-batches that a step may have: slots and graphs are made for so many."""
        return MAX_DEPTH if self.depth == "auto" else self.depth


class Wire(Section):
    format: Literal["exact", "fp8", "mxfp4"] = "exact"
    fp8: Literal["e4m3fn", "e4m3fnuz"] = "e4m3fn"  # e4m3fnuz where an FFN runs on MI300 (gfx942)
    # Rows go to all FFN instances, or to those that compute one of their experts; auto: by bytes
    dispatch: Literal["auto", "broadcast", "routed"] = "auto"

    @property
    def name(self) -> str:
        """What both sides must agree on, in one word or two."""
        return self.format if self.fp8 == "e4m3fn" else f"{self.format} {self.fp8}"


class Control(Section):
    address: str = "auto"  # auto: a free local port that `afd serve` chooses
    keys: Path | None = Field(
        default=None, description="the path of a key file made by afd keys, or null"
    )
    heartbeat_s: float = Field(default=0.5, gt=0)
    timeout_s: float = Field(default=3.0, gt=0)

    @field_validator("address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        host, _, port = value.removeprefix("tcp://").rpartition(":")
        good = value.startswith("tcp://") and host and port.isdigit() and 0 < int(port) < 65536
        if value != "auto" and not good:
            raise ValueError("must be auto or tcp://HOST:PORT")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Control:
        if self.timeout_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"timeout_s {self.timeout_s:g} is below two heartbeats of {self.heartbeat_s:g} s;"
                " one late heartbeat would drop a healthy member"
            )
        return self


class Gateway(Section):
    host: str = "127.0.0.1"
    port: Port = 8000


class Deadlines(Section):
    start_s: float = Field(default=180.0, gt=0)  # until every role is up
    ffn_s: float = Field(
        default=60.0, gt=0
    )  # attention waits for an FFN answer, its restart included
    stuck_s: float = Field(default=20.0, gt=0)  # one expert call; then the FFN instance restarts
    drain_s: float = Field(default=30.0, ge=0)  # running requests may still finish


class Restart(Section):
    max_restarts: int = Field(
        default=3, ge=0
    )  # of one role within window_s; one more ends the deployment
    window_s: float = Field(default=60.0, gt=0)


class Metrics(Section):
    enabled: bool = True
    stage_every: int = Field(default=0, ge=0)  # every n-th step times its stages; 0: none does


def _folder_name(data: dict[str, Any]) -> str:
    return data["model"].name if "model" in data else "model"  # absent where it was refused


class Deployment(Section):
    """One deployment file. ``model`` is absolute once it comes from ``load_config``."""

    model: Path
    served_model_name: str = Field(default_factory=_folder_name, min_length=1)
    # GPUs of the host that the instances share, to try a topology that has more; null: one each
    gpus: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="a whole number of at least 1, or null"
    )
    attention: Attention = Attention()
    ffn: Ffn = Ffn()
    pipeline: Pipeline = Pipeline()
    wire: Wire = Wire()
    transport: Transport = Transport()
    control: Control = Control()
    gateway: Gateway = Gateway()
    deadlines: Deadlines = Deadlines()
    restart: Restart = Restart()
    metrics: Metrics = Metrics()

    @model_validator(mode="after")
    def _ports_differ(self) -> Deployment:
        port = self.gateway.port
        if port and port in self.attention.api_ports():
            raise ValueError(
                f"gateway.port {port} is also the port of an attention instance (attention.port"
                f" {self.attention.port}); choose ports that do not overlap"
            )
        return self

    @model_validator(mode="after")
    def _devices_reach_each_other(self) -> Deployment:
        devices = {self.attention.device, self.ffn.device}
        if len(devices) > 1:
            raise ValueError(
                f"attention.device is {self.attention.device} and ffn.device {self.ffn.device};"
                " use the same kind of device on both sides"
            )
        if devices != {"cpu"} and self.transport.backend not in ("auto", "ipc"):
            raise ValueError(
                f"transport.backend {self.transport.backend} does not carry memory of a"
                f" {self.ffn.device} device; use auto or ipc"
            )
        return self

    @model_validator(mode="after")
    def _gpus_fit(self) -> Deployment:
        if self.gpus is None:
            return self
        if self.ffn.device == "cpu":
            raise ValueError("gpus says how many GPUs are shared, but device is cpu; leave it out")
        wanted = self.attention.instances + self.ffn.ranks
        if self.gpus > wanted:
            raise ValueError(
                f"gpus is {self.gpus} but the deployment has {wanted} GPU processes; leave it out"
            )
        if self.gpus < self.ffn.tp:
            raise ValueError(
                f"gpus is {self.gpus} but ffn.tp {self.ffn.tp}; the ranks of an instance need a"
                " GPU each"
            )
        return self

    def plain(self) -> dict[str, Any]:
        """JSON-ready data from which ``from_plain`` makes an equal deployment."""
        return self.model_dump(mode="json")

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Deployment:
        # by way of JSON, where strict mode takes a list for a tuple and text for a Path
        return cls.model_validate_json(json.dumps(data))


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Deployment:
    """Read one deployment file; ``overrides`` are strings such as ``pipeline.depth=2``.

    Paths inside the file are relative to it. Raises ConfigError. The checkpoint is not looked at:
    see ``check_model``.
    """
    path = Path(path)
    data = _read_yaml(path)
    for item in overrides:
        _apply(data, item, path.name)
    for place in (("model",), ("control", "keys"), ("ffn", "placement")):
        _resolve_path(data, place, path.absolute().parent)
    try:
        return Deployment.model_validate_json(json.dumps(data, default=str))
    except ValidationError as err:
        raise ConfigError(sentence(err, Deployment, path.name)) from None


def check_model(deployment: Deployment) -> None:
    """Compare the deployment with the checkpoint it names; raises ConfigError."""
    from afd.models import read_model
    from afd.resolve import check_experts

    if not (deployment.model / "config.json").is_file():
        what = "has no config.json" if deployment.model.is_dir() else "is not a folder"
        raise ConfigError(
            f"model {deployment.model} {what}; give the path of a Hugging Face checkpoint"
            " (config.json and *.safetensors), relative to the deployment file"
        )
    _, model = read_model(deployment.model)
    if deployment.ffn.instances > model.num_experts:
        raise ConfigError(
            f"ffn.instances is {deployment.ffn.instances} but {deployment.model.name} has"
            f" {model.num_experts} experts per layer; use at most {model.num_experts} FFN instances"
        )
    check_experts(deployment, model)
    width_slices(model.moe_intermediate, deployment.ffn.tp)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}; give the path of a deployment YAML") from None
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"cannot read {path}: {err}") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as err:
        raise ConfigError(f"{path.name} is not YAML: {' '.join(str(err).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path.name} is not a deployment file; it must hold keys such as model:")
    # "ffn:" with nothing below it is an empty section, as a reader of the file would take it
    fields = Deployment.model_fields
    return {
        key: {} if value is None and subsection(fields.get(key)) else value
        for key, value in data.items()
    }


def _apply(data: dict[str, Any], item: str, source: str) -> None:
    key, equals, text = item.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {item} is not KEY=VALUE; write it like --set pipeline.depth=2")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {item}: the value is not YAML; quote it") from None
    section = data
    for part in parts[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(f"--set {item}: {part} in {source} is a value, not a section")
    section[parts[-1]] = value


def _resolve_path(data: dict[str, Any], place: tuple[str, ...], base: Path) -> None:
    *sections, key = place
    section: Any = data
    for name in sections:
        section = section.get(name)
        if not isinstance(section, dict):
            return
    if isinstance(section.get(key), str) and section[key]:
        section[key] = str((base / Path(section[key]).expanduser()).resolve())
