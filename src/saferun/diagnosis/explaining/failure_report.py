"""Pure: the lines printed between attempts and at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.base.durations import seconds
from saferun.diagnosis import process_end
from saferun.diagnosis.attempt_outcome import ASKED, REPLACED, AttemptOutcome, Decision
from saferun.diagnosis.deciding.known_from import known_from
from saferun.diagnosis.deciding.retry_policy import AGAIN
from saferun.diagnosis.diagnosis import Diagnosis

LINE_CHARS = 200  # longer lines of the job's output are cut; the journal has them in full


def between(last: AttemptOutcome, decision: Decision, change: str = "", begins: str = "") -> str:
    """Return the line that says why another attempt starts.

    Args:
        last: the attempt that failed.
        decision: to start another one, with the delay in seconds.
        change: what the next attempt changes, as one clause; "" for nothing.
        begins: where the next attempt begins, as a clause; "" where another line says it.
    """
    wait = f" in {seconds(decision.delay_s)}" if decision.delay_s >= 1 else ""
    why = f"with {change}" if change else decision.reason
    line = last.diagnosis.root_line
    stated = last.launcher_end or process_end.by_signal(line) or _cut(line)
    return (
        f"attempt {last.number} failed after {seconds(last.lived_s)}: "
        f"{_what(last.diagnosis)}{f' ({stated})' if stated else ''}; "
        f"{why}: attempt {last.number + 1} starts{wait}{begins}"
    )


def replaced(last: AttemptOutcome, decision: Decision) -> str:
    """Return the line about an attempt whose process asked for a new process."""
    if decision.action == AGAIN:
        return f"process replaced: {last.replaced_for}"
    return f"the process is not replaced, as it asked ({last.replaced_for}): {decision.reason}"


def success(history: Sequence[AttemptOutcome], search: str = "") -> list[str]:
    """Return the last line of a successful run; [] if no attempt had failed.

    Args:
        history: all attempts.
        search: summary of a search; "" if the run made no trials.
    """
    if search:
        return [search] if len(history) > 1 else []
    if all(one.way == REPLACED for one in history[:-1]):
        return []
    in_force = history[-1].mitigations
    mitigated = f", with {', '.join(in_force)}" if in_force else ""
    return [f"attempt {history[-1].number} succeeded{mitigated}"]


def failure(
    history: Sequence[AttemptOutcome],
    diagnosis: Diagnosis,
    decision: Decision,
    *,
    host: str,
    journal: str | None,
    search: str = "",
) -> list[str]:
    """Return the report of a failed run: what failed, where, what was tried, and advice.

    Args:
        history: all attempts, oldest first.
        diagnosis: of the run: the last attempt's, or why none follows that.
        decision: gives the reason why there is no further attempt.
        host: the name of this machine.
        journal: the run's directory; None if there is none.
        search: summary of a search, shown instead of the attempts; "" for none.

    Returns:
        Lines for people; none if a signal from outside ended the run.
    """
    last = history[-1]
    if last.way == ASKED:
        return []
    meaning, rest = in_words(diagnosis.explanation)
    what = f"{_what(diagnosis)}, host {host}"
    lines = [f"the run failed: {f'{meaning} ({what})' if meaning else what}"]
    if shown := last.launcher_end or _root(diagnosis):
        lines.append(f"  {shown}")
    lines += where(diagnosis)
    lines += [text for text in (rest, _advice(history, diagnosis)) if text]
    lines += half_answer(diagnosis) + known_from(diagnosis.decided_by)
    lines += [search] if search else _tried([one for one in history if one.way != REPLACED])
    lines.append(f"not tried again: {decision.reason}")
    if journal:
        lines.append(f"journal: {journal}")
    return lines


def in_words(explanation: str) -> tuple[str, str]:
    """Return a kind of failure as a headline, and the rest of its explanation.

    A kind's name says little to people who see it for the first time.

    >>> in_words("A process crashed in compiled code. A stack shows the call.")
    ('A process crashed in compiled code', 'A stack shows the call.')
    """
    first, _, rest = explanation.partition(". ")
    return first.rstrip("."), rest


def where(diagnosis: Diagnosis) -> list[str]:
    """Return the lines below the root line: a crash's stack, and the frame in the user's code."""
    frames = diagnosis.stack or ((f"at {diagnosis.user_frame}",) if diagnosis.user_frame else ())
    return [f"    {_cut(frame)}" for frame in frames]


def half_answer(diagnosis: Diagnosis) -> list[str]:
    """Return the lines on the kinds that an unknown failure is nearest to."""
    lines = []
    for near in diagnosis.nearest:
        where = f" (line {near.line})" if near.line else ""
        lines.append(f"nearest is {near.kind}; against it: {_cut(near.against)}{where}")
    return lines


def _what(diagnosis: Diagnosis) -> str:
    rank = "" if diagnosis.root_rank is None else f" on rank {diagnosis.root_rank}"
    return f"{diagnosis.kind}{rank}"


def _root(diagnosis: Diagnosis) -> str:
    """Return the root line; for a rank that a signal ended, the same in words."""
    ended = process_end.by_signal(diagnosis.root_line)
    if not ended:
        return _cut(diagnosis.root_line)
    rank = "a rank" if diagnosis.root_rank is None else f"rank {diagnosis.root_rank}"
    return f"{rank} {ended}{'' if diagnosis.stack else ' and printed no reason'}"


def _advice(history: Sequence[AttemptOutcome], diagnosis: Diagnosis) -> str:
    """Return a kind's advice, or what remains to be done if the advice was already followed."""
    if diagnosis.kind == "segfault" and not diagnosis.stack:
        times = sum(one.kind == "segfault" for one in history)
        if times > 1:
            often = "twice" if times == 2 else f"{times} times"
            return f"It came {often}. Run with `python -X faulthandler` to see where."
    return diagnosis.advice


def _tried(history: Sequence[AttemptOutcome]) -> list[str]:
    if len(history) < 2:
        return []
    attempts = []
    for one in history[-4:]:
        beside = f", with {', '.join(one.mitigations)}" if one.mitigations else ""
        attempts.append(f"attempt {one.number}: {one.kind} after {seconds(one.lived_s)}{beside}")
    earlier = len(history) - len(attempts)
    if earlier:
        attempts.insert(0, f"{earlier} earlier attempt{'s' if earlier > 1 else ''}")
    return [f"tried: {'; '.join(attempts)}"]


def _cut(text: str) -> str:
    """Return a line of the job's output, shortened, without prefixes and control codes."""
    from saferun.diagnosis.reading import log_reader  # patterns that only a failure needs

    bare = log_reader.strip_prefixes(text)[1].strip() or text.strip()
    plain = "".join(c if c.isprintable() else " " for c in bare)
    return plain if len(plain) <= LINE_CHARS else f"{plain[: LINE_CHARS - 1]}…"
