"""One attempt under supervision: how it ends, what it leaves, and which signals arrive."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import AGENT, COMMON, MARK, ROOT, agent, living, python, supervised, until

from saferun.keeper.process_tree import opens

FAMILY = {"agent": 1, "rank": 2, "worker": 2, "grouped": 2, "daemon": 2}
TORCHRUN = Path(sys.executable).with_name("torchrun")


@pytest.mark.parametrize("victim", ["saferun", "keeper", "agent", "rank"])
def test_nothing_lives_after_any_one_of_ours_is_killed(tmp_path, victim):
    with supervised(tmp_path, agent()) as run:
        run.arrived(**FAMILY)
        run.kill(victim)
        run.nothing_lives()


@pytest.mark.parametrize("stopped", ["agent", "rank", "worker", "daemon"])
@pytest.mark.parametrize("victim", ["saferun", "keeper"])
def test_stopped_processes_are_ended_too(tmp_path, stopped, victim):
    with supervised(tmp_path, agent()) as run:
        run.arrived(**FAMILY)
        run.kill(stopped, signal.SIGSTOP)
        run.kill(victim)
        run.nothing_lives()


def test_nothing_lives_when_the_attempt_is_said_to_have_ended(tmp_path):
    with supervised(tmp_path, agent()) as run:
        run.arrived(**FAMILY)
        kept = {p for p, name in living(run.mark).items() if name != "saferun-keeper"}
        run.kill("agent")
        ended = run.ended()
        assert ended["exit_code"] == 137
        assert ended["killed"] == len(kept) - 2  # less saferun and the agent
        assert living(run.mark) == {}


@pytest.mark.parametrize(
    ("death", "status"),
    [
        pytest.param("sys.exit(3)", 3, id="exit 3"),
        pytest.param("os._exit(250)", 250, id="exit 250"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", 137, id="SIGKILL"),
        pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", 139, id="SIGSEGV"),
        pytest.param("os.kill(os.getpid(), signal.SIGBUS)", 135, id="SIGBUS"),
        pytest.param("os.abort()", 134, id="SIGABRT"),
        pytest.param("raise ValueError('no')", 1, id="exception"),
        pytest.param("pass", 0, id="success"),
    ],
)
def test_exit_status_is_the_commands(tmp_path, death, status):
    with supervised(tmp_path, python(COMMON + death)) as run:
        assert run.ended()["exit_code"] == status
        assert run.process.returncode == status


def test_failure_ends_what_is_left_over(tmp_path):
    with supervised(tmp_path, python(COMMON + "kin(); join('agent'); sys.exit(5)")) as run:
        assert run.ended()["exit_code"] == 5
        assert living(run.mark) == {}


def test_success_leaves_alone_what_was_detached_on_purpose(tmp_path):
    code = COMMON + "child('daemon', os.setsid, orphan)\nwhile not os.path.exists(ROSTER): pass"
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
while len(open(ROSTER, "a+").seek(0) or open(ROSTER).readlines()) < 2: pass
"""
    )
    with supervised(tmp_path, python(code), gpu_prefix=str(tmp_path / "nvidia")) as run:
        until(lambda: run.process.poll() is not None)
        assert run.process.returncode == 0
        assert run.pid("holder") not in living(run.mark)
        assert run.pid("free") in living(run.mark)


def test_leader_that_left_its_threads_behind_is_no_dead_process(tmp_path):
    code = (
        COMMON
        + """
import ctypes, threading
if os.fork() == 0:
    os.setsid()
    threading.Thread(target=lambda: (time.sleep(0.2), join("thread"), stay2())).start()
    stay2 = lambda: [time.sleep(1) for _ in range(1000)]
    ctypes.CDLL(None).pthread_exit(None)
while not os.path.exists(ROSTER): time.sleep(0.01)
sys.exit(1)
"""
    )
    with supervised(tmp_path, python(code)) as run:
        assert run.ended()["killed"] == 1
        assert not Path(f"/proc/{run.pid('thread')}").exists()


