"""Pure: a generated script as one file for sbatch.

    saferun gen-shell --slurm --nodes 2 -- torchrun train.py > job.sh; sbatch job.sh

`render` puts Slurm's directives at the top of a script, and shell/slurm.sh between its settings and
its job. Where it runs, export/slurm_job.py sends it to every node, and on a node it runs like any
other generated script.

Sources: the manual pages sbatch(1), srun(1) and scontrol(1). They do not say how sbatch reads a
directive; tests/slurm/ shows it: both kinds of quotes protect blanks and `#`; a backslash protects
the next character, even in quotes; nothing is expanded; and of two equal options the last one
counts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from saferun.errors import UsageError
from saferun.model import CommandLine
from saferun.planning.torchrun.torchrun_args import whole

# Seconds before the time limit at which the ranks get SIGUSR2; Slurm may send it up to 60 s earlier
# (sbatch(1), --signal).
NOTICE_S = 120
_RESERVE_S = 60  # part of the notice reserved for requeueing a job that has not ended
# Seconds for which torchrun's agents wait for each other after a node has ended with 0
# (torch/distributed/elastic/agent/server/api.py, exit_barrier_timeout).
WAIT_S = 300
PLACE = "# --- The job "
_FIRST_LINE = "#!/usr/bin/env bash\n"
_NUMBERS = "#@ numbers\n"
NAMED = ("--nodes", "--gpus-per-node", "--time", "--partition")  # as in Job
_BARE = re.compile(r"[\w@%+=:,./-]+\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Job:
    """A script's requests to Slurm."""

    nodes: int
    gpus: str | None = None  # for each node: "8", "a100:8"
    time: str | None = None  # in sbatch's format
    partition: str | None = None
    extra: tuple[str, ...] = ()  # directives, without #SBATCH

    @property
    def options(self) -> tuple[str, ...]:
        """Return the options of `gen-shell` that request the same."""
        pairs = zip(NAMED, (str(self.nodes), self.gpus, self.time, self.partition), strict=True)
        argv = [word for name, text in pairs if text for word in (name, text)]
        return ("--slurm", *argv, *(f"--sbatch={line}" for line in self.extra))


def read(slurm: bool, options: Mapping[str, str | None], extra: Sequence[str] = ()) -> Job | None:
    """Return the requests to Slurm in the options of `gen-shell`; None if there are none.

    Args:
        slurm: whether --slurm was given.
        options: the values of NAMED; None for an option that was not given.
        extra: the value of each --sbatch.

    Raises:
        UsageError: a directive cannot contain a value, or an option lacks --slurm.
    """
    given = [(name, text) for name, text in options.items() if text is not None]
    given += [("--sbatch", line) for line in extra]
    if not slurm:
        for name, _ in given:
            raise UsageError(f"{name} is for Slurm", fix=f"saferun gen-shell --slurm {name} …")
        return None
    nodes, gpus, time, partition = (options.get(name) for name in NAMED)
    count = 1 if nodes is None else whole(nodes)
    if not count:
        raise UsageError(f"--nodes takes a number of nodes, not `{nodes!s:.40}`", fix="such as 2")
    for name, text in given:
        if not text.isprintable():
            raise UsageError(f"{name} takes one line, not {text!r}", fix="one option a line")
    directives = tuple(line.strip() for line in extra)
    for line in directives:
        if not line.startswith("-"):
            fix = "such as --sbatch=--account=physics"
            raise UsageError(f"--sbatch takes an option of sbatch, not `{line}`", fix=fix)
    return Job(count, gpus, time, partition, directives)


def remarks(job: Job) -> tuple[str, ...]:
    """Return a remark if Slurm may give the job too few CPUs."""
    options = {_option(line) for line in job.extra}
    if options & {"--exclusive", "--cpus-per-task", "-c", "--cpus-per-gpu"}:
        return ()
    return (
        "Slurm gives a job one CPU a node unless the partition gives more: ask for yours with "
        "--sbatch=--cpus-per-task=N or --sbatch=--exclusive",
    )


