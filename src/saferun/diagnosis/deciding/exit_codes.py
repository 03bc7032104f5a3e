"""Pure: the exit codes and signals that a log or a launcher reports, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from saferun.diagnosis.process_end import number_of, signal_of
from saferun.diagnosis.reading import digit_masks
from saferun.diagnosis.reading.log_lines import Line

# signal -> kind, weight. A kill or a crash is a cause unless an exception explains more. An abort
# follows an error that the log should contain. A SIGTERM mostly comes from a launcher that ends the
# other ranks.
_BY_SIGNAL = {
    1: ("sighup-terminal-closed", 26),
    2: ("interrupted", 24),
    3: ("abort-unknown", 21),
    4: ("illegal-instruction", 45),
    5: ("illegal-instruction", 45),
    6: ("abort-unknown", 22),
    7: ("dataloader-shm-full", 45),
    8: ("segfault", 45),
    9: ("host-oom-killed", 45),
    10: ("sigterm-preempted", 18),
    11: ("segfault", 45),
    12: ("sigterm-preempted", 18),
    15: ("sigterm-preempted", 13),
    24: ("scheduler-time-limit", 45),
    25: ("disk-full", 45),
}
# For any other signal that ends a process, mainly SIGALRM. A SIGPIPE has a cause that other lines
# report.
_BY_OTHER_SIGNAL = ("ended-by-signal", 21)
_KILL, _SIGPIPE, _TERM, _LAST_SIGNAL = 9, 13, 15, 64
# Weight of the first failed rank's end, which is the cause, rather than torchrun's own failure.
# Beside it a signal weighs less than any status.
_OF_ROOT, _BESIDE = 21, 10
_BY_CODE = {
    1: ("child-failed-no-root", 15),
    2: ("child-failed-no-root", 14),  # from argparse, a missing file, and many scripts
    127: ("user-missing-file", 40),
}
_ROOT = "root cause (first observed failure)"
_ROOT_LINES = 8  # length of the block below that line
AGENT_ASKED = 40  # weight of a report by a launcher that was itself told to end
_ECHO = 40  # a candidate with at most this weight may be an echo, or the launcher's effect
_LISTED = "failures:"  # the line above the other failed ranks
_FILE, _NO_FILE = "error_file:", "<n/a>"  # a rank's exception
_TIME = re.compile(r"^\s{0,4}time\s{1,6}: (\d{4}-\d\d-\d\d)_(\d\d):(\d\d):(\d\d)")
_SAME_MOMENT_S = 2  # the launcher's own SIGKILL comes 30 s later (--shutdown-timeout)
_EXITCODE = re.compile(r"exitcode\s{0,4}:\s{0,3}(-?\d{1,3})\b")
_ASKED = re.compile(r"sending process (\d{1,9}) closing signal")
_PID = re.compile(r"\(pid: (\d{1,9})\)")
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
    r"|exit code \(|non-zero (?:exit )?(?:status|code)(?: of)? |with errorcode "
    r"|exit_code[ =:]{1,3}|exitcode[ =]{1,3})(-?\d{1,3})\b"
)
_AGENT_SIGNAL = re.compile(
    r"received (\d{1,2}) death signal|got sig(?:nal|val) ?: ?(\d{1,2})\b"
    r"|got termination signal: (?:signals\.)?(sig\w{3,5})"
)
_PHRASES = (
    ("cpu time limit exceeded", 24), ("file size limit exceeded", 25),
    ("segmentation fault", 11), ("segfault at", 11), ("bus error", 7),
    ("floating point exception", 8), ("illegal instruction", 4),
    ("trace/breakpoint trap", 5), ("double free", 11),
    ("free(): invalid", 11), ("corrupted size vs", 11), ("munmap_chunk()", 11),
    ("malloc(): ", 11), ("corrupted double-linked", 11), ("free(): double", 11),
    ("fatal python error: aborted", 6), ("terminate called", 6), ("malloc_consolidate()", 11),
    ("core dumped", 6),  # last: a shell adds this to every signal that wrote a core
)  # fmt: skip
_KILLED_ALONE = re.compile(
    r"^\*{0,3}(?:\S{1,80}: (?:line \d{1,6}: |tasks? [\d,-]{1,40}: )?){0,3}"
    r"\s{0,4}(?:\d{1,9}\s{1,4})?"
    r"(?:killed\b|(?P<abrt>aborted(?:$|\s{6}))|(?P<term>terminated(?:$|: 15$|\s{6})))"
    r"(?!.{0,40}(?:subprocess|process group|by signal|trial))"
)
# Such a line may also follow a progress bar.
_KILLED_IN_SHELL = re.compile(r": line \d{1,6}:\s{1,6}\d{1,9} (?:killed\b|(?P<abrt>aborted\s{6}))")
# Launchers and Lightning end the remaining ranks by SIGKILL, which tells nothing about the cause.
_KILL_ALL = re.compile(r"forcefully terminating all other processes|^srun: (?:force )?terminat")
_KILLING_LINES = 40  # SIGKILLs within so many lines below such a line are the launcher's
_NOISE = (
    "sending process", "closing signal", "killing subprocess", "registered signal",
    "signal handler", "stopping process", "signals_to_handle", "unable to shutdown process",
    "floating point exceptions ",  # a setting
    # Ray lists all of these, whatever ended its worker, in one line that terminals break.
    "potential root causes", "sigkill by oom killer due to high memory",
    "due to sigsegv or other unexpected",
)  # fmt: skip
# The text after these words says what may have happened; signals in it are examples.
_HEDGE = re.compile(
    r"\((?:e\.g\.|for example|such as|maybe|perhaps|possibly)|\bthis (?:can|may|might|could) \b"
    r"|\b(?:possible|potential|likely|common) (?:root )?(?:cause|reason)s?\b"
)
# Each line that may hold an exit code or a signal has one of these substrings: a cheap test.
_HINTS = (
    *("exit", "sig", "kill", "fault", "error", "core", "free", "malloc", "terminat", "munmap"),
    *("corrupted", "limit exceeded", "status failed", "abort", "illegal inst", "floating point e"),
    *("breakpoint trap", "return code", "returned", "non-zero status"),
)
_BLOCK = re.compile(r"^\s{0,4}rank\s{1,8}: (\d{1,5}) \(local_rank: ")
_BLOCK_ENDS = re.compile(r"^\s{0,4}(?:[-=]{20}|\[\d{1,5}\]:\s{0,3}$)")


@dataclass(frozen=True, slots=True)
class ExitSign:
    """One line that shows how a process ended."""

    kind: str
    weight: int
    at: int  # index of the line
    rank: int | None
    code: int  # negative for a signal

    @property
    def is_crash(self) -> bool:
        """Return whether a signal ended it, and none that a launcher sends to all processes."""
        return bool(signal_of(self.code)) and self.weight > _ECHO


@dataclass(frozen=True, slots=True)
class Exits:
    """The ends of processes, and the rank that the launcher names as the first."""

    signs: tuple[ExitSign, ...]
    root_rank: int | None
    silent_rank: int | None = None  # one beside it that chose to end, and raised nothing


def with_ranks(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Return the lines; those of torchrun's summary get the rank that their block names.

    The summary repeats every rank's traceback, so an echo in it may belong to another rank than the
    root.
    """
    if not any("(local_rank: " in line.text for line in lines):
        return tuple(lines)
    ranked: list[Line] = []
    rank: int | None = None
    for line in lines:
        if found := _BLOCK.match(line.text):
            rank = int(found[1])
        elif rank is not None and _BLOCK_ENDS.match(line.text):
            rank = None
        ranked.append(line if rank is None or line.rank is not None else line._replace(rank=rank))
    return tuple(ranked)


