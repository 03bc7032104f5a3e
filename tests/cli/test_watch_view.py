"""What a watched run shows: GPUs, silence, what a retry would do, and nothing of a terminal's."""

import io
import json
import os
import pathlib
from dataclasses import replace

import pytest
from cases import check_cases
from fake_nvml import MIB, Nvml, gpu
from outcomes import outcome
from rich.console import Console
from user_machine import NOW, a_run, event, journal

from saferun.cli import colour
from saferun.cli.runs import runs_watch, watch_view
from saferun.errors import UsageError
from saferun.gpu.nvml import Load
from saferun.journal import reader
from saferun.journal.attempts import RecordedAttempt
from saferun.journal.event_types import AttemptBegun, JobStarted
from saferun.model import Checkpoint
from saferun.supervise.watch.live_run import Job, LiveRun, Snapshot, Watched
from saferun.system.procfs import this_process


def snapshot(job: Job, **facts) -> Snapshot:
    run = a_run(outcome=reader.RUNNING, kind="", status=None)
    return replace(Snapshot(run, NOW, (job,), (), None), **facts)


def attempt(number: int, *mitigations: str, left: int | None = None) -> RecordedAttempt:
    begun = AttemptBegun(number, mitigations, None, left)
    return RecordedAttempt(begun, outcome(number, kind=""), started_at=NOW - 75)


def text_of(now: Snapshot, label: str) -> str:
    return "\n".join(line.text for line in watch_view.lines(now) if line.label == label)


def test_a_run_shows_its_attempt_its_steps_and_its_silence():
    job = Job(attempt(2, "compile-off"), step=1200)
    now = snapshot(replace(job, rate=0.25, quiet_s=44.0, hang_at=NOW - 10))
    assert text_of(now, "attempt") == "2, for 1 min 15 s, with compile-off"
    assert text_of(now, "step") == "1200, 4 s each"
    assert text_of(now, "silence") == "no sign of work for 44 s; it may hang, as reported 10 s ago"
    assert text_of(snapshot(replace(job, quiet_s=14.0)), "silence") == ""


TOOK = {
    "running for 8.4 s, with free-port": {
        **{"outcome": reader.RUNNING, "mitigations": ("free-port",), "took_s": 8.4}
    },
    "ok; took 1 min 44 s": {"outcome": reader.OK, "took_s": 104.0},
    "failed: cuda-oom; took 2 h 1 min": {"kind": "cuda-oom", "took_s": 7300.0},
    "unknown": {"outcome": reader.UNKNOWN, "took_s": None},
}


def test_how_long_a_run_took_is_said_of_the_run():
    for expected, facts in TOOK.items():
        now = Snapshot(a_run(**facts), NOW, (), (), None)
        assert text_of(now, "run").partition(": ")[2] == expected


def test_why_the_attempt_before_failed_is_shown(tmp_path):
    facts = {"status": 1, "kind": "cuda-oom", "root_rank": 3, "root_line": "out of memory"}
    begun = [event("attempt", attempt=n, mitigations=[], by=this_process()) for n in (1, 2)]
    begun[1]["checkpoint"] = "out/step-80.pt"
    ended = event("ended", attempt=1, lived_s=75.0, action="again", **facts)
    place = journal(tmp_path / "runs", "r1", begun[0], event("started"), ended, begun[1])
    now = LiveRun(reader.named(str(place.parent), "r1", NOW), os.environ).snapshot()
    now = replace(now, at=NOW + 195)
    text = (
        "attempt 1: cuda-oom on rank 3 after 1 min 15 s, 2 min ago; "
        "went on from step-80.pt; out of memory"
    )
    assert (text_of(now, "before"), text_of(now, "failure")) == (text, "")
    assert text in watch_view.one_line(now)
    assert watch_view.as_json(now)["jobs"][0]["before"]["kind"] == "cuda-oom"


RATES = {  # (seconds, step, pids of the ranks) at each look, and the rate after the last one
    "steady": ([(0, 10, [1]), (1, 20, [1]), (2, 30, [1]), (3, 40, [1])], 10.0),
    "seldom": ([(0, 0, [1]), (10, 100, [1]), (20, 200, [1]), (25, 200, [1])], 10.0),
    "it stalls": ([(0, 0, [1]), (10, 100, [1]), (20, 200, [1]), (110, 200, [1])], 1.0),
    "what was seen first came long ago": ([(0, 500, [1]), (9, 600, [1]), (10, 610, [1])], 10.0),
    "went on at a later step": (
        [(0, 490, [1]), (1, 500, [1]), (90, 600, [2]), (91, 605, [2])],
        5.0,
    ),
    "before that there is none": ([(0, 490, [1]), (1, 500, [1]), (90, 500, [2])], None),
    "went on at an earlier one": (
        [(0, 490, [1]), (1, 500, [1]), (9, 300, [1]), (10, 304, [1])],
        4.0,
    ),
}


