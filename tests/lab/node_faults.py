"""Runs of several hosts that are struck at random, and what must be true of each when it is over.

The number of a trial decides what is run and what strikes when, so that a miss can be repeated (as
far as a busy machine allows). tools/node_trials.py makes many. What is trained is exact_job.py of
tests/programs/nodes: its weights are those of an undisturbed run only if every step was done once,
by ranks that all began at the same place.
"""

import collections
import contextlib
import itertools
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hosts
from helpers import ROOT, living, parent
from hosts import PORT, Host
from runs import Run
from sandbox import text_of

sys.path.append(str(ROOT / "tests" / "programs" / "nodes"))
import exact_job

JOB = ROOT / "tests" / "programs" / "nodes" / "exact_job.py"
STEPS, RANKS = 40, 2
LOOK_S = 0.1  # between two looks at the runs
FIND_S = 20.0  # for what is to be struck to be there
LEFT_S = 30.0  # for the last processes of a run that has ended
ALONE_S = 20.0  # a host that came back after all others had ended waits for them so long
TOGETHER_S = 10.0  # within which all hosts say the same
REFUSED = 78  # the status of a host that does not fit to the others
# What came of a trial, the worst first.
WRONG, MIXED, SPLIT, HANGS, LEFT = "wrong weights", "mixed begin", "two runs", "hangs", "left over"
UNLIKE, UNTRUE, LATE, GAVE_UP = "unlike ends", "untrue reason", "late", "gave up"
REASON, RIGHT = "ended by reason", "right"
FAULTS = (WRONG, MIXED, SPLIT, HANGS, LEFT, UNLIKE, UNTRUE, LATE, GAVE_UP)
PROCESSES = ("rank", "agent", "keeper", "saver")  # saferun itself starts the job again
AWAY = ("saferun", "node", "power")  # somebody starts the line again, after a while or never
LINKS = ("cut", "slow", "lossy")


class Strike(NamedTuple):
    """What is done to which host, and when."""

    what: str
    host: int  # from 0 on; the next one where it is down
    step: int  # when rank 0 has done it
    soon_s: float | None  # instead: so long after the strike before
    back_s: float | None  # until it is started again, or healed; None: never

    def __str__(self) -> str:
        when = f"step {self.step}" if self.soon_s is None else f"{self.soon_s:.0f} s later"
        back = "" if self.back_s is None else f", back after {self.back_s:.0f} s"
        back = ", for ever" if self.what in (*AWAY, "cut") and not back else back
        return f"{self.what} h{self.host + 1} at {when}{back}"


class Plan(NamedTuple):
    """One trial."""

    hosts: int
    nnodes: str
    backend: str  # of the rendezvous
    shared: bool  # one run directory for all
    saves: str  # where and by whom: "shared", or on each host's own disk by "each" or the "first"
    resumes: str  # "recipe" (retry.resume), "self" (the script itself), "no"
    over: str  # what joins the ranks
    direct: bool  # a checkpoint is written under its own name
    rejoin_s: float
    strikes: tuple[Strike, ...]

    @property
    def way(self) -> str:
        """The row of a table to which it belongs."""
        return f"{'elastic' if self.is_elastic else 'fixed'} {self.backend}, saves {self.saves}"

    @property
    def is_elastic(self) -> bool:
        """Whether the run may go on with fewer hosts."""
        return ":" in self.nnodes

    def __str__(self) -> str:
        runs = "one run directory" if self.shared else "own run directories"
        direct = ", direct" if self.direct else ""
        return (
            f"--nnodes {self.nnodes} {self.backend} over {self.over}, {runs}, "
            f"saves {self.saves}{direct}, resumes {self.resumes}, rejoin {self.rejoin_s:.0f} s: "
            f"{'; '.join(map(str, self.strikes)) or 'no strike'}"
        )

    def must_finish(self) -> bool:
        """Whether nothing in it is a reason to end."""
        away = [one for one in self.strikes if one.what in (*AWAY, "cut")]
        in_time = [one.back_s is not None and one.back_s < self.rejoin_s / 2 for one in away]
        spared = self.is_elastic and len(away) == 1 and away[0].host != 0
        # On disks of their own hosts may have saved different steps, or none.
        alike = self.saves == "shared" or self.resumes == "no"
        return alike and (all(in_time) or spared)


