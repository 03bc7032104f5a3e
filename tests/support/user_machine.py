"""A user's machine whose torchrun fails as a test wants, and journals made by hand."""

import contextlib
import json
import pathlib

from command import call
from helpers import until
from repo import source
from sandbox import SAFERUN, Sandbox, python_program, text_of, write

from saferun.cli.runs import runs_view
from saferun.inject import contract
from saferun.journal import reader as runs
from saferun.journal import time_spent
from saferun.journal.attempts import attempts

TORCHRUN = python_program(source("cli/acting_torchrun"))
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


class UserMachine(Sandbox):
    """A user's machine with a torchrun that does what a test wants, attempt by attempt."""

    def __init__(self, home: pathlib.Path, folder: pathlib.Path) -> None:
        super().__init__(folder, home=home, cwd=folder / "work", path=())
        self.program("torchrun", TORCHRUN)
        write(self.cwd / "train.py", "")

    def launch(self, *acts: dict, command_line: tuple[str, ...] = ("train.py",)) -> pathlib.Path:
        """Run a job to its end and return its journal."""
        before = set(self.runs.glob("*"))
        self.ran(*SAFERUN, *command_line, env={"ACTS": json.dumps(acts)})
        (new,) = set(self.runs.glob("*")) - before
        return new

    @contextlib.contextmanager
    def running(self, *acts: dict, waits_for: str):
        """A job that runs, and whose journal has come to this event."""
        env = {"ACTS": json.dumps(acts)}
        job = self.popen(*SAFERUN, "train.py", env=env, text=True)
        journals = "*/events.jsonl"
        try:
            until(lambda: any(waits_for in text_of(p) for p in self.runs.glob(journals)))
            yield job
        finally:
            job.kill()
            job.communicate()

    def ask(self, *argv: str, status: int = 0, **environ: str) -> str:
        """Call `saferun runs ARGV` in this process; return what it printed."""
        done = call("runs", *argv, environ={**self.environ, **environ}, cwd=self.cwd)
        assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
        return done.stdout if status == 0 else done.stderr

    def listed(self, *command_line: str) -> list[dict]:
        return json.loads(self.ask("list", "--json", *command_line))["runs"]


def event(name: str, at: float = NOW, s: float = 0.0, **facts) -> dict:
    return {"at": at, "s": s, "event": name, **facts}


def journal(base: pathlib.Path, name: str, *events: dict, plan: object = None) -> pathlib.Path:
    """A journal made by hand."""
    place = base / name
    write(place / "events.jsonl", "".join(json.dumps(e) + "\n" for e in events))
    write(place / "plan.json", json.dumps(plan or {"script": "train.py"}))
    return place


def finished(base: pathlib.Path, name: str, at: float, status: int = 0) -> pathlib.Path:
    return journal(base, name, event("attempt", at, attempt=1), event("end", at, status=status))


def names(found) -> list[str]:
    return [run.id for run in found]


def whole_page(base: pathlib.Path) -> str:
    run = runs.named(str(base), "last", NOW)
    plan = runs.read_plan(run.path)
    tried = attempts(run)
    times = time_spent.read(run, tried, NOW)
    json.dumps(runs_view.as_json_whole(run, tried, plan, times))
    return runs_view.as_text(run, tried, plan, times, NOW, {})


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
