"""What an exception says about the GPU: its memory is full, or this process can no longer use it.

After a sticky error every later CUDA call of the process fails, `empty_cache` included; only a new
process helps (https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html: "the process
must be terminated and relaunched"). After an out-of-memory error the process goes on. The kinds are
those of knowledge/failures.yaml; a test compares the two.
"""

from __future__ import annotations

OUT_OF_MEMORY = "cuda-oom"
STICKY = {
    "device-side assert triggered": "device-side-assert",
    "cudaerrorassert": "device-side-assert",
    "cuda_error_assert": "device-side-assert",
    "illegal memory access": "cuda-illegal-access",
    "cudaerrorillegaladdress": "cuda-illegal-access",
    "cuda_error_illegal_address": "cuda-illegal-access",
    "an illegal instruction was encountered": "cuda-illegal-access",
    "invalid program counter": "cuda-illegal-access",
    "misaligned address": "cuda-launch-failure",
    "unspecified launch failure": "cuda-launch-failure",
    "cudaerrorlaunchfailure": "cuda-launch-failure",
    "cuda_error_launch_failed": "cuda-launch-failure",
    "launch timed out and was terminated": "cuda-launch-timeout",
}
_MEMORY = (
    "cuda out of memory",
    "hip out of memory",
    "cuda error: out of memory",
    "cudaerrormemoryallocation",
    "cuda_error_out_of_memory",
    "cublas_status_alloc_failed",
)
_GPU = ("cuda", "hip", "cublas", "cudnn", "nccl", "gpu")
_LIBRARIES = ("torch", "jax", "jaxlib", "tensorflow", "cupy", "numba", "triton")
_IN_HANDLING = "another exception occurred:"  # in a traceback, between two exceptions
_CHAIN = 20  # exceptions of a chain that are looked at


def sticky_kind(error: BaseException) -> str:
    """Return the kind of the sticky error in an exception or in what led to it; "" for none.

    A script that catches such an error and raises another one, or prunes its trial, is in the same
    unusable process: `__context__` counts.
    """
    seen: list[BaseException] = []
    last: BaseException | None = error
    while last is not None and last not in seen and len(seen) < _CHAIN:
        seen.append(last)
        text = _text(last) if _is_of_gpu(last) else ""
        for words, kind in STICKY.items():
            if words in text:
                return kind
        last = last.__cause__ or last.__context__
    return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception, or the one that it was raised `from`, is a full GPU."""
    return _is_full(error) or (error.__cause__ is not None and _is_full(error.__cause__))


def _is_full(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    text = _text(error)
    if "OutOfMemoryError" in names and _library(error):
        return True
    if names & {"XlaRuntimeError", "JaxRuntimeError", "ResourceExhaustedError"}:
        return "resource_exhausted" in text or "ResourceExhaustedError" in names
    if "ProcessRaisedException" in names and _library(error):  # torch's; its text is a traceback
        text = text.rpartition(_IN_HANDLING)[2]
    elif not isinstance(error, RuntimeError):
        return False
    return any(words in text for words in _MEMORY)


def _is_of_gpu(error: BaseException) -> bool:
    if not isinstance(error, Exception):
        return False
    if not isinstance(error, RuntimeError) and not _library(error):
        return False
    text = _text(error)
    return any(word in text for word in _GPU)


def _library(error: BaseException) -> bool:
    return any(
        kind.__module__.partition(".")[0].partition("_")[0] in _LIBRARIES
        for kind in type(error).__mro__
    )


def _text(error: BaseException) -> str:
    try:
        return str(error).lower()
    except Exception:
        return ""
