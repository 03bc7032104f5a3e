"""The keeper's table and its messages, without a process."""

import os

from saferun.keeper import protocol

MESSAGES: list[protocol.Message] = [
    protocol.Prepare(
        ["python", "-s"], {"A": "\udcff"}, "/bin/torchrun", ["torchrun"], [1], None, True
    ),
    protocol.Start(["a", "b"], {"B": ""}, True, [2], [3], None, "why", "MARK", 5, "/dev/nvidia"),
    protocol.Signal(15, [1, 2]),
    protocol.Signal(15, None),
    protocol.Resize(),
    protocol.Kill(),
    protocol.Started(7, True, ""),
    protocol.Released(1),
    protocol.Exited(0.5, None),
    protocol.Ended(9, 1, [2], (b"out", b"err\0"), (b"o", b"e"), True, False),
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
