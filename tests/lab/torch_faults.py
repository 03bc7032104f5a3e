"""Random faults in real trainings: torchrun, gloo or NCCL, DataLoader workers, torch.compile.

Beside the faults of random_faults.py a run's port may be taken, before its start or between two
attempts, and a fault may come before the ranks have begun, before they have met, or at their end.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from helpers import until
from random_faults import SURVIVED, USER, Fault, Reader, Trial, faults
from runs import Run, program

DRIVER = Path("/proc/driver/nvidia/gpus")
SHARED = 48  # runs that may share a real GPU
KEPT = re.compile(r"NCCL_|NVSHMEM_|NVIDIA_|CUDA|TORCH|TRITON_|(CC|CXX)$")
STACKS = signal.SIGRTMIN + 5  # torch_tree_job.py prints its stacks then
STACKS_S = 2  # for ranks to write them: whether one has is seen by nothing
# Two helpers and not one for each core. A test of what this CPU can do imports torch for each kind
# of vector instructions, under a lock that all runs of a cache share.
COMPILER_ENV = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
SERVED = "served"  # the run ends well, in however many attempts
EARLY = ("main", "keeper", "launcher", "rank", "reader", "journal")


def torch_faults() -> list[Fault]:
    """Return the faults of a run with torch."""
    return [*faults(), *2 * [Fault("port", "taken", SERVED), Fault("port", "stolen", SERVED)]]


def gpus() -> int:
    """Return how many GPUs NVIDIA's driver has here."""
    with contextlib.suppress(OSError):
        return len(list(DRIVER.iterdir()))
    return 0


