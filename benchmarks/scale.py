"""What many nodes cost: agents on this machine, from one to 200, each a node of one run.

    python benchmarks/scale.py [--nodes 1 2 5 10 20 50 100 200] [--budget 425] [--out FOLDER]

Each node is a real `saferun --nnodes N --nproc-per-node 1` (or torchrun: the two are paired) whose
rank is a small Python without torch. `--local-addr` with an address of 127.0.0.0/8 tells the nodes
apart, as the address of its host does elsewhere. One node holds the rendezvous; all others reach it
through a proxy that counts requests (store_counter.py), so the numbers are the load of the other
nodes at the host. Small runs stand beside each other in a group, as the cores suffice.

A run: all ranks start; they live for a while (heartbeats); under saferun one rank dies and all
begin attempt 2; then all end with status 0. No warm agent is used: hundreds on one machine would
take the cores from the agents that start. Then ranks alone meet (`hooks.init`), each a thread with
a connection, as many as --ranks says.

Writes FOLDER/scale.json after each group and FOLDER/scale.md at the end; needs what torchrun needs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from scale_ranks import ranks_meet
from store_counter import Counts, Proxy, flat, free_port

ROOT = Path(__file__).resolve().parent.parent
LAUNCHERS = [TORCHRUN := "torchrun", "saferun"]
TOGETHER = 40  # nodes that are measured beside each other
LIMIT_S = 150.0  # of one step of one run
STEADY_S = 8.0
LOOK_S = 0.02  # between two looks whether all ranks have written; when they did, they say
END_S = 60.0
NO_WARM_AGENT = "--start-method=fork"  # of no effect on a script, but saferun then keeps none
HOST = "127.0.9.1"  # sorted last: node 0 reads all heartbeats, and is to do so through the proxy
WORKER = """
import os, signal, sys, time
place, attempt = sys.argv[1], os.environ.get("SAFERUN_ATTEMPT", "1")
name = f"{place}/line-{attempt}-{os.environ['RANK']}"
with open(name + ".tmp", "w") as file:
    file.write(f"{time.time()} {os.getppid()}")
os.rename(name + ".tmp", name)
while os.path.isdir(place) and not os.path.exists(f"{place}/end"):
    if attempt == "1" and os.environ["RANK"] == "0" and os.path.exists(f"{place}/fail"):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)  # 800 of them share the machine: they are to take none of it
