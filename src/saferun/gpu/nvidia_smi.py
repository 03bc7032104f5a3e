"""Pure: what nvidia-smi printed, as values.

Read from reports of driver series 535, 550, 570, 580 and 595. A field's name is all that is relied
on: sections move and are renamed between series ("Clocks Throttle Reasons" became "Clocks Event
Reasons", "GPU Reset Status" became "GPU Recovery Action"), and what a driver does not know is not
there. https://docs.nvidia.com/deploy/nvidia-smi/index.html says the output may change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from saferun.named_tuple import NamedTuple

_BUS = r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]"
_GPU = rf"^GPU ({_BUS})\s*$"
# "… for GPU3: 0000:5F:00.0: Unknown Error", "… for GPU0000:25:00.0: GPU is lost.  Reboot …"
_LOST = rf"device handle for GPU\s*(?:\d{{1,3}}:)?\s*({_BUS})?:?\s*(.*)"
# What a field says in place of a value when the GPU did not answer.
SICK = ("unknown error", "gpu is lost", "err!", "gpu requires reset", "gpu access blocked")
LONGEST = 200  # characters of a value
_NOTHING = ("n/a", "not supported", "none", "", "unknown", "not found", "insufficient permissions")


class Process(NamedTuple):
    """A process that holds memory of a GPU, as the driver names it."""

    pid: int
    kind: str  # C, G, C+G or M+C
    name: str
    used_mib: int | None  # None where the driver does not say, as under MIG


class Card(NamedTuple):
    """One GPU of the report."""

    bus: str  # 0000:ad:00.0
    fields: Mapping[str, str]  # "ECC Errors/Volatile/DRAM Uncorrectable": "0"
    processes: tuple[Process, ...] = ()

    def get(self, name: str) -> str:
        """Return a field's value, "" where the driver has none to say."""
        value = self.fields.get(name, "").strip().strip("[]").strip()
        return "" if value.lower() in _NOTHING or is_sick(value) else value

    def sick(self) -> tuple[str, ...]:
        """Return the fields that hold an error in place of a value."""
        return tuple(name for name, value in self.fields.items() if is_sick(value))


class Lost(NamedTuple):
    """A GPU that nvidia-smi could not open."""

    bus: str  # "" where it does not say
    why: str


class Report(NamedTuple):
    """What `nvidia-smi -q` said."""

    driver: str = ""
    cuda: str = ""  # the newest CUDA that this driver has, "13.0"
    cards: tuple[Card, ...] = ()
    lost: tuple[Lost, ...] = ()
    strange: str = ""  # the first line that belongs to no report


def is_sick(value: str) -> bool:
    """Say whether a value is an error message in a value's place."""
    return value.strip().strip("[]").strip().lower().rstrip(".") in SICK


