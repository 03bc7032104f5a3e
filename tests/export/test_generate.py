"""`saferun gen-shell` as people run it: what it writes, refuses and calls stale."""

import os
import re
import stat

import pytest
from sandbox import text_of, write
from scripts import NASTY

from saferun.export import shell_script


def job(text: str) -> list[str]:
    """Return the arguments of the line that starts the job, less torchrun and the last one."""
    line = re.search(r'^job torchrun(.*) "\$@"$', text, re.MULTILINE)
    argv = shell_script.unquoted(line[1])
    assert argv is not None
    return argv


@pytest.mark.parametrize(
    ("argv", "args"),
    [
        (["--profile", "cpu", "--"], []),
        (["--profile=cpu", "--", "-t3", "t.py", "--set", "x"], ["-t3", "t.py", "--set", "x"]),
        (["--profile=cpu", "--", "torchrun", "train.py"], ["train.py"]),
        (["--profile=cpu", "train.py", "--", "-x"], ["train.py", "--", "-x"]),
        (["--profile=cpu", "--nnodes", "1", "train.py"], ["--nnodes", "1", "train.py"]),
        (["--", "--nproc-per-node=2"], ["--nproc-per-node=2"]),
        (["--", "train.py", NASTY, ""], ["train.py", NASTY, ""]),
    ],
)  # fmt: skip
def test_what_follows_its_own_options_is_torchruns(machine, argv, args):
    done = machine.gen_shell(*argv)
    assert done.returncode == 0, done.stderr
    assert job(done.stdout) == args


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["--profile", "h10"], 78, "unknown profile `h10`; did you mean `h100`?"),
        (["--", "--nproc"], 2, "torchrun would refuse this: ambiguous option"),
        (["--", "--frobnicate", "train.py"], 2, "unrecognized arguments: --frobnicate"),
        (["--check", "no.sh"], 69, "there is no file `no.sh`"),
        (["-o", "no/run.sh"], 69, "cannot be written: No such file or directory"),
        (["--profile", "tf-rtx5090", "--", "-t3", "t.py"], 2, "--tee is torchrun's"),
    ],
)
def test_a_mistake_is_one_line_and_no_script(machine, argv, status, message):
    done = machine.gen_shell(*argv)
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["--profile", "-o", "--nodes"])
def test_an_option_without_its_value_is_refused_by_its_name(machine, option):
    done = machine.gen_shell(option)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"Error: Option '{option}' requires an argument.\n")
    done = machine.gen_shell(option, "--plain")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"Invalid value for '{option}': it takes a value, and `--plain` is none" in done.stderr


def test_it_needs_neither_the_script_nor_torchrun_nor_a_gpu(machine):
    (machine.bin / "torchrun").unlink()
    assert machine.gen_shell("--profile", "h100", "--", "gone.py").returncode == 0


def test_the_same_arguments_make_the_same_bytes_and_the_headers_command_reproduces_them(machine):
    argv = ["--profile", "h100", "--set", f"env.A={NASTY}", "--", "train.py", NASTY, "\u00fc"]
    first = machine.gen_shell(*argv).stdout
    made = shell_script.made_by(first)
    assert made[1][:2] == ["saferun", "gen-shell"]
    assert machine.gen_shell(*made[1][2:]).stdout == first


@pytest.mark.parametrize(
    ("argv", "takes"),
    [
        ([], "[TORCHRUN OPTIONS]... SCRIPT [ARGUMENTS]..."),
        (["--nproc-per-node", "2"], "[TORCHRUN OPTIONS]... SCRIPT [ARGUMENTS]..."),
        (["--nproc-per-node", "2", "train.py"], "[SCRIPT'S ARGUMENTS]..."),
    ],
    ids=["nothing", "no script", "a script"],
)
def test_the_header_names_what_the_script_takes(machine, argv, takes):
    text = text_of(machine.script("--profile", "cpu", "--", *argv))
    assert f"\n#     bash THIS-FILE {takes}\n" in text
    assert ("are torchrun's arguments" in text) is ("SCRIPT [ARG" in takes)


def test_the_header_has_what_the_environment_asked_for(machine):
    environ = {"SAFERUN_PROFILE": "h100", "SAFERUN_SET": "env.A='x y' retry.attempts=2"}
    environ |= {"SAFERUN_RETRIES": "4", "SAFERUN_RUN_DIR": "my runs"}
    path = machine.script("--", "train.py", **environ)
    made = shell_script.made_by(text_of(path))
    assert machine.gen_shell(*made[1][2:]).stdout == text_of(path)
    assert machine.gen_shell("--check", str(path)).returncode == 0


