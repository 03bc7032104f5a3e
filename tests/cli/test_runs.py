"""What runs leave behind is listed, shown and removed; the history of mitigations, too.

The journals are those of real runs with a torchrun that fails as a test wants, and broken ones.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import pytest
from command import call
from helpers import until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from repo import source

from saferun.cli import runs_view
from saferun.errors import SaferunError, UnavailableError, UsageError
from saferun.inject import contract
from saferun.journal import cleanup, mitigation_history
from saferun.journal import reader as runs
from saferun.journal.attempts import attempts
from saferun.journal.mitigation_history import Entry, Key
from saferun.system import procfs

TORCHRUN = f"#!{sys.executable}\n{source('cli/acting_torchrun')}"
NO_SHM = (
    "[rank1]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:317, unhandled "
    "system error, NCCL version 2.21.5\n[rank1]: Last error:\n[rank1]: Error while creating shared "
    "memory segment /dev/shm/nccl-Pm3zaE (size 9637888)\n"
)
KEY_ERROR = "[rank1]: Traceback (most recent call last):\n[rank1]: KeyError: 'label'\n"
HUB_DOWN = "huggingface_hub.errors.HfHubHTTPError: 503 Server Error: Service Unavailable\n"
OK = {}
MITIGABLE = {"status": 1, "says": NO_SHM}
WRONG = {"status": 1, "says": KEY_ERROR}
DOWN = {"status": 1, "says": HUB_DOWN}
FAILED_HOOK = {
    "v": contract.VERSION,
    "at": 1.0,
    "pid": 77,
    "rank": 3,
    "hook": "compile",
    "outcome": contract.FAILED,
    "error": "no such attribute",
}
NOW = 1_800_000_000.0


class Desk:
    """A user's machine with a torchrun that does what a test wants, attempt by attempt."""

    def __init__(self, home: pathlib.Path, tmp: pathlib.Path) -> None:
        self.tmp, self.cwd, self.home = tmp, tmp / "work", home
        self.cwd.mkdir()
        self.base = home / ".local/state/saferun/runs"
        program = tmp / "bin" / "torchrun"
        program.parent.mkdir()
        program.write_text(TORCHRUN)
        program.chmod(0o755)
        self.environ = {
            "HOME": str(home),
            "PATH": f"{tmp / 'bin'}:/usr/bin:/bin",
            "LANG": "C.UTF-8",
        }
        (self.cwd / "train.py").write_text("")

    def _popen(self, *command_line: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "saferun", *command_line],
            cwd=self.cwd,
            env={**self.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def launch(self, *acts: dict, command_line: tuple[str, ...] = ("train.py",)) -> pathlib.Path:
        """Run a job to its end and return its journal."""
        before = set(self.base.glob("*"))
        self._popen(*command_line, ACTS=json.dumps(acts)).communicate()
        (new,) = set(self.base.glob("*")) - before
        return new

    @contextlib.contextmanager
    def running(self, *acts: dict, waits_for: str):
        """A job that runs, and whose journal has come to this event."""
        job = self._popen("train.py", ACTS=json.dumps(acts))
        try:
            until(lambda: waits_for in "".join(p.read_text() for p in self._events()), "", 300)
            yield job
        finally:
            job.kill()
            job.communicate()

    def _events(self) -> list[pathlib.Path]:
        return list(self.base.glob("*/events.jsonl"))

    def ask(self, *argv: str, status: int = 0, **environ: str) -> str:
        """Call `saferun runs ARGV` in this process; return what it printed."""
        done = call("runs", *argv, environ={**self.environ, **environ}, cwd=self.cwd)
        assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
        return done.stdout if status == 0 else done.stderr

    def listed(self, *command_line: str) -> list[dict]:
        return json.loads(self.ask("list", "--json", *command_line))["runs"]


@pytest.fixture
def desk(home: pathlib.Path, tmp_path: pathlib.Path) -> Desk:
    return Desk(home, tmp_path)


def event(name: str, at: float = NOW, s: float = 0.0, **facts) -> dict:
    return {"at": at, "s": s, "event": name, **facts}


def journal(base: pathlib.Path, name: str, *events: dict, plan: object = None) -> pathlib.Path:
    """A journal made by hand."""
    place = base / name
    place.mkdir(parents=True)
    (place / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    (place / "plan.json").write_text(json.dumps(plan or {"script": "train.py"}))
    return place


def finished(base: pathlib.Path, name: str, at: float, status: int = 0) -> pathlib.Path:
    return journal(base, name, event("attempt", at, attempt=1), event("end", at, status=status))


def names(found) -> list[str]:
    return [run.id for run in found]


# --- list --------------------------------------------------------------------------------------


def test_runs_are_listed_newest_first_with_how_they_ended(desk):
    first = desk.launch(OK)
    second = desk.launch(WRONG, command_line=("train.py", "--lr", "1"))
    third = desk.launch(MITIGABLE, OK)
    head, *rows = desk.ask("list").splitlines()
    assert head.split() == ["ID", "STARTED", "TOOK", "TRIES", "OUTCOME", "SCRIPT"]
    assert [row.split()[0] for row in rows] == [third.name, second.name, first.name]
    tries_and_ends = [" ".join(row.split()[4:]) for row in rows]
    assert tries_and_ends == [
        "2 ok, with nccl-shm-off train.py",
        "1 failed: user-exception train.py",
        "1 ok train.py",
    ]


def test_the_list_is_there_for_programs(desk):
    began = time.time()
    place = desk.launch(WRONG, command_line=("train.py", "--lr", "1"))
    (run,) = desk.listed()
    assert (run["id"], run["path"]) == (place.name, str(place))
    assert (run["outcome"], run["kind"], run["status"]) == ("failed", "user-exception", 1)
    assert (run["script"], run["script_args"], run["attempts"]) == ("train.py", ["--lr", "1"], 1)
    assert began - 1 <= run["started_at"] <= time.time()
    assert run["took_s"] > 0


@pytest.mark.parametrize("how", ["option", "variable"])
def test_the_list_is_of_the_directory_that_the_launch_was_given(desk, how):
    place = desk.tmp / "elsewhere"
    command_line = ("--run-dir", str(place))
    desk._popen(*command_line, "train.py", ACTS="[{}]").communicate()
    assert desk.listed() == []
    reported = desk.ask("list", *command_line) if how == "option" else ""
    reported = reported or desk.ask("list", SAFERUN_RUN_DIR="../elsewhere")
    assert "ok" in reported


def test_a_machine_without_runs_says_so_and_is_no_error(desk):
    done = desk._popen("runs", "list")
    out, err = done.communicate()
    assert (done.returncode, out) == (0, "")
    assert err == f"saferun: no runs in {desk.base}\n"
    assert not desk.base.exists()


def test_a_run_is_running_while_its_saferun_lives_and_interrupted_after_it(desk):
    act = {"wait": str(desk.tmp / "gate")}
    with desk.running(act, waits_for='"started"') as job:
        (run,) = desk.listed()
        assert (run["outcome"], run["status"]) == ("running", None)
        assert run["took_s"] >= 0
        assert f"saferun's pid is {job.pid}" in desk.ask("show", "last")
        job.kill()
        job.wait()
        (run,) = desk.listed()
    assert (run["outcome"], run["took_s"]) == ("interrupted", None)
    assert "without a record" in desk.ask("show", "last")


def test_a_run_that_waits_for_its_next_attempt_is_running(desk):
    with desk.running(DOWN, OK, waits_for='"again"') as job:
        assert [run["outcome"] for run in desk.listed()] == ["running"]
        until(lambda: takes_sigterm(job.pid), "it waits and takes signals", 300)
        job.terminate()
        job.wait()
    (run,) = desk.listed()
    assert (run["outcome"], run["status"]) == ("interrupted", 128 + signal.SIGTERM)


def takes_sigterm(pid: int) -> bool:
    """Tell whether a process handles SIGTERM, or blocks it to read it from a descriptor."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    sets = [int(line.split()[1], 16) for line in status if line.startswith(("SigBlk", "SigCgt"))]
    return any(bits >> (signal.SIGTERM - 1) & 1 for bits in sets)


def test_a_run_that_was_asked_to_end_is_interrupted_and_has_not_failed(desk):
    with desk.running({"wait": str(desk.tmp / "gate")}, waits_for='"started"') as job:
        until((desk.tmp / "gate").exists, "the job runs", 300)
        job.terminate()
        assert job.wait() == 128 + signal.SIGTERM
    (run,) = desk.listed()
    assert (run["outcome"], run["kind"]) == ("interrupted", "")
    assert "asked by SIGTERM" in desk.ask("show", "last")


HERE = procfs.this_process()


@pytest.mark.parametrize(
    ("events", "outcome", "kind"),
    [
        ([event("attempt", attempt=1, by=HERE)], "running", ""),
        ([event("attempt", attempt=1, by={**HERE, "start": 1})], "interrupted", ""),
        ([event("attempt", attempt=1, by={**HERE, "pids": "x"})], "unknown", ""),
        ([event("attempt", attempt=1)], "unknown", ""),
        ([event("attempt", NOW - 2 * runs.DAY_S, attempt=1)], "interrupted", ""),
        ([event("ended", status=0, action="done")], "ok", ""),
        ([event("ended", status=1, action="stop", kind="segfault")], "failed", "segfault"),
        ([event("ended", status=1, action="again", kind="x"), event("plan")], "unknown", ""),
        ([event("fault"), event("end", status=1)], "failed", "a fault of saferun's own"),
        ([event("end", status=3)], "failed", "status 3"),
        ([event("end", status="x")], "failed", ""),
    ],
    ids=[
        "its process lives",
        "its pid was given away again",
        "its process is another container's",
        "no word of its process, but young",
        "no word of its process, and quiet for days",
        "no last word, but success",
        "no last word, but a verdict",
        "no last word, and it was to go on",
        "a fault of ours",
        "nothing but a status",
        "a status that is garbage",
    ],
)
def test_the_outcome_is_what_the_journal_proves(tmp_path, events, outcome, kind):
    journal(tmp_path, "r", *events)
    run = runs.read(str(tmp_path), "r", NOW + 1)
    assert (run.outcome, run.kind) == (outcome, kind)


BROKEN = {
    "empty": b"",
    "garbage": os.urandom(4096),
    "cut": json.dumps(event("attempt", attempt=1)).encode()[:-9],
    "a list": b"[1, 2]\n",
    "deep": b'{"at":' + b"[" * 100_000,
    "other types": json.dumps(
        event("attempt", attempt="x", mitigations=7, by=[], at="then", s=None, lost="y")
    ).encode()
    + b"\n"
    + json.dumps(event("ended", attempt=-1, status=[], lived_s="1", signals=1, kind={})).encode(),
    "numbers without end": b'{"at": 1e999, "s": NaN, "event": "attempt", "attempt": 1e30}\n'
    b'{"at": -1, "s": -Infinity, "event": "end", "status": 99999999999999999999999}\n',
    "hostile text": json.dumps(
        event("ended", attempt=1, status=1, action="stop", kind="\x1b[2J\n\ud800", reason="\x07")
    ).encode(),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("file", ["events.jsonl", "plan.json", "both"])
def test_a_broken_journal_is_listed_and_shown_as_far_as_it_goes(desk, file, content):
    place = finished(desk.base, "20260101-1", NOW)
    for mark in ("events.jsonl", "plan.json"):
        if file in (mark, "both"):
            (place / mark).write_bytes(content)
    assert names(runs.find(str(desk.base), NOW)[0]) == ["20260101-1"]
    reported = whole_page(desk.base) + runs_view.table(runs.find(str(desk.base), NOW)[0], NOW, 80)
    assert all(c.isprintable() or c == "\n" for c in reported)
    reported.encode()


def test_a_broken_journal_is_no_traceback(desk):
    for number, content in enumerate(BROKEN.values()):
        place = finished(desk.base, f"run-{number}", NOW)
        (place / "events.jsonl").write_bytes(content)
        (place / "plan.json").write_bytes(content)
        desk.ask("show", place.name)
        desk.ask("show", place.name, "--json")
    assert len(desk.listed()) == len(desk.ask("list").splitlines()) - 1 == len(BROKEN)
    desk.ask("clean", "--keep", "0", "--older-than", "0")


def whole_page(base: pathlib.Path) -> str:
    run = runs.named(str(base), "last", NOW)
    plan = runs.read_plan(run.path)
    tried = attempts(run)
    json.dumps(runs_view.as_json_whole(run, tried, plan))
    return runs_view.as_text(run, tried, plan, NOW)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda part: (
        st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=5), part, max_size=3)
    ),
    max_leaves=6,
)
_KEYS = "at s attempt mitigations by status reason action kind fingerprint signals killed lived_s"
_EVENTS = st.fixed_dictionaries(
    {"event": st.sampled_from(["attempt", "started", "ended", "end", "plan", "fault"])},
    optional=dict.fromkeys([*_KEYS.split(), "unkillable", "plan", "lost", "delay_s"], _JSON),
)
_PLANS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("script", "script_args", "command", "env", "hooks"), _JSON)
)


@given(st.lists(_EVENTS, max_size=5), _PLANS)
@settings(suppress_health_check=list(HealthCheck), max_examples=80, deadline=None)
def test_no_journal_at_all_raises(events, plan):
    with tempfile.TemporaryDirectory() as base:
        place = journal(pathlib.Path(base), "r", *events, plan=plan)
        (place / "plan.json").write_text(json.dumps(plan))
        whole_page(pathlib.Path(base))
        runs_view.table(runs.find(base, NOW)[0], NOW, 40)


def test_what_is_no_run_is_not_listed(tmp_path):
    base, real = tmp_path / "runs", tmp_path / "real"
    finished(tmp_path, "real", NOW)
    (base / "empty").mkdir(parents=True)
    (base / "photos").mkdir()
    (base / "photos" / "one.jpg").touch()
    (base / "events.jsonl").touch()
    (base / "link").symlink_to(real)
    (base / "linked").mkdir()
    (base / "linked" / "plan.json").symlink_to(real / "plan.json")
    shutil.copytree(real, base / ".hidden")
    assert runs.find(str(base), NOW) == ([], 0)


@pytest.fixture
def strangers() -> Iterator[pathlib.Path]:
    """A directory of runs, one of which this process's user may not look into."""
    base = pathlib.Path(tempfile.mkdtemp())
    base.chmod(0o755)
    finished(base, "mine", NOW)
    finished(base, "theirs", NOW).chmod(0o000)
    root = os.geteuid() == 0
    if root:
        os.chown(base / "mine", 65534, -1)
        os.seteuid(65534)
    yield base
    if root:
        os.seteuid(0)
    (base / "theirs").chmod(0o700)
    shutil.rmtree(base)


def test_other_peoples_runs_are_counted_and_stop_nobody(strangers):
    found, closed = runs.find(str(strangers), NOW)
    assert (names(found), closed) == (["mine"], 1)
    with pytest.raises(UnavailableError, match="may not be read") as refused:
        runs.named(str(strangers), "theirs", NOW)
    assert refused.value.where.endswith("theirs")


def test_a_place_that_cannot_be_listed_is_said_with_its_fix(desk):
    (desk.tmp / "file").touch()
    messages = desk.ask("list", "--run-dir", str(desk.tmp / "file"), status=69)
    assert messages.count("\n") == 1
    for part in ("Not a directory", str(desk.tmp / "file"), "--run-dir"):
        assert part in messages


def test_the_cost_of_a_list_grows_with_the_number_of_runs_and_no_faster(tmp_path):
    for count in (200, 400):
        for number in range(count):
            finished(tmp_path / str(count), f"20260101-{number:06}-1", NOW)

    def calls(count: int) -> int:
        """Return how many functions were called: nothing that a busy machine changes."""
        made = collections.Counter()
        sys.setprofile(lambda frame, event, argument: made.update((event,)))
        try:
            found, _ = runs.find(str(tmp_path / str(count)), NOW)
            assert runs_view.table(found, NOW, 80).count("\n") >= count
        finally:
            sys.setprofile(None)
        return made["call"] + made["c_call"]

    assert calls(200) * 1.5 < calls(400) < calls(200) * 2.5


def a_run(**facts) -> runs.Run:
    plain = {
        "id": "20260101-101010-12345",
        "path": "/r",
        "outcome": "failed",
        "kind": "cuda-oom-fragmentation",
        "status": 1,
        "reason": "",
        "started_at": NOW,
        "took_s": 75.0,
        "last_at": NOW,
        "attempts": 3,
        "mitigations": (),
        "script": "/home/me/a_rather_long_name_of_a_script.py",
        "script_args": (),
        "process": {},
        "lost": 0,
    }
    return runs.Run(**{**plain, **facts})


def test_a_terminal_gets_lines_that_fit_and_a_pipe_gets_them_whole():
    some = [a_run(), a_run(id="20260101-101010-99", kind="x"), a_run(id="20260102-101010-12345")]
    narrow = runs_view.table(some, NOW, 80).splitlines()
    assert max(map(len, narrow)) <= 80
    assert "failed: cuda-oom-fr" in narrow[1]
    whole = runs_view.table(some, NOW).splitlines()
    assert "failed: cuda-oom-fragmentation" in whole[1]
    assert whole[1].endswith("a_rather_long_name_of_a_script.py")


def test_a_shortened_id_still_leads_to_its_run():
    ids = ["20260101-101010-12345", "20260101-101010-12399", "20260102-101010-12345"]
    table = runs_view.table([a_run(id=name) for name in ids], NOW, 70).splitlines()[1:]
    shown = [line.split()[0] for line in table]
    assert all(len(cut) < len(name) for cut, name in zip(shown, ids, strict=True))
    for cut in shown:
        assert sum(name.startswith(cut) for name in ids) == 1


# --- show --------------------------------------------------------------------------------------


def test_a_run_is_shown_attempt_by_attempt(desk):
    place = desk.launch(MITIGABLE, WRONG, command_line=("train.py", "--lr", "1"))
    page = desk.ask("show", place.name)
    for part in (
        f"run {place.name}: failed: user-exception",
        "torchrun train.py --lr 1",
        "profile   cpu (launcher: torchrun)",
        f"journal   {place}",
    ):
        assert part in page
    first, second = page.split("\nattempt ")[1:]
    assert "status 1" in first
    assert "failure   nccl-shm-failed" in first
    assert "line      [rank1]: Error while creating shared memory segment" in first
    assert "decision  again: with nccl-shm-off" in first
    assert f"tail      {place}/attempt-1.stderr ({len(NO_SHM)} B)" in first
    assert "changed" not in first
    assert "with      nccl-shm-off" in second
    assert "changed   NCCL_SHM_DISABLE=1\n" in second
    assert "line      [rank1]: KeyError: 'label'" in second
    assert "decision  stop: the same command would fail again" in second


def test_a_run_is_shown_for_programs(desk):
    place = desk.launch(MITIGABLE, OK)
    reported = json.loads(desk.ask("show", "--json", "last"))
    assert (reported["schema"], reported["run"]["id"], reported["plan"]["script"]) == (
        1,
        place.name,
        "train.py",
    )
    first, second = reported["attempts"]
    assert (first["kind"], first["action"], first["status"]) == ("nccl-shm-failed", "again", 1)
    assert first["tails"] == [{"path": f"{place}/attempt-1.stderr", "bytes": len(NO_SHM)}]
    assert (second["kind"], second["action"], second["status"]) == ("", "done", 0)
    assert (second["mitigations"], second["changed"]) == (["nccl-shm-off"], ["NCCL_SHM_DISABLE=1"])
    assert first["started_at"] <= second["started_at"]


def test_rank_and_whole_line_are_shown_where_the_journal_has_them(tmp_path):
    facts = {"root_rank": 3, "root_line": "segment /dev/shm/nccl-1", "fingerprint": "k: segment P"}
    journal(tmp_path, "r", event("ended", attempt=1, status=1, kind="k", action="stop", **facts))
    page = whole_page(tmp_path)
    assert "failure   k on rank 3" in page
    assert "line      segment /dev/shm/nccl-1" in page


def test_hooks_that_failed_are_shown(desk):
    desk.launch({"receipt": FAILED_HOOK})
    assert "hook compile failed in rank 3" in desk.ask("show", "last")
    assert "no such attribute" in desk.ask("show", "last")


def test_no_secret_is_shown(desk):
    secret = "hf_abcdefghijklmnopqrstuvwxyz012345"
    command_line = ("--set", f"env.MY_TOKEN={secret}", "train.py", "--api-key", secret)
    desk.launch({**MITIGABLE, "says": NO_SHM + f"token={secret}\n"}, OK, command_line=command_line)
    reported = [
        desk.ask(*w) for w in (["show", "last"], ["list", "--json"], ["show", "last", "--json"])
    ]
    reported += [desk.ask("mitigations", "list"), desk.ask("mitigations", "list", "--json")]
    assert "MY_TOKEN='***'" in reported[0]
    assert "--api-key" in reported[3]
    assert all(secret not in text for text in reported)


def test_a_run_is_named_by_id_by_its_beginning_by_last_or_by_its_path(tmp_path):
    for name, at in (("20260101-1", NOW), ("20260101-12", NOW + 5), ("20260202-1", NOW + 1)):
        finished(tmp_path, name, at)
    base = str(tmp_path)
    for word, name in (
        ("20260101-1", "20260101-1"),  # whole, although it begins another
        ("202602", "20260202-1"),
        ("last", "20260101-12"),
        (f"{base}/20260202-1/", "20260202-1"),
    ):
        assert runs.named(base, word, NOW).id == name


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("20260203-1", ["no run `20260203-1`", "did you mean `20260202-1`?"]),
        ("2026", ["2 runs begin with `2026`", "20260101-1, 20260202-1"]),
        ("nonsense", ["no run `nonsense`", "did you mean `20"]),
        ("", ["no run ``"]),
        ("../work", ["this directory is no run's", "../work"]),
        ("./20260202-2", ["no run `20260202-2`"]),
    ],
    ids=["nearly right", "too short", "far off", "empty", "a path to elsewhere", "a path"],
)
def test_an_unknown_run_is_said_with_the_nearest(desk, word, parts):
    finished(desk.base, "20260101-1", NOW)
    finished(desk.base, "20260202-1", NOW)
    messages = desk.ask("show", word, status=2)
    assert messages.count("\n") == 1
    assert all(part in messages for part in parts), messages


