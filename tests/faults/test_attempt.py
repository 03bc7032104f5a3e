"""One attempt under supervision: how it ends, what it leaves, and which signals arrive."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    COMMON,
    DEADLINE_S,
    MARK,
    PROGRAMS,
    ROOT,
    Supervised,
    agent,
    living,
    program,
    python,
    supervised,
    until,
)

from saferun.keeper import protocol
from saferun.keeper.process_tree import opens
from saferun.supervise.attempt import AttemptSpec, Observer, run_attempt
from saferun.supervise.keeper_pool import start_keeper

FAMILY = {"agent": 1, "rank": 2, "worker": 2, "grouped": 2, "daemon": 2}
TORCHRUN = Path(sys.executable).with_name("torchrun")


@pytest.mark.parametrize("victim", ["saferun", "keeper", "agent", "rank"])
def test_nothing_lives_after_any_one_of_ours_is_killed(tmp_path, victim):
    with supervised(tmp_path, agent()) as run:
        run.arrived(**FAMILY)
        run.kill(victim)
        run.nothing_lives()


@pytest.mark.parametrize("victim", ["saferun", "keeper"])
def test_stopped_processes_are_ended_too(tmp_path, victim):
    with supervised(tmp_path, agent()) as run:
        run.arrived(**FAMILY)
        for role in ("agent", "rank", "worker", "daemon"):
            run.kill(role, signal.SIGSTOP)
        run.kill(victim)
        run.nothing_lives()


def test_nothing_lives_when_the_attempt_is_reported_to_have_ended(tmp_path):
    with supervised(tmp_path, agent()) as run:
        run.arrived(**FAMILY)
        kept = {p for p, name in living(run.mark).items() if name != "saferun-keeper"}
        run.kill("agent")
        ended = run.ended()
        assert ended["exit_code"] == 137
        assert ended["killed"] == len(kept) - 2  # less saferun and the agent
        assert living(run.mark) == {}


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


def test_failure_ends_what_is_left_over(tmp_path):
    with supervised(tmp_path, python(COMMON + "kin(); join('agent'); sys.exit(5)")) as run:
        assert run.ended()["exit_code"] == 5
        assert living(run.mark) == {}


def test_success_leaves_alone_what_was_detached_on_purpose(tmp_path):
    code = COMMON + "child('daemon', os.setsid, orphan); wait_for(ROSTER)"
    with supervised(tmp_path, python(code)) as run:
        until(lambda: run.process.poll() is not None)
        assert run.process.returncode == 0
        assert run.pid("daemon") in living(run.mark)


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
        assert run.pid("holder") not in living(run.mark)
        assert run.pid("free") in living(run.mark)


def test_leader_that_left_its_threads_behind_is_no_dead_process(tmp_path):
    with supervised(tmp_path, program("dead_leader.py")) as run:
        assert run.ended()["killed"] == 1
        assert not Path(f"/proc/{run.pid('thread')}").exists()


@pytest.mark.slow  # seconds, or minutes for all that runs beside it
@pytest.mark.parametrize("victim", ["saferun", "keeper", "agent"])
def test_fork_bomb_is_ended(tmp_path, victim):
    with supervised(tmp_path, program("fork_bomb.py")) as run:
        run.arrived(sitting=160, agent=1)
        run.kill(victim)
        run.nothing_lives()


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


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_signal_reaches_the_agent_once_and_ends_the_job(tmp_path, name):
    number = getattr(signal, name)
    with supervised(tmp_path, agent()) as run:
        run.arrived(**FAMILY)
        run.kill("saferun", number)
        ended = run.ended()
        assert ended["exit_code"] == 1
        assert ended["forwarded"] == [name]
        assert ended["interrupted"]
        assert len(run.members(f"heard-{number.value}")) == 1
        assert living(run.mark) == {}


def test_signals_sent_to_the_whole_group_reach_the_agent_once(tmp_path):
    with supervised(tmp_path, agent(), popen={"start_new_session": True}) as run:
        run.arrived(**FAMILY)
        os.killpg(run.process.pid, signal.SIGTERM)
        assert run.ended()["forwarded"] == ["SIGTERM"]
        assert len(run.members(f"heard-{signal.SIGTERM.value}")) == 1


def test_nothing_lives_after_our_whole_group_is_killed(tmp_path):
    with supervised(tmp_path, agent(), popen={"start_new_session": True}) as run:
        run.arrived(**FAMILY)
        os.killpg(run.process.pid, signal.SIGKILL)
        run.nothing_lives()


def test_job_that_kills_its_own_group_kills_nothing_of_ours(tmp_path):
    with supervised(tmp_path, python(COMMON + "kin(); os.kill(0, signal.SIGKILL)")) as run:
        ended = run.ended()
        assert (ended["exit_code"], ended["ended_by"]) == (137, "job")
        assert living(run.mark) == {}


def test_job_gets_the_time_it_needs_to_end(tmp_path):
    rank = (PROGRAMS / "saving_rank.py").read_text()
    with supervised(tmp_path, agent(rank), grace_s=600.0) as run:
        run.arrived(rank=2, agent=1)
        run.kill("saferun", signal.SIGTERM)
        run.arrived(**{f"heard-{signal.SIGTERM.value}": 1})
        run.kill("saferun", signal.SIGTERM)  # a second one breaks nothing off
        Path(f"{run.roster}.go").touch()
        assert run.ended()["forwarded"] == ["SIGTERM"]
        assert len(run.members("saved")) == 2


def test_job_that_ignores_the_signal_is_killed_when_its_time_is_over(tmp_path):
    deaf = COMMON + "signal.signal(signal.SIGTERM, signal.SIG_IGN); kin(); join('rank'); stay()"
    with supervised(tmp_path, agent(deaf), grace_s=0.5) as run:
        run.arrived(**FAMILY)
        run.kill("saferun", signal.SIGTERM)
        ended = run.ended()
        assert ended["ended_by"] == "grace"
        assert ended["exit_code"] == 137
        assert living(run.mark) == {}


def test_second_interrupt_kills(tmp_path):
    deaf = COMMON + "signal.signal(signal.SIGTERM, signal.SIG_IGN); kin(); join('rank'); stay()"
    with supervised(tmp_path, agent(deaf), grace_s=100) as run:
        run.arrived(**FAMILY)
        run.kill("saferun", signal.SIGINT)
        run.arrived(**{f"heard-{signal.SIGINT.value}": 1})
        # Another keypress is one that comes 0.1 s later, or more: the first of these is taken.
        until(lambda: run.process.poll() is not None or run.kill("saferun", signal.SIGINT))
        ended = run.ended()
        assert (ended["ended_by"], ended["exit_code"]) == ("interrupt", 130)
        assert living(run.mark) == {}


def test_interrupt_that_was_ignored_at_the_start_stays_ignored(tmp_path):
    command = agent(COMMON + "join('rank'); stay()", 1)
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    with supervised(tmp_path, command, popen=ignore) as run:
        run.arrived(agent=1, rank=1)
        for who in ("saferun", "agent", "rank"):
            run.kill(who, signal.SIGINT)
        run.kill("saferun", signal.SIGTERM)
        ended = run.ended()
        assert ended["forwarded"] == ["SIGTERM"]
        assert not run.members(f"heard-{signal.SIGINT.value}")


@pytest.mark.parametrize("launcher", ["torchrun", "python"])
def test_job_starts_with_no_signal_blocked_or_ignored(tmp_path, launcher):
    command = ["grep", "-E", "SigBlk|SigIgn", "/proc/self/status"]
    with supervised(tmp_path, command, launcher=launcher) as run:
        run.ended()
    masks = [int(line.split()[1], 16) for line in run.out.splitlines()]
    # posix_spawn of glibc ignores 32 and 33, which belong to its threads alone.
    assert [mask & 0x7FFF_FFFF for mask in masks] == [0, 0]


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
@pytest.mark.parametrize("receipts", ["of one", "of none"])
def test_user_signals_go_to_the_ranks_alone_once(tmp_path, name, receipts):
    """Not to the agent, to a helper that has the rank's handler, or to who has a rank's old pid."""
    listening = COMMON + f"note({name!r}); child('helper'); join('rank'); stay()"
    with supervised(tmp_path, agent(listening), receipts=str(tmp_path)) as run:
        stale = subprocess.Popen(python(listening.replace("rank", "stale")), env=run.environment)
        run.arrived(rank=2, helper=3, agent=1, stale=1)
        for pid in (run.members("rank")[0], stale.pid) if receipts == "of one" else ():
            (tmp_path / f"a1-r0-rank0-pid{pid}.jsonl").touch()
        run.kill("saferun", getattr(signal, name))
        run.arrived(**{name: 2})
        run.kill("saferun", signal.SIGTERM)
        assert run.ended()["forwarded"] == [name, "SIGTERM"]
        assert stale.poll() is None
        stale.kill()
        stale.wait()
        assert sorted(run.members(name)) == sorted(run.members("rank"))


def test_the_rank_inside_a_wrapper_gets_a_user_signal_once_it_has_joined(tmp_path):
    inside = COMMON + "note('SIGUSR1'); join('inside'); stay()"
    code = (
        COMMON
        + f"note('SIGUSR1'); join('rank'); subprocess.run([sys.executable, '-c', {inside!r}])"
    )
    with supervised(tmp_path, agent(code), receipts=str(tmp_path)) as run:
        run.arrived(rank=2, inside=2, agent=1)
        for pid in run.members("inside"):
            (tmp_path / f"a1-r0-rank0-pid{pid}.jsonl").touch()
        run.kill("saferun", signal.SIGUSR1)
        run.arrived(SIGUSR1=2)
        assert sorted(run.members("SIGUSR1")) == sorted(run.members("inside"))


def test_a_rank_that_blocks_a_user_signal_to_ask_for_it_gets_it(tmp_path):
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); join('rank')"
    ask = "\nwhile signal.SIGUSR1 not in signal.sigpending(): time.sleep(0.01)"
    code = COMMON + f"{block}{ask}\njoin('SIGUSR1'); stay()"
    with supervised(tmp_path, agent(code)) as run:
        run.arrived(rank=2, agent=1)
        run.kill("saferun", signal.SIGUSR1)
        run.arrived(SIGUSR1=2)


def test_user_signal_kills_no_rank_that_does_not_listen(tmp_path):
    rank = COMMON + "os.environ['RANK'] == '0' and note('SIGUSR1'); join('rank'); stay()"
    with supervised(tmp_path, agent(rank), receipts=str(tmp_path)) as run:
        run.arrived(rank=2, agent=1)
        for pid in run.members("rank"):
            (tmp_path / f"a1-r0-rank0-pid{pid}.jsonl").touch()
        for times in (1, 2):  # when the second has arrived, the first has done what it does
            run.kill("saferun", signal.SIGUSR1)
            run.arrived(SIGUSR1=times)
        assert set(run.members("rank")) <= set(living(run.mark))


def test_agent_that_takes_user_signals_gets_them(tmp_path):
    code = COMMON + "note('SIGUSR1'); signal.signal(signal.SIGTERM, lambda *a: sys.exit(1))"
    code += "; join('agent'); stay()"
    with supervised(tmp_path, python(code)) as run:
        run.arrived(agent=1)
        run.kill("saferun", signal.SIGUSR1)
        run.arrived(SIGUSR1=1)
        run.kill("saferun", signal.SIGTERM)
        assert run.ended()["exit_code"] == 1


def test_plain_python_gets_signals_sent_to_us_alone(tmp_path):
    code = COMMON + "note('SIGTERM', 'SIGUSR1'); join('agent'); stay()"
    with supervised(tmp_path, python(code), launcher="python", grace_s=0.5) as run:
        run.arrived(agent=1)
        run.kill("saferun", signal.SIGUSR1)
        run.arrived(SIGUSR1=1)
        assert os.getpgid(run.pid("agent")) == os.getpgid(run.process.pid)
        run.kill("saferun", signal.SIGTERM)
        assert run.ended()["ended_by"] == "grace"
        assert len(run.members("SIGTERM")) == 1


def test_command_that_is_not_there_is_reported_plainly(tmp_path):
    from saferun.errors import UnavailableError

    with pytest.raises(UnavailableError, match="cannot start `no-such-program`: No such file"):
        run_attempt(AttemptSpec(["no-such-program"], dict(os.environ)))


def test_job_ends_when_our_own_start_up_fails(tmp_path):
    def fail(keeper, agent):
        raise RuntimeError("ours")

    mark = tmp_path.name + str(os.getpid())
    spec = AttemptSpec(["sleep", "1000"], {**os.environ, MARK: mark})
    with pytest.raises(RuntimeError, match="ours"):
        run_attempt(spec, Observer(started=fail))
    until(lambda: not living(mark))


def test_keeper_that_was_started_ahead_is_used(tmp_path):
    standby, started = start_keeper(), []
    observer = Observer(started=lambda *pids: started.append(pids))
    ended = run_attempt(AttemptSpec(["true"], dict(os.environ)), observer, standby)
    assert ended.exit_code == 0
    assert started[0][0] == standby.pid


def test_children_of_ours_that_are_no_part_of_the_attempt_survive_the_keepers_death(tmp_path):
    child = subprocess.Popen(["sleep", "1000"])
    try:
        observer = Observer(
            started=lambda keeper, agent: os.kill(keeper, signal.SIGKILL),
            spared=lambda: [child.pid],
        )
        ended = run_attempt(AttemptSpec(["sleep", "1000"], dict(os.environ)), observer)
        assert (ended.ended_by, ended.exit_code) == ("keeper", 137)
        assert os.waitpid(-1, os.WNOHANG) == (0, 0)  # the child lives; no dead child is left
    finally:
        child.kill()
        child.wait()


def test_lock_is_held_until_nothing_of_the_attempt_lives(tmp_path):
    path = tmp_path / "lock"
    with supervised(tmp_path, agent(), lock=str(path)) as run, path.open("a") as file:
        run.arrived(**FAMILY)
        run.kill("keeper", signal.SIGSTOP)  # so that it cannot end the job yet
        run.kill("saferun")
        assert run.process.wait(DEADLINE_S) == -signal.SIGKILL
        assert not _free(file)
        holders = [pid for pid in living(run.mark) if opens(pid, str(path))]
        keeper = run.pid("keeper")
        assert holders == [keeper]
        os.kill(keeper, signal.SIGCONT)
        until(lambda: _free(file))
        assert set(living(run.mark)) <= {keeper}


def test_lock_is_free_after_success_while_somebody_is_left_behind(tmp_path):
    path = tmp_path / "lock"
    code = COMMON + "child('daemon', os.setsid, orphan); wait_for(ROSTER)"
    with supervised(tmp_path, python(code), lock=str(path)) as run, path.open("a") as file:
        until(lambda: run.process.poll() is not None)
        until(lambda: _free(file))
        assert run.pid("daemon") in living(run.mark)


def _free(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_user_signal_alone_counts_as_asked_and_not_as_interrupted(tmp_path):
    code = COMMON + "signal.signal(signal.SIGUSR1, lambda *a: sys.exit(1)); join('agent'); stay()"
    with supervised(tmp_path, python(code)) as run:
        run.arrived(agent=1)
        run.kill("saferun", signal.SIGUSR1)
        ended = run.ended()
        assert ended["asked_s"] is not None
        assert not ended["interrupted"]


def test_nobody_asked_where_no_signal_came(tmp_path):
    with supervised(tmp_path, python("raise SystemExit(3)")) as run:
        assert run.ended()["asked_s"] is None


def test_signal_that_comes_with_the_task_is_not_lost(tmp_path):
    standby = start_keeper()
    start = protocol.Start(
        argv=["sleep", "1000"],
        env=dict(os.environ),
        own_group=True,
        warm=False,
        ignored=[],
        blocked=[],
        nofile=None,
        tail_bytes=100,
        gpu_prefix="/dev/nvidia",
    )
    os.kill(standby.pid, signal.SIGSTOP)
    protocol.send(standby.commands, start)
    protocol.send(standby.commands, protocol.Signal(int(signal.SIGTERM), None))
    os.kill(standby.pid, signal.SIGCONT)
    inbox, reports = protocol.Inbox(standby.reports), []
    until(lambda: reports.extend(inbox.read()) or inbox.closed)
    standby.close()
    os.waitpid(standby.pid, 0)
    kinds = [type(report) for report in reports if not isinstance(report, protocol.Released)]
    assert kinds == [protocol.Started, protocol.Exited, protocol.Ended]
    assert reports[-1].wait_status == signal.SIGTERM


def test_stuck_keeper_is_replaced(tmp_path):
    with supervised(tmp_path, agent(), grace_s=0.2, wrap=program("short_limits.py")) as run:
        run.arrived(**FAMILY)
        run.kill("keeper", signal.SIGSTOP)
        run.kill("saferun", signal.SIGTERM)
        assert run.ended()["ended_by"] == "grace"
        assert living(run.mark) == {}


def test_process_that_may_not_be_killed_is_waited_for_and_reported():
    from saferun.keeper.process_tree import end_processes

    looks = itertools.count()
    assert end_processes(lambda: next(looks) >= 0 and {1: -1}, limit_s=0.3) == (0, [1])
    assert next(looks) > 1  # it has looked again


def test_one_that_is_spared_lives_on_and_what_runs_away_beside_it_is_ended():
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = program("spares_one.py")
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "[] b'' None\n"


def test_number_that_another_process_has_by_now_is_not_signalled():
    from saferun.keeper.process_tree import read_stat, send_signal

    stat = read_stat(os.getpid())
    assert stat is not None
    send_signal(os.getpid(), stat[2] + 1, signal.SIGKILL)  # we are still here


@pytest.mark.parametrize("lacking", ["os.pidfd_open", "signal.pidfd_send_signal"])
def test_nothing_lives_where_python_has_no_process_handles(lacking):
    code = (
        f"import os, signal, subprocess; del {lacking};"
        "from saferun.keeper.process_tree import Family, become_subreaper, end_processes;"
        "become_subreaper();"
        "shell = subprocess.Popen(['sh', '-c', 'sleep 1000 & sleep 1000 & echo; wait'],"
        " stdout=subprocess.PIPE); shell.stdout.readline();"
        "family = Family(); print(len(family.living()), *end_processes(family.living))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "3 3 []\n"


TRAIN = ["--nproc-per-node=2", str(ROOT / "examples/train_gpt.py"), "--steps", "100000"]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Supervised]:
    pytest.importorskip("torch")
    out = str(tmp_path / "out")
    command = [str(TORCHRUN), "--rdzv-endpoint=localhost:0", "--rdzv-backend=c10d", *TRAIN]
    sizes = ["--out", out, "--workers", "1", "--log-every", "1", "--width", "32", "--batch", "2"]
    with supervised(tmp_path, [*command, *sizes], grace_s=40) as run:
        run.lines = []
        while b"step" not in (line := run.process.stdout.readline()):
            assert line, run.process.stderr.read()
        yield run


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["saferun", "keeper", "agent", "rank"])
def test_real_training_leaves_nothing_after_any_one_is_killed(training, victim):
    run = training
    ranks = _ranks(run.mark)
    assert len(ranks) == 2
    pids = {"rank": ranks[0], "agent": _parent(ranks[0]), "saferun": run.process.pid}
    pids["keeper"] = _parent(pids["agent"])
    os.kill(pids[victim], signal.SIGKILL)
    run.nothing_lives()
    if victim != "saferun":
        assert run.ended()["exit_code"] == {"rank": 1, "agent": 137, "keeper": 137}[victim]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_real_training_ends_at_a_signal_as_under_torchrun(training, number):
    training.kill("saferun", number)
    assert training.ended()["exit_code"] == 1
    assert living(training.mark) == {}
    assert f"Received {number.value} death signal".encode() in training.err


@pytest.fixture
def user_signals(tmp_path: Path) -> Callable[..., Any]:
    """Start real ranks that note SIGUSR1; returns the run once all listen."""
    pytest.importorskip("torch")
    script, notes = PROGRAMS / "notes_user_signals.py", tmp_path / "notes"
    receipts = tmp_path / "receipts"
    receipts.mkdir()

    @contextlib.contextmanager
    def start(how: str, handled: Sequence[str] = (), **env: str):
        command = [str(TORCHRUN), "--nproc-per-node=2", str(script), str(notes), how]
        options = {
            "receipts": str(receipts),
            "popen": {"env": env},
            "handled": handled,
        }
        with supervised(tmp_path, command, grace_s=40, **options) as run:
            until(lambda: len(list(tmp_path.glob("notes.*"))) == 2, run)
            for path in tmp_path.glob("notes.*"):
                (receipts / f"a1-r0-rank0-pid{path.suffix[1:]}.jsonl").touch()
            run.notes = lambda: notes.read_text().split() if notes.exists() else []
            yield run

    return start


@pytest.mark.slow
def test_torchrun_that_takes_user_signals_gets_them_and_all_ends(user_signals):
    names = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
    with user_signals("ends", PET_SIGNALS_TO_HANDLE=names, handled=names.split(",")) as run:
        run.kill("saferun", signal.SIGUSR1)
        ended = run.ended()
        assert (ended["exit_code"], ended["ended_by"]) == (1, "job")
        assert sorted(run.notes()) == ["SIGUSR1", "SIGUSR1"]
        assert f"Received {signal.SIGUSR1.value} death signal".encode() in run.err
        assert living(run.mark) == {}


@pytest.mark.slow
def test_torchrun_that_does_not_take_them_is_passed_by(user_signals):
    with user_signals("stays") as run:
        run.kill("saferun", signal.SIGUSR1)
        until(lambda: len(run.notes()) == 2)
        assert run.notes() == ["SIGUSR1", "SIGUSR1"]
        assert len(_ranks(run.mark)) == 2
        run.kill("saferun", signal.SIGTERM)
        run.kill("saferun", signal.SIGINT)
        for pid in _ranks(run.mark):
            os.kill(pid, signal.SIGKILL)
        assert run.ended()["exit_code"] == 1
        assert living(run.mark) == {}


def _ranks(mark: str) -> list[int]:
    found = []
    for pid in living(mark):
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if any(word.startswith(b"LOCAL_RANK=") for word in environ) and os.getsid(pid) == pid:
            found.append(pid)
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
