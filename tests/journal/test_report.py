"""A run as one value: what it cost, what it lost, and what is left out of it."""

import json
import os
import pathlib
import re

import pytest
from sandbox import write
from user_machine import NOW, event, journal

from saferun.cli.runs import report_html, report_text, run_facts, runs_view, trials_view
from saferun.journal import mitigation_history, reader, report, time_spent
from saferun.journal.attempts import attempts

ERROR = "[rank1]: KeyError: 'label'"
PLAN = {"script": "train.py", "command": ["torchrun", "train.py"]}


def attempt(number: int, at: float, lived: float = 0.0, **facts: object) -> list[dict]:
    """The events of one attempt that began at `at` seconds; it failed unless `facts` say else."""
    begun = {key: facts.pop(key) for key in ("gpus", "price_per_gpu_hour") if key in facts}
    end = {"status": 1, "kind": "segfault", "action": "again", **facts}
    return [
        event("attempt", NOW + at, at, attempt=number, mitigations=[], **begun),
        event("ended", NOW + at + lived, at + lived, attempt=number, lived_s=lived, **end),
    ]


def read(base: pathlib.Path, now: float = NOW, price: float | None = None) -> report.RunReport:
    return report.read_report(reader.named(str(base), "r", now), now, price)


def run_report(base: pathlib.Path, *events: dict, price: float | None = None) -> report.RunReport:
    journal(base, "r", *events, plan=PLAN)
    return read(base, price=price)


def ok(number: int, at: float, lived: float = 50.0, **facts: object) -> list[dict]:
    return attempt(number, at, lived, status=0, kind="", action="done", **facts)


def end(at: float, status: int = 0) -> dict:
    return event("end", NOW + at, at, status=status)


def parts(spent) -> tuple[float, float, float]:
    return tuple(
        round(s, 3) for s in (spent.useful_s, spent.done_again_s, spent.starts_and_waits_s)
    )


def whole(run: report.RunReport) -> tuple[float, float, float]:
    cost = run.cost
    of = (cost.useful.s, cost.done_again.s, cost.starts_and_waits.s)
    assert sum(of) == pytest.approx(cost.used.s)
    return tuple(round(s, 3) for s in of)


LOST = {"s": 12.5, "steps": 40, "gpu_hours": 0.0, "checkpoint": "ck/step_60"}
ASKED = {"kind": "ended-by-signal", "action": "stop", "reason": "asked to end"}
ENDED = event("end", NOW + 100, 100, status=143, reason="stopped", asked=True)
TIMES = {  # events; of each attempt and of the run: useful, done again, starts and waits
    "nothing is known": ([*attempt(1, 0, 100), *ok(2, 130), end(180)], [(0, 100, 0), (50, 0, 30)]),
    "a checkpoint": (
        [*attempt(1, 0, 100, lost_work=LOST), *ok(2, 100), end(150)],
        [(87.5, 12.5, 0), (50, 0, 0)],
    ),
    "asked to end": ([*attempt(1, 0, 100, **ASKED), ENDED], [(100, 0, 0)]),
    "asked to end, with a checkpoint": (
        [*attempt(1, 0, 100, lost_work=LOST, **ASKED), ENDED],
        [(87.5, 12.5, 0)],
    ),
    "replaced as it asked": (
        [
            *attempt(1, 0, 80, status=77, kind=""),
            event("recycled", NOW + 80, 80, attempt=1, why="80 good trials", kind="", progress=80),
            *attempt(2, 80, 5),
            *ok(3, 86, 10),
            end(96),
        ],
        [(80, 0, 0), (0, 5, 0), (10, 0, 1)],
    ),
    "not over": ([event("attempt", NOW, 0, attempt=1), *attempt(2, 60, 10)[:1]], [(0, 60, 0)]),
}


