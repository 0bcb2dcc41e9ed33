"""The deployment file: every key, its default and its valid values.

``load_config`` reads the YAML file into a frozen ``Deployment`` and raises a one-sentence
``ConfigError`` for a mistake. ``afd.config.resolve.check_model`` checks it against the checkpoint.

An instance is an attention server or an FFN instance; a rank is one process of an FFN instance.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from afd.config.choices import Choice, choices
from afd.config.fp8 import fp8_of
from afd.config.hosts import Host, check_hosts, places_of
from afd.config.messages import sentence
from afd.config.transport import Section, Transport
from afd.config.values import check_device, device_value, moe_backend, reduce_format, reducer
from afd.config.vllm_arguments import checks_api_key, refusal
from afd.config.yaml_file import override, read_sections
from afd.devices import ROCM, device_named
from afd.errors import ConfigError
from afd.models.hub import cached_folder, is_hub_name
from afd.places import HostPlaces, Pool

Port = Annotated[int, Field(ge=0, le=65535)]
Cores = tuple[Annotated[int, Field(ge=0)], ...]
CoreLists = Literal["auto"] | tuple[Cores, ...]
Device = Annotated[str, AfterValidator(device_value)]

MAX_DEPTH = 3
_KERNELS = {
    choice.name: choice
    for choice in (
        Choice("vllm"),
        Choice("mqa", ("cuda",)),
        Choice("aiter", ("rocm",)),
        Choice("triton", ("rocm",)),
    )
}
CORE_LISTS = "auto or a list of core lists, one per process, such as [[0, 1], [2, 3]]"


def _check_core_lists(cpus: CoreLists, processes: int) -> None:
    if cpus == "auto":
        return
    if len(cpus) != processes:
        raise ValueError(
            f"cpus has {len(cpus)} core lists for {processes} processes; give one list each"
        )
    if any(not cores for cores in cpus):
        raise ValueError("cpus has an empty core list; give every process at least one core")


class Attention(Section):
    """The attention instances: vLLM servers that hold all weights except the experts."""

    instances: int = Field(default=1, ge=1)  # number of attention instances
    device: Device = "cpu"  # cpu, cuda or rocm; another than ffn.device needs verbs or tcp
    # Serving dtype of both sides; auto: the checkpoint's dtype
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int = Field(default=2048, ge=1)  # tokens per request: prompt plus output
    max_num_seqs: int = Field(default=64, ge=1)  # requests per step and instance
    max_num_batched_tokens: int = Field(default=1024, ge=1)  # tokens per step and instance
    kv_cache_gib: float = Field(default=1.0, gt=0)  # GiB per instance; CPUs allocate it at start
    enable_prefix_caching: bool = True  # reuse the KV cache of equal prompt prefixes
    host: str = "127.0.0.1"  # address on which the instances listen for HTTP
    port: Port = 8100  # instance i listens on port + i; 0: any free port
    # Cores of each instance; auto: `afd serve` distributes the cores of the host
    cpus: CoreLists = Field(default="auto", description=CORE_LISTS)
    # Decode attention kernel. vllm: vLLM's choice; mqa: this project's kernel for an FP8 KV cache
    # with one key/value head, device cuda only (docs/gpu.md); aiter, triton: vLLM's backends of
    # these names, device rocm only (docs/amd.md)
    kernel: Literal["vllm", "mqa", "aiter", "triton"] = "vllm"
    # Extra arguments for vLLM's server, passed unchanged; those that AFD sets itself or does not
    # support are refused
    vllm_args: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Attention:
        _check_core_lists(self.cpus, self.instances)
        check_device("kernel", _KERNELS[self.kernel], self.device, "leave kernel at vllm")
        if refused := refusal(self.vllm_args):
            raise ValueError(f"vllm_args has {refused}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs"
                f" {self.max_num_seqs}, but a step has at least one token per request;"
                " raise max_num_batched_tokens or lower max_num_seqs"
            )
        if self.port + self.instances - 1 > 65535:
            raise ValueError(
                f"port {self.port} leaves no room below 65536 for {self.instances} instances;"
                " lower port"
            )
        return self

    def api_ports(self) -> tuple[int, ...]:
        """One port per instance; all 0 if any free port may be used."""
        return tuple(self.port + i if self.port else 0 for i in range(self.instances))


class Ffn(Section):
    """The FFN instances. They divide the experts of every layer among them; each instance is
    ``tp`` processes (ranks)."""

    instances: int = Field(default=1, ge=1)  # number of FFN instances
    tp: int = Field(default=1, ge=1)  # ranks per instance; each holds a slice of every expert
    # Format in which the ranks of an instance add up partial results: exact, or a block format
    # that sends fewer bytes and rounds (docs/allreduce.md)
    reduce: Annotated[str, AfterValidator(reduce_format)] = "exact"
    # Library that adds them up (docs/allreduce.md); auto: this project's quickreduce for block
    # formats, and for exact sums where it was measured. aiter_quickreduce: AITER's, device rocm
    reduce_backend: Annotated[str, AfterValidator(reducer)] = "auto"
    device: Device = "cpu"  # cpu, cuda or rocm; see attention.device
    # Device rocm: architecture of the FFN instances' GPUs, gfx942 (MI300X, MI325X) or gfx950
    # (MI350X, MI355X). It decides the FP8 type of the wire. auto: as found on their host
    arch: Literal["auto", "gfx942", "gfx950"] = "auto"
    # Kernels that compute the experts (docs/experts.md); auto: the first backend that runs here.
    # On GPUs, vllm_cuda runs colocated vLLM's own kernel: set it to compare tokens with colocated
    # vLLM, because other backends round differently.
    backend: Annotated[str, AfterValidator(moe_backend)] = "auto"
    # Format in which expert weights are held; auto: as stored in the checkpoint
    weights: Literal["auto", "plain", "fp8_block", "mxfp4"] = "auto"
    load: Literal["checkpoint", "dummy"] = "checkpoint"  # dummy: random experts, for benchmarks
    # Compute threads per rank; auto: one per core of the rank
    threads: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="auto (one per core of the process) or a whole number of at least 1",
    )
    # Cores of each rank; auto: `afd serve` distributes the cores of the host
    cpus: CoreLists = Field(default="auto", description=CORE_LISTS)
    # Milliseconds that a step waits at its start for active attention instances
    step_wait_ms: float = Field(default=10.0, ge=0)
    # Milliseconds after which an attention instance that stalls inside a step is dropped from it;
    # its rows are then computed in a step of their own
    late_ms: float = Field(default=1000.0, gt=0)
    redundant_experts: int = Field(default=0, ge=0)  # spare expert slots per instance and layer
    # File that says which instance holds which expert; null: contiguous ranges
    placement: Path | None = Field(
        default=None, description="the path of a file made by afd placement, or null"
    )
    # slices: every instance computes a slice of each shared expert for all rows. rows: an instance
    # computes the whole shared expert for the rows whose first routed expert it holds.
    # auto: rows if wire.dispatch is routed, else slices
    shared_experts: Literal["auto", "slices", "rows"] = "auto"

    @model_validator(mode="after")
    def _consistent(self) -> Ffn:
        _check_core_lists(self.cpus, self.ranks)
        if self.reduce != "exact" and self.tp == 1:
            raise ValueError(
                f"reduce {self.reduce} needs several ranks to add up, but tp is 1;"
                " set tp to 2 or more, or leave reduce at exact"
            )
        if self.backend != "auto":
            chosen = choices("moe_backend")[self.backend]
            check_device("backend", chosen, self.device, "use backend auto")
        if self.reduce_backend != "auto":
            adder = choices("reduce_backend")[self.reduce_backend]
            check_device("reduce_backend", adder, self.device, "use reduce_backend auto")
            if self.tp == 1:
                raise ValueError(
                    f"reduce_backend {self.reduce_backend} needs several ranks to add up, but tp is"
                    " 1; set tp to 2 or more, or leave reduce_backend at auto"
                )
        if self.arch != "auto" and self.device != ROCM.name:
            raise ValueError(
                f"arch {self.arch} is an AMD GPU, but device is {self.device}; set device: rocm on"
                " both sides, or remove arch"
            )
        if self.late_ms < self.step_wait_ms:
            raise ValueError(
                f"late_ms {self.late_ms:g} is below step_wait_ms {self.step_wait_ms:g}, but an"
                " instance cannot be late before the step has waited for it; raise late_ms"
            )
        return self

    @property
    def ranks(self) -> int:
        """Number of FFN processes of the deployment; each has one device."""
        return self.instances * self.tp


class Pipeline(Section):
    """How a step is split into micro-batches."""

    # Micro-batches in flight per step; auto: chosen from measured step times (docs/depth.md)
    depth: Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_DEPTH)] = Field(
        default=3, description=f"auto or a whole number from 1 to {MAX_DEPTH}"
    )
    # Target time per output token in milliseconds, used if depth is auto; null: no target
    tpot_ms: float | None = Field(
        default=None, gt=0, description="a number of milliseconds above 0, or null"
    )
    min_rows: int = Field(default=4, ge=1)  # fewest rows per micro-batch; smaller steps split less
    graphs: bool = True  # on GPUs: capture decode steps as graphs and replay them, on both sides
    lookahead: bool = False  # prepare the next step during a replay; for its cost see docs/gpu.md

    @property
    def max_depth(self) -> int:
        """Largest number of micro-batches per step; slots and graphs are made for it."""
        return MAX_DEPTH if self.depth == "auto" else self.depth


class Wire(Section):
    """How rows travel between attention and FFN instances."""

    # Format of rows: exact (the serving dtype), or fp8 or mxfp4, which are smaller and round
    # (docs/formats.md)
    format: Literal["exact", "fp8", "mxfp4"] = "exact"
    # FP8 type of formats fp8 and mxfp4; auto: what the FFN instances' GPUs multiply, which is
    # e4m3fnuz on gfx942 (MI300X) and e4m3fn elsewhere
    fp8: Literal["auto", "e4m3fn", "e4m3fnuz"] = "auto"
    # broadcast: every row goes to all FFN instances. routed: a row goes to the instances that hold
    # one of its experts. auto: routed if it sends clearly fewer bytes
    dispatch: Literal["auto", "broadcast", "routed"] = "auto"


class Control(Section):
    """The control plane, where every role registers."""

    # tcp://HOST:PORT; auto: a free local port, or with hosts port 5555 of the control host
    address: str = "auto"
    # Host that runs the control plane and the gateway; null: the first of hosts
    host: str | None = None
    # Largest difference between the clocks of two hosts, seconds. Generations of members start
    # from the clock, so they would go back if the control plane moved to a host that is behind
    clock_s: float = Field(default=2.0, gt=0)
    # Key file that encrypts and authenticates the control plane; null: a plain local socket
    keys: Path | None = Field(
        default=None, description="the path of a key file made by afd keys, or null"
    )
    heartbeat_s: float = Field(default=0.5, gt=0)  # seconds between heartbeats of a role
    timeout_s: float = Field(default=3.0, gt=0)  # seconds without heartbeat until a role is dropped

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
                f"timeout_s {self.timeout_s:g} is below two heartbeats of {self.heartbeat_s:g} s,"
                " so one late heartbeat would drop a healthy role; raise timeout_s"
            )
        return self


class Tls(Section):
    """TLS of the gateway's port. Both files are PEM; the key has no password."""

    certificate: Path  # the certificate, then the chain behind it
    key: Path