@pytest.mark.parametrize("word", ["last", "x"])
def test_where_no_run_is_none_can_be_shown(desk, word):
    assert "there is no run yet" in desk.ask("show", word, status=2)


# --- clean -------------------------------------------------------------------------------------


def aged(*days: float, outcome: str = "ok") -> list[runs.Run]:
    return [a_run(id=f"{d}", outcome=outcome, last_at=NOW - d * runs.DAY_S) for d in days]


@pytest.mark.parametrize(
    ("days", "keep", "gone"),
    [(14.0, 0, ["14", "20"]), (14.0, 3, ["20"]), (0.0, 0, ["0", "1", "14", "20"]), (0.0, 4, [])],
    ids=["old ones", "and not the newest", "all", "as many as there are"],
)
def test_what_is_old_and_not_among_the_newest_goes(days, keep, gone):
    some = aged(0, 1, 14, 20)
    assert names(cleanup.removable(some, NOW, older_than_days=days, keep=keep)) == gone


@pytest.mark.parametrize("outcome", ["running", "unknown"])
def test_what_may_still_run_never_goes(outcome):
    some = aged(1000, outcome=outcome)
    assert cleanup.removable(some, NOW, older_than_days=0, keep=0) == ()


def test_by_default_the_newest_twenty_and_two_weeks_stay(desk):
    now = time.time()
    for number in range(25):
        finished(desk.base, f"old-{number:02}", now - (30 + number) * runs.DAY_S)
    for number in range(3):
        finished(desk.base, f"young-{number}", now - number * runs.DAY_S)
    messages = desk.ask("clean").splitlines()
    left = sorted(place.name for place in desk.base.iterdir())
    assert left == [*(f"old-{n:02}" for n in range(17)), *(f"young-{n}" for n in range(3))]
    assert messages[0].startswith("removed old-17 (")
    assert messages[-1].startswith("removed 8 runs, ")
    assert messages[-1].endswith("; 20 kept")