"""


class Phase(NamedTuple):
    """A part of a run: how long it took, and what came to the host meanwhile."""

    seconds: float
    since_last_join_s: float  # of this, after the last node reached the rendezvous
    counts: Counts


class Measured(NamedTuple):
    """One run."""

    nodes: int
    launcher: str
    phases: dict[str, Phase]  # start, steady, again, end
    host_cpu_s: dict[str, float]  # of the host's agent, at the end of start, steady and again


# --- a run ---------------------------------------------------------------------------------------


class Run:
    """Nodes that are started, and watched by the files of their ranks."""

    def __init__(self, count: int, launcher: str, place: Path) -> None:
        self._count, self._launcher, self._place = count, launcher, place
        self._port = free_port()
        self._proxy = Proxy(self._port)
        self._agents: list[subprocess.Popen[bytes]] = []
        place.mkdir(parents=True)
        (place / "worker.py").write_text(WORKER)

    def measure(self) -> Measured:
        """Carry out the run.

        Raises:
            RuntimeError: it did not go as it should.
        """
        phases: dict[str, Phase] = {}
        cpu: dict[str, float] = {}
        try:
            phases["start"] = self._phase(self._start, "1")
            cpu["start"] = self._host_cpu("1")
            phases["steady"] = self._phase(lambda: time.sleep(STEADY_S), "")
            cpu["steady"] = self._host_cpu("1")
            if self._launcher != TORCHRUN:
                phases["again"] = self._phase((self._place / "fail").touch, "2")
                cpu["again"] = self._host_cpu("2")
            phases["end"] = self._phase(self._end, "")
        finally:
            self._stop()
        return Measured(self._count, self._launcher, phases, cpu)

    def _phase(self, act: Callable[[], object], attempt: str) -> Phase:
        """Act; wait for the first lines of all ranks of an attempt, unless it is ""."""
        before, began = self._proxy.counts(), time.time()
        act()
        lines = self._lines(attempt) if attempt else [time.time()]
        counts = self._proxy.counts()
        joined = counts.last_join_at if counts.last_join_at > began else max(lines)
        return Phase(max(lines) - began, max(lines) - joined, counts - before)

    def _start(self) -> None:
        for node in reversed(range(self._count)):
            log = open(self._place / f"log-{node}", "wb")  # noqa: SIM115 (the child keeps it)
            started = subprocess.Popen(
                self._command(node),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ(),
                start_new_session=True,
            )
            log.close()
            self._agents.append(started)

    def _command(self, node: int) -> list[str]:
        is_host = node == self._count - 1
        address = HOST if is_host else f"127.0.{1 + node // 200}.{10 + node % 200}"
        port = self._port if is_host else self._proxy.port
        options = [
            *(f"--nnodes={self._count}", "--nproc-per-node=1", "--rdzv-backend=c10d"),
            *(f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=is_host={int(is_host)}"),
            *("--rdzv-id=scale", f"--local-addr={address}", NO_WARM_AGENT),
            *(str(self._place / "worker.py"), str(self._place)),
        ]
        if self._launcher == TORCHRUN:
            return [sys.executable, "-m", "torch.distributed.run", *options]
        ours = ["--profile=cpu", f"--run-dir={self._place / 'runs'}", "--set"]
        return [sys.executable, "-m", "saferun", *ours, "retry.backoff_s=[1, 1]", *options]

    def _environ(self) -> dict[str, str]:
        mine = ("SAFERUN", "PET_", "TORCHELASTIC", "SLURM")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(mine)}
        if self._launcher != TORCHRUN:
            kept.update(PYTHONPATH=str(ROOT / "src"))
        home = str(self._place)
        return {**kept, "HOME": home, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

    def _lines(self, attempt: str) -> list[float]:
        """Return when the ranks of an attempt wrote their first lines, once all have."""
        expected = [self._place / f"line-{attempt}-{rank}" for rank in range(self._count)]
        limit = time.monotonic() + LIMIT_S
        while not all(path.exists() for path in expected):
            if time.monotonic() > limit or any(agent.poll() for agent in self._agents):
                raise RuntimeError(f"{self._count} nodes, {self._launcher}:\n{self._logs()}")
            time.sleep(LOOK_S)
        return [float(path.read_text().split()[0]) for path in expected]

    def _logs(self) -> str:
        texts = (path.read_text("utf-8", "replace") for path in self._place.glob("log-*"))
        longest = sorted(texts, key=len)[-2:]
        return "\n---\n".join(text[-3000:] for text in longest)

    def _host_cpu(self, attempt: str) -> float:
        """Return the CPU seconds of the agent that holds the store, and of its threads."""
        pid = (self._place / f"line-{attempt}-{self._count - 1}").read_text().split()[1]
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def _end(self) -> None:
        (self._place / "end").touch()
        statuses = [agent.wait(END_S) for agent in self._agents]
        if any(statuses):
            raise RuntimeError(f"{self._count} nodes, {self._launcher}: {statuses}\n{self._logs()}")

    def _stop(self) -> None:
        for agent in self._agents:
            if agent.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
        self._proxy.close()


# --- all runs ------------------------------------------------------------------------------------


def grouped(nodes: list[int]) -> Iterator[list[int]]:
    """Divide the numbers of nodes into those that are measured beside each other."""
    group: list[int] = []
    for count in sorted(nodes):
        if group and sum(group) + count > TOGETHER:
            yield group
            group = []
        group.append(count)
    yield group


def measure_group(group: list[int], launcher: str) -> list[Measured]:
    """Carry out runs beside each other."""
    found: list[Measured] = []
    problems: list[BaseException] = []
    with tempfile.TemporaryDirectory(prefix="scale-", ignore_cleanup_errors=True) as folder:

        def one(count: int) -> None:
            try:
                found.append(Run(count, launcher, Path(folder, str(count))).measure())
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=one, args=(count,)) for count in group]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if problems:
        raise problems[0]
    return sorted(found)


def as_json(one: Measured) -> dict[str, Any]:
    """Return a run as JSON has it."""
    phases = {
        name: {
            "seconds": round(phase.seconds, 3),
            "since_last_join_s": round(phase.since_last_join_s, 3),
            **flat(phase.counts),
        }
        for name, phase in one.phases.items()
    }
    cpu = {name: round(seconds, 2) for name, seconds in one.host_cpu_s.items()}
    return {
        "nodes": one.nodes,
        "launcher": one.launcher,
        "host_agent_cpu_s": cpu,
        "phases": phases,
    }


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 5, 10, 20, 50, 100, 200])
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 80, 800])
    parser.add_argument("--budget", type=float, default=425.0, help="seconds for all")
    parser.add_argument("--out", type=Path, default=Path("scale-out"))
    parser.add_argument("--launchers", nargs="+", default=LAUNCHERS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.environ.pop("PYTHONPATH", None)  # saferun's; torchrun is measured without it
    measure(given)
    print((given.out / "scale.md").read_text())


def measure(given: argparse.Namespace) -> None:
    """Measure all, and write what there is after each part."""
    import scale_tables

    budget = Budget(given.budget)
    document: dict[str, Any] = {"machine": scale_tables.machine(), "runs": [], "ranks": []}

    def keep() -> None:
        (given.out / "scale.json").write_text(json.dumps(document, indent=1))
        (given.out / "scale.md").write_text(scale_tables.text(document))

    for count in given.ranks:
        document["ranks"].append(ranks_meet(count))
        keep()
    groups = list(grouped(given.nodes))
    for group, launcher in itertools.product(groups, LAUNCHERS):
        if launcher not in given.launchers:
            continue
        if not budget.allows(sum(group)):
            print(f"no time is left for {group} nodes under {launcher}", flush=True)
            continue
        began = time.monotonic()
        try:
            document["runs"] += [as_json(one) for one in measure_group(group, launcher)]
        except Exception as error:  # the other runs are measured all the same
            print(f"{group} nodes under {launcher}: {error}", flush=True)
            continue
        budget.took(sum(group), time.monotonic() - began)
        print(f"{group} nodes, {launcher}: {time.monotonic() - began:.0f} s", flush=True)
        keep()


class Budget:
    """Whether a run of so many nodes fits into the time that is left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._each_s = 0.2  # for each node, beside BASE_S

    BASE_S = 30.0

    def allows(self, nodes: int) -> bool:
        """Return whether there is time for a run of so many nodes."""
        return time.monotonic() + self.BASE_S + nodes * self._each_s < self._end

    def took(self, nodes: int, seconds: float) -> None:
        """Learn from a run."""
        if nodes >= TOGETHER:
            self._each_s = max(0.05, (seconds - self.BASE_S) / nodes)


if __name__ == "__main__":
    main()
