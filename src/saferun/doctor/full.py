"""`saferun doctor --full`: run measure.py with the user's torch, with a limit; read its output."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from saferun.base import untrusted
from saferun.doctor.vitals import Measured, Speed
from saferun.errors import UnavailableError
from saferun.planning.torchrun import torchrun_install
from saferun.system import command as bounded

ALONE_S = 30.0  # torch's import, contexts, 2 s of work, 0.5 s for each pair: 15 s on 8 H200s
TOGETHER_S = 28.0  # torch's import in each rank, NCCL's start, and measure.TIMEOUT_S
PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "measure.py")


def measure(environ: Mapping[str, str], gpus: int) -> Measured:
    """Measure the GPUs, within the two limits above.

    Args:
        environ: the job's environment; CUDA_VISIBLE_DEVICES in it counts.
        gpus: number of GPUs that it sees; the all-reduce needs two.

    Returns:
        The results, with the reason for any missing measurement.
    """
    try:
        launcher = torchrun_install.find_launcher(environ)
    except UnavailableError as error:
        return Measured(trouble=str(error))
    python = torchrun_install.worker_interpreter(launcher, environ)
    clean = _environment(environ)
    if python is None:
        return Measured(trouble=f"the Python of {launcher.argv[0]} is not known")
    found = read_alone(bounded.run((python, PROGRAM, "alone"), clean, ALONE_S))
    if gpus < 2 or not found.speeds:
        return found
    command = (*launcher.argv, "--standalone", f"--nproc-per-node={gpus}", PROGRAM, "together")
    return read_together(found, bounded.run(command, clean, TOGETHER_S))


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the job's environment without variables that configure torchrun or our own hooks.

    Unless the user chose GPUs, they are numbered by bus address, as in nvidia-smi.
    """
    configures = ("PET_", "SAFERUN_", "TORCHELASTIC_", "MASTER_")
    clean = {name: value for name, value in environ.items() if not name.startswith(configures)}
    if "CUDA_VISIBLE_DEVICES" not in environ:
        clean["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return clean


def read_alone(answer: bounded.Answer) -> Measured:
    """Return the measurements of each single GPU, as far as the program came."""
    devices: dict[int, dict[str, Any]] = {}
    done = False
    for record in untrusted.objects(answer.out.encode()):
        done = done or "done" in record
        if isinstance(record.get("device"), int):
            devices.setdefault(record["device"], {}).update(record)
    fields = frozenset(Speed.__slots__)
    speeds = tuple(
        Speed(**{"bus": "", "name": "", **{k: v for k, v in facts.items() if k in fields}})
        for _, facts in sorted(devices.items())
    )
    trouble = "" if done and not answer.trouble else _why(answer)
    return Measured(speeds, trouble)


def read_together(found: Measured, answer: bounded.Answer) -> Measured:
    """Return the measurements, with those of the all-reduce added."""
    ranks = [
        record for record in untrusted.objects(answer.out.encode()) if "allreduce_gbs" in record
    ]
    if answer.trouble or not ranks:
        return replace(found, allreduce_trouble=_why(answer))
    if not all(rank.get("right") for rank in ranks):
        return replace(found, allreduce_trouble="it gave wrong sums")
    return replace(found, allreduce_gbs=min(float(rank["allreduce_gbs"]) for rank in ranks))


def _why(answer: bounded.Answer) -> str:
    """Return how the command failed, and the last error line of its stderr."""
    errors = [line.strip() for line in answer.err.splitlines() if "rror" in line]
    last = errors[-1][-300:] if errors else ""
    return ": ".join(filter(None, (answer.trouble or "no answer", last)))
