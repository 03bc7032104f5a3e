"""What a job writes arrives: every byte, in order, and not later than without us."""

import fcntl
import hashlib
import os
import select
import signal
import socket
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from cases import slow
from helpers import COMMON, DEADLINE_S, PROGRAMS, SOURCES, python, raw_pty, until
from sandbox import text_of
from supervised import supervised

MIB = 1 << 20
F_GETPIPE_SZ = 1032


def digest_of(fd: int, chunk: int = MIB) -> tuple[str, int]:
    """Read to the end; return the digest and the number of bytes."""
    digest, count = hashlib.sha256(), 0
    while True:
        try:
            data = os.read(fd, chunk)
        except OSError:  # a terminal's end
            data = b""
        if not data:
            return digest.hexdigest(), count
        digest.update(data)
        count += len(data)


def writer(blocks: int, tail: str = "") -> list[str]:
    """Return a command that writes so many MiB of every byte value in a fixed order."""
    code = f"""
import os
block = bytes(range(256)) * 4096
for i in range({blocks}):
    view = memoryview(block)
    while view: view = view[os.write(1, view):]
{tail}"""
    return python(code)


def expected(blocks: int) -> tuple[str, int]:
    digest = hashlib.sha256()
    for _ in range(blocks):
        digest.update(bytes(range(256)) * 4096)
    return digest.hexdigest(), blocks * MIB


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "python"])
def test_job_that_has_ended_as_asked_does_not_wait_for_a_reader_that_is_stuck(tmp_path, launcher):
    code = COMMON + "join('up')\nwhile True: os.write(1, bytes(65536))"
    with supervised(tmp_path, python(code), launcher=launcher, grace_s=600.0) as run:
        run.arrived(up=1)
        (job,) = run.members("up")
        until(lambda: "pipe" in text_of(Path(f"/proc/{job}/wchan")), "the pipe is full")
        run.process.terminate()
        run.process.wait(DEADLINE_S)  # of the ten minutes that the job has to end
        _, count = digest_of(run.process.stdout.fileno())
        assert count >= MIB
        assert run.ended()["exit_code"] == 128 + signal.SIGTERM
        run.nothing_lives()


COPIES = "from saferun.keeper import output_relay; output_relay.mover = lambda ends: None; "


def socket_pair() -> tuple[int, int]:
    """Return both ends of a socket, which the kernel moves nothing to."""
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


@pytest.mark.parametrize(
    ("ends", "in_keeper", "blocks"),
    [
        *((os.pipe, "", 20), (os.pipe, COPIES, 20), (raw_pty, COPIES, 20), (raw_pty, "", 20)),
        (socket_pair, "", 20),
        *slow((os.pipe, "", 1024)),
    ],
    ids=["pipe", "pipe, copied", "terminal, copied", "terminal", "socket", "1 GiB"],
)
def test_every_byte_is_carried(tmp_path, ends, in_keeper, blocks):
    ours, theirs = ends()
    code = f"import os; assert os.isatty(1) == {ends is raw_pty}\n{writer(blocks)[-1]}"
    with supervised(tmp_path, python(code), popen={"stdout": theirs}, in_keeper=in_keeper) as run:
        os.close(theirs)
        assert digest_of(ours) == expected(blocks)
        assert run.ended()["tails"][0] == (bytes(range(256)) * 1024).decode("latin-1")
        assert run.process.returncode == 0
    os.close(ours)


def test_memory_stays_small_at_any_volume(tmp_path):
    with supervised(tmp_path, writer(300, "import signal; signal.pause()")) as run:
        left = 300 * MIB
        while left:
            left -= len(os.read(run.process.stdout.fileno(), MIB))
        peak_kib = _peak_kib(run.pid("keeper"))
        run.kill("saferun", signal.SIGTERM)
    assert peak_kib < 32 * 1024


def _peak_kib(pid: int) -> int:
    lines = text_of(Path(f"/proc/{pid}/status")).splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("way", ["pipe", "terminal", "file"])
def test_lines_of_both_streams_keep_their_order_where_they_share_one_way(tmp_path, way):
    code = "for i in $(seq 500); do echo out $i; echo err $i >&2; done"
    ours, theirs = {"pipe": os.pipe, "terminal": raw_pty, "file": lambda: _file(tmp_path)}[way]()
    popen = {"stdout": theirs, "stderr": theirs}
    with supervised(tmp_path, ["sh", "-c", code], popen=popen) as run:
        os.close(theirs)
        data = b""
        if way == "file":
            run.process.wait()
        while chunk := _read(ours):
            data += chunk
        os.close(ours)
        assert run.ended()["merged"]
    wanted = [f"{name} {i}" for i in range(1, 501) for name in ("out", "err")]
    assert data.decode().split("\n")[:-1] == wanted


def _file(folder: Path) -> tuple[int, int]:
    theirs = os.open(folder / "log", os.O_CREAT | os.O_WRONLY)
    return os.open(folder / "log", os.O_RDONLY), theirs


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, MIB)
    except OSError:
        return b""


def test_output_arrives_while_the_job_runs(tmp_path):
    code = COMMON + "os.write(1, b'no newline'); join('agent'); stay()"
    with supervised(tmp_path, python(code)) as run:
        run.arrived(agent=1)
        assert select.select([run.process.stdout], [], [], DEADLINE_S)[0]
        assert os.read(run.process.stdout.fileno(), 100) == b"no newline"


def test_output_of_the_last_moment_is_not_lost(tmp_path):
    last = "os.write(1, b'x' * 65536); os.kill(os.getpid(), 9)"
    for _ in range(5):
        with supervised(tmp_path, python("import os\n" + last)) as run:
            run.ended()
            assert len(run.out) == 65536


