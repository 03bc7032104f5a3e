"""The findings of a preflight, for each GPU, with the fix.

    judge(document, facts, …) -> Judged

`document` is preflight.py's report. Texts of the driver in it are made printable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from saferun.base.durations import seconds
from saferun.gpu import cuda_errors
from saferun.gpu.device_names import visible_without
from saferun.gpu.preflight import preflight
from saferun.model import NOTE, OK, PROBLEM, Finding, Gpu, GpuFacts
from saferun.system.printable import printable

CUDA, ALL = "CUDA", "GPUs"  # areas of findings that concern no single GPU
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
    """One GPU after the test."""

    number: int  # CUDA's number in the job
    uuid: str
    pci: str
    name: str
    error: str
    step: str  # the last step that was begun
    good: bool | None = None  # None: no answer came
    code: int = 0
    differs_at: int | None = None  # the first byte that came back wrong


class Judged(NamedTuple):
    """The results of a test."""

    findings: tuple[Finding, ...]
    # Steps of recovery (cuda_errors) that may help, each with the UUIDs of its GPUs.
    asks: Mapping[str, tuple[str, ...]] = {}

    @property
    def well(self) -> bool:
        """Return whether every GPU can be used."""
        return all(finding.level != PROBLEM for finding in self.findings)


class Around(NamedTuple):
    """The machine's answers besides the test, by UUID; empty if all went well."""

    alone: Mapping[str, Mapping[str, Any]] = {}  # documents of tests with only one visible GPU
    holders: Mapping[str, str] = {}  # "pid 4711 (python, 70000 MiB)"
    addresses: Mapping[str, str] = {}  # PCI addresses


NOTHING = Around()


def cards(document: Mapping[str, Any]) -> tuple[Card, ...]:
    """Return the GPUs of a document, in CUDA's order."""
    reports = document["devices"]
    return tuple(_card(number, reports[str(number)]) for number in sorted(map(int, reports)))


def _card(number: int, report: Mapping[str, Any]) -> Card:
    uuid, pci, name, error, step = (
        _text(report, field) for field in ("uuid", "pci", "name", "error", "step")
    )
    found = {field: report[field] for field in ("good", "code", "differs_at") if field in report}
    return Card(number, uuid, pci, name, error, step, **found)


def _text(report: Mapping[str, Any], name: str) -> str:
    """Return a driver's text such that nothing in it moves a terminal's cursor."""
    return printable(report.get(name, ""), 200)


def judge(
    document: Mapping[str, Any], facts: GpuFacts, timeout_s: float, around: Around = NOTHING
) -> Judged:
    """Return the judgement on a test.

    Args:
        document: preflight.py's report.
        facts: the GPUs that the job should see.
        timeout_s: time limit of the test, in seconds.
        around: the machine's answers besides the test.
    """
    return _Judge(document, facts, timeout_s, around).judged()


def in_a_line(finding: Finding) -> str:
    """Return a finding as one line."""
    text = f"{finding.area}: {finding.what}"
    return f"{text}; {finding.fix}" if finding.fix else text


def lines(judged: Judged, limit: int = 4) -> list[str]:
    """Return the problems as lines for people, only the first few."""
    problems = [f for f in judged.findings if f.level == PROBLEM]
    texts = [in_a_line(finding) for finding in problems[:limit]]
    if len(problems) > limit:
        texts.append(f"and {len(problems) - limit} more (saferun doctor)")
    return texts + [f.what for f in judged.findings if f.level == NOTE]


