"""Pure: the names of CUDA's and Ascend's errors where a program prints only their numbers.

`CUDA error 700`, `failed with error 719` of a library and `code=77(...)` mean what the runtime's
names say, `cuBLAS error 13` what the library's say. The name is added to the line, so that the same
signs fit it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from saferun.diagnosis.reading.log_lines import Line

# Of the runtime since CUDA 10.1, which are those of the driver, and before. A number that means
# two things is left out. https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
_NAMES = {
    35: "CUDA driver version is insufficient",
    46: "all CUDA-capable devices are busy or unavailable", 48: "no kernel image is available",
    59: "device-side assert triggered", 74: "cudaErrorMisalignedAddress",
    77: "cudaErrorIllegalAddress", 79: "uncorrectable ECC error encountered",
    98: "invalid device function",
    100: "no CUDA-capable device is detected", 101: "invalid device ordinal",
    209: "no kernel image is available", 214: "uncorrectable ECC error encountered",
    700: "cudaErrorIllegalAddress", 702: "cudaErrorLaunchTimeout",
    710: "device-side assert triggered", 716: "cudaErrorMisalignedAddress",
    719: "cudaErrorLaunchFailure",
    802: "CUDA_ERROR_SYSTEM_NOT_READY", 999: "cuda error: unknown error",
}  # fmt: skip
# Of the libraries, each with numbers of its own; of cuDNN those before version 9.
# https://docs.nvidia.com/cuda/curand/group__HOST.html and the pages of the others
_OF_LIBRARIES = {
    "curand": {
        102: "CURAND_STATUS_ALLOCATION_FAILED", 201: "CURAND_STATUS_LAUNCH_FAILURE",
        203: "CUDA driver initialization failed", 204: "no kernel image is available",
    },
    "cublas": {
        1: "CUBLAS_STATUS_NOT_INITIALIZED", 3: "CUBLAS_STATUS_ALLOC_FAILED",
        7: "CUBLAS_STATUS_INVALID_VALUE", 8: "CUBLAS_STATUS_ARCH_MISMATCH",
        13: "CUBLAS_STATUS_EXECUTION_FAILED", 14: "CUBLAS_STATUS_INTERNAL_ERROR",
        15: "CUBLAS_STATUS_NOT_SUPPORTED",
    },
    "cudnn": {
        1: "CUDNN_STATUS_NOT_INITIALIZED", 2: "CUDNN_STATUS_ALLOC_FAILED",
        3: "CUDNN_STATUS_BAD_PARAM", 4: "CUDNN_STATUS_INTERNAL_ERROR",
        8: "CUDNN_STATUS_EXECUTION_FAILED", 9: "CUDNN_STATUS_NOT_SUPPORTED",
    },
    "cufft": {2: "CUFFT_ALLOC_FAILED", 5: "CUFFT_INTERNAL_ERROR", 6: "CUFFT_EXEC_FAILED"},
}  # fmt: skip
# Of Ascend's runtime (rt_error_codes.h of CANN), by what its own messages or CUDA's say of them.
# Those that may be anything, as an internal error, are left out.
_TIMED_OUT, _ENDED = "stream synchronize timeout", "unspecified launch failure"
_LOST, _FAULT, _MEMORY = "reason=[lost heartbeat]", "illegal memory access", "NPU out of memory"
_OF_NPUS = {
    107001: "invalid device id", 107019: _TIMED_OUT, 107020: _TIMED_OUT, 207001: _MEMORY,
    207004: "no CUDA-capable device is detected", 207018: _MEMORY, 507010: _LOST,
    507012: _TIMED_OUT, 507013: _ENDED, 507014: _ENDED,
    507015: _FAULT, 507016: _FAULT, 507017: _ENDED, 507018: _FAULT,
    507034: _ENDED, 507035: _FAULT, 507036: _FAULT, 507042: _FAULT, 507043: _FAULT,
    507044: _FAULT, 507045: _FAULT, 507046: _TIMED_OUT, 507047: _TIMED_OUT, 507048: _TIMED_OUT,
    507049: _FAULT, 507050: _FAULT, 507053: "uncorrectable ECC error encountered",
    507054: "uncorrectable ECC error encountered", 507055: "uncorrectable ECC error encountered",
    507056: "uncorrectable NVLink error", 507901: _LOST,
}  # fmt: skip
# A check of TensorFlow's and XLA's, whose left side is the status of CUDA or HIP.
_CHECKED = re.compile(r"\b(?:cuda|hip)Success \((?P<number>\d{1,3}) vs\. 0\)")
_OF_CHECKS = {**_NAMES, 2: "cuda error: out of memory"}
# Of ROCm's queues (hsa_status_t of hsa.h).
_ABORTED = re.compile(
    r"\baborting with (?:status|error) ?: .{0,300}?\b0x(?P<number>[0-9a-f]{1,4})\b"
)
_OF_QUEUES = {
    0x29: _FAULT, 0x2A: "an illegal instruction was encountered", 0x2B: _FAULT,
    0x1008: "HIP out of memory", 0x100F: "no kernel image is available",
    0x1016: "unspecified launch failure",
}  # fmt: skip
_NPU_WORDS = ("NPU", "npu", "acl", "Acl", "scend", "runtime result", "HCCL", "hccl")
_NPU_NUMBER = re.compile(
    r"(?:\b(?:error ?code|runtime result|ret(?:urn)?(?: ?code)?|errno)(?: is)?[ =:\[(]{1,4}"
    r"|\bEZ?\d{4,5}: )(?P<number>[125]07\d{3})(?!\d)",
    re.I,
)
_OF_LIBRARY = re.compile(
    r"\b(?P<library>curand|cublas|cudnn|cufft)(?:lt)?(?:_?(?:status|error))?\b[^\n\d]{0,60}?"
    r"(?<=[\s=:(#])(?P<number>\d{1,3})(?![.:]?\d)(?=\s{0,3}(?:$|[(),;'\"\]-]|(?:at|in|on|from) ))",
    re.I,
)
_HINTS = ("rror", "ail", "ode", "RROR", "tatus", "TATUS")
_OF_CUDA = (
    "uda",
    "UDA",
    "hysX",
    " cu",
    "urand",
    "URAND",
    "ublas",
    "UBLAS",
    "uBLAS",
    "udnn",
    "uDNN",
    "hipS",
    "aborting with ",
)
_FAILED = re.compile(r"error|fail|status", re.I)
_NUMBER = re.compile(
    r"\b(?:cuda|cu[A-Z]\w{2,40}|physx)[^\n]{0,120}?"
    r"\b(?<!exit )(?<!exit: )(?<!return )(?:errors?|failure|failed!?|code)(?: code)?[ =:(#]{1,4}"
    r"(?P<number>\d{1,3})(?![.:]?\d)(?=\s{0,3}(?:$|[().,;:'\"\]-]|(?:at|in|on|from) ))",
    re.I,
)


def named(lines: Sequence[Line]) -> list[Line]:
    """Return the lines, those with a number of a CUDA error with its name behind.

    Args:
        lines: the log's.
    """
    changed = list(lines)
    for at in _rows_with_hints(lines):
        if _may_have(lines[at].text):
            changed[at] = _named(lines[at])
    return changed


def _rows_with_hints(lines: Sequence[Line]) -> set[int]:
    """Return the indices of the lines with a word of a failure; all lines are searched at once."""
    texts = [line.text for line in lines]
    whole = "\n".join(texts)
    ends = list(accumulate([len(text) + 1 for text in texts]))
    rows = set()
    for word in _HINTS:
        at = whole.find(word)
        while at >= 0:
            row = bisect_right(ends, at)
            rows.add(row)
            at = whole.find(word, ends[row])
    return rows


def _may_have(text: str) -> bool:
    """Return whether a line with a word of a failure may report an error of CUDA's."""
    return any(word in text for word in _OF_CUDA) or text[:2] in ("cu", "Cu", "CU") or "07" in text


