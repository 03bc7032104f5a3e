"""Whether there is a warm agent, and whether it may become the next attempt (pure)."""

from __future__ import annotations

import pytest

from saferun.planning.torchrun.torchrun_install import Launcher
from saferun.supervise.ready.warm_start import WarmStart, difference, offer

BASE = {"PATH": "/bin", "HOME": "/root", "NCCL_DEBUG": "INFO"}
ARGV = ("/venv/bin/torchrun", "--nproc-per-node=2", "train.py")


def warm(env: dict[str, str]) -> WarmStart:
    return WarmStart(ARGV, env, "/venv/bin/python")


READ_BY_RANKS = (
    *("NCCL_P2P_DISABLE", "NCCL_DEBUG", "TORCH_NCCL_DUMP_ON_TIMEOUT", "CUDA_LAUNCH_BLOCKING"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCHINDUCTOR_MAX_AUTOTUNE"),
    *("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "SAFERUN_ATTEMPT", "SAFERUN_INJECT"),
    *("PET_RDZV_ID", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "GLOO_SOCKET_IFNAME"),
    *("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_ERROR_FILE", "TRITON_CACHE_DIR"),
)
READ_BY_A_START_OR_UNKNOWN = (
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "LD_BIND_NOW"),
    *("PYTHONPATH", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHON_EXEC", "VIRTUAL_ENV"),
    *("OMP_NUM_THREADS", "KMP_AFFINITY", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "DNNL_VERBOSE"),
    *("TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_TRACE"),
    *("TORCH_SHOW_CPP_STACKTRACES", "LOGLEVEL", "TORCH_DEVICE_BACKEND_AUTOLOAD"),
    *("LC_ALL", "LANG", "PATH", "HOME", "TZ", "TMPDIR", "PYTORCH_JIT", "OPENBLAS_CORETYPE"),
    *("TORCH_COMPILE_DEBUG", "KINETO_USE_DAEMON", "NPY_PROMOTION_STATE", "MY_OWN"),
)


def reused(name: str) -> set[bool]:
    """Whether an agent may be used where a variable was added or changed, and the other way."""
    other = {**BASE, name: "another"}
    return {not difference(warm(BASE), ARGV, other), not difference(warm(other), ARGV, BASE)}


def test_variables_that_only_ranks_read_may_change():
    assert [name for name in READ_BY_RANKS if reused(name) != {True}] == []


def test_variables_that_a_start_reads_or_that_are_unknown_may_not_change():
    assert [name for name in READ_BY_A_START_OR_UNKNOWN if reused(name) != {False}] == []


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("/venv/bin/torchrun", "other.py", "--resume"), True),
        (("/other/bin/torchrun", "--nproc-per-node=2", "train.py"), False),
    ],
)
def test_arguments_may_change_but_not_the_launcher(argv, expected):
    assert (not difference(warm(BASE), argv, BASE)) is expected


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        pytest.param(Launcher(ARGV[:1], "/venv/bin/python"), True, id="console script"),
        pytest.param(Launcher(ARGV[:1], "/venv/bin/python", "sP"), True, id="with flags"),
        pytest.param(Launcher(ARGV[:1]), False, id="shim"),
        pytest.param(Launcher(ARGV[:1], "/venv/bin/python", "X"), False, id="flag with a value"),
        pytest.param(Launcher(ARGV[:1], "/venv/bin/python", "i"), False, id="interactive"),
        pytest.param(Launcher(("/bin/torchrun",), "/venv/bin/python"), False, id="another"),
    ],
)
def test_there_is_a_warm_agent_where_the_interpreter_is_known(launcher, expected):
    assert (offer(launcher, ARGV, BASE) is not None) is expected


@pytest.mark.parametrize(
    ("options", "env", "expected"),
    [
        (("--start-method", "spawn"), {}, True),
        (("--start-method", "fork"), {}, False),
        (("--start_m=forkserver",), {}, False),
        ((), {"PET_START_METHOD": "fork"}, False),
    ],
)
def test_there_is_no_warm_agent_for_ranks_that_are_forks_of_it(options, env, expected):
    launcher = Launcher(ARGV[:1], "/venv/bin/python")
    argv = (*ARGV[:1], "--run-path", *options, "t.py")
    assert (offer(launcher, argv, {**BASE, **env}) is not None) is expected


def test_a_job_of_plain_python_may_be_warm_where_only_our_own_variables_differ():
    prepared = WarmStart(("/bin/python", "a.py"), BASE, "/bin/python", ranks="", own_group=False)
    argv = ("/bin/python", "a.py", "--resume", "--start-method=fork")
    assert difference(prepared, argv, {**BASE, "SAFERUN_ATTEMPT": "2"}) == ""
    for name in ("NCCL_DEBUG", "PYTORCH_CUDA_ALLOC_CONF", "MY_OWN"):
        assert difference(prepared, argv, {**BASE, name: "x"}).startswith(f"{name} has another")
    assert difference(prepared, ("/other/python", "a.py"), BASE)