class _Judge:
    """One test with its context; the arguments are those of `judge`."""

    def __init__(
        self, document: Mapping[str, Any], facts: GpuFacts, timeout_s: float, around: Around
    ) -> None:
        self._document, self._facts = document, facts
        self._timeout_s, self._around = timeout_s, around
        self._cards = cards(document)
        self._ended: str = document["ended"]
        self._visible = document.get("visible")

    def judged(self) -> Judged:
        """Return the judgement on the test."""
        at_large = self._at_large()
        if at_large is not None:
            return at_large
        bad = [card for card in self._cards if not card.good]
        gone = self._gone()
        if not bad and not gone:
            return Judged((self._all_well(), *self._unlisted()))
        findings = [self._of_card(card) for card in bad]
        findings += [self._of_gone(gpu) for gpu in gone]
        # If CUDA shows fewer GPUs than there are, its numbers differ from the variable's.
        visible = None if gone else self._visible
        value = visible_without(visible, [(c.uuid, bool(c.good)) for c in self._cards])
        findings += _leaving_out(value, len(bad) + len(gone))
        return Judged(tuple(findings), _asks((card.code, card.uuid) for card in bad))

    def _all_well(self) -> Finding:
        count = len(self._cards)
        many = "1 GPU" if count == 1 else f"{count} GPUs"
        what = f"{many} made a context and gave back what was written"
        return Finding(OK, ALL, what, f"{self._document.get('seconds')} s")

    # --- what concerns all of them ---------------------------------------------------------------

    def _at_large(self) -> Judged | None:
        """Judge a test that reported nothing about single GPUs; None if it did."""
        document = self._document
        if document.get("missing"):
            return Judged((self._no_library(),))
        if self._ended == "crash":
            title = f"the test was killed by signal {document.get('signal')}"
            if (judged := self._some_alone(title)) is not None:
                return judged
        if document["code"]:
            return self._no_start()
        if self._cards:
            return None
        if self._ended == "timeout":
            step = _text(document, "step")
            what = (
                f"the driver does not answer: {step} took {seconds(self._timeout_s)}{self._left()}"
            )
            fix = "look at dmesg and at processes in state D (`ps -eo pid,stat,wchan,args`); reboot"
            return Judged((Finding(PROBLEM, CUDA, what, self._listed(), fix),))
        return Judged((self._none_shown() if self._ended == "done" else self._broken(),))

    def _no_library(self) -> Finding:
        what = "there is no NVIDIA driver library (libcuda.so.1)"
        if self._document.get("proc"):
            fix = _CAPABILITIES
        elif self._document.get("kfd"):
            fix = "this machine has an AMD GPU (/dev/kfd), which saferun cannot test"
        else:
            fix = "install NVIDIA's driver, or choose the profile for machines without a GPU (cpu)"
        return Finding(PROBLEM, CUDA, what, _text(self._document, "missing"), fix)

    def _no_start(self) -> Judged:
        """Judge a failed cuInit: some GPUs may cause it while the others alone can start."""
        code = self._document["code"]
        known = cuda_errors.known(code)
        title = cuda_errors.title(code, _text(self._document, "error"))
        if (judged := self._some_alone(title)) is not None:
            return judged
        fix = known.fix
        if code in (3, 100, 304, 999):
            fix = cuda_errors.node_fix(self._document.get("nodes", {})) or fix
        if code in (100, 101) and self._visible is not None:
            fix = f"CUDA_VISIBLE_DEVICES={self._visible!r} is set: compare it with nvidia-smi -L"
        what = f"it cannot start: {title}"
        detail = "; ".join(filter(None, (known.means, self._listed(), known.source)))
        return Judged((Finding(PROBLEM, CUDA, what, detail, fix),), _asks([(code, "")]))

    def _some_alone(self, title: str) -> Judged | None:
        """Judge by the tests with one GPU each; None if those do not differ."""
        gpus, alone = self._facts.gpus, self._around.alone
        able = [(g, g.uuid in alone and preflight.is_well(alone[g.uuid])) for g in gpus]
        if len({good for _, good in able}) < 2:
            return None
        findings, failed = [], []
        for gpu in (gpu for gpu, good in able if not good):
            document = alone.get(gpu.uuid)
            code = _first_code(document) if document else 0
            known = cuda_errors.known(code)
            failed.append((code, gpu.uuid))
            own = cuda_errors.title(code, _text(document or {}, "error")) if code else title
            what = f"{self._identity(gpu.uuid)}: CUDA does not work with it: {own}"
            fix = _for(gpu.uuid, known.fix)
            findings.append(Finding(PROBLEM, _area(gpu), what, known.means, fix))
        value = visible_without(self._visible, [(gpu.uuid, good) for gpu, good in able])
        findings += _leaving_out(value, len(failed))
        return Judged(tuple(findings), _asks(failed))

    def _none_shown(self) -> Finding:
        known, count = cuda_errors.known(100), self._document.get("count")
        fix = known.fix
        if self._visible is not None:
            fix = (
                f"CUDA_VISIBLE_DEVICES={self._visible!r} leaves none: compare it with nvidia-smi -L"
            )
        what = f"CUDA says that there are {count} GPUs" if count else known.means
        return Finding(PROBLEM, CUDA, what, self._listed(), fix)

    def _broken(self) -> Finding:
        """Report a test with an unexpected end, such as a crash in the driver or endless output."""
        number = self._document.get("signal")
        how = f"was killed by signal {number}" if number else "ended before it had an answer"
        if self._ended == "flood":
            how = "wrote without end"
        what = f"the test {how} (at: {_text(self._document, 'step')})"
        fix = (
            "the driver's library is broken or is not NVIDIA's: look at LD_LIBRARY_PATH, reinstall"
        )
        return Finding(PROBLEM, CUDA, what, _text(self._document, "output"), fix)

    def _left(self) -> str:
        left = self._document.get("left")
        return f", and its process {left} cannot be killed" if left else ""

    def _listed(self) -> str:
        named = [f"{_area(gpu)} ({self._identity(gpu.uuid)})" for gpu in self._facts.gpus[:16]]
        return f"the driver lists {', '.join(named)}" if named else ""

    # --- one GPU ---------------------------------------------------------------------------------

    def _of_card(self, card: Card) -> Finding:
        known = cuda_errors.known(card.code)
        gpu = next((g for g in self._facts.gpus if card.uuid and g.uuid == card.uuid), None)
        detail = [card.name, known.means, known.source]
        fix = known.fix
        if card.differs_at is not None:
            fault = f"memory gives back other bytes than were written (byte {card.differs_at})"
            fix = "do not compute on it: end what runs there, reset it, and have it replaced"
        elif card.code:
            fault = _during(cuda_errors.title(card.code, card.error), card)
            if holders := self._around.holders.get(card.uuid):
                fix = f"held by {holders}; {fix}"
        elif self._ended == "timeout":
            fault = _during(f"no answer within {seconds(self._timeout_s)}", card) + self._left()
        else:
            fault = _during("the test ended before it was done", card)
            detail.append(_text(self._document, "output"))
        what = f"{self._identity(card.uuid, card.pci)}: {fault}"
        area = _area(gpu, card.number)
        return Finding(PROBLEM, area, what, "; ".join(filter(None, detail)), _for(card.uuid, fix))

    def _comparable(self) -> bool:
        """Return whether CUDA's GPUs and the driver's list can be compared with certainty."""
        uuids = [*(card.uuid for card in self._cards), *(gpu.uuid for gpu in self._facts.gpus)]
        return not self._facts.warning and all(uuid.startswith("GPU-") for uuid in uuids)

    def _gone(self) -> list[Gpu]:
        """Return the GPUs that the driver lists for the job but CUDA does not show."""
        shown = {card.uuid for card in self._cards}
        return [g for g in self._facts.gpus if g.uuid not in shown and self._comparable()]

    def _unlisted(self) -> list[Finding]:
        """Note the GPUs that CUDA shows but the driver does not list: one of both is wrong."""
        listed = {gpu.uuid for gpu in self._facts.gpus}
        more = [card.uuid for card in self._cards if card.uuid not in listed]
        if not listed or not more or not self._comparable():
            return []
        what = f"CUDA shows {len(self._cards)}, nvidia-smi lists {len(listed)} of them"
        fix = "compare `nvidia-smi -L`: only the GPUs that it lists are locked and counted"
        return [Finding(NOTE, ALL, what, f"not listed: {', '.join(more[:8])}", fix)]

    def _of_gone(self, gpu: Gpu) -> Finding:
        missing = f"the driver lists it, and CUDA does not show it (it shows {len(self._cards)})"
        what = f"{self._identity(gpu.uuid)}: {missing}"
        fix = "look for Xid lines in dmesg and at nvidia-smi"
        return Finding(PROBLEM, _area(gpu), what, gpu.name, fix)

    def _identity(self, uuid: str, address: str = "") -> str:
        address = address or self._around.addresses.get(uuid, "")
        return " at ".join(filter(None, (uuid, address))) or "UUID unknown"


