"""Files, devices and descriptors that a job is given are its own."""

import os
import subprocess

import pytest
from helpers import python
from sandbox import shell, text_of, write
from supervised import supervised


@pytest.mark.parametrize("flag", [os.O_APPEND, 0], ids=["append", "from where it stands"])
def test_regular_file_is_the_jobs_own_and_its_end_is_read_back(tmp_path, flag):
    log = tmp_path / "log"
    write(log, "old\n")
    fd = os.open(log, os.O_WRONLY | flag)
    os.lseek(fd, 4, os.SEEK_SET)
    code = "stat -Lc %F /proc/self/fd/1; head -c 300000 /dev/zero; echo end"
    with supervised(tmp_path, ["sh", "-c", code], popen={"stdout": fd}, tail_bytes=1000) as run:
        os.close(fd)
        ended = run.ended()
    assert log.read_bytes() == b"old\nregular file\n" + bytes(300000) + b"end\n"
    assert ended["tails"][0] == "\0" * 996 + "end\n"


def test_old_text_in_a_file_is_no_part_of_the_tail_and_input_is_the_jobs_own(tmp_path):
    fd = os.open(tmp_path / "log", os.O_CREAT | os.O_RDWR | os.O_APPEND)
    os.write(fd, b"NCCL error of yesterday\n")
    with supervised(tmp_path, ["cat"], popen={"stdin": subprocess.PIPE, "stdout": fd}) as run:
        os.close(fd)
        run.process.stdin.write(b"today\n")
        run.process.stdin.close()
        run.process.stdin = None
        assert run.ended()["tails"][0] == "today\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors_do_not_mix_with_ours(tmp_path, closed):
    inner = python("import os; os.write(1, b'out'); os.write(2, b'err')")
    shell = ["bash", "-c", f'"$@" {closed}', "-"]
    with supervised(tmp_path, inner, prefix=shell) as run:
        assert run.ended()["exit_code"] == 0
        assert run.out == (b"" if " >&-" in " " + closed else b"out")


def test_device_is_the_jobs_own(tmp_path):
    full = os.open("/dev/full", os.O_WRONLY)
    with supervised(
        tmp_path, python("import os; os.write(1, b'x')"), popen={"stdout": full}
    ) as run:
        os.close(full)
        assert run.ended()["exit_code"] == 1
        assert b"No space left" in run.err


def test_end_of_what_goes_to_the_null_device_is_kept(tmp_path):
    null = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with supervised(tmp_path, ["sh", "-c", "echo x; echo y >&2"], popen=null) as run:
        assert run.ended()["tails"][0] == "x\ny\n"


def test_descriptors_beyond_the_three_are_the_jobs_own(tmp_path):
    opened = f"exec 3>{shell(tmp_path / 'three')} 4>{shell(tmp_path / 'four')}"
    prefix = ["bash", "-c", f'{opened}; "$@"', "-"]
    with supervised(tmp_path, ["sh", "-c", "echo c >&3; echo d >&4"], prefix=prefix) as run:
        assert run.ended()["exit_code"] == 0
    assert text_of(tmp_path / "three") + text_of(tmp_path / "four") == "c\nd\n"