def bus_id(text: str) -> str:
    """Return a PCI address as /sys writes it: 0000:ad:00.0."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}"


def number(text: str) -> int | None:
    """Return the number that a value begins with; None where there is none, or one below zero.

    What is asked for here are counts, sizes and widths.
    """
    found = re.match(r"\d{1,18}", text.strip())
    return int(found[0]) if found else None


def parse(text: str) -> Report:
    """Read a report; a cut, empty or foreign one gives what there is of it."""
    heads = [*re.finditer(_GPU, text, re.MULTILINE)]
    top = text[: heads[0].start()] if heads else text
    ends = [*(head.start() for head in heads[1:]), len(text)] if heads else []
    cards = [_card(h[1], text[h.end() : end]) for h, end in zip(heads, ends, strict=True)]
    general = dict(_fields(top))
    return Report(
        driver=_version(general.get("Driver Version") or general.get("KMD Version", "")),
        cuda=_version(general.get("CUDA Version") or general.get("CUDA UMD Version", "")),
        cards=tuple(cards),
        lost=tuple(_lost(text)),
        strange="" if cards else _strange(text),
    )


def _version(text: str) -> str:
    found = re.match(r"\d+(?:\.\d+)+", text)
    return found[0] if found else ""


def _card(bus: str, text: str) -> Card:
    fields: dict[str, str] = {}
    found: list[dict[str, str]] = []
    for name, value in _fields(text):
        if not name.startswith("Processes/"):
            fields[name] = value
        elif name.endswith("/Process ID"):
            found.append({"pid": value})
        elif found:
            found[-1][name.rpartition("/")[2]] = value
    return Card(bus_id(bus), fields, tuple(filter(None, map(_process, found))))


def _process(words: Mapping[str, str]) -> Process | None:
    pid = number(words["pid"])
    if pid is None:
        return None
    used = number(words.get("Used GPU Memory", ""))
    return Process(pid, words.get("Type", ""), words.get("Name", ""), used)


def _fields(text: str) -> Iterator[tuple[str, str]]:
    """Yield `section/name` and value of each line; sections are told by their indentation."""
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if not name.strip() or line.startswith(("=", "+", "|")):
            continue
        depth = len(name) - len(name.lstrip())
        while above and above[-1][0] >= depth:
            above.pop()
        above.append((depth, name.strip()))
        if colon:
            yield "/".join(name for _, name in above), value.strip()[:LONGEST]


def _lost(text: str) -> Iterator[Lost]:
    for found in re.finditer(_LOST, text):
        yield Lost(bus_id(found[1]) if found[1] else "", found[2].strip().rstrip("."))


def _strange(text: str) -> str:
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and "NVSMI LOG" not in line), "")
    return "".join(c if c.isprintable() else "?" for c in first[:160])


def parse_capabilities(text: str) -> dict[str, str]:
    """Read `--query-gpu=pci.bus_id,compute_cap --format=csv,noheader`: 9.0 by PCI address."""
    rows = (line.partition(",") for line in text.splitlines())
    return {
        bus_id(bus): cap.strip()
        for bus, _, cap in rows
        if re.fullmatch(_BUS, bus.strip()) and re.fullmatch(r"\d+\.\d+", cap.strip())
    }


MEMORY_QUERY = ("--query-gpu=uuid,memory.total,memory.free", "--format=csv,noheader,nounits")


def parse_memory(text: str) -> dict[str, tuple[int, int]]:
    """Read what MEMORY_QUERY asks for: (total, free) in MiB by UUID; what is not told is left out.

    >>> parse_memory("GPU-1, 143771, 143150\\nGPU-2, [N/A], [N/A]\\n")
    {'GPU-1': (143771, 143150)}
    """
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines()]
    sizes = {row[0]: (number(row[1]), number(row[2])) for row in rows if len(row) == 3}
    return {uuid: (a, b) for uuid, (a, b) in sizes.items() if a is not None and b is not None}


def parse_peers(text: str) -> dict[tuple[int, int], str]:
    """Read `nvidia-smi topo -p2p r`: what the driver says of each pair (OK, CNS, GNS, TNS, NS)."""
    rows = [line.split() for line in text.splitlines()]
    heads = next((row for row in rows if len(row) > 1 and all(_is_gpu(w) for w in row)), [])
    pairs: dict[tuple[int, int], str] = {}
    for row in rows:
        if len(row) == len(heads) + 1 and _is_gpu(row[0]):
            for head, word in zip(heads, row[1:], strict=True):
                if word != "X":
                    pairs[int(row[0][3:]), int(head[3:])] = word
    return pairs


def _is_gpu(word: str) -> bool:
    return re.fullmatch(r"GPU\d{1,4}", word) is not None


def parse_links(text: str) -> dict[int, tuple[int, int]]:
    """Read `nvidia-smi nvlink -s`: for each GPU the links that are up and those that there are."""
    links: dict[int, tuple[int, int]] = {}
    card = None
    for line in text.splitlines():
        head = re.match(r"GPU (\d{1,4}):", line)
        if head:
            card = int(head[1])
        elif card is not None and (found := re.match(r"\s*Link \d+: (.*)", line)):
            up, known = links.get(card, (0, 0))
            links[card] = (up + bool(re.match(r"[\d.]+ GB/s", found[1])), known + 1)
    return links


def ordered(cards: Sequence[Card], lost: Sequence[Lost]) -> dict[str, int]:
    """Return each GPU's number by its PCI address, those included that cannot be opened.

    NVML counts along the PCI bus, and nvidia-smi leaves a number out for a GPU that is lost.
    """
    buses = {card.bus for card in cards} | {gone.bus for gone in lost if gone.bus}
    return {bus: place for place, bus in enumerate(sorted(buses, key=_by_hex))}


def _by_hex(bus: str) -> list[int]:
    return [int(part, 16) for part in bus.replace(".", ":").split(":")]
