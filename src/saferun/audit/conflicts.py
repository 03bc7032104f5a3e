"""Pure: settings that contradict each other, or that the script overrides.

Each rule is one function of the environment and the facts, with its source beside it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from saferun.audit import alloc_conf, variable_index
from saferun.audit.effects import Effect
from saferun.audit.judge import one_slip_away
from saferun.audit.script_ast import Calls
from saferun.model import NOTE, PROBLEM, Finding, MachineFacts

AREA = "settings"
OLD_ALLOCATOR, ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
# Product names of GPUs that have NVLink in every machine that is sold with them.
NVLINKED = r"SXM|HGX|HBM3|H200|B200|B300|GH200|GB200"
NCCL_GUIDE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_PATHS = r"\d+|LOC|NVL|NVB|C2C|PIX|PXB|P2C|PXN|PHB|SYS"  # as in topoPathTypeStr
# From debug.cc of NCCL 2.20 to 2.32, which skips words that it does not know.
_SUBSYSTEMS = (
    "INIT|COLL|P2P|SHM|NET|GRAPH|TUNING|ENV|ALLOC|CALL|PROXY|NVLS|BOOTSTRAP|REG|PROFILE|RAS|ALL"
)
# Endings of the names of NCCL settings that are numbers (NCCL_PARAM in its sources).
_NUMBER = re.compile(
    r"NCCL_\w+_(?:DISABLE|ENABLE|TIMEOUT|RETRY_CNT|NTHREADS|N?CHANNELS|BUFFSIZE|GID_INDEX|CTAS"
    r"|QPS_PER_CONNECTION|CHUNKSIZE|TC|SL)|NCCL_(?:CROSS_NIC|NTHREADS|BUFFSIZE|NVLS_ENABLE)"
)
LEVELS = {
    "NCCL_DEBUG_SUBSYS": (
        rf"(?i)\^?(?:{_SUBSYSTEMS})(?:,(?:{_SUBSYSTEMS}))*",
        "NCCL_DEBUG=WARN or INFO for the level; NCCL_DEBUG_SUBSYS=INIT,NET for what it is about",
    ),
    "NCCL_DEBUG": ("(?i)version|warn|info|abort|trace", "NCCL_DEBUG=WARN, or INFO"),
    "NCCL_P2P_LEVEL": (_PATHS, "one of LOC, NVL, PIX, PXB, PHB, SYS"),
    "NCCL_NET_GDR_LEVEL": (_PATHS, "one of LOC, PIX, PXB, PHB, SYS"),
}


def findings(
    environ: Mapping[str, str],
    facts: MachineFacts,
    effects: Mapping[str, Effect],
    adapters: Collection[str] = (),
) -> Iterator[Finding]:
    """Yield every conflict in an environment.

    Args:
        environ: the user's own environment.
        facts: torch's release and the GPUs.
        effects: the effects of all variables, by name.
        adapters: names of the machine's InfiniBand and RoCE devices.
    """
    yield from _renamed(environ, effects)
    yield from _allocators(environ, facts)
    yield from _allocator_values(environ)
    yield from _graphs(environ)
    yield from _nvlink(environ, facts)
    yield from _adapters(environ, adapters)
    yield from _levels(environ, facts)
    yield from _numbers(environ, facts)
    yield from _refused(environ, effects)
    yield from _threads(environ)
    yield from _openmp(environ)


def _renamed(environ: Mapping[str, str], effects: Mapping[str, Effect]) -> Iterator[Finding]:
    """Yield old names that differ from their new names, which win (c10d/Utils.hpp, getCvar…)."""
    for old, entry in effects.items():
        new = entry.newer
        if new and old in environ and environ.get(new, environ[old]) != environ[old]:
            what = f"{old} is overruled by {new}={environ[new]}"
            detail = f"two names of one setting, with different values <{entry.source}>"
            yield Finding(PROBLEM, AREA, what, detail, f"unset {old}")


def _allocators(environ: Mapping[str, str], facts: MachineFacts) -> Iterator[Finding]:
    old, new = environ.get(OLD_ALLOCATOR), environ.get(ALLOCATOR)
    if old is not None and new is not None and old != new:
        what = f"{OLD_ALLOCATOR} and {ALLOCATOR} are both set, and differ"
        detail = (
            "which one counts has changed with torch's releases, and differs between the settings "
            "of all accelerators and those of CUDA <https://github.com/pytorch/pytorch/issues/183387>"
        )
        yield Finding(PROBLEM, AREA, what, detail, "set one, or both to the same")
    if new and old is None and variable_index.version(facts.torch or "")[:2] == (2, 9):
        what = f"{ALLOCATOR}: torch {facts.torch} takes no expandable_segments from it for CUDA"
        detail = "<https://github.com/pytorch/pytorch/issues/183387>"
        yield Finding(PROBLEM, AREA, what, detail, f"export {OLD_ALLOCATOR} with torch 2.9")


def _allocator_values(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name in (OLD_ALLOCATOR, ALLOCATOR):
        for what, fix in alloc_conf.errors(environ.get(name, "")):
            detail = (
                "torch reads it when a GPU is first used "
                "<https://docs.pytorch.org/docs/stable/notes/cuda.html>"
            )
            yield Finding(PROBLEM, AREA, f"{name}: {what}", detail, fix)


def _graphs(environ: Mapping[str, str]) -> Iterator[Finding]:
    given = {
        pair
        for name in (OLD_ALLOCATOR, ALLOCATOR)
        for pair in alloc_conf.items(environ.get(name, ""))
    }
    if ("expandable_segments", "True") in given and environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1":
        detail = (
            "a captured graph's own memory was long kept out of expandable segments; graphs on it "
            "were seen to hang, and with NCCL's registration of graph buffers to fail with an "
            "illegal memory access "
            "<https://github.com/pytorch/pytorch/pull/128068> "
            "<https://github.com/pytorch/torchtitan/issues/3306> "
            "<https://github.com/NVIDIA/Megatron-LM/pull/2572>"
        )
        what = "expandable_segments:True together with CUDA graphs (TORCHINDUCTOR_CUDAGRAPHS=1)"
        fix = "if steps hang or fail, NCCL_GRAPH_REGISTER=0 first, then one of the two left out"
        yield Finding(NOTE, AREA, what, detail, fix)


def _nvlink(environ: Mapping[str, str], facts: MachineFacts) -> Iterator[Finding]:
    """Yield that direct GPU copies are off; NVIDIA's driver has none for GeForce cards."""
    able = [gpu.name for gpu in facts.gpu.gpus if not re.search("GeForce|RTX [2345]0", gpu.name)]
    if _number(environ.get("NCCL_P2P_DISABLE", "")) and len(able) > 1:
        link = "using NVLink" if re.search(NVLINKED, able[0]) else "copying to each other directly"
        what = f"NCCL_P2P_DISABLE=1 keeps {len(able)} x {able[0]} from {link}"
        detail = (
            "the GPUs talk through host memory then, and a collective takes several times as long; "
            f"NVIDIA lists it under debugging, not to keep <{NCCL_GUIDE}>"
        )
        level = PROBLEM if "NVLink" in link else NOTE
        yield Finding(level, AREA, what, detail, "unset NCCL_P2P_DISABLE")


