"""Judge this process's GPU after an exception by its context, not by the text.

After a sticky error, such as a device-side assert, every later CUDA call of the process fails with
various messages: `CUBLAS_STATUS_EXECUTION_FAILED`, `CUFFT_INTERNAL_ERROR` and others. Only a new
process helps (https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html: "the process
must be terminated and relaunched"). `torch.cuda.synchronize` then raises the first error; on a
working context, even after an out-of-memory error, it returns in 10 to 85 microseconds. Texts
decide only if this process has no context of torch (JAX, CuPy, a process that the script started),
and between errors after which the context works. The kinds are those of knowledge/failures.yaml.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from ...base.phrases import says

with open(os.path.join(os.path.dirname(__file__), "cuda_words.json"), encoding="utf-8") as _file:
    _WORDS = json.load(_file)  # written by tools/cuda_words.py
OUT_OF_MEMORY = "cuda-oom"
OF_A_LIBRARY = "cublas-cudnn-failed"
OTHER = "cuda-error-other"
KINDS = {OUT_OF_MEMORY, OF_A_LIBRARY, OTHER, *(sign[0] for sign in _WORDS["sticky"])}

UNUSABLE = "unusable"  # no later CUDA call of this process works
PASSING = "passing"  # the process can continue: only this piece of work failed
UNCLEAR = "unclear"  # the context works, but a CUDA library failed

_LIBRARIES = ("torch", "jax", "jaxlib", "tensorflow", "cupy", "numba", "triton")
_OF_GPU = ("cuda", "hip", "nccl", "gpu")
_LIBRARY = re.compile(
    r"cu(blas|dnn|solver|sparse|rand)_status_\w|cufft_\w+_(error|failed|type|value|size|data|plan)"
    r"|\b(cuda( driver| runtime)?|cudnn|cufft|cublas(lt)?|cusolver|cusparse|curand|hip|triton|nvrtc"
    r") error\b"
)
_ALSO_MEMORY = "cublas_status_alloc_failed"
# Raised if no engine gets enough memory, and also if none supports the data type.
_MAYBE_MEMORY = (
    "unable to find an engine to execute",
    "unable to find a valid cudnn algorithm",
    "no valid execution plan",
)
_FULL_BYTES, _FULL_SHARE = 1 << 30, 20  # a GPU with less free memory is full: 1 GiB, or a twentieth
_IN_HANDLING = "another exception occurred:"  # line between two exceptions of a traceback
_CHAIN = 20  # longest chain of exceptions that is followed

unusable = ""  # the error that made this process's context unusable, if known


def judged(error: BaseException) -> tuple[str, str]:
    """Return an exception's meaning for this process, and its kind; "", "" if the script's own.

    Args:
        error: the exception being handled; the objects in its frames still take memory.
    """
    if kind := unusable_kind():
        return UNUSABLE, kind
    if kind := getattr(error, "saferun_kind", ""):  # from a guard, before any kernel asserts
        return PASSING, kind
    has_context = _cuda() is not None
    # If a script catches such an error and raises another, the process is still unusable.
    for one in (error, error.__cause__) if has_context else _chain(error):
        if one is not None and is_of_gpu(one) and (kind := _sticky(text_of(one))):
            return PASSING if has_context else UNUSABLE, kind
    for one in (error, error.__cause__):
        if one is not None and is_memory(one):
            return _without_room(one), OUT_OF_MEMORY
    if is_of_gpu(error) and _LIBRARY.search(text_of(error).lower()):
        return (_without_room(error), OUT_OF_MEMORY) if _is_full() else (UNCLEAR, OF_A_LIBRARY)
    return "", ""


def unusable_kind() -> str:
    """Test the contexts; return the kind of the error that made one unusable, "" for none."""
    first = probe()
    return (_sticky(first) or OTHER) if first else ""


def probe() -> str:
    """Test this process's contexts; return the error that made one unusable, "" for none.

    This waits for the work on each GPU that torch uses here.
    """
    global unusable
    cuda = _cuda()
    if cuda is None:
        return unusable
    try:
        for device in _devices(cuda):
            cuda.synchronize(device)
    except Exception as error:
        unusable = unusable or f"{type(error).__name__}: {text_of(error)}"
    return unusable


def probe_at_once() -> str:
    """Do the same without waiting for the GPU: in a rank a collective may never end."""
    global unusable
    cuda = _cuda()
    if cuda is not None and not unusable:
        try:
            cuda.current_stream().query()
        except Exception as error:
            unusable = f"{type(error).__name__}: {text_of(error)}"
    return unusable


def text_of(error: BaseException) -> str:
    """Return an exception's text; "" if it has none."""
    try:
        return str(error)
    except Exception:
        return ""


