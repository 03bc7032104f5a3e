"""A run's report as one HTML page that needs nothing else: no network, no script.

The template escapes by default. The page's policy (CSP) allows its own style and nothing more.
"""

from __future__ import annotations

import base64
import hashlib
import os
from typing import NamedTuple

import jinja2
from markupsafe import Markup

from saferun import __version__
from saferun.cli.runs import report_text, runs_view, trials_view
from saferun.journal.reader import RUNNING
from saferun.journal.report import FIRST, AttemptReport, RunReport
from saferun.system.printable import seconds

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_WIDTH = 1000  # units of the timeline's drawing
_REGIONS = 10


class Bar(NamedTuple):
    """An attempt in the timeline's drawing."""

    at: float
    width: float
    waited: float  # drawn before `at`


def page(report: RunReport) -> str:
    """Return the page."""
    css = _read("report.css")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalized,
    )
    environment.filters.update(seconds=seconds, moment=report_text.moment)
    return environment.from_string(_read("report.html")).render(
        css=Markup(css),  # noqa: S704 - our own file
        digest=digest,
        report=report,
        bars=_bars(report),
        settings=runs_view.settings(report.plan),
        trials=trials_view.as_json(report.trials, report.replacements) if report.trials else None,
        regions=_REGIONS,
        gap_at=FIRST if report.left_out else -1,
        version=__version__,
        text=report_text,
        state=lambda one: _state(report, one),
    )


def _read(name: str) -> str:
    with open(os.path.join(_FOLDER, name), encoding="utf-8") as file:
        return file.read()


def _finalized(value: object) -> object:
    """Clean every text that the template shows."""
    return value if isinstance(value, Markup) else report_text.shown(value, kept="\n\t")


def _state(report: RunReport, one: AttemptReport) -> str:
    """Return the class of an attempt: it gives the colour."""
    if not one.attempt.outcome.has_ended:
        return "runs" if report.run.outcome == RUNNING else "unknown"
    return "good" if one.attempt.outcome.exit_code == 0 else "bad"


def _bars(report: RunReport) -> list[Bar]:
    """Return where each attempt stands in the timeline."""
    spans = [(one.begins_s, _lived_s(report, one)) for one in report.attempts]
    whole = max([*(begin + lived for begin, lived in spans), report.cost.used.s, 0.001])
    scale = _WIDTH / whole
    sizes = [
        (begin, max(lived, 4 / scale), one.spent.waited_s)
        for (begin, lived), one in zip(spans, report.attempts, strict=True)
    ]
    return [Bar(*(round(size * scale, 1) for size in each)) for each in sizes]


def _lived_s(report: RunReport, one: AttemptReport) -> float:
    if one.attempt.lived_s is not None:
        return one.attempt.lived_s
    until = report.made_at if report.run.outcome == RUNNING else report.run.last_at
    return max(0.0, until - (one.attempt.started_at or until))