def test_a_run_that_took_long_is_as_old_as_its_end(tmp_path):
    began, ended = NOW - 20 * runs.DAY_S, NOW - runs.DAY_S
    journal(tmp_path, "r", event("attempt", began, attempt=1), event("end", ended, status=0))
    assert cleanup.clean(str(tmp_path), NOW, keep=0).removed == ()


def test_a_run_that_lives_is_never_removed(desk):
    done = desk.launch(OK)
    with desk.running({"wait": str(desk.tmp / "gate")}, waits_for='"started"'):
        until(lambda: len(list(desk.base.glob("*/plan.json"))) == 2, "two runs", 300)
        messages = desk.ask("clean", "--older-than", "0", "--keep", "0")
        (left,) = desk.base.iterdir()
        assert (left / "plan.json").exists()
    assert f"removed {done.name}" in messages
    assert messages.endswith("1 kept, 1 of them not over\n")


def test_a_dry_run_removes_nothing_and_says_the_same(desk):
    finished(desk.base, "r", NOW - 90 * runs.DAY_S)
    messages = desk.ask("clean", "--keep", "0", "--dry-run")
    assert (desk.base / "r" / "plan.json").exists()
    assert messages.replace("would remove", "removed") == desk.ask("clean", "--keep", "0")
    assert not (desk.base / "r").exists()


