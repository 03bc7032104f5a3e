"""The hook of a plain script in a real TensorFlow, on logical CPU devices."""

import json
import os
from pathlib import Path

import pytest
from helpers import kill_all
from repo import ROOT
from sandbox import shell_program
from scripts import Machine

pytestmark = pytest.mark.tensorflow
SUMS = ROOT / "tests" / "programs" / "tensorflow" / "sums.py"


@pytest.fixture
def machine(tmp_path: Path, tensorflow_python: Path):
    machine = Machine(tmp_path)
    machine.program("python3", shell_program(tensorflow_python))
    yield machine
    kill_all(machine.mark)


def test_sums_are_right_and_what_the_script_passes_is_kept(machine):
    words = ("--profile=tf-rtx5090", "--", str(SUMS), "none", "one-device", "hierarchical")
    script = machine.script("--plain", *words)
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    process = machine.start(["bash", script], **quiet)
    out, err = process.communicate(timeout=550)  # an import may take a minute
    assert process.returncode == 0, err
    found = json.loads(out)
    chosen = {2: "HierarchicalCopyAllReduce", 4: "HierarchicalCopyAllReduce"}
    chosen |= {1: "CollectiveAllReduce", 3: "ReductionToOneDevice", 5: "ReductionToOneDevice"}
    for count, name in chosen.items():
        assert found[f"{count} none"] == [name, [float(sum(range(1, count + 1)))] * count]
        assert found[f"{count} one-device"][0] == "ReductionToOneDevice"
        assert found[f"{count} hierarchical"][0] == "HierarchicalCopyAllReduce"
    assert "hook:" not in err
    assert os.listdir(machine.temporary) in ([], ["__pycache__"])  # TensorFlow's own
