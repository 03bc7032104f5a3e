"""TensorFlow jobs under saferun from start to end, with the faults of the incident."""

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from runs import Run, run
from sandbox import text_of, write

pytestmark = pytest.mark.tensorflow
Supervised = Callable[..., AbstractContextManager[Run]]
LIMIT_S = 550  # TensorFlow takes a minute and more to be imported on a machine that is busy


def losses(job: Run) -> dict[int, float]:
    """Return {epoch: loss} as the job printed them."""
    found = re.findall(r"^epoch (\d+) loss ([\d.]+)$", job.out, re.MULTILINE)
    return {int(epoch): float(loss) for epoch, loss in found}


def receipts(job: Run, part: str) -> list[dict[str, Any]]:
    files = sorted((job.journal / "receipts").glob("*.jsonl"))
    lines = [json.loads(line) for file in files for line in text_of(file).splitlines()]
    return [line for line in lines if line.get("part") == part]


def reductions(job: Run) -> list[str]:
    """Return the reductions that ran, as the receipts say."""
    return [line["effective"]["cross_device_ops"] for line in receipts(job, "reduction")]


def test_a_fit_that_is_killed_goes_on_where_it_was_and_its_loss_falls(supervised):
    with supervised("killed") as job:
        assert job.end(LIMIT_S) == 0, job.err
        assert [e["kind"] for e in job.events("ended")] == ["killed-from-outside", "no-failure"]
        fell = losses(job)
        assert sorted(fell) == [0, 1, 2, 3]
        assert fell[0] > fell[1] > fell[2] > fell[3]
        assert reductions(job) == ["HierarchicalCopyAllReduce"] * 2
        assert [line["replicas"] for line in receipts(job, "strategy")] == [2, 2]
        job.nothing_lives()


def test_nccl_that_fails_is_replaced_also_where_the_script_passes_it(supervised):
    with supervised("nccl") as job:
        assert job.end(LIMIT_S) == 0, job.err
        kinds = [e["kind"] for e in job.events("ended")]
        assert kinds == ["tf-nccl-failed", "no-failure"]
        assert reductions(job) == ["NcclAllReduce", "HierarchicalCopyAllReduce"]
        assert "HierarchicalCopyAllReduce instead of the script's NcclAllReduce" in job.err
        assert "done" in job.out.splitlines()


def test_what_xla_cannot_compile_runs_without_it(supervised):
    with supervised("xla") as job:
        assert job.end(LIMIT_S) == 0, job.err
        kinds = [e["kind"] for e in job.events("ended")]
        assert kinds == ["tf-xla-failed", "no-failure"]
        assert "done" in job.out.splitlines()


def test_keras_2_that_cannot_load_its_weights_is_explained_and_not_tried_again(supervised):
    with supervised("load-weights") as job:
        assert job.end(LIMIT_S) == 1
        assert [e["kind"] for e in job.events("ended")] == ["keras2-load-weights"]
        assert "ends in .h5 without .weights" in job.err


def test_too_little_memory_stops_the_run_with_the_reason(supervised):
    with supervised("out-of-memory") as job:
        assert job.end(LIMIT_S) == 1
        assert [e["kind"] for e in job.events("ended")] == ["tf-oom"]
        assert losses(job)


def test_where_tensorflow_is_not_installed_one_line_says_so(tmp_path):
    write(tmp_path / "t.py", "import tensorflow\n")
    with run(tmp_path, "--profile=tf-rtx5090", "t.py") as job:
        assert job.end(LIMIT_S) == 1
        assert [e["kind"] for e in job.events("ended")] == ["user-import-error"]
        texts = [line for line in job.messages() if "No module named 'tensorflow'" in line]
        assert len(texts) == 1