def test_how_much_space_is_freed_is_measured_on_the_disk(tmp_path):
    place = finished(tmp_path, "r", NOW - 90 * runs.DAY_S)
    (place / "cache").mkdir()
    (place / "cache" / "big").write_bytes(os.urandom(3_000_000))
    ((_, taken),) = cleanup.clean(str(tmp_path), NOW, keep=0).removed
    assert 3_000_000 <= taken < 3_200_000


def test_nothing_outside_of_a_run_is_removed(tmp_path):
    precious = tmp_path / "precious"
    (precious / "deep").mkdir(parents=True)
    (precious / "deep" / "model.pt").write_text("weights")
    place = finished(tmp_path / "runs", "r", NOW - 90 * runs.DAY_S)
    (place / "receipts").mkdir()
    (place / "link").symlink_to(precious)
    (place / "receipts" / "link").symlink_to(precious)
    (tmp_path / "runs" / "linked").symlink_to(place)
    (tmp_path / "runs" / "notes").mkdir()
    done = cleanup.clean(str(tmp_path / "runs"), NOW, keep=0)
    assert ([run.id for run, _ in done.removed], done.failed) == (["r"], ())
    assert (precious / "deep" / "model.pt").read_text() == "weights"
    assert sorted(os.listdir(tmp_path / "runs")) == ["linked", "notes"]


