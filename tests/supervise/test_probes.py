"""What the probes find that a mitigation needs: ports, directories, compilers, limits."""

import os
import resource
import socket
import stat
from pathlib import Path

import pytest
from mitigation_plans import planned
from sandbox import executable

from saferun.model import ProcessLimits
from saferun.supervise.changes import probes


def test_a_port_and_an_id_are_fresh_for_each_attempt_and_stay_for_it():
    asked = probes.Probes({}, None)
    first = asked.ask(["free", "fresh"], 2)
    assert first == asked.ask(["free", "fresh"], 2)
    assert first["fresh"] != asked.ask(["fresh"], 3)["fresh"]
    with socket.socket(socket.AF_INET6) as trial:
        trial.bind(("::", int(first["free"])))


def test_the_cache_directory_is_private_stays_for_the_run_and_goes_with_it(tmp_path):
    asked = probes.Probes({"TMPDIR": str(tmp_path)}, None)
    made = asked.ask(["fresh-directory"], 2)["fresh-directory"]
    assert asked.ask(["fresh-directory"], 3)["fresh-directory"] == made
    assert Path(made).parent == tmp_path
    assert stat.S_IMODE(os.stat(made).st_mode) == 0o700
    (Path(made) / "rank0").mkdir()
    asked.close()
    assert not os.path.exists(made)
    asked.close()
    asked = probes.Probes({"TMPDIR": "/proc/nowhere"}, None, str(tmp_path))
    made = asked.ask(["fresh-directory"], 1)["fresh-directory"]
    assert Path(made).parent == tmp_path
    asked.close()
    nowhere = probes.Probes({"TMPDIR": "/proc/nowhere"}, None, "/proc/nowhere")
    assert nowhere.ask(["fresh-directory"], 1) == {}


def _ptxas(path: Path, release: str) -> str:
    text = f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.9'\n"
    return str(executable(path, text))


@pytest.mark.parametrize(
    ("packaged", "toolkits", "chosen"),
    [
        (["9.8"], ["12.9", "13.1", "nothing", "13.0"], 1),
        (["12.8", "13.1"], ["13.0", "13.1"], None),
        ([], ["13.0"], None),
    ],
    ids=["newest", "older than one", "no triton"],
)
def test_the_newest_ptxas_is_taken_where_it_is_newer_than_the_packaged(
    packaged, toolkits, chosen, tmp_path, monkeypatch
):
    monkeypatch.setattr(probes, "TOOLKITS", str(tmp_path / "none*"))
    folder = tmp_path / "venv/lib/python3.11/site-packages/triton/backends/nvidia/bin"
    for name, release in zip(["ptxas", "ptxas-blackwell"], packaged, strict=False):
        _ptxas(folder / name, release)
    found = [_ptxas(tmp_path / f"cuda{i}/bin/ptxas", r) for i, r in enumerate(toolkits)]
    environ = {"PATH": ":".join(str(Path(path).parent) for path in found)}
    newest = probes.newest_ptxas(environ, str(tmp_path / "venv"))
    assert newest == (None if chosen is None else found[chosen])


def test_open_files_are_answered_only_where_the_limit_can_be_raised(monkeypatch):
    for limits, answer in [((1024, 4096), "4096"), ((4096, 4096), None), ((-1, -1), None)]:
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        assert probes.raisable(resource.RLIMIT_NOFILE) == answer
    plan = planned("more-open-files", answers={"open-files": "4096"})
    assert plan.limits == ProcessLimits(nofile=4096)


def test_the_interface_is_a_real_one_and_not_the_loopback_where_there_are_several_nodes():
    names = {name for _, name in socket.if_nameindex()}
    alone = probes.reachable_interface("", 1)
    assert alone in names
    assert probes.reachable_interface("127.0.0.1", 2) != "lo"
    assert probes.reachable_interface("no.such.host.invalid", 2) in {*names, None}
