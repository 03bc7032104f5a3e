"""Pure: names for errors of CUDA and Ascend that a program prints only as numbers.

`CUDA error 700`, a library's `failed with error 719` and `code=77(...)` use the runtime's numbers;
`cuBLAS error 13` uses the library's. The name is added to the line, so that the signs that know the
name fit it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from saferun.diagnosis.reading.log_lines import Line

Numbers = Mapping[str, Mapping[int, str]]  # library that defines them -> number -> name
# A check of TensorFlow or XLA, whose left side is the status of CUDA or HIP.
_CHECKED = re.compile(r"\b(?:cuda|hip)Success \((?P<number>\d{1,3}) vs\. 0\)")
# A line of ROCm's queues with its status (hsa_status_t of hsa.h).
_ABORTED = re.compile(
    r"\baborting with (?:status|error) ?: .{0,300}?\b0x(?P<number>[0-9a-f]{1,4})\b"
)
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
_FAILED = re.compile(r"error|fail|status", re.I)
_NUMBER = re.compile(
    r"\b(?:cuda|cu[A-Z]\w{2,40}|physx)[^\n]{0,120}?"
    r"\b(?<!exit )(?<!exit: )(?<!return )(?:errors?|failure|failed!?|code)(?: code)?[ =:(#]{1,4}"
    r"(?P<number>\d{1,3})(?![.:]?\d)(?=\s{0,3}(?:$|[().,;:'\"\]-]|(?:at|in|on|from) ))",
    re.I,
)


def named(lines: Sequence[Line], numbers: Numbers) -> list[Line]:
    """Return the lines; a CUDA error's name is added after its number.

    Args:
        lines: the log's lines.
        numbers: the meanings of the numbers (`Knowledge.numbers`).
    """
    return [_named(line, numbers) for line in lines]


def _named(line: Line, numbers: Numbers) -> Line:
    found = (numbers[of].get(number) for of, number in _numbers(line.text[:1000]))
    name = next(filter(None, found), None)
    if name is None or name.lower() in line.text.lower():
        return line
    return line._replace(text=f"{line.text} ({name})")


def _numbers(text: str) -> Iterator[tuple[str, int]]:
    """Yield the numbers of errors in a line, each with what defines it, the surest first."""
    if any(word in text for word in _NPU_WORDS) and (found := _NPU_NUMBER.search(text)):
        yield "npu", int(found["number"])
    if found := _CHECKED.search(text):
        yield from (("cuda", int(found["number"])), ("check", int(found["number"])))
    if found := _ABORTED.search(text):
        yield "hsa", int(found["number"], 16)
    if _FAILED.search(text) and (found := _OF_LIBRARY.search(text)):
        yield found["library"].lower(), int(found["number"])
    if found := _NUMBER.search(text):
        yield "cuda", int(found["number"])
