"""A generated script under Slurm: it starts a job's nodes, and has Slurm run the job once more.

sbatch runs the script once, on the first node. `start_nodes` is what it does there: one srun sends
the script to every node, where it runs as any other generated script, with the options by which
torchrun's nodes meet (`meeting`). Slurm's notice before the time limit reaches the first node's
process alone, which passes it on. A node whose hardware fails is left out of the job's next run.

Sources: the manual pages sbatch(1), srun(1), scontrol(1) and scancel(1); tests/slurm/ tries them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from saferun.errors import UnavailableError, UsageError
from saferun.system import command
from saferun.system.stderr import say

ON_NODE = "saferun_slurm_node"  # "HOST:PORT ID COUNT": where nodes meet, in which job, how many
# With these options the user configures the rendezvous; ours would conflict with them.
_ASK_S = 60.0  # for scontrol or scancel, whose server may be busy
_STATIC = ("master_addr", "master_port", "node_rank")
_ON_EACH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "slurm_node.sh")


def meeting(
    slurm: Mapping[str, str], given: Collection[str], environ: Mapping[str, str]
) -> list[str]:
    """Return torchrun's options by which the nodes meet, without those that the user gives.

    Args:
        slurm: the script's settings for Slurm.
        given: names of the options on torchrun's command line, such as `nnodes`.
        environ: the variables of the script on its node.
    """
    place, identity, count = environ[ON_NODE].split()
    if "standalone" in given:
        return []
    wanted = {"nnodes": count}
    if any(name in given for name in _STATIC):
        wanted["node_rank"] = environ["SLURM_NODEID"]
    else:
        wanted |= {"rdzv_backend": "c10d", "rdzv_endpoint": place, "rdzv_id": identity}
    if "gpus" in slurm:
        wanted["nproc_per_node"] = slurm["gpus"]
    names = (n for n in wanted if n not in given and f"PET_{n.upper()}" not in environ)
    return [word for n in names for word in (f"--{n.replace('_', '-')}", wanted[n])]


def start_nodes(
    slurm: Mapping[str, str], arguments: Sequence[str], environ: Mapping[str, str], most_runs: int
) -> int:
    """Run the script on every node of the job, and return the status of the step.

    Args:
        slurm: the script's settings for Slurm.
        arguments: the script's own.
        environ: its variables.
        most_runs: of the whole job, those that Slurm begins again included.

    Raises:
        UsageError: this is no job of Slurm's.
        UnavailableError: Slurm does not tell the job's nodes.
    """
    if not environ.get("SLURM_JOB_ID"):
        raise UsageError(f"this script is for Slurm: sbatch {slurm['script']}")
    return _Job(slurm, environ, most_runs).run(arguments)


class _Job:
    """A job of Slurm's, seen from its first node."""

    def __init__(
        self, slurm: Mapping[str, str], environ: Mapping[str, str], most_runs: int
    ) -> None:
        self._slurm, self._environ, self._most_runs = slurm, environ, most_runs
        self._grace = slurm["grace_s"]
        self._number, self._array = environ["SLURM_JOB_ID"], environ.get("SLURM_ARRAY_JOB_ID")
        # The job as scontrol names it; one task where it is an array.
        task = environ.get("SLURM_ARRAY_TASK_ID", "")
        self._name = f"{self._array}_{task}" if self._array else self._number
        self._restarts = int(environ.get("SLURM_RESTART_COUNT") or 0)
        self._verdicts = os.path.abspath(f"saferun-slurm-{self._number}")
        self._srun: subprocess.Popen[bytes] | None = None
        self._is_limit_near = self._is_queued = False

    def run(self, arguments: Sequence[str]) -> int:
        nodes = self._ask("scontrol", "show", "hostnames", self._environ["SLURM_JOB_NODELIST"])
        if not nodes:
            what = f"scontrol does not tell the nodes of `{self._environ['SLURM_JOB_NODELIST']}`"
            raise UnavailableError(what)
        self._make_verdicts()
        # Slurm tells the nodes itself what it sends here; this process waits for their end.
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # a handler, since children inherit SIG_IGN
        signal.signal(signal.SIGUSR2, self._pass_notice_on)
        late = f"it did not end within {self._grace} s"
        signal.signal(signal.SIGALRM, lambda *_: self._again(late))
        with open(self._slurm["script"], "rb") as script:
            step = self._step(nodes.split(), arguments)
            self._srun = subprocess.Popen(  # noqa: S603 - a list, no shell
                step, stdin=script, env=self._environ
            )
        status = self._srun.wait()
        signal.setitimer(signal.ITIMER_REAL, 0)
        if status:
            self._judge()
        shutil.rmtree(self._verdicts, ignore_errors=True)
        return status if status > 0 else -status and 128 - status

    def _step(self, nodes: Sequence[str], arguments: Sequence[str]) -> list[str]:
        """Return srun's command, by which each node receives the script and runs it."""
        with open(_ON_EACH, encoding="utf-8") as file:
            program = file.read()
        logs = self._slurm["logs"]
        logs = logs.replace("%j", "%A_%a") if self._array else logs
        cpus = self._environ.get("SLURM_CPUS_PER_TASK")
        port = 10000 + int(self._number) % 20000  # below what Linux gives out, one for each job
        place = f"{nodes[0]}:{port} {self._number}-{self._restarts} {len(nodes)}"
        return [
            *("srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"),
            *("--cpu-bind=none", *([f"--cpus-per-task={cpus}"] if cpus else ())),
            *("--kill-on-bad-exit=1", f"--wait={self._slurm['wait_s']}", "--open-mode=append"),
            *(f"--output={logs}", "bash", "-c", program, "bash", self._verdicts, place),
            *arguments,
        ]

    def _make_verdicts(self) -> None:
        """Make the directory, which the nodes share, in which each leaves its run's verdict."""
        shutil.rmtree(self._verdicts, ignore_errors=True)
        try:
            os.mkdir(self._verdicts, 0o700)
        except OSError:
            here = os.path.dirname(self._verdicts)
            say(f"cannot write in {here}: a node whose hardware fails will not be left out")
            self._verdicts = ""

    def _pass_notice_on(self, *_: Any) -> None:
        """Tell the nodes that the time limit is near: by SIGURG, which only saferun handles there.

        The ranks' own children would die of SIGUSR2.
        """
        if self._is_limit_near:
            return
        self._is_limit_near = True
        say(
            "the time limit is near: the ranks get SIGUSR2; the job is queued again in "
            f"{self._grace} s at most"
        )
        if self._ask("scancel", "--signal=URG", self._name) is None and self._srun is not None:
            self._srun.send_signal(signal.SIGURG)
        signal.setitimer(signal.ITIMER_REAL, float(self._grace))

    def _judge(self) -> None:
        """Have Slurm run a failed job once more, if another run would not fail in the same way.

        A node's verdict is `stop-user` where the same command would fail again, and
        `stop-hardware` where it would succeed on another node.
        """
        said = {}
        with contextlib.suppress(OSError):
            for node in sorted(os.listdir(self._verdicts)):
                with open(os.path.join(self._verdicts, node), encoding="utf-8") as file:
                    said[node] = file.read().strip()
        if "stop-user" in said.values() and not self._is_limit_near:
            return  # near the limit it may be how ranks end once they have saved
        broken = ",".join(node for node, verdict in said.items() if verdict == "stop-hardware")
        if broken:
            self._again(f"the hardware of {broken} failed", broken)
        elif self._is_limit_near:
            self._again("the time was over")

    def _again(self, why: str, without: str = "") -> None:
        """Have Slurm queue the job again, without the nodes that are named."""
        if self._is_queued:
            return
        if self._restarts + 1 >= self._most_runs:
            times = f"{self._restarts} times queued again"
            say(f"{why}; {times} is all there is (retry.attempts_total)")
            return
        # Requeueing sends these to this job, this very process and scontrol included.
        for number in (signal.SIGCONT, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        shown = self._ask("scontrol", "-o", "show", "job", self._name) if without else ""
        excluded = re.search(r"(?<= ExcNodeList=)[^ (]+", shown or "")
        if self._ask("scontrol", "requeue", self._name) is None:
            say(f"{why}; Slurm does not queue the job again")
            return
        self._is_queued = True
        say(f"{why}: the job is queued again{f', without {without}' if without else ''}")
        if without:
            nodes = f"{excluded[0]},{without}" if excluded else without
            self._ask("scontrol", "update", f"JobId={self._name}", f"ExcNodeList={nodes}")

    def _ask(self, *words: str) -> str | None:
        """Return what a program of Slurm's prints; None where it fails, which a line says."""
        answer = command.run(words, self._environ, _ASK_S)
        if answer.trouble:
            say(f"{' '.join(words[:2])}: {answer.err.strip() or answer.trouble}")
        return None if answer.trouble else answer.out
