"""Pure: does a variable of this name have an effect under this torch?

    judge(name, torch, text) -> the reading of one name
    idle(environ, torch, text) -> the names that have no effect
    remark(idle, torch) -> the line that a launch prints

This is the launch's part of the settings audit (report.py makes the full report): it reads no YAML.
A false alarm is worse than silence. So a launch mentions only names that nothing reads according to
torch's own source, names that only torch could read, and names that differ from a real one by one
letter.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from saferun.audit import variable_index
from saferun.audit.variable_index import Reader

FAMILIES = (
    *("TORCH", "PYTORCH", "CUDA", "NCCL_", "GLOO_", "TF_", "OMP_", "GOMP_", "KMP_"),
    *("PET_", "TRITON_"),
)
# Terraform's variables begin like TensorFlow's (https://developer.hashicorp.com/terraform/cli/config/
# environment-variables); they have nothing to do with a job.
TERRAFORM = (
    *("TF_VAR_", "TF_CLI_", "TF_LOG", "TF_PLUGIN_", "TF_TOKEN_", "TF_STATE", "TF_REGISTRY_"),
    *("TF_DATA_DIR", "TF_WORKSPACE", "TF_INPUT", "TF_IN_AUTOMATION", "TF_IGNORE", "TF_REATTACH_"),
)
# An outer saferun sets these in its job. It has already printed this line, and sets variables
# itself.
NESTED = ("SAFERUN_ATTEMPT", "SAFERUN_INJECT")
TORCH_FAMILIES = ("TORCH", "PYTORCH", "PET_")  # families that no driver and no other library reads
OTHER_BUILDS = r"\+.*(rocm|xpu|hpu|npu)"
MOST_SHOWN = 4  # a line with more names is harder to read


class Reading(NamedTuple):
    """What is known about who reads a variable.

    `kind` is one of:

    - "read": somebody reads it.
    - "dead" (known to have no effect), "gone" or "later" (only another torch release reads it),
      "misspelt", "owned" (only torch could read it, and does not). All of these have no effect.
    - "foreign" or "unknown": nothing can be said.
    """

    kind: str
    near: str = ""  # the name that was probably meant, or the reader: "torch 2.5.1"
    by: tuple[Reader, ...] = ()


NO_EFFECT = ("dead", "gone", "later", "misspelt", "owned")


def nested(environ: Mapping[str, str]) -> bool:
    """Return whether an outer saferun has made this environment."""
    return any(name in environ for name in NESTED)


def audited(environ: Mapping[str, str]) -> list[str]:
    """Return the names that the audit covers, sorted, except those that no shell can export."""
    found = (n for n in environ if n.startswith(FAMILIES) and not n.startswith(TERRAFORM))
    return sorted(name for name in found if name.isascii() and name.isidentifier())


def idle(environ: Mapping[str, str], torch: str | None, text: str) -> dict[str, Reading]:
    """Return the settings of an environment that have no effect, unless the job's code reads them.

    Args:
        environ: the user's own environment.
        torch: the installed release; None if unknown.
        text: content of knowledge/variables.yaml; "" in a bundle, which does not include it.

    Returns:
        The reading of each such variable, by name.
    """
    exported = [name for name in audited(environ) if environ[name]] if text else []
    readings = {name: judge(name, torch, text) for name in exported}
    return {name: reading for name, reading in readings.items() if reading.kind in NO_EFFECT}


def remark(idle: Mapping[str, Reading], torch: str | None) -> str:
    """Return one line about settings that have no reader; "" if there are none.

    Args:
        idle: the settings without a reader, by name (`idle`).
        torch: the installed release; None if unknown.
    """
    if not idle:
        return ""
    names = [name + _hint(idle[name]) for name in list(idle)[:MOST_SHOWN]]
    names += [f"{len(idle) - MOST_SHOWN} more"] if len(idle) > MOST_SHOWN else []
    where = f"torch {torch.partition('+')[0]}" if torch else "torch"
    have = "has" if len(idle) == 1 else "have"
    return f"{_and(names)} {have} no reader in {where} (see: saferun doctor)"


def _and(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _hint(reading: Reading) -> str:
    if reading.kind == "misspelt":
        return f" ({reading.near}?)"
    return f" ({reading.near} has)" if reading.near else ""


# One name


def judge(name: str, torch: str | None, text: str) -> Reading:
    """Return the reading of one variable.

    Args:
        name: the variable's name.
        torch: the installed release; None if unknown.
        text: content of knowledge/variables.yaml.

    Returns:
        Who reads it, or why nobody does.
    """
    by = variable_index.look_up(text, name)
    if by:
        return _in_release(name, by, torch, text)
    driver = variable_index.listed(text, "driver")
    if name in driver:
        return Reading("foreign", "the CUDA driver")
    others = variable_index.listed(text, "others")
    if any(fnmatch.fnmatchcase(name, other) for other in others) or _rccl(name, torch):
        return Reading("foreign")
    if by is not None:
        return Reading("dead" if torch is None or _covers(torch, text) else "unknown")
    known = (*variable_index.names(text), *driver)
    near = _with_prefix(name, known) or one_slip_away(name, known)
    if near:
        return Reading("misspelt", near)
    owned = name.startswith(tuple(variable_index.listed(text, "owned"))) and _covers(torch, text)
    return Reading("owned" if owned else "unknown")


def _in_release(name: str, by: tuple[Reader, ...], torch: str | None, text: str) -> Reading:
    """Return the reading of a variable that some library reads in some release.

    A variable that only torch reads has no reader here if only other releases read it. The data
    describe CUDA builds, so they prove nothing about other builds.
    """
    alone = [reader.library for reader in by] == ["torch"] and name.startswith(TORCH_FAMILIES)
    if torch is None or not alone or not by[0].certain or re.search(OTHER_BUILDS, torch):
        return Reading("read", by=by)
    order = variable_index.releases(text, "torch")
    if variable_index.reads(by[0], torch, order) is not False:
        return Reading("read", by=by)
    here = variable_index.version(torch)
    older = [release for release in by[0].releases if variable_index.version(release) < here]
    if older:
        return Reading("gone", f"torch {older[-1]}", by)
    return Reading("later", f"torch {by[0].releases[0]}", by)


def _rccl(name: str, torch: str | None) -> bool:
    """Return whether AMD's RCCL may read a variable; our data do not list what RCCL reads."""
    return name.startswith("NCCL_") and "rocm" in (torch or "")


def _with_prefix(name: str, known: Sequence[str]) -> str:
    """Return the intended name if torch's NCCL_ settings and NCCL's own are mixed up."""
    other = name[len("TORCH_") :] if name.startswith("TORCH_NCCL_") else f"TORCH_{name}"
    return other if "NCCL_" in name and other in known else ""


def _covers(torch: str | None, text: str) -> bool:
    """Return whether the data cover this torch: it is neither newer nor older than all of them."""
    order = variable_index.releases(text, "torch")
    if torch is None or not order:
        return False
    return (
        variable_index.version(order[0])
        <= variable_index.version(torch)
        <= variable_index.version(order[-1])
    )


def one_slip_away(name: str, known: Sequence[str]) -> str:
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
        return False  # names that end in different numbers are different names, not a slip
    return (len(one) <= 1 and len(two) <= 1) or (len(one) == 2 and one == two[::-1])
