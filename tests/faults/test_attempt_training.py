"""An attempt of the real torchrun: real ranks, real signals."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import PROGRAMS, ROOT, Supervised, living, parent, supervised, until

TORCHRUN = Path(sys.executable).with_name("torchrun")
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
    pids = {"rank": ranks[0], "agent": parent(ranks[0]), "saferun": run.process.pid}
    pids["keeper"] = parent(pids["agent"])
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
            with contextlib.suppress(ProcessLookupError):  # torchrun ends them meanwhile
                os.kill(pid, signal.SIGKILL)
        assert run.ended()["exit_code"] == 1
        assert living(run.mark) == {}


def _ranks(mark: str) -> list[int]:
    found = []
    for pid in living(mark):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends meanwhile
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if any(word.startswith(b"LOCAL_RANK=") for word in environ) and os.getsid(pid) == pid:
                found.append(pid)
    return found
