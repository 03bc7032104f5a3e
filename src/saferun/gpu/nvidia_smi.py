"""nvidia-smi: what it is asked, and what it printed as values.

The forms are those of reports of driver series 535, 550, 570, 580 and 595. Only the name of a field
is relied on: sections move and are renamed between series ("Clocks Throttle Reasons" became "Clocks
Event Reasons", "GPU Reset Status" became "GPU Recovery Action"), and a driver leaves out what it
does not know. https://docs.nvidia.com/deploy/nvidia-smi/index.html says that the output may change.

`nvidia-smi -q` prints the name of each process as it is, argv[0] of any user with newlines and
escape sequences in it (seen with 580.159). So nothing is read from where a name may stand, and a
report that contradicts itself is refused. What is acted upon comes from `QUERY` and `APPS`, which
print values of the driver and numbers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from saferun.system import command as bounded
from saferun.system import paths
from saferun.system.printable import printable

_BUS = r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]"
_GPU = rf"^GPU ({_BUS})\s*$"
# "… for GPU3: 0000:5F:00.0: Unknown Error", "… for GPU0000:25:00.0: GPU is lost.  Reboot …"
_LOST = rf"device handle for GPU\s*(?:\d{{1,3}}:)?\s*({_BUS})?:?\s*(.*)"
# What a field says in place of a value when the GPU did not answer.
SICK = ("unknown error", "gpu is lost", "err!", "gpu requires reset", "gpu access blocked")
LONGEST = 200  # characters of a value
ABSENT = "nvidia-smi is not on PATH"
_NOTHING = ("n/a", "not supported", "none", "", "unknown", "not found", "insufficient permissions")

# The fields of QUERY, by the names that -q gives them; the last one is unknown to older drivers.
_ASKED = {
    "GPU UUID": "uuid",
    "PCI/Bus Id": "pci.bus_id",
    "FB Memory Usage/Used": "memory.used",
    "Persistence Mode": "persistence_mode",
    "MIG Mode/Current": "mig.mode.current",
    "MIG Mode/Pending": "mig.mode.pending",
    "GPU Recovery Action": "gpu_recovery_action",
}
QUERY = (f"--query-gpu={','.join(_ASKED.values())}", "--format=csv,noheader")
OLD_QUERY = (QUERY[0].rpartition(",")[0], QUERY[1])
APPS = ("--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
MEMORY_QUERY = ("--query-gpu=uuid,memory.total,memory.free", "--format=csv,noheader,nounits")
CAPABILITIES = ("--query-gpu=pci.bus_id,compute_cap", "--format=csv,noheader")
_LOAD = ("utilization.gpu", "memory.used", "memory.total", "temperature.gpu")
LOAD = (f"--query-gpu=uuid,index,{','.join(_LOAD)}", "--format=csv,noheader,nounits")


class Load(NamedTuple):
    """How busy a GPU is; None for what the driver does not say."""

    place: int | None  # its index in nvidia-smi
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
    """One GPU of the report."""

    bus: str  # 0000:ad:00.0
    fields: Mapping[str, str]  # "ECC Errors/Volatile/DRAM Uncorrectable": "0"
    processes: tuple[Process, ...] = ()

    def get(self, name: str) -> str:
        """Return a field's value, "" where the driver gives none."""
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
    forged: str = ""  # how it contradicts itself; there are no cards then


def is_sick(value: str) -> bool:
    """Return whether a value is an error message in a value's place."""
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


def parse(text: str, messages: str = "", known: Collection[str] = ()) -> Report:
    """Read a report; a cut, empty or foreign one gives what there is of it.

    Args:
        text: stdout of `nvidia-smi -q`, for all GPUs or for one.
        messages: its stderr.
        known: the PCI addresses of the machine's GPUs; none where they are not known.
    """
    heads = [*re.finditer(_GPU, text, re.MULTILINE)]
    top = text[: heads[0].start()] if heads else text
    general = dict(_fields(top))
    if (number(general.get("Attached GPUs", "")) or len(heads)) == 1:
        heads = heads[:1]  # what follows stands where names of processes may
    ends = [*(head.start() for head in heads[1:]), len(text)] if heads else []
    cards, problems = [], []
    for head, end in zip(heads, ends, strict=True):
        fields, problem = _once(_fields(_before_processes(text[head.end() : end])))
        cards.append(Card(bus_id(head[1]), fields))
        problems.append(problem)
    lost = tuple(_lost(f"{top}\n{messages}"))
    strangers = [
        f"{c.bus} is no GPU of this machine" for c in cards if known and c.bus not in known
    ]
    forged = next(filter(None, [*problems, *strangers, _contradiction(general, cards, lost)]), "")
    return Report(
        driver=_version(general.get("Driver Version") or general.get("KMD Version", "")),
        cuda=_version(general.get("CUDA Version") or general.get("CUDA UMD Version", "")),
        cards=() if forged else tuple(cards),
        lost=lost,
        strange="" if cards else _strange(f"{top}\n{messages}"),
        forged=forged,
    )


def _before_processes(text: str) -> str:
    """Return the part of a GPU's report in which no other user's text can stand."""
    return re.split(r"^[ \t]+Processes\b.*$", text, maxsplit=1, flags=re.MULTILINE)[0]


def _once(fields: Iterator[tuple[str, str]]) -> tuple[dict[str, str], str]:
    """Return fields by name, and which of them is there twice."""
    found: dict[str, str] = {}
    repeated = ""
    for name, value in fields:
        if value and found.get(name):
            repeated = repeated or f"`{name}` is there twice"
        found[name] = value
    return found, repeated