def _adapters(environ: Mapping[str, str], adapters: Collection[str]) -> Iterator[Finding]:
    if _number(environ.get("NCCL_IB_DISABLE", "")) and adapters:
        what = f"NCCL_IB_DISABLE=1 keeps NCCL from {', '.join(sorted(adapters)[:4])}"
        detail = (
            "machines talk over TCP then, without the cards that this machine has for it; it costs "
            f"nothing in a run of one machine <{NCCL_GUIDE}>"
        )
        yield Finding(PROBLEM, AREA, what, detail, "unset NCCL_IB_DISABLE")


def _number(text: str) -> int:
    """Return the number at the start of a text as NCCL reads it (strtoll); 0 if there is none."""
    found = re.match(r"\s*([+-]?)(?:0[xX]([0-9a-fA-F]+)|(0[0-7]*)|(\d+))", text)
    sign, *digits = found.groups() if found else ("", None, "0", None)
    return next(int(sign + d, base) for d, base in zip(digits, (16, 8, 10), strict=True) if d)


def _numbers(environ: Mapping[str, str], facts: MachineFacts) -> Iterator[Finding]:
    """Yield words where NCCL reads a number: NCCL silently takes the leading digits, or 0."""
    for name in sorted(filter(_NUMBER.fullmatch, environ)):
        value = environ[name].strip()
        if value and not re.fullmatch(r"[+-]?(?:0[xX][0-9a-fA-F]+|\d+)", value):
            meant = 1 if value.lower() in ("true", "yes", "on", "y", "t") else _number(value)
            what = f"{name}={value[:40]} counts as {_number(value)}, since NCCL reads a number"
            detail = "<https://github.com/NVIDIA/nccl/blob/v2.27.5-1/src/misc/param.cc>"
            yield Finding(PROBLEM, AREA, what, detail, f"write {meant}")


