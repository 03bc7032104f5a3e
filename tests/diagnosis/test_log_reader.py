"""Logs of any size and from any launcher, scheduler or container become clean lines."""

# ruff: noqa: E501 (what programs print is not wrapped)

import json

import pytest
from job_logs import FULL_CARD, SUMMARY, TRACEBACK, diagnose, output

from saferun.diagnosis.foreign import long_log
from saferun.diagnosis.reading import log_reader

PLAIN = TRACEBACK + "ModuleNotFoundError: No module named 'apex'"


def prefixed(prefix: str) -> str:
    return "\n".join(prefix + line for line in PLAIN.splitlines())


# Who put the lines into the log -> the log, and the rank that its prefixes name.
SOURCES: dict[str, tuple[str | bytes, int | None]] = {
    "torch": (prefixed("[rank3]: "), 3),
    "torchrun --tee": (prefixed("[default12]:"), 12),
    "torchx": (prefixed("[trainer0|6]:"), 0),
    "torchx and NeMo-Run": (prefixed("i.pretrain/0 "), None),
    "torchx and torch": (prefixed("trainer/1 [rank4]: "), 4),
    "srun": (prefixed("7: "), 7),
    "srun and torch": (prefixed("2: [rank17]: "), 17),
    "mpirun": (prefixed("[1,5]<stderr>:"), 5),
    "determined": (prefixed("[2024-02-27T21:35:28.893536Z] fa88a9df [rank=4] || "), 4),
    "accelerate": (prefixed("stderr: [rank4]: "), 4),
    "a time and torch": (prefixed("2024-05-05 10:10:10 [rank4]: "), 4),
    "kubectl": (prefixed("2024-05-05T10:10:10.123456789Z stderr F "), None),
    "journald": (prefixed("Oct 04 15:02:41 host-a train[394]: "), None),
    "logging": (prefixed("[2024-05-05 10:10:10,123] "), None),
    "logging of the exception alone": (
        PLAIN.replace("ModuleNotFound", "[ERROR] ModuleNotFound"),
        None,
    ),
    "loguru": (prefixed("2024-05-05 10:10:10.123 | ERROR    | "), None),
    "a time": (prefixed("10:10:10 "), None),
    "a time in brackets": (prefixed("[10:10:10,123] "), None),
    "line numbers": (prefixed("[1830] "), None),
    "SageMaker": (prefixed("algo-1-ab12c  | "), None),
    "ray": (prefixed("(RayTrainWorker pid=81, ip=10.0.0.3) "), None),
    "pdsh": (prefixed("10.0.0.12: "), None),
    "pdsh by name": (prefixed("worker-0: "), None),
    "a named worker": (prefixed("[worker-0] "), None),
    "docker as JSON": (
        "\n".join(
            json.dumps({"log": f"{line}\n", "stream": "stderr"}) for line in PLAIN.split("\n")
        ),
        None,
    ),
    "colours and CRLF": ("\x1b[31m" + PLAIN.replace("\n", "\x1b[0m\r\n\x1b[1m"), None),
    "a progress bar": (
        "  3%|# | 3/100 [00:01<00:30]\r  4%|# | 4/100 [00:02<00:30]\r" + PLAIN,
        None,
    ),
    "invalid UTF-8": (b"\xff\xfe\x00bad \x80\xff bytes\n" + PLAIN.encode(), None),
    "a hole of zeros": (b"\0" * 5000 + b"[rank3]: " + PLAIN.splitlines()[-1].encode(), 3),
    "torchrun's summary": (
        PLAIN
        + "\nW1011 torch/distributed/elastic/agent/server/api.py:1] x\n"
        + SUMMARY.format(rank=9, code=1),
        9,
    ),
}


def test_the_same_failure_is_read_from_any_kind_of_log():
    found = {source: diagnose(log) for source, (log, _) in SOURCES.items()}
    assert {source: (one.kind, one.root_rank) for source, one in found.items()} == {
        source: ("user-import-error", rank) for source, (_, rank) in SOURCES.items()
    }


def test_a_boxed_traceback_is_read_without_its_border():
    assert log_reader.strip_prefixes('│   File "a.py", line 3      │') == (
        None,
        '    File "a.py", line 3  ',
    )


def test_a_line_copied_from_a_screen_begins_after_the_blanks_to_its_edge():
    line = "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 0"
    assert diagnose(f"step 41 loss 2.5{' ' * 30}{line}\n").root_line == line


def test_the_failure_is_found_in_the_middle_of_a_long_log():
    noise = output(60_000).encode()
    tail = b"".join(b"frame #%d: <unknown function>\n" % n for n in range(60_000))
    cause = ("[rank3]: " + (TRACEBACK + FULL_CARD).replace("\n", "\n[rank3]: ") + "\n").encode()
    log = long_log.read([noise, cause, tail[: len(tail) // 2], tail[len(tail) // 2 :]])
    rows = [line.text for line in log.lines if line.rank == 3]
    assert rows[-1] == FULL_CARD
    assert log.lines[-2].text == "frame #59999: <unknown function>"
    assert not log.whole


@pytest.mark.parametrize("chunk", [997, 65536, 4 << 20])
def test_how_a_stream_is_cut_into_chunks_does_not_matter(chunk):
    data = (output(40_000) + TRACEBACK + "KeyError: 'mid'\n" + output(40_000)).encode()
    cut = long_log.read(data[at : at + chunk] for at in range(0, len(data), chunk))
    (line,) = (line for line in cut.lines if "KeyError" in line.text)
    assert (line.text, line.number) == ("KeyError: 'mid'", 40_004)
    assert cut.line_count == data.count(b"\n") + 1


@pytest.mark.parametrize(
    "chunk",
    [b"loss error 1.2 \r" * 65536, b"Error(((( " * 104857, (TRACEBACK + "KeyError: 1\n").encode() * 9000],
    ids=["a progress bar", "one endless line", "nothing but tracebacks"],
)  # fmt: skip
def test_what_is_kept_of_a_log_is_bounded(chunk):
    log = long_log.read(chunk for _ in range(20))
    ends = long_log.HEAD_BYTES + long_log.TAIL_BYTES
    bound = ends + long_log.FIRST_BYTES + long_log.LAST_BYTES
    assert sum(len(line.text) for line in log.lines) <= bound
    assert len(log.lines) < 60_000