@pytest.mark.parametrize(("events", "expected"), TIMES.values(), ids=TIMES)
def test_the_time_of_a_run_has_three_parts(tmp_path, events, expected):
    place = journal(tmp_path, "r", *events, plan=PLAN)
    run = reader.named(str(tmp_path), "r", NOW)
    times = time_spent.read(run, attempts(run), NOW)
    assert [parts(one) for one in times.attempts][: len(expected)] == expected
    made_of = report.read_report(run, NOW)
    assert whole(made_of) == tuple(
        round(sum(part), 3) for part in zip(*map(parts, times.attempts), strict=True)
    )
    shown = runs_view.as_text(run, attempts(run), reader.read_plan(str(place)), times, NOW, {})
    text = run_facts.time(times.whole)
    assert f"\ntime      {text}\n" in shown


def test_work_that_no_attempt_has_done_again_is_lost(tmp_path):
    first, stop = attempt(1, 0, 100, lost_work=LOST), {"action": "stop"}
    alone = [*attempt(1, 0, 100, lost_work=LOST, **stop), end(100, 1)]
    both = [*first, *attempt(2, 100, 50, **stop), end(150, 1)]
    again = [*first, *ok(2, 100), end(150)]
    for name, events, shown, label in (
        ("a", alone, "useful 1 min 28 s; lost 12 s", "lost"),
        ("b", both, "useful 1 min 28 s; done again 12 s; lost 50 s", "done again or lost"),
        ("c", again, "useful 2 min 18 s; done again 12 s", "done again"),
    ):
        journal(tmp_path, name, *events, plan=PLAN)
        run = reader.named(str(tmp_path), name, NOW)
        times = time_spent.read(run, attempts(run), NOW)
        assert "; ".join(" ".join(one) for one in run_facts.time_parts(times.whole)) == shown
        assert label in dict(report_text.three_parts(report.read_report(run, NOW)))


CRASHED = "A process crashed in compiled code (segfault on rank 1)"
STOPPED = attempt(1, 0, 100, action="stop", root_rank=1)
KEPT = attempt(2, 130, 50, action="stop", lost_work={"s": 12.5, "checkpoint": "ckpt/7"})
HEADLINES = {  # how it ends, by the run's events
    "Finished at attempt 2; 1 min 40 s of 3 min done again after segfault": (
        [*attempt(1, 0, 100), *ok(2, 130), end(180)]
    ),
    f"Failed at the first attempt: {CRASHED}; 1 min 40 s of 1 min 40 s lost": (
        [*STOPPED, end(100, 1)]
    ),
    "; 1 min 40 s of 3 min done again, another 12 s lost": (
        [*attempt(1, 0, 100), *KEPT, end(180, 1)]
    ),
}


def test_the_headline_says_how_it_ended_and_what_was_done_again(tmp_path):
    for number, (headline, events) in enumerate(HEADLINES.items()):
        run = run_report(tmp_path / str(number), *events)
        assert run.headline.endswith(headline), run.headline
    run = run_report(tmp_path, *STOPPED, end(100, 1))
    assert f'<span class="end">{CRASHED}</span></h2>' in report_html.page(run)
    assert f"### Attempt 1: {CRASHED}\n" in report_text.as_markdown(run)


NEXT = {  # events, the command, and how the line begins; "" for none
    "a port": (attempt(1, 0, 1, kind="port-in-use"), [], "Give --standalone"),
    "a port, standalone": (attempt(1, 0, 1, kind="port-in-use"), ["--standalone"], ""),
    "nothing saved": (
        attempt(1, 0, 90, lost_work={"s": 90.0, "checkpoint": ""}),
        [],
        "Have the job save checkpoints",
    ),
    "how often to save": (
        [*attempt(1, 0, 90), event("end", status=1, advice="3 failures had 9 s")],
        [],
        "3 failures had 9 s.",
    ),
    "little was lost": (attempt(1, 0, 50), [], ""),
}


def test_what_the_next_run_can_have_better_is_one_line(tmp_path):
    for number, (events, words, expected) in enumerate(NEXT.values()):
        plan = {**PLAN, "command": ["torchrun", *words]}
        journal(tmp_path / str(number), "r", *events, *ok(2, 100), plan=plan)
        run = read(tmp_path / str(number))
        assert run.next_time[: len(expected or "x")] == expected
        assert ("Next time:" in report_html.page(run)) == bool(expected)


