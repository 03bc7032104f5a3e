"""The keeper's table and its messages, without a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers import SOURCES

from saferun.keeper import keeper, protocol
from saferun.keeper.keeper import Keeper
from saferun.keeper.output_relay import Streams

MESSAGES: list[protocol.Message] = [
    protocol.Prepare(
        ["python", "-s"], {"A": "\udcff"}, "/bin/torchrun", ["torchrun"], [1], None, True
    ),
    protocol.Start(["a", "b"], {"B": ""}, True, "why", "MARK", [2], [3], None, 5, "/dev/nvidia"),
    protocol.Signal(15, [1, 2]),
    protocol.Signal(15, None),
    protocol.Resize(),
    protocol.Kill(),
    protocol.Started(7, True, ""),
    protocol.Released(1),
    protocol.Exited(0.5, None),
    protocol.Ended(9, 1, [2], b"out", b"err\0", b"o", b"e", True, False),
    protocol.Failed("No such file", "b"),
]


def test_messages_arrive_as_they_were_sent_whatever_the_pieces():
    reading, writing = os.pipe()
    for message in MESSAGES:
        protocol.send(writing, message)
    os.close(writing)
    whole = os.read(reading, 1 << 16)
    os.close(reading)
    for size in (1, 7, len(whole)):
        ours, theirs = os.pipe()
        inbox, received = protocol.Inbox(ours), []
        for at in range(0, len(whole), size):
            os.write(theirs, whole[at : at + size])
            received += inbox.read()
        os.close(theirs)
        assert inbox.first() is None
        os.close(ours)
        assert received == MESSAGES
        assert [type(one) for one in received] == [type(one) for one in MESSAGES]


def test_every_command_is_expected_while_there_is_a_job():
    commands = (protocol.Signal, keeper.SIGNAL_RANKS, protocol.Resize, protocol.Kill, keeper.CLOSED)
    for state in keeper.WITH_JOB:
        assert all((state, command) in keeper.TABLE for command in commands), state


def test_command_that_no_state_expects_is_an_error_of_ours():
    reading, writing = os.pipe()
    null = os.open(os.devnull, os.O_WRONLY)
    job = Keeper(Streams((), 0, null), protocol.Inbox(reading), null, (), null)
    with pytest.raises(RuntimeError, match="Keeper: no event `Kill` in state `waiting`"):
        job.step(protocol.Kill)
    for fd in (reading, writing, null):
        os.close(fd)


def test_keeper_loads_neither_typing_nor_anything_of_saferun_but_its_room():
    code = (
        f"import sys; sys.path.append({str(SOURCES)!r}); before = set(sys.modules);"
        "from saferun.keeper import keeper_main, output_relay;"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert not loaded & {"typing", "dataclasses", "subprocess", "re", "contextlib"}
    ours = {name for name in loaded if name.startswith("saferun.")}
    assert {name.split(".")[1] for name in ours} == {"keeper"}
    assert "saferun.keeper.warm_agent" not in loaded
