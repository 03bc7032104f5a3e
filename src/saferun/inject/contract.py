"""What saferun and the processes of a job tell each other, as versioned JSON.

In: the environment variable SAFERUN_INJECT. Out: one receipt file for each process that was
started as a rank, became one or compiled something, with one JSON object a line, appended and
never rewritten. A process that was started as a rank says so at its start, hook "bootstrap": that
line's absence is how the supervisor knows that the hooks did not run there. A second one says that
its script has come to its end: what kills the process after that kills a finished one.

    SAFERUN_INJECT   {"v": 1, "run": ID, "attempt": N, "hooks": {…}, "mitigations": […],
                      "receipts": DIRECTORY or null}
    receipt line     {"v": 1, "at": UNIX SECONDS, "pid": N, "rank": N or null, "hook": NAME,
                      "outcome": OUTCOME, …what the hook adds, "effective" among it}
      "bootstrap" adds "local_rank" and "local_world_size" (N or null)

SAFERUN_AGENT_PID is set by torchrun's agent for its ranks: "PID", or "PID NAMESPACE" where all that
it starts are Pythons of its own (no --no-python, no PYTHON_EXEC), so that one that finds the agent
gone is a rank whose agent died while it started. NAMESPACE is the pid namespace that PID counts in.

SAFERUN_RANK_PID is ours alone: the Python that torchrun's agent itself started as a rank writes
its pid there, and every helper that inherits it knows that it is not the rank process itself.
"""

TYPE_CHECKING = False  # arming a Python imports nothing; hence the annotations in quotes
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

VARIABLE = "SAFERUN_INJECT"
RANK_MARK = "SAFERUN_RANK_PID"  # pid of the Python that is the rank; its helpers inherit it
AGENT_MARK = "SAFERUN_AGENT_PID"  # torchrun's agent, whose children are the ranks
VERSION = 1

BOOTSTRAP = "bootstrap"  # the hook of a rank's first line

APPLIED = "applied"  # the hook is in place, or did its work
NOT_NEEDED = "not needed"  # nothing to do here (already so, no such thing in this torch)
OFF = "off"  # the profile says keep or off
FAILED = "failed"  # ours failed; the job went on without it
OBSERVED = "observed"  # a value read back from torch
FINISHED = "finished"  # of "bootstrap": the script came to its end, without an exception


def encode(
    *,
    run: str,
    attempt: int,
    hooks: "Mapping[str, Any]",
    mitigations: "Iterable[str]",
    receipts: "str | None",
) -> str:
    """Return the text of SAFERUN_INJECT. Keys are sorted: the same plan gives the same bytes."""
    import json

    return json.dumps(
        {
            "v": VERSION,
            "run": run,
            "attempt": attempt,
            "hooks": hooks,
            "mitigations": list(mitigations),
            "receipts": receipts,
        },
        sort_keys=True,
        separators=(",", ":"),
    )


def decode(text: str) -> "dict[str, Any]":
    """Return the contract as a dict. Raises ValueError for what is no contract of this version."""
    import json

    contract = json.loads(text)
    if not isinstance(contract, dict) or contract.get("v") != VERSION:
        raise ValueError("SAFERUN_INJECT has a version that this saferun does not speak")
    missing = [key for key in ("run", "attempt", "hooks", "mitigations") if key not in contract]
    if missing or not isinstance(contract["hooks"], dict):
        raise ValueError("SAFERUN_INJECT lacks " + ", ".join(missing or ["a mapping of hooks"]))
    return contract


def whereabouts(text: str) -> "tuple[str | None, int]":
    """Return the directory of the receipts (None: nowhere) and the number of the attempt.

    For a rank's start, where json's import (5 ms) is the whole allowance. Exact, since no JSON
    string can hold an unescaped quote: a key that stands there once is the contract's own. What is
    not as `encode` writes it, is parsed.

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
    return contract.get("receipts"), contract["attempt"]


def _after(text: str, key: str) -> str:
    # What follows a key that stands in the text exactly once; "" otherwise.
    return text.partition(key)[2].lstrip(" ") if text.count(key) == 1 else ""


def receipt_name(attempt: int, restart: str, rank: "int | None", pid: int) -> str:
    """Return the file name of one process's receipt; `rank` is None outside a group."""
    return "a{}-r{}-rank{}-pid{}.jsonl".format(
        attempt, restart, "none" if rank is None else rank, pid
    )
