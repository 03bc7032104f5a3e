"""What /proc shows of a job's processes."""

import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import pytest
from helpers import until

from saferun.diagnosis.silence import TERMINAL, Look
from saferun.supervise.watch import work_signs


@pytest.fixture
def job() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are ended, with what they have started."""
    running: list[subprocess.Popen[bytes]] = []
    yield running
    for one in running:
        for pid in reversed(work_signs.everyone([one.pid])):
            os.kill(pid, 9)
        one.wait()
        for stream in (one.stdin, one.stdout):
            if stream:
                stream.close()


def observed(one: subprocess.Popen[bytes]) -> Look:
    found = work_signs.observe_job(one.pid, 0.0, work_signs.tree())
    assert found is not None
    return found


def python(code: str, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    "code", ["input()", "import readline; input()", "import sys; sys.stdin.read()"]
)
def test_a_rank_that_reads_a_terminal_waits_for_a_person(job, code):
    controller, terminal = pty.openpty()
    job.append(python(code, stdin=terminal, stdout=terminal))
    until(lambda: observed(job[0]).ranks[0].waits_in == TERMINAL, "it reads")
    os.close(controller)
    os.close(terminal)


def test_a_rank_that_reads_a_pipe_is_shown_with_its_name_and_waits_for_no_person(job, tmp_path):
    os.mkfifo(tmp_path / "data")
    kept = os.open(tmp_path / "data", os.O_RDWR)  # the reader gets past open(2)
    job.append(python(f"open({str(tmp_path / 'data')!r}).read()"))
    until(
        lambda: observed(job[0]).ranks[0].waits_in.endswith(f" on {tmp_path / 'data'}"), "it reads"
    )
    os.close(kept)


def test_what_other_programs_do_below_a_rank_counts_apart(job):
    code = "import subprocess; subprocess.run(['sh', '-c', '{}; exec sleep 1000'])"
    job.append(python(code.format("head -c 9000000 /dev/zero | cat > /dev/null")))
    until(lambda: observed(job[0]).naps, "it sleeps")
    assert observed(job[0]).ranks[0].waits_in == "do_wait"
    writing = "import subprocess; subprocess.run(['head', '-c', '900G', '/dev/zero'], stdout=-3)"
    job.append(python(writing))
    until(lambda: observed(job[1]).beside > 1_000_000, "it writes")
    until(lambda: observed(job[1]).cpu_s > 0.2, "its CPU time")
    before, after = observed(job[1]), observed(job[1])
    assert before.work == after.work, "the work of others is none of the rank's own"


def test_what_a_rank_has_used_counts_programs_that_have_ended(job):
    burn = "import time\nwhile time.process_time() < 0.6: pass"  # /proc counts in ticks of 10 ms
    code = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {!r}]); input()"
    job.append(python(code.format(burn), stdin=subprocess.PIPE))
    until(lambda: "pipe" in observed(job[0]).ranks[0].waits_in, "it has ended")
    assert observed(job[0]).cpu_s < 0.5
    found = work_signs.used([job[0].pid])
    assert found.cpu_s >= 0.5
    assert not found.runs
    job.append(python("while True: pass"))
    until(lambda: work_signs.used([job[1].pid]).runs, "it runs")


def test_workers_of_a_rank_are_its_helpers_and_other_programs_are_not(job):
    code = (
        "import os, signal, subprocess\n"
        "child = os.fork()\n"
        "if child: subprocess.Popen(['sleep', '1000']); print(child, flush=True)\n"
        "signal.pause()"
    )
    job.append(python(code, stdout=subprocess.PIPE))
    child = int(job[0].stdout.readline())
    (helper,) = work_signs.helpers([job[0].pid])
    assert (helper.parent, helper.pid) == (job[0].pid, child)
    assert len(work_signs.everyone([job[0].pid])) == 3