def warm(folder: Path) -> None:
    """Fill inductor's cache, so that runs that begin together do not all wait for compilers.

    Args:
        folder: for what the jobs write.
    """
    jobs = []
    for port, device in enumerate(["cpu", *(["cuda"] if gpus() > 1 else [])], 9900):
        place = folder / device
        place.mkdir()
        words = [program("torch_tree_job"), str(place), "2", "0", device]
        torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node=2"]
        environ = {**os.environ, **COMPILER_ENV, "SAFERUN_ATTEMPT": "1"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = [*torchrun, f"--master-port={port}", *words]
        jobs.append(subprocess.Popen(command, env=environ, **quiet))
    for job in jobs:
        job.wait()
    for path in folder.glob("*/pids-*-0"):
        helper = path.read_text(encoding="utf-8").rpartition(" ")[2]
        with contextlib.suppress(ProcessLookupError):  # its job failed
            os.kill(int(helper), signal.SIGKILL)


class TorchTrial(Trial):
    """One training with its fault.

    Args:
        number: of the trial; it decides all else. Every fourth trains on GPUs where there are two.
        folder: an empty one.
        limit_s: a run that takes longer hangs.
    """

    causes = ("torch_tree_job.py", "bin/torchrun", "/torch/", "/multiprocessing/")

    def __init__(self, number: int, folder: Path, limit_s: float = 300) -> None:
        super().__init__(number, folder, limit_s)
        self.as_script = self.chance.random() < 0.1
        self.device = "cuda" if number % 4 == 0 and gpus() > 1 else "cpu"
        self.moment = self.chance.choices(("step", "start", "begun", "end"), (6, 1, 1, 1))[0]
        if self.fault.whom not in EARLY or (self.steps > 1000 and self.moment == "end"):
            self.moment = "step"
        self.standalone = self.fault.whom != "port" and self.chance.random() < 0.5
        self.port = self._free_port()
        self.temporary = ""  # the job's TMPDIR

    def __str__(self) -> str:
        meet = "standalone" if self.standalone else f"port {self.port}"
        return f"{super().__str__()}, at {self.moment}, {self.device}, {meet}"

    def faults(self) -> list[Fault]:
        """Return all faults."""
        return torch_faults()

    # --- the run ---------------------------------------------------------------------------

    def _free_port(self) -> int:
        """Return a port that the system hands to nobody by itself."""
        while True:
            port = self.chance.randrange(10_000, 30_000)
            with socket.socket() as one, contextlib.suppress(OSError):
                one.bind(("", port))
                return port

    def environ(self) -> dict[str, str]:
        """Return the variables of the machine: its own GPUs, or one that no other run knows."""
        found = {name: value for name, value in os.environ.items() if KEPT.match(name)}
        (self.folder / "bin").mkdir()
        if not gpus():
            self._fake_gpu()
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        cache = found.setdefault("TORCHINDUCTOR_CACHE_DIR", str(self.folder / "inductor"))
        found.setdefault("TRITON_CACHE_DIR", f"{cache}/triton")  # else in HOME, which may be full
        found.update(COMPILER_ENV)
        return {**found, "PATH": path, "TMPDIR": self.temporary}

    def settings(self) -> list[str]:
        """Return saferun's own options."""
        ranks = f"--set=start.ranks={os.environ.get('TRIAL_RANKS', 'spawn')}"
        return [*super().settings(), ranks, *([f"--set=locks.slots={SHARED}"] if gpus() else [])]

    def job(self) -> list[str]:
        """Return the words of torchrun."""
        meet = "--standalone" if self.standalone else f"--master-port={self.port}"
        mistake = str(self.strike_at if self.fault.promise == USER else 0)
        job = [program("torch_tree_job"), str(self.folder), str(self.steps), mistake, self.device]
        return ["--nproc-per-node=2", meet, *job]

    # --- the fault -------------------------------------------------------------------------

    def go(self) -> None:
        """Run it; raise where a promise was not kept. The folder then has what the run wrote."""
        with contextlib.ExitStack() as stack:
            # Batches go through sockets there, whose paths may have 107 characters.
            self.temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="trial-"))
            if self.fault == ("port", "taken", SERVED):
                one = stack.enter_context(socket.socket())
                one.bind(("", self.port))
                one.listen()
            super().go()

    def reached(self, job: Run) -> bool:
        """Return whether it is time."""
        if self.moment == "step":
            return super().reached(job)
        if self.moment == "end":
            return self.written(1, self.rank) >= self.steps
        if self.moment == "begun":
            return bool(self.pids(1, self.rank))
        with contextlib.suppress(OSError, ValueError):
            return bool(job.events("started"))
        return False

    def strike(self, job: Run) -> None:
        """Do what the fault says, now; at a run's end it may come too late."""
        if self.fault.whom == "port":
            self._steal(job)
            return
        if self.moment == "end":
            with contextlib.suppress(ProcessLookupError):
                super().strike(job)
        else:
            super().strike(job)

    def _steal(self, job: Run) -> None:
        """Kill a rank, and take the port from the launcher as soon as it is gone."""
        if self.fault.what == "taken":
            return
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            rank = self.pids(1, self.rank).get("rank")
            if not rank:  # it is over: the fault comes too late
                return
            os.kill(rank[0], signal.SIGKILL)

            def taken() -> bool:
                with contextlib.suppress(OSError):
                    one.bind(("", self.port))
                    one.listen()
                    return True
                return False

            until(lambda: taken() or self.attempts() > 1 or self.over(job), "the port")
            job.process.wait(self.left())

    def note(self, job: Run) -> None:
        """Write down which processes live, and let the ranks write where they are."""
        super().note(job)
        for pid in job.ranks().values():
            with contextlib.suppress(OSError):
                os.kill(pid, STACKS)
        time.sleep(STACKS_S)

    # --- the promises ----------------------------------------------------------------------

    def expected(self) -> dict[str, tuple[set[int], bool]]:
        """Return the statuses that each promise allows, and whether the attempts are right."""
        found = super().expected()
        found[SERVED] = ({0}, True)
        if self.moment == "end":  # a rank that was struck may have done all, and so may a launcher
            found[SURVIVED] = ({0}, self.attempts() <= 2)
        return found

    def check(self, job: Run, status: int, readers: list[Reader]) -> None:
        """Raise AssertionError where the end or the output is not what was promised."""
        super().check(job, status, readers)
        if status or self.fault.whom == "reader":
            return
        text = readers[0].data.decode("utf-8", "replace")
        samples = self.steps * 2 * 4
        right = f"done {self.steps} {samples * (samples - 1) // 2}"
        found = set(re.findall(r"^done .*$", text, re.MULTILINE))
        assert found == {right}, f"{found}, not {right!r}"

    def check_locks(self) -> None:
        """Raise BlockingIOError where a lock of the run's GPU is still held."""
        if not gpus():
            super().check_locks()