def _contradiction(general: Mapping[str, str], cards: Sequence[Card], lost: Sequence[Lost]) -> str:
    buses = [card.bus for card in cards]
    uuids = [uuid for card in cards if (uuid := card.get("GPU UUID"))]
    attached = number(general.get("Attached GPUs", ""))
    if len(set(buses)) < len(buses) or len(set(uuids)) < len(uuids):
        return "a GPU is there twice"
    if attached is not None and len(cards) > attached:
        return f"{len(cards)} GPUs where it says that {attached} are attached"
    if any(gone.bus in buses for gone in lost if gone.bus):
        return "a GPU is lost and there"
    return ""


def _version(text: str) -> str:
    found = re.match(r"\d+(?:\.\d+)+", text)
    return found[0] if found else ""


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
    return printable(first, 160)


# The answers to queries, a line for each GPU or process


def ask(arguments: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> bounded.Answer:
    """Run the nvidia-smi of PATH; its answer says so where there is none.

    Args:
        arguments: what it is asked.
        environ: its environment; PATH counts.
        timeout_s: seconds after which it is killed.
    """
    program = next(paths.on_path("nvidia-smi", environ), None)
    if program is None:
        return bounded.Answer("", "", None, ABSENT)
    return bounded.run((program, *arguments), environ, timeout_s)


def query(environ: Mapping[str, str], timeout_s: float) -> tuple[Report, str]:
    """Ask for each GPU's state and processes; return them and what went wrong.

    Args:
        environ: PATH finds nvidia-smi.
        timeout_s: the most seconds of each of two or three questions.
    """
    answer = ask(QUERY, environ, timeout_s)
    if "not a valid field" in answer.out + answer.err:
        answer = ask(OLD_QUERY, environ, timeout_s)
    report = parse_query(answer.out)
    if answer.trouble == ABSENT:
        return report, ABSENT
    if not report.cards:
        reason = report.forged or report.strange or parse_query(answer.err).strange
        trouble = answer.trouble or "no GPU in its answer"
        return report, ": ".join(filter(None, ("nvidia-smi --query-gpu", trouble, reason)))
    apps = ask(APPS, environ, timeout_s)
    trouble = f"nvidia-smi --query-compute-apps: {apps.trouble}" if apps.trouble else ""
    return with_processes(report, parse_apps(apps.out)), trouble


def parse_query(text: str) -> Report:
    """Read the answer to QUERY or OLD_QUERY."""
    cards, strange = [], ""
    for line in text.splitlines():
        values = [value.strip()[:LONGEST] for value in line.split(",")]
        whole = len(_ASKED) - 1 <= len(values) <= len(_ASKED)
        if whole and re.fullmatch(r"GPU-[0-9a-f-]{8,64}", values[0], re.I) and _is_bus(values[1]):
            fields = dict(zip(_ASKED, values, strict=False))
            cards.append(Card(bus_id(values[1]), fields))
        elif line.strip() and not strange:
            strange = _strange(line)
    forged = _contradiction({}, cards, ())
    return Report(cards=() if forged else tuple(cards), strange=strange, forged=forged)


def parse_apps(text: str) -> dict[str, tuple[Process, ...]]:
    """Read the answer to APPS: the processes by UUID of their GPU."""
    found: dict[str, tuple[Process, ...]] = {}
    for uuid, pid, used in _rows(text, 3):
        if re.fullmatch(r"\d{1,10}", pid):
            found[uuid] = (*found.get(uuid, ()), Process(int(pid), number(used)))
    return found


def with_processes(report: Report, apps: Mapping[str, tuple[Process, ...]]) -> Report:
    """Return a report with the processes of each GPU."""
    cards = (card._replace(processes=apps.get(card.get("GPU UUID"), ())) for card in report.cards)
    return report._replace(cards=tuple(cards))


def parse_load(text: str) -> dict[str, Load]:
    """Read the answer to LOAD: by the UUID of each GPU."""
    return {uuid: Load(*map(number, rest)) for uuid, *rest in _rows(text, len(_LOAD) + 2)}


def parse_memory(text: str) -> dict[str, tuple[int, int]]:
    """Read the answer to MEMORY_QUERY: (total, free) in MiB by UUID, of the GPUs that tell.

    >>> parse_memory("GPU-1, 143771, 143150\\nGPU-2, [N/A], [N/A]\\n")
    {'GPU-1': (143771, 143150)}
    """
    sizes = {uuid: (number(total), number(free)) for uuid, total, free in _rows(text, 3)}
    return {uuid: (a, b) for uuid, (a, b) in sizes.items() if a is not None and b is not None}


def parse_capabilities(text: str) -> dict[str, str]:
    """Read the answer to CAPABILITIES: 9.0 by PCI address."""
    return {
        bus_id(bus): capability
        for bus, capability in _rows(text, 2)
        if _is_bus(bus) and re.fullmatch(r"\d+\.\d+", capability)
    }


def _rows(text: str, width: int) -> Iterator[list[str]]:
    """Yield the lines that have so many values; others are messages."""
    rows = ([value.strip() for value in line.split(",")] for line in text.splitlines())
    return (row for row in rows if len(row) == width)


def _is_bus(text: str) -> bool:
    return re.fullmatch(_BUS, text) is not None


# Its tables


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
