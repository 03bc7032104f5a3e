"""Print what CUDA's driver sees, and whether GPUs access each other's memory correctly.

This program is run by path in a child process: it makes contexts, may hang or crash, and uses only
the standard library and `libcuda`. It prints one JSON object per line. Each pair is printed before
its test, so that a hang can be attributed:

    {"driver": 13000, "init": "CUDA_SUCCESS"}
    {"device": 0, "bus": "0000:18:00.0", "uuid": "GPU-…", "name": "…", "capability": "9.0", …}
    {"pair": [0, 1]}
    {"pair": [0, 1], "can": true, "copy": "ok", "read": "ok", "write": "ok"}

Three methods are tested, since a card can report peer access and corrupt data by any of them: the
copy engine (cuMemcpyPeer), a kernel that reads the other GPU's memory, and a kernel that writes it.
NCCL uses kernels. The driver API:
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__PEER__ACCESS.html
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import threading
from typing import Any

SIZE = 4 << 20  # bytes for each test
THREADS = 256
KERNEL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "copy_words.ptx")
ALREADY_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
MAJOR, MINOR, COMPUTE_MODE = 75, 76, 20  # CUdevice_attribute


class CudaError(Exception):
    """A call of the driver failed; the message is the error's name."""


class Cuda:
    """The driver library, with checked calls."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver.

        Raises:
            CudaError: it returned anything but success.
        """
        status = getattr(self.library, name)(*arguments)
        if status:
            raise CudaError(self.name(status))

    def name(self, status: int) -> str:
        """Return the name of a status, such as CUDA_ERROR_SYSTEM_NOT_READY."""
        text = ctypes.c_char_p()
        self.library.cuGetErrorName(status, ctypes.byref(text))
        return f"{(text.value or b'error').decode()} ({status})"

    def number(self, name: str, *arguments: Any) -> int:
        """Return the integer that a function stores through its first argument."""
        value = ctypes.c_int(0)
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def handle(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """Return the pointer, context or module that is stored through the first argument."""
        value = ctypes.c_void_p()
        self.call(name, ctypes.byref(value), *arguments)
        return value


class Device:
    """A GPU with its context, a buffer with a pattern, and a buffer to write into."""

    def __init__(self, cuda: Cuda, place: int) -> None:
        self.cuda, self.place = cuda, place
        self.pattern = random.Random(place).randbytes(SIZE)  # noqa: S311 - a pattern, not a secret
        self.context = cuda.handle("cuDevicePrimaryCtxRetain", cuda.number("cuDeviceGet", place))
        self.enter()
        size = ctypes.c_size_t(SIZE)
        self.source = cuda.handle("cuMemAlloc_v2", size)
        self.target = cuda.handle("cuMemAlloc_v2", size)
        cuda.call("cuMemcpyHtoD_v2", self.source, self.pattern, size)
        self.kernel = self._kernel()

    def _kernel(self) -> ctypes.c_void_p | None:
        try:
            with open(KERNEL, "rb") as file:
                module = self.cuda.handle("cuModuleLoadData", file.read())
            return self.cuda.handle("cuModuleGetFunction", module, b"words")
        except CudaError:  # the GPU is older than sm_70
            return None

    def enter(self) -> None:
        """Make this GPU's context the thread's current one."""
        self.cuda.call("cuCtxSetCurrent", self.context)

    def clear(self) -> None:
        """Overwrite the target, so that an old pattern in it proves nothing."""
        self.enter()
        self.cuda.call("cuMemsetD8_v2", self.target, ctypes.c_ubyte(0xA5), ctypes.c_size_t(SIZE))
        self.cuda.call("cuCtxSynchronize")

    def holds(self, pattern: bytes) -> str:
        """Return "ok" if the target holds a pattern, else how much of it is wrong."""
        self.enter()
        self.cuda.call("cuCtxSynchronize")
        back = ctypes.create_string_buffer(SIZE)
        self.cuda.call("cuMemcpyDtoH_v2", back, self.target, ctypes.c_size_t(SIZE))
        if back.raw == pattern:
            return "ok"
        wrong = sum(a != b for a, b in zip(back.raw, pattern, strict=True))
        return f"wrong: {wrong} of {SIZE} bytes"

    def launch(self, target: ctypes.c_void_p, source: ctypes.c_void_p) -> None:
        """Copy from source to target with a kernel on this GPU."""
        self.enter()
        count = ctypes.c_uint(SIZE // 4)
        kept = (target, source, count)
        arguments = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in kept))
        blocks = SIZE // 4 // THREADS
        shape = (blocks, 1, 1, THREADS, 1, 1, 0)
        self.cuda.call("cuLaunchKernel", self.kernel, *shape, None, arguments, None)
        self.cuda.call("cuCtxSynchronize")