def kind_of(code: int) -> tuple[str, int] | None:
    """Return the kind and weight of an exit status (negative or 128+n for a signal)."""
    if number := signal_of(code):
        other = number != _SIGPIPE and number <= _LAST_SIGNAL
        return _BY_SIGNAL.get(number, _BY_OTHER_SIGNAL if other else None)
    return _BY_CODE.get(code, _BY_CODE[1]) if code > 0 else None


def rank_of(kind: str, lines: Sequence[Line]) -> int | None:
    """Return the rank that ended in this kind's way; None if none or several did.

    The launcher may name another rank as the first: a peer that saw the crash and raised.
    """
    ends = [line for line in lines if line.rank is not None and "exitcode" in line.text]
    codes = {line.rank: _code(line.text.lower()) or 0 for line in ends}
    ranks = [rank for rank, code in codes.items() if (kind_of(code) or " ")[0] == kind]
    return ranks[0] if len(ranks) == 1 else None


def find(
    lines: Sequence[Line], skip: Iterable[int] = (), alike: Sequence[str] | None = None
) -> Exits:
    """Return the exit codes and signals that a log reports.

    Args:
        lines: the log's lines.
        skip: indices of lines without such a report (the frames of tracebacks).
        alike: the lines' forms, if known (`digit_masks.of`).
    """
    reader, skipped = _Reader(summary=len(lines)), frozenset(skip)
    telling = digit_masks.which(digit_masks.of(lines) if alike is None else alike, _may_tell)
    killing = -_KILLING_LINES  # the line where a launcher began to end the other ranks
    asked: set[str] = set()  # pids of the ranks that torchrun asked to end
    for at, line in enumerate(lines):
        if not (telling[at] or reader.in_root(at)):
            continue
        text = line.text.lower()
        reader.read_summary(at, line, text)
        asked.update(_ASKED.findall(text))
        if at in skipped or not _may_report(text):
            continue
        code = _code(text)
        killing = at if _KILL_ALL.search(text) else killing
        if code is None or (signal_of(code) == _KILL and killing < at < killing + _KILLING_LINES):
            continue
        if known := kind_of(code):
            kind, weight = known
            weight = AGENT_ASKED if _AGENT_SIGNAL.search(text) else weight
            weight = max(weight, _OF_ROOT) if signal_of(code) and reader.in_root(at) else weight
            if code < 0 and -code not in (_KILL, _TERM) and asked.isdisjoint(_PID.findall(text)):
                reader.unasked.add(at)
            reader.add(ExitSign(kind, weight, at, reader.rank_of(line), code))
    return Exits(tuple(reader.signs.values()), reader.root_rank, reader.silent_rank)


