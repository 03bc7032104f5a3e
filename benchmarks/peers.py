"""saferun and its peers on the same jobs: what finishes, how soon, what is left and lost.

    make bench-peers
    python benchmarks/peers.py [KIND ...] [--peers .venv-peers] [--limit-s 60] [--only TEXT ...]
                               [--table job|kinds]

The launchers: torchrun, torchrun --max-restarts=3, NVIDIA's ft_launcher --max-restarts=3
(nvidia-resiliency-ext), accelerate launch --max_restarts=3, dlrover-run --max-restarts=3, LM
Resiliency and Ray Train as peers_launchers.py starts them, saferun. All but saferun are those of
`--peers`, an environment of their own. Each is run on

    launch      two ranks that print a line: seconds from exec to the first one
    crash       rank 1 dies of SIGSEGV once after 5,000 lines: seconds from its death to the next
                start's first line, and the lines of all starts that were written and did not arrive
    orphans     the launcher is killed by SIGKILL: how many processes of the job live 5 s later
    hang        rank 1 stays away from an all_reduce: seconds until a line names it; limits of 20 s
                where a launcher has one (`HANG`)
    KIND ...    rows of tests/mitigations/table.py, all of them where none is named: whether it
                finished, with the seconds of the whole run

A run is ended after `--limit-s`. One run after the other; what is left of one is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("mitigations", "support")]
sys.path[:0] = [str(ROOT / "src")]

import table  # noqa: E402 - where they lie is known only now
from helpers import MARK, living  # noqa: E402 - where they lie is known only now
from mitigations import row  # noqa: E402 - where they lie is known only now
from ways import Launcher, go, missing  # noqa: E402 - where they lie is known only now

JOB = ROOT / "benchmarks" / "peers_job.py"
LINES = 5000
LEFT_S = 5.0  # after the launcher's death
HEAD = ("launcher", "launch", "back after a crash", "lines lost", "orphans after SIGKILL")
HEAD += ("hang named",)
NAMES_RANK_1 = re.compile(rb"rank\W{0,3}1\b", re.IGNORECASE)
HANG = {  # options with which a launcher looks for a hang
    "ft_launcher": ["--ft-initial-rank-heartbeat-timeout=60", "--ft-rank-heartbeat-timeout=20"],
    "saferun": ["--set", "watch.silence_s=20"],
}
# Rows whose fault is in an option of torchrun's that Ray has not.
NO_OPTION = {"port-in-use", "port-privileged", "rendezvous-closed", "rendezvous-connect-failed"}


class Measured(NamedTuple):
    """What one launcher did with the job."""

    launch: str
    back: str
    lost: str
    orphans: str
    hang: str


def launchers(peers: Path) -> dict[str, Launcher]:
    """Return what is compared, by name; what is not installed is left out with a line."""
    again = ["--max-restarts=3"]
    others = [f"{peers}/python", str(ROOT / "benchmarks" / "peers_launchers.py")]
    found: dict[str, tuple[Path, Launcher]] = {
        "torchrun": (peers / "torchrun", lambda argv: [f"{peers}/torchrun", *argv]),
        "torchrun --max-restarts=3": (
            peers / "torchrun",
            lambda argv: [f"{peers}/torchrun", *again, *argv],
        ),
        "ft_launcher --max-restarts=3": (
            peers / "ft_launcher",
            lambda argv: [f"{peers}/ft_launcher", *again, *argv],
        ),
        "accelerate launch --max_restarts=3": (
            peers / "accelerate",
            lambda argv: [f"{peers}/accelerate", "launch", *of_accelerate(argv)],
        ),
        "dlrover-run --max-restarts=3": (
            peers / "dlrover-run",
            lambda argv: [f"{peers}/dlrover-run", "--standalone", *again, *argv],
        ),
        "LM Resiliency, --max-restarts=3": (
            peers / "lm-resiliency-quickstart",
            lambda argv: [*others, "lm-resiliency", *argv],
        ),
        "Ray Train, max_failures=3": (peers / "ray", lambda argv: [*others, "ray", *argv]),
        "saferun": (
            ROOT / "src",
            lambda argv: [sys.executable, "-m", "saferun", "--profile=cpu", *argv],
        ),
    }
    for name, (program, _) in found.items():
        if not program.exists():
            print(f"{name}: there is no {program}")
    return {name: one for name, (program, one) in found.items() if program.exists()}


def of_accelerate(argv: list[str]) -> list[str]:
    """Return torchrun's arguments as accelerate takes them; only --multi_gpu uses torchrun."""
    own = ["--multi_gpu", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    names = {"--nproc-per-node": "--num_processes", "--master-port": "--main_process_port"}
    names |= {"--rdzv-backend": "--rdzv_backend", "--rdzv-conf": "--rdzv_conf"}
    renamed = []
    for word in argv:
        name, equals, value = word.partition("=")
        renamed.append(f"{names.get(name, name)}{equals}{value}")
    return [*own, "--max_restarts=3", *renamed]


# --- the job under one launcher ------------------------------------------------------------------


class Job:
    """The job of peers_job.py under a launcher, in a folder of its own."""

    def __init__(self, launcher: Launcher, what: str, lines: int, folder: Path) -> None:
        self.mark, self.folder = uuid.uuid4().hex, folder
        command = launcher(["--nproc-per-node=2", str(JOB), what, str(lines), str(folder)])
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "SAFERUN_"))}
        environ |= {"HOME": str(folder), MARK: self.mark, "OMP_NUM_THREADS": "1"}
        self.out = folder / "out"
        with self.out.open("wb") as out:
            self.reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=out)
        assert self.reader.stdin is not None
        with self.reader.stdin as pipe, (folder / "err").open("wb") as err:
            self.began = time.monotonic_ns()
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=err, env=environ, cwd=folder
            )

    def wait(self, limit_s: float) -> int | None:
        """Return the exit status; None after the time, when all is killed."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.clear()

    def clear(self) -> int:
        """Kill what lives of it; return how many processes that were."""
        alive = living(self.mark)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.poll()
        self.reader.wait()
        return len(alive)

    def printed(self) -> set[bytes]:
        """Return the lines of both outputs."""
        return {
            *self.out.read_bytes().splitlines(),
            *(self.folder / "err").read_bytes().splitlines(),
        }

    @property
    def firsts(self) -> list[int]:
        """When each rank of each start came to its first line, in ns of the monotonic clock."""
        words = [
            line.split() for line in self.out.read_bytes().decode(errors="replace").split("\n")
        ]
        return sorted(int(w[-1]) for w in words if w[-2:-1] == ["first"] and w[-1].isdecimal())


def measured(name: str, launcher: Launcher, limit_s: float) -> Measured:
    """Run the job four times under a launcher."""
    with tempfile.TemporaryDirectory(prefix="peers-") as one:
        (Path(one) / "crashed").touch()
        job = Job(launcher, "once", 0, Path(one))
        status, firsts = job.wait(limit_s), job.firsts
        launch = f"{(firsts[0] - job.began) / 1e9:.1f} s" if firsts else "never"
        launch += "" if status == 0 else f" ({status})"
    with tempfile.TemporaryDirectory(prefix="peers-") as two:
        job = Job(launcher, "crash", LINES, Path(two))
        status = job.wait(limit_s)
        back, lost = after_crash(job, status), lost_lines(job)
    with tempfile.TemporaryDirectory(prefix="peers-") as three:
        left = orphans(Job(launcher, "stay", 1, Path(three)), limit_s)
    with tempfile.TemporaryDirectory(prefix="peers-") as four:
        extra = HANG.get(name.partition(" ")[0], [])
        job = Job(lambda argv: launcher([*extra, *argv]), "hang", 0, Path(four))
        return Measured(launch, back, lost, left, hang_named(job, limit_s))


def after_crash(job: Job, status: int | None) -> str:
    """Return the seconds from the crash to the next start's first line."""
    crash = job.folder / "crashed"
    died = int(crash.read_text()) if crash.exists() else 0
    later = [first for first in job.firsts[2:] if died]  # two ranks were in the first start
    if not later:
        return f"no ({'hangs' if status is None else status})"
    return f"{(later[0] - died) / 1e9:.1f} s" + ("" if status == 0 else f" ({status})")