def drawn(number: int) -> Plan:
    """Return the plan of a trial; below 0 nothing strikes."""
    chance = random.Random(number)
    count = chance.choice([2, 3, 3])
    elastic = chance.random() < 0.5
    backend = "static" if not elastic and chance.random() < 0.35 else "c10d"
    rejoin_s = chance.choice([30.0, 60.0])
    strikes, at = [], 0
    for place in range(chance.choice([1, 2, 2, 3, 3]) if number >= 0 else 0):
        at += chance.randint(1, max(1, (STEPS - 4 - at) // 2))
        what = chance.choice([*PROCESSES, *AWAY, *AWAY, *LINKS, "cut"])
        back_s: float | None = 90 ** chance.random() * rejoin_s / 60
        if chance.random() < 0.15 or what not in (*AWAY, "cut"):
            back_s = None
        soon_s = chance.uniform(0, 8) if place and chance.random() < 0.4 else None
        strikes.append(Strike(what, chance.randrange(count), at, soon_s, back_s))
    shared = chance.random() < 0.5
    saves = chance.choice(["shared", "shared", "each", "first"])
    resumes = chance.choice(["recipe", "recipe", "self", "no"])
    over = chance.choice(["store", "store", "store", "store", "gloo"])
    # Only the steps that optimizers count tell that a script itself has found other checkpoints.
    over = "adam" if resumes == "self" and saves != "shared" else over
    return Plan(
        hosts=count,
        nnodes=f"{count - 1}:{count}" if elastic else str(count),
        backend=backend,
        shared=shared,
        saves=saves,
        resumes=resumes,
        over=over,
        direct=chance.random() < 0.3,
        rejoin_s=rejoin_s,
        strikes=tuple(strikes),
    )


class SaferunStart(NamedTuple):
    """One start of saferun on a host."""

    run: Run
    began: float


class End(NamedTuple):
    """How a host's last saferun ended."""

    host: str
    status: int
    at: float
    kind: str  # of the failure; "" for none
    named: str  # the host that it names
    why: str


class Trial:
    """One run that is struck.

    Args:
        number: of the trial.
        folder: an empty one.
        limit_s: a run that takes longer hangs.
        plan: instead of what the number decides.
    """

    def __init__(
        self, number: int, folder: Path, limit_s: float = 420, plan: Plan | None = None
    ) -> None:
        self.number, self.plan, self.folder = number, plan or drawn(number), folder
        self.chance = random.Random(-1 - number)
        self._end = time.monotonic() + limit_s
        self._hosts: list[Host] = []
        self._starts: dict[str, list[SaferunStart]] = {}
        self._ended: dict[str, float] = {}  # host -> when its last start of saferun was over
        self._down: set[str] = set()  # hosts without a living saferun, by a strike
        self._due: list[tuple[float, str, Callable[[], None]]] = []  # when, host, what
        self._audit_read = 0  # characters
        self._step = 0  # the last one that a rank 0 has done
        self.log: list[str] = []  # what was done, for people
        self._struck: list[str] = []
        self._severed = set[str]()  # hosts whose link is cut for longer than others wait
        self._began = time.time()

    # --- the run -----------------------------------------------------------------------------

    def go(self) -> list[tuple[str, str]]:
        """Run it; return what it did not end right by, as pairs of an outcome and its text."""
        for name in ("out", "saves", "runs"):
            (self.folder / name).mkdir()
        with hosts.standing(self.folder, self.plan.hosts) as self._hosts:
            for host in self._hosts:
                self._disk(host)
                self._start(host)
            self._strike_and_wait()
            return self._judged()

    def _disk(self, host: Host) -> None:
        """Give a host a disk of its own for checkpoints, which outlives it."""
        if self.plan.saves != "shared":
            disk = host.folder / "disk"
            disk.mkdir(exist_ok=True)
            host.do("mount", "--bind", str(disk), str(self.folder / "saves"))

    def _start(self, host: Host) -> None:
        plan = self.plan
        starts = self._starts.setdefault(host.name, [])
        argv = ["--profile=cpu", f"--nnodes={plan.nnodes}", f"--nproc-per-node={RANKS}"]
        if plan.backend == "c10d":
            argv += ["--rdzv-backend=c10d", f"--rdzv-endpoint=h1:{PORT}", "--rdzv-id=job"]
            argv += ["--rdzv-conf=last_call_timeout=5"] if plan.is_elastic else []
        else:
            rank = self._hosts.index(host) if self._hosts else len(self._starts) - 1
            argv += [f"--node-rank={rank}", "--master-addr=h1", f"--master-port={PORT}"]
        argv += [f"--run-dir={self.folder / 'runs'}"] if plan.shared else []
        saves, settings = self.folder / "saves", [f"retry.rejoin_s={plan.rejoin_s}"]
        settings += ["retry.attempts=20", "retry.attempts_total=40", "retry.backoff_s=[0, 0]"]
        if plan.resumes == "recipe":
            settings.append("retry.resume.checkpoints={--saves}/step-*.zip")
            settings.append('retry.resume.args=["--from={checkpoint}"]')
        argv += [f"--set={setting}" for setting in settings]
        argv += [str(JOB), f"--out={self.folder / 'out'}", f"--saves={saves}", f"--steps={STEPS}"]
        argv += [f"--over={plan.over}", f"--saver={'each' if plan.saves == 'each' else 'first'}"]
        argv += ["--direct"] if plan.direct else []
        argv += ["--resume=self"] if plan.resumes == "self" else []
        with (host.folder / f"output-{len(starts)}").open("wb") as out:
            starts.append(SaferunStart(host.start(*argv, stdout=out, stderr=out), time.monotonic()))
        self._down.discard(host.name)
        self._ended.pop(host.name, None)

    def _strike_and_wait(self) -> None:
        waiting = list(self.plan.strikes)
        last = time.monotonic()
        while not self._is_over() and time.monotonic() < self._end:
            self._read_steps()
            now = time.monotonic()
            if waiting and self._is_due(waiting[0], last):
                self._strike(waiting.pop(0))
                last = time.monotonic()
            for entry in [entry for entry in self._due if entry[0] <= now]:
                self._due.remove(entry)
                self._say(f"back: {entry[1]}")
                entry[2]()
            time.sleep(LOOK_S)
        if waiting:
            self._say(f"over before: {'; '.join(map(str, waiting))}")

    def _is_due(self, strike: Strike, last: float) -> bool:
        if strike.soon_s is not None:
            return time.monotonic() >= last + strike.soon_s
        return self._step >= strike.step

    def _is_over(self) -> bool:
        """Whether all have ended; who comes back too late is not waited for."""
        for host in self._hosts:
            run = self._starts[host.name][-1].run
            if host.name not in self._ended and run.process.poll() is not None:
                self._ended[host.name] = time.monotonic()
        there = [h.name for h in self._hosts if h.name not in self._ended]
        if not there:
            return True
        ends = [self._ended[name] for name in self._ended if name not in self._down]
        if ends and all(len(self._starts[name]) > 1 for name in there):
            self._end_late(there, max(ends))
        return False

    def _end_late(self, names: list[str], ended: float) -> None:
        """Ask hosts to end that came back too late, and wait for those that have ended."""
        since = max(ended, *(self._starts[name][-1].began for name in names))
        if time.monotonic() < since + ALONE_S or self._trains():
            return
        for name in set(names) - self._down:
            self._say(f"{name} came back too late, and is asked to end")
            self._signal(self._saferun(self._starts[name][-1].run), signal.SIGTERM)
            self._down.add(name)

    def _trains(self) -> bool:
        """Whether a rank has done a step in the last moments."""
        with contextlib.suppress(FileNotFoundError):
            return time.time() - (self.folder / "out" / "audit").stat().st_mtime < ALONE_S
        return False

    def _read_steps(self) -> None:
        with contextlib.suppress(FileNotFoundError), (self.folder / "out" / "audit").open() as file:
            file.seek(self._audit_read)
            for line in file:
                self._audit_read += len(line)
                facts = json.loads(line)
                self._step = max(self._step, facts["step"] if facts["event"] == "step" else 0)

    def _say(self, text: str) -> None:
        self.log.append(f"{time.time() - self._began:6.1f} s, step {self._step}: {text}")

    # --- the strikes -------------------------------------------------------------------------

    def _strike(self, strike: Strike) -> None:
        """Do it, to the host or to the next one that is up."""
        order = self._hosts[strike.host :] + self._hosts[: strike.host]
        up = [host for host in order if host.name not in {*self._down, *self._ended}]
        if not up:
            self._say(f"no host is up: {strike}")
            return
        host, run = up[0], self._starts[up[0].name][-1].run
        done = self._to_process(strike.what, run) if strike.what in PROCESSES else True
        if strike.what in AWAY:
            self._take_away(strike, host, run)
        elif strike.what == "cut":
            host.cut()
            if strike.back_s is not None:
                self._later(strike.back_s, host, host.heal)
            if strike.back_s is None or strike.back_s >= self.plan.rejoin_s:
                self._severed.add(host.name)
        elif strike.what == "slow":
            host.slow()
        elif strike.what == "lossy" and not host.is_lossy:
            host.disturb()
        if done:
            self._struck.append(host.name)
        self._say(f"{'' if done else 'not there: '}{strike.what} on {host.name} ({strike})")

    def _take_away(self, strike: Strike, host: Host, run: Run) -> None:
        if strike.what == "saferun":
            self._signal(self._saferun(run), signal.SIGKILL)
        elif strike.what == "node":
            host.kill()
        else:
            host.lose_power()
        self._down.add(host.name)

        def back() -> None:
            if strike.what != "saferun":
                host.boot()
                self._disk(host)
            self._start(host)

        if strike.back_s is not None:
            self._later(strike.back_s, host, back)

    def _later(self, after_s: float, host: Host, act: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + after_s, host.name, act))

    def _to_process(self, what: str, run: Run) -> bool:
        """Kill a rank, its agent, a keeper, or the rank that saves while it does."""
        if what == "saver":
            return self._kill_saver()
        end = time.monotonic() + FIND_S
        while time.monotonic() < end and run.process.poll() is None:
            with contextlib.suppress(StopIteration, OSError, IndexError):
                if what == "keeper":
                    pid = run.keeper()
                else:
                    pid = sorted(run.ranks().items())[self.chance.randrange(RANKS)][1]
                    pid = pid if what == "rank" else parent(pid)
                os.kill(pid, signal.SIGKILL)
                return True
            time.sleep(LOOK_S)
        return False

    def _kill_saver(self) -> bool:
        """Kill rank 0 as soon as a new checkpoint is there in part."""
        places = [self.folder / "saves", *self.folder.glob("h*/disk")]
        before, rank_0 = {path for place in places for path in place.iterdir()}, 0
        end = time.monotonic() + FIND_S
        while time.monotonic() < end:
            if not rank_0:
                found = [starts[-1].run.ranks().get(0, 0) for starts in self._starts.values()]
                rank_0 = max(found)
                time.sleep(LOOK_S)
            elif any(path not in before for place in places for path in place.iterdir()):
                return self._signal(rank_0, signal.SIGKILL)
            time.sleep(0.005)
        return False

    @staticmethod
    def _saferun(run: Run) -> int:
        """Return the pid of saferun itself; it is in a namespace, under `nsenter`."""
        ours = f"{sys.executable}\0-m\0saferun\0".encode()
        for pid in living(run.mark):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(ours):
                    return pid
        return 0

    @staticmethod
    def _signal(pid: int, number: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            if pid:
                os.kill(pid, number)
                return True
        return False

    # --- the judgement -----------------------------------------------------------------------

    def _judged(self) -> list[tuple[str, str]]:
        path, ends = self.folder / "out" / "audit", self._ends()
        audit = [json.loads(line) for line in text_of(path).splitlines()] if path.exists() else []
        found = [*self._hanging(), *self._left(), *wrong(self.folder, audit, ends)]
        return [*found, *mixed(audit), *split(audit), *self._reasons(audit, ends)]

    def _hanging(self) -> list[tuple[str, str]]:
        names = [h.name for h in self._hosts if h.name not in self._ended]
        return [(HANGS, f"{', '.join(names)} had not ended")] if names else []

    def _left(self) -> list[tuple[str, str]]:
        """Return what runs that have ended have left: processes, locks."""
        ended = [start.run for name in self._ended for start in self._starts[name]]
        end = time.monotonic() + LEFT_S
        while any(living(run.mark) for run in ended) and time.monotonic() < end:
            time.sleep(LOOK_S)
        alive = [name for run in ended for name in living(run.mark).values()]
        held = hosts.locked(self.folder) if len(self._ended) == len(self._hosts) else []
        found = [(LEFT, f"processes: {', '.join(alive)}")] if alive else []
        return found + ([(LEFT, f"locks: {', '.join(held)}")] if held else [])

    def _ends(self) -> list[End]:
        """Return the ends of those that were not struck down at last."""
        found = []
        for host in self._hosts:
            if host.name in self._ended and host.name not in self._down:
                starts = self._starts[host.name]
                text = (host.folder / f"output-{len(starts) - 1}").read_text(
                    errors="replace", encoding="utf-8"
                )
                status = starts[-1].run.process.returncode
                found.append(end_of(host.name, status, self._ended[host.name], text))
        return found

    def _reasons(self, audit: list[dict[str, Any]], ends: list[End]) -> list[tuple[str, str]]:
        """Return why they ended; where hosts differ in it, or name one that nothing has struck."""
        failed = [end for end in ends if end.status]
        if not failed:
            return []
        text = "; ".join(
            f"{e.host}: {e.status}, {e.kind or 'no kind'} on {e.named or '?'}, {e.why}"
            for e in ends
        )
        found = [(REASON, text)]
        if self.plan.is_elastic and {end.status for end in ends} == {0, REFUSED}:
            return found  # it goes on without a host that does not see the checkpoint
        lost = {end.host for end in ends if end.kind == "node-lost"}
        names = {end.host for end in ends}
        sides = (self._severed & names, names - self._severed)
        if self.plan.is_elastic and lost != names and lost in sides:
            ends = [e for e in ends if e.host not in lost]  # the other side goes on alone
        # A host that comes new and is refused has seen no failure.
        kinds = {e.kind for e in ends if e.kind or e.status != REFUSED}
        whys = {e.why for e in ends if e.status == REFUSED}
        if len({e.status for e in ends}) > 1 or len(kinds) > 1 or len(whys) > 1:
            found.append((UNLIKE, text))
        known = {*self._struck, *(host for at in odd_hosts(audit).values() for host in at)}
        cut = {self._hosts[s.host].name for s in self.plan.strikes if s.what in LINKS}
        for end in failed:
            if end.status == REFUSED and not end.kind:
                continue
            named = set(re.findall(r"h\d+", end.named))
            if end.host not in cut and (not named or not named <= known):
                found.append((UNTRUE, text))
                break
        if max(e.at for e in ends) - min(e.at for e in ends) > TOGETHER_S:
            spread = max(e.at for e in ends) - min(e.at for e in ends)
            found.append((LATE, f"{spread:.0f} s between the ends; {text}"))
        if self.plan.must_finish():
            found.append((GAVE_UP, text))
        return found


def end_of(host: str, status: int, at: float, text: str) -> End:
    """Return how a saferun ended, by its last words."""
    failed = r"^saferun: the run failed: .* \((\S+?)(?: on rank \d+)?, host (.*)\)$"
    said = re.findall(failed, text, re.M)
    whys = re.findall(r"^saferun: (?:not tried again|the run ends): (.*)$", text, re.M)
    kind, named = said[-1] if said else ("", "")
    return End(host, status, at, kind, named, whys[-1] if whys else "no reason")


def wrong(folder: Path, audit: list[dict[str, Any]], ends: list[End]) -> list[tuple[str, str]]:
    """Return where a run has ended by 0 without the weights of an undisturbed one."""
    if not any(end.status == 0 for end in ends):
        return []
    wanted = exact_job.trained(STEPS)
    final = folder / "out" / "final"
    if not final.exists():
        return [(WRONG, "status 0, and no weights")]
    found = []
    if json.loads(text_of(final)) != [STEPS, wanted]:
        found.append((WRONG, f"rank 0 ended with {text_of(final)}"))
    last = [line["group"] for line in audit if line["event"] == "end" and line["rank"] == 0]
    for line in audit:
        if line["event"] == "end" and line["group"] == last[-1] and line["weights"] != wanted:
            found.append((WRONG, f"rank {line['rank']} ended at its step {line['step']}"))
    return found


def odd_hosts(audit: list[dict[str, Any]]) -> dict[int, dict[str, int]]:
    """Return {group: {host: step}} of the ranks that train together and began at other steps."""
    groups: dict[int, dict[str, int]] = {}
    for line in audit:
        if line["event"] == "begin":
            groups.setdefault(line["group"], {})[line["host"]] = line["step"]
    return {group: at for group, at in groups.items() if len(set(at.values())) > 1}


def mixed(audit: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return where such ranks trained on, and were not ended before they could save."""
    done = collections.Counter(line["group"] for line in audit if line["event"] == "step")
    return [
        (MIXED, f"{done[group]} steps of hosts that began at {at}")
        for group, at in odd_hosts(audit).items()
        if done[group] >= exact_job.EVERY
    ]


def split(audit: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return where two ranks 0 have done steps at the same time."""
    spans: dict[int, list[float]] = {}
    for line in audit:
        if line["event"] == "step":
            spans.setdefault(line["group"], []).append(line["at"])
    ordered = sorted((times[0], times[-1]) for times in spans.values())
    return [
        (SPLIT, f"two groups of ranks trained together for {before[1] - after[0]:.1f} s")
        for before, after in itertools.pairwise(ordered)
        if after[0] < before[1]
    ]
