"""Files for sbatch: what they contain, and what they do where Slurm's programs only record."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from cases import slow
from helpers import until
from sandbox import text_of, write
from scripts import STAYS, Machine, Ran

from saferun.errors import UsageError
from saferun.export import sbatch, shell_script
from saferun.planning.torchrun import torchrun_args

SHELL = pathlib.Path(__file__).resolve().parents[2] / "shell"
SMALLEST = '#!/usr/bin/env bash\n# --- The job ---\njob torchrun "$@"\n'  # as scripts go
# srun runs its command on one node, n1, here; the other three write down what they are asked.
SRUN = """#!/bin/bash
printf '%s\\n' "$@" >"$SLURM/srun"
while [[ $1 == --* ]]; do shift; done
echo $$ >"$SLURM/node"
SLURMD_NODENAME=n1 exec "$@"
"""
SCONTROL = """#!/bin/bash
case "$*" in
"show hostnames "*) printf 'n1\\nn2\\n' ;;
"-o show job "*) echo "JobId=7 ReqNodeList=(null) ExcNodeList=${EXCLUDED-(null)} Comment=" ;;
*) echo "scontrol $*" >>"$SLURM/asked"; [[ $1 != requeue ]] || exit "${REFUSED-0}" ;;
esac
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >>"$SLURM/asked"
node=$(cat "$SLURM/node")
kill -URG $(cat "/proc/$node/task/$node/children")
"""
# The script gives the other nodes five seconds to end.
SLEEP = '#!/bin/bash\n[[ $1 == 5 ]] || exec /bin/sleep "$@"\n'

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
MISTAKE = "Traceback (most recent call last):\n  File \"train.py\", line 1\nKeyError: 'label'\n"


class Cluster(Machine):
    """A machine on which a file for sbatch runs as if Slurm had started it."""

    def __init__(self, tmp: pathlib.Path) -> None:
        super().__init__(tmp)
        self.slurm = tmp / "slurm"
        self.slurm.mkdir()
        programs = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL, "sleep": SLEEP}
        for name, text in programs.items():
            self.program(name, text)
        self.environ |= {
            "SLURM": str(self.slurm),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_NODEID": "0",
        }

    def job(self, *argv: str) -> pathlib.Path:
        return self.script("--slurm", "--nodes", "2", "--profile", "cpu", *argv)

    def submit(self, file: pathlib.Path, *argv: str, **options: Any) -> Ran:
        return self.run(["bash", file, *argv], **options)

    @property
    def asked(self) -> list[str]:
        path = self.slurm / "asked"
        return text_of(path).splitlines() if path.exists() else []


@pytest.fixture
def cluster(tmp_path: pathlib.Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:  # what it has started ends with it
        yield cluster


def directives(text: str) -> list[str]:
    lines = text.splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    found = [line.removeprefix("#SBATCH ") for line in lines[:end] if line.startswith("#SBATCH")]
    assert not any(line.startswith("#SBATCH") for line in lines[end:])
    return found


def rendered(job: sbatch.Job, *args: str) -> str:
    line = torchrun_args.parse(args or ["SCRIPT"]).line
    return sbatch.render(SMALLEST, job, line, text_of(SHELL / "slurm.sh"))


OURS = ["--job-name=train", "--nodes=2", "--ntasks-per-node=1", "--open-mode=append"]
OURS += ["--requeue", "--signal=B:USR2@120"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, OURS),
        ({"gpus": "a100:8"}, ["--gpus-per-node=a100:8", *OURS]),
        ({"time": "1-00:00:00", "partition": "p,q"},
         [*OURS[:4], "--partition=p,q", *OURS[4:], "--time=1-00:00:00"]),
        ({"partition": "it's $(id) #1"},
         [*OURS[:4], '--partition="it\'s $(id) #1"', *OURS[4:]]),
        ({"extra": ("-A physics", '--constraint="a&b"')},
         [*OURS, "-A physics", '--constraint="a&b"']),
        ({"extra": ("--job-name=mine", "--no-requeue")},
         [*OURS[1:4], OURS[5], "--job-name=mine", "--no-requeue"]),
    ],
    ids=["ours", "gpus", "more", "quoted", "theirs", "instead"],
)  # fmt: skip
def test_directives_stand_sorted_before_all_else_and_the_users_own_replace_ours(asked, expected):
    assert directives(rendered(sbatch.Job(2, **asked), "dir/train.py")) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slurm": False, "--nodes": "2"}, "--nodes is for Slurm; saferun gen-shell --slurm"),
        ({"--nodes": "two"}, "--nodes takes a number of nodes, not `two`"),
        ({"extra": ["account=x"]}, "--sbatch takes an option of sbatch"),
        ({"--partition": "p\n#SBATCH --uid=0"}, "--partition takes one line"),
    ],
    ids=["alone", "word", "no option", "two lines"],
)
def test_what_a_directive_cannot_hold_is_refused(given, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        sbatch.read(given.pop("slurm", True), given, given.pop("extra", ()))


@pytest.mark.parametrize("line", ["--cpus-per-task=8", "-c 8", "--exclusive"])
def test_a_job_of_one_cpu_a_node_gets_a_remark(line):
    assert "--sbatch=--cpus-per-task=N" in "".join(sbatch.remarks(sbatch.Job(2)))
    assert sbatch.remarks(sbatch.Job(2, extra=(line,))) == ()


@pytest.mark.parametrize(
    ("extra", "grace_s"),
    [((), 60), (("--signal=B:USR2@600",), 540), (("--signal=B:SIGUSR2@40",), 20),
     (("--signal=TERM@600",), 60)],
    ids=["ours", "long", "short", "another"],
)  # fmt: skip
def test_the_job_is_queued_again_in_time_whatever_the_notice(extra, grace_s):
    assert f"\nslurm grace_s {grace_s}\n" in rendered(sbatch.Job(1, extra=extra))


@pytest.mark.parametrize(
    ("extra", "log"),
    [((), "%x-%j-%N.out"), (("--output=logs.d/%j",), "logs.d/%j-%N"),
     (("-o logs/%j.txt",), "logs/%j-%N.txt"), (('--output="a b"',), "%x-%j-%N.out")],
    ids=["ours", "theirs", "short", "quoted"],
)  # fmt: skip
def test_logs_of_nodes_lie_beside_the_jobs_own(extra, log):
    assert f"\nslurm logs {log}\n" in rendered(sbatch.Job(1, extra=extra))


WHOLE = ["--gpus-per-node=2", "--time=5", "--sbatch=--output=my logs/x.out", "--", "t.py", "it's"]


@pytest.mark.parametrize("arguments", [WHOLE, ["--", "--standalone", "t.py"]], ids=["all", "alone"])
def test_the_file_pleases_shellcheck_and_its_header_makes_it_again(cluster, arguments):
    file = cluster.job(*arguments)
    write(file, shell_script.without_bundle(text := text_of(file)))
    tools = pathlib.Path(sys.executable).parent
    for tool in (["shellcheck"], ["shfmt", "-i", "2", "-ci", "-d"]):
        if not (tools / tool[0]).exists():
            pytest.skip(f"no {tool[0]} beside this Python")
        done = subprocess.run([tools / tool[0], *tool[1:], file], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "")
    write(file, text)
    assert "\n#     sbatch THIS-FILE" in text
    ran = cluster.submit(file, SLURM_JOB_ID="")
    assert (ran.status, "this script is for Slurm: sbatch " in ran.err) == (2, True)
    assert cluster.command("gen-shell", "--check", str(file)).stdout == f"{file}: up to date\n"
    write(file, text.replace("--nodes=2", "--nodes=3"))
    assert (
        "would be `#SBATCH --nodes=2`" in cluster.command("gen-shell", "--check", str(file)).stdout
    )


# --- on the nodes --------------------------------------------------------------------------------


MET = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "n1:14711"]
MET += ["--rdzv-id", "4711-0"]


@pytest.mark.parametrize(
    ("made", "given", "environ", "expected"),
    [
        (["t.py", "-x"], ["a b"], {}, [*MET, "t.py", "-x", "a b"]),
        ([], ["--nproc-per-node", "4", "t.py"], {}, [*MET, "--nproc-per-node", "4", "t.py"]),
        (["--rdzv-endpoint", "h:1", "t.py"], [], {},
         [*MET[:4], *MET[6:], "--rdzv-endpoint", "h:1", "t.py"]),
        (["t.py"], [], {"PET_RDZV_ENDPOINT": "h:1"}, [*MET[:4], *MET[6:], "t.py"]),
        (["--standalone", "t.py"], [], {}, ["--standalone", "t.py"]),
        (["--master-addr", "h", "t.py"], [], {"SLURM_NODEID": "1"},
         ["--nnodes", "2", "--node-rank", "1", "--master-addr", "h", "t.py"]),
        (["t.py"], [], {"SLURM_RESTART_COUNT": "2"}, [*MET[:7], "4711-2", "t.py"]),
        (["t.py"], [], {"SLURM_JOB_ID": "20000123"},
         [*MET[:5], "n1:10123", "--rdzv-id", "20000123-0", "t.py"]),
    ],
    ids=["ours", "later", "endpoint", "exported", "standalone", "static", "again", "port"],
)  # fmt: skip
@pytest.mark.slow
def test_torchrun_gets_what_makes_nodes_meet_unless_the_user_gives_it(
    cluster, made, given, environ, expected
):
    file = cluster.job("--", "torchrun", *made) if made else cluster.job()
    write(cluster.cwd / "t.py", "")
    ran = cluster.submit(file, *given, **environ)
    assert ran.status == 0, ran.err
    assert ran.received[1].argv[1:] == expected
    assert cluster.asked == []


def test_a_job_has_a_rank_a_gpu_and_a_log_a_node_and_leaves_nothing_else(cluster):
    array = {"SLURM_ARRAY_JOB_ID": "4710", "SLURM_ARRAY_TASK_ID": "1"}
    ran = cluster.submit(cluster.job("--gpus-per-node=a100:8", "--", "train.py"), **array)
    assert ran.received[1].argv[-3:] == ["--nproc-per-node", "8", "train.py"]
    assert "--output=%x-%A_%a-%N.out" in text_of(cluster.slurm / "srun").splitlines()
    assert list(cluster.temporary.glob("saferun*")) == []  # the file that a node was sent
    assert list(cluster.cwd.glob("saferun-slurm*")) == []
    assert cluster.living() == {}


def test_plain_python_gets_no_option_of_torchruns(cluster):
    write(cluster.cwd / "t.py", "")
    ran = cluster.submit(cluster.job("--set", "launcher=python", "--", "t.py"), "a b")
    assert ran.received[1].argv[-2:] == ["t.py", "a b"], ran.err
    assert not set(MET) & set(ran.received[1].argv)


# --- after a failure -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stderr", "environ", "asked", "message"),
    [
        *slow(
            (ECC, {}, ["requeue 4711", "update JobId=4711 ExcNodeList=n1"], "again, without n1"),
        ),
        (ECC, {"EXCLUDED": "n[7-8]"},
         ["requeue 4711", "update JobId=4711 ExcNodeList=n[7-8],n1"], "without n1"),
        (ECC, {"SLURM_RESTART_COUNT": "4"}, [], "4 times queued again is all there is"),
        *slow(
            (ECC, {"SLURM_ARRAY_JOB_ID": "4710", "SLURM_ARRAY_TASK_ID": "3"},
             ["requeue 4710_3", "update JobId=4710_3 ExcNodeList=n1"], "without n1"),
            (ECC, {"REFUSED": "1"}, ["requeue 4711"], "Slurm does not queue the job again"),
            ("", {"ENDS": '[{"status": 0}]'}, [], ""),
        ),
        (MISTAKE, {}, [], "user-exception"),
    ],
    ids=["hardware", "more", "bound", "array", "refused", "success", "mistake"],
)  # fmt: skip
def test_a_job_is_queued_again_where_only_its_node_failed(cluster, stderr, environ, asked, message):
    file = cluster.job("--set", "retry.attempts_total=5", "--", "train.py")
    ran = cluster.submit(file, ends=[{"stderr": stderr, "status": 1}], **environ)
    assert ran.status == (0 if "ENDS" in environ else 1)
    assert cluster.asked == [f"scontrol {argv}" for argv in asked]
    assert message in ran.err


@pytest.mark.parametrize(
    ("ends", "status", "asked"),
    [
        (True, 1, ["scancel --signal=URG 4711", "scontrol requeue 4711"]),
        *slow((True, 0, ["scancel --signal=URG 4711"])),
        (False, 1, ["scancel --signal=URG 4711", "scontrol requeue 4711"]),
    ],
    ids=["ended", "finished", "goes on"],
)
def test_before_its_time_is_over_a_job_is_asked_to_end_and_queued_again(
    cluster, ends, status, asked
):
    notice_s = 600 if ends else 2  # one that goes on is queued again when its grace is over
    file = cluster.job(f"--sbatch=--signal=B:USR2@{notice_s}", "--", "train.py")
    records = cluster.records("x")
    answer = {"JOB_STATUS": str(status)} if ends else {}
    with cluster.start(["bash", file], ends=STAYS, **answer) as process:
        until((records / "up").exists)
        for sent in (signal.SIGSTOP, signal.SIGUSR2, signal.SIGCONT):  # Slurm sends CONT with it
            process.send_signal(sent)
        until(lambda: cluster.asked == asked)
        until(lambda: (records / "signals").exists() and text_of(records / "signals"))
        if not ends:  # Slurm ends what it has queued again
            os.killpg(json.loads(text_of(records / "1.json"))["pid"], signal.SIGKILL)
        _, err = process.communicate()
    assert text_of(records / "signals") == "SIGUSR2 "
    assert cluster.asked == asked
    # What Slurm ends may be the job first, or the script.
    killed = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
    assert process.returncode in ((status,) if ends else killed), err
    assert [path.name for path in records.glob("[0-9]*.json")] == ["1.json"]  # no attempt after it


def test_a_value_or_a_reason_that_imitates_a_heading_moves_nothing():
    """The part for Slurm stands before the job, and what the user wrote stays before it."""
    evil = "# --- The job ---"
    imitated = f"{shell_script.comment(evil[2:])}X={shell_script.quote(evil)}\n"
    script = f"#!/usr/bin/env bash\n{imitated}# --- The job ------\njob torchrun train.py\n"
    line = torchrun_args.parse(["train.py"]).line
    text = sbatch.render(script, sbatch.Job(1), line, "PART\n")
    assert text.index("PART") > text.index("X=")
    assert text.index("PART") < text.index("# --- The job ------")
