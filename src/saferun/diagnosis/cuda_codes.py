"""Pure: the names of CUDA's errors where a program prints only their numbers.

`CUDA error 700`, `failed with error 719` of a library and `code=77(...)` mean what the runtime's
names say. The name is added to the line, so that the same signs fit it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
    return [_named(line) if _may_have(line.text) else line for line in lines]


def _may_have(text: str) -> bool:
    """Return whether a line may report an error with its number: a cheap test, for every line."""
    if not ("rror" in text or "ail" in text or "ode" in text or "RROR" in text):
        return False
    return "uda" in text or "UDA" in text or "hysX" in text or " cu" in text or text[:2] == "cu"


def _named(line: Line) -> Line:
    found = _NUMBER.search(line.text[:1000])
    name = _NAMES.get(int(found["number"])) if found else None
    if name is None or name.lower() in line.text.lower():
        return line
    return line._replace(text=f"{line.text} ({name})")