def test_a_mitigation_that_the_history_has_kept_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    key = mitigation_history.Key("/w/train.py", "", "", "")
    entry = mitigation_history.Entry(key, "autotune-off", "k", None, NOW + 60)
    mitigation_history.keep(os.environ, [entry])
    events = [*attempt(1, 0, 9), *ok(2, 9), end(60)]
    events[2]["mitigations"] = ["autotune-off", "compile-off"]
    run = run_report(tmp_path / "runs", *events)
    assert run.next_time.startswith("The run starts with autotune-off, which helped here (cost: ")


def test_a_bar_has_the_three_parts_in_their_order_and_the_steps(tmp_path):
    lost = {"s": 25.0, "steps": 5, "gpu_hours": 0.0, "checkpoint": "ck/step-40.pt"}
    saved = [{"s": 20.0, "step": 20}, {"s": 41.0, "step": None}, {"s": 60.0, "step": 40}]
    events = [*attempt(1, 0, 100, first_step=5, lost_work=lost), *ok(2, 150, 50, first_step=45)]
    events[2]["checkpoint"] = "ck/step-40.pt"
    place = journal(tmp_path, "r", *events, end(200), plan=PLAN)
    write(place / "attempt-1.stdout", "".join(f"step {n} loss 2\n" for n in range(5, 46, 5)))
    write(place / "attempt-2.stdout", "".join(f"step {n} loss 1\n" for n in range(45, 76, 5)))
    run = read(tmp_path)
    text = report_html.page(run)
    first, second = text.partition('class="timeline"')[2].split("<li ")[1:]
    drawn = re.findall(r'class="(\w+)" x="([\d.]+)" width="([\d.]+)"', first)
    assert drawn == [("useful", "0.0", "375.0"), ("again", "375.0", "125.0")]
    drawn = re.findall(r'class="(\w+)" x="([\d.]+)" width="([\d.]+)"', second.partition("</li>")[0])
    assert drawn == [("starts", "500.0", "250.0"), ("useful", "750.0", "250.0")]
    assert "5 → 45<" in first
    assert "45 → 75, from step-40.pt<" in second
    assert [(point.s, point.step) for point in run.attempts[0].saved] == [(75.0, 40)]
    assert text.count("<polyline") == 4  # steps and losses of two attempts
    assert text.count('<line class="saved"') == text.count('<line class="fails"') == 1
    events[1]["saved"] = saved
    write(place / "events.jsonl", "".join(json.dumps(one) + "\n" for one in events))
    run = read(tmp_path)
    assert [point.step for point in run.attempts[0].saved] == [20, 30, 40]
    assert report_html.page(run).count('<line class="saved"') == 3


@pytest.mark.parametrize(("status", "opened"), [(0, 0), (1, 1)])
def test_only_the_last_failure_of_a_run_that_failed_is_open(tmp_path, status, opened):
    last = {"status": status, "root_line": "segfault" * status, "action": "stop"}
    events = [*attempt(1, 0, 9, root_line=ERROR), *attempt(2, 9, 9, **last), end(18, status)]
    place = journal(tmp_path, "r", *events, plan=PLAN)
    for number, line in ((1, ERROR), (2, "segfault")):
        write(place / f"attempt-{number}.stderr", f"{line}\n")
    text = report_html.page(read(tmp_path))
    assert text.count("<details open>") == opened
    assert "<details open>" not in text.partition('id="attempt-2"')[0]


@pytest.mark.parametrize(("steps", "again_s"), [(range(1, 101), 20), ([], 100)])
def test_steps_of_an_attempt_that_went_on_tell_what_was_done_again(tmp_path, steps, again_s):
    place = journal(
        tmp_path,
        "r",
        *attempt(1, 0, 100, first_step=1),
        *ok(2, 100, first_step=81),
        end(150),
        plan=PLAN,
    )
    write(place / "attempt-1.stdout", "".join(f"step {n} loss: 2.5\n" for n in steps))
    run = read(tmp_path)
    assert run.attempts[0].spent.done_again_s == pytest.approx(again_s)
    assert (run.attempts[0].last_step, run.attempts[0].loss) == (
        (100, "2.5") if steps else (None, "")
    )


