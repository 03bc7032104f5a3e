"""Run scripts as ranks that are forks of this one interpreter, which has imported torch with hooks.

    python fork_server.py MODULE...      (imported once; an import of torch costs seconds)

Each line of standard input is a job as JSON, and each line of standard output its exit status:
1 where a rank failed, as torchrun's. A rank gets the variables that torchrun's agent gives it. The
first rank that fails ends the others.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        print(run(json.loads(line)), flush=True)


def run(job: dict[str, Any]) -> int:
    with agent_store() if job["ranks"] else contextlib.nullcontext(0) as port:
        group = range(job["ranks"] or 1)
        ranks = {fork(lambda rank=rank: become(job, rank, port)) for rank in group}
        failed = False
        while ranks:
            pid, status = os.wait()
            ranks.discard(pid)
            if status and not failed:
                failed = True
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
    return int(failed)


def fork(body: Callable[[], int]) -> int:
    """Fork a child that does `body` and ends with its status."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        status = body()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


@contextlib.contextmanager
def agent_store() -> Iterator[int]:
    """Host a store in a process of its own, so that this one never forks with threads."""
    read, write = os.pipe()

    def host() -> int:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, b"%d\n" % store.port)
        while True:
            signal.pause()

    pid = fork(host)
    try:
        yield int(os.read(read, 20))
    finally:
        os.close(read)
        os.close(write)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def become(job: dict[str, Any], rank: int, port: int) -> int:
    """Run the job's script in this process, as one of its ranks; return its status."""
    if job["ranks"]:
        os.environ.update(group_variables(rank, job["ranks"], port))
    os.environ.update({name: value for name, value in job["environ"].items() if value is not None})
    for name in [name for name, value in job["environ"].items() if value is None]:
        del os.environ[name]
    os.chdir(job["folder"])
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    sys.stdout = open(1, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115 - open as long as the process lives
    sys.stderr = open(2, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115 - open as long as the process lives
    settle(job)
    return execute(job["script"], job["argv"])


def group_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun's agent sets in a rank, and what our bootstrap does."""
    return {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
        **{"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)},
        **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "test"},
        **{"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"},
        **{"SAFERUN_RANK_PID": str(os.getpid())},
    }


def settle(job: dict[str, Any]) -> None:
    """Give the hooks, which were put in place before the fork, this job's settings."""
    from _saferun.inject import hook_runner
    from _saferun.inject.hooks.order import hook as order

    current = hook_runner.current("")
    vars(current.hooks.init).update(job["init"])
    current.is_watched = job["watched"]
    current._directory = os.path.join(job["folder"], "receipts")
    watch, barrier = order._state
    watch.mode = job["order"].get("mode", watch.mode)
    barrier._enabled = job["order"].get("wrap_barrier", True)


def execute(script: str, argv: list[str]) -> int:
    """Run a script as `python SCRIPT ARGV...` would, and return its status."""
    sys.argv = [script, *argv]
    sys.path.insert(0, os.path.dirname(script))
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    with open(script, encoding="utf-8") as file:
        code = compile(file.read(), script, "exec")
    status = 0
    try:
        exec(code, module.__dict__)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status


if __name__ == "__main__":
    main()
