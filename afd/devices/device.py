"""What the rest of the code may ask about one kind of device. No torch here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One kind of device that attention and FFN processes run on.

    name: the value of ``attention.device`` and ``ffn.device``.
    torch_device: the process's own device for ``torch.device``, such as "cuda:0".
    region_device: the same device for ``afd_comm.Region``.
    runtime: "module:class" of its :class:`afd.wire.streams_torch.Runtime`: streams, graphs, and
        slots as tensors.
    has_streams: work is queued on streams, so the host synchronizes before it reads results.
    captures_graphs: a decode step can be captured as a graph and replayed.
    stamps_in_graphs: a captured graph can record stage timestamps at each replay.
    host_memory: the host reads and writes its memory, so every transport reaches it.
    visible_variables: the environment variables that list the devices a process may see; the first
        one is written, the others are older names of it that are kept equal. (): every process of
        the host shares the device.
    hiding_variable: a variable below those: devices that it does not list do not exist for them.
    listed_by: the command that lists the host's devices, for messages.
    """

    name: str
    torch_device: str
    region_device: str
    runtime: str
    has_streams: bool
    captures_graphs: bool
    stamps_in_graphs: bool
    host_memory: bool
    visible_variables: tuple[str, ...]
    hiding_variable: str | None = None
    listed_by: str = ""

    @property
    def torch_type(self) -> str:
        """``torch.device.type`` of its tensors. ROCm builds of torch use "cuda" too."""
        return self.torch_device.partition(":")[0]

    @property
    def region_type(self) -> str:
        """The kind of ``afd_comm.Region.device``: "cpu", "cuda" or "hip"."""
        return self.region_device.partition(":")[0]