def lost_lines(job: Job) -> str:
    """Return how many of the lines that the ranks wrote did not arrive."""
    counts = job.folder.glob("wrote-*")
    wrote = sum(int(n) for path in counts for n in path.read_text().split())
    arrived = job.out.read_bytes().count(b"x" * 80 + b"\n")
    return f"{wrote - arrived} of {wrote}"


def orphans(job: Job, limit_s: float) -> str:
    """Kill the launcher when both ranks are up; return how many of its processes live on."""
    end = time.monotonic() + limit_s
    while len(list(job.folder.glob("wrote-*"))) < 2:
        if time.monotonic() > end or job.process.poll() is not None:
            job.clear()
            return "not up"
        time.sleep(0.1)  # between two looks whether both ranks are up
    job.process.kill()
    job.process.wait()
    time.sleep(LEFT_S)  # what notices the death by itself has so long to end
    return str(job.clear())


def hang_named(job: Job, limit_s: float) -> str:
    """Return the seconds from the hang to the first line that names rank 1."""
    began, end, before = 0, time.monotonic() + limit_s, set[bytes]()
    try:
        while time.monotonic() < end and (not began or job.process.poll() is None):
            hung = job.folder / "hung"
            if not began and hung.exists() and (text := hung.read_text()):
                began, end, before = int(text), time.monotonic() + limit_s, job.printed()
            elif began and NAMES_RANK_1.search(b"\n".join(job.printed() - before)):
                return f"{(time.monotonic_ns() - began) / 1e9:.0f} s"
            time.sleep(0.2)  # between two looks at the output
    finally:
        job.clear()
    return "no" if began else "not up"