@pytest.mark.parametrize("put", ["link", "stranger"])
def test_what_was_put_in_a_runs_place_meanwhile_stays(tmp_path, put):
    finished(tmp_path, "r", NOW)
    run = runs.read(str(tmp_path), "r", NOW)
    os.rename(tmp_path / "r", tmp_path / "moved")
    if put == "link":
        (tmp_path / "r").symlink_to(tmp_path / "moved")
    else:
        (tmp_path / "r").mkdir()
        (tmp_path / "r" / "model.pt").touch()
    with pytest.raises(OSError, match="r"):
        cleanup.remove(run)
    assert (tmp_path / "moved" / "plan.json").exists()
    assert (put == "link") or (tmp_path / "r" / "model.pt").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_run_is_left_alone(tmp_path):
    place = finished(tmp_path, "r", NOW - 90 * runs.DAY_S)
    os.chown(place, 65534, -1)
    done = cleanup.clean(str(tmp_path), NOW, keep=0, older_than_days=0)
    assert (done.removed, done.others) == ((), 1)
    with pytest.raises(PermissionError):
        cleanup.remove(runs.read(str(tmp_path), "r", NOW))
    assert (place / "plan.json").exists()


def test_what_cannot_be_removed_is_said_and_stays_listed(tmp_path, monkeypatch):
    for name in ("bad", "good"):
        (finished(tmp_path, name, NOW - 90 * runs.DAY_S) / "receipts").mkdir()
    real = shutil.rmtree

    def refusing(path):
        if os.path.realpath(path).endswith("bad/receipts"):
            raise PermissionError(13, "Permission denied")
        real(path)

    monkeypatch.setattr(shutil, "rmtree", refusing)
    done = cleanup.clean(str(tmp_path), NOW, keep=0)
    assert [run.id for run, _ in done.removed] == ["good"]
    assert names(runs.find(str(tmp_path), NOW)[0]) == ["bad"]
    with pytest.raises(UnavailableError, match="run bad could not be removed: Permission denied"):
        cleanup.check_cleaned(done)