@pytest.mark.parametrize("victim", ["saferun", "keeper", "agent"])
def test_fork_bomb_is_ended(tmp_path, victim):
    code = (
        COMMON
        + """
began = time.monotonic()
def run_away():  # never the process that was seen a moment ago
    while time.monotonic() < began + 90:  # a bomb that nobody stops any more stops
        if os.fork(): os._exit(0)
        time.sleep(0.05)
for _ in range(40): child("", run_away)
for _ in range(160): child("sitting", os.setsid)
join("agent"); stay()
"""
    )
    with supervised(tmp_path, python(code)) as run:
        run.arrived(sitting=160, agent=1)
        run.kill(victim)
        run.nothing_lives()


def test_no_process_gets_to_act_on_anothers_end(tmp_path):
    code = (
        COMMON
        + """
reading, writing = os.pipe()
for _ in range(100):
    if os.fork() == 0:
        os.close(writing); join("watcher")
        os.read(reading, 1)  # comes back when its parent has died
        join("avenger"); os._exit(0)
join("agent"); stay()
"""
    )
    with supervised(tmp_path, python(code), grace_s=0.1) as run:
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
    slow = (
        COMMON
        + """
def save(number, frame):
    for _ in range(10): time.sleep(0.05)
    join("saved"); os._exit(0)
signal.signal(signal.SIGTERM, save); join("rank"); stay()
"""
    )
    with supervised(tmp_path, agent(slow), grace_s=30) as run:
        run.arrived(rank=2, agent=1)
        run.kill("saferun", signal.SIGTERM)
        run.arrived(**{f"heard-{signal.SIGTERM.value}": 1})
        run.kill("saferun", signal.SIGTERM)  # impatience breaks nothing off
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
        begin = time.monotonic()
        until(lambda: time.monotonic() > begin + 0.15)  # two keypresses, not one heard twice
        run.kill("saferun", signal.SIGINT)
        ended = run.ended()
        assert (ended["ended_by"], ended["exit_code"]) == ("interrupt", 130)
        assert living(run.mark) == {}


def test_interrupt_that_was_ignored_at_the_start_stays_ignored(tmp_path):
    code = AGENT + f"main({COMMON + 'join(`rank`); stay()'!r}, 1)".replace("`", '"')
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    with supervised(tmp_path, python(code), popen=ignore) as run:
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
def test_user_signals_go_to_ranks_that_left_a_receipt_and_never_to_the_agent(tmp_path, name):
    listening = COMMON + f"note({name!r}); join('rank'); stay()"
    with supervised(tmp_path, agent(listening), receipts=str(tmp_path)) as run:
        stale = subprocess.Popen(python(listening.replace("rank", "stale")), env=run.environment)
        run.arrived(rank=2, agent=1, stale=1)
        chosen = run.members("rank")[0]
        for pid in (chosen, stale.pid):  # a number that is another's by now
            (tmp_path / f"a1-r0-rank0-pid{pid}.jsonl").touch()
        run.kill("saferun", getattr(signal, name))
        run.arrived(**{name: 1})
        run.kill("saferun", signal.SIGTERM)
        assert run.ended()["forwarded"] == [name, "SIGTERM"]
        stale.kill()
        stale.wait()
        assert run.members(name) == [chosen]


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


def test_command_that_is_not_there_is_said_plainly(tmp_path):
    from saferun.errors import UnavailableError
    from saferun.supervise.attempt import run_attempt

    with pytest.raises(UnavailableError, match="cannot start `no-such-program`: No such file"):
        run_attempt(["no-such-program"], dict(os.environ))


def test_job_ends_when_our_own_start_up_fails(tmp_path):
    from saferun.supervise.attempt import run_attempt

    def fail(keeper, agent):
        raise RuntimeError("ours")

    mark = tmp_path.name + str(os.getpid())
    with pytest.raises(RuntimeError, match="ours"):
        run_attempt(["sleep", "1000"], {**os.environ, MARK: mark}, on_start=fail)
    until(lambda: not living(mark))


