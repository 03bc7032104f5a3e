"""A process that supervises one attempt.

As a script this file is that process: `python supervised.py RESULT OPTIONS COMMAND...` runs the
command with `run_attempt(**json.loads(OPTIONS))` and writes how it ended to RESULT as JSON.
"""

import fcntl
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers import DEADLINE_S, PROGRAMS, SOURCES, stat_of, until, warm_agent_of
from sandbox import Sandbox, text_of, write


class Supervised(Sandbox):
    """A process that runs one attempt, and the processes of that attempt."""

    def __init__(self, folder: Path, command: Sequence[str], **options: Any) -> None:
        popen = options.pop("popen", {})
        super().__init__(folder)
        self.roster = folder / f"roster-{self.mark}"
        self._result = folder / f"result-{self.mark}"
        wrap = options.pop("wrap", [sys.executable])
        plain, prefix = options.pop("plain", ()), options.pop("prefix", ())
        line = [*wrap, str(Path(__file__).resolve()), str(self._result), json.dumps(options)]
        self.arguments = [*prefix, *(plain or line), *command]
        self.environ |= {
            "ROSTER": str(self.roster),
            "PYTHONPATH": f"{SOURCES}:{PROGRAMS}",
            **popen.pop("env", {}),
        }
        self.process = self.popen(*self.arguments, **popen)

    def members(self, role: str) -> list[int]:
        """Return the pids that entered the roster in a role."""
        lines = text_of(self.roster).splitlines() if self.roster.exists() else []
        return [int(line.split()[1]) for line in lines if line.split()[0] == role]

    def arrived(self, **counts: int) -> None:
        """Wait until so many have entered the roster in each role."""
        until(
            lambda: all(len(self.members(role)) >= n for role, n in counts.items()),
            lambda: (counts, text_of(self.roster) if self.roster.exists() else "no roster"),
        )

    def pid(self, who: str) -> int:
        """Return the pid of "saferun", "keeper" or the first member in a role."""
        if who == "saferun":
            return self.process.pid
        if who == "keeper":
            names = self.living().items()
            return next(pid for pid, name in names if name == "saferun-keeper")
        return self.members(who)[0]

    def kill(self, who: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(who), number)

    def ended(self) -> dict[str, Any]:
        """Wait for the end and return what run_attempt returned."""
        self.out, self.err = self.process.communicate(timeout=DEADLINE_S)
        assert self._result.exists(), self.err
        result: dict[str, Any] = json.loads(text_of(self._result))
        return result

    def nothing_lives(self, *but: int) -> None:
        """Wait until no process of the attempt lives, except those named."""
        until(lambda: set(self.living()) <= set(but), lambda: f"{self.living()} still live")
        until(lambda: but or not self.is_held(), "a process that forks and exits still lives")

    def is_held(self) -> bool:
        """Return whether a process lives that has inherited the lock which roster.py takes."""
        try:
            with open(f"{self.roster}.lives", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:  # no such job was started
            return False
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        """End everything that carries the mark."""
        Path(f"{self.roster}.stop").touch()
        super().close()


def supervised(folder: Path, command: Sequence[str], **options: Any) -> Supervised:
    """Supervise a command; whatever is left of it is ended afterwards."""
    return Supervised(folder, command, **options)


def _made_ready(command: list[str], wanted: dict[str, Any]) -> Any:
    """Return a keeper with a warm agent, as `wanted` says.

    Keys: interpreter, flags; env (in which its environment differs); imports (wait until so many
    have entered the roster as "imported"); kill (end it before it is used); go (wait for a file).
    """
    from saferun.supervise.ready.keeper_pool import prepare, start_keeper
    from saferun.supervise.ready.warm_start import WarmStart

    env = {**os.environ, **wanted.get("env", {})}
    interpreter = wanted.get("interpreter", sys.executable)
    warm = WarmStart(tuple(command), env, interpreter, wanted.get("flags", ""))
    standby = prepare(start_keeper(), warm)
    roster = Path(os.environ["ROSTER"])
    count = wanted.get("imports", 0)
    until(lambda: not count or (roster.exists() and text_of(roster).count("imported") >= count))
    if wanted.get("kill"):
        pid = warm_agent_of(standby.pid)
        os.kill(pid, signal.SIGKILL)
        until(lambda: stat_of(pid)[0] == "Z")
    until(lambda: "go" not in wanted or Path(wanted["go"]).exists())
    return standby


def _main() -> None:
    from saferun.system.descriptors import plug_closed_descriptors

    plug_closed_descriptors()  # as saferun does, before an import opens a file
    from saferun.supervise.attempt.attempt_runner import run_attempt
    from saferun.supervise.attempt.attempt_values import AttemptSpec, Observer
    from saferun.supervise.ready import keeper_pool
    from saferun.supervise.ready.keeper_pool import start_keeper

    result, text, *command = sys.argv[1:]
    options = json.loads(text)
    keeper_pool._BOOT = keeper_pool._BOOT.replace("; k", "; " + options.pop("in_keeper", "") + "k")
    ahead, nexts = options.pop("warm_agent", None), options.pop("next_agent", None)
    standby, observer = None, Observer()
    if lock := options.pop("lock", None):
        held = os.open(lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(held, fcntl.LOCK_EX)
        standby = start_keeper([held])
    if ahead is not None:
        standby = _made_ready(command, ahead)
    if nexts is not None:
        kept: list[Any] = []

        class Preparing(Observer):
            def look(self) -> float:
                kept.append(_made_ready(command, nexts))
                return float("inf")

            def spared(self) -> list[int]:
                return [standby.pid for standby in kept]

        observer = Preparing()
    ended = run_attempt(AttemptSpec(command, os.environ, **options), observer, standby)
    facts = ended._asdict() | dict(zip(ended.report._fields, ended.report, strict=True))
    facts |= {"exit_code": ended.exit_code, "signal": ended.signal}
    text = json.dumps(facts, default=lambda value: value.decode("latin-1"))
    write(Path(result).with_suffix(".new"), text)
    Path(result).with_suffix(".new").rename(result)
    sys.exit(ended.exit_code)


if __name__ == "__main__":
    _main()
