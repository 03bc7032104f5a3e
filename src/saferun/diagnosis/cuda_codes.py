"""Pure: the names of CUDA's errors where a program prints only their numbers.

`CUDA error 700`, `failed with error 719` of a library and `code=77(...)` mean what the runtime's
names say, `cuBLAS error 13` what the library's say. The name is added to the line, so that the same
signs fit it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.diagnosis.log_reader import Line

# Of the runtime since CUDA 10.1, which are those of the driver, and before. A number that means
# two things is left out. https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
_NAMES = {
    35: "CUDA driver version is insufficient",
    46: "all CUDA-capable devices are busy or unavailable", 48: "no kernel image is available",
    59: "device-side assert triggered", 74: "cudaErrorMisalignedAddress",
    77: "cudaErrorIllegalAddress", 79: "uncorrectable ECC error encountered",
    100: "no CUDA-capable device is detected", 101: "invalid device ordinal",
    209: "no kernel image is available", 214: "uncorrectable ECC error encountered",
    700: "cudaErrorIllegalAddress", 710: "device-side assert triggered",
    716: "cudaErrorMisalignedAddress", 719: "cudaErrorLaunchFailure",
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
    return any(word in text for word in _OF_CUDA) or text[:2] in ("cu", "Cu", "CU")


def _of_library(text: str) -> str | None:
    """Return the name of the error that a library's number in a line stands for."""
    found = _OF_LIBRARY.search(text) if _FAILED.search(text) else None
    return _OF_LIBRARIES[found["library"].lower()].get(int(found["number"])) if found else None


def _named(line: Line) -> Line:
    text = line.text[:1000]
    name = _of_library(text)
    if name is None:
        found = _NUMBER.search(text)
        name = _NAMES.get(int(found["number"])) if found else None
    if name is None or name.lower() in line.text.lower():
        return line
    return line._replace(text=f"{line.text} ({name})")
