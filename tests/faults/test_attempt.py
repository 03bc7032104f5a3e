"""One attempt under supervision: how it ends, what it leaves, who holds its lock."""

import contextlib
import fcntl
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import COMMON, DEADLINE_S, FAMILY, MARK, agent, living, program, python, stat_of, until
from repo import ROOT
from supervised import supervised

from saferun.errors import UnavailableError
from saferun.keeper.process_tree import end_processes, opens, read_stat, send_signal
from saferun.supervise.attempt.attempt_runner import run_attempt
from saferun.supervise.attempt.attempt_values import AttemptSpec, Observer


@pytest.mark.parametrize(
    ("victim", "stopped"),
    [(role, False) for role in ("saferun", "keeper", "agent", "rank")]
    + [("saferun", True), ("keeper", True), ("our whole group", False)],
)
def test_nothing_lives_after_any_one_of_ours_is_killed(tmp_path, victim, stopped):
    with supervised(tmp_path, agent(), popen={"start_new_session": True}) as run:
        run.arrived(**FAMILY)
        for role in ("agent", "rank", "worker", "daemon") if stopped else ():
            run.kill(role, signal.SIGSTOP)
        if victim == "our whole group":
            os.killpg(run.process.pid, signal.SIGKILL)
        else:
            run.kill(victim)
        run.nothing_lives()


def test_nothing_lives_when_the_attempt_is_reported_to_have_ended(tmp_path):
    with supervised(tmp_path, agent()) as run:
        run.arrived(**FAMILY)
        kept = {p for p, name in run.living().items() if name != "saferun-keeper"}
        run.kill("agent")
        ended = run.ended()
        assert ended["exit_code"] == 137
        assert ended["killed"] == len(kept) - 2  # less saferun and the agent
        assert run.living() == {}


DEATHS = {
    "sys.exit(3)": 3,
    "os._exit(250)": 250,
    "os.kill(os.getpid(), signal.SIGKILL)": 137,
    "os.kill(os.getpid(), signal.SIGSEGV)": 139,
    "os.kill(os.getpid(), signal.SIGBUS)": 135,
    "os.abort()": 134,
    "raise ValueError('no')": 1,
    "pass": 0,
}


def test_exit_status_is_the_commands(tmp_path):
    with contextlib.ExitStack() as stack:
        runs = {
            death: stack.enter_context(supervised(tmp_path, python(COMMON + death)))
            for death in DEATHS
        }
        statuses = {death: run.ended()["exit_code"] for death, run in runs.items()}
        assert statuses == DEATHS
        assert {death: run.process.returncode for death, run in runs.items()} == DEATHS


def test_success_ends_what_holds_a_gpu(tmp_path):
    device = tmp_path / "nvidia0"
    device.touch()
    code = (
        COMMON
        + f"""
child('holder', os.setsid, lambda: os.open({str(device)!r}, os.O_RDONLY))
child('free', os.setsid)
while len(open(ROSTER, "a+").seek(0) or open(ROSTER).readlines()) < 2: time.sleep(0.01)
"""
    )
    with supervised(tmp_path, python(code), gpu_prefix=str(tmp_path / "nvidia")) as run:
        until(lambda: run.process.poll() is not None)
        assert run.process.returncode == 0
        assert run.pid("holder") not in run.living()
        assert run.pid("free") in run.living()


@pytest.mark.parametrize("way", ["inherited", "reopened", "apart"])
def test_success_ends_what_holds_a_gpu_and_forks_and_exits_all_the_time(tmp_path, way):
    device = tmp_path / "nvidia0"
    device.touch()
    command = program("passing_on.py", way, str(device))
    with supervised(tmp_path, command, gpu_prefix=str(tmp_path / "nvidia")) as run:
        until(lambda: run.process.poll() is not None)
        assert run.process.returncode == 0
        assert not run.is_held()
        assert not run.members("outlived")


def test_success_leaves_alone_what_forks_and_exits_without_a_gpu(tmp_path):
    """All are stopped for a look at what they hold, and go on; who had stopped before does not."""
    command = program("passing_on.py", "none", "")
    with supervised(tmp_path, command, gpu_prefix=str(tmp_path / "nvidia")) as run:
        until(lambda: run.process.poll() is not None)
        assert run.process.returncode == 0
        assert stat_of(run.pid("paused"))[0] == "T"
        Path(f"{run.roster}.stop").touch()
        until(lambda: len(run.members("outlived")) == 4)


def test_leader_that_left_its_threads_behind_is_no_dead_process(tmp_path):
    with supervised(tmp_path, program("dead_leader.py")) as run:
        assert run.ended()["killed"] == 1
        assert not Path(f"/proc/{run.pid('thread')}").exists()


@pytest.mark.parametrize("victim", ["saferun", "keeper", "agent"])
def test_what_forks_and_exits_faster_than_it_is_seen_is_ended(tmp_path, victim):
    with supervised(tmp_path, program("runaways.py")) as run:
        run.arrived(agent=1)
        run.kill(victim)
        run.nothing_lives()
        assert not run.members("outlived")


