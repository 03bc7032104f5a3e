"""What `init` promises: ranks check in, agree, and set off together, or it is said who did not."""

import runpy
import sys
from typing import Any

import pytest
import ranks
from cases import few, slow, with_limits
from helpers import free_port
from ranks import Job, launch
from releases import needs_torch
from repo import installed_torch, source

PLAIN = source("inject/sum_of_ranks")


def applied(job: Job) -> list[dict[str, Any]]:
    return [line for line in job.hook("init") if line["outcome"] == "applied"]


# Who is missing


def test_ranks_that_never_arrive_are_named_within_the_timeout_in_one_line(run_ranks):
    once = "os.write(2, f'{kind.__name__}: {error}\\n'.encode())"  # two ranks' prints interleave
    script = f"import os, sys\nsys.excepthook = lambda kind, error, trace: {once}\n"
    script += "if os.environ['RANK'] in '13': sys.exit(0)\n" + PLAIN
    text = "ranks 1, 3 of 4 did not reach init_process_group within "
    job = with_limits(
        lambda s: run_ranks(script, ranks=4, init={"timeout_s": s}),
        lambda job: text in "".join(job.messages()),
        first_s=2,
    )
    (message,) = job.messages()
    text = message.removeprefix("saferun: ")
    assert job.code == 1
    assert f"\nDistStoreError: {text}\n" in job.err


@pytest.mark.parametrize("agree", ["error", "off"])
def test_a_rank_that_hangs_before_init_is_named_and_ended(run_ranks, agree):
    """By one line of ours, without the store's own; the receipt has it, too."""
    script = "import os, time\nif os.environ['RANK'] == '1': time.sleep(600)\n" + PLAIN
    job = with_limits(
        lambda s: run_ranks(script, init={"timeout_s": s, "agree": agree}),
        lambda job: "rank 1 of 2 did not reach" in "".join(job.messages()),
    )
    assert (job.code, len(job.messages()), "[c10d]" in job.err) == (1, 1, False)
    found = [(line["rank"], line["missing"]) for line in job.hook("init") if "missing" in line]
    assert found[-1] == (0, [1])


@pytest.mark.slow
def test_a_longer_timeout_of_the_script_wins(run_ranks):
    script = PLAIN.replace('("gloo")', '("gloo", timeout=datetime.timedelta(seconds=60))')
    late = "import os, time\nif os.environ['RANK'] == '1': time.sleep(1)\n"  # longer than our limit
    script = late + script
    job = run_ranks("import datetime\n" + script, init={"timeout_s": 0.2})
    assert (job.code, job.messages(), job.out.count("sum 2.0")) == (0, [], 2)


def test_a_timeout_of_the_script_wins(run_ranks):
    job = run_ranks(source("inject/init_alone"), init={"timeout_s": 600})
    assert (job.code, job.out) == (0, "alone\n"), job.err


def test_a_call_that_torch_refuses_is_torchs_affair(run_ranks):
    script = PLAIN.replace(
        'dist.init_process_group("gloo")',
        "try:\n    dist.init_process_group('gloo', no_such_word=1)\n"
        "except TypeError:\n    dist.init_process_group('gloo')",
    )
    job = run_ranks(script)
    assert (job.code, job.messages()) == (0, [])


def test_ranks_that_a_script_numbers_anew_meet_all_the_same(run_ranks):
    """A middle rank keeps its number: it must not wait for the others, who changed theirs."""
    script = PLAIN.replace(
        'dist.init_process_group("gloo")',
        'w = int(os.environ["WORLD_SIZE"]); r = w - 1 - int(os.environ["RANK"])\n'
        'dist.init_process_group("gloo", rank=r, world_size=w)',
    )
    job = run_ranks(script, ranks=3, init={"timeout_s": 30})
    assert (job.code, job.messages(), job.out.count("sum 3.0")) == (0, [], 3)


@needs_torch("2.8", "TORCH_GLOO_LAZY_INIT")
def test_an_init_that_waits_for_nobody_stays_so(run_ranks):
    """With lazy gloo rank 1 may depend on what rank 0 does after its init."""
    lazy = {"TORCH_GLOO_LAZY_INIT": "1"}
    job = run_ranks(source("inject/late_for_init"), init={"timeout_s": 60}, environ=lazy)
    assert (job.code, job.out.splitlines()) == (0, ["2.0 True"] * 2), job.err


# Agreement

WITHOUT_CUDA = "import os, torch\ntorch.version.cuda = None\n"  # whatever build it is
LIE = WITHOUT_CUDA + "if os.environ['RANK'] == '2':\n    {}\n" + PLAIN


def test_every_rank_is_refused_when_ranks_differ(run_ranks):
    refused = PLAIN.replace(
        'dist.init_process_group("gloo")',
        """
try:
    dist.init_process_group("gloo")
except RuntimeError as error:
    print(f"refused {error}", flush=True)
    raise SystemExit(0)
""",
    )
    lie = "torch.version.cuda = 'x'; torch.__version__ = '2.0.0'"
    script = f"{WITHOUT_CUDA}if os.environ['RANK'] == '2': {lie}\n{refused}"
    job = run_ranks(script, ranks=3)
    torch = runpy.run_path(str(installed_torch()[0] / "version.py"))["__version__"]
    said = f"rank 2 has torch 2.0.0, ranks 0-1 have {torch}; rank 2 has CUDA x, ranks 0-1 have none"
    assert job.out.count(f"refused ranks differ: {said}. Give all ranks the same") == 3