@pytest.mark.parametrize(
    "command_line", [["--keep", "-1"], ["--older-than", "-1"], ["--keep", "x"]]
)
def test_a_wrong_number_removes_nothing(desk, command_line):
    finished(desk.base, "r", NOW - 900 * runs.DAY_S)
    desk.ask("clean", *command_line, status=2)
    assert (desk.base / "r").exists()


# --- mitigations ---------------------------------------------------------------------------------


def test_mitigations_are_listed_with_what_they_hold_for_and_forgotten(desk):
    desk.launch(MITIGABLE, OK, command_line=("train.py", "--lr", "1"))
    reported = desk.ask("mitigations", "list")
    script = str(desk.cwd / "train.py")
    for part in (script, "nccl-shm-off, for nccl-shm-failed", "no GPU", "arguments: --lr 1"):
        assert part in reported
    (one,) = json.loads(desk.ask("mitigations", "list", "--json"))["mitigations"]
    assert (one["script"], one["mitigation"], one["kind"]) == (
        script,
        "nccl-shm-off",
        "nccl-shm-failed",
    )
    assert one["expires_at"] == one["at"] + mitigation_history.RETRY_WITHOUT_S
    assert desk.ask("mitigations", "clear", "train.py").endswith("1 mitigation forgotten\n")
    assert desk.ask("mitigations", "list") == ""
    assert desk.launch(OK)
    assert "no mitigation in the history is for `train.py`" in desk.ask(
        "mitigations", "clear", "train.py", status=2
    )


