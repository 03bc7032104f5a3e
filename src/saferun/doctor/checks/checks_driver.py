"""Whether a driver answers, and whether this torch fits the driver and the GPUs.

The driver that each CUDA needs:
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html. The code that
runs on each GPU: torch/cuda/__init__.py (`_check_cubins`) and the CUDA programming guide, "Binary
Compatibility" and "PTX Compatibility". The meaning of NVML's failures: driver_messages.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from saferun.doctor.vitals import Cuda, Files, Torch
from saferun.gpu.nvml import LIBRARY, NvmlAnswer
from saferun.knowledge import loader
from saferun.model import NOTE, OK, PROBLEM, Finding

_DRIVERS = {13: 580, 12: 525, 11: 450}  # CUDA's major version -> the oldest driver series
_RENT = "a rented machine: ask for another one"
_NOT_LOADED = 9  # NVML_ERROR_DRIVER_NOT_LOADED
_BY_HAND = "run `nvidia-smi -q` by hand; is this the driver's own library?"


def presence(files: Files, nvml: NvmlAnswer, cuda: Cuda) -> Iterator[Finding]:
    """Check that there is a driver, that NVML answers, and that every GPU is present.

    Args:
        files: the driver's entries in /proc, /dev and /sys.
        nvml: the answer of NVML.
        cuda: the answer of the CUDA driver.
    """
    if not (files.version or nvml.program or cuda.devices):
        yield _nothing(files)
        return
    yield from _answer(files, nvml)
    yield from _missing(files, nvml)
    if nvml.report.cards and not (nvml.trouble or nvml.report.lost) and files.version:
        names = [card.get("Product Name") or "unknown GPU" for card in nvml.report.cards]
        counts = {name: names.count(name) for name in names}
        what = ", ".join(f"{count} x {name}" for name, count in counts.items())
        yield Finding(OK, "driver", f"{files.version}: {what}")


def _nothing(files: Files) -> Finding:
    if files.pci:
        what = f"{files.pci} NVIDIA GPUs on the PCI bus, and no driver"
        fix = "install the driver; in a container: start it with --gpus all"
        return Finding(PROBLEM, "driver", what, "", fix)
    if files.nodes and not files.wsl:
        what = "the driver's device nodes are here; neither NVML nor /proc/driver/nvidia is"
        fix = "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return Finding(PROBLEM, "driver", what, "the GPUs can be neither listed nor locked", fix)
    if files.amd:
        what = "AMD GPUs (/dev/kfd): only the machine around them is checked here"
        fix = "`rocm-smi` tells of the GPUs; torch must be a ROCm build"
        return Finding(NOTE, "driver", what, "", fix)
    what = "no NVIDIA driver and no GPU here: jobs run on the CPU"
    return Finding(NOTE, "driver", what, "", "in a container: start it with --gpus all")


def _answer(files: Files, nvml: NvmlAnswer) -> Iterator[Finding]:
    if not nvml.program:
        what = f"{LIBRARY} cannot be loaded: the GPUs' health cannot be read"
        fix = "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        yield Finding(NOTE, "driver", what, nvml.message, fix)
    elif nvml.status is None:
        yield _hung(nvml)
    elif (nvml.trouble and not nvml.report.lost) or not nvml.report.cards:
        yield _failed(files, nvml)  # otherwise _missing names those that could not be opened


def _hung(nvml: NvmlAnswer) -> Finding:
    what = f"NVML: {nvml.trouble}"
    if nvml.report.cards and not nvml.silent:
        fix = "as root `nvidia-smi -pm 1`: without it the driver starts each GPU anew"
        return Finding(NOTE, "driver", what, "each GPU answers when asked alone", fix)
    if not nvml.trouble.startswith("it did not end"):
        return Finding(PROBLEM, "driver", what, nvml.message[:80], _BY_HAND)
    fix = "a GPU or the driver hangs: read `dmesg` for NVRM lines; reboot"
    return Finding(PROBLEM, "driver", what, nvml.message, f"{fix}; {_RENT}")


def _failed(files: Files, nvml: NvmlAnswer) -> Finding:
    if nvml.report.lost:
        return Finding(PROBLEM, "driver", "NVML cannot open every GPU", nvml.trouble)
    for row in loader.load("driver_messages.yaml")["statuses"]:
        if row["status"] == nvml.status:
            absent = not files.version and not files.pci and row["status"] == _NOT_LOADED
            level = NOTE if absent else PROBLEM
            return Finding(level, "driver", row["means"], nvml.trouble, row["fix"])
    detail = f"{nvml.program}: {nvml.message or f'status {nvml.status}'}"
    return Finding(PROBLEM, "driver", f"NVML: {nvml.trouble}", detail, _BY_HAND)


def _missing(files: Files, nvml: NvmlAnswer) -> Iterator[Finding]:
    """Yield GPUs that NVML could not open, or that hang when asked alone."""
    for lost in nvml.report.lost:
        what = f"cannot be opened: {lost.why or 'no reason given'}"
        fix = f"reboot; if it comes back, the GPU, its slot or its power is broken; {_RENT}"
        yield Finding(PROBLEM, f"GPU {lost.place}", what, lost.bus, fix)
    if nvml.silent and len(nvml.silent) < len(files.gpus):
        for bus in nvml.silent:
            what = "does not answer NVML, the others do"
            fix = f"reboot; until then leave it out (CUDA_VISIBLE_DEVICES); {_RENT}"
            yield Finding(PROBLEM, f"GPU at {bus}", what, files.gpus.get(bus, ""), fix)


def nodes(files: Files) -> Iterator[Finding]:
    """Check the device nodes by which CUDA accesses the GPUs."""
    if not files.nodes or files.wsl:
        return
    cards = {name: state for name, state in files.nodes.items() if name[6:].isdecimal()}
    if cards and all(state == "missing" for state in cards.values()):
        what = "the driver runs on this host, and no GPU is given to this container"
        fix = "start it with --gpus all, or ask the scheduler for GPUs (--gres=gpu:1)"
        yield Finding(PROBLEM, "device nodes", what, "no /dev/nvidia0 …", fix)
        return
    for name in ("nvidiactl", "nvidia-uvm"):
        if files.nodes.get(name) == "missing":
            what = f"/dev/{name} is missing: CUDA cannot start (error 999 or 3)"
            fix = "as root `nvidia-modprobe -u -c 0`; in a container: give it the node"
            yield Finding(PROBLEM, "device nodes", what, "", fix)
    closed = [f"/dev/{name}" for name, state in files.nodes.items() if state == "closed"]
    if closed:
        what = f"this user may not open {', '.join(closed)}"
        fix = "the user's groups (video, render), the container or the scheduler's cgroup"
        serious = len([name for name in closed if name[11:].isdecimal()]) in (0, len(cards))
        yield Finding(PROBLEM if serious else NOTE, "device nodes", what, "", fix)
    if all(state == "ok" for state in files.nodes.values()):
        yield Finding(OK, "device nodes", "present and open")


def versions(files: Files, nvml: NvmlAnswer, cuda: Cuda, torch: Torch) -> Iterator[Finding]:
    """Check that the driver is new enough for the CUDA that torch was built with.

    Args:
        files: the driver's entries in /proc, /dev and /sys.
        nvml: the answer of NVML.
        cuda: the answer of the CUDA driver.
        torch: facts about the installed torch.
    """
    yield from _torch(torch, bool(nvml.report.cards or cuda.devices or files.gpus))
    newest = _newest(nvml, cuda)
    if not torch.cuda or newest is None:
        return
    wanted = _pair(torch.cuda)
    what = f"driver {files.version or nvml.report.driver or 'of unknown version'}"
    what += f" has CUDA {newest[0]}.{newest[1]}, torch was built with {torch.cuda}"
    if wanted[0] > newest[0]:
        series = _DRIVERS.get(wanted[0])
        fix = f"a driver of series {series} or newer" if series else "a newer driver"
        index = f"cu{newest[0]}{newest[1]}"
        fix += f", or a torch built for CUDA {newest[0]} ({index} or older)"
        yield Finding(PROBLEM, "driver", f"{what}: too old for it", "", fix)
    elif wanted > newest:
        detail = "works within one major version; code that only comes as PTX does not load"
        yield Finding(NOTE, "driver", what, detail)
    else:
        yield Finding(OK, "driver", what)


def _newest(nvml: NvmlAnswer, cuda: Cuda) -> tuple[int, int] | None:
    """Return the newest CUDA that libcuda supports (see cuda-compat), else NVML's answer."""
    if cuda.driver:
        return cuda.driver // 1000, cuda.driver % 1000 // 10
    return _pair(nvml.report.cuda) if nvml.report.cuda else None


