"""Pure: what a log or a launcher says about exit codes and signals."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from saferun.diagnosis.log_reader import Line

_SIGNALS = {
    "sighup": 1, "sigint": 2, "sigquit": 3, "sigill": 4, "sigtrap": 5, "sigabrt": 6, "sigbus": 7,
    "sigfpe": 8, "sigkill": 9, "sigusr1": 10, "sigsegv": 11, "sigusr2": 12, "sigpipe": 13,
    "sigterm": 15, "sigxcpu": 24, "sigxfsz": 25,
}  # fmt: skip
# signal -> kind, weight. Kills and crashes are causes unless an exception says more; an abort
# follows an error that the log should hold; a SIGTERM mostly comes from a launcher that tidies up.
_BY_SIGNAL = {
    1: ("sighup-terminal-closed", 26),
    2: ("interrupted", 24),
    3: ("abort-unknown", 21),
    4: ("illegal-instruction", 45),
    5: ("illegal-instruction", 45),
    6: ("abort-unknown", 22),
    7: ("dataloader-shm-full", 45),
    8: ("segfault-environment", 45),
    9: ("host-oom-killed", 45),
    10: ("sigterm-preempted", 18),
    11: ("segfault", 45),
    12: ("sigterm-preempted", 18),
    15: ("sigterm-preempted", 13),
    24: ("scheduler-time-limit", 45),
    25: ("disk-full", 45),
}
_BY_CODE = {
    1: ("child-failed-no-root", 15),
    2: ("user-args-error", 14),
    127: ("user-missing-file", 40),
}
_ROOT = "root cause (first observed failure)"
_ECHO = 40  # what weighs no more may be an echo or the launcher's doing
_LISTED = "failures:"  # the line above what failed beside it
_TIME = re.compile(r"^\s{0,4}time\s{1,6}: (\d{4}-\d\d-\d\d)_(\d\d):(\d\d):(\d\d)")
_SAME_MOMENT_S = 2  # the launcher's SIGKILL comes 30 s later (--shutdown-timeout)
_EXITCODE = re.compile(r"exitcode\s{0,4}:\s{0,3}(-?\d{1,3})\b")
_RANK = re.compile(r"\brank\s{0,6}:\s{0,3}(\d{1,5})\b")
_NAMED = re.compile(
    r"\bsig(?:hup|int|quit|ill|trap|abrt|bus|fpe|kill|segv|usr1|usr2|term|xcpu|xfsz)\b"
)
_NUMBERED = re.compile(
    r"(?:exit(?:ed)? (?:with|on)|died with|caught|(?:killed|terminated) (?:by|with|on)|^|: )"
    r"\s?signal (\d{1,2})\b"
)
_CODE = re.compile(
    r"(?:return code = |exit(?:ed)?(?: with)?(?: (?:return )?(?:code|status))?[ =:]{1,12}"
    r"|container rank \d{1,5} status failed cmd \[.{1,3900}\] code "  # paddle's launcher
    r"|error code[ =:]{1,3}(?=-(?:6|9|11|15)\b)|pid \d{1,9} terminated with code "
    r"|exit code \(|non-zero exit status |exit_code[ =:]{1,3}|exitcode[ =]{1,3})(-?\d{1,3})\b"
)
_AGENT_SIGNAL = re.compile(
    r"received (\d{1,2}) death signal|got sig(?:nal|val) ?: ?(\d{1,2})\b"
    r"|got termination signal: (?:signals\.)?(sig\w{3,5})"
)
_WORDS = (
    ("cpu time limit exceeded", 24), ("file size limit exceeded", 25),
    ("segmentation fault", 11), ("segfault at", 11), ("bus error", 7),
    ("floating point exception", 8), ("illegal instruction", 4), ("double free", 11),
    ("free(): invalid", 11), ("corrupted size vs", 11), ("munmap_chunk()", 11),
    ("malloc(): ", 11), ("corrupted double-linked", 11), ("free(): double", 11),
    ("fatal python error: aborted", 6), ("terminate called", 6), ("malloc_consolidate()", 11),
    ("core dumped", 6),  # last: the shell says of every signal that it left a core
)  # fmt: skip
_KILLED_ALONE = re.compile(
    r"^\*{0,3}(?:\S{1,80}: (?:line \d{1,6}: |tasks? [\d,-]{1,40}: )?){0,3}"
    r"\s{0,4}(?:\d{1,9}\s{1,4})?(?:killed\b|(?P<term>terminated(?:$|: 15$|\s{6})))"
    r"(?!.{0,40}(?:subprocess|process group|by signal|trial))"
)
# Launchers that end the rest by SIGKILL, Lightning itself too: that tells nothing of the cause.
_KILL_ALL = re.compile(r"forcefully terminating all other processes|^srun: (?:force )?terminat")
_KILLING_LINES = 40
_NOISE = (
    "sending process", "closing signal", "killing subprocess", "registered signal",
    "signal handler", "stopping process", "signals_to_handle", "unable to shutdown process",
)  # fmt: skip
_HINTS = (
    "exit",
    "sig",
    "kill",
    "fault",
    "error",
    "core",
    "free",
    "malloc",
    "terminat",
    "munmap",
    "corrupted",
    "limit exceeded",
    "status failed",
)


class Ended(NamedTuple):
    """One sign of how a process ended."""

    kind: str
    weight: int
    at: int  # index of the line
    rank: int | None
    code: int  # negative for a signal


class Exits(NamedTuple):
    """How processes ended, and which rank the launcher names as the first one."""

    ended: tuple[Ended, ...]
    root_rank: int | None


_BLOCK = re.compile(r"^\s{0,4}rank\s{1,8}: (\d{1,5}) \(local_rank: ")
_BLOCK_ENDS = re.compile(r"^\s{0,4}(?:[-=]{20}|\[\d{1,5}\]:\s{0,3}$)")


def by_rank(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Return the lines, those of torchrun's summary with the rank that each of its blocks names.

    It prints every rank's traceback again: an echo there is another rank's, not the root's.
    """
    told: list[Line] = []
    rank: int | None = None
    for line in lines:
        if found := _BLOCK.match(line.text):
            rank = int(found[1])
        elif rank is not None and _BLOCK_ENDS.match(line.text):
            rank = None
        told.append(line if rank is None or line.rank is not None else line._replace(rank=rank))
    return tuple(told)


