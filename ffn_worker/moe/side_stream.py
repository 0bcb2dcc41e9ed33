"""A second stream for kernels that can run concurrently with the rest of a call."""

from contextlib import AbstractContextManager, nullcontext

import torch


class SideStream:
    """Runs a part of a call on a second stream. May be captured in a graph. On CPUs everything runs
    in call order.

    Memory that the branch uses must be allocated outside of it and kept until ``join``, or be
    allocated and freed within it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type != "cpu" else None

    def branch(self) -> AbstractContextManager[object]:
        """Context whose launches start after everything enqueued on the current stream so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Later launches on the current stream start after the branch has finished."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
