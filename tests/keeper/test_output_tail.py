"""The end of a job's output in a memory file, which another process reads while it grows."""

import os
import random

from saferun.keeper.output_tail import MEMORY, Tail, shown

NAME = f"{MEMORY}of-this-test"  # another test's relay may still hold a file of the usual names


def memory_files(name: str = NAME) -> list[str]:
    """The paths of this process's memory files of that name."""
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [path for path in paths if os.path.islink(path) and name in os.readlink(path)]


def test_whoever_may_look_into_the_process_reads_the_last_bytes():
    assert shown(b"") is None
    assert shown((3).to_bytes(8, "little") + (4).to_bytes(8, "little") * 2 + b"moved") is None
    tail, whole, chance = Tail(100, NAME), b"", random.Random(1)
    for _ in range(500):
        piece = bytes(chance.choices(range(256), k=chance.choice([1, 3, 40, 99, 100, 101, 250])))
        whole += piece
        tail.add(memoryview(piece))
        assert tail.read() == whole[-100:]
        (path,) = memory_files()
        with open(path, "rb") as file:
            found = shown(file.read())
        assert found[0] % 2 == 0
        assert found[1][-100:] == whole[-100:]
        assert found[2] > 0
    assert found[0] > 0  # bytes were moved
    del tail
    assert memory_files() == []