H200 = Key("/w/train.py", "NVIDIA H200", "2.13.0", "570.86")
KNOWN = (
    Entry(H200, "autotune-off", "inductor-autotune-error", None, NOW),
    Entry(H200._replace(script="-m pkg.train"), "compile-off", "dynamo-error", ("--a",), NOW),
)


@pytest.mark.parametrize(
    ("script", "left"),
    [
        ("/w/train.py", [1]),
        ("train.py", [1]),
        ("pkg.train", [0]),
        ("-m pkg.train", [0]),
        (None, []),
    ],
)
def test_the_mitigations_of_a_script_or_all_are_forgotten(home, script, left):
    environ = {"HOME": str(home)}
    mitigation_history.change(environ, lambda _: KNOWN)
    mitigation_history.clear(environ, script, "/w")
    assert mitigation_history.load(environ) == tuple(KNOWN[n] for n in left)


def test_an_unknown_script_forgets_nothing_and_is_said_with_the_nearest(home):
    environ = {"HOME": str(home)}
    mitigation_history.change(environ, lambda _: KNOWN)
    with pytest.raises(UsageError, match=r"`trian.py`; did you mean `/w/train.py`"):
        mitigation_history.clear(environ, "trian.py", "/w")
    assert mitigation_history.load(environ) == KNOWN


