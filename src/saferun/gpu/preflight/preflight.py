"""Test every GPU that CUDA shows, without torch: make a context; write, copy and read memory.

    with PreflightTest(environ) as test:    # this file runs as a program, in a child
        document = test.report(timeout_s)

A driver may hang, crash or never release a process, so the test runs in a child. The child reports
each step in a line; its parent reads these with a time limit, kills the child after that, and still
knows the last step of each GPU. The calls are those of the driver API,
https://docs.nvidia.com/cuda/cuda-driver-api/, for all GPUs at once in threads (ctypes releases the
interpreter lock in a call). Setting memory runs a built-in kernel, so no module is loaded:
compiling one needs a library that containers leave out (CUDA_ERROR_JIT_COMPILER_NOT_FOUND).

It uses only the standard library (Python >= 3.9) and no other file, and is run by its path.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

TYPE_CHECKING = False  # typing costs a launch 5 ms
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

LIBRARY = "libcuda.so.1"
TIMEOUT_S = 20.0  # normal seconds for 8 GPUs without persistence mode
MEMORY_BYTES = 64 << 20
MOST_GPUS = 64  # no machine has more; a library that reports more is wrong
_CHUNK_BYTES = 4 << 20
_LOOK_S = 0.002  # between two checks whether it has gone: the job waits
_REAP_S = 0.5  # wait for a killed test; the kernel may be unable to end it
_LET_GO_S = 2.0  # time for a test that has reported everything to close the GPUs
_OUTPUT_BYTES = 1 << 20  # most output read of a test
_KEPT_BYTES = 2000  # the end of output that is no report, for the document
_SET_PDEATHSIG = 1  # linux/prctl.h
_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm")
_UNKNOWN_FUNCTION = 500  # CUDA_ERROR_NOT_FOUND, for a function that this driver lacks


# --- our side: start, listen, end ----------------------------------------------------------------


class PreflightTest:
    """A test that runs in a child. Always `close` it.

    Args:
        environ: the job's whole environment: CUDA_VISIBLE_DEVICES and LD_LIBRARY_PATH count.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._began = time.monotonic()
        self._document = _blank(environ)
        self._text = b""
        self._read = 0
        self._pid = 0
        self._pipe, writing = os.pipe()
        argv = [sys.executable, "-I", "-S", os.path.abspath(__file__)]
        files: list[Any] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        files += [(os.POSIX_SPAWN_DUP2, writing, fd) for fd in (1, 2)]
        try:
            self._pid = os.posix_spawn(sys.executable, argv, dict(environ), file_actions=files)
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(writing)

    def __enter__(self) -> PreflightTest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def report(self, timeout_s: float) -> dict[str, Any]:
        """Return the test's results; the test is over then.

        Args:
            timeout_s: seconds from the test's start. After that it is killed, and a GPU without an
                answer is reported with its last step.
        """
        end = self._began + timeout_s
        found = self._document
        while found["step"] != "end" and self._read < _OUTPUT_BYTES:
            left = end - time.monotonic()
            ready = select.select([self._pipe], [], [], max(0.0, left))[0]
            piece = os.read(self._pipe, 1 << 16) if ready else b""
            if not piece:
                found["ended"] = "crash" if ready else "timeout"
                break
            self._take(piece)
        else:
            found["ended"] = "done" if found["step"] == "end" else "flood"
        self.close(_LET_GO_S if found["ended"] in ("done", "crash") else 0.0)
        found["seconds"] = round(time.monotonic() - self._began, 3)
        return found

    def close(self, patience_s: float = 0.0) -> None:
        """End the test; if the kernel cannot end it, it is left, and named in the document."""
        pid, self._pid = self._pid, 0
        if not pid:
            return
        os.close(self._pipe)
        status = _wait(pid, patience_s)
        if status is None:
            for end in (os.killpg, os.kill):  # in its first moment it has no group of its own
                try:
                    end(pid, signal.SIGKILL)
                except OSError:
                    continue
            status = _wait(pid, _REAP_S)
        if status is None:
            self._document["left"] = pid
        elif os.WIFSIGNALED(status):
            self._document["signal"] = os.WTERMSIG(status)

    def _take(self, piece: bytes) -> None:
        self._read += len(piece)
        *lines, self._text = (self._text + piece).split(b"\n")
        for line in lines:
            _hear(self._document, line)


