"""The deployment file as a whole: its sections together, and how it is read.

:mod:`afd.config.sections` has the keys. ``load_config`` reads the YAML file into a frozen
``Deployment`` and raises a one-sentence ``ConfigError`` for a mistake.
``afd.config.resolve.check_model`` checks it against the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from afd.config.fp8 import fp8_of
from afd.config.hosts import Host, check_hosts, places_of
from afd.config.messages import sentence
from afd.config.prefill import Prefill
from afd.config.sections import (
    Attention,
    Control,
    Deadlines,
    Ffn,
    Gateway,
    Metrics,
    Pipeline,
    Restart,
    Wire,
)
from afd.config.transport import Section, Transport
from afd.config.vllm_arguments import checks_api_key
from afd.config.yaml_file import override, read_sections
from afd.devices import device_named
from afd.errors import ConfigError
from afd.models.hub import cached_folder, is_hub_name
from afd.places import HostPlaces, Pool


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
    prefill: Prefill = Prefill()
    ffn: Ffn = Ffn()
    pipeline: Pipeline = Pipeline()
    wire: Wire = Wire()
    transport: Transport = Transport()
    control: Control = Control()
    gateway: Gateway = Gateway()
    deadlines: Deadlines = Deadlines()
    restart: Restart = Restart()
    metrics: Metrics = Metrics()

    @property
    def depth(self) -> int | Literal["auto"]:
        """Micro-batches of a step, or that they are chosen from measured step times: on CPUs too
        few rows per micro-batch cost more than they hide (docs/results/cpu.md)."""
        if self.pipeline.depth is not None:
            return self.pipeline.depth
        cpus = self.attention.device == self.ffn.device == "cpu"
        return "auto" if cpus else self.pipeline.max_depth

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
    def _prefill_fits(self) -> Deployment:
        prefill, attention = self.prefill, self.attention
        if not prefill.instances:
            return self
        if attention.speculation is not None and attention.speculation.has_draft_layers:
            raise ValueError(
                "prefill does not move the KV cache of draft layers, but attention.speculation is"
                f" {attention.speculation.method}; use ngram, or set prefill.instances to 0"
            )
        if attention.tp > 1:
            raise ValueError(
                "prefill moves the KV cache of whole instances, but attention.tp is"
                f" {attention.tp}; set it to 1, or set prefill.instances to 0"
            )
        if prefill.by == "afd" and prefill.instances >= attention.instances:
            raise ValueError(
                f"prefill.instances {prefill.instances} leaves none of {attention.instances}"
                " attention instances to generate answers; raise attention.instances"
            )
        if prefill.colocated and self.hosts:
            raise ValueError(
                "prefill.by colocated starts its instances on one machine, but the file names"
                " hosts; use by: afd, or remove hosts"
            )
        taken = {self.gateway.port, *attention.api_ports()} & set(prefill.api_ports()) - {0}
        if taken:
            raise ValueError(
                f"prefill.port {prefill.port} gives an instance port {min(taken)}, which the"
                " gateway or an attention instance has; choose another prefill.port"
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
        whole = self.attention.ranks + self.prefill.colocated
        wanted = whole * on_gpus[0] + self.ffn.ranks * on_gpus[1]
        if self.gpus > wanted:
            raise ValueError(
                f"gpus is {self.gpus} but the deployment has only {wanted} GPU processes;"
                " remove gpus"
            )
        ranks = ("attention", self.attention.tp), ("ffn", self.ffn.tp)
        for (name, tp), takes in zip(ranks, on_gpus, strict=True):
            if takes and self.gpus < tp:
                raise ValueError(
                    f"gpus is {self.gpus} but {name}.tp is {tp}, and the ranks of an instance"
                    f" need a GPU each; raise gpus or lower {name}.tp"
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

    def prefills(self, index: int) -> bool:
        """Whether this attention instance computes prompts only."""
        prefill, attention = self.prefill, self.attention.instances
        return prefill.by == "afd" and attention - prefill.instances <= index < attention

    def places(self) -> tuple[HostPlaces, ...]:
        """Which host runs which instances; one nameless host if the file names none."""
        attention, ffn = self.attention, self.ffn
        each = attention.tp * _takes_gpus(attention.device), ffn.tp * _takes_gpus(ffn.device)
        found = places_of(
            self.hosts,
            Pool("attention", attention.capacity, each[0], attention.instances),
            Pool("ffn", ffn.capacity, each[1], ffn.instances),
            shared=self.gpus is not None,
        )
        return tuple(place.started(attention.instances, ffn.instances) for place in found)

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
    ("attention", "speculation", "model"),
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
