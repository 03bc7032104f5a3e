"""Signals to an attempt: who gets which, how often, and what ends by them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import COMMON, FAMILY, PROGRAMS, agent, python, until
from supervised import supervised

from saferun.keeper import protocol
from saferun.supervise.ready.keeper_pool import start_keeper


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_signal_reaches_the_agent_once_and_ends_the_job(tmp_path, name):
    number = getattr(signal, name)
    with supervised(tmp_path, agent()) as run:
        run.arrived(**FAMILY)
        run.kill("saferun", signal.SIGQUIT)  # which ends nothing, and reaches nobody
        run.kill("saferun", number)
        ended = run.ended()
        assert ended["exit_code"] == 1
        assert ended["forwarded"] == [name]
        assert ended["interrupted"]
        assert len(run.members(f"heard-{number.value}")) == 1
        assert run.living() == {}


def test_signals_sent_to_the_whole_group_reach_the_agent_once(tmp_path):
    with supervised(tmp_path, agent(), popen={"start_new_session": True}) as run:
        run.arrived(**FAMILY)
        os.killpg(run.process.pid, signal.SIGTERM)
        assert run.ended()["forwarded"] == ["SIGTERM"]
        assert len(run.members(f"heard-{signal.SIGTERM.value}")) == 1


def test_job_gets_the_time_it_needs_to_end(tmp_path):
    rank = (PROGRAMS / "saving_rank.py").read_text(encoding="utf-8")
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
        assert run.living() == {}


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
        stale = subprocess.Popen(python(listening.replace("rank", "stale")), env=run.environ)
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
        assert set(run.members("rank")) <= set(run.living())


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


def test_user_signal_alone_counts_as_asked_and_not_as_interrupted(tmp_path):
    code = COMMON + "signal.signal(signal.SIGUSR1, lambda *a: sys.exit(1)); join('agent'); stay()"
    with supervised(tmp_path, python(code)) as run:
        run.arrived(agent=1)
        run.kill("saferun", signal.SIGUSR1)
        ended = run.ended()
        assert ended["asked_s"] is not None
        assert not ended["interrupted"]


def test_signal_that_comes_with_the_task_is_not_lost(tmp_path):
    standby = start_keeper()
    start = protocol.Start(["sleep", "1000"], dict(os.environ), own_group=True, tail_bytes=100)
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


@pytest.mark.slow
def test_torchrun_that_takes_user_signals_gets_them_and_all_ends(tmp_path):
    pytest.importorskip("torch")
    torchrun = Path(sys.executable).with_name("torchrun")
    names = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
    notes, receipts = tmp_path / "notes", tmp_path / "receipts"
    receipts.mkdir()
    command = [str(torchrun), "--nproc-per-node=2", str(PROGRAMS / "ends_at_a_user_signal.py")]
    options = {
        "receipts": str(receipts),
        "popen": {"env": {"PET_SIGNALS_TO_HANDLE": names}},
        "handled": names.split(","),
    }
    with supervised(tmp_path, [*command, str(notes)], grace_s=40, **options) as run:
        until(lambda: len(list(tmp_path.glob("notes.*"))) == 2, "both ranks listen")
        for path in tmp_path.glob("notes.*"):
            (receipts / f"a1-r0-rank0-pid{path.suffix[1:]}.jsonl").touch()
        run.kill("saferun", signal.SIGUSR1)
        ended = run.ended()
        assert (ended["exit_code"], ended["ended_by"]) == (1, "job")
        assert notes.read_text(encoding="utf-8").split() == ["SIGUSR1", "SIGUSR1"]
        assert f"Received {signal.SIGUSR1.value} death signal".encode() in run.err
        assert run.living() == {}