def _of_library(text: str) -> str | None:
    """Return the name of the error that a library's number in a line stands for."""
    found = _OF_LIBRARY.search(text) if _FAILED.search(text) else None
    return _OF_LIBRARIES[found["library"].lower()].get(int(found["number"])) if found else None


def _of_npu(text: str) -> str | None:
    """Return the name of the error that a number of Ascend's runtime in a line stands for."""
    if "07" not in text or not any(word in text for word in _NPU_WORDS):
        return None
    found = _NPU_NUMBER.search(text)
    return _OF_NPUS.get(int(found["number"])) if found else None


def _of_status(text: str) -> str | None:
    """Return the name of the error that a status in a line stands for, as runtimes print it."""
    if found := _CHECKED.search(text):
        return _OF_CHECKS.get(int(found["number"]))
    if found := _ABORTED.search(text):
        return _OF_QUEUES.get(int(found["number"], 16))
    return None


def _named(line: Line) -> Line:
    text = line.text[:1000]
    name = _of_npu(text) or _of_status(text) or _of_library(text)
    if name is None:
        found = _NUMBER.search(text)
        name = _NAMES.get(int(found["number"])) if found else None
    if name is None or name.lower() in line.text.lower():
        return line
    return line._replace(text=f"{line.text} ({name})")
