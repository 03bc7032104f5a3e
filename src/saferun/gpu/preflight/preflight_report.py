"""Pure: the findings of a preflight: what its document means, GPU by GPU, with the fix.

    judge(document, facts, …) -> Judged

`document` is what preflight.py reported. A driver's answers are in it, so no value is trusted to
have the right type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from saferun.gpu import cuda_errors
from saferun.gpu.visible_devices import visible_without
from saferun.model import NOTE, OK, PROBLEM, Finding, Gpu, GpuFacts
from saferun.named_tuple import NamedTuple
from saferun.system.printable import printable

CUDA, ALL = "CUDA", "GPUs"  # areas of what is not one GPU's
_DURING = {
    "device": "when it was asked for",
    "context": "while a context was made",
    "memory": "while memory was taken",
    "write": "while memory was written",
    "copy": "while memory was copied",
    "read": "while memory was read back",
    "release": "while memory was given back",
}
_CAPABILITIES = (
    "the driver's kernel side is here, its libcuda.so.1 is not: give the container the `compute` "
    "capability (NVIDIA_DRIVER_CAPABILITIES=compute,utility), or set LD_LIBRARY_PATH"
)


class Card(NamedTuple):
    """One GPU as the test left it."""

    number: int  # as CUDA counts in the job
    uuid: str
    pci: str
    name: str
    good: bool | None  # None: no answer came
    step: str  # the last one that was begun
    code: int = 0
    error: str = ""
    differs_at: int | None = None  # byte that came back wrong


class Judged(NamedTuple):
    """What a test showed."""

    findings: tuple[Finding, ...]
    # What recovery may do about it (cuda_errors), and the UUIDs of the GPUs that it is for.
    asks: Mapping[str, tuple[str, ...]] = {}

    @property
    def well(self) -> bool:
        """Whether every GPU can be used."""
        return all(finding.level != PROBLEM for finding in self.findings)


class Around(NamedTuple):
    """What was asked of the machine beside the test, by UUID; empty where all went well."""

    alone: Mapping[str, Mapping[str, Any]] = {}  # documents of tests with one GPU visible each
    holders: Mapping[str, str] = {}  # "pid 4711 (python, 70000 MiB)"
    addresses: Mapping[str, str] = {}  # PCI addresses


NOTHING = Around()


def cards(document: Mapping[str, Any]) -> tuple[Card, ...]:
    """Return the GPUs of a document, as CUDA counts them."""
    devices = document.get("devices")
    reports = devices if isinstance(devices, Mapping) else {}
    numbers = sorted(int(word) for word in reports if str(word).isdigit())
    return tuple(_card(number, reports[str(number)]) for number in numbers)


def _card(number: int, report: Mapping[str, Any]) -> Card:
    good, differs = report.get("good"), report.get("differs_at")
    return Card(
        number,
        uuid=_text(report.get("uuid")),
        pci=_text(report.get("pci")),
        name=_text(report.get("name")),
        good=good if isinstance(good, bool) else None,
        step=_text(report.get("step")),
        code=_code(report),
        error=_text(report.get("error")),
        differs_at=differs if isinstance(differs, int) else None,
    )


def _text(value: object) -> str:
    """Return a driver's text such that nothing in it moves a terminal's cursor."""
    return printable(value or "", 200)


def _code(report: Mapping[str, Any]) -> int:
    code = report.get("code")
    return code if isinstance(code, int) else 0


def judge(
    document: Mapping[str, Any],
    facts: GpuFacts,
    timeout_s: float,
    around: Around = NOTHING,
) -> Judged:
    """Return what a test showed.

    Args:
        document: of preflight.py.
        facts: the GPUs that the job should see.
        timeout_s: what the test was given.
        around: see there.
    """
    found = cards(document)
    at_large = _at_large(document, found, facts, timeout_s, around)
    if at_large is not None:
        return at_large
    bad = [card for card in found if not card.good]
    gone = _gone(found, facts)
    if not bad and not gone:
        return Judged((_all_well(document, found), *_unlisted(found, facts)))
    findings = [_of_card(card, document, facts, timeout_s, around) for card in bad]
    findings += [_of_gone(gpu, len(found), around) for gpu in gone]
    # Where CUDA shows fewer GPUs than there are, its numbers are no longer those of the variable.
    visible = None if gone else document.get("visible")
    value = visible_without(visible, [(c.uuid, bool(c.good)) for c in found])
    findings += _leaving_out(value, len(bad) + len(gone))
    return Judged(tuple(findings), _asks((card.code, card.uuid) for card in bad))


def _asks(failed: Iterable[tuple[int, str]]) -> dict[str, tuple[str, ...]]:
    """What recovery is asked for, by the errors of GPUs."""
    asks: dict[str, tuple[str, ...]] = {}
    for code, uuid in failed:
        for ask in cuda_errors.known(code).asks:
            asks[ask] = (*asks.get(ask, ()), *([uuid] if uuid else []))
    return asks


def lines(judged: Judged, limit: int = 4) -> list[str]:
    """Return the problems as lines for people, a few at the most."""
    problems = [f for f in judged.findings if f.level == PROBLEM]
    texts = [f"{f.area}: {f.what}; {f.fix}" for f in problems[:limit]]
    if len(problems) > limit:
        texts.append(f"and {len(problems) - limit} more (saferun doctor)")
    return texts + [f.what for f in judged.findings if f.level == NOTE]


def _all_well(document: Mapping[str, Any], found: Sequence[Card]) -> Finding:
    many = "1 GPU" if len(found) == 1 else f"{len(found)} GPUs"
    what = f"{many} made a context and gave back what was written"
    return Finding(OK, ALL, what, f"{document.get('seconds')} s", "")


# --- what concerns all of them -------------------------------------------------------------------


def _at_large(
    document: Mapping[str, Any],
    found: Sequence[Card],
    facts: GpuFacts,
    timeout_s: float,
    around: Around,
) -> Judged | None:
    """Judge a test that reported nothing about single GPUs; None where it did."""
    if document.get("missing"):
        return Judged((_no_library(document),))
    if document.get("ended") == "crash" and around.alone:
        title = f"the test was killed by signal {document.get('signal')}"
        if (judged := _some_alone(document, facts, title, around)) is not None:
            return judged
    if code := _code(document):
        return _no_start(document, code, facts, around)
    if found:
        return None
    if document.get("ended") == "timeout":
        what = f"the driver does not answer: {_text(document.get('step'))} took {timeout_s:g} s"
        fix = "look at dmesg and at processes in state D (`ps -eo pid,stat,wchan,args`); reboot"
        return Judged((Finding(PROBLEM, CUDA, what + _left(document), _seen(facts, around), fix),))
    if document.get("ended") == "done":
        return _none_shown(document, facts, around)
    return Judged((_broken(document),))


def _no_library(document: Mapping[str, Any]) -> Finding:
    what = "there is no NVIDIA driver library (libcuda.so.1)"
    detail = _text(document.get("missing"))
    if document.get("proc"):
        fix = _CAPABILITIES
    elif document.get("kfd"):
        fix = "this machine has an AMD GPU (/dev/kfd), which saferun cannot try"
    else:
        fix = "install NVIDIA's driver, or choose the profile for machines without a GPU (cpu)"
    return Finding(PROBLEM, CUDA, what, detail, fix)


def _no_start(document: Mapping[str, Any], code: int, facts: GpuFacts, around: Around) -> Judged:
    """Judge a cuInit that failed: because of some GPUs, where the others alone can start."""
    known = cuda_errors.known(code)
    title = cuda_errors.title(code, _text(document.get("error")))
    if (judged := _some_alone(document, facts, title, around)) is not None:
        return judged
    fix = known.fix
    nodes = document.get("nodes")
    if code in (3, 100, 304, 999) and isinstance(nodes, Mapping):
        fix = cuda_errors.node_fix({str(k): str(v) for k, v in nodes.items()}) or fix
    visible = document.get("visible")
    if code in (100, 101) and visible is not None:
        fix = f"CUDA_VISIBLE_DEVICES={visible!r} is set: compare it with nvidia-smi -L"
    what = f"it cannot start: {title}"
    detail = "; ".join(filter(None, (known.means, _seen(facts, around), known.source)))
    return Judged((Finding(PROBLEM, CUDA, what, detail, fix),), _asks([(code, "")]))


def _well(document: Mapping[str, Any] | None) -> bool:
    found = cards(document) if document else ()
    return bool(found) and all(card.good for card in found)


def _some_alone(
    document: Mapping[str, Any], facts: GpuFacts, title: str, around: Around
) -> Judged | None:
    """Judge by the tests that saw one GPU each; None where those do not differ."""
    able = [_well(around.alone.get(gpu.uuid)) for gpu in facts.gpus]
    if all(able) or not any(able):
        return None
    return _one_of_them(document, facts, able, title, around)


def _one_of_them(
    document: Mapping[str, Any],
    facts: GpuFacts,
    able: Sequence[bool],
    title: str,
    around: Around,
) -> Judged:
    findings, failed = [], []
    bad = [gpu for gpu, good in zip(facts.gpus, able) if not good]  # noqa: B905 (one for each) - Python 3.9
    for gpu in bad:
        alone = around.alone.get(gpu.uuid, {})
        code = _code(alone) or next((card.code for card in cards(alone)), 0)
        known = cuda_errors.known(code)
        failed.append((code, gpu.uuid))
        own = cuda_errors.title(code, _text(alone.get("error"))) if code else title
        what = f"{_identity(gpu.uuid, _address(gpu.uuid, '', around))}: CUDA does not work with it"
        findings.append(
            Finding(PROBLEM, _area(gpu), f"{what}: {own}", known.means, _for(gpu.uuid, known.fix))
        )
    devices = [(gpu.uuid, good) for gpu, good in zip(facts.gpus, able)]  # noqa: B905 (one for each)
    value = visible_without(document.get("visible"), devices)
    findings += _leaving_out(value, len(bad))
    return Judged(tuple(findings), _asks(failed))


def _none_shown(document: Mapping[str, Any], facts: GpuFacts, around: Around) -> Judged:
    known, visible = cuda_errors.known(100), document.get("visible")
    fix = known.fix
    if visible is not None:
        fix = f"CUDA_VISIBLE_DEVICES={visible!r} leaves none: compare it with nvidia-smi -L"
    count = document.get("count")
    what = known.means if count in (0, None) else f"CUDA says that there are {count} GPUs"
    return Judged((Finding(PROBLEM, CUDA, what, _seen(facts, around), fix),))


def _broken(document: Mapping[str, Any]) -> Finding:
    """The test ended in a way of its own: a crash inside the driver, or output without end."""
    number = document.get("signal")
    how = f"was killed by signal {number}" if number else "ended before it had an answer"
    if document.get("ended") == "flood":
        how = "wrote without end"
    step = _text(document.get("step"))
    fix = "the driver's library is broken or is not NVIDIA's: look at LD_LIBRARY_PATH, reinstall"
    output = _text(document.get("output"))
    return Finding(PROBLEM, CUDA, f"the test {how} (at: {step})", output, fix)


def _left(document: Mapping[str, Any]) -> str:
    left = document.get("left")
    return f", and its process {left} cannot be killed" if left else ""


def _seen(facts: GpuFacts, around: Around) -> str:
    if not facts.gpus:
        return ""
    named = [
        f"{_area(gpu)} ({_identity(gpu.uuid, _address(gpu.uuid, '', around))})"
        for gpu in facts.gpus[:16]
    ]
    return f"the driver lists {', '.join(named)}"


# --- one GPU -------------------------------------------------------------------------------------


def _of_card(
    card: Card,
    document: Mapping[str, Any],
    facts: GpuFacts,
    timeout_s: float,
    around: Around,
) -> Finding:
    known = cuda_errors.known(card.code)
    identity = _identity(card.uuid, _address(card.uuid, card.pci, around))
    gpu = next((g for g in facts.gpus if card.uuid and g.uuid == card.uuid), None)
    area = _area(gpu, card.number)
    detail = "; ".join(filter(None, (card.name, known.means if card.code else "", known.source)))
    fix = known.fix
    if card.differs_at is not None:
        fault = f"memory gives back other bytes than were written (byte {card.differs_at})"
        fix = "do not compute on it: end what runs there, reset it, and have it replaced"
    elif card.code:
        fault = f"{cuda_errors.title(card.code, card.error)} {_DURING.get(card.step, '')}".rstrip()
        holders = around.holders.get(card.uuid)
        fix = f"{'held by ' + holders + '; ' if holders else ''}{fix}"
    elif document.get("ended") == "timeout":
        fault = f"no answer within {timeout_s:g} s {_DURING.get(card.step, '')}".rstrip()
        fault += _left(document)
    else:
        fault = f"the test ended before it was done {_DURING.get(card.step, '')}".rstrip()
        detail = "; ".join(filter(None, (detail, _text(document.get("output")))))
    return Finding(PROBLEM, area, f"{identity}: {fault}", detail, _for(card.uuid, fix))


def _for(uuid: str, fix: str) -> str:
    """Put a GPU's own UUID into the command that fixes it."""
    return fix.replace("-i UUID", f"-i {uuid}") if uuid else fix