def test_a_rank_that_sees_no_gpu_and_takes_gloo_is_named(run_ranks):
    script = PLAIN.replace('"gloo"', '"gloo" if os.environ["RANK"] == "1" else "nccl"')
    job = run_ranks("import os\n" + script, ranks=3)
    assert job.code == 1
    assert "ranks differ: rank 1 has backend gloo, ranks 0, 2 have nccl. Give" in job.err


def test_on_gloo_no_gpu_is_asked_for(run_ranks):
    lie = "torch.cuda.is_initialized = lambda: True; torch.cuda.device_count = lambda: 0"
    lie += "; torch.cuda.get_device_name = lambda: 'NVIDIA B200'"
    job = run_ranks(LIE.replace("{}", lie, 1), ranks=3)
    assert (job.code, job.messages()) == (0, [])


def test_gpu_types_and_nccl_versions_that_differ_are_named(run_ranks):
    job = run_ranks(source("inject/differing_gpus"), ranks=3)
    assert job.code == 1
    assert "rank 1 has NCCL 2.27.6, ranks 0, 2 have 2.27.5" in job.err
    assert "rank 2 has GPU NVIDIA A100, ranks 0-1 have NVIDIA H100" in job.err


def test_each_rank_writes_which_nccl_it_has_and_how_many_ranks_there_are(run_ranks):
    fake = "torch.cuda.is_available = lambda: True\ntorch.cuda.nccl.version = lambda: (2, 32, 3)\n"
    fake += "torch.distributed.Backend.default_device_backend_map.update(cuda='gloo')\n"
    job = run_ranks(f"import torch\n{fake}" + PLAIN.replace('"gloo"', ""))
    seen = [line for line in job.hook("init") if line["outcome"] == "observed"]
    found = sorted((line["rank"], line["world_size"], line["nccl"]) for line in seen)
    assert found == [(0, 2, "2.32.3"), (1, 2, "2.32.3")], job.err


@pytest.mark.parametrize("agree", ["warn", "off"])
def test_warn_reports_the_difference_once_and_the_job_runs(run_ranks, agree):
    script = LIE.replace("{}", "torch.version.cuda = '11.8'", 1)
    job = run_ranks(script, ranks=3, init={"agree": agree})
    said = "saferun: ranks differ: rank 2 has CUDA 11.8, ranks 0-1 have none"
    assert job.messages() == [said] * (agree == "warn")
    assert (job.code, job.out.count("sum 3.0")) == (0, 3)


def test_other_arguments_only_warn_in_one_line(run_ranks):
    script = "import os, sys\nif os.environ['RANK'] == '0': sys.argv[2] = '0.2'\n" + PLAIN
    job = run_ranks(script, "--lr", "0.1")
    warning = "saferun: rank 1 was started with other arguments than rank 0: 0.1 against 0.2"
    assert job.messages() == [warning]
    assert (job.code, job.out.count("sum 2.0")) == (0, 2)


# Whatever name it goes by

NAMES = {
    "torch.distributed": "import torch.distributed as dist; dist.init_process_group('gloo')",
    "from-import": "from torch.distributed import init_process_group as f; f(backend='gloo')",
    "distributed_c10d": "import torch.distributed.distributed_c10d as c\n"
    "c.init_process_group('gloo')",
    "explicit-env": "import os, torch.distributed as d; d.init_process_group('gloo', 'env://',"
    " rank=int(os.environ['RANK']), world_size=int(os.environ['WORLD_SIZE']))",
    "init_device_mesh": "from torch.distributed.device_mesh import init_device_mesh as f\n"
    "f('cpu', (2,))",
    "mesh-by-keyword": "from torch.distributed.device_mesh import DeviceMesh\n"
    "DeviceMesh('cpu', mesh=[0, 1])",
    "no-backend": "import torch.distributed as d; d.init_process_group()",
    "accelerate": "from accelerate import Accelerator; Accelerator(cpu=True)",
}


@pytest.mark.parametrize("call", few(NAMES, "from-import", "init_device_mesh", "mesh-by-keyword"))
def test_all_ranks_get_through_in_silence_by_whatever_name(run_ranks, call):
    if "accelerate" in call:
        pytest.importorskip("accelerate")
    check = "import torch.distributed as x; assert x.is_initialized() and x.get_world_size() == 2\n"
    job = run_ranks(f"{call}\n{check}")
    assert (job.code, job.messages()) == (0, []), job.err
    assert sorted(line["rank"] for line in applied(job)) == [0, 1]
    assert all(line["world_size"] == 2 and line["check_in_s"] is not None for line in applied(job))


