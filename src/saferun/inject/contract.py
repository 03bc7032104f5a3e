"""The versioned JSON that saferun and the processes of a job exchange.

The job gets the environment variable SAFERUN_INJECT. It writes one receipt file for each process
that was started as a rank, became one or compiled something. A receipt file has one JSON object a
line; lines are appended and never rewritten. A process that was started as a rank writes a line at
its start, with the hook "bootstrap": if that line is missing, the hooks did not run in that
process. It writes a second one when its script has ended: if the process is killed later, its work
is done.

    SAFERUN_INJECT   {"v": 1, "run": ID, "attempt": N, "hooks": {…}, "mitigations": […],
                      "receipts": DIRECTORY or null,
                      "state": DIRECTORY (launcher: python, or hooks.optuna.mode: on),
                      "previous": EXIT STATUS (if the previous attempt failed),
                      "watch": 1 (if it is on),
                      "imports": 1 (with start.ranks: warm: list what the ranks import),
                      "start": TEXT (with retry.resume or retry.resume_args: what it goes on from)}
    receipt line     {"v": 1, "at": UNIX SECONDS, "pid": N, "rank": N or null, "hook": NAME,
                      "outcome": OUTCOME, …what the hook adds, "effective" among it}
      "bootstrap" adds "local_rank" and "local_world_size" (N or null), and "error_file", where
      torchrun looks for the rank's exception, if JSON needs no escapes for it, and "start" (with
      start.ranks: warm): "warm MODULES SECONDS", which were imported ahead and how long that took,
      "ahead MODULES SECONDS" for a process of plain python that was replaced, or "spawn REASON"
      "targets" adds "targets": {MODULE: "applied", "not imported" or "missed"}; the first such line
      of a process has all of them, each later one what has changed
    recycle request  {"why": TEXT, "kind": KIND or "", "progress": N}, beside the receipt

`state` is a directory that all processes of a run (of one worker) share. A process that needs to be
replaced writes a recycle request and ends with RECYCLE_STATUS; `progress` counts the work that it
has completed. The file PROGRESS in `state` has one byte for each such piece of work, so that the
work of a killed process counts, too.

torchrun's agent sets SAFERUN_AGENT_PID for its ranks: "PID", or "PID NAMESPACE" where every process
that it starts is a Python (no --no-python, no PYTHON_EXEC). In the second case a Python that finds
no such agent is a rank whose agent died while the rank started. NAMESPACE is the pid namespace in
which PID counts.

The Python that the agent started as a rank sets SAFERUN_RANK_PID to its own pid. Each helper of the
rank inherits the variable and so knows that it is not the rank process itself.
"""

TYPE_CHECKING = False  # every Python of a job loads this file: no imports, annotations in quotes
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, MutableMapping
    from typing import Any, TypedDict

    class Contract(TypedDict):
        """SAFERUN_INJECT; `hooks` has every key of HookSettings in saferun/settings.py."""

        v: int
        run: str
        attempt: int
        hooks: dict[str, Any]
        mitigations: list[str]
        receipts: str | None
        state: str | None
        previous: int | None
        watch: int | None
        imports: int | None
        start: str | None


VARIABLE = "SAFERUN_INJECT"
RANK_MARK = "SAFERUN_RANK_PID"  # pid of the Python that is the rank; its helpers inherit it
MAIN_MARK = "SAFERUN_MAIN_PID"  # pid of the job's first Python if no rank; its helpers inherit it
START = "SAFERUN_START"  # how a rank was started, if ranks may be warm
AGENT_MARK = "SAFERUN_AGENT_PID"  # pid of torchrun's agent, the parent of the ranks
VERSION = 1  # raise it whenever a hook gains a key: ranks know no defaults

STACKS = ".stacks"  # suffix of the file with a rank's stacks, beside its receipt
STACKS_SIGNAL = 53  # real-time signal (signal(7)) at which faulthandler writes them
TIMES = ".times"  # suffix of the file with the times of a rank's collectives
TIMES_SIGNAL = 54  # signal at which the rank writes it (collective_times.py)
TIMING_SIGNAL = 55  # the same, and NCCL measures its collectives on the GPU from then on
BOOTSTRAP = "bootstrap"  # the hook of a rank's first line
ERROR_FILE = "error_file"  # key of that line for the file in which torchrun looks for an exception
TARGETS = "targets"  # the hook of the lines with the state of each watched module

APPLIED = "applied"  # the hook is in place, or did its work
NOT_NEEDED = "not needed"  # nothing to do (already so, or absent in this torch)
OFF = "off"  # the profile says keep or off
FAILED = "failed"  # our hook failed; the job continues without it
OBSERVED = "observed"  # a value read back from torch
NOT_IMPORTED = "not imported"  # a target: the job has not loaded the module
MISSED = "missed"  # a target: loaded, but its hooks are not in place or came too late
FINISHED = "finished"  # "bootstrap": the script ended without an exception

