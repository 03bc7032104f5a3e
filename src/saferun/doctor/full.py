"""`saferun doctor --full`: have measure.py run by the user's own torch, bounded, and read it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from saferun.doctor.vitals import Measured, Speed
from saferun.errors import UnavailableError
from saferun.plan import torchrun_install
from saferun.system import command as bounded

ALONE_S = 30.0  # torch's import, contexts, 2 s of work, 0.5 s for each pair: 15 s on 8 H200s
TOGETHER_S = 28.0
PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "measure.py")


def measure(environ: Mapping[str, str], gpus: int) -> Measured:
    """Measure; what cannot be measured says why. Bounded by the two times above.

    Args:
        environ: of the job; its CUDA_VISIBLE_DEVICES counts.
        gpus: that it sees; the all-reduce needs two.
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
    words = (*launcher.argv, "--standalone", f"--nproc-per-node={gpus}", PROGRAM, "together")
    return read_together(found, bounded.run(words, clean, TOGETHER_S))


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The job's environment without what would steer torchrun or our own hooks.

    GPUs are counted along the bus, as nvidia-smi does, where nothing was chosen.
    """
    steers = ("PET_", "SAFERUN_", "TORCHELASTIC_", "MASTER_")
    clean = {name: value for name, value in environ.items() if not name.startswith(steers)}
    if "CUDA_VISIBLE_DEVICES" not in environ:
        clean["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return clean


def _lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            words = json.loads(line)
        except ValueError:
            continue
        if isinstance(words, dict):
            yield words


def read_alone(answer: bounded.Answer) -> Measured:
    """Read what the GPUs were measured to do, as far as it came."""
    devices: dict[int, dict[str, Any]] = {}
    done = False
    for words in _lines(answer.out):
        done = done or "done" in words
        if isinstance(words.get("device"), int):
            devices.setdefault(words["device"], {}).update(words)
    fields = frozenset(Speed._fields)
    speeds = tuple(
        Speed(**{"bus": "", "name": "", **{k: v for k, v in words.items() if k in fields}})
        for _, words in sorted(devices.items())
    )
    trouble = "" if done and not answer.trouble else _why(answer)
    return Measured(speeds, trouble)


def read_together(found: Measured, answer: bounded.Answer) -> Measured:
    """Add what the all-reduce gave."""
    told = [words for words in _lines(answer.out) if "allreduce_gbs" in words]
    if answer.trouble or not told:
        return found._replace(allreduce_trouble=_why(answer))
    if not all(words.get("right") for words in told):
        return found._replace(allreduce_trouble="it gave wrong sums")
    return found._replace(allreduce_gbs=min(float(words["allreduce_gbs"]) for words in told))


def _why(answer: bounded.Answer) -> str:
    """The clock's word, or the program's own last one."""
    telling = [line.strip() for line in answer.err.splitlines() if "rror" in line]
    said = telling[-1][-300:] if telling else ""
    return ": ".join(filter(None, (answer.trouble or "no answer", said)))
