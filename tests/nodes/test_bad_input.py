"""Nodes that do not fit one run, or wait for each other in vain, say so on every node."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest
from hosts import PORT, Host, clean, end_all
from runs import Run, executable

pytestmark = [pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing()), pytest.mark.slow]
MISFIT = 78  # the exit status: nodes that do not fit


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts.standing(tmp_path, 2) as found:
        yield found


def options(host: str = "h1", nodes: str = "2") -> list[str]:
    ours = ["--profile=cpu", f"--nnodes={nodes}", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    return [*ours, f"--rdzv-endpoint={host}:{PORT}", "--rdzv-id=job"]


def script(folder: Path, name: str = "train.py") -> str:
    path = folder / name
    path.write_text("print('ran')\n")
    return str(path)


def test_other_numbers_of_nodes_are_refused_by_name(pair: list[Host], tmp_path: Path):
    counts = zip(pair, ("2", "3"), strict=True)
    runs = [host.start(*options(nodes=n), script(tmp_path)) for host, n in counts]
    assert end_all(runs) == [MISFIT, MISFIT], [run.err for run in runs]
    for run in runs:
        assert "--nnodes differs: " in run.err
        assert "2 on h1" in run.err
        assert "3 on h2" in run.err
        assert "ran" not in run.out
    clean(runs)


def test_other_scripts_are_refused_by_name(pair: list[Host], tmp_path: Path):
    names = zip(pair, ("train.py", "eval.py"), strict=True)
    runs = [host.start(*options(), script(tmp_path, name)) for host, name in names]
    assert end_all(runs) == [MISFIT, MISFIT], [run.err for run in runs]
    assert all("train.py on h1" in run.err and "eval.py on h2" in run.err for run in runs)
    clean(runs)


def test_a_node_under_torchrun_itself_is_refused_by_name(pair: list[Host], tmp_path: Path):
    ours = pair[0].start(*options(), script(tmp_path))
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert torchrun is not None
    theirs = pair[1].start(*options()[1:], script(tmp_path), command=[torchrun])
    assert ours.end() == MISFIT, ours.err
    assert "without saferun, or without its supervision, takes part: node 1 (h2)" in ours.err
    theirs.end()
    clean([ours, theirs])


def test_an_endpoint_where_nobody_answers_is_named(pair: list[Host], tmp_path: Path):
    run = pair[0].start(*options("h2"), script(tmp_path))
    run.wait_for_message(f"h1 waits for an answer from h2:{PORT} (10.77.0.2) since 30 s")


def test_an_endpoint_that_is_each_node_itself_is_named(pair: list[Host], tmp_path: Path):
    runs = [host.start(*options("localhost"), script(tmp_path)) for host in pair]
    for run in runs:
        run.wait_for_message(", which is each node itself) since 30 s; --nnodes is 2")


def test_a_clock_that_is_off_is_named_on_every_node(pair: list[Host], tmp_path: Path):
    """The other node's agent takes an hour off the time of each heartbeat."""
    place = tmp_path / "bin"
    place.mkdir()
    late = [
        f"#!{sys.executable}",
        "import datetime, sys",
        "import torch.distributed.elastic.rendezvous.dynamic_rendezvous as rendezvous",
        "class Late(datetime.datetime):",
        "    @classmethod",
        "    def now(cls, zone=None):",
        "        return datetime.datetime.now(zone) - datetime.timedelta(hours=1)",
        "rendezvous.datetime = Late",
        "from torch.distributed.run import main",
        "sys.exit(main())",
    ]
    executable(place / "torchrun", "\n".join(late) + "\n")
    path = {"PATH": f"{place}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"}
    runs: list[Run] = [
        pair[0].start(*options(), script(tmp_path)),
        pair[1].start(*options(), script(tmp_path), env=path),
    ]
    assert end_all(runs) == [MISFIT, MISFIT], [run.err for run in runs]
    assert all("the clock of h" in run.err for run in runs), [run.err for run in runs]
    clean(runs)
