"""Ask several questions at once with one deadline; none of them can delay the others.

Each question has a daemon thread rather than one of a pool: at exit a pool waits for its threads,
even for one that a dead file system blocks forever.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class InTime:
    """The answers to the questions, by name."""

    answers: Mapping[str, Any]
    late: tuple[str, ...]  # names without an answer in time
    failed: Mapping[str, str]  # name -> an exception, in a line


def ask(questions: Mapping[str, Callable[[], Any]], deadline_s: float) -> InTime:
    """Ask all questions and return the answers that came in time.

    Args:
        questions: functions by name; an exception becomes a line in `failed`.
        deadline_s: seconds from now.
    """
    results: queue.SimpleQueue[tuple[str, Any, str]] = queue.SimpleQueue()

    def run(name: str, question: Callable[[], Any]) -> None:
        try:
            results.put((name, question(), ""))
        except Exception as error:
            results.put((name, None, " ".join(f"{type(error).__name__}: {error}".split())[:300]))

    for name, question in questions.items():
        threading.Thread(target=run, args=(name, question), daemon=True).start()
    answers: dict[str, Any] = {}
    failed: dict[str, str] = {}
    end = time.monotonic() + deadline_s
    while len(answers) + len(failed) < len(questions):
        try:
            name, answer, error = results.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        if error:
            failed[name] = error
        else:
            answers[name] = answer
    late = tuple(name for name in questions if name not in answers and name not in failed)
    return InTime(answers, late, failed)
