"""Whether there is a warm agent, and whether it may become the next attempt (pure)."""

import pytest

from saferun.planning.torchrun.torchrun_install import Launcher
from saferun.supervise.ready.warm_start import WarmStart, difference, offer

BASE = {"PATH": "/bin", "HOME": "/root", "NCCL_DEBUG": "INFO"}
ARGV = ("/venv/bin/torchrun", "--nproc-per-node=2", "train.py")


def warm(env: dict[str, str]) -> WarmStart:
    return WarmStart(ARGV, env, "/venv/bin/python")


@pytest.mark.parametrize(
    ("names", "may"),
    [
        (
            "NCCL_DEBUG PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF TORCHINDUCTOR_X SAFERUN_X CUDA_X"
            " TORCH_NCCL_X TORCHDYNAMO_X TORCH_COMPILE_DISABLE PET_X GLOO_X TRITON_X"
            " TORCH_DISABLE_SHARE_RDZV_TCP_STORE TORCHELASTIC_ERROR_FILE",
            True,
        ),
        (
            "LD_PRELOAD LD_LIBRARY_PATH PYTHONPATH PYTHONHASHSEED PYTHON_EXEC OMP_NUM_THREADS"
            " KMP_AFFINITY MKL_NUM_THREADS TORCH_LOGS TORCH_DISTRIBUTED_DEBUG TORCH_COMPILE_DEBUG"
            " TORCH_CPP_LOG_LEVEL TORCH_DEVICE_BACKEND_AUTOLOAD PYTORCH_JIT LOGLEVEL"
            " MALLOC_ARENA_MAX LANG LC_ALL PATH HOME TZ TMPDIR MY_OWN",
            False,
        ),
    ],
)
def test_only_variables_that_ranks_alone_read_may_change(names, may):
    for name in names.split():
        other = {**BASE, name: "another"}
        for before, now in ((BASE, other), (other, BASE)):
            assert (not difference(warm(before), ARGV, now)) is may, name
    assert not difference(warm(BASE), ("/venv/bin/torchrun", "other.py", "--resume"), BASE)
    assert difference(warm(BASE), ("/other/bin/torchrun", *ARGV[1:]), BASE)


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
