"""An attempt of the real torchrun: real ranks, real signals."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

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
@pytest.mark.parametrize("victim", ["saferun", "agent"])
def test_real_training_leaves_nothing_after_any_one_is_killed(training, victim):
    run = training
    ranks = _ranks(run.mark)
    assert len(ranks) == 2
    pids = {"agent": parent(ranks[0]), "saferun": run.process.pid}
    os.kill(pids[victim], signal.SIGKILL)
    run.nothing_lives()
    if victim == "agent":
        assert run.ended()["exit_code"] == 137


@pytest.mark.slow
def test_torchrun_that_takes_user_signals_gets_them_and_all_ends(tmp_path):
    pytest.importorskip("torch")
    names = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
    notes, receipts = tmp_path / "notes", tmp_path / "receipts"
    receipts.mkdir()
    command = [str(TORCHRUN), "--nproc-per-node=2", str(PROGRAMS / "ends_at_a_user_signal.py")]
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
        assert notes.read_text().split() == ["SIGUSR1", "SIGUSR1"]
        assert f"Received {signal.SIGUSR1.value} death signal".encode() in run.err
        assert living(run.mark) == {}


def _ranks(mark: str) -> list[int]:
    found = []
    for pid in living(mark):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends meanwhile
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if any(word.startswith(b"LOCAL_RANK=") for word in environ) and os.getsid(pid) == pid:
                found.append(pid)
    return found