class Gateway(Section):
    """The OpenAI endpoint that users send requests to."""

    host: str = "127.0.0.1"  # address on which the gateway listens
    port: Port = 8000  # 0: any free port
    api_keys: Path | None = None  # hashes of the API keys that clients need; null: none needed
    tls: Tls | None = None  # null: plain HTTP


class Deadlines(Section):
    """Time limits, in seconds."""

    hosts_s: float = Field(default=600.0, gt=0)  # start-up, until every host has come
    start_s: float = Field(default=180.0, gt=0)  # then, until every role is ready
    ffn_s: float = Field(default=60.0, gt=0)  # attention's wait for an FFN, including its restart
    stuck_s: float = Field(default=20.0, gt=0)  # one expert call; a longer one is hung
    drain_s: float = Field(default=30.0, ge=0)  # shutdown, for running requests to finish


class Restart(Section):
    """How often a role that ended is started again."""

    max_restarts: int = Field(default=3, ge=0)  # per role within window_s; then the deployment ends
    window_s: float = Field(default=60.0, gt=0)  # seconds over which restarts are counted


class Metrics(Section):
    """Prometheus metrics (docs/metrics.md)."""

    enabled: bool = True  # every role serves /metrics
    stage_every: int = Field(default=0, ge=0)  # take stage timestamps every n-th step; 0: never


