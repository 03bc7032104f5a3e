"""The answers of NVIDIA's management library (NVML) about the GPUs, as values.

ask_nvml.py asks it, in a child that is killed when its time is over: a failing GPU hangs whoever
asks. nvidia-smi, which prints what NVML says, is run for what NVML has not, `--gpu-reset`, and by a
launch for the list of GPUs (system/gpus.py).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from saferun.system import command as bounded
from saferun.system.printable import printable

LIBRARY = "libnvidia-ml.so.1"
_PROGRAM = os.path.join(os.path.dirname(__file__), "ask_nvml.py")
# The source is read now and passed in the command line: a run may outlive the installed files.
_source: bytes = __loader__.get_data(_PROGRAM)  # type: ignore[name-defined]  # every module's
COMMAND = (sys.executable, "-IS", "-c", _source.decode())


class Load(NamedTuple):
    """How busy a GPU is; None for values that the driver does not report."""

    place: int | None  # NVML's number, which is also nvidia-smi's
    percent: int | None
    used_mib: int | None
    total_mib: int | None
    celsius: int | None


class Process(NamedTuple):
    """A process that holds GPU memory, with the pid from the driver."""

    pid: int
    used_mib: int | None  # None if the driver does not report it, as with MIG
    name: str = ""  # from /proc; "" if /proc does not confirm that it has a GPU open


class Card(NamedTuple):
    """One GPU that answers."""

    bus: str  # 0000:ad:00.0
    fields: Mapping[str, str | int]  # "ECC Mode/Current": "Enabled"; units: ask_nvml.py
    processes: tuple[Process, ...] = ()
    place: int = 0  # NVML's number: in bus order, lost GPUs included
    sick: tuple[str, ...] = ()  # fields with an error instead of a value

    def get(self, name: str) -> str:
        """Return a field's text, "" where the driver has none to say."""
        value = self.fields.get(name, "")
        return "" if value == "None" or name in self.sick else str(value)

    def number(self, name: str) -> int | None:
        """Return what a field has measured, None where the driver does not say."""
        value = self.fields.get(name)
        return value if isinstance(value, int) else None

    def load(self) -> Load:
        """Return how busy the GPU is."""
        return Load(
            self.place,
            percent=self.number("Utilization/GPU"),
            used_mib=self.number("FB Memory Usage/Used"),
            total_mib=self.number("FB Memory Usage/Total"),
            celsius=self.number("Temperature/GPU Current Temp"),
        )


class Lost(NamedTuple):
    """A GPU that NVML could not open."""

    bus: str  # "" if unknown
    why: str
    place: int = 0  # NVML's number


class NvmlReport(NamedTuple):
    """The GPUs of this machine, or of this container."""

    driver: str = ""
    cuda: str = ""  # the newest CUDA that this driver supports, "13.0"
    cards: tuple[Card, ...] = ()
    lost: tuple[Lost, ...] = ()

    def card(self, uuid: str) -> Card | None:
        """Return the GPU with a UUID; None if it is not there."""
        return next((card for card in self.cards if uuid and card.get("GPU UUID") == uuid), None)

    def numbers(self) -> dict[str, int]:
        """Return each GPU's number by its PCI address, including GPUs that cannot be opened."""
        lost = {gone.bus: gone.place for gone in self.lost if gone.bus}
        return lost | {card.bus: card.place for card in self.cards}


class NvmlAnswer(NamedTuple):
    """NVML's answer, or how it failed."""

    program: str = ""  # the library; "" if it cannot be loaded
    report: NvmlReport = NvmlReport()
    status: int | None = 0  # status of NVML, or of a child that died; None: it did not end in time
    trouble: str = ""  # why there is no report, or what is wrong with it
    message: str = ""  # output that was printed instead of an answer
    silent: tuple[str, ...] = ()  # PCI addresses of GPUs without an answer when asked separately
    capabilities: Mapping[str, str] = {}  # PCI address -> "9.0"
    peers: Mapping[tuple[int, int], str] = {}  # OK, CNS, … as in `nvidia-smi topo -p2p r`
    links: Mapping[int, tuple[int, int]] = {}  # (active NVLinks, all NVLinks)


def ask(
    environ: Mapping[str, str],
    timeout_s: float,
    *,
    health: bool = False,
    bus: str = "",
    known: Sequence[str] = (),
) -> NvmlAnswer:
    """Ask for the state of the GPUs; this normally takes some 100 ms.

    Args:
        environ: the environment; LD_LIBRARY_PATH counts.
        timeout_s: seconds after which the child is killed.
        health: also ask for the fields that doctor judges, and for the links between the GPUs.
        bus: ask only the GPU at this PCI address; "" for all.
        known: PCI addresses of the machine's GPUs in bus order, to name lost ones.
    """
    words = [*(["--health"] if health else []), *([bus] if bus else [])]
    return read(bounded.run((*COMMAND, *words), environ, timeout_s), known)


def read(answer: bounded.Answer, known: Sequence[str] = ()) -> NvmlAnswer:
    """Return ask_nvml.py's answer as values; without an answer, the reason."""
    try:
        return _read(json.loads(answer.out), known)
    except (ValueError, LookupError, TypeError, AttributeError):
        message = printable(" ".join(f"{answer.out} {answer.err}".split())[:300])
        trouble = answer.trouble or "its answer is not complete"
        return NvmlAnswer(LIBRARY, NvmlReport(), answer.status, trouble, message)


def _read(found: Mapping[str, Any], known: Sequence[str]) -> NvmlAnswer:
    if "cards" not in found:
        message = found.get("message", "")
        return NvmlAnswer(found["library"], NvmlReport(), found["status"], found["error"], message)
    whole = len(known) == found["count"]
    cards = tuple(_card(one) for one in found["cards"])
    lost = [
        Lost(known[one["place"]] if whole else "", one["why"], one["place"])
        for one in found["lost"]
    ]
    cuda = f"{found['cuda'] // 1000}.{found['cuda'] % 1000 // 10}" if found["cuda"] else ""
    none = "" if cards else next((gone.why for gone in lost), "")
    return NvmlAnswer(
        found["library"],
        NvmlReport(found["driver"], cuda, cards, tuple(lost)),
        found["status"],
        found["error"] or none,
        capabilities={
            card.bus: one["capability"]
            for card, one in zip(cards, found["cards"], strict=True)
            if one.get("capability")
        },
        peers={(ours, other): code for ours, other, code in found.get("peers", ())},
        links={place: (up, of) for place, up, of in found.get("links", ())},
    )


def _card(found: Mapping[str, Any]) -> Card:
    held = tuple(Process(pid, used) for pid, used in found["processes"])
    return Card(bus_id(found["bus"]), found["fields"], held, found["place"], tuple(found["sick"]))


def bus_id(text: str) -> str:
    """Return a PCI address in the format of /sys: 0000:ad:00.0."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}"


def watts(milliwatts: int | None) -> str:
    """Return a power as nvidia-smi writes it, "" where it is not known."""
    return "" if milliwatts is None else f"{milliwatts / 1000:.2f} W"
