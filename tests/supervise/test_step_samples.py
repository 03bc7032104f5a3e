"""How far the steps of a job have come is read from its own output, while it runs."""

import subprocess
import sys

from saferun.supervise.watch.live_job import LiveJob
from saferun.supervise.watch.step_samples import StepSamples


def test_each_look_adds_the_newest_step_and_says_nothing_without_one(tmp_path):
    file = tmp_path / "out"
    file.write_text("step 1 loss 4.5\nstep 2 loss 4\n", encoding="utf-8")
    with file.open("a", encoding="utf-8") as out:
        code = "import sys; print(flush=True); sys.stdin.read()"
        job = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=out)
    samples = StepSamples(LiveJob(job.pid, job.pid))
    try:
        first = samples.sample()
        assert first.endswith(", 2, 4.0]\n")
        assert samples.sample() == ""
        with file.open("a", encoding="utf-8") as out:
            out.write("step 7 loss nan\n")
        assert samples.sample().splitlines()[1].endswith(", 7, null]")
    finally:
        job.communicate()