def test_keeper_that_was_started_ahead_is_used(tmp_path):
    from saferun.supervise.attempt import run_attempt
    from saferun.supervise.standby import start_keeper

    standby, started = start_keeper(), []
    ended = run_attempt(
        ["true"], dict(os.environ), standby=standby, on_start=lambda *pids: started.append(pids)
    )
    assert ended.exit_code == 0
    assert started[0][0] == standby.pid


def test_children_of_ours_that_are_no_part_of_the_attempt_survive_the_keepers_death(tmp_path):
    from saferun.supervise.attempt import run_attempt

    spare = subprocess.Popen(["sleep", "1000"])
    try:
        ended = run_attempt(
            ["sleep", "1000"],
            dict(os.environ),
            on_start=lambda keeper, agent: os.kill(keeper, signal.SIGKILL),
            spared=lambda: [spare.pid],
        )
        assert (ended.ended_by, ended.exit_code) == ("keeper", 137)
        assert os.waitpid(-1, os.WNOHANG) == (0, 0)  # the spare lives; no dead child is left
    finally:
        spare.kill()
        spare.wait()


def test_lock_is_held_until_nothing_of_the_attempt_lives(tmp_path):
    path = tmp_path / "lock"
    with supervised(tmp_path, agent(), lock=str(path)) as run, path.open("a") as file:
        run.arrived(**FAMILY)
        run.kill("keeper", signal.SIGSTOP)  # so that it cannot end the job yet
        run.kill("saferun")
        assert run.process.wait(30) == -signal.SIGKILL
        assert not _free(file)
        holders = [pid for pid in living(run.mark) if opens(pid, str(path))]
        keeper = run.pid("keeper")
        assert holders == [keeper]
        os.kill(keeper, signal.SIGCONT)
        until(lambda: _free(file))
        assert set(living(run.mark)) <= {keeper}


def test_lock_is_free_after_success_while_somebody_is_left_behind(tmp_path):
    path = tmp_path / "lock"
    code = COMMON + "child('daemon', os.setsid, orphan)\nwhile not os.path.exists(ROSTER): pass"
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


def test_later_comes_once_at_its_time_while_the_attempt_runs(tmp_path):
    from saferun.supervise.attempt import run_attempt

    calls = []
    began = time.monotonic()
    run_attempt(
        ["sleep", "0.8"],
        dict(os.environ),
        later=lambda: calls.append(time.monotonic() - began),
        later_s=0.3,
    )
    assert len(calls) == 1
    assert calls[0] >= 0.3
    run_attempt(["true"], dict(os.environ), later=lambda: calls.append(0), later_s=5)
    assert len(calls) == 1


def test_time_from_the_last_signal_to_the_end_is_told(tmp_path):
    slow = COMMON + "signal.signal(signal.SIGTERM, lambda *a: (time.sleep(0.4), os._exit(0)));"
    with supervised(tmp_path, agent(slow + "join('rank'); stay()")) as run:
        run.arrived(rank=2, agent=1)
        run.kill("saferun", signal.SIGUSR1)  # of which nobody dies
        begin = time.monotonic()
        until(lambda: time.monotonic() > begin + 0.5)
        run.kill("saferun", signal.SIGTERM)
        assert 0.4 <= run.ended()["asked_s"] < 5


def test_user_signal_alone_counts_as_asked_and_not_as_interrupted(tmp_path):
    code = COMMON + "signal.signal(signal.SIGUSR1, lambda *a: sys.exit(1)); join('agent'); stay()"
    with supervised(tmp_path, python(code)) as run:
        run.arrived(agent=1)
        run.kill("saferun", signal.SIGUSR1)
        ended = run.ended()
        assert ended["asked_s"] < 5
        assert not ended["interrupted"]


def test_nobody_asked_where_no_signal_came(tmp_path):
    with supervised(tmp_path, python("raise SystemExit(3)")) as run:
        assert run.ended()["asked_s"] is None