def test_o_writes_an_executable_file_and_replaces_only_its_own(machine):
    argv = ["gen-shell", "--profile", "cpu", "-o", "run.sh", "--", "train.py"]
    path = machine.cwd / "run.sh"
    for _ in range(2):
        done = machine.command(*argv)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert text_of(path) == machine.gen_shell("--profile", "cpu", "--", "train.py").stdout
    write(path, "#!/bin/sh\necho mine\n")
    done = machine.command(*argv)
    assert (done.returncode, text_of(path)) == (2, "#!/bin/sh\necho mine\n")
    assert "gen-shell did not make" in done.stdout + done.stderr
    assert [p.name for p in machine.cwd.iterdir() if ".tmp" in p.name] == []


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (None, "up to date"),
        (("PCI_BUS_ID", "FASTEST_FIRST"), "stale: line "),
        (("Made by saferun ", "Made by saferun 0.0."), "stale: saferun 0.0."),
        (("gen-shell --profile h100", "gen-shell --profile a100"), "stale: line "),
        (('"$@"', '"$@"\necho more'), "stale: "),
        (("\n#: ", "\n#: AAAA"), "stale: the code that travels in it is not this saferun's"),
        (("Made by", "Written by"), "stale: gen-shell did not make it"),
        (
            ("saferun gen-shell --", "saferun gen-shell $(touch x) --"),
            "stale: gen-shell did not make it",
        ),
    ],
    ids=["same", "setting", "version", "command", "line", "bundle", "header", "shell-in-header"],
)
def test_check_tells_whether_a_script_is_stale(machine, change, verdict):
    path = machine.script("--profile", "h100", "--", "train.py", name="run.sh")
    if change:
        text = text_of(path)
        assert change[0] in text
        write(
            path,
            text.replace(*change, 1)
            if change[0] != '"$@"'
            else change[1].join(text.rsplit(change[0], 1)),
        )
    done = machine.gen_shell("--check", "run.sh")
    given = ["--profile", "h100", "--", "train.py"]
    assert machine.gen_shell("--check", "run.sh", *given).returncode == done.returncode
    assert done.returncode == (1 if change else 0)
    assert done.stdout.startswith(f"run.sh: {verdict}")
    assert (done.stdout.count("\n"), done.stderr) == (1, "")
    assert not (machine.cwd / "x").exists()


def test_a_profile_of_this_directory_is_named_and_a_secret_warned_of(machine):
    write(machine.cwd / "saferun.yaml", "schema: 1\nname: ours\nenv: {WANDB_API_KEY: abc}\n")
    done = machine.gen_shell("--profile", "ours", "--", "train.py")
    assert done.returncode == 0
    assert done.stderr == (
        "saferun: profile ours is ./saferun.yaml of this directory\n"
        "saferun: the script holds WANDB_API_KEY: mind who may read it\n"
    )


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["--hf-token", "abcdefgh12"], "--hf-token"),
        (["--api-key=abcdefgh12"], "--api-key"),
        (["https://u:abcdefgh12@h/x"], "a secret in argument 2"),
    ],
)
def test_secrets_among_the_arguments_are_warned_of_and_nobody_else_may_read_them(
    machine, arguments, reported
):
    done = machine.gen_shell("-o", "run.sh", "--profile", "cpu", "--", "train.py", *arguments)
    assert done.stderr == f"saferun: the script holds {reported}: mind who may read it\n"
    assert (machine.cwd / "run.sh").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("named", [[], ["--profile", "cpu"]], ids=["detected", "named"])
def test_a_job_for_other_nodes_whose_profile_is_this_machines_is_remarked(machine, named):
    done = machine.gen_shell("--slurm", "--sbatch=--exclusive", *named, "--", "train.py")
    remark = "saferun: profile cpu is for this machine; name the nodes' own with --profile\n"
    assert (done.returncode, done.stderr) == (0, "" if named else remark)


@pytest.mark.parametrize("option", ["-o", "--check"])
def test_a_fifo_in_a_scripts_place_is_not_waited_for(machine, option):
    os.mkfifo(machine.cwd / "run.sh")
    done = machine.gen_shell("--profile", "cpu", option, "run.sh")
    assert done.returncode in (1, 2)
    assert "gen-shell did not make" in done.stdout + done.stderr
    assert stat.S_ISFIFO((machine.cwd / "run.sh").stat().st_mode)
