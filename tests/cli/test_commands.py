"""The command as people run it: real processes, and a torchrun that records what it got."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from sandbox import SAFERUN, SHELLS_OWN, captured, python_program, shell, text_of, unwrapped, write
from user_machine import UserMachine

from saferun import __main__ as door
from saferun import __version__

NASTY = "a'b\"c $(touch x) `id` \\ \n\t ünï ; & | > < * ? ~ # !"

TORCHRUN = """\
import json, os, sys
with open(os.environ["RECORD"], "w") as f:
    json.dump({"argv": sys.argv, "pid": os.getpid(), "env": dict(os.environ)}, f)
sys.stdout.write("job out\\n")
sys.stderr.write("job err\\n")
sys.exit(int(os.environ.get("STATUS", "0")))
"""


class RecordingMachine(UserMachine):
    """A user's machine whose torchrun records what it got."""

    def __init__(self, home: pathlib.Path, folder: pathlib.Path) -> None:
        super().__init__(home, folder)
        self.record = folder / "record.json"
        self.environ["RECORD"] = str(self.record)
        self.program("torchrun", python_program(TORCHRUN))

    def run(self, *argv: str, status: int | None = 0, **environ: str):
        done = self.ran(*SAFERUN, *argv, env=environ)
        if status is not None:
            assert done.returncode == status, (done.returncode, done.stderr)
        assert "Traceback" not in done.stderr
        return done

    @property
    def got(self) -> dict:
        return json.loads(text_of(self.record))

    def refused(self, *argv: str, status: int, **environ: str) -> str:
        done = self.run(*argv, status=status, **environ)
        assert not self.record.exists(), "the job was started"
        assert done.stdout == ("false\n" if argv[:1] == ("env",) else "")
        assert list(self.runs.glob("*")) == [], "a run is listed"
        return done.stderr


@pytest.fixture
def machine(home: pathlib.Path, tmp_path: pathlib.Path) -> RecordingMachine:
    return RecordingMachine(home, tmp_path)


def test_a_launch_hands_torchrun_the_users_words_and_adds_one_line(machine):
    done = machine.run("--nnodes=1", "train.py", "--profile", "x")
    assert machine.got["argv"] == [
        str(machine.bin / "torchrun"),
        "--nnodes=1",
        "train.py",
        "--profile",
        "x",
    ]
    assert done.stdout == "job out\n"
    assert done.stderr == "saferun: profile cpu (detected: no GPU)\njob err\n"


def test_the_exit_status_is_the_jobs_and_its_pid_ours_where_there_is_one_attempt(machine):
    for status in (3, 75):
        machine.run("train.py", status=status, STATUS=str(status))
    # with torchrun's own refusal, and nobody to read what is printed
    code = f"exec {shell(*SAFERUN)} --retries 0 --nonsense train.py 2>&- >&-"
    with subprocess.Popen(["bash", "-c", code], cwd=machine.cwd, env=machine.environ) as job:
        pass
    assert machine.got["pid"] == job.pid
    assert machine.got["argv"][1:] == ["--nonsense", "train.py"]


def test_the_environment_is_the_users_own_with_the_plan_on_top(machine):
    plan = json.loads(machine.run("plan", "--json", "--profile", "debug", "train.py").stdout)
    machine.run("--profile", "debug", "train.py", MINE=NASTY)
    env = machine.got["env"]
    ours = {n: s["value"] for n, s in plan["env"].items() if n != "SAFERUN_INJECT"}
    for name, value in ours.items():
        assert env[name] == value
    added = set(env) - set(machine.environ) - set(ours) - {"LC_CTYPE"} - SHELLS_OWN
    assert added == {"MINE", "SAFERUN_INJECT", "SAFERUN_AGENT_PID"}  # the last: our torchrun's own
    assert env["MINE"] == NASTY


def test_disable_runs_torchrun_untouched_whatever_else_is_said(machine):
    done = machine.run("--profile", "nonsense", "--nnodes=1", "missing.py", SAFERUN_DISABLE="1")
    assert machine.got["argv"][1:] == ["--nnodes=1", "missing.py"]
    assert set(machine.got["env"]) - {"LC_CTYPE"} - SHELLS_OWN == {
        *machine.environ,
        "SAFERUN_DISABLE",
    }
    assert done.stderr == "job err\n"


def test_a_dry_run_shows_the_plan_and_starts_nothing(machine):
    shown = machine.run("plan", "train.py").stdout
    assert f"{shell(machine.bin / 'torchrun')} train.py" in unwrapped(shown)
    assert machine.run("--dry-run", "train.py").stdout == shown
    assert machine.run("train.py", SAFERUN_DRY_RUN="1").stdout == shown
    assert not machine.record.exists()