# --- the tables ----------------------------------------------------------------------------------


def main() -> int:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="only these rows of the table")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers")
    parser.add_argument("--limit-s", type=float, default=60.0, help="for one run")
    parser.add_argument("--only", nargs="*", default=[""], help="only launchers with such names")
    parser.add_argument("--table", choices=("job", "kinds"), help="only this one of the two")
    options = parser.parse_args()
    if unknown := set(options.kinds) - {case.kind for case in table.CASES}:
        parser.error(f"no row: {', '.join(sorted(unknown))}")
    peers = options.peers.resolve() / "bin"
    os.environ["PYTHONPATH"] = str(ROOT / "src")
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    found = {n: one for n, one in launchers(peers).items() if any(t in n for t in options.only)}
    if options.table != "kinds":
        print(row(HEAD), row(["---"] * len(HEAD)), sep="\n", flush=True)
        for name, launcher in found.items():
            print(row([name, *measured(name, launcher, options.limit_s)]), flush=True)
    if options.table == "job":
        return 0
    cases = [case for case in table.CASES if not options.kinds or case.kind in options.kinds]
    print("", row(["kind", *found]), row(["---"] * (len(found) + 1)), sep="\n", flush=True)
    for case in cases:
        if missing(case) or case.stops:
            continue
        cells = []
        for name, launcher in found.items():
            # accelerate uses torchrun only with --multi_gpu, which refuses a single process.
            if name.startswith("accelerate") and case.ranks == 1:
                cells.append("one rank")
                continue
            if name.startswith("Ray") and case.kind in NO_OPTION:
                cells.append("no such option")
                continue
            with tempfile.TemporaryDirectory(prefix="peers-") as folder:
                outcome = go(case, name, Path(folder), options.limit_s, launcher)
            how = "yes" if outcome.finished else "hangs" if outcome.status is None else "no"
            cells.append(f"{how}, {outcome.seconds:.1f} s")
        print(row([case.kind, *cells]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
