"""Tests that only a GPU can show; skipped with a reason elsewhere."""

import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from sandbox import OWN_GPUS

ROOT = pathlib.Path(__file__).resolve().parents[3]


def gpu_count() -> int:
    """GPUs that torch sees, asked in a process of its own."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    with pytest.MonkeyPatch.context() as patch:
        show_gpus(patch)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else 0


def show_gpus(patch: pytest.MonkeyPatch) -> None:
    """Restore the choice of GPUs that the shell made; no other test knows it."""
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if os.environ[OWN_GPUS] != "all":
        patch.setenv("CUDA_VISIBLE_DEVICES", os.environ[OWN_GPUS])


@pytest.fixture(autouse=True)
def own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus(monkeypatch)


@pytest.fixture(scope="session")
def gpus() -> int:
    count = gpu_count()
    if not count:
        pytest.skip("no GPU that torch can use")
    return count


@pytest.fixture
def two_gpus(gpus: int) -> int:
    if gpus < 2:
        pytest.skip("needs two GPUs")
    return gpus


class Result:
    """A finished job: its JSON lines by rank, its streams, its receipts."""

    def __init__(self, done: subprocess.CompletedProcess, receipts: pathlib.Path) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        # two ranks may print on one line: print() writes the text and its end apart
        self.reported = [json.loads(text) for text in re.findall(r"\{[^{}]*\}", done.stdout)]
        self.receipts = [
            json.loads(line)
            for file in receipts.glob("*/receipts/*.jsonl")
            for line in file.read_text(encoding="utf-8").splitlines()
        ]


@pytest.fixture
def saferun(tmp_path: pathlib.Path) -> Callable[..., Result]:
    """Run a script text under saferun with the given words before it."""

    def run(text: str, *argv: str, timeout: float = 240, **environ: str) -> Result:
        script = tmp_path / "job.py"
        script.write_text(text, encoding="utf-8")
        runs = tmp_path / "runs"
        path = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        done = subprocess.run(
            [sys.executable, "-m", "saferun", "--run-dir", str(runs), *argv, str(script)],
            env={**os.environ, "PYTHONPATH": path, "HOME": str(tmp_path), **environ},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return Result(done, runs)

    return run
