"""Nodes that do not fit one run, or wait for each other in vain, say so on every node."""

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import disks
import hosts
import pytest
from helpers import until
from hosts import PORT, Host, add_up, clean, end_all, meeting, saved
from rights import needs
from runs import Run
from sandbox import executable, python_program, write

pytestmark = [needs("make networks"), pytest.mark.slow]
MISFIT = 78  # the exit status: nodes that do not fit


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB that hosts made after it see."""
    with disks.small_disk(tmp_path / "disk", "2m") as place:
        yield place


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert shutil.disk_usage(disk).free == 0


def script(folder: Path, name: str = "train.py") -> str:
    return str(write(folder / name, "print('ran')\n"))


@pytest.mark.parametrize(
    ("counts", "names", "said"),
    [
        ("23", ("train.py", "train.py"), ("--nnodes differs: ", "2 on h1", "3 on h2")),
        ("22", ("train.py", "eval.py"), ("train.py on h1", "eval.py on h2")),
    ],
    ids=["numbers of nodes", "scripts"],
)
def test_what_differs_is_refused_by_name(pair, tmp_path, counts, names, said):
    nodes = zip(pair, counts, names, strict=True)
    runs = [host.start(*meeting(nnodes=n), script(tmp_path, name)) for host, n, name in nodes]
    assert end_all(runs) == [MISFIT, MISFIT], [run.err for run in runs]
    for run in runs:
        assert all(text in run.err for text in said), run.err
        assert "ran" not in run.out
    clean(runs)


def with_torchrun(folder: Path, *lines: str) -> dict[str, str]:
    """Return the variables of a host whose torchrun first executes these lines."""
    place = folder / "bin"
    last = ["from torch.distributed.run import main", "sys.exit(main())"]
    executable(place / "torchrun", python_program("\n".join([*lines, *last, ""])))
    return {"PATH": f"{place}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"}


def test_another_script_of_the_same_name_is_named(pair, tmp_path):
    runs = []
    for host in pair:
        job = script(host.folder)
        Path(job).write_text(f"print('ran on {host.name}')\n", encoding="utf-8")
        runs.append(host.start(*meeting(), "train.py"))
    assert end_all(runs) == [0, 0], [run.err for run in runs]
    for run in runs:
        assert "saferun: train.py is one file on h1, another one on h2; copy one of them" in run.err
    clean(runs)


def test_a_node_under_torchrun_itself_is_refused_by_name(pair, tmp_path):
    ours = pair[0].start(*meeting(), script(tmp_path))
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert torchrun is not None
    theirs = pair[1].start(*meeting()[1:], script(tmp_path), command=[torchrun])
    assert ours.end() == MISFIT, ours.err
    assert "without saferun, or without its supervision, takes part: node 1 (h2)" in ours.err
    theirs.end()
    clean([ours, theirs])


def test_an_endpoint_where_nobody_answers_is_named(pair, tmp_path):
    run = pair[0].start(*meeting(at="h2"), script(tmp_path))
    run.wait_for_message(f"h1 has waited for an answer from h2:{PORT} (10.77.0.2) for 30 s")


def test_an_endpoint_that_is_each_node_itself_is_named(pair, tmp_path):
    unsaid = [word for word in meeting() if not word.startswith("--rdzv-endpoint")]
    runs = [pair[0].start(*meeting(at="localhost"), script(tmp_path))]
    runs.append(pair[1].start(*unsaid, script(tmp_path)))
    runs[0].wait_for_message(", which is each node itself) for 30 s; --nnodes is 2")
    runs[1].wait_for_message("is each node itself, as no --rdzv-endpoint is given) for 30 s")


def test_nodes_that_never_come_are_named_after_a_failure_too(pair, tmp_path):
    """The first attempt fails in the rendezvous itself, before the nodes have met."""
    path = with_torchrun(
        tmp_path,
        "import os, sys",
        "if os.environ['SAFERUN_ATTEMPT'] == '1':",
        "    sys.exit('torch.distributed.DistStoreError: wait timeout after 60000ms, keys: /a/b')",
    )
    limits = ["--set=retry.backoff_s=[0, 0]", "--set=retry.rejoin_s=5"]
    run = pair[0].start(*meeting(), *limits, script(tmp_path), env=path)
    assert run.end() == 1, run.err
    assert "fault of ours" not in run.err
    assert "(node-lost, host " in run.err
    assert "not all of the other nodes came back in time (retry.rejoin_s: 5 s)" in run.err
    clean([run])


def test_a_clock_that_is_off_is_named_on_every_node(pair, tmp_path):
    """The other node's agent takes an hour off the time of each heartbeat."""
    path = with_torchrun(
        tmp_path,
        "import datetime, sys",
        "import torch.distributed.elastic.rendezvous.dynamic_rendezvous as rendezvous",
        "class Late(datetime.datetime):",
        "    @classmethod",
        "    def now(cls, zone=None):",
        "        return datetime.datetime.now(zone) - datetime.timedelta(hours=1)",
        "rendezvous.datetime = Late",
    )
    runs: list[Run] = [
        pair[0].start(*meeting(), script(tmp_path)),
        pair[1].start(*meeting(), script(tmp_path), env=path),
    ]
    assert end_all(runs) == [MISFIT, MISFIT], [run.err for run in runs]
    assert all("the clock of h" in run.err for run in runs), [run.err for run in runs]
    clean(runs)


def summing_on(disk: Path, pair: list[Host], place: Path) -> list[Run]:
    """Return runs of the sums, with their directory on that disk."""
    job = ["--set=retry.rejoin_s=300", f"--run-dir={disk / 'runs'}", *add_up(place)]
    return [host.start(*meeting(), *job) for host in pair]


def test_a_shared_disk_that_is_full_is_named_and_the_run_goes_on(small_disk, tmp_path):
    fill(small_disk)
    with hosts.standing(tmp_path, 2) as pair:
        runs = summing_on(small_disk, pair, tmp_path)
        saved(tmp_path)
        os.kill(until(lambda: list(runs[1].ranks().values()), "a rank")[0], signal.SIGKILL)
        assert end_all(runs) == [0, 0], [run.err for run in runs]
        for run in runs:
            first = next(line for line in run.messages() if "profile cpu" not in line)
            assert f"cannot write {small_disk / 'runs'}/" in first
            assert "No space left on device" in first
            assert run.messages()[-1] == "saferun: attempt 2 succeeded"
        assert "done total=465.0" in "".join(run.out for run in runs)
        clean(runs)


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def test_a_shared_disk_that_fills_up_ends_the_run_with_the_same_words(small_disk, tmp_path):
    """It is full when the next attempt is prepared, and was not when this one began."""
    with hosts.standing(tmp_path, 2) as pair:
        runs = summing_on(small_disk, pair, small_disk)
        saved(small_disk)
        ranks = [pid for run in runs for pid in run.ranks().values()]
        signal_all(ranks, signal.SIGSTOP)
        fill(small_disk)
        keeper = "int, sys.argv[4:]))"  # the end of its program
        until(lambda: all(len(run.processes(keeper)) > 1 for run in runs), "the next keepers")
        signal_all(ranks, signal.SIGCONT)
        assert end_all(runs) == [1, 1], [run.err for run in runs]
        for run in runs:
            assert "(disk-full on rank 0, host h" in run.err
            assert "saferun:   OSError: [Errno 28] No space left on device" in run.err
            assert "Make room (old checkpoints, caches)" in run.err
        clean(runs)