def _pair(version: str) -> tuple[int, int]:
    major, _, rest = version.partition(".")
    minor = re.match(r"\d+", rest)
    return (int(major) if major.isdecimal() else 0, int(minor[0]) if minor else 0)


def _torch(torch: Torch, gpus: bool) -> Iterator[Finding]:
    if torch.unknown:
        what = f"torch could not be asked: {torch.unknown}"
        fix = "put the directory of torch's own torchrun first on PATH"
        if "did not end" in torch.unknown:
            fix = "see how long `python -c 'import torch'` takes: a busy machine or a slow disk"
        yield Finding(NOTE, "torch", what, torch.launcher, fix if torch.launcher else "")
        return
    if not torch.torch:
        fix = "activate the environment that has torch" if not torch.launcher else ""
        what = torch.trouble or "it has no version"
        yield Finding(PROBLEM, "torch", what, torch.launcher, fix or "install torch again")
        return
    build = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPU"
    nccl = f", NCCL {torch.nccl}" if torch.nccl else ""
    triton = f", Triton {torch.triton}" if torch.triton else ""
    what = f"{torch.torch} ({build}{nccl}{triton}), Python {torch.python}"
    if gpus and not torch.cuda:
        fix = "install a CUDA build: https://pytorch.org/get-started/locally/"
        yield Finding(PROBLEM, "torch", f"{what}: it cannot use the GPUs", torch.launcher, fix)
    else:
        yield Finding(OK, "torch", what, torch.launcher)


