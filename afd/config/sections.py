"""The sections of the deployment file: keys, defaults and valid values.

An instance is an attention server or an FFN instance; a rank is one of its workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from afd.config.choices import Choice, choices
from afd.config.speculation import Speculation
from afd.config.transport import Section
from afd.config.values import check_device, device_value, moe_backend, reduce_format, reducer
from afd.config.vllm_arguments import refusal
from afd.devices import ROCM

Port = Annotated[int, Field(ge=0, le=65535)]
Cores = tuple[Annotated[int, Field(ge=0)], ...]
CoreLists = Literal["auto"] | tuple[Cores, ...]
Device = Annotated[str, AfterValidator(device_value)]

MAX_DEPTH = 3
MAX_FFN_ROOM = 32
"""Most FFN instances of a deployment in which they come and go: a request names its receivers in
one 32-bit word (afd/wire/message.py)."""
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

    instances: int = Field(default=1, ge=1)  # number of attention instances at the start
    # Instances that can run at a time, with those that `afd ctl add attention` adds. Slots, ports,
    # keys and GPUs are kept for all of them. null: instances
    max_instances: int | None = Field(
        default=None, ge=1, description="a whole number, at least instances, or null"
    )
    # Ranks per instance: each holds a slice of the attention heads, and sends a share of the rows
    tp: int = Field(default=1, ge=1, le=8)
    device: Device = "cpu"  # cpu, cuda or rocm; another than ffn.device needs verbs or tcp
    # Serving dtype of both sides; auto: the checkpoint's dtype
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int = Field(default=2048, ge=1)  # tokens per request: prompt plus output
    max_num_seqs: int = Field(default=64, ge=1)  # requests per step and instance
    max_num_batched_tokens: int = Field(default=1024, ge=1)  # tokens per step and instance
    # GiB per instance, shared evenly by its ranks; CPUs allocate it at start
    kv_cache_gib: float = Field(default=1.0, gt=0)
    enable_prefix_caching: bool = True  # reuse the KV cache of equal prompt prefixes
    host: str = "127.0.0.1"  # address on which the instances listen for HTTP
    port: Port = 8100  # instance i listens on port + i; 0: any free port
    # Cores of each instance, for all its ranks; auto: `afd serve` distributes the cores of the host
    cpus: CoreLists = Field(default="auto", description=CORE_LISTS)
    # Decode attention kernel. vllm: vLLM's choice; mqa: this project's kernel for an FP8 KV cache
    # with one key/value head, device cuda only (docs/gpu.md); aiter, triton: vLLM's backends of
    # these names, device rocm only (docs/amd.md)
    kernel: Literal["vllm", "mqa", "aiter", "triton"] = "vllm"
    # Norms, rotation, cache write and FP8 rows in few kernels; auto: if device and model allow it
    fused: Literal["auto"] | bool = Field(default=False, description="auto, true or false")
    speculation: Speculation | None = None  # null: one new token per request and step
    # Extra arguments for vLLM's server, passed unchanged; those that AFD sets itself or does not
    # support are refused
    vllm_args: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Attention:
        if self.max_instances is not None and self.max_instances < self.instances:
            raise ValueError(
                f"max_instances {self.max_instances} is below instances {self.instances};"
                " raise max_instances, or remove it"
            )
        _check_core_lists(self.cpus, self.capacity)
        if self.cpus != "auto" and any(len(cores) < self.tp for cores in self.cpus):
            raise ValueError(f"cpus has a list with fewer cores than tp, {self.tp}; add cores")
        check_device("kernel", _KERNELS[self.kernel], self.device, "leave kernel at vllm")
        if refused := refusal(self.vllm_args):
            raise ValueError(f"vllm_args has {refused}")
        if self.fused is True and self.device != "cuda":
            raise ValueError(f"fused true needs device cuda, not {self.device}; leave it at auto")
        if self.max_num_batched_tokens < self.max_num_seqs * self.decode_rows:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs"
                f" {self.max_num_seqs}{f' x {self.decode_rows}' if self.speculation else ''}, but a"
                f" decode step has {self.decode_rows} or more tokens per request;"
                " raise max_num_batched_tokens or lower max_num_seqs"
            )
        if self.port + self.capacity - 1 > 65535:
            raise ValueError(
                f"port {self.port} leaves no room below 65536 for {self.capacity} instances;"
                " lower port"
            )
        return self

    @property
    def capacity(self) -> int:
        """Instances that can run at a time."""
        return self.instances if self.max_instances is None else self.max_instances

    @property
    def ranks(self) -> int:
        """Ranks of all instances that can run; each has one device."""
        return self.capacity * self.tp

    @property
    def decode_rows(self) -> int:
        """Most rows of one request in a decode step: the last token and its drafts."""
        return 1 + (self.speculation.num_speculative_tokens if self.speculation else 0)

    def api_ports(self) -> tuple[int, ...]:
        """One port per instance that can run; all 0 if any free port may be used."""
        return tuple(self.port + i if self.port else 0 for i in range(self.capacity))


class Ffn(Section):
    """The FFN instances. They divide the experts of every layer among them; each instance is
    ``tp`` processes (ranks)."""

    instances: int = Field(default=1, ge=1)  # number of FFN instances at the start
    # Instances that can run at a time, with those that `afd ctl add ffn` adds. Slots, keys and GPUs
    # are kept for all of them, and each has room for its share of the experts among the
    # ``instances`` of the start. null: their number is fixed (docs/elasticity.md)
    max_instances: int | None = Field(
        default=None,
        ge=1,
        le=MAX_FFN_ROOM,
        description=f"a whole number from instances to {MAX_FFN_ROOM}, or null",
    )
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
        if self.capacity < self.instances:
            raise ValueError(
                f"max_instances {self.max_instances} is below instances {self.instances};"
                " raise max_instances, or remove it"
            )
        if self.max_instances is not None and self.shared_experts == "slices":
            raise ValueError(
                "shared_experts slices cuts the shared experts for a fixed number of instances, but"
                " max_instances is set; use rows or auto, or remove max_instances"
            )
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
    def capacity(self) -> int:
        """Instances that can run at a time."""
        return self.instances if self.max_instances is None else self.max_instances

    @property
    def ranks(self) -> int:
        """Ranks of all instances that can run; each has one device."""
        return self.capacity * self.tp


class Pipeline(Section):
    """How a step is split into micro-batches."""

    # Micro-batches in flight per step; auto: chosen from measured step times (docs/depth.md); null:
    # auto on CPUs, 3 on GPUs
    depth: Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_DEPTH)] | None = Field(
        default=None, description=f"auto or a whole number from 1 to {MAX_DEPTH}"
    )
    # Target time per output token in milliseconds, used if depth is auto; null: no target
    tpot_ms: float | None = Field(
        default=None, gt=0, description="a number of milliseconds above 0, or null"
    )
    min_rows: int = Field(default=4, ge=1)  # fewest rows per micro-batch; smaller steps split less
    graphs: bool = True  # on GPUs: capture decode steps as graphs and replay them, on both sides
    lookahead: bool = True  # on GPUs: schedule and prepare the next step during a replay

    @property
    def max_depth(self) -> int:
        """Largest number of micro-batches per step; slots and graphs are made for it."""
        return self.depth if isinstance(self.depth, int) else MAX_DEPTH


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
    # Processes that serve the port; one of several that dies loses only its own connections
    processes: int = Field(default=1, ge=1, le=64)
    # Instance of a request. prefix: the one that computed the beginning of its prompt, unless it is
    # clearly busier; fewest: the one with the fewest requests
    routing: Literal["prefix", "fewest"] = "prefix"
    # Requests that one attention instance has at a time; auto: twice attention.max_num_seqs
    max_running: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto", description="auto or a whole number of at least 1"
    )
    slow_client_s: float = Field(default=60.0, gt=0)  # a client that reads nothing for this long
    api_keys: Path | None = None  # hashes of the API keys that clients need; null: none needed
    tls: Tls | None = None  # null: plain HTTP
    waiting: int = Field(default=1024, ge=0)  # requests that may wait for an attention instance
    waiting_s: float = Field(default=60.0, ge=0)  # how long they wait until one is back or free
    replay_s: float = Field(default=120.0, ge=0)  # the same, for those that an instance lost
    resume_s: float = Field(default=60.0, ge=0)  # answers of named requests stay; 0: not kept


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
    # Keep two processes on each host that have imported everything: forks of one replace dead FFN
    # ranks (0.3 GiB), those of the other dead attention instances (0.6 GiB); ffn: only the first
    standby: bool | Literal["ffn"] = Field(default=True, description="true, false or ffn")


class Metrics(Section):
    """Prometheus metrics (docs/metrics.md)."""

    enabled: bool = True  # every role serves /metrics
    stage_every: int = Field(default=0, ge=0)  # take stage timestamps every n-th step; 0: never
    # OTLP/HTTP address that gets traces (docs/traces.md), http://HOST:4318/v1/traces; null: none
    otlp: Annotated[str, Field(pattern=r"^https?://[^/]+")] | None = Field(
        default=None, description="an address such as http://HOST:4318/v1/traces, or null"
    )
    otlp_share: float = Field(default=1.0, ge=0, le=1)  # of requests without a traceparent
