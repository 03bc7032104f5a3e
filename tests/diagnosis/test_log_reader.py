"""Logs of any size and from any launcher, scheduler or container become clean lines."""

# ruff: noqa: E501 (what programs print is not wrapped)

from __future__ import annotations

import json

import pytest
from job_logs import FULL_CARD, SUMMARY, TRACEBACK, diagnose, output

from saferun.diagnosis import log_reader

PLAIN = TRACEBACK + "ModuleNotFoundError: No module named 'apex'"


def prefixed(prefix: str) -> str:
    return "\n".join(prefix + line for line in PLAIN.splitlines())


@pytest.mark.parametrize(
    ("log", "rank"),
    [
        (prefixed("[rank3]: "), 3),
        (prefixed("[default12]:"), 12),
        (prefixed("7: "), 7),
        (prefixed("[1,5]<stderr>:"), 5),
        (prefixed("2024-05-05T10:10:10.123456789Z stderr F "), None),
        (prefixed("Oct 04 15:02:41 host-a train[394]: "), None),
        (prefixed("[2024-05-05 10:10:10,123] "), None),
        (prefixed("trainer-1  | "), None),
        (prefixed("(RayTrainWorker pid=81, ip=10.0.0.3) "), None),
        (prefixed("2024-05-05 10:10:10 [rank4]: "), 4),
        (prefixed("[trainer0|6]:"), 0),
        (prefixed("stderr: [rank4]: "), 4),
        (prefixed("[1830] "), None),
        (prefixed("2: [rank17]: "), 17),
        (prefixed("[2024-02-27T21:35:28.893536Z] fa88a9df [rank=4] || "), 4),
        (prefixed("10.0.0.12: "), None),
        (prefixed("worker-0: "), None),
        (prefixed("[worker-0] "), None),
        (prefixed("algo-1-ab12c  | "), None),
        (prefixed("10:10:10 "), None),
        (prefixed("[10:10:10,123] "), None),
        (prefixed("2024-05-05 10:10:10.123 | ERROR    | "), None),
        (PLAIN.replace("ModuleNotFound", "[ERROR] ModuleNotFound"), None),
        ("\x1b[31m" + PLAIN.replace("\n", "\x1b[0m\r\n\x1b[1m"), None),
        ("  3%|# | 3/100 [00:01<00:30]\r  4%|# | 4/100 [00:02<00:30]\r" + PLAIN, None),
        ("\n".join(json.dumps({"log": line + "\n", "stream": "stderr", "time": "t"}) for line in PLAIN.splitlines()), None),
        (b"\xff\xfe\x00bad \x80\xff bytes\n" + PLAIN.encode(), None),
        (b"\0" * 5000 + b"[rank3]: " + PLAIN.splitlines()[-1].encode(), 3),
        (PLAIN + "\nW1011 torch/distributed/elastic/agent/server/api.py:1] x\n" + SUMMARY.format(rank=9, code=1), 9),
    ],
    ids=[
        "rank", "tee", "srun", "mpirun", "kubectl", "journald", "logger", "compose", "ray", "two prefixes",
        "torchx", "accelerate", "numbered", "srun and rank", "determined", "pdsh",
        "pdsh by name", "named worker", "SageMaker", "time", "time in brackets", "loguru",
        "a logger's exception",
        "ansi and crlf", "progress bar", "docker json", "invalid utf-8", "a hole of zeros", "rank from the summary",
    ],
)  # fmt: skip
def test_the_same_failure_is_read_from_any_kind_of_log(log, rank):
    found = diagnose(log)
    assert (found.kind, found.root_rank) == ("user-import-error", rank)


def test_a_line_copied_from_a_screen_begins_after_the_blanks_to_its_edge():
    line = "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 0"
    assert diagnose(f"step 41 loss 2.5{' ' * 30}{line}\n").root_line == line


def test_the_failure_is_found_in_the_middle_of_a_long_log():
    noise = output(60_000).encode()
    tail = b"".join(b"frame #%d: <unknown function>\n" % n for n in range(60_000))
    cause = ("[rank3]: " + (TRACEBACK + FULL_CARD).replace("\n", "\n[rank3]: ") + "\n").encode()
    log = log_reader.read([noise, cause, tail[: len(tail) // 2], tail[len(tail) // 2 :]])
    rows = [line.text for line in log.lines if line.rank == 3]
    assert rows[-1] == FULL_CARD
    assert not log.whole


@pytest.mark.parametrize("chunk", [997, 65536, 4 << 20])
def test_how_a_stream_is_cut_into_chunks_does_not_matter(chunk):
    data = (output(40_000) + TRACEBACK + "KeyError: 'mid'\n" + output(40_000)).encode()
    whole = log_reader.read([data])
    cut = log_reader.read(data[at : at + chunk] for at in range(0, len(data), chunk))
    middle = [line for line in cut.lines if "KeyError" in line.text]
    assert middle == [line for line in whole.lines if "KeyError" in line.text]
    assert middle[0].number == 40_004
    assert (cut.line_count, cut.size_bytes) == (whole.line_count, whole.size_bytes)


@pytest.mark.parametrize(
    "chunk",
    [b"loss error 1.2 \r" * 65536, b"Error(((( " * 104857, (TRACEBACK + "KeyError: 1\n").encode() * 9000],
    ids=["a progress bar", "one endless line", "nothing but tracebacks"],
)  # fmt: skip
def test_what_is_kept_of_a_log_is_bounded(chunk):
    log = log_reader.read(chunk for _ in range(20))
    bound = (
        log_reader.HEAD_BYTES
        + log_reader.TAIL_BYTES
        + log_reader.FIRST_BYTES
        + log_reader.LAST_BYTES
    )
    assert sum(len(line.text) for line in log.lines) <= bound
    assert len(log.lines) < 60_000