def test_no_process_gets_to_act_on_anothers_end(tmp_path):
    with supervised(tmp_path, program("avengers.py"), grace_s=0.1) as run:
        run.arrived(watcher=100, agent=1)
        os.kill(run.process.pid, signal.SIGKILL)
        run.nothing_lives()
        assert not run.members("avenger")


def test_job_that_kills_its_own_group_kills_nothing_of_ours(tmp_path):
    with supervised(tmp_path, python(COMMON + "kin(); os.kill(0, signal.SIGKILL)")) as run:
        ended = run.ended()
        assert (ended["exit_code"], ended["ended_by"]) == (137, "job")
        assert run.living() == {}


def test_command_that_is_not_there_is_reported_plainly():
    with pytest.raises(UnavailableError, match="cannot start `no-such-program`: No such file"):
        run_attempt(AttemptSpec(["no-such-program"], dict(os.environ)))


def test_job_ends_when_our_own_start_up_fails(tmp_path):
    class Failing(Observer):
        def started(self, keeper, launcher):
            raise RuntimeError("ours")

    mark = tmp_path.name + str(os.getpid())
    spec = AttemptSpec(["sleep", "1000"], {**os.environ, MARK: mark})
    with pytest.raises(RuntimeError, match="ours"):
        run_attempt(spec, Failing())
    until(lambda: not living(mark))


def test_children_of_ours_that_are_no_part_of_the_attempt_survive_the_keepers_death(tmp_path):
    class Killer(Observer):
        def started(self, keeper, launcher):
            os.kill(keeper, signal.SIGKILL)

        def spared(self):
            return [child.pid]

    child = subprocess.Popen(["sleep", "1000"])
    try:
        ended = run_attempt(AttemptSpec(["sleep", "1000"], dict(os.environ)), Killer())
        assert (ended.ended_by, ended.exit_code) == ("keeper", 137)
        assert os.waitpid(-1, os.WNOHANG) == (0, 0)  # the child lives; no dead child is left
    finally:
        child.kill()
        child.wait()


def test_lock_is_held_until_nothing_of_the_attempt_lives(tmp_path):
    path = tmp_path / "lock"
    with (
        supervised(tmp_path, agent(), lock=str(path)) as run,
        path.open("a", encoding="utf-8") as file,
    ):
        run.arrived(**FAMILY)
        run.kill("keeper", signal.SIGSTOP)  # so that it cannot end the job yet
        run.kill("saferun")
        assert run.process.wait(DEADLINE_S) == -signal.SIGKILL
        assert not _free(file)
        holders = [pid for pid in run.living() if opens(pid, str(path))]
        keeper = run.pid("keeper")
        assert holders == [keeper]
        os.kill(keeper, signal.SIGCONT)
        until(lambda: _free(file))
        assert set(run.living()) <= {keeper}


def test_success_frees_the_lock_and_leaves_alone_what_was_detached_on_purpose(tmp_path):
    path = tmp_path / "lock"
    code = COMMON + "child('daemon', os.setsid, orphan); wait_for(ROSTER)"
    with (
        supervised(tmp_path, python(code), lock=str(path)) as run,
        path.open("a", encoding="utf-8") as file,
    ):
        until(lambda: run.process.poll() is not None)
        assert run.process.returncode == 0
        until(lambda: _free(file))
        assert run.pid("daemon") in run.living()


def _free(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_stuck_keeper_is_replaced(tmp_path):
    with supervised(tmp_path, agent(), grace_s=0.2, wrap=program("short_limits.py")) as run:
        run.arrived(**FAMILY)
        run.kill("keeper", signal.SIGSTOP)
        run.kill("saferun", signal.SIGTERM)
        assert run.ended()["ended_by"] == "grace"
        assert run.living() == {}


def test_process_that_may_not_be_killed_is_waited_for_and_reported():
    looks = itertools.count()
    assert end_processes(lambda: next(looks) >= 0 and {1: -1}, limit_s=0.3) == (0, [1])
    assert next(looks) > 1  # it has looked again


def test_one_that_is_spared_lives_on_and_what_runs_away_beside_it_is_ended():
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = program("spares_one.py")
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "[] b'' None\n"


def test_number_that_another_process_has_by_now_is_not_signalled():
    stat = read_stat(os.getpid())
    send_signal(os.getpid(), stat[2] + 1, signal.SIGKILL)  # we are still here


@pytest.mark.parametrize("lacking", ["os.pidfd_open", "signal.pidfd_send_signal"])
def test_nothing_lives_where_python_has_no_process_handles(lacking):
    code = (
        f"import os, signal, subprocess; del {lacking};"
        "from saferun.base.prctl import become_subreaper;"
        "from saferun.keeper.process_tree import Family, end_processes;"
        "become_subreaper();"
        "shell = subprocess.Popen(['sh', '-c', 'sleep 1000 & sleep 1000 & echo; wait'],"
        " stdout=subprocess.PIPE); shell.stdout.readline();"
        "family = Family(); print(len(family.living()), *end_processes(family.living))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "3 3 []\n"
