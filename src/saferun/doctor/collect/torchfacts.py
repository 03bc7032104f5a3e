"""Examine the user's torch in a child, with the interpreter that the workers will use.

torch is never imported into saferun's own process, and may be installed in another environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saferun.base import untrusted
from saferun.doctor.vitals import Torch
from saferun.errors import UnavailableError
from saferun.planning.torchrun import torchrun_install
from saferun.system import command as bounded

_MARK = "saferun-torch:"
# This runs under any Python that torch supports. The folder that -c puts first on sys.path is
# removed, since torchrun does not have it. Nothing here makes a CUDA context. NCCL's version is
# read as in torch/cuda/nccl.py.
_PROGRAM = """
import os, sys
if sys.path[:1] == [""]:
    del sys.path[0]
out = os.dup(1)
os.dup2(2, 1)
import importlib.util, json, sysconfig
from importlib import metadata

def or_none(ask):
    try:
        return ask()
    except Exception:
        return None

def ptxas():
    root = os.path.dirname(importlib.util.find_spec("triton").origin)
    for tail in ("backends/nvidia/bin/ptxas", "common/../third_party/cuda/bin/ptxas"):
        path = os.path.join(root, tail)
        if os.access(path, os.X_OK):
            return path

include = sysconfig.get_paths()["include"]
facts = {
    "python": sys.version.split()[0],
    "executable": sys.executable,
    "python_h": os.path.exists(os.path.join(include, "Python.h")),
    "include": include,
    "triton": or_none(lambda: metadata.version("triton")),
    "ptxas": or_none(ptxas),
}
try:
    import torch
except BaseException as error:
    facts["error"] = "%s: %s" % (type(error).__name__, str(error)[:400])
else:
    facts.update(
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=getattr(torch.version, "hip", None),
        archs=or_none(lambda: torch._C._cuda_getArchFlags().split()) or [],
        nccl=or_none(lambda: ".".join(map(str, torch.cuda.nccl.version()))),
    )
os.write(out, ("MARK" + json.dumps(facts) + "\\n").encode())
""".replace("MARK", _MARK)


def ask(environ: Mapping[str, str], timeout_s: float) -> Torch:
    """Return facts about the interpreter of the user's torchrun; its faults raise nothing."""
    try:
        launcher = torchrun_install.find_launcher(environ)
    except UnavailableError as error:
        return Torch(trouble=str(error))
    command = " ".join(launcher.argv)
    python = torchrun_install.worker_interpreter(launcher, environ)
    if python is None:
        return Torch(command, unknown="its first lines do not show its Python")
    flags = ("-" + launcher.flags,) if launcher.flags else ()
    clean = {name: value for name, value in environ.items() if name != "SAFERUN_INJECT"}
    answer = bounded.run((python, *flags, "-c", _PROGRAM), clean, timeout_s)
    facts = _read(answer.out)
    if facts is None:
        last = "".join(answer.err.strip().splitlines()[-1:])
        why = ": ".join(filter(None, (python, answer.trouble or "no answer", last)))
        return Torch(command, unknown=why) if answer.status is None else Torch(command, why)
    trouble, archs = facts.pop("error", ""), tuple(facts.pop("archs", ()))
    return Torch(command, trouble, **facts, archs=archs)


def _read(text: str) -> dict[str, Any] | None:
    _, mark, line = text.rpartition(_MARK)
    known = untrusted.mapping(untrusted.value(line if mark else None))
    return {name: known[name] for name in known if name in (*Torch.__slots__, "error")} or None
