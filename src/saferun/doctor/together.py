"""Run several questions at once under one clock, none of which can keep the others.

Threads, not a pool: a pool waits at exit for a thread that a dead file system holds for ever.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """What came of the questions, by name."""

    answers: Mapping[str, Any]
    late: tuple[str, ...]  # those without an answer when time was up
    failed: Mapping[str, str]  # an exception, in a line


def ask(questions: Mapping[str, Callable[[], Any]], deadline_s: float) -> Outcome:
    """Ask all and return what has been answered in time; raises nothing of theirs."""
    told: queue.SimpleQueue[tuple[str, Any, str]] = queue.SimpleQueue()

    def run(name: str, question: Callable[[], Any]) -> None:
        try:
            told.put((name, question(), ""))
        except Exception as error:
            told.put((name, None, " ".join(f"{type(error).__name__}: {error}".split())[:300]))

    for name, question in questions.items():
        threading.Thread(target=run, args=(name, question), daemon=True).start()
    answers: dict[str, Any] = {}
    failed: dict[str, str] = {}
    end = time.monotonic() + deadline_s
    while len(answers) + len(failed) < len(questions):
        try:
            name, answer, error = told.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        if error:
            failed[name] = error
        else:
            answers[name] = answer
    late = tuple(name for name in questions if name not in answers and name not in failed)
    return Outcome(answers, late, failed)
