"""The places of a log that signs fit, and what around them counts."""

# ruff: noqa: E501 (what programs print is not wrapped)

import pytest
from job_logs import TRACEBACK, diagnose, output


def test_a_phrase_in_hundreds_of_lines_does_not_hide_the_line_that_decides():
    flood = output(400, "n1:1:2 [0] NCCL INFO Channel {} : 0[0] -> 1[1] via SHM")
    line = "RuntimeError: NCCL error in: x.cpp:1, invalid usage, NCCL version 2.20.5\n"
    assert diagnose(flood + line + flood[:15_000]).kind == "nccl-invalid-usage"


def test_a_warning_is_no_context_for_what_follows_it():
    warned = "W1110 17:56:13 torch/_dynamo/convert_frame.py:1550] torch._dynamo hit config.recompile_limit (8)\n"
    assert (
        diagnose(warned + TRACEBACK + "RuntimeError: CUDA error: unspecified launch failure").kind
        == "cuda-launch-failure"
    )


BUSY_PORT = "RuntimeError: Address already in use"


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        ("/e/torch/distributed/rendezvous.py\", line 179, in _env_rendezvous_handler", "port-in-use"),
        ("/e/torch/distributed/launcher/api.py\", line 1, in launch_agent", "port-in-use"),
        ("/e/torch/distributed/rendezvous.py\", line 95, in _tcp_rendezvous_handler", "port-hardcoded"),
        ("/e/uvicorn/server.py\", line 9, in startup", "port-hardcoded"),
    ],
    ids=["env rendezvous", "the launcher", "tcp:// in the script", "an own server"],
)  # fmt: skip
def test_whose_port_it_is_decides(frame, kind):
    log = f'Traceback (most recent call last):\n  File "{frame}\n    x()\n{BUSY_PORT}'
    assert diagnose(log).kind == kind


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("/usr/lib/python3.10/multiprocessing/synchronize.py", "dataloader-shm-full"),
        ("/e/torch/serialization.py", "disk-full"),
    ],
    ids=["a semaphore", "a file"],
)
def test_no_space_left_is_shared_memory_or_the_disk(where, kind):
    below = '  File "/e/call.py", line 3, in g\n    h()\n' * 20  # a frame counts at any depth
    log = f'{TRACEBACK}  File "{where}", line 3, in f\n    g()\n{below}OSError: [Errno 28] No space left on device'
    assert diagnose(log).kind == kind


@pytest.mark.parametrize(
    ("frame", "line", "verdict"),
    [
        ("/e/torch/_inductor/lowering.py", "AssertionError: x", "mitigate"),
        ("/w/train.py", "AssertionError: x", "stop-user"),
        ("/e/torch/_dynamo/eval_frame.py", "torch._dynamo.exc.TorchRuntimeError: Dynamo failed to run FX node with fake tensors: shapes", "stop-user"),
        ("/e/torch/_dynamo/eval_frame.py", "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:", "mitigate"),
    ],
    ids=["inside the compiler", "inside the script", "a wrong shape while tracing", "the backend"],
)  # fmt: skip
def test_the_compilers_own_failure_is_mitigated_and_the_users_is_not(frame, line, verdict):
    log = f'Traceback (most recent call last):\n  File "/w/train.py", line 1, in <module>\n  File "{frame}", line 2, in f\n    g()\n{line}'
    assert diagnose(log).verdict == verdict


@pytest.mark.parametrize("error", ["ConnectionResetError: [Errno 104] reset", "EOFError"])
def test_a_batch_that_cannot_be_fetched_means_a_dead_dataloader_worker(error):
    frames = (
        '  File "/v/torch/multiprocessing/reductions.py", line 538, in rebuild_storage_fd\n'
        "    fd = df.detach()\n"
        '  File "/v/multiprocessing/resource_sharer.py", line 86, in get_connection\n'
        "    c = Client(address, authkey=process.current_process().authkey)\n"
    )
    assert diagnose(f"{TRACEBACK}{frames}{error}\n").kind == "dataloader-worker-died"
    assert diagnose(f"{TRACEBACK}{error}\n").kind != "dataloader-worker-died"
    # torch looks at its workers while the batch is fetched: its own report is the later one.
    died = "RuntimeError: DataLoader worker (pid 538) is killed by signal: Aborted. \n"
    both = f"{TRACEBACK}{frames}{error}\n\nDuring handling of the above exception, another exception occurred:\n\n{TRACEBACK}{died}"
    assert diagnose(both, oom_kills=0).kind == "ended-by-signal"