def test_the_time_until_the_ranks_have_met_is_a_start(tmp_path):
    place = journal(tmp_path, "r", *attempt(1, 0, 100), *attempt(2, 100, 9), *ok(3, 109), plan=PLAN)
    receipt(place, 0, ("init", "applied"), at=NOW + 20)
    receipt(place, 1, ("init", "applied"), at=NOW + 30)
    run = read(tmp_path)
    assert parts(run.attempts[0].spent) == (0, 70, 30)
    assert parts(run.attempts[1].spent) == (0, 0, 9), "its ranks have not met"
    assert run_facts.time(run.attempts[1].spent) == "starts and waits 9 s"


def trial(
    place: pathlib.Path, number: int, at: float, took: float, of: int = 1, **more: object
) -> None:
    (place / "state").mkdir(exist_ok=True)
    facts = {"number": number, "state": "COMPLETE", "params": {"lr": 0.1}, "attempt": of, **more}
    with (place / "state" / "trials.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**facts, "at": NOW + at, "seconds": took}) + "\n")


def test_a_search_has_its_trials_in_the_headline_and_what_it_has_found(tmp_path):
    place = journal(tmp_path, "r", *attempt(1, 0, 1800), *ok(2, 1800, 1800), end(3600), plan=PLAN)
    of_study = {"study": "s", "direction": "minimize"}
    trial(place, 0, 900, 10, values=[0.5], **of_study)
    trial(place, 1, 1700, 10, state="FAIL", cause="SIGSEGV", params={"lr": 9}, **of_study)
    trial(place, 2, 1900, 10, of=2, values=[0.25], **of_study)
    run = read(tmp_path)
    assert run.headline.startswith("Finished with 3 trials, best 0.25; ")
    assert report_text.searched(run) == [
        ("study", "s"),
        ("best value", "0.25, trial 2: lr=0.1"),
        ("trials an hour", "3"),
        ("crashed in", "trial 1: lr=9"),
    ]


def test_a_trial_that_was_run_again_counts_once_in_the_headline_and_the_list(tmp_path):
    place = journal(tmp_path, "r", *attempt(1, 0, 1800), *ok(2, 1800, 1800), end(3600), plan=PLAN)
    trial(place, 0, 900, 10, values=[0.5], study="s")
    trial(place, 1, 1700, 10, state="FAIL", cause="device-side-assert", study="s", again=True)
    assert read(tmp_path).headline.startswith("Finished with 1 trial, and 1 to be run again; ")
    trial(place, 2, 1900, 10, of=2, values=[0.25], study="s")
    run = read(tmp_path)
    count = "2 trials, 1 of them run twice"
    assert run.headline.startswith(f"Finished with {count}; ")
    assert count in trials_view.as_text(run.trials, run.replacements)
    assert f'<h2 id="trials">{count}</h2>' in report_html.page(run)


HOURS = 7200.0


@pytest.mark.parametrize(
    "ending",
    [
        [*attempt(1, 0, HOURS + 100), *ok(2, HOURS + 130), end(HOURS + 180)],
        [
            *attempt(1, 0, HOURS + 100, **ASKED),
            event("end", NOW + HOURS + 100, HOURS + 100, status=143, reason="asked to end"),
        ],
        [*attempt(1, 0)[:1], event("hang", NOW + HOURS + 100, HOURS + 100)],
    ],
    ids=["killed", "asked to end", "saferun killed"],
)
def test_of_a_search_what_came_after_its_last_finished_trial_is_done_again(tmp_path, ending):
    """Two hours of a killed trial are no nothing, and the trials before it are no loss."""
    place = journal(tmp_path, "r", *ending, plan=PLAN)
    trial(place, 0, 60, 50)
    trial(place, 1, 100, 40)
    trial(place, 2, HOURS + 125, HOURS, of=2)  # the killed one, as the next process records it
    run = read(tmp_path, NOW + HOURS + 200)
    assert parts(run.attempts[0].spent) == (90, HOURS, 10)


def test_a_killed_saferun_lived_until_its_last_note(tmp_path):
    by = {"pid": 1, "start": 5_000, "host": "h", "boot": "b", "pids": "p"}
    place = journal(tmp_path, "r", event("attempt", attempt=1, by=by), plan=PLAN)
    ticks = 5_000 + 60 * os.sysconf("SC_CLK_TCK")
    write(place / "alive", f"{ticks:020d}\n")
    assert reader.named(str(tmp_path), "r", NOW + 1e6).last_at == NOW + 60


def test_several_workers_share_the_time_of_a_run(tmp_path):
    each = [
        {**one, "worker": worker}
        for worker in (0, 1)
        for one in [*attempt(1, 0, 40), *ok(2, 50), end(100)]
    ]
    run = run_report(tmp_path, *each, end(100))
    assert whole(run) == (50, 40, 10)


def test_nodes_that_share_a_host_are_two(tmp_path):
    met = event("nodes", attempt=1, hosts={"0": "a", "1": "a"}, root={"host": "b"}, why="")
    run = run_report(tmp_path, met, *ok(1, 0), end(50))
    assert run.hosts == ("a", "a")
    assert run.attempts[0].notes == ("the nodes agreed that the failure began on b",)


def test_money_follows_the_recorded_price_or_the_given_one(tmp_path):
    for number, (recorded, given, money) in enumerate(
        ((None, None, None), (2.0, None, 16.0), (2.0, 3.0, 24.0), ("x", None, None))
    ):
        facts = {"gpus": 8, "price_per_gpu_hour": recorded}
        of = tmp_path / str(number)
        cost = run_report(of, *ok(1, 0, 3600, **facts), end(3600), price=given).cost
        assert (cost.used.gpu_hours, cost.used.money) == (8, money)


def test_the_line_that_decided_is_marked_in_its_tail(tmp_path):
    place = journal(tmp_path, "r", *attempt(1, 0, 1, root_line=ERROR, action="stop"), plan=PLAN)
    lines = [f"line {n}" for n in range(200)]
    lines[100] = ERROR
    write(place / "attempt-1.stderr", "\n".join(lines))
    ((tail,),) = (one.tails for one in read(tmp_path).attempts)
    assert [row.text for row in tail.rows if row.decides] == [ERROR]
    assert sum(row.skipped for row in tail.rows) + len(tail.rows) == tail.lines == 200
    assert len(tail.rows) < 60
    assert tail.rows[-1].text == "line 199"


def test_of_many_attempts_the_first_and_last_are_shown_and_the_others_counted(tmp_path):
    events = [one for n in range(1, 101) for one in attempt(n, n * 10, 5)]
    run = run_report(tmp_path, *events)
    numbers = [one.attempt.number for one in run.attempts]
    assert numbers == [*range(1, 6), *range(76, 101)]
    assert run.left_out == 70
    assert whole(run)[1:] == (100 * 5, 99 * 5)  # the others count, too


def receipt(place: pathlib.Path, rank: int, *outcomes: tuple[str, str], at: float = 1.0) -> None:
    (place / "receipts").mkdir(exist_ok=True)
    head = {"v": 1, "at": at, "pid": 100 + rank, "rank": rank}
    lines = [json.dumps({**head, "hook": hook, "outcome": done}) for hook, done in outcomes]
    path = place / "receipts" / f"a1-r0-rank{rank}-pid{100 + rank}.jsonl"
    write(path, "\n".join(lines) + "\n")


@pytest.mark.parametrize(("count", "rows"), [(4, 4), (1600, 2)])
def test_ranks_that_are_alike_share_a_row_where_there_are_many(tmp_path, count, rows):
    place = journal(tmp_path, "r", *attempt(1, 0, 1), plan=PLAN)
    for rank in range(count):
        receipt(place, rank, ("bootstrap", "applied"), ("init", "applied"))
    error = {"message": {"message": "ValueError: x", "extraInfo": {}}}
    write(place / "receipts" / "a1-r0-rank2-pid102.error.json", json.dumps(error))
    ranks = read(tmp_path).attempts[0].ranks
    assert (ranks.count, len(ranks.rows)) == (count, rows)
    assert (ranks.rows[0].ranks, ranks.rows[0].error) == ("rank 2", "ValueError: x")
    assert {row.hooks for row in ranks.rows} == {("init applied",)}


def test_stacks_of_the_ranks_of_a_hang_are_there_the_odd_one_first(tmp_path):
    write(tmp_path / "secret", "SECRET")
    places = [{"rank": n, "pid": 100 + n, "what": "x", "odd": bool(n)} for n in (0, 1)]
    begun, ended = attempt(1, 0, 1)
    files = ("../secret", "/etc/hostname", "hang-1.txt/..", 5)  # only the run's own are read
    hangs = [event("hang", silent_s=9, ranks=places, stacks=file) for file in files]
    place = journal(tmp_path, "r", begun, *hangs, ended, plan=PLAN)
    (place / "receipts").mkdir()
    for rank in (0, 1):
        path = place / "receipts" / f"a1-r0-rank{rank}-pid{100 + rank}.stacks"
        write(path, f"stack of {rank}\n")
    expected = (("rank 1", "stack of 1"), ("rank 0", "stack of 0"))
    assert [hang.stacks for hang in read(tmp_path).attempts[0].hangs] == [expected] * 4


@pytest.mark.parametrize("decides", [True, False])
def test_a_stall_is_shown_as_a_silence_where_its_attempt_ended_of_it(tmp_path, decides):
    line = "rank 1 is at t.py:8 in evaluate, rank 0 waits for it in all_reduce (42 s)"
    places = [{"rank": 1, "pid": 101, "what": "b", "frame": "t.py:8 in evaluate", "odd": True}]
    by = {"decided_by": ["log", *([f"the watch: {line}"] if decides else [])]}
    begun, ended = attempt(1, 0, 1, kind="nccl-timeout", **by)
    stall = event("stall", line=line, silent_s=42, ranks=places)
    over = event("stall", line="", silent_s=0, ranks=[])
    hangs = run_report(tmp_path, begun, stall, over, ended).attempts[0].hangs
    assert [(hang.silent_s, hang.places[0].frame) for hang in hangs] == (
        [(42, "t.py:8 in evaluate")] if decides else []
    )


NONSENSE = [None, True, -1, 1e400, "x", [], {}, [[]], [{}], {"a": [1]}]


SOUND = {
    "mitigations": ["autotune-off"],
    "by": {"host": "h"},
    "gpus": 8,
    "price_per_gpu_hour": 2.0,
    "versions": ["torch 2.13.0"],
    "gpu_names": ["NVIDIA H100"],
    "ranks": [{"rank": 0, "pid": 1, "what": "waits"}],
    "stacks": "hang-1.txt",
    "silent_s": 9.0,
    "hosts": {"0": "h"},
    "root": {"host": "h"},
    "findings": [{"level": "problem", "area": "GPU 0", "what": "x"}],
    "what": "x",
    "status": 1,
    "lived_s": 5.0,
    "kind": "segfault",
    "root_line": "x",
    "root_rank": 0,
    "first_step": 1,
    "decided_by": ["log"],
    "stack": ['File "t.py", line 9 in step'],
    "signals": ["SIGTERM"],
    "lost_work": {"s": 1.0},
    "at": NOW,
    "worker": 0,
}
NAMES = ("attempt", "started", "hang", "nodes", "preflight", "recovery", "fault", "worker", "ended")


@pytest.mark.parametrize("value", NONSENSE, ids=repr)
def test_a_journal_of_any_version_makes_a_report(tmp_path, value):
    """Each field of each event holds something else, in an attempt of its own."""
    events = [
        {**event(name, attempt=number), **SOUND, field: value}
        for number, field in enumerate(SOUND, 1)
        for name in NAMES
    ]
    run = run_report(tmp_path, *events)
    assert report_html.page(run)
    assert report_text.as_markdown(run)
    json.dumps(runs_view.report_json(run), allow_nan=False)
    file = tmp_path / "r" / "events.jsonl"
    file.write_bytes(file.read_bytes()[: len(file.read_bytes()) // 2])  # cut
    assert read(tmp_path).headline


def test_a_wait_for_what_did_not_come_is_no_useful_time(tmp_path):
    waited = {"s": 0.0, "steps": 0, "gpu_hours": 0.0, "checkpoint": "ck/80", "idle_s": 42.0}
    run = run_report(tmp_path, *attempt(1, 0, 100, lost_work=waited), *ok(2, 100), end(150))
    assert whole(run) == (108, 0, 42)