def _cuda() -> Any:
    """Return torch.cuda if torch has a context in this process, else None."""
    try:
        cuda = sys.modules["torch"].cuda
        return cuda if cuda.is_initialized() else None
    except Exception:
        return None


def _devices(cuda: Any) -> list[Any]:
    has_context = getattr(
        getattr(sys.modules["torch"], "_C", None), "_cuda_hasPrimaryContext", None
    )
    if has_context is None:
        return [None]
    return [one for one in range(cuda.device_count()) if has_context(one)]


def _is_full() -> bool:
    """Return whether the GPU has hardly any memory left; False if that cannot be determined."""
    try:
        free, total = _cuda().mem_get_info()
        return bool(free < max(_FULL_BYTES, total // _FULL_SHARE))
    except Exception:
        return False


def _without_room(error: BaseException) -> str:
    """Return PASSING if a piece of work took too much; UNCLEAR if torch's cache left no room.

    torch empties its cache before its own allocator gives up. But a CUDA library that creates its
    handle asks the driver, which has no memory left while torch caches what earlier work released
    (seen on an H100, torch 2.11: `CUSOLVER_STATUS_INTERNAL_ERROR` of `cusolverDnCreate`).
    """
    if any("OutOfMemoryError" in kind.__name__ for kind in type(error).__mro__):
        return PASSING
    try:
        cuda = _cuda()
        cached = cuda.memory_reserved() - cuda.memory_allocated()
    except Exception:
        return PASSING
    return UNCLEAR if cached >= _FULL_BYTES else PASSING


def _sticky(text: str) -> str:
    lower = text.lower()
    return next((kind for kind, parts, _, _ in _WORDS["sticky"] if says(parts, lower)), "")


def is_memory(error: BaseException) -> bool:
    """Return whether an exception means a full GPU."""
    if not isinstance(error, Exception) or isinstance(error, MemoryError):
        return False
    names = {kind.__name__ for kind in type(error).__mro__}
    if "OutOfMemoryError" in names or "ResourceExhaustedError" in names:
        return _is_of_library(error)
    text = text_of(error).lower()
    if "ProcessRaisedException" in names:  # torch's class, whose text is a traceback
        text = text.rpartition(_IN_HANDLING)[2]
    whole = f"{type(error).__module__}.{type(error).__name__}: {text}".lower()
    for _, parts, near, not_near in _WORDS["memory"]:
        is_near = not near or any(words in whole for words in near)
        if is_near and says(parts, text) and not any(words in whole for words in not_near):
            return True
    return _ALSO_MEMORY in text or (any(one in text for one in _MAYBE_MEMORY) and _is_full())


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    last: BaseException | None = error
    while last is not None and last not in seen and len(seen) < _CHAIN:
        seen.append(last)
        yield last
        last = last.__cause__ or last.__context__


def is_of_gpu(error: BaseException) -> bool:
    """Return whether an exception comes from CUDA, by its class and its text."""
    if not isinstance(error, RuntimeError) and not _is_of_library(error):
        return False
    text = text_of(error).lower()
    of_gpu = any(word in text for word in _OF_GPU) or bool(_LIBRARY.search(text))
    return isinstance(error, Exception) and of_gpu


def _is_of_library(error: BaseException) -> bool:
    return any(
        kind.__module__.partition(".")[0].partition("_")[0] in _LIBRARIES
        for kind in type(error).__mro__
    )