def _refused(environ: Mapping[str, str], effects: Mapping[str, Effect]) -> Iterator[Finding]:
    """Yield values for which torch ends the job while it is imported."""
    value = environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF")
    if value.upper() not in ("OFF", "INFO", "DETAIL"):
        what = (
            f"TORCH_DISTRIBUTED_DEBUG={value[:40]} ends the job when torch.distributed is imported"
        )
        detail = "<https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/debug.cpp>"
        yield Finding(PROBLEM, AREA, what, detail, "OFF, INFO or DETAIL")
    for name, entry in effects.items():
        known = entry.names.split(", ") if entry.names and name in environ else []
        for word in re.split(r"[\s,]+", environ.get(name, "")) if known else ():
            plain = word.lstrip("+-").partition(":")[0]
            near = "" if plain in known else one_slip_away(plain, known)
            if near:
                what = f"{name}: there is no {plain!r}, and the job ends when torch is imported"
                yield Finding(PROBLEM, AREA, what, f"<{entry.source}>", f"did you mean {near}?")


def _levels(environ: Mapping[str, str], facts: MachineFacts) -> Iterator[Finding]:
    """Yield levels that NCCL does not know and replaces by its default (NCCL's paths.cc)."""
    for name, (known, fix) in LEVELS.items():
        value = environ.get(name, "")
        rccl = "rocm" in (facts.torch or "")  # AMD's library has other levels
        if value and not rccl and not re.fullmatch(known, value):
            what = f"{name}={value[:40]}: NCCL knows no such level, and takes its default"
            yield Finding(PROBLEM, AREA, what, f"<{NCCL_GUIDE}>", fix)


def _threads(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a value that libgomp ignores: no list of positive numbers (OpenMP 5.2, 21.1.2)."""
    value = environ.get("OMP_NUM_THREADS")
    if value is not None and not re.fullmatch(r"\s*0*[1-9]\d*(\s*,\s*0*[1-9]\d*)*\s*", value):
        what = f"OMP_NUM_THREADS={value!r} is not a number of threads"
        detail = (
            "OpenMP takes every core for each rank then, and torchrun adds no 1 of its own where "
            "the variable is set <https://gcc.gnu.org/onlinedocs/libgomp/OMP_005fNUM_005fTHREADS.html>"
        )
        yield Finding(PROBLEM, AREA, what, detail, "export OMP_NUM_THREADS=8, or unset it")


def _openmp(environ: Mapping[str, str]) -> Iterator[Finding]:
    # These take effect only with Intel's library, whose error message names it.
    exempt = {"KMP_DUPLICATE_LIB_OK"}
    names = sorted(name for name in environ if name.startswith("KMP_") and name not in exempt)
    preloaded = "iomp" in environ.get("LD_PRELOAD", "")
    if names and not preloaded:
        what = f"{', '.join(names)}: read by Intel's and LLVM's OpenMP only"
        detail = (
            "torch's wheels for Linux carry GNU's (libgomp), which reads OMP_ and GOMP_; a conda "
            "build, TensorFlow or MKL beside it may bring Intel's"
        )
        fix = "OMP_NUM_THREADS, OMP_PROC_BIND, or LD_PRELOAD=libiomp5.so"
        yield Finding(NOTE, AREA, what, detail, fix)


def overruled(name: str, value: str, entry: Effect, calls: Calls) -> str:
    """Return how the script overrules an exported setting; "" if it is not seen to do so.

    Args:
        name: the variable's name.
        value: the exported value.
        entry: the effect of the variable.
        calls: the settings that the script makes.
    """
    if name in calls.assigned and calls.assigned[name][0] != value:
        return f"the script sets it itself, on line {calls.assigned[name][1]}"
    if entry.config and entry.config in calls.config:
        line = calls.config[entry.config]
        return f"the script sets inductor's {entry.config} on line {line}, which overrules it"
    if value != "1":
        for mode in entry.modes:
            if mode in calls.modes:
                return f'torch.compile(mode="{mode}") on line {calls.modes[mode]} overrules it'
    if entry.function and entry.function in calls.called:
        return f"the script calls {entry.function} on line {calls.called[entry.function]}"
    return ""
