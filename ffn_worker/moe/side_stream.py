"""A second stream for kernels that need not wait for those beside them."""

from contextlib import AbstractContextManager, nullcontext

import torch


class SideStream:
    """Stream of a device on which a part of a call runs beside the rest of it. May be captured: the
    branch is one of the graph. On a CPU everything runs in the order in which it is called.

    Memory that a branch uses is allocated outside of it and kept until ``join``, or allocated and
    freed within it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def branch(self) -> AbstractContextManager[object]:
        """What is launched within starts after all that the current stream was given so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """What the current stream is given from now on starts after the branch."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
