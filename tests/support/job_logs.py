"""Logs of failed jobs, in short renderings of our own, and their diagnosis."""

import functools
from typing import Any

from repo import RECORDS, read_yaml
from sandbox import text_of

from saferun.diagnosis import signatures
from saferun.diagnosis.deciding import classify
from saferun.diagnosis.diagnosis import Diagnosis
from saferun.diagnosis.evidence import Evidence
from saferun.diagnosis.foreign import long_log

KNOWN = signatures.load()
TRACEBACK = (
    'Traceback (most recent call last):\n  File "/w/train.py", line 88, in <module>\n    main()\n'
)
TIMEOUT = (
    "[rank0]:[E ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=91, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600010 milliseconds."
)
FULL_CARD = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total "
    "capacity of 23.64 GiB of which 1.10 GiB is free. Including non-PyTorch memory, this process "
    "has 22.53 GiB memory in use. Of the allocated memory 21.70 GiB is allocated by PyTorch, and "
    "390.11 MiB is reserved by PyTorch but unallocated."
)
# What torchrun prints at the end: `rank` failed first with `code`, and rank 0 was terminated.
SUMMARY = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
train.py FAILED
Failures:
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 10)
Root Cause (first observed failure):
[1]:
  time      : 2025-08-01_11:36:44
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 11)
"""


def diagnose(log: str | bytes, **known: Any) -> Diagnosis:
    """Return what a log of any origin means, with other evidence by name."""
    data = log if isinstance(log, bytes) else log.encode()
    return classify.classify(Evidence(log=long_log.read([data]), **known), KNOWN)


def output(count: int, text: str = "step {} loss 2.5 tok/s 1234") -> str:
    """Return the lines of a job that makes steps."""
    return "".join(text.format(number) + "\n" for number in range(count))


@functools.cache
def table(name: str) -> list[dict[str, Any]]:
    """Return the rows of a table of failures: kind, log, and name and exit_code where given."""
    rows: list[dict[str, Any]] = read_yaml(text_of(RECORDS / "failures" / f"{name}.yaml"))
    return rows


def wrongly_diagnosed(rows: list[dict[str, Any]]) -> list[str]:
    """Return one line for each row of a table that gets another kind than the row's."""
    wrong = []
    for row in rows:
        found = diagnose(row["log"], exit_code=row.get("exit_code")).kind
        if found != row["kind"]:
            wrong.append(f"{row.get('name') or row['log'][:60]}: {found}, not {row['kind']}")
    return wrong