class _Reader:
    """Collect the signs of a log, and follow torchrun's summary of the failed ranks."""

    def __init__(self, summary: int) -> None:
        self.signs: dict[ExitSign, ExitSign] = {}  # first of those that differ only in their line
        self.root_rank: int | None = None
        self.silent_rank: int | None = None
        self._root: int | None = None  # the line where the root's block begins
        self._summary = summary  # the line where the summary begins to list the ranks
        self._crashes: list[tuple[ExitSign, float]] = []  # crashes in the summary, and their times
        self._moment = float("inf")
        self._own: list[ExitSign] = []  # of the ranks listed beside the root that ended themselves
        self.unasked: set[int] = set()  # lines of ends by a signal that torchrun did not cause
        self._has_file: dict[int | None, bool] = {}  # rank in the summary -> it left an exception

    def read_summary(self, at: int, line: Line, lower: str) -> None:
        """Read one line of the log, which may belong to the summary.

        Args:
            at: the line's index.
            line: the line.
            lower: its text in lower case.
        """
        in_root = self.in_root(at)
        if lower.strip() == _LISTED:
            self._summary, self._crashes, self._has_file = at, [], {}
        elif _ROOT in lower:
            self._crashes = [crash for crash in self._crashes if crash[0].at > self._summary]
            listed = (sign for sign in self.signs.values() if sign.at > self._summary)
            own = (s for s in listed if s.code > 0 or s.at in self.unasked)
            self._own = [s for s in own if not self._has_file.get(s.rank)]
            self._root, self.root_rank = at, None
            # Most ends that the summary lists beside the root came later, many by the launcher's
            # own SIGKILL. Those at the same moment did not (_SAME_MOMENT_S): the launcher looks
            # every tenth of a second, and may see a rank's crash after the exception of a peer.
            crashes = (s for s in self.signs.values() if s.weight > _ECHO and s.at < self._summary)
            self.signs = {replace(sign, at=0): sign for sign in crashes}
        elif lower.lstrip().startswith(_FILE):
            self._has_file[line.rank] = has = _NO_FILE not in lower
            own = (sign for sign in self._own if in_root and sign.rank in self._has_file)
            if sign := next((sign for sign in own if has or sign.at in self.unasked), None):
                self.silent_rank = sign.rank
                # A signal counts where a peer was lost; else less than the root's own end.
                sign = sign if sign.code > 0 else replace(sign, weight=min(sign.weight, _BESIDE))
                self.signs.setdefault(replace(sign, at=0), sign)
        elif (moment := _moment(line.text)) is not None:
            self._moment = moment
            if in_root:
                for sign, when in self._crashes:
                    if abs(when - moment) <= _SAME_MOMENT_S:
                        self.signs.setdefault(replace(sign, at=0), sign)
        elif in_root and self.root_rank is None and (found := _RANK.search(lower)):
            self.root_rank = int(found[1])

    def in_root(self, at: int) -> bool:
        """Return whether a line is in the summary's block on the rank that failed first."""
        return self._root is not None and at < self._root + _ROOT_LINES

    def rank_of(self, line: Line) -> int | None:
        """Return the rank of a line's sign; in the summary's block on the root, the root's."""
        return line.rank if self._root is None else self.root_rank

    def add(self, sign: ExitSign) -> None:
        """Store a sign.

        torchrun names the rank with the earliest error file. If it has itself ended that rank, a
        peer's end came first: one without an error file, which that rank saw.
        """
        if self._own and sign.code == -_TERM and self.in_root(sign.at):
            sign = self._own[0]
            self.root_rank = sign.rank
        self.signs.setdefault(replace(sign, at=0), sign)
        if sign.is_crash:
            self._crashes.append((sign, self._moment))


