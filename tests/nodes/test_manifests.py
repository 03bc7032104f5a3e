"""The Kubernetes manifests of examples/kubernetes: their command in a pod."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ROOT
from rights import needs
from runs import Run, program

MANIFESTS = ROOT / "examples" / "kubernetes"
POD_PROGRAM = ROOT / "tests" / "programs" / "nodes" / "pod.sh"


NAMES = ("trainjob", "pytorchjob")


def manifest(name: str) -> Any:
    return yaml.safe_load((MANIFESTS / f"{name}.yaml").read_text(encoding="utf-8"))


def command(name: str) -> list[str]:
    spec = manifest(name)["spec"]
    if name == "trainjob":
        found = spec["trainer"]
    else:
        found = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    words: list[str] = found["command"]
    return words


def variables(name: str, node: int, processes: int, port: int) -> dict[str, str]:
    """Return what the two controllers set in the pod of a node."""
    if name == "trainjob":
        return {
            **{"PET_NNODES": "2", "PET_NPROC_PER_NODE": str(processes)},
            **{"PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "127.0.0.1"},
            "PET_MASTER_PORT": str(port),
        }
    return {
        **{"PYTHONUNBUFFERED": "1", "PET_RDZV_BACKEND": "c10d", "PET_NNODES": "2:2"},
        **{"PET_RDZV_ENDPOINT": f"127.0.0.1:{port}", "PET_NPROC_PER_NODE": str(processes)},
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_run_directory_is_on_the_shared_claim(name):
    assert {path.stem for path in MANIFESTS.glob("*.yaml")} == set(NAMES)
    text = (MANIFESTS / f"{name}.yaml").read_text(encoding="utf-8")
    (place,) = [word for word in command(name) if word.startswith("--run-dir=")]
    mounts = re.findall(r"mountPath: (\S+)", text)
    assert [place.startswith(f"--run-dir={mount}/") for mount in mounts] == [True]
    assert "claimName: shared" in text


@pytest.mark.parametrize(("name", "nodes"), [("trainjob", "2"), ("pytorchjob", "2:2")])
def test_the_plan_is_that_of_the_variables_that_a_controller_sets(name, nodes, tmp_path):
    """saferun reads them as torchrun does: it adds no option of its own beside them."""
    environ = {
        **{"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        **variables(name, 1, 8, 29400),
    }
    argv = [sys.executable, "-m", "saferun", "plan", "--json", "--profile=cpu", *command(name)[1:]]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
    plan = json.loads(done.stdout)
    assert plan["script"] == "train.py"
    assert not [word for word in plan["torchrun_args"] if word.startswith(("--nnodes", "--nproc"))]
    assert environ["PET_NNODES"] == nodes
    argv.remove("--json")
    page = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True).stdout
    assert f"PET_NNODES={nodes} PET_NPROC_PER_NODE=8" in " ".join(page.split())


@pytest.mark.slow
@needs("make networks")
@pytest.mark.parametrize("name", NAMES)
def test_the_command_runs_as_process_1_of_a_pod_and_again_after_a_failure(name, tmp_path):
    work, shared = tmp_path / "work", tmp_path / "shared"
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    shared.mkdir()
    (shared / "out").mkdir()
    shutil.copytree(Path(program("counting_job")).parent, work)
    shutil.copy(program("counting_job"), work / "train.py")
    job = [*command(name), "/shared/out", "20", "SIGKILL", "1", "12", "1"]
    pods = [pod(tmp_path, f"train-{node}", job, variables(name, node, 1, port)) for node in (0, 1)]
    assert [one.end() for one in pods] == [0, 0], [one.err for one in pods]
    for one in pods:
        assert one.messages()[-1] == "saferun: attempt 2 succeeded"
        one.nothing_lives()
    assert "done step=20" in pods[0].out + pods[1].out
    assert len(list((shared / "runs").iterdir())) == 2


def pod(place: Path, name: str, job: list[str], variables: dict[str, str]) -> Run:
    """Start a job as process 1 in namespaces and a root of its own."""
    folder, root = place / name, place / f"{name}-root"
    folder.mkdir()
    root.mkdir()
    readable = [
        "/usr",
        "/bin",
        "/lib",
        "/lib64",
        sys.prefix,
        sys.base_prefix,
        *(str(ROOT / name) for name in ("src", "profiles", "shell")),
    ]
    readable = [path for path in readable if os.path.lexists(path)]
    alone = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
    inside = ["sh", str(POD_PROGRAM), name, str(root), str(place / "shared"), str(place / "work")]
    environ = {"HOME": "/tmp", "SAFERUN_PROFILE": "cpu", **variables}
    return Run(folder, job, command=[*alone, *inside, *readable, "--"], env=environ)