WITHOUT_HOOKS = "a{}-without-hooks"  # an attempt's file of ranks that nobody waits for
RECYCLE = ".recycle.json"  # suffix of a recycle request's name
RECYCLE_STATUS = 77  # exit status of a process that asks for its replacement
PROGRESS = "progress"


def encode(
    *,
    run: str,
    attempt: int,
    hooks: "Mapping[str, Any]",
    mitigations: "Iterable[str]",
    receipts: "str | None",
    **others: "str | int | None",
) -> str:
    """Return the text of SAFERUN_INJECT. Keys are sorted: the same plan gives the same bytes.

    Args:
        run: the run's identifier.
        attempt: the number of the attempt, from 1 on.
        hooks: the profile's complete section `hooks`: a rank has no defaults of its own.
        mitigations: names of the mitigations in force.
        receipts: directory of the receipts; None if nothing can be written.
        others: optional values, left out if None: `state`, the directory that the run's processes
            share; `previous`, the exit status of a failed previous attempt, 128+n for signal n;
            `watch`, 1 if a watch may ask the ranks for their stacks; `start`, the checkpoint from
            which the attempt resumes, and how, if the launcher knows it; `imports`, 1 if ranks list
            the modules that they import.
    """
    import json

    contract = {
        "v": VERSION,
        "run": run,
        "attempt": attempt,
        "hooks": dict(hooks),
        "mitigations": list(mitigations),
        "receipts": receipts,
        **{key: value for key, value in others.items() if value is not None},
    }
    return json.dumps(contract, sort_keys=True, separators=(",", ":"))


def decode(text: str) -> "Contract":
    """Return the contract. Raises ValueError if the text is no contract of this version."""
    import json

    contract = json.loads(text)
    if not isinstance(contract, dict) or contract.get("v") != VERSION:
        raise ValueError("SAFERUN_INJECT has a version that this saferun does not support")
    missing = [key for key in ("run", "attempt", "hooks", "mitigations") if key not in contract]
    if missing or not isinstance(contract["hooks"], dict):
        raise ValueError("SAFERUN_INJECT lacks " + ", ".join(missing or ["a mapping of hooks"]))
    absent = dict.fromkeys(("receipts", "state", "previous", "watch", "imports", "start"))
    known: Contract = {**absent, **contract}  # type: ignore[typeddict-item]  # a JSON object
    return known


def mark_main(text: str, environ: "MutableMapping[str, str]", pid: int) -> None:
    """Mark the first Python of a job in its environment; a mark of an outer job does not count.

    Args:
        text: the value of SAFERUN_INJECT.
        environ: the environment that gets the mark.
        pid: the pid of this process.
    """
    try:
        place = "{1} {0}".format(*receipt_location(text))
    except ValueError:  # reported when the first hook needs the contract
        return
    if not environ.get(MAIN_MARK, "").endswith(" " + place):
        environ[MAIN_MARK] = f"{pid} {place}"


def receipt_location(text: str) -> "tuple[str | None, int]":
    """Return the directory of the receipts (None: nowhere) and the number of the attempt.

    This serves the start of a rank, in which the import of json (5 ms) would take the whole time
    allowed. It is exact, because no JSON string can contain an unescaped quote: a key that occurs
    once is the contract's own. Text in another form than that of `encode` is parsed.

    Raises:
        ValueError: as for `decode`.
    """
    attempt, receipts = _after(text, '"attempt":'), _after(text, '"receipts":')
    digits = attempt[: len(attempt) - len(attempt.lstrip("0123456789"))]
    if digits and receipts.startswith("null"):
        return None, int(digits)
    directory, closed, _ = receipts[1:].partition('"')
    if digits and closed and receipts.startswith('"') and "\\" not in directory:
        return directory, int(digits)
    contract = decode(text)
    return contract["receipts"], contract["attempt"]


def is_off(text: str, hook: str) -> bool:
    """Return whether a hook that is `on` or `off` is off, without parsing JSON."""
    return _after(text, f'"{hook}":').startswith('"off"')


def lists_imports(text: str) -> bool:
    """Return whether this start lists modules for the next one, without parsing JSON."""
    return _after(text, '"imports":').startswith("1")


def _after(text: str, key: str) -> str:
    # The text after a key that occurs exactly once; otherwise "".
    return text.partition(key)[2].lstrip(" ") if text.count(key) == 1 else ""


def receipt_name(attempt: int, restart: str, rank: "int | None", pid: int) -> str:
    """Return the file name of one process's receipt.

    Args:
        attempt: the number of the attempt, from 1 on.
        restart: torchrun's own count of restarts within the attempt.
        rank: None outside a group.
        pid: the pid of the process that writes it.
    """
    name = "none" if rank is None else rank
    return f"a{attempt}-r{restart}-rank{name}-pid{pid}.jsonl"