def _blank(environ: Mapping[str, str]) -> dict[str, Any]:
    return {
        "visible": environ.get("CUDA_VISIBLE_DEVICES"),
        "step": "start",  # how far it came: start, library, init, count, devices, end
        "ended": "",  # done, timeout, crash, flood
        "code": 0,  # the error of the call that failed for all GPUs
        "devices": {},
        "output": "",
    }


def _hear(document: dict[str, Any], line: bytes) -> None:
    """Add one line of the test to the document; any other line is kept as text."""
    import json

    try:
        report = json.loads(line)
        number = report.pop("device", None)
    except (ValueError, AttributeError, RecursionError):
        text = document["output"] + line.decode("utf-8", "replace").strip() + "\n"
        document["output"] = text[-_KEPT_BYTES:]
        return
    into = document if number is None else document["devices"].setdefault(str(number), {})
    into.update(report)


def _wait(pid: int, limit_s: float) -> int | None:
    """Return the wait status of a child; None if it has not ended in time."""
    limit = time.monotonic() + limit_s
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # if SIGCHLD is ignored
            return 0
        if done:
            return status
        if time.monotonic() >= limit:
            return None
        time.sleep(_LOOK_S)


def is_well(document: Mapping[str, Any]) -> bool:
    """Return whether every GPU was tested and none failed."""
    devices = document["devices"].values()
    done = document["ended"] == "done" and not document["code"]
    return bool(done and devices and all(device.get("good") for device in devices))


# --- the test -----------------------------------------------------------------------------------


class _RefusedError(Exception):
    """A call of the driver that did not return success."""

    def __init__(self, code: int, call: str) -> None:
        super().__init__(code, call)
        self.code = code
        self.call = call