def _asks(failed: Iterable[tuple[int, str]]) -> dict[str, tuple[str, ...]]:
    """Return the steps of recovery for the errors of GPUs."""
    asks: dict[str, tuple[str, ...]] = {}
    for code, uuid in failed:
        for ask in cuda_errors.known(code).asks:
            asks[ask] = (*asks.get(ask, ()), *([uuid] if uuid else []))
    return asks


def _first_code(document: Mapping[str, Any]) -> int:
    """Return the error in a test of one GPU; 0 if it has none."""
    code: int = document["code"]
    return code or next((card.code for card in cards(document)), 0)


def _during(fault: str, card: Card) -> str:
    return f"{fault} {_DURING.get(card.step, '')}".rstrip()


def _for(uuid: str, fix: str) -> str:
    """Put a GPU's own UUID into the command that fixes it."""
    return fix.replace("-i UUID", f"-i {uuid}") if uuid else fix


def _area(gpu: Gpu | None, index: int | None = None) -> str:
    """Return "GPU" and nvidia-smi's number; CUDA's own number if the job's numbers differ."""
    number = gpu.number if gpu else None
    if number is None:
        return "GPU" if index is None else f"GPU {index}"
    return f"GPU {number}" + ("" if index in (None, number) else f" (CUDA's {index})")


def _leaving_out(value: str | None, bad: int) -> list[Finding]:
    """Return the note with the value of CUDA_VISIBLE_DEVICES that omits the bad GPUs."""
    if value is None:
        return []
    them = "the bad one" if bad == 1 else f"the {bad} bad ones"
    return [Finding(NOTE, ALL, f"to run without {them}: export CUDA_VISIBLE_DEVICES={value}")]
