"""The versioned JSON that saferun and the processes of a job exchange.

To the job: the environment variable SAFERUN_INJECT. From the job: one receipt file for each process
that was started as a rank, became one or compiled something. A receipt file has one JSON object a
line; lines are appended and never rewritten. A process that was started as a rank writes a line at
its start, with the hook "bootstrap": where that line is missing, the hooks did not run in that
process. It writes a second one when its script has ended: what kills the process after that kills a
process that has done its work.

    SAFERUN_INJECT   {"v": 1, "run": ID, "attempt": N, "hooks": {…}, "mitigations": […],
                      "receipts": DIRECTORY or null,
                      "state": DIRECTORY (launcher: python, or hooks.optuna.mode: on),
                      "previous": EXIT STATUS (where the attempt before this one failed),
                      "watch": 1 (where it is on),
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

`state` is a directory that all processes of a run (of one worker) share. A process that is to be
replaced writes a recycle request and ends with RECYCLE_STATUS; `progress` counts what it has done
for good. Its file PROGRESS there has one byte for each such piece of work, so that a process that
is killed has counted, too.

torchrun's agent sets SAFERUN_AGENT_PID for its ranks: "PID", or "PID NAMESPACE" where every process
that it starts is a Python (no --no-python, no PYTHON_EXEC). In the second case a Python that finds
no such agent is a rank whose agent died while the rank started. NAMESPACE is the pid namespace in
which PID counts.

The Python that the agent started as a rank sets SAFERUN_RANK_PID to its own pid. Each helper of the
rank inherits the variable and so knows that it is not the rank process itself.
"""

TYPE_CHECKING = False  # every Python of a job loads this file: no import, annotations in quotes
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
MAIN_MARK = "SAFERUN_MAIN_PID"  # the job's first Python that is no rank; its helpers inherit it
START = "SAFERUN_START"  # how a rank was started, where ranks may be warm
AGENT_MARK = "SAFERUN_AGENT_PID"  # torchrun's agent, whose children are the ranks
VERSION = 1  # raise it with each key that a hook gains: ranks know no defaults

STACKS = ".stacks"  # the ending of the file that a rank's stacks go to, beside its receipt
STACKS_SIGNAL = 53  # a real-time signal (signal(7)) on which faulthandler writes them
TIMES = ".times"  # the ending of the file that the times of a rank's collectives go to
TIMES_SIGNAL = 54  # on which the rank writes it (collective_times.py)
TIMING_SIGNAL = 55  # the same, and NCCL's collectives are timed on the GPU from now on
BOOTSTRAP = "bootstrap"  # the hook of a rank's first line
ERROR_FILE = "error_file"  # what that line calls the file in which torchrun looks for an exception
TARGETS = "targets"  # the hook of the lines that tell the state of each watched module

APPLIED = "applied"  # the hook is in place, or did its work
NOT_NEEDED = "not needed"  # nothing to do here (already so, no such thing in this torch)
OFF = "off"  # the profile says keep or off
FAILED = "failed"  # our hook failed; the job goes on without it
OBSERVED = "observed"  # a value read back from torch
NOT_IMPORTED = "not imported"  # a target: the job has not loaded the module
MISSED = "missed"  # a target: it is loaded, and its hooks do not hold or did not from its start
FINISHED = "finished"  # "bootstrap": the script came to its end, without an exception

RECYCLE = ".recycle.json"  # the ending of a recycle request's name
RECYCLE_STATUS = 77  # the exit status of a process that asks to be replaced
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
        hooks: the profile's section `hooks`, whole: a rank has no defaults of its own.
        mitigations: names of the mitigations in force.
        receipts: directory of the receipts; None where nothing can be written.
        others: left out where None: `state`, the directory that the processes of the run share,
            `previous`, the exit status of the attempt before, 128+n for signal n, where that
            failed, `watch`, 1 where a watch may ask the ranks for their stacks, and `start`, what
            the attempt goes on from, and how, where the launcher knows it; `imports`, 1 where ranks
            list the modules that they import.
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
    """Return the contract. Raises ValueError for text that is no contract of this version."""
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
    """Note the first Python of a job in its environment; one of an outer job's does not count.

    Args:
        text: SAFERUN_INJECT.
        environ: where the note stands.
        pid: of this process.
    """
    try:
        place = "{1} {0}".format(*receipt_location(text))
    except ValueError:  # reported when the first hook needs the contract
        return
    if not environ.get(MAIN_MARK, "").endswith(" " + place):
        environ[MAIN_MARK] = f"{pid} {place}"


def receipt_location(text: str) -> "tuple[str | None, int]":
    """Return the directory of the receipts (None: nowhere) and the number of the attempt.

    For the start of a rank, where the import of json (5 ms) would take the whole allowance. Exact,
    because no JSON string can hold an unescaped quote: a key that occurs once is the contract's
    own. Text that is not as `encode` writes it is parsed.

    Raises:
        ValueError: as `decode` does.
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
    """Return whether a hook that is `on` or `off` is off, without parsing the JSON."""
    return _after(text, f'"{hook}":').startswith('"off"')


def lists_imports(text: str) -> bool:
    """Return whether the next start imports what this one lists, without parsing the JSON."""
    return _after(text, '"imports":').startswith("1")


def _after(text: str, key: str) -> str:
    # The text after a key that occurs exactly once; "" otherwise.
    return text.partition(key)[2].lstrip(" ") if text.count(key) == 1 else ""


def receipt_name(attempt: int, restart: str, rank: "int | None", pid: int) -> str:
    """Return the file name of one process's receipt.

    Args:
        attempt: the number of the attempt, from 1 on.
        restart: torchrun's own count of restarts within the attempt.
        rank: None outside a group.
        pid: of the process that writes it.
    """
    name = "none" if rank is None else rank
    return f"a{attempt}-r{restart}-rank{name}-pid{pid}.jsonl"
