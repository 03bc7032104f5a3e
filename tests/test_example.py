"""The example trains, survives interruption bit by bit, and gives each rank its own data.

One run has two ranks under torchrun; runs of one rank are made in this process, since a fresh one
imports torch for seconds.
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers import until
from repo import ROOT
from sandbox import captured

EXAMPLE = ROOT / "examples" / "train_gpt.py"
WRITER = ROOT / "tests" / "programs" / "example" / "checkpoint_writer.py"
SMALL = ["--batch", "4", "--block", "32", "--layers", "1", "--width", "32", "--log-every", "1"]
STEP = re.compile(r"^step (\d+) loss ([\d.]+) [\d,]+ tokens/s$", re.MULTILINE)
DONE = re.compile(r"^done step=(\d+) train_loss=([\d.]+) val_loss=([\d.]+)$")


@pytest.fixture(scope="module", autouse=True)
def import_torch() -> None:
    """Import it for the tests, and not for each worker that only collects them."""
    global torch
    torch = pytest.importorskip("torch")


def command(*arguments: str, ranks: int = 2) -> list[str]:
    """The example under a real torchrun, or under plain Python for one rank."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *torchrun * (ranks > 1), str(EXAMPLE), *SMALL, *arguments]


def environment() -> dict[str, str]:
    """One thread each and no GPU: the same sums in the same order, on every machine."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def train(out: Path, *arguments: str, ranks: int = 2) -> str:
    """Train to the end; return what was printed."""
    done = captured(*command("--out", str(out), *arguments, ranks=ranks), env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed: str) -> dict[int, str]:
    """Return {step: loss}, as printed."""
    return {int(step): loss for step, loss in STEP.findall(printed)}


def checkpoint(out: Path) -> dict[str, Any]:
    return torch.load(out / "checkpoint.pt", weights_only=True)


def differences(first: Any, second: Any, at: str = "") -> list[str]:
    """Name every place where two checkpoints are not the same, bit by bit."""
    if isinstance(first, torch.Tensor):
        return [] if torch.equal(first, second) else [at]
    if isinstance(first, dict):
        assert first.keys() == second.keys(), at
        return [d for key in first for d in differences(first[key], second[key], f"{at}.{key}")]
    if isinstance(first, (list, tuple)):
        assert len(first) == len(second), at
        pairs = enumerate(zip(first, second, strict=True))
        return [d for n, (one, two) in pairs for d in differences(one, two, f"{at}[{n}]")]
    return [] if first == second else [at]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def trainer(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Make a trainer of one rank in this process: `trainer(out, *arguments)`.

    Its text is short, of seven steps an epoch; reading the real one costs seconds.
    """
    text = (torch.arange(7 * 4 * 32 + 40) * 37 % 128).to(torch.uint8)
    monkeypatch.setattr(example, "read_sources", lambda: (text, text))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def make(out: Path, *arguments: str) -> Any:
        argv = ["train_gpt.py", "--out", str(out), *SMALL, *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        return example.Trainer(example.parse_arguments())

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_two_ranks_under_torchrun_lower_the_loss_and_end_with_one_readable_line(tmp_path):
    printed = train(tmp_path, "--steps", "60", "--lr", "1e-2", "--eval-every", "30")
    trajectory = losses(printed)
    assert list(trajectory) == list(range(1, 61))
    step, train_loss, held_out = DONE.match(printed.splitlines()[-1]).groups()
    assert int(step) == 60
    assert float(trajectory[1]) > 4.5
    assert float(train_loss) < 3.4
    assert float(held_out) < 3.6
    assert "step 30 held-out loss" in printed


def interrupt(out: Path, after_step: int, *arguments: str, ranks: int) -> str:
    """Start a run and SIGKILL one rank as soon as it prints that step; return what it printed."""
    run = subprocess.Popen(
        command("--out", str(out), *arguments, ranks=ranks),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    printed = ""
    try:
        for line in run.stdout:
            printed += line
            if line.startswith(f"step {after_step} loss"):
                os.kill(last_rank(run.pid) if ranks > 1 else run.pid, signal.SIGKILL)
        assert run.wait() != 0
    finally:
        run.stdout.close()
        if run.poll() is None:
            run.kill()
            run.wait()
    return printed


def last_rank(agent: int) -> int:
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text(encoding="utf-8").split()
    marked = (
        pid
        for pid in children
        if "\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_text(encoding="utf-8")
    )
    return int(next(marked))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (2, 0)])
