"""Ranks are asked for the dumps of torch's flight recorder, as torch reads the pipe."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import until
from sandbox import text_of, write

from saferun.diagnosis.silence import RankSign
from saferun.planning.own_variables import DUMPS, PIPE
from saferun.supervise.watch.flight_dumps import LIMIT_S, FlightDumps

# As torch's thread does it: it makes the pipe, and writes a dump for what comes through it.
ANSWERS = """
import os, select, shutil, sys
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + os.environ["RANK"] + ".pipe"
os.mkfifo(pipe)
fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
print("open", flush=True)
select.select([fd], [], [])
shutil.copy(sys.argv[1], os.environ[sys.argv[2]] + os.environ["RANK"])
select.select([], [], [])
"""
ENTRY = {
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 1,
    "profiling_name": "nccl:send",
}


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[[str, bytes, dict[str, str]], RankSign]]:
    """Start rank 3 with these variables; it answers with a file, through the variable `name`."""
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, content: bytes, environ: dict[str, str]) -> RankSign:
        (tmp_path / "dump").write_bytes(content)
        command = [sys.executable, "-c", ANSWERS, str(tmp_path / "dump"), name]
        one = subprocess.Popen(command, env={**environ, "RANK": "3"}, stdout=subprocess.PIPE)
        running.append(one)
        assert one.stdout.readline() == b"open\n"
        return RankSign(3, one.pid, "S", 0.0, "")

    yield start
    for one in running:
        one.kill()
        one.communicate()


def variables(folder: Path, *dumps: str) -> dict[str, str]:
    return {PIPE: f"{folder}/pipe-", **{name: f"{folder}/{name}-" for name in dumps}}


@pytest.mark.parametrize("dumps", [DUMPS, DUMPS[1:]], ids=["torch 2.8 on", "before"])
def test_the_dump_that_comes_is_read(tmp_path, rank, dumps):
    content = pickle.dumps({"entries": [ENTRY]}, protocol=2)
    flight = FlightDumps([rank(dumps[0], content, variables(tmp_path, *dumps))], 0.0)
    until(lambda: flight.are_ready(0.0), "the dump")
    (call,) = flight.take()[3].calls
    assert (call.number, call.name) == (1, "send")


def test_an_older_dump_counts_for_nothing_and_a_broken_one_is_not_waited_for(tmp_path, rank):
    environ = variables(tmp_path, DUMPS[0])
    Path(environ[DUMPS[0]] + "3").write_bytes(pickle.dumps({"entries": [ENTRY]}))
    flight = FlightDumps([rank(DUMPS[0], b"broken", environ)], 0.0)
    assert not flight.are_ready(0.0)
    until(lambda: Path(environ[DUMPS[0]] + "3").read_bytes() == b"broken", "the dump")
    assert not flight.are_ready(LIMIT_S / 2)
    assert flight.are_ready(LIMIT_S)
    assert flight.take() == {}


def test_a_rank_without_the_pipe_is_not_asked(tmp_path):
    environ = variables(tmp_path, *DUMPS)
    one = subprocess.Popen(["sleep", "1000"], env=environ)
    try:
        sign = RankSign(3, one.pid, "S", 0.0, "")
        write(Path(f"{tmp_path}/pipe-3.pipe"), "")  # no pipe: nothing is written to it
        assert FlightDumps([sign], 0.0).are_ready(0.0)
        assert text_of(Path(f"{tmp_path}/pipe-3.pipe")) == ""
        os.unlink(f"{tmp_path}/pipe-3.pipe")
        os.mkfifo(f"{tmp_path}/pipe-3.pipe")  # nobody reads it: nobody waits
        assert FlightDumps([sign], 0.0).are_ready(0.0)
    finally:
        one.kill()
        one.wait()