def _takes_gpus(device: str) -> bool:
    return bool(device_named(device).visible_variables)


def _folder_name(data: dict[str, Any]) -> str:
    return data["model"].name if "model" in data else "model"  # absent if it was refused


class Deployment(Section):
    """One deployment file. ``load_config`` makes its paths absolute."""

    # Folder of a Hugging Face checkpoint, or its name on the Hub if it is in the Hub's cache
    model: Path
    # Model name in the OpenAI API; default: the name of the checkpoint's folder
    served_model_name: str = Field(default_factory=_folder_name, min_length=1)
    # The machines of the deployment and what runs on each (docs/hosts.md); empty: one machine
    hosts: tuple[Host, ...] = ()
    # Number of GPUs that all processes of a host share, to try a topology on fewer GPUs than it
    # has processes; null: one GPU per process
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
                f" {self.attention.port}); choose another gateway.port"
            )
        return self

    @model_validator(mode="after")
    def _one_checks_keys(self) -> Deployment:
        if self.gateway.api_keys is not None and checks_api_key(self.attention.vllm_args):
            raise ValueError(
                "gateway.api_keys and vLLM's --api-key both check the client's key; remove"
                " --api-key from attention.vllm_args"
            )
        return self

    @model_validator(mode="after")
    def _devices_reach_each_other(self) -> Deployment:
        sides, backend = (self.attention.device, self.ffn.device), self.transport.backend
        for name in sides:
            if backend == "shm" and not device_named(name).host_memory:
                raise ValueError(
                    f"transport.backend shm cannot reach the memory of a {name} device;"
                    " use auto, ipc, verbs or tcp"
                )
        if backend == "ipc" and len(set(sides)) > 1:
            raise ValueError(
                f"transport.backend ipc connects devices of one kind, but attention.device is"
                f" {sides[0]} and ffn.device is {sides[1]}; use auto, verbs or tcp"
            )
        return self

    @model_validator(mode="after")
    def _fp8_fits(self) -> Deployment:
        if self.wire.format != "exact":
            fp8_of(self.ffn.device, self.ffn.arch, self.wire.fp8)
        return self

    @model_validator(mode="after")
    def _stamps_fit(self) -> Deployment:
        device = device_named(self.attention.device)
        replayed = self.pipeline.graphs and device.captures_graphs
        if self.metrics.stage_every and replayed and not device.stamps_in_graphs:
            raise ValueError(
                f"metrics.stage_every {self.metrics.stage_every} takes timestamps inside captured"
                f" graphs, which torch cannot do on device {device.name}; set"
                " metrics.stage_every: 0, or pipeline.graphs: false"
            )
        return self

    @model_validator(mode="after")
    def _gpus_fit(self) -> Deployment:
        if self.gpus is None:
            return self
        on_gpus = _takes_gpus(self.attention.device), _takes_gpus(self.ffn.device)
        if not any(on_gpus):
            raise ValueError(
                f"gpus is the number of GPUs to share, but device is {self.ffn.device}; remove gpus"
            )
        wanted = self.attention.instances * on_gpus[0] + self.ffn.ranks * on_gpus[1]
        if self.gpus > wanted:
            raise ValueError(
                f"gpus is {self.gpus} but the deployment has only {wanted} GPU processes;"
                " remove gpus"
            )
        if on_gpus[1] and self.gpus < self.ffn.tp:
            raise ValueError(
                f"gpus is {self.gpus} but ffn.tp is {self.ffn.tp}, and the ranks of an FFN instance"
                " need a GPU each; raise gpus or lower ffn.tp"
            )
        return self

    @model_validator(mode="after")
    def _hosts_fit(self) -> Deployment:
        verbs = self.transport
        if verbs.backend == "verbs" and not verbs.verbs.ports and not self.hosts:
            raise ValueError(
                "transport.backend verbs needs verbs.ports, the RDMA ports to use, such as"
                " [mlx5_0:1]; `afd doctor` lists the ports of this host"
            )
        if self.hosts:
            check_hosts(self.hosts, self.transport, self.attention.host)
        self.places()
        named = self.control.host
        if named is not None and named not in [host.name for host in self.hosts]:
            known = ", ".join(host.name for host in self.hosts) or "none"
            raise ValueError(f"control.host is {named}, but hosts names {known}; use one of these")
        if len(self.hosts) > 1 and self.control.keys is None:
            raise ValueError(
                f"control.keys is missing, but {len(self.hosts)} hosts need the same keys; make a"
                " file with `afd keys FILE`, copy it to every host, and set control.keys to it"
            )
        return self

    def places(self) -> tuple[HostPlaces, ...]:
        """Which host runs which instances; one nameless host if the file names none."""
        attention, ffn = self.attention, self.ffn
        return places_of(
            self.hosts,
            Pool("attention", attention.instances, int(_takes_gpus(attention.device))),
            Pool("ffn", ffn.instances, ffn.tp if _takes_gpus(ffn.device) else 0),
            shared=self.gpus is not None,
        )

    def place_of(self, host: str) -> HostPlaces:
        """What runs on one host. host: its name; "" if the file names no hosts."""
        return next(place for place in self.places() if place.name == host)

    def plain(self) -> dict[str, Any]:
        """JSON-ready data; ``from_plain`` makes an equal deployment from it."""
        return self.model_dump(mode="json")

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Deployment:
        # Via JSON, because strict mode then accepts a list as a tuple and text as a Path.
        return cls.model_validate_json(json.dumps(data))