def test_a_killed_and_resumed_run_ends_bit_by_bit_as_an_uninterrupted_one(tmp_path, ranks, workers):
    arguments = ["--steps", "60", "--save-every", "5", "--dropout", "0.1"]
    arguments += ["--workers", str(workers)]
    whole = train(tmp_path / "whole", *arguments, ranks=ranks)
    killed = interrupt(tmp_path / "killed", 8, *arguments, ranks=ranks)
    assert "done" not in killed
    saved = checkpoint(tmp_path / "killed")["step"]
    assert 5 <= saved < 60
    resumed = train(tmp_path / "killed", *arguments, "--resume", ranks=ranks)
    assert min(losses(resumed)) == saved + 1
    assert losses(resumed).items() <= losses(whole).items()
    assert resumed.splitlines()[-1] == whole.splitlines()[-1]
    assert differences(checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "killed")) == []


def test_a_resumed_run_ends_bit_by_bit_as_a_whole_one_and_goes_on_in_the_order_of_its_epoch(
    example, trainer, tmp_path, monkeypatch
):
    """The interruption falls into the third epoch."""
    arguments = ["--dropout", "0.1", "--steps", "30", "--save-every", "17"]

    def stop_at_18(trainer: Any, loss: Any) -> Any:
        if trainer.step == 18:
            raise KeyboardInterrupt
        return report(trainer, loss)

    trainer(tmp_path / "whole", *arguments).train()
    report, part = example.Trainer.report, trainer(tmp_path / "part", *arguments)
    monkeypatch.setattr(example.Trainer, "report", stop_at_18)
    with pytest.raises(KeyboardInterrupt):
        part.train()
    monkeypatch.setattr(example.Trainer, "report", report)
    saved = checkpoint(tmp_path / "part")
    assert (saved["step"], saved["epoch"]) == (17, 2)
    trainer(tmp_path / "part", *arguments, "--resume").train()
    assert differences(checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "part")) == []


def test_resume_without_a_checkpoint_begins_anew_and_a_finished_run_stays_finished(
    trainer, tmp_path, capsys
):
    trainer(tmp_path, "--steps", "3", "--resume").train()
    first = capsys.readouterr().out
    trainer(tmp_path, "--steps", "3", "--resume").train()
    again = capsys.readouterr().out
    assert list(losses(first)) == [1, 2, 3]
    assert losses(again) == {}
    assert again.splitlines()[-1] == first.splitlines()[-1]


def test_the_time_limit_ends_a_run_cleanly_and_saves(trainer, tmp_path, capsys):
    trainer(tmp_path, "--steps", "1000000", "--max-seconds", "0.1").train()
    assert_ended_and_saved(capsys.readouterr().out, tmp_path)


@pytest.mark.slow
def test_the_time_limit_ends_two_ranks_at_the_same_step(tmp_path):
    assert_ended_and_saved(train(tmp_path, "--steps", "1000000", "--max-seconds", "1"), tmp_path)


def assert_ended_and_saved(printed: str, out: Path) -> None:
    done = DONE.match(printed.splitlines()[-1])
    assert checkpoint(out)["step"] == int(done[1])


@pytest.mark.slow
def test_compiled_training_gives_the_same_first_losses(tmp_path):
    plain = losses(train(tmp_path, "--steps", "3", ranks=1))
    compiled = losses(train(tmp_path, "--steps", "3", "--compile", ranks=1))
    for step, loss in plain.items():
        assert float(compiled[step]) == pytest.approx(float(loss), abs=2e-3)


