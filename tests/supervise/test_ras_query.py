"""NCCL's RAS is asked twice at the address that a rank has for it, and nobody waits for it."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from helpers import until
from ras_server import of_ranks, ras

from saferun.diagnosis.silence import RankSign
from saferun.supervise.watch.ras_query import BETWEEN_S, LIMIT_S, RasQuery

READS = "import sys; print('here', flush=True); sys.stdin.read()"


@contextlib.contextmanager
def two_ranks(**environ: str) -> Iterator[list[RankSign]]:
    with contextlib.ExitStack() as stack:
        pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        found = []
        for rank in range(2):
            command = [sys.executable, "-S", "-c", READS]
            one = stack.enter_context(subprocess.Popen(command, env=environ, **pipe))
            stack.callback(one.kill)
            one.stdout.readline()
            found.append(RankSign(rank, one.pid, "S", 0.0, ""))
        yield found


def asked(ranks: list[RankSign], **how: bool) -> RasQuery:
    """Return a query that has been looked at until it is ready; the clock moves by itself."""
    query, clock = RasQuery(ranks, 0.0, **{"is_wanted": True, **how}), [0.0]

    def is_ready() -> bool:
        clock[0] += BETWEEN_S / 10 if clock[0] < LIMIT_S - 2 else 0.0
        return query.are_ready(clock[0])

    until(is_ready, "both answers")
    return query


def test_two_answers_that_stand_still_name_the_rank_that_is_behind():
    questions: list[bytes] = []

    def answer(question: bytes) -> bytes:
        questions.append(question)
        return of_ranks({one.rank: (one.pid, 41 - one.rank) for one in ranks})

    with ras(answer) as address, two_ranks(NCCL_RAS_ADDR=address) as ranks:
        found = asked(ranks).finding()
    assert found.ranks == (1,)
    assert questions == [b"CLIENT PROTOCOL 2\nSET FORMAT json\nVERBOSE STATUS\n"] * 2


@pytest.mark.parametrize("other", [b"", b"NCCL version 2.20.3\n"])
def test_another_server_or_one_that_ends_tells_nothing(other):
    questions: list[bytes] = []
    with (
        ras(lambda question: questions.append(question) or other) as address,
        two_ranks(NCCL_RAS_ADDR=address) as ranks,
    ):
        assert asked(ranks).finding() is None
    assert len(questions) == 1, "it is not asked again"


def test_nobody_is_asked_where_nobody_can_answer():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    for environ in ({"NCCL_RAS_ADDR": f"127.0.0.1:{free}"}, {"NCCL_RAS_ENABLE": "0"}):
        with two_ranks(**environ) as ranks:
            assert asked(ranks).finding() is None
    with two_ranks(NCCL_RAS_ADDR="ras.example.org:1") as ranks:
        assert RasQuery(ranks, 0.0, is_wanted=True).are_ready(0.0)
    mine = [RankSign(0, os.getpid(), "S", 0.0, ""), RankSign(1, os.getppid(), "S", 0.0, "")]
    assert RasQuery(mine, 0.0, is_wanted=False).are_ready(0.0)


def test_one_that_never_answers_is_left_after_the_limit():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with two_ranks(NCCL_RAS_ADDR=address) as ranks:
            query = RasQuery(ranks, 0.0, is_wanted=True)
            assert not query.are_ready(0.0)
            assert not query.are_ready(LIMIT_S / 2)
            assert query.are_ready(LIMIT_S)
            assert query.finding() is None