def architectures(nvml: NvmlAnswer, cuda: Cuda, torch: Torch) -> Iterator[Finding]:
    """Check that this torch has code for these GPUs.

    Args:
        nvml: the answer of NVML.
        cuda: the answer of the CUDA driver.
        torch: facts about the installed torch.
    """
    capabilities = _capabilities(nvml, cuda)
    if not torch.archs or not capabilities:
        return
    archs = " ".join(torch.archs)
    for capability in sorted(set(capabilities.values())):
        names = sorted(bus for bus, value in capabilities.items() if value == capability)
        runs = how_it_runs(capability, torch.archs)
        which = f"GPUs of compute capability {capability}"
        if runs == "no":
            detail = f"{', '.join(names)}; it has {archs}"
            fix = "a torch built for it: https://pytorch.org/get-started/locally/"
            what = f"torch {torch.torch} has no code for {which}"
            yield Finding(PROBLEM, "torch", what, detail, fix)
        elif runs == "jit":
            what = f"torch has only PTX for {which}: the first start compiles for minutes"
            yield Finding(NOTE, "torch", what, f"it has {archs}", "a torch built for it")
        else:
            yield Finding(OK, "torch", f"has code for {which} ({runs})")


def _capabilities(nvml: NvmlAnswer, cuda: Cuda) -> Mapping[str, str]:
    asked = {d.get("bus", ""): d["capability"] for d in cuda.devices if "capability" in d}
    return asked or nvml.capabilities


def how_it_runs(capability: str, archs: tuple[str, ...]) -> str:
    """Return the entry whose machine code runs on a GPU; "jit" if only PTX runs; else "no".

    Machine code of sm_86 runs on 8.6 and 8.9, but not on 9.0; that of sm_90a only on 9.0; PTX on
    any newer GPU.

    Args:
        capability: the GPU's compute capability, "9.0".
        archs: torch's architectures, such as sm_90 and compute_90.
    """
    major, minor = _pair(capability)
    found = "no"
    for arch in archs:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if match is None:
            continue
        kind, code = match[1], (int(match[2]), int(match[3]))
        exact = code == (major, minor)
        if kind == "sm" and (exact or (match[4] != "a" and code[0] == major and code[1] <= minor)):
            return arch
        if kind == "compute" and (exact or (not match[4] and code <= (major, minor))):
            found = "jit"
    return found
