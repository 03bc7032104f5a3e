"""A run's report as one HTML page that loads nothing else: no network, no script.

The template escapes by default. The page's policy (CSP) allows its own style and nothing more.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
from dataclasses import dataclass

import jinja2
from markupsafe import Markup, escape

from saferun import __version__
from saferun.base.durations import seconds
from saferun.cli.runs import report_text, run_facts, trials_view
from saferun.journal.reader import FAILED, RUNNING
from saferun.journal.report import FIRST, AttemptReport, RunReport
from saferun.journal.training_steps import Point
from saferun.journal.trials import number_of

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_WIDTH, _HEIGHT = 1000, 200  # units of the drawings
_DECADE = 10  # losses are drawn on a logarithmic scale if they differ by a larger factor
_LEAST = 4  # width of the shortest bar
_REGIONS = 10
_WITHIN = re.compile(r"(?<=\d) (?=(?:s|min|h)\b)|(?<=\d min) (?=\d+ s\b)|(?<=\d h) (?=\d+ min\b)")


@dataclass(frozen=True, slots=True)
class Bar:
    """An attempt in the drawing of the timeline: three parts, in order."""

    at: float  # x where it begins, including the wait before it
    starts: float  # width of each part
    useful: float
    again: float


@dataclass(frozen=True, slots=True)
class Line:
    """One attempt in the drawing of steps and losses, as the points of a polyline."""

    steps: str
    losses: str
    failed_at: float | None  # where it ends, if it failed
    saved: tuple[tuple[float, float], ...]  # positions of the checkpoints


@dataclass(frozen=True, slots=True)
class Chart:
    """Steps and losses over the time of the run."""

    lines: tuple[Line, ...]
    first: int  # range of the steps
    last: int
    losses: tuple[float, float] | None  # smallest and largest loss; None if there are none
    logarithmic: bool  # how the losses are drawn
    saves: int  # number of marked checkpoints


def page(report: RunReport) -> str:
    """Return the HTML page of a report."""
    css = _read("report.css")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalized,
    )
    environment.filters.update(seconds=seconds, moment=report_text.moment, together=_together)
    return environment.from_string(_read("report.html")).render(
        css=Markup(css),  # noqa: S704 - our own file
        digest=digest,
        report=report,
        bars=_bars(report),
        whole=_whole(report),
        chart=_chart(report),
        opened=_opened(report),
        settings=run_facts.settings(report.plan),
        trials=trials_view.as_json(report.trials, report.replacements) if report.trials else None,
        number_of_trials=number_of(report.trials),
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
    """Return a value for the template; control characters are removed from texts."""
    return value if isinstance(value, Markup) else report_text.shown(value, kept="\n\t")


def _together(text: str) -> Markup:
    """Return text in which no line breaks within a duration."""
    clean = str(escape(report_text.shown(text)))
    return Markup(_WITHIN.sub("&nbsp;", clean))  # noqa: S704 - escaped


def _state(report: RunReport, one: AttemptReport) -> str:
    """Return the CSS class of an attempt, which determines its colour."""
    if not one.attempt.outcome.has_ended:
        return "runs" if report.run.outcome == RUNNING else "unknown"
    return "good" if one.attempt.outcome.exit_code == 0 else "bad"


def _bars(report: RunReport) -> list[Bar]:
    """Return the position of each attempt in the timeline."""
    scale = _WIDTH / _took_s(report)
    bars = []
    for one in report.attempts:
        spent = one.spent
        starts_s, useful_s = spent.starts_and_waits_s, spent.useful_s
        if not starts_s + useful_s + spent.done_again_s:  # its beginning is not known
            useful_s = _lived_s(report, one)
        sizes = [one.begins_s - spent.waited_s, starts_s, useful_s, spent.done_again_s]
        at, *widths = (round(max(0.0, size) * scale, 1) for size in sizes)
        if sum(widths) < _LEAST:
            widths[1] = _LEAST
        bars.append(Bar(at, *widths))
    return bars


def _whole(report: RunReport) -> Bar:
    """Return the whole run as one bar, useful work first."""
    scale = _WIDTH / max(report.cost.used.s, 0.001)
    cost = report.cost
    parts = (cost.starts_and_waits.s, cost.useful.s, cost.done_again.s)
    return Bar(0.0, *(round(part * scale, 1) for part in parts))


def _took_s(report: RunReport) -> float:
    ends = (one.begins_s + _lived_s(report, one) for one in report.attempts)
    return max([*ends, report.cost.used.s, 0.001])


def _opened(report: RunReport) -> int:
    """Return the attempt whose output is open: the failure that ended the run; -1 if none."""
    last = len(report.attempts) - 1
    ended = last >= 0 and report.attempts[last].attempt.outcome.has_ended
    return last if ended and report.run.outcome == FAILED else -1


def _chart(report: RunReport) -> Chart | None:
    """Return the drawing of steps and losses; None if the run recorded neither."""
    every = [(one, one.steps.points) for one in report.attempts if len(one.steps.points) > 1]
    steps = [point.step for _, points in every for point in points]
    if not steps or max(steps) == min(steps):
        return None
    losses = [p.loss for _, points in every for p in points if p.loss is not None]
    low, high = (min(losses), max(losses)) if losses else (0.0, 0.0)
    logarithmic = low > 0 and high > _DECADE * low
    across = _WIDTH / _took_s(report)

    def x(one: AttemptReport, point: Point) -> float:
        return round((one.begins_s + point.s) * across, 1)

    def y(value: float, least: float, most: float) -> float:
        return round(_HEIGHT * (1 - (value - least) / (most - least)), 1) if most > least else 0.0

    def loss_y(loss: float) -> float:
        ends = (loss, low, high)
        return y(*map(math.log, ends)) if logarithmic else y(*ends)

    lines = []
    for one, points in every:
        of_steps = [f"{x(one, p)},{y(p.step, min(steps), max(steps))}" for p in points]
        of_losses = [f"{x(one, p)},{loss_y(p.loss)}" for p in points if p.loss is not None]
        end = x(one, Point(_lived_s(report, one), 0))
        within = [p for p in one.saved if min(steps) <= p.step <= max(steps)]
        saved = tuple((x(one, p), y(p.step, min(steps), max(steps))) for p in within)
        failed = end if _state(report, one) == "bad" else None
        lines.append(Line(" ".join(of_steps), " ".join(of_losses), failed, saved))
    saves = sum(len(line.saved) for line in lines)
    ends = (low, high) if losses else None
    return Chart(tuple(lines), min(steps), max(steps), ends, logarithmic, saves)


def _lived_s(report: RunReport, one: AttemptReport) -> float:
    if one.attempt.lived_s is not None:
        return one.attempt.lived_s
    until = report.made_at if report.run.outcome == RUNNING else report.run.last_at
    return max(0.0, until - (one.attempt.started_at or until))