def test_signal_that_comes_with_the_task_is_not_lost(tmp_path):
    from saferun.keeper import protocol
    from saferun.supervise.attempt import _task
    from saferun.supervise.standby import start_keeper
    from saferun.system.signalfd import Signals

    standby = start_keeper()
    with Signals(()) as signals:
        task = _task(["sleep", "1000"], dict(os.environ), signals, True, 100, "/dev/nvidia")
    os.kill(standby.pid, signal.SIGSTOP)
    protocol.send(standby.commands, task)
    protocol.send(standby.commands, ("signal", int(signal.SIGTERM), None))
    os.kill(standby.pid, signal.SIGCONT)
    inbox, heard = protocol.Inbox(standby.reports), []
    until(lambda: heard.extend(inbox.read()) or inbox.closed)
    os.close(standby.commands)
    os.close(standby.reports)
    os.waitpid(standby.pid, 0)
    ended = next(message for message in heard if message[0] == "ended")
    assert ended[1] == signal.SIGTERM


def test_stuck_keeper_is_replaced(tmp_path):
    from saferun.keeper import process_tree

    assert process_tree.UNKILLABLE_S == 30
    code = (
        "import saferun.keeper.process_tree as f; import saferun.keeper.protocol as m;"
        "f.UNKILLABLE_S = m.HURRIED_DRAIN_S = 0.1;"
        "import saferun.supervise.attempt as a; a._KEEPER_GRACE_S = 0.3; import runpy, sys;"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    with supervised(tmp_path, agent(), grace_s=0.2, wrap=python(code)) as run:
        run.arrived(**FAMILY)
        run.kill("keeper", signal.SIGSTOP)
        run.kill("saferun", signal.SIGTERM)
        assert run.ended()["ended_by"] == "grace"
        assert living(run.mark) == {}


def test_process_that_may_not_be_killed_is_waited_for_and_reported():
    from saferun.keeper.process_tree import end_processes

    begin = time.monotonic()
    assert end_processes(lambda: {1: -1}, limit_s=0.3) == (0, [1])
    assert time.monotonic() - begin > 0.3


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
def training(tmp_path):
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


NOTES_USER_SIGNALS = """
import os, signal, sys, time
def note(number, frame):
    with open(sys.argv[1], "a") as file: file.write(f"{signal.Signals(number).name}\\n")
    if number == signal.SIGUSR1 and sys.argv[2] == "ends": sys.exit(0)
for number in (signal.SIGUSR1, signal.SIGTERM): signal.signal(number, note)
open(sys.argv[1] + f".{os.getpid()}", "w").close()
while True: time.sleep(0.1)
"""


@pytest.fixture
def user_signals(tmp_path):
    """Start real ranks that note SIGUSR1; returns the run once all listen."""
    pytest.importorskip("torch")
    script, notes = tmp_path / "job.py", tmp_path / "notes"
    script.write_text(NOTES_USER_SIGNALS)
    receipts = tmp_path / "receipts"
    receipts.mkdir()

    @contextlib.contextmanager
    def start(how: str, **env: str):
        command = [str(TORCHRUN), "--nproc-per-node=2", str(script), str(notes), how]
        options = {"receipts": str(receipts), "grace_s": 40, "popen": {"env": env}}
        with supervised(tmp_path, command, **options) as run:
            until(lambda: len(list(tmp_path.glob("notes.*"))) == 2, run)
            for path in tmp_path.glob("notes.*"):
                (receipts / f"a1-r0-rank0-pid{path.suffix[1:]}.jsonl").touch()
            run.notes = lambda: notes.read_text().split() if notes.exists() else []
            yield run

    return start


@pytest.mark.slow
def test_torchrun_that_takes_user_signals_gets_them_and_all_ends(user_signals):
    names = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
    with user_signals("ends", PET_SIGNALS_TO_HANDLE=names) as run:
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