PATHS = (
    ("model",),
    ("control", "keys"),
    ("ffn", "placement"),
    ("gateway", "api_keys"),
    ("gateway", "tls", "certificate"),
    ("gateway", "tls", "key"),
)


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Deployment:
    """Read one deployment file. Does not read the checkpoint (see ``check_model``).

    Args:
        path: the YAML file. Relative paths inside it are resolved against its folder.
        overrides: strings such as ``pipeline.depth=2``, which replace keys of the file.

    Raises:
        ConfigError: the file cannot be read, or a key is wrong; one sentence.
    """
    path = Path(path)
    data = read_sections(path, Deployment)
    for item in overrides:
        override(data, item, path.name)
    base = path.absolute().parent
    _resolve_hub_name(data, base)
    for place in PATHS:
        _resolve_path(data, place, base)
    try:
        return Deployment.model_validate_json(json.dumps(data, default=str))
    except ValidationError as err:
        raise ConfigError(sentence(err, Deployment, path.name)) from None


def _resolve_hub_name(data: dict[str, Any], base: Path) -> None:
    """Replaces ORGANISATION/NAME by its folder in the Hugging Face cache, unless a folder of that
    name is beside the file. The name stays the model's name in the API."""
    name = data.get("model")
    if isinstance(name, str) and is_hub_name(name) and not (base / name).exists():
        folder = cached_folder(name)
        if folder is not None:
            data["model"] = str(folder)
            data.setdefault("served_model_name", name.partition("@")[0])


def _resolve_path(data: dict[str, Any], place: tuple[str, ...], base: Path) -> None:
    *sections, key = place
    section: Any = data
    for name in sections:
        section = section.get(name)
        if not isinstance(section, dict):
            return
    if isinstance(section.get(key), str) and section[key]:
        section[key] = str((base / Path(section[key]).expanduser()).resolve())
