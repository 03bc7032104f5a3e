"""Ranks that are forked from a process that has imported torch, beside ranks that are started."""

import importlib.util
import os
import time
from pathlib import Path

import pytest
from cases import slow
from sandbox import executable, python_program, text_of, write
from warm_jobs import ONCE, WAYS, Ranks, plain

from saferun.inject.start.imports import assigned_variables

if not all(map(importlib.util.find_spec, ("torch", "numpy"))):
    pytest.skip("needs torch and numpy", allow_module_level=True)


@pytest.fixture
def job(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


SAID_LAST = {  # how rank 5 of eight ends: the kind, and the root line
    "sys.exit('three shards, and 8 ranks want one each')": (
        "user-exception", "three shards, and 8 ranks want one each",
    ),
    "sys.stderr.write('no shard 5 is here\\n'); os._exit(3)": (
        "user-exception", "no shard 5 is here",
    ),
    "argparse.ArgumentParser().error('no shard 5 is given')": (
        "user-args-error", "train.py: error: no shard 5 is given",
    ),
}  # fmt: skip
ENDS = [(way, ending) for way in WAYS for ending in SAID_LAST]


@pytest.mark.parametrize(("way", "ending"), [ENDS[0], *slow(*ENDS[1:])])
def test_what_one_of_eight_ranks_says_as_it_exits_is_the_root_line(job, way, ending):
    write(
        job.script,
        "import argparse, os, signal, sys\n"
        "print('begins', flush=True)\n"
        f"if os.environ['RANK'] == '5':\n    {ending}\n"
        "signal.pause()\n",
    )
    done = job.run(way, "--profile=cpu", "--nproc-per-node=8", "train.py")
    kind, said = SAID_LAST[ending]
    messages = [line for line in done.stderr.splitlines() if line.startswith("saferun: ")]
    assert any(f"({kind} on rank 5, " in line for line in messages), messages
    assert f"saferun:   {said}" in messages
    assert not any("attempt 2" in line for line in messages)


@pytest.mark.parametrize(("way", "ending"), [ENDS[0], *slow(*ENDS[1:])])
def test_what_a_rank_says_as_it_exits_is_the_root_line_though_its_peers_died_too(job, way, ending):
    """torchrun looks when both have ended, and names the one with an exception."""
    job.script.write_text(
        "import argparse, os, signal, sys, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]\n"
        "dist.all_gather(pids, torch.tensor([os.getpid()]))\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.kill(agent := os.getppid(), signal.SIGSTOP)\n"
        "    if not os.fork():\n"
        "        os.closerange(3, 1 << 16)\n"
        "        while any(' Z ' not in open(f'/proc/{pid.item()}/stat').read() for pid in pids):\n"
        "            time.sleep(0.01)\n"
        "        os.kill(agent, signal.SIGCONT)\n"
        "        os._exit(0)\n"
        f"    {ending}\n"
        "while True:\n    dist.all_reduce(torch.ones(1))\n",
        encoding="utf-8",
    )
    done = job.run(way, "--profile=cpu", "--nproc-per-node=2", "train.py")
    kind, said = SAID_LAST[ending]
    messages = [line for line in done.stderr.splitlines() if line.startswith("saferun: ")]
    assert "Connection closed by peer" in done.stderr
    assert any(f"({kind} on rank 1, " in line for line in messages), messages
    assert f"saferun:   {said}" in messages
    assert not any("attempt 2" in line for line in messages)


@pytest.mark.slow
def test_a_syntax_error_has_no_frame_of_ours(job):
    write(job.script, "import torch\ndef broken(:\n")
    words = (*ONCE, "--nproc-per-node=1", "train.py")  # two ranks may fail at once, or one after
    seen = [plain(job.run(way, *words).stderr) for way in WAYS]
    assert seen[1] == seen[0]
    assert "SyntaxError" in seen[0]


@pytest.mark.slow
def test_a_ctrl_c_that_comes_as_the_program_fails_leaves_its_own_error(job):
    """As rank 1 has it whose peer died of the same Ctrl-C: both in one call of C++."""
    write(
        job.script,
        "import ctypes, itertools, operator, signal, torch\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "interrupt = getattr(ctypes.PyDLL(None), 'raise')\n"
        "list(itertools.chain(map(interrupt, [2]), map(operator.truediv, [1], [0])))\n",
    )
    done = job.run(WAYS[1], *ONCE, "--nproc-per-node=1", "train.py")
    assert 'File "<string>"' not in done.stderr
    assert "KeyboardInterrupt" not in done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert done.returncode == 1


HEAVY = "import os\nopen(os.environ['LOG'], 'a').write(f'{os.getpid()}\\n')\n"


def importers(job):
    """Return how many processes of a run import the package `heavy`."""
    log = job.folder / "log"
    log.unlink(missing_ok=True)
    assert job.run("warm", LOG=str(log)).returncode == 0
    assert all(start.startswith("warm ") for start in job.starts())
    return len(set(text_of(log).split()))


@pytest.mark.slow
def test_what_ranks_import_is_imported_once_from_the_second_run_on(job):
    job.package("heavy", HEAVY)
    write(job.script, "import torch\nimport heavy, os\nprint(os.environ['RANK'] + '\\n', end='')\n")
    assert [importers(job) for _ in range(2)] == [2, 1]


@pytest.mark.slow
def test_what_the_first_step_of_an_optimizer_imports_is_imported_ahead_and_hooked(job):
    write(
        job.script,
        "import os, sys, torch, torch.distributed as dist\n"
        "ahead = 'torch._dynamo' in sys.modules\n"
        "dist.init_process_group('gloo')\n"
        "p = torch.nn.Parameter(torch.ones(2))\np.sum().backward()\n"
        "torch.optim.AdamW([p]).step()\n"
        "torch.compile(torch.sin, backend='eager')(p)\n"
        "graphs = torch._dynamo.utils.counters['stats']['unique_graphs']\n"
        "os.write(1, f'{ahead} {graphs}\\n'.encode())\n"
        "if os.fork():\n    os.wait()\n"
        "else:\n    import torch._inductor.compile_fx\n    os._exit(0)\n",
    )
    words = ("--set=hooks.compile.enabled=off", "--nproc-per-node=2", "train.py")
    runs = [((), "False 1"), ((), "True 1"), (words, "True 0")]
    for options, seen in runs:
        assert job.run("warm", *options).stdout.splitlines() == [seen, seen]
        assert len(list((job.last() / "receipts").glob("*.imports"))) == 1  # no child's


@pytest.mark.slow
def test_a_module_that_must_be_left_to_the_ranks_is_found_out_once_a_week(job):
    job.package("heavy", HEAVY)
    job.package("odd", "import os\nFOUND = os.environ['RANK']\n")
    write(job.script, "import torch, heavy, odd\nprint(f'{odd.FOUND}\\n', end='')\n")
    assert [importers(job) for _ in range(3)] == [2, 2, 1]
    (note,) = (job.cache / "imports").glob("*.left")
    assert note.stat().st_mode & 0o777 == 0o600
    week_ago = time.time() - 7 * 86400
    os.utime(note, (week_ago, week_ago))
    assert [importers(job) for _ in range(2)] == [2, 1]


@pytest.mark.slow
def test_a_package_that_assigns_what_torch_reads_before_torch_has_ranks_started(job):
    job.package("early", "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nos.environ.get('RANK')\n")
    write(job.script, "import early, torch\nprint(f'{torch.get_num_threads()}\\n', end='')\n")
    job.run("warm")  # the first start does not know the package
    done = job.run("warm")
    assert done.stdout.split() == ["2", "2"]
    assert job.said + "OMP_NUM_THREADS is set" in done.stderr


@pytest.mark.slow
def test_a_module_beside_the_script_is_not_hidden_by_one_that_is_imported(job):
    write(job.folder / "filelock.py", "MINE = True\n")
    job.package("user", "import filelock_of_torch\n")
    write(job.folder / "numpy.py", "MINE = True\n")
    write(job.script, "import numpy\nprint(f'{numpy.MINE}\\n', end='')\n")
    done = job.run("warm")
    assert done.stdout.split() == ["True", "True"]
    assert job.said in done.stderr
    assert "numpy.py has the name of a module" in done.stderr


@pytest.mark.slow
def test_torchruns_own_restart_forks_again_and_notices_a_changed_package(job):
    package = job.package("version", "NUMBER = 1\n")
    write(
        job.script,
        "import torch, version, os, sys, time\n"
        "count = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "start = os.environ['SAFERUN_START'].split()[0]\n"
        "os.write(1, f'{count} {version.NUMBER} {start}\\n'.encode())\n"
        "if int(count) < 2: sys.exit(1)\n",
    )
    words = ("--max-restarts=2", "--monitor-interval=0.1", "train.py")
    assert job.run("warm", *words).returncode == 0
    done = job.run("warm", *words)
    assert set(done.stdout.splitlines()) == {"0 1 warm", "1 1 warm", "2 1 warm"}
    write(
        job.script,
        f"import pathlib\npathlib.Path({str(package)!r}).write_text('NUMBER = 2\\n')\n"
        + text_of(job.script),
    )
    done = job.run("warm", *words)
    assert "1 2 spawn" in done.stdout.splitlines()
    assert f"{package} has changed since it was imported" in done.stderr


@pytest.mark.slow
def test_a_retry_forks_ranks_that_have_imported_all(job):
    job.package("heavy", "X = 1\n")
    write(
        job.script,
        "import os, signal, successor\nimport torch, heavy\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if os.environ['SAFERUN_ATTEMPT'] == '1' and os.environ['RANK'] == '1':\n"
        "    successor.await_agent()\n    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "dist.barrier()\nos.write(1, b'done\\n')\n",
    )
    done = job.run("warm")
    assert (done.returncode, done.stdout.split()) == (0, ["done", "done"])
    first, _, second, _ = job.starts()
    assert first.startswith("warm 0 ")
    assert int(second.split()[1]) > 0


@pytest.mark.slow
def test_a_retry_is_warm_though_a_cure_gives_each_rank_a_cache(job):
    write(
        job.script,
        "import os, signal, successor, torch, torch.distributed as dist\n"
        "attempt, rank = os.environ['SAFERUN_ATTEMPT'], os.environ['RANK']\n"
        "dist.init_process_group('gloo')\nimport torch._dynamo\n"
        "if attempt < '3' and rank == '1':\n    successor.await_agent()\n"
        "if attempt == '1' and rank == '1':\n"
        "    exec(compile('raise RuntimeError(\"CUDA driver error: invalid argument\")',\n"
        "        '/e/torch/_inductor/runtime/static_cuda_launcher.py', 'exec'))\n"
        "if attempt == '2' and rank == '1':\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "dist.barrier()\n"
        "os.write(1, (os.environ['TORCHINDUCTOR_CACHE_DIR'] + '\\n').encode())\n",
    )
    cache = job.folder / "inductor"
    (cache / "fxgraph" / "ab" / "of-another-run").mkdir(parents=True)
    done = job.run("warm", TORCHINDUCTOR_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr
    assert [path.split("/")[-2] for path in sorted(done.stdout.split())] == ["rank0", "rank1"]
    ways = [start.split()[0] for start in job.starts()]
    # What waits for the second attempt lacks the cure's caches.
    assert ways == ["warm", "warm", "spawn", "spawn", "warm", "warm"]


@pytest.mark.slow
def test_a_user_whose_sitecustomize_reads_rank_has_ranks_started(job):
    write(job.installed / "sitecustomize.py", "import os\nMINE = os.environ.get('RANK')\n")
    write(  # in one piece: torchrun gives its ranks -u
        job.script,
        "import os, torch, sitecustomize\nos.write(1, f'{sitecustomize.MINE}\\n'.encode())\n",
    )
    done = job.run("warm")
    assert sorted(done.stdout.split()) == ["0", "1"]
    assert "sitecustomize.py reads RANK" in done.stderr


@pytest.mark.slow
def test_a_torchrun_whose_python_has_flags_has_ranks_started_without_them(job):
    text = python_program(
        "import sys\nfrom torch.distributed.run import main\n"
        "if __name__ == '__main__':\n    sys.exit(main())\n",
        "-s",
    )
    torchrun = executable(job.folder / "bin" / "torchrun", text)
    write(job.script, "import sys, torch\nprint(f'{sys.flags.no_user_site}\\n', end='')\n")
    done = job.run("warm", PATH=f"{torchrun.parent}{os.pathsep}{os.environ['PATH']}")
    assert done.stdout.split() == ["0", "0"]
    assert job.said + "torchrun's own Python does not start them" in done.stderr


def test_variables_that_a_script_assigns_are_found(tmp_path):
    script = tmp_path / "t.py"
    write(
        script,
        "import os\nfrom os import environ\n"
        "os.environ['A'] = '1'\nenviron.setdefault('B', '1')\n"
        "def f():\n    os.environ.update({'C': '1'}, D='2')\n    os.putenv('E', '1')\n"
        "x = os.environ['F']\n",
    )
    assert assigned_variables(str(script)) == {"A", "B", "C", "D", "E"}