def render(script: str, job: Job, line: CommandLine, shell: str) -> str:
    """Return a generated script as a file for sbatch.

    Args:
        script: the script.
        job: the requests to Slurm.
        line: torchrun's command line in the script.
        shell: the hand-written part, shell/slurm.sh.
    """
    assert script.startswith(_FIRST_LINE), "a script begins with it"
    # At the beginning of a line it occurs only once: comments and quoted values cannot imitate it.
    head, mark, tail = script.partition(f"\n{PLACE}")
    assert mark, "a script has a section for its job"
    head, mark = f"{head}\n".removeprefix(_FIRST_LINE), PLACE
    head = head.replace("     bash THIS-FILE", "     sbatch THIS-FILE", 1)
    part = shell.replace(_NUMBERS, _settings(job))
    return f"{_FIRST_LINE}{directives(job, line)}{head}{part}\n{mark}{tail}"


def directives(job: Job, line: CommandLine) -> str:
    """Return the lines at the top of a file for sbatch."""
    return "".join(f"#SBATCH {one}\n" for one in _directives(job, line)) + "#\n"


def quote(text: str) -> str:
    """Return text as one word of a directive.

    >>> quote("gpu"), quote("two words"), quote('say "x"')
    ('gpu', '"two words"', '"say \\\\"x\\\\""')
    """
    if _BARE.match(text):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _directives(job: Job, line: CommandLine) -> list[str]:
    """Return our directives, sorted, except those that the user replaces; then the user's own."""
    ours = {
        "--gpus-per-node": job.gpus,
        "--job-name": _name(line),
        "--nodes": str(job.nodes),
        "--ntasks-per-node": "1",
        "--open-mode": "append",
        "--partition": job.partition,
        "--requeue": "",
        "--signal": f"B:USR2@{NOTICE_S}",
        "--time": job.time,
    }
    theirs = {_option(one).replace("--no-requeue", "--requeue") for one in job.extra}
    kept = {name: text for name, text in ours.items() if text is not None and name not in theirs}
    written = [f"{name}={quote(text)}" if text else name for name, text in sorted(kept.items())]
    return [*written, *job.extra]


def _option(directive: str) -> str:
    return re.split(r"[=\s]", directive, maxsplit=1)[0]


def _name(line: CommandLine) -> str:
    """Return the job's name, which becomes part of a file name."""
    base = (line.script or "").rstrip("/").rpartition("/")[2].removesuffix(".py")
    return base if base and base.isprintable() else "saferun"


def _settings(job: Job) -> str:
    """Return the lines of the script that set what export/slurm_job reads."""
    notice = next((int(n) for n in map(_notice, reversed(job.extra)) if n), NOTICE_S)
    gpus = (job.gpus or "").rpartition(":")[2]
    return (
        "# Seconds from Slurm's signal until the job, even if it runs on, is queued again; and\n"
        "# from the end of one node's part until those of the others are ended.\n"
        f"slurm grace_s {max(notice - _RESERVE_S, notice // 2)}\n"
        f"slurm wait_s {WAIT_S}\n"
        f"slurm logs {shlex.quote(_logs(job.extra))}\n"
        + (f"slurm gpus {gpus}\n" if whole(gpus) is not None else "")
    )


def _notice(directive: str) -> str:
    match = re.match(r"--signal[=\s]B:(?:SIG)?USR2@(\d+)\s*\Z", directive)
    return match[1] if match else ""


def _logs(extra: Sequence[str]) -> str:
    """Return the pattern of the nodes' logs: beside the job's own log if the user named that."""
    for directive in reversed(extra):
        match = re.match(r"(?:--output[=\s]|-o\s*)([^\s\"'\\]+)\Z", directive)
        if match:
            folder, slash, name = match[1].rpartition("/")
            stem, dot, ending = name.rpartition(".")
            return f"{folder}{slash}{stem}-%N.{ending}" if dot else f"{match[1]}-%N"
    return "%x-%j-%N.out"
