"""Pure: the innermost frame of the user's own code in a log, above what libraries called."""

from __future__ import annotations

import re
from collections.abc import Iterable

from saferun.diagnosis.reading.log_lines import Line

_FRAME = re.compile(
    r'File "(?P<path>[^"]{1,400})", line (?P<line>\d{1,9}),? in (?P<name>\S.{0,200}?)\s{0,8}$'
)
_BOXED = re.compile(r"(?P<path>/\S{1,400}\.py):(?P<line>\d{1,9}) in (?P<name>\S{1,200})\s{0,8}$")
# The source line below a frame; in a box, the one that the pointer marks.
_SOURCE = re.compile(
    r"(?:\s{0,8}❱\s{0,4}\d{1,9}\s{0,2}│?|(?!\s{0,8}(?:❱|│|\d{1,6}\s))\s{2,12})"
    r"\s{0,80}(?P<code>[^\s^~│].{0,120}?)\s{0,80}│?$"
)
# Installed code, the interpreter's own, a launcher's, and our hooks.
_OTHERS = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<|/bin/\w{1,40}$|/saferun/(?:base|inject)/|\.px[di]$|\.pyx$"
    r"|/torch/(?:(?:_\w{1,30}|serialization|storage|functional|hub|library)\.py$"  # its sources
    r"|(?:_\w{1,30}|nn|distributed|cuda|utils|optim|autograd|multiprocessing|jit|fx|export)/)"
)
_PACKAGES = (  # a path may be cut within one of these names
    *("torch", "triton", "requests", "urllib3", "httpx", "httpcore", "aiohttp", "huggingface_hub"),
    *("datasets", "deepspeed", "accelerate", "lightning", "pytorch_lightning", "transformers"),
    *("megatron", "jax", "jaxlib", "tensorflow", "keras"),
)
# Code that may stand below the last complete frame of a cut traceback. Calls to a device, other
# ranks, a compiler or a server can fail for reasons outside the script.
_MAY_PASS = re.compile(
    rf"/(?:{'|'.join(_PACKAGES)}|lightning\w{{1,20}}|ray|multiprocessing|concurrent|subprocess\.py"
    r"|socket\.py|ssl\.py|http|asyncio)\b|<frozen "
)
_HIDES_MORE = re.compile(
    r"\b(?:backward|barrier|all_?(?:gather|reduce)\w{0,20}|broadcast|init_process_group|synchronize"
    r"|cuda|to|item|from_pretrained|load_dataset|\w{0,20}download\w{0,20}|wait|compile|dist|save)"
    r"[.(]|requests\.|urlopen"
)
_CUT_PATH = re.compile(r'File "[^"]{0,400}$')
_CUT_NAME = re.compile(r"-packages/(\w{3,80})$")
# Code and calls that reach a device, other ranks, a compiler or a server.
_REACHES = re.compile(
    r"/torch/(?:nn|distributed|cuda|_inductor|_dynamo|_functorch|_tensor|autograd|serialization|storage"
    r"|multiprocessing/(?:queue|reductions))\b|/(?:triton|requests|urllib3|httpx|httpcore|aiohttp"
    r"|huggingface_hub|datasets|ray|jaxlib|grpc|socket\.py|ssl\.py|http|asyncio|concurrent)\b"
    r"|\b(?:backward|barrier|all_?(?:gather|reduce)\w{0,20}|broadcast|init_process_group|new_group"
    r"|synchronize|load_dataset|from_pretrained|\w{0,20}download\w{0,20}|wait|compiled?|cuda|urlopen)\("
    r"|\bdist\.|requests\.|ray\.get"
)
_FIRST, _LAST = "most recent call first", "most recent call last"


def innermost(lines: Iterable[Line]) -> str:
    """Return the innermost frame of the user's code in the last stack that has one.

    Returns:
        Text such as `train.py:9 loss.backward()`, without the source line if the stack has none; ""
        if no stack shows the user's code.
    """
    found: list[str] = []
    upwards: dict[int | None, bool] = {}  # rank -> whether its innermost frame comes first, as in C
    taken: set[int | None] = set()
    waiting: dict[int | None, list[str]] = {}  # rank -> a frame whose source line may follow
    for line in lines:
        text = line.text
        if _FIRST in text or _LAST in text:
            upwards[line.rank] = _FIRST in text
            taken.discard(line.rank)
        elif 'File "' in text or (".py:" in text and _BOXED.search(text)):
            waiting.pop(line.rank, None)
            frame = _users(text)
            if frame and not (upwards.get(line.rank) and line.rank in taken):
                taken.add(line.rank)
                found = waiting[line.rank] = [frame]
        elif (place := waiting.get(line.rank)) and (source := _SOURCE.match(text)):
            place.append(source["code"])
            del waiting[line.rank]
    return "  ".join(found)


def is_users(frame: str) -> bool:
    """Return whether a frame, with or without its source line, is in the user's code."""
    return bool(_users(frame.partition("\n")[0]))


def _users(text: str) -> str:
    """Return the place of a frame; "" if it is not in the user's code."""
    found = _FRAME.search(text) or _BOXED.search(text)
    if found is None or _OTHERS.search(found["path"]):
        return ""
    is_compiled = "." in found["name"].split()[0]  # by Cython: "package.module.f", below its source
    return "" if is_compiled and found["path"][0] != "/" else f"{found['path']}:{found['line']}"


def _in_what_may_pass(row: str) -> bool:
    """Return whether a frame is cut within the path of code that can fail for outside reasons."""
    if not _CUT_PATH.match(row):
        return False
    name = _CUT_NAME.search(row)
    begun = name is not None and any(package.startswith(name[1]) for package in _PACKAGES)
    return begun or _MAY_PASS.search(row) is not None


def of_cut(traceback: str) -> str:
    """Return whose fault a traceback shows that is cut before its exception.

    Returns:
        "own" if the last frame is a function of the script that calls nothing that can fail for
        outside reasons; "likely" if it ends in other code that reaches no device, other ranks,
        compiler or server; "" if it may be anything.
    """
    rows = [row.strip() for row in traceback.splitlines()]
    frames = [
        (at, _FRAME.match(row) or _BOXED.match(row))
        for at, row in enumerate(rows)
        if _FRAME.match(row) or _BOXED.match(row) or row.startswith("File ")
    ]
    if not frames:
        return ""
    at, last = frames[-1]
    if last is None and _in_what_may_pass(rows[at]):
        return ""  # the frames below are unknown
    calls = rows[at + 1 :]
    whole = last is not None and last["name"] != "<module>" and not _MAY_PASS.search(last["path"])
    if whole and not any(_HIDES_MORE.search(row) for row in calls):
        return "own"
    # The complete frame above a cut one counts, too.
    above = frames[-2][0] if last is None and len(frames) > 1 else at
    return "" if any(_REACHES.search(row) for row in rows[above:]) else "likely"
