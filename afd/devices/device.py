"""What the rest of the code may ask about one kind of device. No torch here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One kind of device that attention and FFN processes run on.

    name: the value of ``attention.device`` and ``ffn.device``.
    torch_device: the process's own device for ``torch.device``, such as "cuda:0".
    region_device: the same device for ``afd_comm.Region``.
    streams: "module:callable" that makes its :class:`afd.wire.streams_torch.Streams` from the
        torch device and the number of micro-batches.
    has_streams: work is queued on streams, so the host synchronizes before it reads results.
    captures_graphs: a decode step can be captured as a graph and replayed.
    host_memory: the host reads and writes its memory, so every transport reaches it.
    visible_variable: the environment variable that lists the devices a process may see; None for a
        kind that every process of the host shares.
    """

    name: str
    torch_device: str
    region_device: str
    streams: str
    has_streams: bool
    captures_graphs: bool
    host_memory: bool
    visible_variable: str | None

    @property
    def torch_type(self) -> str:
        """``torch.device.type`` of its tensors. ROCm builds of torch use "cuda" too."""
        return self.torch_device.partition(":")[0]
