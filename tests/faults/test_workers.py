"""Several workers of one run, as real processes that fail, are killed and are asked to end."""

import os
import signal
import sys
from pathlib import Path

import pytest
from cases import slow
from helpers import is_alive, living, until
from runs import PYTHON, Run, program, ran, run

from saferun.cli.runs import runs_view
from saferun.journal import reader, time_spent
from saferun.journal.attempts import attempts

HEAD = (
    "import os, signal, sys, time\n"
    "worker, attempt = int(os.environ['SAFERUN_WORKER']), int(os.environ['SAFERUN_ATTEMPT'])\n"
)
STAY = HEAD + "print('here', worker, os.getpid(), flush=True)\nsignal.pause()\n"


def asked(count: int, code: str) -> list[str]:
    return [*PYTHON, f"--set=workers={count}", "-c", HEAD + code]


def arrived(job: Run, count: int) -> dict[int, int]:
    """Return {worker: pid} when so many have said that they are here."""
    lines = [job.process.stdout.readline().split() for _ in range(count)]
    return {int(worker): int(pid) for _, worker, pid in lines}


def supervisors(job: Run) -> dict[int, int]:
    return {event["worker"]: event["supervisor"] for event in job.events("worker")}


def ends(job: Run) -> dict[int | None, int]:
    """Return {worker: status}; None is the run."""
    return {event.get("worker"): event["status"] for event in job.events("end")}


def test_each_worker_has_a_number_attempts_and_a_journal_of_its_own(tmp_path):
    code = "worker == attempt == 1 and os.kill(os.getpid(), 9)\nprint(f'{worker}.{attempt}')\n"
    job = ran(tmp_path, *asked(3, code))
    assert sorted(job.out.split()) == ["0.1", "1.2", "2.1"]
    assert ends(job) == {0: 0, 1: 0, 2: 0, None: 0}
    found = reader.named(str(job.journal.parent), "last", 0.0)
    assert (found.outcome, found.attempts) == ("ok", 4)
    tried = attempts(found)
    assert [(a.worker, a.number, a.outcome.exit_code) for a in tried] == [
        *((0, 1, 0), (1, 1, 137), (1, 2, 0), (2, 1, 0))
    ]
    assert Path(tried[2].tails[0][0]).read_text(encoding="utf-8") == "1.2\n"
    shown = runs_view.as_text(
        found, tried, reader.read_plan(found.path), time_spent.read(found, tried, 0.0), 0.0, {}
    )
    assert "worker 1, attempt 2: " in shown
    retried = [line for line in job.messages() if "attempt 1 failed" in line]
    assert len(retried) == 1
    assert retried[0].startswith("saferun: worker 1: attempt 1 failed")


def test_the_status_is_that_of_the_first_worker_that_failed_for_good(tmp_path):
    """Whichever saferun sees first: it is stopped until two have failed."""
    go = [tmp_path / f"go{number}" for number in range(3)]
    code = (
        f"open({str(tmp_path / 'up')!r} + str(worker), 'w').close()\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r} + str(worker)): time.sleep(0.01)\n"
        "sys.exit([7, 0, 5][worker])\n"
    )
    verdict = {"SAFERUN_VERDICT_FILE": str(tmp_path / "private" / "verdict")}
    with run(tmp_path, "--retries=0", *asked(3, code), env=verdict) as job:
        until(lambda: len(list(tmp_path.glob("up*"))) == 3, "three workers")
        job.process.send_signal(signal.SIGSTOP)
        for number in (2, 0, 1):
            go[number].touch()
            until(lambda number=number: number in ends(job), f"the end of worker {number}")
        started = f"/proc/{job.process.pid}/task/{job.process.pid}/children"
        pids = Path(started).read_text(encoding="ascii").split()
        until(lambda: not any(map(is_alive, pids)), "three that wait to be reaped")
        job.process.send_signal(signal.SIGCONT)
        assert job.end() == 5
        assert ends(job) == {2: 5, 0: 7, 1: 0, None: 5}
        assert job.messages()[-1] == "saferun: the run failed with status 5, that of worker 2"
        job.nothing_lives()
    assert Path(verdict["SAFERUN_VERDICT_FILE"]).read_text(encoding="utf-8") == "stop-user\n"


@pytest.mark.parametrize("name", ["SIGTERM", *slow("SIGINT", "SIGHUP")])
def test_a_signal_to_saferun_ends_all_workers(tmp_path, name):
    number = getattr(signal, name)
    code = "signal.signal(signal.SIGINT, signal.SIG_DFL)\n" + STAY
    with run(tmp_path, *asked(3, code)) as job:
        arrived(job, 3)
        os.kill(job.process.pid, number)
        assert job.end() == (-number if name == "SIGINT" else 128 + number)
        assert ends(job) == dict.fromkeys((0, 1, 2, None), 128 + number)
        assert job.events("end")[-1]["reason"] == "asked to end"
        assert len(job.messages()) == 1, job.messages()
        job.nothing_lives()


