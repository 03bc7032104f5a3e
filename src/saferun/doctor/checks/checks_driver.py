"""Whether a driver answers, and whether this torch fits it and the GPUs.

Which CUDA needs which driver:
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html. Which code runs
on which GPU: torch/cuda/__init__.py (`_check_cubins`) and the CUDA programming guide, "Binary
Compatibility" and "PTX Compatibility". What a failing nvidia-smi says: driver_messages.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from saferun.doctor.vitals import Cuda, Files, Smi, Torch
from saferun.gpu.nvidia_smi import ordered
from saferun.knowledge import loader
from saferun.model import NOTE, OK, PROBLEM, Finding

_DRIVERS = {13: 580, 12: 525, 11: 450}  # CUDA's major version -> the oldest driver series
_RENT = "a rented machine: ask for another one"
_BY_HAND = "run `nvidia-smi -q` by hand; is this the driver's own program?"


def presence(files: Files, smi: Smi, cuda: Cuda) -> Iterator[Finding]:
    """Check that there is a driver, that nvidia-smi answers, and that every GPU is there.

    Args:
        files: what the driver shows in /proc, /dev and /sys.
        smi: the answer of nvidia-smi.
        cuda: the answer of the CUDA driver.
    """
    if not (files.version or smi.program or cuda.devices):
        yield _nothing(files)
        return
    yield from _answer(files, smi)
    yield from _missing(files, smi)
    if smi.report.cards and not smi.trouble and files.version:
        names = [card.get("Product Name") or "unknown GPU" for card in smi.report.cards]
        counts = {name: names.count(name) for name in names}
        what = ", ".join(f"{count} x {name}" for name, count in counts.items())
        yield Finding(OK, "driver", f"{files.version}: {what}", "", "")


def _nothing(files: Files) -> Finding:
    if files.pci:
        what = f"{files.pci} NVIDIA GPUs on the PCI bus, and no driver"
        fix = "install the driver; in a container: start it with --gpus all"
        return Finding(PROBLEM, "driver", what, "", fix)
    if files.nodes and not files.wsl:
        what = "the driver's device nodes are here; neither nvidia-smi nor /proc/driver/nvidia is"
        fix = "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return Finding(PROBLEM, "driver", what, "the GPUs can be neither listed nor locked", fix)
    if files.amd:
        what = "AMD GPUs (/dev/kfd): only the machine around them is checked here"
        fix = "`rocm-smi` tells of the GPUs; torch must be a ROCm build"
        return Finding(NOTE, "driver", what, "", fix)
    what = "no NVIDIA driver and no GPU here: jobs run on the CPU"
    return Finding(NOTE, "driver", what, "", "in a container: start it with --gpus all")


def _answer(files: Files, smi: Smi) -> Iterator[Finding]:
    if not smi.program:
        what = "there is no nvidia-smi on PATH: the GPUs' health cannot be read"
        fix = "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        yield Finding(NOTE, "driver", what, "", fix)
    elif smi.status is None:
        yield _hung(smi)
    elif (smi.trouble and not smi.report.lost) or not smi.report.cards:
        yield _failed(files, smi)  # else _missing names those that could not be opened


def _hung(smi: Smi) -> Finding:
    what = f"nvidia-smi: {smi.trouble}"
    if smi.report.cards and not smi.silent:
        fix = "as root `nvidia-smi -pm 1`: without it the driver starts each GPU anew"
        return Finding(NOTE, "driver", what, "each GPU answers when asked alone", fix)
    if not smi.trouble.startswith("it did not end"):
        return Finding(PROBLEM, "driver", what, smi.message[:80], _BY_HAND)
    fix = "a GPU or the driver hangs: read `dmesg` for NVRM lines; reboot"
    return Finding(PROBLEM, "driver", what, smi.message, f"{fix}; {_RENT}")


def _failed(files: Files, smi: Smi) -> Finding:
    known = loader.load_driver_messages()
    for row in known["messages"]:
        if row["says"] in smi.message.lower():
            absent = not files.version and not files.pci and "loaded" in row["means"]
            level = NOTE if absent else PROBLEM
            return Finding(level, "driver", row["means"], smi.message, row["fix"])
    if smi.report.lost:
        return Finding(PROBLEM, "driver", "nvidia-smi cannot open every GPU", smi.message, "")
    for row in known["statuses"]:
        if row["status"] == smi.status:
            what = f"nvidia-smi: {row['means']}"
            return Finding(PROBLEM, "driver", what, smi.message, row["fix"])
    what = f"nvidia-smi: {smi.trouble or 'it ended well and wrote no report'}"
    detail = f"{smi.program}: {smi.report.strange or smi.message or 'it wrote nothing'}"
    return Finding(PROBLEM if smi.trouble else NOTE, "driver", what, detail, _BY_HAND)


def _missing(files: Files, smi: Smi) -> Iterator[Finding]:
    """Yield GPUs that nvidia-smi could not open, or that hang when asked alone."""
    numbers = ordered(smi.report.cards, smi.report.lost)
    for lost in smi.report.lost:
        area = f"GPU {numbers[lost.bus]}" if lost.bus else "GPU"
        what = f"cannot be opened: {lost.why or 'no reason given'}"
        fix = f"reboot; if it comes back, the GPU, its slot or its power is broken; {_RENT}"
        yield Finding(PROBLEM, area, what, lost.bus, fix)
    if smi.silent and len(smi.silent) < len(files.gpus):
        for bus in smi.silent:
            what = "does not answer nvidia-smi, the others do"
            fix = f"reboot; until then leave it out (CUDA_VISIBLE_DEVICES); {_RENT}"
            yield Finding(PROBLEM, f"GPU at {bus}", what, files.gpus.get(bus, ""), fix)


def nodes(files: Files) -> Iterator[Finding]:
    """Check the device nodes through which CUDA reaches the GPUs."""
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
        yield Finding(OK, "device nodes", "present and open", "", "")


def versions(files: Files, smi: Smi, cuda: Cuda, torch: Torch) -> Iterator[Finding]:
    """Check that the driver is new enough for the CUDA that torch was built with.

    Args:
        files: what the driver shows in /proc, /dev and /sys.
        smi: the answer of nvidia-smi.
        cuda: the answer of the CUDA driver.
        torch: what the installed torch says of itself.
    """
    yield from _torch(torch, bool(smi.report.cards or cuda.devices or files.gpus))
    newest = _newest(smi, cuda)
    if not torch.cuda or newest is None:
        return
    wanted = _pair(torch.cuda)
    what = f"driver {files.version or smi.report.driver or 'of unknown version'}"
    what += f" has CUDA {newest[0]}.{newest[1]}, torch was built with {torch.cuda}"
    if wanted[0] > newest[0]:
        series = _DRIVERS.get(wanted[0])
        fix = f"a driver of series {series} or newer" if series else "a newer driver"
        index = f"cu{newest[0]}{newest[1]}"
        fix += f", or a torch built for CUDA {newest[0]} ({index} or older)"
        yield Finding(PROBLEM, "driver", f"{what}: too old for it", "", fix)
    elif wanted > newest:
        detail = "works within one major version; code that only comes as PTX does not load"
        yield Finding(NOTE, "driver", what, detail, "")
    else:
        yield Finding(OK, "driver", what, "", "")


def _newest(smi: Smi, cuda: Cuda) -> tuple[int, int] | None:
    """Return the newest CUDA that libcuda supports (see cuda-compat), else what nvidia-smi says."""
    if cuda.driver:
        return cuda.driver // 1000, cuda.driver % 1000 // 10
    return _pair(smi.report.cuda) if smi.report.cuda else None


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
        yield Finding(OK, "torch", what, torch.launcher, "")


def architectures(smi: Smi, cuda: Cuda, torch: Torch) -> Iterator[Finding]:
    """Check that this torch has code for these GPUs.

    Args:
        smi: the answer of nvidia-smi.
        cuda: the answer of the CUDA driver.
        torch: what the installed torch says of itself.
    """
    capabilities = _capabilities(smi, cuda)
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
            yield Finding(OK, "torch", f"has code for {which} ({runs})", "", "")


def _capabilities(smi: Smi, cuda: Cuda) -> Mapping[str, str]:
    asked = {d.get("bus", ""): d["capability"] for d in cuda.devices if "capability" in d}
    return asked or smi.capabilities


def how_it_runs(capability: str, archs: tuple[str, ...]) -> str:
    """Return the entry whose machine code runs on a GPU, "jit" where only PTX does, else "no".

    Machine code of sm_86 runs on 8.6 and 8.9, not on 9.0; that of sm_90a on 9.0 alone; PTX on
    whatever is newer.
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