class _Driver:
    """The driver's library, with every call checked."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __call__(self, call: str, *arguments: Any) -> None:
        code = self.ask(call, *arguments)
        if code:
            raise _RefusedError(code, call)

    def ask(self, call: str, *arguments: Any) -> int:
        """Call a function and return its CUresult."""
        function = getattr(self._library, call, None)
        return _UNKNOWN_FUNCTION if function is None else int(function(*arguments))

    def name(self, code: int) -> str:
        """Return the name of an error; "" if the driver has none."""
        import ctypes

        text = ctypes.c_char_p()
        if self.ask("cuGetErrorName", code, ctypes.byref(text)) or not text.value:
            return ""
        return text.value.decode("ascii", "replace")


def _report(**facts: Any) -> None:
    """Report a line to our parent in one write, so that lines of several threads do not mix."""
    import json

    os.write(1, json.dumps(facts).encode() + b"\n")


def touch() -> None:
    """Test all GPUs and report; never returns. This process ends with its parent."""
    import ctypes

    os.setsid()  # a Ctrl-C at the terminal is not for us, and the parent can end the whole group
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    _report(step="library")
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        kfd, proc = os.path.exists("/dev/kfd"), os.path.exists("/proc/driver/nvidia")
        _report(missing=str(error), kfd=kfd, proc=proc, step="end")
    else:
        _try_all(_Driver(library))
        _report(step="end")
    os._exit(0)


def _node(path: str) -> str:
    if not os.path.exists(path):
        return "missing"
    return "" if os.access(path, os.R_OK | os.W_OK) else "closed"


def _try_all(driver: _Driver) -> None:
    import ctypes
    import threading

    version, count = ctypes.c_int(0), ctypes.c_int(0)
    driver.ask("cuDriverGetVersion", ctypes.byref(version))
    began = time.monotonic()
    _report(step="init", cuda=version.value)
    try:
        driver("cuInit", 0)
        _report(step="count", init_s=round(time.monotonic() - began, 3))
        driver("cuDeviceGetCount", ctypes.byref(count))
    except _RefusedError as refusal:  # after cuInit, which creates missing device nodes if it may
        nodes = {node: trouble for node in _NODES if (trouble := _node(node))}
        _report(code=refusal.code, error=driver.name(refusal.code), nodes=nodes)
        return
    _report(step="devices", count=count.value)
    numbers = range(count.value if 0 < count.value <= MOST_GPUS else 0)
    for number in numbers:  # each one is reported before the first one can hang
        _report(device=number, step="device")
    threads = [threading.Thread(target=_try, args=(driver, n)) for n in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _try(driver: _Driver, number: int) -> None:
    began = time.monotonic()
    try:
        handle = _identify(driver, number)
        result = _use(driver, handle, number)
        _report(device=number, seconds=round(time.monotonic() - began, 3), **result)
    except _RefusedError as refusal:
        error = driver.name(refusal.code)
        _report(device=number, good=False, code=refusal.code, error=error, call=refusal.call)


def _identify(driver: _Driver, number: int) -> Any:
    """Return the handle of a GPU; report its name, UUID and PCI address as far as known.

    cuDeviceGetUuid_v2 gives a MIG instance's own UUID, cuDeviceGetUuid that of its GPU.
    """
    import ctypes

    handle = ctypes.c_int(-1)
    driver("cuDeviceGet", ctypes.byref(handle), number)
    name, bus = ctypes.create_string_buffer(128), ctypes.create_string_buffer(32)
    own, whole = ctypes.create_string_buffer(16), ctypes.create_string_buffer(16)
    named = driver.ask("cuDeviceGetName", name, 127, handle) == 0
    placed = driver.ask("cuDeviceGetPCIBusId", bus, 31, handle) == 0
    first = driver.ask("cuDeviceGetUuid", whole, handle)
    second = driver.ask("cuDeviceGetUuid_v2", own, handle)
    raw = own.raw if not second else whole.raw if not first else b""
    text = name.value.decode("utf-8", "replace") if named else ""
    mig = " MIG " in text or (not first and not second and own.raw != whole.raw)
    uuid = f"{'MIG' if mig else 'GPU'}-{_dashed(raw.hex())}" if raw else ""
    address = bus.value.decode("ascii", "replace").lower() if placed else ""
    _report(device=number, name=text, uuid=uuid, pci=address, step="context")
    return handle


def _dashed(digits: str) -> str:
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _use(driver: _Driver, handle: Any, number: int) -> dict[str, Any]:
    """Make the same context as torch would, use memory in it, and release both."""
    import ctypes

    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    try:
        driver("cuCtxSetCurrent", context)
        _report(device=number, step="memory")
        driver("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(MEMORY_BYTES))
        result = _write_and_read(driver, memory.value, number)
        _report(device=number, step="release")
        driver("cuMemFree_v2", memory)
    except _RefusedError:
        driver.ask("cuDevicePrimaryCtxRelease_v2", handle)
        raise
    driver("cuDevicePrimaryCtxRelease_v2", handle)
    return result


def _write_and_read(driver: _Driver, memory: int, number: int) -> dict[str, Any]:
    """Fill one half with a pattern, and the other with its complement; copy over that; read all."""
    import ctypes

    half = MEMORY_BYTES // 2
    pattern = 0xA5C30F00 | number
    _report(device=number, step="write")
    first, second = ctypes.c_uint64(memory), ctypes.c_uint64(memory + half)
    count = ctypes.c_size_t(half // 4)
    driver("cuMemsetD32_v2", first, ctypes.c_uint32(pattern), count)
    driver("cuMemsetD32_v2", second, ctypes.c_uint32(pattern ^ 0xFFFFFFFF), count)
    driver("cuCtxSynchronize")
    _report(device=number, step="copy")
    driver("cuMemcpyDtoD_v2", second, first, ctypes.c_size_t(half))
    driver("cuCtxSynchronize")
    _report(device=number, step="read")
    expected = pattern.to_bytes(4, "little") * (_CHUNK_BYTES // 4)
    room = ctypes.create_string_buffer(_CHUNK_BYTES)
    for at in range(0, MEMORY_BYTES, _CHUNK_BYTES):
        size = ctypes.c_size_t(_CHUNK_BYTES)
        driver("cuMemcpyDtoH_v2", room, ctypes.c_uint64(memory + at), size)
        got = room.raw
        if got != expected:
            place = next(i for i in range(_CHUNK_BYTES) if got[i] != expected[i])
            return {"good": False, "step": "compare", "differs_at": at + place}
    return {"good": True}


if __name__ == "__main__":
    touch()