def test_signature_and_docstring_are_torchs_own(run_ranks):
    script = """
import inspect
from torch.distributed import init_process_group as ours
torchs = inspect.unwrap(ours)
print(ours is not torchs, inspect.signature(ours) == inspect.signature(torchs), ours.__name__)
print(ours.__doc__ == torchs.__doc__, ours.__module__ == torchs.__module__)
"""
    job = run_ranks(script, ranks=1)
    assert job.out == "True True init_process_group\nTrue True\n"


# Without an agent's store: agreement afterwards


@pytest.mark.parametrize("cuda", ["11.8", ""], ids=["different", "equal"])
@pytest.mark.parametrize(
    "place", ["file", "custom-store", "store-in-rank-0", *slow("torch.multiprocessing.spawn")]
)
def test_without_an_agents_store_ranks_agree_afterwards(run_ranks, tmp_path, place, cuda):
    environ = {"PLACE": place, "MASTER_PORT": str(free_port()), **({"CUDA": cuda} if cuda else {})}
    if place == "store-in-rank-0":
        environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    if "spawn" in place:
        script, python = source("inject/spawned_ranks"), (sys.executable,)
        job = launch(tmp_path, script, launcher=python, environ=environ)
    else:
        job = run_ranks(source("inject/meet_elsewhere"), environ=environ)
    assert (job.code, job.out.count("through"), job.orphans) == ((1, 0, []) if cuda else (0, 2, []))
    if cuda:
        assert "RuntimeError: ranks differ: rank 1 has CUDA 11.8, rank 0 has none" in job.err
    else:
        assert job.messages() == []
        assert sorted(line["rank"] for line in applied(job)) == [0, 1]


def test_a_second_init_after_destroy_works(run_ranks):
    # Through a file: torch's own second init through one store meets stale addresses at times.
    script = PLAIN + PLAIN.replace(
        'init_process_group("gloo")',
        'init_process_group("gloo", "file://" + os.getcwd() + "/meet",'
        ' rank=int(os.environ["RANK"]), world_size=2)',
    )
    job = run_ranks(script)
    assert (job.code, job.out.count("sum 2.0"), job.messages()) == (0, 4, [])
    assert sorted(line["rank"] for line in applied(job)) == [0, 0, 1, 1]


def test_a_group_smaller_than_the_world_is_the_scripts_own_affair(run_ranks):
    script = """
import os
import torch.distributed as dist
if os.environ["RANK"] != "2":
    method = "file://" + os.getcwd() + "/meet"
    dist.init_process_group("gloo", method, rank=int(os.environ["RANK"]), world_size=2)
"""
    job = run_ranks(script, ranks=3, init={"timeout_s": 20})
    assert (job.code, job.messages()) == (0, [])


def test_torchs_own_complaints_are_unchanged(run_ranks):
    same, first, twice, text = run_ranks(source("inject/wrong_calls"), ranks=1).out.splitlines()
    assert (same, first, twice) == ("True", "None", "True")
    assert "twice" in text


def test_a_fake_backend_meets_nobody(run_ranks):
    script = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=512, store=FakeStore())
print(dist.get_world_size())
"""
    alone = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    job = run_ranks(script, ranks=1, environ=alone)
    assert (job.code, job.out, job.messages()) == (0, "512\n", [])


# Barrier, faults, and the in-agent restart


def test_no_rank_gets_through_before_all_are_in(run_ranks, tmp_path):
    """Rank 1 ends its init only when rank 0 is through, which a barrier makes impossible."""
    script = source("inject/slow_group")
    assert run_ranks(script, environ={"WAIT": "1"}).out == "rank 0 is through False\n"
    for name in ("through", "said"):
        (tmp_path / name).unlink()
    job = run_ranks(script, environ={"WAIT": "60"}, init={"barrier": "off"})
    assert job.out == "rank 0 is through True\n", "the barrier is what held rank 0"


def test_a_collective_barrier_calls_torchs_own(run_ranks):
    job = run_ranks(source("inject/printed_barrier"), init={"barrier": "collective"})
    assert (job.code, job.out) == (0, "barrier {}\nbarrier {}\n")


def test_a_fault_of_ours_is_one_line_and_the_original_runs(run_ranks):
    script = (
        """
import torch.distributed as dist
dist.TCPStore = None
"""
        + PLAIN
    )
    job = run_ranks(script)
    assert (job.code, job.out.count("sum 2.0")) == (0, 2)
    assert len(job.messages("hook init: TypeError")) == 2


@pytest.mark.slow
def test_a_restart_in_the_same_agent_meets_afresh(tmp_path):
    launcher = (ranks.TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    job = launch(
        tmp_path, source("inject/missing_after_restart"), launcher=launcher, init={"timeout_s": 20}
    )
    assert job.code == 1
    assert job.messages() == ["saferun: rank 1 of 2 did not reach init_process_group within 20 s"]


def test_all_off_leaves_torch_alone(run_ranks):
    script = "import os, torch\ntorch.version.cuda = os.environ['RANK']\n" + PLAIN
    off = {"barrier": "off", "agree": "off", "set_device": False}
    job = run_ranks(script, init=off)
    assert (job.code, job.messages()) == (0, [])
    assert [line["check_in_s"] for line in applied(job)] == [None, None]
