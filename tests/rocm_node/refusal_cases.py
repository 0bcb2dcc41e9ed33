"""Makes each call of refusals.json on the stand-in and prints {case: error}. Needs no torch."""

import ctypes
import json
from collections.abc import Callable

LIBRARY = ctypes.CDLL("libamdhip64.so")
THREAD_LOCAL, NO_TIMING = 1, 2
CASES: dict[str, Callable[[], int]] = {}


class Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_uint8 * 64),)


class MemOp(ctypes.Structure):
    _fields_ = (
        ("operation", ctypes.c_int),
        ("address", ctypes.c_void_p),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_void_p),
        ("pad", ctypes.c_uint64),
    )


def case(call: Callable[[], int]) -> Callable[[], int]:
    CASES[call.__name__] = call
    return call


def stream() -> ctypes.c_void_p:
    out = ctypes.c_void_p()
    assert LIBRARY.hipStreamCreateWithFlags(ctypes.byref(out), 1) == 0
    return out


def event(flags: int = 0) -> ctypes.c_void_p:
    out = ctypes.c_void_p()
    assert LIBRARY.hipEventCreateWithFlags(ctypes.byref(out), flags) == 0
    return out


def memory(size: int = 4096) -> ctypes.c_void_p:
    out = ctypes.c_void_p()
    assert LIBRARY.hipMalloc(ctypes.byref(out), ctypes.c_size_t(size)) == 0
    return out


def capturing() -> ctypes.c_void_p:
    one = stream()
    assert LIBRARY.hipStreamBeginCapture(one, THREAD_LOCAL) == 0
    return one


def ended(one: ctypes.c_void_p) -> int:
    graph = ctypes.c_void_p()
    return int(LIBRARY.hipStreamEndCapture(one, ctypes.byref(graph)))


def within_capture(call: Callable[[ctypes.c_void_p], int]) -> int:
    one = capturing()
    code = call(one)
    ended(one)
    return code


def opened(handle: Handle, flags: int = 1) -> int:
    out = ctypes.c_void_p()
    return int(LIBRARY.hipIpcOpenMemHandle(ctypes.byref(out), handle, flags))


def shared(pointer: ctypes.c_void_p) -> tuple[int, Handle]:
    handle = Handle()
    return LIBRARY.hipIpcGetMemHandle(ctypes.byref(handle), pointer), handle


def batch(count: int, operation: int = 5) -> int:
    where = memory()
    operations = (MemOp * max(count, 1))()
    for one in operations:
        one.operation, one.address = operation, where
    return int(LIBRARY.hipStreamBatchMemOp(stream(), count, operations, 0))


def launched(grid: int, block: int) -> int:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    LIBRARY.stand_in_set_launch(_NOTHING)
    LIBRARY.hipModuleLoadData(ctypes.byref(module), b"code")
    LIBRARY.hipModuleGetFunction(ctypes.byref(function), module, b"kernel")
    sizes = (grid, 1, 1, block, 1, 1, 0)
    return int(LIBRARY.hipModuleLaunchKernel(function, *sizes, stream(), None, None))


_NOTHING = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)(lambda *_: None)
HOST = ctypes.create_string_buffer(4096)
ON_HOST = ctypes.cast(HOST, ctypes.c_void_p)


@case
def own_handle() -> int:
    return opened(shared(memory())[1])


@case
def handle_flags() -> int:
    return opened(shared(memory())[1], 0)


@case
def empty_handle() -> int:
    return opened(Handle())


@case
def host_pointer_shared() -> int:
    return shared(ON_HOST)[0]


@case
def unknown_range() -> int:
    base, size = ctypes.c_void_p(), ctypes.c_size_t()
    return int(LIBRARY.hipMemGetAddressRange(ctypes.byref(base), ctypes.byref(size), ON_HOST))


@case
def unknown_freed() -> int:
    return int(LIBRARY.hipFree(ON_HOST))