@pytest.mark.slow
def test_two_ranks_save_without_numpy_which_torch_does_not_bring(tmp_path, monkeypatch):
    (tmp_path / "numpy.py").write_text(
        "raise ModuleNotFoundError('hidden', name='numpy')\n", encoding="utf-8"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    train(tmp_path / "out", "--steps", "2")
    assert len(checkpoint(tmp_path / "out")["random"]) == 2


def test_ranks_read_disjoint_data_and_a_resumed_sampler_the_rest_of_it(example):
    data = example.Windows(torch.arange(1001) % 128, 10)

    def picked(rank, skip=0, epoch=3):
        sampler = example.ResumableSampler(data, 3, rank, seed=7, drop_last=True)
        sampler.set_epoch(epoch)
        sampler.skip = skip
        return list(sampler)

    shares = [picked(rank) for rank in range(3)]
    assert len(set().union(*shares)) == sum(map(len, shares)) == 99
    assert [picked(rank, skip=20) for rank in range(3)] == [share[20:] for share in shares]
    assert picked(0, epoch=4) != shares[0]


def test_the_target_of_a_window_is_its_text_one_character_on(example):
    windows = example.Windows(torch.arange(101), 10)
    x, y = windows[9]
    assert (len(windows), x.tolist(), y.tolist()) == (10, [*range(90, 100)], [*range(91, 101)])


def test_no_character_sees_a_later_one(example):
    options = type("Options", (), {"layers": 2, "heads": 2, "width": 16, "block": 8, "dropout": 0})
    model = example.GPT(options).eval()
    seen = []
    model.head.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    first = torch.randint(0, 128, (1, 8))
    second = first.clone()
    second[0, 5:] = (second[0, 5:] + 1) % 128
    for text in (first, second):
        model(text, text)
    assert torch.equal(seen[0][:, :5], seen[1][:, :5])
    assert not torch.equal(seen[0][:, 5:], seen[1][:, 5:])


def test_held_out_files_are_not_trained_on(example):
    train_text, held_out_text = example.read_sources()
    assert 5 < len(train_text) / len(held_out_text) < 20
    assert int(train_text.max()) < example.VOCABULARY
    needle = bytes(held_out_text[2000:2200].tolist())
    assert needle not in bytes(train_text.tolist())


def test_a_write_that_fails_half_way_leaves_the_old_checkpoint(example, tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    example.save(path, {"step": 1})

    def half(state, file):
        file.write(b"PK\x03\x04 half a checkpoint")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="No space"):
        example.save(path, {"step": 2})
    monkeypatch.undo()
    assert torch.load(path, weights_only=True) == {"step": 1}


@pytest.mark.slow
def test_a_checkpoint_is_readable_whenever_its_writer_is_killed(tmp_path):
    path = tmp_path / "checkpoint.pt"
    temporary = path.with_name(path.name + ".tmp")
    torn = 0
    for size in (0, 8 << 20, 16 << 20, 24 << 20):  # of the 64 MiB that each write has
        path.unlink(missing_ok=True)
        run = subprocess.Popen([sys.executable, WRITER, EXAMPLE, path], stdout=subprocess.PIPE)
        try:
            assert run.stdout.readline() == b"writing\n"
            until(lambda size=size: written_bytes(temporary) > size, "a write is under way", 300)
        finally:
            run.kill()
            run.wait()
            run.stdout.close()
        torn += temporary.exists()
        state = torch.load(path, weights_only=True)
        assert torch.all(state["x"] == state["step"])
    assert torn, "no kill hit a write: the test measured nothing"


def written_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def test_the_example_knows_nothing_of_saferun():
    assert "saferun" not in EXAMPLE.read_text(encoding="utf-8").lower()