def test_nothing_lives_after_saferun_is_killed(tmp_path):
    code = "import subprocess; subprocess.Popen(['sleep', '600'])\n" + STAY
    with run(tmp_path, *asked(2, code)) as job:
        arrived(job, 2)
        job.process.kill()
        job.process.wait()
        job.nothing_lives()


def test_a_killed_supervisor_ends_its_worker_and_leaves_the_others_alone(tmp_path):
    code = "import subprocess; subprocess.Popen(['sleep', '600'])\n" + STAY
    with run(tmp_path, *asked(2, code)) as job:
        here = arrived(job, 2)
        os.kill(supervisors(job)[0], signal.SIGKILL)
        until(lambda: 0 in ends(job), "the end of worker 0")
        assert not Path(f"/proc/{here[0]}").exists()
        assert Path(f"/proc/{here[1]}").exists()
        assert list(living(job.mark).values()).count("sleep") == 1
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.end() == 137
        assert ends(job) == {0: 137, 1: 143, None: 137}
        assert "saferun: worker 0: its supervisor was killed (signal 9)" in job.messages()
        job.nothing_lives()


def test_a_killed_keeper_is_one_workers_failed_attempt(tmp_path):
    code = "attempt == 2 and sys.exit(0)\n" + STAY
    with run(tmp_path, *asked(2, code)) as job:
        arrived(job, 2)
        until(lambda: len(job.events("started")) == 2, "both starts in the journal")
        started = {event["worker"]: event["keeper"] for event in job.events("started")}
        os.kill(started[1], signal.SIGKILL)
        until(lambda: 1 in ends(job), "the end of worker 1")
        assert ends(job) == {1: 0}
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.end() == 143
        job.nothing_lives()
    # Bytes of an output that several share are copied, not moved by the kernel.
    assert "saferun's keeper was killed; the last output may be missing" in job.err


def test_output_of_all_workers_arrives_by_whole_lines(tmp_path):
    code = "for n in range(500): os.write(1, b'<%d %d %s>\\n' % (worker, n, b'x' * 50))\n"
    job = ran(tmp_path, *asked(3, code))
    lines = [f"<{w} {n} {'x' * 50}>" for w in range(3) for n in range(500)]
    assert sorted(job.out.splitlines()) == sorted(lines)


def test_what_one_worker_writes_to_a_common_file_is_no_evidence_against_another(tmp_path):
    reported = tmp_path / "reported"
    code = (
        f"told = {str(reported)!r}\n"
        "if worker == 0:\n"
        "    print('ModuleNotFoundError: No module named x', file=sys.stderr, flush=True)\n"
        "    open(told, 'w').close(); sys.exit(0)\n"
        "while not os.path.exists(told): time.sleep(0.01)\n"
        "attempt == 1 and os.kill(os.getpid(), 9)\n"
    )
    with (
        (tmp_path / "log").open("wb") as log,
        run(tmp_path, *asked(2, code), stdout=log, stderr=log) as job,
    ):
        assert job.end() == 0
        kinds = [event["kind"] for event in job.events("ended") if event["status"]]
        assert kinds == ["killed-from-outside"]
    assert "ModuleNotFoundError" in (tmp_path / "log").read_text(encoding="utf-8")


def test_several_workers_read_no_script_from_stdin(tmp_path):
    job = ran(tmp_path, *PYTHON, "--set=workers=2", "-", status=2)
    assert len(job.messages()) == 1


def test_a_worker_for_which_there_is_no_process_is_said_and_the_others_go_on(tmp_path):
    command = [sys.executable, program("one_fork_only")]
    job = ran(tmp_path, *asked(2, "print(worker)\n"), command=command, status=69)
    assert job.out == "0\n"
    assert ends(job) == {0: 0, 1: 69, None: 69}
    assert "saferun: worker 1: it was never started: Resource temporarily unavailable" in job.err


def test_workers_run_without_a_journal_where_none_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    nowhere = {"SAFERUN_RUN_DIR": str(tmp_path / "file" / "runs")}
    code = "worker == attempt == 1 and os.kill(os.getpid(), 9)\nprint(f'{worker}.{attempt}')\n"
    job = ran(tmp_path, *asked(2, code), env=nowhere)
    assert sorted(job.out.split()) == ["0.1", "1.2"]
    assert len([line for line in job.messages() if "no journal is kept" in line]) == 1


def test_a_program_that_cannot_be_started_is_said_by_each_worker(tmp_path):
    (tmp_path / "bad").write_text("#!/nonexistent\n", encoding="utf-8")
    (tmp_path / "bad").chmod(0o755)
    job = ran(tmp_path, *PYTHON, "--set=workers=2", "--no-python", "./bad", status=69)
    texts = sorted(line for line in job.messages() if "cannot start" in line)
    assert [line.split(": ")[1] for line in texts] == ["worker 0", "worker 1"]