@case
def never_registered() -> int:
    return int(LIBRARY.hipHostUnregister(ON_HOST))


@case
def register_nothing() -> int:
    return int(LIBRARY.hipHostRegister(ON_HOST, ctypes.c_size_t(0), 0))


@case
def peer_of_itself() -> int:
    return int(LIBRARY.hipDeviceEnablePeerAccess(0, 0))


@case
def peer_twice() -> int:
    assert LIBRARY.hipDeviceEnablePeerAccess(1, 0) == 0
    return int(LIBRARY.hipDeviceEnablePeerAccess(1, 0))


@case
def peer_flags() -> int:
    return int(LIBRARY.hipDeviceEnablePeerAccess(1, 1))


@case
def batch_of_none() -> int:
    return batch(0)


@case
def batch_too_long() -> int:
    assert batch(256) == 0
    return batch(257)


@case
def batch_barrier() -> int:
    return batch(1, operation=6)


@case
def malloc_in_capture() -> int:
    out = ctypes.c_void_p()
    return within_capture(lambda _: LIBRARY.hipMalloc(ctypes.byref(out), ctypes.c_size_t(64)))


@case
def pin_in_capture() -> int:
    return within_capture(lambda _: LIBRARY.hipHostRegister(ON_HOST, ctypes.c_size_t(64), 0))


@case
def sync_in_capture() -> int:
    return within_capture(LIBRARY.hipStreamSynchronize)


@case
def lost_capture() -> int:
    one = capturing()
    LIBRARY.hipStreamSynchronize(one)
    return ended(one)


def forked(one: ctypes.c_void_p) -> ctypes.c_void_p:
    """A second stream that joins the capture of ``one`` and has work of its own."""
    other, mark = stream(), event()
    assert LIBRARY.hipEventRecord(mark, one) == 0
    assert LIBRARY.hipStreamWaitEvent(other, mark, 0) == 0
    assert LIBRARY.hipMemsetAsync(memory_of_test, 0, ctypes.c_size_t(8), other) == 0
    return other


memory_of_test = memory()


@case
def unjoined_fork() -> int:
    one = capturing()
    forked(one)
    return ended(one)


@case
def other_stream_ends() -> int:
    one = capturing()
    code = ended(forked(one))
    ended(one)
    return code


@case
def nothing_captured() -> int:
    return ended(stream())


@case
def capture_twice() -> int:
    return within_capture(lambda one: LIBRARY.hipStreamBeginCapture(one, THREAD_LOCAL))


@case
def capture_default() -> int:
    return int(LIBRARY.hipStreamBeginCapture(None, THREAD_LOCAL))


@case
def event_from_before() -> int:
    one, mark = stream(), event()
    assert LIBRARY.hipEventRecord(mark, one) == 0
    assert LIBRARY.hipStreamBeginCapture(one, THREAD_LOCAL) == 0
    code = int(LIBRARY.hipStreamWaitEvent(stream(), mark, 0))
    ended(one)
    return code


@case
def captured_event_asked() -> int:
    one, mark = capturing(), event()
    assert LIBRARY.hipEventRecord(mark, one) == 0
    code = int(LIBRARY.hipEventQuery(mark))
    ended(one)
    return code


@case
def untimed_event() -> int:
    marks, one, ms = [event(NO_TIMING), event()], stream(), ctypes.c_float()
    for mark in marks:
        assert LIBRARY.hipEventRecord(mark, one) == 0
    assert LIBRARY.hipStreamSynchronize(one) == 0
    return int(LIBRARY.hipEventElapsedTime(ctypes.byref(ms), *marks))


@case
def no_blocks() -> int:
    return launched(0, 64)


@case
def no_threads() -> int:
    return launched(1, 0)


@case
def block_too_large() -> int:
    assert launched(1, 1024) == 0
    return launched(1, 2048)


if __name__ == "__main__":
    print(json.dumps({name: call() for name, call in CASES.items()}))
