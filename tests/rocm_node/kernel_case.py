"""``kernel_case.py CODE KERNEL ARCH WARPS LDS FP8``: a captured step with one of our kernels.

The graph waits for rows in a receive slot, encodes them as FP8 with our kernel's machine code for
ARCH on the emulator, and sends the codes to a peer. It is replayed with other rows each time.
Needs no torch.
"""

import ctypes
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "amd"))
from emulator import Kernel, Memory  # noqa: E402

from afd.wire import codecs  # noqa: E402
from afd.wire.layout import FP8_TAGS  # noqa: E402
from afd_comm import Link, Message, Region, Status  # noqa: E402

ROWS, HIDDEN, REPLAYS = 3, 512, 3
IN, OUT = ROWS * HIDDEN * 2, ROWS * HIDDEN
SCALES = ROWS * HIDDEN // 128 * 4
TIMEOUT_US = 30_000_000
LIBRARY = ctypes.CDLL("libamdhip64.so")


def hip(name: str, *args: object) -> None:
    code = getattr(LIBRARY, name)(*args)
    assert code == 0, f"{name} failed with error {code}"


def made(name: str, *args: object) -> ctypes.c_void_p:
    out = ctypes.c_void_p()
    hip(name, ctypes.byref(out), *args)
    return out


def memory_at(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def slot_address(region: Region, slot: int) -> int:
    content = ctypes.pythonapi.PyCapsule_GetPointer
    content.restype, content.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = region.view(slot).__dlpack__()
    address = ctypes.cast(content(capsule, b"dltensor"), ctypes.POINTER(ctypes.c_void_p))[0]
    assert address is not None
    return address


def main(code: bytes, kernel: str, arch: str, warps: int, lds: int, fp8: str) -> None:
    emulated = Kernel(code, kernel, arch, lds)
    launches = []

    def launch(_code: int, name: bytes, sizes: object, arguments: object) -> None:
        pointers = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        x, codes, scales = (
            ctypes.cast(pointers[i], ctypes.POINTER(ctypes.c_uint64))[0] for i in range(3)
        )
        grid = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_uint))[:3]
        there = Memory()
        places = [(x, IN), (codes, OUT), (scales, SCALES)]
        held = [there.put(memory_at(address, nbytes)) for address, nbytes in places]
        scalars = [("q", address) for address in held] + [("i", HIDDEN), ("i", HIDDEN)]
        emulated.run(there, scalars, grid, warps)
        for (address, nbytes), copy in zip(places, held, strict=True):
            memory_at(address, nbytes)[:] = there.get(copy, np.zeros(nbytes, np.uint8))
        launches.append(name)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, *[ctypes.c_void_p] * 2)(
        launch
    )
    LIBRARY.stand_in_set_launch(callback)
    ffn = Region(1, IN, name="ffn", device="hip:0")
    attention = Region(1, OUT + SCALES, name="attention", device="hip:1")
    sender = Link(ffn.addresses, slots=(0, 1), timeout_us=TIMEOUT_US, device="hip:1")
    answer = Link(attention.addresses, slots=(0, 1), timeout_us=TIMEOUT_US, device="hip:0")
    assert sender.backend == answer.backend == "ipc"
    codes = made("hipMalloc", ctypes.c_size_t(OUT))
    scales = made("hipMalloc", ctypes.c_size_t(SCALES))
    function = made("hipModuleGetFunction", made("hipModuleLoadData", code), kernel.encode())
    values = [
        ctypes.c_uint64(slot_address(ffn, 0)),
        *map(ctypes.c_uint64, (codes.value, scales.value)),
    ]
    arguments = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
    stream, graph = made("hipStreamCreateWithFlags", 1), ctypes.c_void_p()
    hip("hipStreamBeginCapture", stream, 1)
    ffn.enqueue_wait(stream.value, [0], [7], reset=True)
    sizes = (ROWS, 1, 1, 64 * warps, 1, 1, lds)
    hip("hipModuleLaunchKernel", function, *sizes, stream, arguments, None)
    parts = [(0, codes.value, OUT), (OUT, scales.value, SCALES)]
    assert answer.enqueue(stream.value, Message(0, parts), 9) == Status.OK
    hip("hipStreamEndCapture", stream, ctypes.byref(graph))
    assert not launches, "a captured launch does not run"
    executable = made("hipGraphInstantiate", graph, None, None, ctypes.c_size_t(0))
    random = np.random.default_rng(5)
    for replay in range(REPLAYS):
        rows = random.standard_normal((ROWS, HIDDEN)).astype(ml_dtypes.bfloat16)
        hip("hipGraphLaunch", executable, stream)
        assert not attention.ready(0, 9)
        assert sender.post(Message(0, [(0, rows.ctypes.data, IN)]), 7) == Status.OK
        assert attention.wait_all([0], [9], TIMEOUT_US) == [Status.OK]
        hip("hipStreamSynchronize", stream)
        got = memory_at(slot_address(attention, 0), OUT + SCALES)
        want, want_scales = codecs.quantise_fp8(rows.astype(np.float32), FP8_TAGS[fp8])
        assert np.array_equal(got[:OUT], want.view(np.uint8).reshape(-1))
        assert np.array_equal(got[OUT:], want_scales.view(np.uint8).reshape(-1))
        assert len(launches) == replay + 1
        memory_at(slot_address(attention, 0), OUT + SCALES)[:] = 0
        clear_doorbell(attention)


def clear_doorbell(region: Region) -> None:
    """The answer's doorbell is the same in every replay. A wait that resets it clears it."""
    stream = made("hipStreamCreateWithFlags", 1)
    region.enqueue_wait(stream.value, [0], [9], reset=True)
    hip("hipStreamSynchronize", stream)


if __name__ == "__main__":
    file, name, target, warps, lds, kind = sys.argv[1:]
    main(Path(file).read_bytes(), name, target, int(warps), int(lds), kind)
