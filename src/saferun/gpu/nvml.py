"""What NVIDIA's management library (NVML) says of the GPUs, as values.

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
# The source is read now and comes with the command line: a run may outlive the installed files.
_source: bytes = __loader__.get_data(_PROGRAM)  # type: ignore[name-defined]  # every module's
COMMAND = (sys.executable, "-IS", "-c", _source.decode())


class Load(NamedTuple):
    """How busy a GPU is; None for what the driver does not say."""

    place: int | None  # NVML's number, which nvidia-smi has, too
    percent: int | None
    used_mib: int | None
    total_mib: int | None
    celsius: int | None


class Process(NamedTuple):
    """A process that holds memory of a GPU, as the driver numbers it."""

    pid: int
    used_mib: int | None  # None where the driver does not say, as under MIG
    name: str = ""  # /proc's; "" where /proc does not confirm that it has a GPU open


class Card(NamedTuple):
    """One GPU that answers."""

    bus: str  # 0000:ad:00.0
    fields: Mapping[str, str | int]  # "ECC Mode/Current": "Enabled"; units: ask_nvml.py
    processes: tuple[Process, ...] = ()
    place: int = 0  # NVML's number: along the bus, lost GPUs included
    sick: tuple[str, ...] = ()  # the fields that hold an error in place of a value

    def get(self, name: str) -> str:
        """Return a field's text, "" where the driver has none to say."""
        value = self.fields.get(name, "")
        return "" if value == "None" or name in self.sick else str(value)

    def number(self, name: str) -> int | None:
        """Return what a field has measured, None where the driver does not say."""
        value = self.fields.get(name)
        return value if isinstance(value, int) else None

    def load(self) -> Load:
        """Return how busy it is."""
        return Load(
            self.place,
            percent=self.number("Utilization/GPU"),
            used_mib=self.number("FB Memory Usage/Used"),
            total_mib=self.number("FB Memory Usage/Total"),
            celsius=self.number("Temperature/GPU Current Temp"),
        )


class Lost(NamedTuple):
    """A GPU that NVML could not open."""

    bus: str  # "" where it is not known
    why: str
    place: int = 0  # NVML's number


class Report(NamedTuple):
    """The GPUs of this machine, or of this container."""

    driver: str = ""
    cuda: str = ""  # the newest CUDA that this driver has, "13.0"
    cards: tuple[Card, ...] = ()
    lost: tuple[Lost, ...] = ()

    def card(self, uuid: str) -> Card | None:
        """Return the GPU of a UUID; None where it is not there."""
        return next((card for card in self.cards if uuid and card.get("GPU UUID") == uuid), None)

    def numbers(self) -> dict[str, int]:
        """Return each GPU's number by its PCI address, those included that cannot be opened."""
        lost = {gone.bus: gone.place for gone in self.lost if gone.bus}
        return lost | {card.bus: card.place for card in self.cards}


class Answer(NamedTuple):
    """What NVML said, and how it failed."""

    program: str = ""  # the library; "" where it cannot be loaded
    report: Report = Report()
    status: int | None = 0  # NVML's, or the child's where it died; None: it did not end in time
    trouble: str = ""  # why there is no report, or what is wrong with it
    message: str = ""  # what was printed in place of an answer
    silent: tuple[str, ...] = ()  # PCI addresses of GPUs that did not answer when asked alone
    capabilities: Mapping[str, str] = {}  # "9.0" by PCI address
    peers: Mapping[tuple[int, int], str] = {}  # OK, CNS, … as in `nvidia-smi topo -p2p r`
    links: Mapping[int, tuple[int, int]] = {}  # NVLinks that are up, and all


def ask(
    environ: Mapping[str, str],
    timeout_s: float,
    *,
    health: bool = False,
    bus: str = "",
    known: Sequence[str] = (),
) -> Answer:
    """Ask for the state of the GPUs; it takes some 100 ms where all is well.

    Args:
        environ: LD_LIBRARY_PATH counts.
        timeout_s: seconds after which the child is killed.
        health: ask for what doctor judges, too, and for the links between the GPUs.
        bus: ask the GPU at this PCI address alone; "" for all.
        known: the PCI addresses of the machine's GPUs along the bus, to name those that are lost.
    """
    words = [*(["--health"] if health else []), *([bus] if bus else [])]
    return read(bounded.run((*COMMAND, *words), environ, timeout_s), known)


def read(answer: bounded.Answer, known: Sequence[str] = ()) -> Answer:
    """Return the answer of ask_nvml.py as values; one that did not come says why."""
    try:
        return _read(json.loads(answer.out), known)
    except (ValueError, LookupError, TypeError, AttributeError):
        message = printable(" ".join(f"{answer.out} {answer.err}".split())[:300])
        trouble = answer.trouble or "its answer is not complete"
        return Answer(LIBRARY, Report(), answer.status, trouble, message)


def _read(found: Mapping[str, Any], known: Sequence[str]) -> Answer:
    if "cards" not in found:
        message = found.get("message", "")
        return Answer(found["library"], Report(), found["status"], found["error"], message)
    whole = len(known) == found["count"]
    cards = tuple(_card(one) for one in found["cards"])
    lost = [
        Lost(known[one["place"]] if whole else "", one["why"], one["place"])
        for one in found["lost"]
    ]
    cuda = f"{found['cuda'] // 1000}.{found['cuda'] % 1000 // 10}" if found["cuda"] else ""
    none = "" if cards else next((gone.why for gone in lost), "")
    return Answer(
        found["library"],
        Report(found["driver"], cuda, cards, tuple(lost)),
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
    """Return a PCI address as /sys writes it: 0000:ad:00.0."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}"


def watts(milliwatts: int | None) -> str:
    """Return a power as nvidia-smi writes it, "" where it is not known."""
    return "" if milliwatts is None else f"{milliwatts / 1000:.2f} W"