def test_mitigations_that_cannot_be_written_are_said(home, monkeypatch):
    environ = {"HOME": str(home)}
    mitigation_history.change(environ, lambda _: KNOWN)
    pathlib.Path(mitigation_history.path(environ)).parent.chmod(
        0o777
    )  # not ours alone: nothing is written
    with pytest.raises(SaferunError, match="cannot be forgotten"):
        mitigation_history.clear(environ, None, "/w")


@pytest.mark.parametrize(
    ("arguments", "later_s", "part"),
    [
        (None, 0.0, "holds until the GPU, torch or the driver changes"),
        (("--a",), 0.0, "holds until "),
        (("--a",), mitigation_history.RETRY_WITHOUT_S, "held until "),
    ],
    ids=["free of cost", "costs", "is over"],
)
def test_until_when_a_mitigation_holds_is_said(arguments, later_s, part):
    reported = runs_view.mitigations([KNOWN[0]._replace(arguments=arguments)], NOW + later_s)
    assert part in reported
    assert "on NVIDIA H200, torch 2.13.0, driver 570.86" in reported


def test_a_time_that_cannot_be_is_shown_as_unknown():
    assert "learned ?" in runs_view.mitigations([KNOWN[0]._replace(at=float("inf"))], NOW)


def test_a_report_is_not_there_yet_and_says_so(desk):
    messages = desk.ask("report", "last", "--html", "x.html", status=2)
    assert "`saferun runs report` is not in saferun" in messages