def kind_of(code: int) -> tuple[str, int] | None:
    """Return kind and weight of an exit status (negative or 128+n for a signal)."""
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
    if number:
        return _BY_SIGNAL.get(number)
    return _BY_CODE.get(code, _BY_CODE[1]) if code else None


def rank_of(kind: str, lines: Sequence[Line]) -> int | None:
    """Return the rank that ended as this kind does; None where none or several did.

    The launcher's first one may be another: a peer that saw the crash and raised over it.
    """
    ranks = set()
    for line in lines:
        if line.rank is not None and "exitcode" in line.text:
            code = _code(line.text.lower())
            known = None if code is None else kind_of(code)
            if known and known[0] == kind:
                ranks.add(line.rank)
    return ranks.pop() if len(ranks) == 1 else None


def find(lines: Sequence[Line], skip: Iterable[int] = ()) -> Exits:
    """Return what a log says of exit codes and signals.

    Args:
        lines: the log's.
        skip: indices of lines that say nothing about it (tracebacks' frames).
    """
    skipped = frozenset(skip)
    ended: list[Ended] = []
    root: tuple[int, int | None] | None = None  # where its block begins, its rank
    summary = len(lines)  # where the launcher's summary begins to list the ranks
    beside: list[tuple[Ended, float]] = []  # crashes that it lists, and when
    when = float("inf")
    killing = -_KILLING_LINES  # where a launcher began to end the rest
    for at, line in enumerate(lines):
        text = line.text.lower()
        if text.strip() == _LISTED:
            summary, beside = at, []
        elif _ROOT in text:
            beside = [(e, told) for e, told in beside if e.at > summary]
            root, ended = (at, None), _before(summary, ended)
        elif (moment := _moment(line.text)) is not None:
            when = moment
            if root and at < root[0] + 8:
                ended += [e for e, told in beside if abs(told - when) <= _SAME_MOMENT_S]
        elif root and root[1] is None and at < root[0] + 8 and (found := _RANK.search(text)):
            root = (root[0], int(found[1]))
        if at in skipped or not _may_tell(text):
            continue
        code = _code(text)
        killing = at if _KILL_ALL.search(text) else killing
        if code == -9 and killing < at < killing + _KILLING_LINES:
            continue
        known = None if code is None else kind_of(code)
        if code is not None and known:
            kind, weight = known
            if _AGENT_SIGNAL.search(text):
                weight = 40
            ended.append(Ended(kind, weight, at, root[1] if root else line.rank, code))
            if code < 0 and weight > _ECHO:
                beside.append((ended[-1], when))
    return Exits(tuple(ended), root[1] if root else None)


def _may_tell(text: str) -> bool:
    for hint in _HINTS:  # noqa: SIM110 - a generator takes twice as long, and every line comes here
        if hint in text:
            return True
    return False


def _before(summary: int, ended: Sequence[Ended]) -> list[Ended]:
    """Return the crashes that stand before the launcher's summary. Most that it lists beside the
    root came after it, many by the launcher's own hand; not those of the same moment: its look at
    the processes every tenth of a second may see a rank's crash after a peer's exception over it.
    """
    return [e for e in ended if e.code not in (0, 1) and e.weight > _ECHO and e.at < summary]


def _moment(text: str) -> float | None:
    """Return when a rank of the summary failed, in seconds; only good for differences of a day."""
    found = _TIME.match(text)
    if found is None:
        return None
    days = int(found[1].replace("-", ""))
    return ((days * 24 + int(found[2])) * 60 + int(found[3])) * 60.0 + int(found[4])


def _code(text: str) -> int | None:
    """Return the exit code that a line (lower case) states; negative for a signal."""
    if any(word in text for word in _NOISE):
        return None
    if found := _EXITCODE.search(text):
        return int(found[1])
    if found := _AGENT_SIGNAL.search(text):
        return -(_SIGNALS.get(found[3], 15) if found[3] else int(found[1] or found[2]))
    if found := _NAMED.search(text):
        return -_SIGNALS[found[0]]
    if found := _NUMBERED.search(text):
        return -int(found[1])
    if found := _CODE.search(text):
        return int(found[1])
    for word, number in _WORDS:
        if word in text and len(text) < 400:
            return -number
    found = _KILLED_ALONE.match(text) if len(text) < 600 else None
    return (-15 if found["term"] else -9) if found else None
