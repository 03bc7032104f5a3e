"""Pure: does a variable of this name do anything under this torch?

    judge(name, torch, text) -> what is known about one name
    idle(environ, torch, text) -> the names that do nothing
    remark(idle, torch) -> the one line of a launch

This is the launch's part of the settings audit (report.py has the page): it reads no YAML. False
alarms are worse than silence, so that a launch speaks only of what torch's own source proves, of a
name that only torch could read, and of a name one slip away from a real one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from saferun.audit import variable_index
from saferun.audit.variable_index import Reader

FAMILIES = (
    *("TORCH", "PYTORCH", "CUDA", "NCCL_", "GLOO_", "TF_", "OMP_", "GOMP_", "KMP_"),
    *("PET_", "TRITON_"),
)
# In a job of a saferun around this one, which has spoken already, and set things itself.
NESTED = ("SAFERUN_ATTEMPT", "SAFERUN_INJECT")
TORCHS = ("TORCH", "PYTORCH", "PET_")  # families that no driver and no other library reads
OTHER_BUILDS = r"\+.*(rocm|xpu|hpu|npu)"
SHOWN = 4  # more names than these make no better line


class Verdict(NamedTuple):
    """What is known about a name.

    `kind` is "read"; "dead" (known to do nothing), "gone" or "later" (another torch reads it),
    "misspelt", "owned" (of libraries, only torch could read it, and does not): these do nothing;
    "foreign" or "unknown": nothing can be said.
    """

    kind: str
    near: str = ""  # the name that was probably meant, or who reads it: "torch 2.5.1"
    by: tuple[Reader, ...] = ()


DOES_NOTHING = ("dead", "gone", "later", "misspelt", "owned")


def nested(environ: Mapping[str, str]) -> bool:
    """Return whether a saferun around this one has made the environment."""
    return any(name in environ for name in NESTED)


def concerned(environ: Mapping[str, str]) -> list[str]:
    """Return the names that an audit is about; one that no shell could export is none."""
    found = (name for name in environ if name.startswith(FAMILIES))
    return sorted(name for name in found if name.isascii() and name.isidentifier())


def idle(environ: Mapping[str, str], torch: str | None, text: str) -> dict[str, Verdict]:
    """Return the settings of an environment that do nothing, unless the job's code reads them.

    Args:
        environ: the user's own.
        torch: the installed release; None where it is not known.
        text: of knowledge/variables.yaml; "" where it did not travel along.
    """
    given = [name for name in concerned(environ) if environ[name]] if text else []
    verdicts = {name: judge(name, torch, text) for name in given}
    return {name: verdict for name, verdict in verdicts.items() if verdict.kind in DOES_NOTHING}


def remark(idle: Mapping[str, Verdict], torch: str | None) -> str:
    """Return one line about settings that have no reader, "" where there is none."""
    if not idle:
        return ""
    told = [name + _hint(idle[name]) for name in list(idle)[:SHOWN]]
    told += [f"{len(idle) - SHOWN} more"] if len(idle) > SHOWN else []
    where = f"torch {torch.partition('+')[0]}" if torch else "torch"
    have = "has" if len(idle) == 1 else "have"
    return f"{_and(told)} {have} no reader in {where} (see: saferun doctor)"


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _hint(verdict: Verdict) -> str:
    if verdict.kind == "misspelt":
        return f" ({verdict.near}?)"
    return f" ({verdict.near} has)" if verdict.near else ""


# --- one name


def judge(name: str, torch: str | None, text: str) -> Verdict:
    """Return what is known about a name.

    Args:
        name: of a variable.
        torch: the installed release; None where it is not known.
        text: of knowledge/variables.yaml.
    """
    by = variable_index.look_up(text, name)
    if by:
        return _dated(name, by, torch, text)
    driver = variable_index.listed(text, "driver")
    if name in driver:
        return Verdict("foreign", "the CUDA driver")
    if _listed(name, variable_index.listed(text, "others")) or _rccl(name, torch):
        return Verdict("foreign")
    if by is not None:
        return Verdict("dead" if torch is None or _covers(torch, text) else "unknown")
    known = (*variable_index.names(text), *driver)
    near = _with_prefix(name, known) or slip(name, known)
    if near:
        return Verdict("misspelt", near)
    owned = name.startswith(tuple(variable_index.listed(text, "owned"))) and _covers(torch, text)
    return Verdict("owned" if owned else "unknown")


def _dated(name: str, by: tuple[Reader, ...], torch: str | None, text: str) -> Verdict:
    """A variable of torch alone, read in the source of other releases only, has no reader here.

    The data are of CUDA builds, so that nothing follows from them for others.
    """
    alone = [reader.library for reader in by] == ["torch"] and name.startswith(TORCHS)
    if torch is None or not alone or not by[0].certain or re.search(OTHER_BUILDS, torch):
        return Verdict("read", by=by)
    order = variable_index.releases(text, "torch")
    if variable_index.reads(by[0], torch, order) is not False:
        return Verdict("read", by=by)
    here = variable_index.version(torch)
    older = [release for release in by[0].releases if variable_index.version(release) < here]
    if older:
        return Verdict("gone", f"torch {older[-1]}", by)
    return Verdict("later", f"torch {by[0].releases[0]}", by)


def _rccl(name: str, torch: str | None) -> bool:
    """Whether AMD's RCCL would read it, of whose names we know nothing."""
    return name.startswith("NCCL_") and "rocm" in (torch or "")


def _with_prefix(name: str, known: Sequence[str]) -> str:
    """Return the name that is meant where torch's NCCL_ settings and NCCL's own are mixed up."""
    other = name[len("TORCH_") :] if name.startswith("TORCH_NCCL_") else f"TORCH_{name}"
    return other if "NCCL_" in name and other in known else ""


def _covers(torch: str | None, text: str) -> bool:
    """Whether the data speak of this torch: not of one that is newer or older than all of it."""
    order = variable_index.releases(text, "torch")
    if torch is None or not order:
        return False
    return (
        variable_index.version(order[0])
        <= variable_index.version(torch)
        <= variable_index.version(order[-1])
    )


def _listed(name: str, patterns: Sequence[str]) -> bool:
    return any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
        for pattern in patterns
    )


def slip(name: str, known: Sequence[str]) -> str:
    """Return the known name that differs by one letter: wrong, missing, too many or swapped."""
    for other in known:
        if abs(len(other) - len(name)) <= 1 and other[:2] == name[:2] and _one_slip(name, other):
            return other
    return ""


def _one_slip(name: str, other: str) -> bool:
    start = 0
    while start < min(len(name), len(other)) and name[start] == other[start]:
        start += 1
    end = 0
    while end < min(len(name), len(other)) - start and name[-1 - end] == other[-1 - end]:
        end += 1
    one, two = name[start : len(name) - end], other[start : len(other) - end]
    if any(letter.isdigit() for letter in one + two):
        return False  # a number at the end makes another name, not a slip
    return (len(one) <= 1 and len(two) <= 1) or (len(one) == 2 and one == two[::-1])
