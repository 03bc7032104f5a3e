"""An environment that our variables make too large is reported before anything starts."""

import os
import resource
import subprocess
import sys

import pytest

from saferun.planning import exec_limit

STACK = 2 << 20  # a quarter of it: what a program may be given


def smaller_stack():
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, STACK))


def environment(tmp_path, count: int) -> dict[str, str]:
    """An environment of 400,000 bytes and `count` more."""
    fillers = {f"FILLER_{n}": "x" * 100_000 for n in range(4)}
    return {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **fillers, "MORE": "x" * count}


def start(argv: list[str], env: dict[str, str], **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, env=env, preexec_fn=smaller_stack, capture_output=True, text=True, **options
    )


def test_the_size_is_what_the_kernel_counts(tmp_path):
    argv = ["/bin/true", "word"]
    most = exec_limit.limit(STACK)
    spare = most - exec_limit.size(argv, environment(tmp_path, 0))
    largest = environment(tmp_path, spare)
    assert exec_limit.size(argv, largest) == most
    assert start(argv, largest).returncode == 0
    with pytest.raises(OSError, match="Argument list too long"):
        start(argv, {**largest, "MORE": largest["MORE"] + "x"})


@pytest.mark.parametrize("retries", ["0", "2"])
def test_it_is_told_before_the_start_and_leaves_no_run(tmp_path, retries):
    script = tmp_path / "train.py"
    script.write_text("open('started', 'w')\n", encoding="utf-8")
    options = ["--profile=cpu", "--set=launcher=python", f"--retries={retries}"]
    argv = [sys.executable, "-m", "saferun", *options, str(script)]
    spare = exec_limit.limit(STACK) - exec_limit.size(argv, environment(tmp_path, 0))
    done = start(argv, environment(tmp_path, spare - 200), cwd=tmp_path)
    assert done.returncode == 69, done.stderr
    assert "by variables that saferun sets" in done.stderr
    assert "the largest of yours is MORE" in done.stderr
    assert not (tmp_path / "started").exists()
    assert not list(tmp_path.glob(".local/state/saferun/runs/*"))
    done = start(argv, environment(tmp_path, 0), cwd=tmp_path)
    assert (done.returncode, (tmp_path / "started").exists()) == (0, True), done.stderr