def emit(**fields: Any) -> None:
    """Print one line, and flush it."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def describe(cuda: Cuda, place: int) -> None:
    """Print a GPU's properties."""
    name, bus = ctypes.create_string_buffer(100), ctypes.create_string_buffer(32)
    uuid, memory = (ctypes.c_ubyte * 16)(), ctypes.c_size_t(0)
    cuda.call("cuDeviceGetName", name, 100, place)
    cuda.call("cuDeviceGetPCIBusId", bus, 32, place)
    cuda.call("cuDeviceGetUuid", ctypes.byref(uuid), place)
    cuda.call("cuDeviceTotalMem_v2", ctypes.byref(memory), place)
    major = cuda.number("cuDeviceGetAttribute", MAJOR, place)
    minor = cuda.number("cuDeviceGetAttribute", MINOR, place)
    h = bytes(uuid).hex()
    emit(
        device=place,
        name=name.value.decode("utf-8", "replace"),
        bus=bus.value.decode("ascii", "replace").lower(),
        uuid=f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}",
        memory_mib=memory.value >> 20,
        capability=f"{major}.{minor}",
        compute_mode=cuda.number("cuDeviceGetAttribute", COMPUTE_MODE, place),
    )


def opened(cuda: Cuda, count: int) -> list[Device]:
    """Make a context on every GPU at the same time; print the GPUs where that fails."""
    devices: dict[int, Device] = {}

    def make(place: int) -> None:
        try:
            devices[place] = Device(cuda, place)
        except CudaError as error:
            emit(device=place, error=str(error))

    threads = [threading.Thread(target=make, args=(place,)) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [devices[place] for place in sorted(devices)]


def attempt(ours: Device, other: Device) -> dict[str, Any]:
    """Test each method from one GPU to another's memory; return the results."""
    cuda = ours.cuda
    can = bool(cuda.number("cuDeviceCanAccessPeer", ours.place, other.place))
    found: dict[str, Any] = {"can": can}
    if can:
        ours.enter()
        status = cuda.library.cuCtxEnablePeerAccess(other.context, 0)
        if status not in (0, ALREADY_ENABLED):
            return {**found, "error": cuda.name(status)}
    other.clear()
    size = ctypes.c_size_t(SIZE)
    cuda.call("cuMemcpyPeer", other.target, other.context, ours.source, ours.context, size)
    found["copy"] = other.holds(ours.pattern)
    if can and ours.kernel:
        ours.clear()
        ours.launch(ours.target, other.source)
        found["read"] = ours.holds(other.pattern)
        other.clear()
        ours.launch(other.target, ours.source)
        found["write"] = other.holds(ours.pattern)
    return found


def try_pairs(devices: list[Device]) -> None:
    """Test every pair in both directions."""
    for ours in devices:
        for other in devices:
            if ours is other:
                continue
            pair = [ours.place, other.place]
            emit(pair=pair)
            try:
                emit(pair=pair, **attempt(ours, other))
            except CudaError as error:
                emit(pair=pair, error=str(error))


def main() -> None:
    """Examine the GPUs and print all results."""
    try:
        cuda = Cuda()
    except OSError as error:
        emit(missing=str(error))
        return
    status = cuda.library.cuInit(0)
    version = ctypes.c_int(0)
    cuda.library.cuDriverGetVersion(ctypes.byref(version))
    emit(init=cuda.name(status), status=status, driver=version.value)
    if status:
        return
    count = cuda.number("cuDeviceGetCount")
    for place in range(count):
        describe(cuda, place)
    if count > 1:
        try_pairs(opened(cuda, count))
    emit(done=True)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
    main()