def test_the_rate_is_that_of_the_ranks_that_run():
    def check(looks, rate):
        watched = Watched(JobStarted(0, 0))
        assert [watched.rate(*look) for look in looks][-1] == rate

    check_cases(RATES, check)


def test_the_rates_of_the_last_looks_are_drawn_on_a_terminal_alone():
    now = snapshot(Job(attempt(1), step=9, rate=4.0, rates=(0.0, 1.0, 2.0, 4.0)))
    assert text_of(now, "rate") == "▁▃▅█"
    assert "▁" not in watch_view.one_line(now)
    assert text_of(snapshot(Job(attempt(1), rates=(1.0, 2.0))), "rate") == ""


def test_what_a_retry_would_do_is_what_the_run_has_recorded():
    job = Job(attempt(2, left=1), kind="cuda-oom", untried=("compile-off",))
    now = snapshot(job, saved=Checkpoint("out/step-40", 40, NOW))
    assert text_of(now, "retry") == (
        "1 attempt is left if this one makes no progress; against cuda-oom: compile-off; "
        "it would go on from out/step-40 (step 40)"
    )
    none = text_of(snapshot(replace(job, untried=())), "retry")
    assert none.endswith("against cuda-oom: no other setting is known to help")
    last = snapshot(replace(job, attempt=attempt(3, left=0)), saved=now.saved)
    assert text_of(last, "retry") == "no attempt is left if this one makes no progress"


def test_the_load_of_gpus_is_shown():
    gpus = (Load(0, 98, 62771, 81559, 64), Load(1, None, 4, 81559, 91))
    now = snapshot(Job(attempt(1)), gpus=gpus)
    assert text_of(now, "GPU 0") == "98 %, 61.3 of 79.6 GiB, 64 °C"
    assert [line.style for line in watch_view.lines(now) if line.label == "GPU 1"] == ["red"]


def test_the_gpus_of_the_run_are_asked_for_and_no_others(tmp_path):
    nvml = Nvml(tmp_path / "nvml")
    hot = {"GetUtilizationRates": "!3", "GetTemperatureV": "91"}
    sizes = " ".join(str(mib * MIB) for mib in (81559, 0, 81555, 4))
    nvml.reports(gpu(0, GetUUID="GPU-a"), gpu(1, GetUUID="GPU-b", GetMemoryInfo_v2=sizes, **hot))
    begun = event("attempt", attempt=1, mitigations=[], by=this_process(), left=2)
    plan = {"script": "t.py", "locks": {"devices": ["GPU-b"]}}
    place = journal(tmp_path / "runs", "r1", begun, plan=plan)
    run = reader.named(str(place.parent), "r1", NOW)
    now = LiveRun(run, {**os.environ, "LD_LIBRARY_PATH": str(nvml.folder)}).snapshot()
    assert now.gpus == (Load(1, None, 4, 81559, 91),)
    assert now.jobs[0].attempt.begun.left == 2
    assert json.loads(json.dumps(watch_view.as_json(now)))["gpus"][0]["celsius"] == 91


def test_a_narrow_terminal_cuts_lines_and_markup_is_text():
    job = Job(attempt(1), line="[red]a\x1b[31m[/nothing] " + "long " * 40, output_s=1.0)
    out = io.StringIO()
    console = Console(file=out, width=40, height=25, force_terminal=True, color_system=None)
    console.print(colour.drawn(watch_view.lines(snapshot(job), "a note " * 20)))
    assert max(map(len, out.getvalue().splitlines())) <= 40
    assert "1 s ago: [red]a?[31m" in " ".join(out.getvalue().split())


def test_the_newest_run_that_goes_on_is_chosen(tmp_path):
    base = tmp_path / "runs"
    mine = this_process()
    journal(base, "over", event("attempt", NOW + 9, attempt=1), event("end", NOW + 9, status=0))
    with pytest.raises(UsageError, match="no run is going on"):
        runs_watch.chosen(str(base), None)
    for at, name in enumerate(("older", "newer")):
        journal(base, name, event("attempt", NOW + at, attempt=1, by=mine))
    run, note = runs_watch.chosen(str(base), None)
    assert (run.id, note) == ("newer", "2 runs are going on; the others: older")
    assert pathlib.Path(run.path).name == "newer"