def test_a_plan_needs_neither_script_nor_torchrun_nor_gpu(machine):
    (machine.bin / "torchrun").unlink()
    made = json.loads(machine.run("plan", "--profile", "h100", "--json", "nowhere.py").stdout)
    assert made["torchrun_args"] == ["--nproc-per-node=gpu", "nowhere.py"]
    made = json.loads(machine.run("plan", "--retries=50", "--json", "train.py").stdout)
    assert (made["retry"]["attempts"], made["retry"]["attempts_total"]) == (51, 51)


def test_options_have_variables_and_the_option_wins(machine):
    environ = {
        "SAFERUN_PROFILE": "debug",
        "SAFERUN_SET": "env.A='x y' retry.attempts=2",
        "SAFERUN_RETRIES": "4",
    }
    made = json.loads(machine.run("plan", "--json", "train.py", **environ).stdout)
    assert (made["profile"], made["env"]["A"]["value"]) == ("debug", "x y")
    assert made["env"]["A"]["origin"] == "SAFERUN_SET"
    assert made["retry"]["attempts"] == 5
    argv = ["plan", "--profile=cpu", "--set=env.A=z", "--retries=0", "--json", "train.py"]
    made = json.loads(machine.run(*argv, **environ).stdout)
    assert (made["profile"], made["env"]["A"]["value"]) == ("cpu", "z")
    assert made["retry"]["attempts"] == 1


def test_run_launches_a_script_that_is_named_like_a_command(machine):
    for word in ("doctor", "run"):
        write(machine.cwd / word, "")
        machine.run("run", word, "--json")
        assert machine.got["argv"][1:] == [word, "--json"]


def test_a_values_characters_reach_the_job_unchanged(machine):
    write(machine.cwd / "p.yaml", f"schema: 1\nenv: {{A: {json.dumps(NASTY)}}}\n")
    machine.run("--profile", "./p.yaml", "--set", f"env.B={NASTY}", "train.py")
    assert (machine.got["env"]["A"], machine.got["env"]["B"]) == (NASTY, NASTY)
    assert not (machine.cwd / "x").exists()


@pytest.mark.parametrize(
    ("argv", "status", "parts"),
    [
        (["--profile", "h10", "train.py"], 78, ["unknown profile `h10`", "h100", "known: a100"]),
        (["--profile", "./no.yaml", "train.py"], 78, ["no profile file `./no.yaml`"]),
        (["--set", "retry.attemts=1", "train.py"], 78, ["retry.attemts", "`retry.attempts`"]),
        (["--set", "retry.attempts=x", "train.py"], 78, ["whole number"]),
        (["--set", "nonsense", "train.py"], 2, ["takes KEY=VALUE"]),
        (["--retries", "x", "train.py"], 2, ["takes a whole number"]),
        (["--retries", "-1", "train.py"], 2, ["--retries takes a whole number"]),
        (["--retries", "9" * 5000, "train.py"], 2, ["--retries takes a whole number"]),
        (["--set", "retry.attempts=0x" + "f" * 6000, "train.py"], 78, ["whole number"]),
        (["gen-shell", "--slurm", "--nodes", "9" * 5000, "train.py"], 2, ["number of nodes"]),
        (["missing.py"], 2, ["no script `missing.py`", "in "]),
        (["--no-python", "missing-program"], 2, ["no program `missing-program`"]),
        (["--profile", "cpu", "plan", "train.py"], 2, ["no script `plan`", "saferun plan"]),
        (["--profile"], 2, ["--profile needs a value"]),
        (["plan", "--nonsense", "train.py"], 2, ["unrecognized arguments: --nonsense"]),
        (["plan"], 2, ["training_script"]),
        (["plan", "--use_env", "t.py"], 2, ["--use_env", "leave it out"]),
        (["--profile", "tf-rtx5090", "--nnodes=2", "train.py"], 2, ["--nnodes is torchrun's"]),
        (["--set=launcher=python", "-u", "train.py"], 2, ["no option -u", "PYTHONUNBUFFERED"]),
        (["--profile=hpo", "--set=workers=2", "-t3", "train.py"], 2, ["--tee is torchrun's"]),
        (["plam", "train.py"], 2, ["no script `plam`", "did you mean the command `saferun plan`?"]),
        (["plan", "--profil", "cpu", "train.py"], 2, ["--profil; did you mean saferun's"]),
        (["profiles", "show", "nope"], 78, ["unknown profile `nope`"]),
        (["profiles", "nope"], 2, ["No such command"]),
        (["env", "--profile", "nope"], 78, ["unknown profile `nope`"]),  # and `false` for eval
        ([], 2, ["Usage: saferun"]),
    ],
    ids=lambda v: " ".join(v)[:60] if isinstance(v, list) else None,
)
def test_a_mistake_is_said_with_its_fix_and_nothing_starts(machine, argv, status, parts):
    messages = machine.refused(*argv, status=status)
    for part in parts:
        assert part in messages