def _comparable(found: Sequence[Card], facts: GpuFacts) -> bool:
    """Whether what CUDA shows and what the driver lists can be compared beyond doubt."""
    uuids = [*(card.uuid for card in found), *(gpu.uuid for gpu in facts.gpus)]
    return not facts.warning and all(uuid.startswith("GPU-") for uuid in uuids)


def _gone(found: Sequence[Card], facts: GpuFacts) -> list[Gpu]:
    """GPUs that the driver lists for the job and CUDA does not show."""
    shown = {card.uuid for card in found}
    return [gpu for gpu in facts.gpus if gpu.uuid not in shown and _comparable(found, facts)]


def _unlisted(found: Sequence[Card], facts: GpuFacts) -> list[Finding]:
    """GPUs that CUDA shows and the driver does not list: a program that lies, or lags behind."""
    listed = {gpu.uuid for gpu in facts.gpus}
    more = [card.uuid for card in found if card.uuid not in listed]
    if not listed or not more or not _comparable(found, facts):
        return []
    what = f"CUDA shows {len(found)}, nvidia-smi lists {len(listed)} of them"
    fix = "compare `nvidia-smi -L`: only the GPUs that it lists are locked and counted"
    return [Finding(NOTE, ALL, what, f"not listed: {', '.join(more[:8])}", fix)]