def test_output_that_waits_for_a_slow_reader_when_the_job_ends_is_not_lost(tmp_path):
    size = 3 * MIB // 2  # more than the reader's pipe holds, less than that and ours
    code = (
        COMMON + f"join('agent'); data = bytes({size})\nwhile data: data = data[os.write(1, data):]"
    )
    with supervised(tmp_path, python(code)) as run:
        run.arrived(agent=1)
        agent = run.pid("agent")
        until(lambda: not Path(f"/proc/{agent}").exists())
        until(lambda: _is_full(run.process.stdout.fileno()))
        assert run.process.poll() is None  # it waits for the reader
        assert digest_of(run.process.stdout.fileno())[1] == size
        assert run.ended()["exit_code"] == 0


def test_output_of_a_rank_that_ends_while_the_keeper_makes_its_report_is_kept(tmp_path):
    drained = tmp_path / "drained"
    code = (
        COMMON
        + f"""
def write_late():
    while not os.path.exists({str(drained)!r}): time.sleep(0.01)
    os.write(1, b'late'); os._exit(0)
child('rank', write_late)
"""
    )
    late = text_of(PROGRAMS / "late_carrier.py") + f"\nhold_back({str(drained)!r})"
    with supervised(tmp_path, python(code), in_keeper=f"exec({late!r}); ") as run:
        run.ended()
        assert run.out == b"late"


def test_daemon_that_keeps_the_pipe_does_not_hold_us_and_may_go_on_writing(tmp_path):
    code = (
        COMMON
        + """
note()
def wait(number, frame): os.write(1, b'daemon'); join('wrote'); os._exit(0)
signal.signal(signal.SIGUSR1, wait)
child('daemon', os.setsid, orphan)
wait_for(ROSTER)
"""
    )
    with supervised(tmp_path, python(code)) as run:
        assert until(lambda: run.process.poll() is not None)
        run.kill("daemon", signal.SIGUSR1)
        run.arrived(wrote=1)
        assert run.process.stdout.read() == b"daemon"
        run.nothing_lives()


def test_slow_reader_slows_the_job_and_loses_nothing(tmp_path):
    code = COMMON + writer(8)[-1] + "\njoin('wrote')"
    with supervised(tmp_path, python(code)) as run:
        until(lambda: _is_full(run.process.stdout.fileno()))
        assert not run.members("wrote")
        assert digest_of(run.process.stdout.fileno(), 4096) == expected(8)
        assert run.ended()["exit_code"] == 0


def _is_full(fd: int) -> bool:
    waiting = fcntl.ioctl(fd, termios.FIONREAD, bytes(4))
    return int.from_bytes(waiting, sys.byteorder) >= fcntl.fcntl(fd, F_GETPIPE_SZ)


def test_reader_that_left_is_seen_by_the_job_as_a_broken_pipe(tmp_path):
    code = COMMON + "signal.signal(signal.SIGPIPE, signal.SIG_DFL); join('agent')"
    code += "\nwhile True: os.write(1, b'y\\n')"
    with supervised(tmp_path, python(code)) as run:
        run.arrived(agent=1)
        run.process.stdout.close()
        run.process.stdout = None
        assert run.ended()["exit_code"] == 128 + signal.SIGPIPE


def test_reader_that_left_before_the_first_byte_is_seen_at_the_first_byte(tmp_path):
    code = (
        COMMON
        + """
note('SIGUSR1'); join('agent')
while 'SIGUSR1' not in open(ROSTER).read(): time.sleep(0.01)
try: os.write(1, b'y')
except BrokenPipeError: sys.exit(9)
"""
    )
    with supervised(tmp_path, python(code)) as run:
        run.arrived(agent=1)
        run.process.stdout.close()
        run.process.stdout = None
        pipe = os.readlink(f"/proc/{run.pid('agent')}/fd/1")
        until(lambda: not any(_has(run.pid(who), pipe) for who in ("saferun", "keeper")))
        run.kill("agent", signal.SIGUSR1)
        assert run.ended()["exit_code"] == 9


def _has(pid: int, file: str) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        return file in [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)]
    except FileNotFoundError:  # one that was closed meanwhile
        return True


def test_reader_may_make_its_pipe_non_blocking(tmp_path):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with supervised(tmp_path, writer(5), popen={"stdout": writing}) as run:
        os.close(writing)
        until(lambda: _is_full(reading))
        assert digest_of(reading, 10000) == expected(5)
        assert run.ended()["exit_code"] == 0
    os.close(reading)


def test_job_gets_our_terminal_where_there_are_no_more_to_be_had(tmp_path):
    code = (
        "import os; from saferun.keeper import output_ends, output_relay\n"
        "def none(): raise OSError('out of pty devices')\n"
        "os.openpty = none; ends = output_ends.make(shared=False)\n"
        "streams = output_relay.Streams(ends, 100, 2); streams.start()\n"
        "assert streams.files == [1, 2] and streams.done() and streams.tails() == (b'', b'')"
    )
    ours, theirs = raw_pty()
    environ = {**os.environ, "PYTHONPATH": str(SOURCES)}
    subprocess.run(python(code), env=environ, stdout=theirs, stderr=theirs, check=True)
    os.close(ours)
    os.close(theirs)


def test_unread_output_does_not_keep_a_killed_job_alive(tmp_path):
    with supervised(tmp_path, writer(50)) as run:
        until(lambda: _is_full(run.process.stdout.fileno()))
        os.kill(run.pid("saferun"), signal.SIGKILL)
        run.nothing_lives()