def _may_tell(text: str) -> bool:
    """Return whether a line may report an exit code or belong to torchrun's summary."""
    lower = text.lower()
    return _may_report(lower) or _LISTED in lower or _ROOT in lower or "time " in lower


def _may_report(text: str) -> bool:
    return any(map(text.__contains__, _HINTS))  # a generator takes twice as long


def _moment(text: str) -> float | None:
    """Return when a rank in the summary failed, in seconds; only differences within a day count."""
    found = _TIME.match(text)
    if found is None:
        return None
    days = int(found[1].replace("-", ""))
    return ((days * 24 + int(found[2])) * 60 + int(found[3])) * 60.0 + int(found[4])


def _code(text: str) -> int | None:
    """Return the exit code that a line (lower case) states; negative for a signal."""
    if any(word in text for word in _NOISE):
        return None
    text = _HEDGE.split(text, maxsplit=1)[0]
    if found := _EXITCODE.search(text):
        return int(found[1])
    if found := _AGENT_SIGNAL.search(text):
        return -(number_of(found[3]) if found[3] else int(found[1] or found[2]))
    if found := _NAMED.search(text):
        return -number_of(found[0])
    if found := _NUMBERED.search(text):
        return -int(found[1])
    if found := _CODE.search(text):
        return int(found[1])
    for phrase, number in _PHRASES:
        if phrase in text and len(text) < 400:
            return -number
    # The shell prints the whole command, which may be long.
    found = _KILLED_IN_SHELL.search(text) or _KILLED_ALONE.match(text[:600])
    if found is None:
        return None
    ended = found.groupdict()
    return -6 if ended["abrt"] else -15 if ended.get("term") else -9