def _of_gone(gpu: Gpu, count: int, around: Around) -> Finding:
    identity = _identity(gpu.uuid, _address(gpu.uuid, "", around))
    what = f"{identity}: the driver lists it, and CUDA does not show it (it shows {count})"
    fix = "look for Xid lines in dmesg and at nvidia-smi"
    return Finding(PROBLEM, _area(gpu), what, gpu.name, fix)


def _area(gpu: Gpu | None, index: int | None = None) -> str:
    """GPU and its number as nvidia-smi has it; CUDA's own where the job counts otherwise."""
    number = gpu.number if gpu else None
    if number is None:
        return "GPU" if index is None else f"GPU {index}"
    return f"GPU {number}" + ("" if index in (None, number) else f" (CUDA's {index})")


def _identity(uuid: str, address: str) -> str:
    return " at ".join(filter(None, (uuid, address))) or "UUID unknown"


def _address(uuid: str, known: str, around: Around) -> str:
    return known or around.addresses.get(uuid, "")


# --- CUDA_VISIBLE_DEVICES ------------------------------------------------------------------------


def _leaving_out(value: str | None, bad: int) -> list[Finding]:
    if value is None:
        return []
    them = "the bad one" if bad == 1 else f"the {bad} bad ones"
    what = f"to run without {them}: export CUDA_VISIBLE_DEVICES={value}"
    return [Finding(NOTE, ALL, what, "", "")]
