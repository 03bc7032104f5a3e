"""Searches in a real PostgreSQL: the same promises as in SQLite, and a server that goes away.

Needs a PostgreSQL (Debian: `apt-get install postgresql`) and `psycopg` beside Optuna.
"""

import json
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rights
from helpers import free_port
from repo import PROGRAMS
from runs import run
from sandbox import text_of
from studies import check_account

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SEARCH = PROGRAMS / "optuna" / "search.py"
STAY = PROGRAMS / "optuna" / "stay_in_trial.py"
HPO = [
    *("--profile=cpu", "--set=launcher=python", "--set=hooks.optuna.mode=on"),
    *("--set=retry.backoff_s=[0, 0]", "--set=retry.attempts_total=1000"),
]
ALL = "memory,assert,crash,kill,term,locked,full"


class Server:
    """A PostgreSQL of this test's own, run by a user who is not root."""

    def __init__(self, folder: Path, programs: Path, port: int) -> None:
        # A server refuses to run as root, and wants a name of its user.
        may = not rights.missing("become others")
        self.user = next(user.pw_name for user in pwd.getpwall() if user.pw_uid) if may else None
        self._control = [str(programs / "pg_ctl"), "-D", str(folder / "data"), "-w"]
        self._options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        self._log = str(folder / "log")
        self.address = f"postgresql+psycopg://tester@127.0.0.1:{port}/postgres"
        if self.user:
            shutil.chown(folder, self.user)
        self.do(str(programs / "initdb"), "-D", str(folder / "data"), "-A", "trust", "-U", "tester")

    def do(self, *argv: str) -> None:
        where = {"cwd": "/", "stdout": subprocess.DEVNULL, "user": self.user}
        subprocess.run(argv, check=True, **where)  # type: ignore[call-overload]  # one shape

    def start(self) -> None:
        self.do(*self._control, "-o", self._options, "-l", self._log, "start")

    def stop(self) -> None:
        self.do(*self._control, "-m", "immediate", "stop")

    def trials(self) -> list[Any]:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        storage = optuna.storages.RDBStorage(self.address)
        trials = optuna.load_study(study_name=None, storage=storage).get_trials()
        storage.engine.dispose()
        return trials


@pytest.fixture
def server() -> Iterator[Server]:
    pytest.importorskip("psycopg")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("there is no PostgreSQL in /usr/lib/postgresql")
    with tempfile.TemporaryDirectory() as folder:
        one = Server(Path(folder), found[-1].parent, free_port())
        one.start()
        yield one
        one.stop()


def test_a_search_in_postgresql_through_all_faults_loses_no_trial(tmp_path, server):
    """Three workers cover the grid of 504 points."""
    argv = ("--set=workers=3", str(SEARCH), server.address, "grid", "600", ALL)
    with run(tmp_path, *HPO, *argv) as job:
        assert job.end(1700) == 0, job.err
        places = sorted(job.journal.rglob("trials.jsonl"))
        kinds = {event.get("kind") for event in job.events("ended")}
    assert {"study-storage-locked", "study-storage-unreachable"} <= kinds
    trials = server.trials()
    records = [json.loads(line) for place in places for line in text_of(place).splitlines()]
    check_account(trials, records)
    points = [json.dumps(t.params, sort_keys=True) for t in trials if t.state.name != "FAIL"]
    failed = [json.dumps(t.params, sort_keys=True) for t in trials if t.state.name == "FAIL"]
    assert not {point for point in failed if failed.count(point) == 1} - set(points)
    assert len({*points, *failed}) == 504


def test_a_server_that_is_restarted_in_a_trial_loses_nothing(tmp_path, server):
    with run(tmp_path, *HPO, str(STAY), server.address, stdin=subprocess.PIPE) as job:
        assert job.process.stdout.readline() == b"here\n"
        server.stop()
        server.start()
        job.process.stdin.write(b"\n")
        job.process.stdin.close()
        job.process.stdin = None
        assert job.end() == 0, job.err
        assert job.events("ended")[0]["kind"] == "study-storage-unreachable"
    states = [trial.state.name for trial in server.trials()]
    assert states == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE", "COMPLETE"]