def test_a_wrong_profile_file_says_file_and_line(machine):
    write(machine.cwd / "p.yaml", "schema: 1\nenv:\n  A: off\n")
    messages = machine.refused("--profile", "./p.yaml", "train.py", status=78)
    assert messages.startswith("saferun: a boolean where text belongs; ./p.yaml, line 3")
    assert messages.count("\n") == 1


def test_no_torch_anywhere_is_said(machine, tmp_path):
    (machine.bin / "torchrun").unlink()
    src = pathlib.Path(door.__file__).parents[1]
    bare = "/usr/bin/python3"
    fits = "import importlib.util as u, yaml; raise SystemExit(u.find_spec('torch') is not None)"
    if not os.path.exists(bare) or subprocess.run([bare, "-c", fits]).returncode:
        pytest.skip("needs a system's Python with yaml and without torch")
    program = f"import sys; sys.path.insert(0, {str(src)!r}); from saferun.__main__ import main\n"
    done = machine.ran(bare, "-c", program + "sys.exit(main(['train.py']))")
    assert (done.returncode, "Traceback" in done.stderr) == (69, False), done.stderr
    assert "no torchrun" in done.stderr


def test_use_env_gets_a_clear_word_beside_torchruns_message(machine):
    done = machine.run("--use_env", "train.py")
    assert "--use_env belongs to torch.distributed.launch" in done.stderr
    assert machine.got["argv"][1:] == ["--use_env", "train.py"]


def test_env_prints_only_code_that_eval_takes(machine):
    done = machine.run("env", "--profile", "debug", "--set", f"env.A={NASTY}")
    code = done.stdout + 'printf %s "$A"'
    shell = subprocess.run(["bash", "-euc", code], cwd=machine.cwd, capture_output=True, check=True)
    assert shell.stdout.decode() == NASTY
    plain = machine.run("env", "--profile", "debug").stdout.splitlines()
    assert all(line.startswith("export ") for line in plain)
    assert plain == sorted(plain)


def test_profiles_can_be_listed_shown_checked_and_described(machine):
    listed = machine.run("profiles", "list").stdout
    assert "* cpu" in listed
    columns = {re.match(r"[* ] \S+ +", line).end() for line in listed.splitlines()}
    assert len(columns) == 1, "the descriptions stand in one column"
    shown = machine.run("profiles", "show", "h100-nanochat").stdout
    assert "hooks.compile.autotune = off" in shown
    assert "nanochat/issues/257" in shown
    assert json.loads(machine.run("profiles", "schema").stdout)["title"] == "saferun profile"
    write(machine.cwd / "good.yaml", "schema: 1\nextends: [cuda]\n")
    write(machine.cwd / "bad.yaml", "schema: 1\nx: 1\ny: 2\n")
    write(machine.cwd / "pair.yaml", "schema: 1\nhooks: {cudagraph_markers: off}\n")
    done = machine.run("profiles", "check", "good.yaml", "bad.yaml", "pair.yaml", status=78)
    assert done.stdout == "good.yaml: no errors\nbad.yaml: 2 errors\npair.yaml: 1 error\n"
    assert "bad.yaml, line 2" in done.stderr


def test_help_names_every_command_and_option(machine):
    messages = machine.run("--help").stdout
    assert machine.run("-h").stdout == messages
    for name in ("--profile", "--set", "--retries", "--run-dir", "--dry-run", "SAFERUN_DISABLE"):
        assert name in messages
    assert machine.run("--version").stdout == f"saferun {__version__}\n"


def test_a_fault_of_ours_has_its_own_status_and_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(door, "_dispatch", lambda argv: 1 / 0)
    assert door.main(["train.py"]) == 70
    messages = capsys.readouterr().err
    assert "ZeroDivisionError" in messages
    assert "SAFERUN_DISABLE=1" in messages


def test_a_reader_that_goes_away_is_no_fault(machine):
    pipe = f"{shell(*SAFERUN)} profiles schema | head -c 1 >/dev/null"
    command = pipe + "; echo ${PIPESTATUS[0]}"
    done = machine.ran("bash", "-c", command)
    assert done.stdout.strip() in ("0", "1", "141")  # click's own status for it is 1
    assert done.stderr == ""


def test_a_vanished_working_directory_stops_nobody(machine):
    gone = machine.cwd / "gone"
    gone.mkdir()
    script = machine.cwd / "train.py"
    code = (
        "import os, sys; os.chdir(sys.argv[1]); os.rmdir(sys.argv[1]); "
        "os.execv(sys.executable, [sys.executable, '-m', 'saferun', sys.argv[2]])"
    )
    done = captured(sys.executable, "-c", code, str(gone), str(script), env=machine.environ)
    assert done.returncode == 0, done.stderr
    assert os.path.exists(machine.record)
