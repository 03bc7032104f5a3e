"""A rank ends with torchrun's agent, whatever ended that; a rank's helpers do not."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import until
from interpreters import Interpreters, other_pythons
from ranks import TORCHRUN, launch
from repo import source
from sandbox import Sandbox, text_of, write

NEUTRAL = {"excepthook": "on"}

ASK = """
import ctypes
def asked():  # PR_GET_PDEATHSIG
    number = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    return number.value
"""
SIT = {
    "waiting": "import signal\nwhile True: signal.pause()",
    "in a C call that keeps the GIL": "import ctypes\nctypes.PyDLL(None).sleep(1000)",
    "deaf to every signal": (
        "import signal\nfor n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
        "while True: signal.pause()"
    ),
    "become another program": "os.execvp('sleep', ['sleep', '1000'])",
}
READY = """
import os
open(os.environ["READY"] + "/rank" + os.environ["RANK"], "w").close()
"""


class Agent(Sandbox):
    """A torchrun that was started with our hooks in its environment, as after our exec."""

    def __init__(self, interpreters: Interpreters, script: str, *, ranks: int, injected: bool):
        self.ready = interpreters.folder / "ready"
        self.ready.mkdir()
        path = interpreters.folder / "train.py"
        write(path, script)
        environ = interpreters.environ(NEUTRAL if injected else None, READY=str(self.ready))
        super().__init__(interpreters.folder, **environ)
        self.argv = [TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", str(path)]
        self.ranks = ranks

    def start(self, *before: str) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = self.popen(*before, *self.argv, start_new_session=True, **quiet)
        until(lambda: len(list(self.ready.iterdir())) == self.ranks, "the ranks come up")

    def left(self) -> list[int]:
        return [pid for pid in self.living() if pid != self.process.pid]

    def sigkill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def agents(interpreters: Interpreters) -> Iterator[Callable[..., Agent]]:
    """Makes agents, and ends what they leave."""
    made: list[Agent] = []

    def make(script: str, *, ranks: int, injected: bool = True) -> Agent:
        made.append(Agent(interpreters, script, ranks=ranks, injected=injected))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


# the agent is killed


def test_ranks_end_with_their_agent_whatever_they_do(agents):
    ways = f"exec({list(SIT.values())!r}[int(os.environ['RANK'])])"
    agent = agents(READY + ways, ranks=len(SIT))
    agent.start()
    until(lambda: len(agent.left()) == len(SIT))  # in mid-exec a process has no environment
    agent.sigkill()
    until(lambda: not agent.left(), agent.left)


@pytest.mark.slow
def test_without_the_injection_ranks_outlive_their_agent(agents):
    """What torchrun does by itself, and how the test above would fail."""
    agent = agents(READY + SIT["waiting"], ranks=2, injected=False)
    agent.start()
    agent.sigkill()
    with pytest.raises(AssertionError):
        until(lambda: not agent.left(), limit_s=1.0)  # the kernel needs a millisecond
    assert len(agent.left()) == 2


@pytest.mark.slow
def test_a_rank_that_is_an_agent_itself_takes_its_ranks_along(agents):
    agent = agents(READY + SIT["waiting"], ranks=1)
    agent.start(TORCHRUN, "--standalone", "--nproc-per-node=1", "--no-python")
    assert len(agent.left()) == 2
    agent.sigkill()
    until(lambda: not agent.left(), agent.left)


# whom it must not touch


def test_only_the_rank_itself_is_tied_and_no_process_that_it_starts(tmp_path):
    answers = tmp_path / "answers"
    done = launch(
        tmp_path, source("inject/tied_and_helpers"), ranks=1, environ={"ANSWERS": str(answers)}
    )
    assert done.code == 0, done.err
    assert json.loads(text_of(answers)) == {
        "rank": signal.SIGKILL,
        "helper": 0,
        "later": "still here",
        **{"spawn": 0, "fork": 0, "forkserver": 0},
    }


def test_a_rank_without_a_torchrun_of_ours_is_not_tied(interpreters):
    """Under srun or mpirun the parent may be a thread, or end early."""
    ran = interpreters.run(ASK + "print(asked())", hooks=NEUTRAL, RANK="0")
    assert ran.out == "0\n"


@pytest.mark.slow
def test_torchruns_own_restarts_go_on_as_before(tmp_path):
    launcher = (TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    variable = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = launch(tmp_path, source("inject/segv_then_sum"), launcher=launcher, environ=variable)
    assert (done.code, done.out.count("turn 1 total 2"), done.orphans) == (0, 2, [])
    names = {file.name.split("-pid")[0] for file in (tmp_path / "receipts").iterdir()}
    assert names >= {"a1-r1-rank0", "a1-r1-rank1"}
    begun = [line["rank"] for line in done.hook("bootstrap") if line["outcome"] == "applied"]
    assert begun.count(1) == 2


NESTED = """
import os, subprocess, sys
inner = [sys.argv[1], "--standalone", "--nproc-per-node=2", sys.argv[2]]
print("inner", subprocess.run(inner).returncode, flush=True)
"""


@pytest.mark.slow
def test_a_torchrun_inside_a_rank_runs_its_own_ranks(tmp_path):
    inner = tmp_path / "inner.py"
    write(inner, ASK + "import os; os.write(1, b'tied by %d\\n' % asked())")
    done = launch(tmp_path, NESTED, TORCHRUN, str(inner), ranks=1)
    assert (done.code, done.orphans) == (0, []), done.err
    assert sorted(done.out.splitlines()) == ["inner 0", "tied by 9", "tied by 9"]
    assert len([line for line in done.hook("bootstrap") if line["outcome"] == "applied"]) == 3


# the agent died while the rank started


def namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


GONE = {  # what the rank is told of its agent, whether it is a session, and whether it ends
    "its agent is dead": ("{dead} {namespace}", True, {}, True),
    "nobody has buried its agent yet": ("{zombie} {namespace}", True, {}, True),
    "its agent lives": ("{parent} {namespace}", True, {}, False),
    # A container of its own for each rank: the agent's pid means nothing in there.
    "the pid is of another namespace": ("{dead} pid:[1]", True, {}, False),
    "its agent may start other programs": ("{dead}", True, {}, False),
    "it is no session of its own, so no rank": ("{dead} {namespace}", False, {}, False),
    "a rank has detached it": ("{dead} {namespace}", True, {"SAFERUN_RANK_PID": "1"}, False),
}


@pytest.mark.parametrize(("agent", "session", "extra", "ends"), GONE.values(), ids=GONE)
def test_a_rank_that_finds_its_agent_dead_ends_as_the_kernel_would_have_ended_it(
    interpreters, agent, session, extra, ends
):
    dead, zombie = (subprocess.Popen(["true"]) for _ in range(2))
    dead.wait()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    pids = {"dead": dead.pid, "zombie": zombie.pid, "parent": os.getppid()}
    found = agent.format(**pids, namespace=namespace())
    environ = interpreters.environ(NEUTRAL, RANK="0", SAFERUN_AGENT_PID=found, **extra)
    command = [sys.executable, "-c", "pass"]
    done = subprocess.run(command, env=environ, start_new_session=session, timeout=300)
    assert done.returncode == (-signal.SIGKILL if ends else 0)
    zombie.wait()


@pytest.mark.parametrize(
    ("arguments", "extra", "sure"),
    [
        ((), {}, True),
        (("--nproc-per-node=2", "train.py", "--notes"), {}, True),
        (("--no-python", "x"), {}, False),
        (("--no_p", "x"), {}, False),
        ((), {"PYTHON_EXEC": "/bin/x"}, False),
        ((), {"PET_NO_PYTHON": "1"}, False),
    ],
    ids=["bare", "options", "--no-python", "--no_p", "PYTHON_EXEC", "PET_NO_PYTHON"],
)
def test_an_agent_says_where_it_lives_if_all_its_ranks_are_pythons(
    interpreters, arguments, extra, sure
):
    agent = interpreters.folder / "torchrun"
    write(agent, "import os; print(os.getpid(), os.environ['SAFERUN_AGENT_PID'])")
    ran = interpreters.run(hooks=NEUTRAL, argv=(str(agent), *arguments), **extra)
    pid, messages = ran.out.strip().split(" ", 1)
    assert messages == (f"{pid} {namespace()}" if sure else pid)


def test_an_agent_that_dies_just_before_the_kernel_knows_takes_the_rank_along(interpreters):
    ran = interpreters.run(source("inject/orphaned_while_tying"), hooks=NEUTRAL, RANK="0")
    assert ran.code == -signal.SIGKILL


# other Pythons, other kernels


@pytest.mark.parametrize("python", other_pythons(), ids=lambda p: p.parts[-3])
def test_a_child_of_the_agent_is_tied_under_every_python(interpreters, python):
    ran = interpreters.run(
        ASK + "print(asked())",
        hooks=NEUTRAL,
        python=str(python),
        RANK="0",
        SAFERUN_AGENT_PID=f"{os.getpid()} {namespace()}",
    )
    assert (ran.out, ran.err) == ("9\n", "")


TIE = """
import sys
{}
from _saferun.base import prctl
prctl.die_with_parent()
"""


@pytest.mark.parametrize(
    "breaking",
    [
        "import _ctypes; del _ctypes.call_function",
        "sys.modules['_ctypes'] = None",
        "import _ctypes; _ctypes.dlopen = lambda name, mode: 1 / 0",
        "import _ctypes; _ctypes.call_function = lambda address, arguments: -1",
    ],
    ids=["only the long way", "no ctypes", "no C library", "a kernel that refuses"],
)
def test_a_machine_that_cannot_costs_the_tie_only(interpreters, breaking):
    long = "del" in breaking
    script = TIE.format(breaking) + (ASK + "print(asked())" if long else "print('ran')")
    ran = interpreters.run(script, hooks=NEUTRAL)
    assert (ran.code, ran.out, ran.err) == (0, "9\n" if long else "ran\n", "")
