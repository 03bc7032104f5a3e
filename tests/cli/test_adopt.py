"""`saferun adopt`: torchrun becomes saferun where a script starts it, and nowhere else."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from command import Ended, call

from saferun.export.adopt import adopt

# What a shell script may hold, with what it becomes; "" where it stays as it is.
SHELL = {
    "torchrun --nproc_per_node 2 t.py": "saferun --nproc_per_node 2 t.py",
    'torchrun "$@"; exec torchrun x': 'saferun "$@"; exec saferun x',
    "A=1 torchrun \\\n  --standalone t.py": "A=1 saferun \\\n  --standalone t.py",
    "if ! torchrun --x t.py; then exit 1; fi": "if ! saferun --x t.py; then exit 1; fi",
    "(torchrun t.py 2>&1) | tee torchrun.log": "(saferun t.py 2>&1) | tee torchrun.log",
    "nohup torchrun --x t.py > torchrun.log &": "nohup saferun --x t.py > torchrun.log &",
    "srun -N 2 --cpu-bind=none torchrun t.py": "srun -N 2 --cpu-bind=none saferun t.py",
    'srun bash -c "torchrun --x=\\"a b\\" t.py"': 'srun bash -c "saferun --x=\\"a b\\" t.py"',
    "ssh h 'cd w && torchrun --x t.py'": "ssh h 'cd w && saferun --x t.py'",
    'sbatch --wrap="torchrun --x t.py"': 'sbatch --wrap="saferun --x t.py"',
    'bash -lc "\n torchrun \\"\\${A[@]}\\" t.py"': 'bash -lc "\n saferun \\"\\${A[@]}\\" t.py"',
    "uv run --frozen torchrun -m a.b": "uv run --frozen saferun -m a.b",
    "nsys profile -o torchrun torchrun --x t.py": "nsys profile -o torchrun saferun --x t.py",
    "cmd=(torchrun  # here\n  --x\n)": "cmd=(saferun  # here\n  --x\n)",
    "L=(torchrun)\n${L[@]} t.py": "L=(saferun)\n${L[@]} t.py",
    'C="torchrun --x $A"; eval $C': 'C="saferun --x $A"; eval $C',
    'T="${T:-torchrun}"\n"$T" --x t.py': 'T="${T:-saferun}"\n"$T" --x t.py',
    ': "${T:=torchrun}"; $T t.py': ': "${T:=saferun}"; $T t.py',
    "${T:-torchrun} --x t.py": "${T:-saferun} --x t.py",
    "T=$(which torchrun)\nsrun $T --x": "T=$(which saferun)\nsrun $T --x",
    "srun python -u `which torchrun` --x": "srun saferun --x",
    "C=torchrun; C+=' --x'; eval \"$C\"": "C=saferun; C+=' --x'; eval \"$C\"",
    "case $l in torchrun) torchrun t.py ;; esac": "case $l in torchrun) saferun t.py ;; esac",
    "function f { torchrun $@; }": "function f { saferun $@; }",
    "cat > j.sh <<E\nsrun torchrun --x t.py\nE\n": "cat > j.sh <<E\nsrun saferun --x t.py\nE\n",
    "sbatch <<'E'\n# don't\ntorchrun --x t.py\nE\n": "sbatch <<'E'\n# don't\nsaferun --x t.py\nE\n",
    "C=$(cat <<E\ntorchrun --x t.py\nE\n)": "C=$(cat <<E\nsaferun --x t.py\nE\n)",
    "echo a > torchrun.sh; torchrun t.py\r\n": "echo a > torchrun.sh; saferun t.py\r\n",
    "python3 -m torch.distributed.run --x t.py": "saferun --x t.py",
    "P=${P:-python}\n$P -u -m torch.distributed.run t.py": "P=${P:-python}\nsaferun t.py",
    'c=("python" "-m" "torch.distributed.run" t.py)': "c=(saferun t.py)",
    "L='python -m torch.distributed.run --x'\n$L t.py": "L='saferun --x'\n$L t.py",
    "python -m torch.distributed.launch --use_env --x t.py": "saferun --x t.py",
    "python -W ignore -m torch.distributed.launch \\\n  --use-env \\\n  t.py": "saferun \\\n  t.py",
    "parallel torchrun ::: a.py b.py": "parallel saferun ::: a.py b.py",
    "ls | parallel -j2 torchrun": "ls | parallel -j2 saferun",
    "parallel 'torchrun {}' ::: a b": "parallel 'saferun {}' ::: a b",
    "ssh h 'parallel torchrun ::: a.py'": "ssh h 'parallel saferun ::: a.py'",
    "sem -j2 torchrun {} t": "sem -j2 saferun {} t",
    "xargs -n1 torchrun < l": "xargs -n1 saferun < l",
    "declare -r T=torchrun\n$T t.py": "declare -r T=saferun\n$T t.py",
    "for l in torchrun p; do $l t.py; done": "for l in saferun p; do $l t.py; done",
    "# torchrun --x t.py": "",
    "echo 'run: torchrun --x t.py'": "",
    "cat <<E\nUsage: torchrun --x t.py\nE\n": "",
    "bash torchrun.sh; my-torchrun --x; torchrun-exp; tmux new -s torchrun -d": "",
    "command -v torchrun >/dev/null || { echo 'torchrun not found'; exit 1; }": "",
    "for l in torchrun python; do :; done": "",
    "git commit -m 'use torchrun --x'": "",
    "export FORCE_TORCHRUN=1; llamafactory-cli train a.yaml": "",
    "x=$(( 1 << 2 ))  # torchrun": "",
}
# What is left for a person, and a part of what is said of it.
LEFT = {
    "/opt/env/bin/torchrun --x t.py": "first on PATH",
    'T="${T:-/opt/bin/torchrun}"': "first on PATH",
    "/opt/bin/python -m torch.distributed.run t.py": "a Python of its own",
    "$P -m torch.distributed.run t.py": "a Python of its own",
    "python -m torch.distributed.launch $ARGS": "--local-rank",
    "L='python -m torch.distributed.launch --x t.py'; $L": "--local-rank",
    "A=--use_env; python -m torch.distributed.launch $A t.py": "--local-rank",
    "axolotl train a.yml --launcher torchrun -- --x": "argument of another program",
    'L=torchrun\nif [[ "$L" == "torchrun" ]]; then :; fi; $L t.py': "compared or passed on",
    "export BACKEND=torchrun": "compared or passed on",
    "pkill -f torchrun": "processes by name",
    "alias tr=torchrun": "alias tr holds the word torchrun",
    "alias a=ls b='torchrun --x'": "alias b holds the word torchrun",
    'L="$BEFORE torchrun"; $L t.py': "L holds the word torchrun",
    "torchrun() { srun python t.py; }": "a function has torchrun's name",
    "function torchrun { srun python t.py; }": "a function has torchrun's name",
    "accelerate launch t.py": "starts the ranks itself",
    "deepspeed --num_gpus 2 t.py": "starts the ranks itself",
}
OTHER = {  # by file name
    "Makefile": (
        "all:\n\t@OMP=1 torchrun --x t.py  # it's\n",
        "all:\n\t@OMP=1 saferun --x t.py  # it's\n",
    ),
    "Dockerfile": ('CMD ["torchrun", "--x"]\n', 'CMD ["saferun", "--x"]\n'),
    "pod.yaml": (
        "args:\n- torchrun\n- --x\nlauncher: torchrun\n",
        "args:\n- saferun\n- --x\nlauncher: torchrun\n",
    ),
    "job.yaml": ("run: |\n  torchrun --x t.py\n", "run: |\n  saferun --x t.py\n"),
    "a.md": (
        "Use torchrun --x.\n\n    $ torchrun --x t.py\n",
        "Use torchrun --x.\n\n    $ saferun --x t.py\n",
    ),
}


@pytest.mark.parametrize("before", SHELL)
def test_a_shell_script_has_saferun_where_it_started_torchrun(before):
    done = adopt(before, "run.sh")
    assert done.text == (SHELL[before] or before)
    assert done.remarks == ()
    assert adopt(done.text, "run.sh").text == done.text


@pytest.mark.parametrize("text", LEFT)
def test_what_cannot_be_changed_for_certain_is_left_and_named(text):
    done = adopt(text, "run.sh")
    assert done.text == text
    assert [LEFT[text] in remark for _, remark in done.remarks] == [True]


@pytest.mark.parametrize("name", OTHER)
def test_other_files_are_looked_at_line_by_line(name):
    before, after = OTHER[name]
    assert adopt(before, name).text == after


def test_a_variable_of_a_makefile_that_holds_torchrun_is_named_with_its_line():
    text = "X = 1\nL := torchrun\nall:\n\t$(L) --x t.py\n\ttorchrun --x t.py\n"
    done = adopt(text, "Makefile")
    assert done.text == text.replace("\ttorchrun", "\tsaferun")
    assert [(line, remark[:7]) for line, remark in done.remarks] == [(2, "L holds")]


def test_python_is_not_changed_and_each_start_is_named():
    text = (
        'a = ["torchrun",\n  "--x"]\nb = [sys.executable, "-m", "torch.distributed.run"]\n'
        'c = ["torchrun", "python"]\nd = f"torchrun --x {n}"\n'
    )
    done = adopt(text, "launch.py")
    assert done.text == text
    assert [line for line, _ in done.remarks] == [1, 3, 5]


# --- what runs is the same ---


STUB = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["SEEN"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""
SCRIPT = """\
set -e
A=(--nproc_per_node=2 --master_port "29501")
T="${T:-torchrun}"
"$T" "${A[@]}" t.py --note "a b" '$HOME'
python -m torch.distributed.run --standalone t.py \\
    --lr 1e-3
cmd=(torchrun "${A[@]}")
cmd+=(t.py)
"${cmd[@]}" last
env X="c d" bash -c "torchrun --standalone t.py \\"\\$X\\" $T"
C="torchrun --standalone t.py"; eval "$C 'e f'"
"""


def test_the_adopted_script_gives_saferun_what_torchrun_got(tmp_path):
    def ran(text: str, name: str) -> list[list[str]]:
        folder, seen = tmp_path / name, tmp_path / f"{name}.jsonl"
        folder.mkdir()
        for program in ("torchrun", "python", "saferun"):
            (folder / program).write_text(STUB, encoding="utf-8")
            (folder / program).chmod(0o755)
        environ = {"PATH": f"{folder}:{os.environ['PATH']}", "SEEN": str(seen)}
        subprocess.run(["bash", "-c", text], check=True, env=environ)
        found = [json.loads(line) for line in seen.read_text(encoding="utf-8").splitlines()]
        return [argv[2:] if argv[0] == "-m" else argv for argv in found]

    adopted = adopt(SCRIPT, "run.sh").text
    assert not re.search("torchrun|torch.distributed", adopted)
    before, after = ran(SCRIPT, "before"), ran(adopted, "after")
    assert len(before) == 5
    assert [[w.replace("torchrun", "saferun") for w in argv] for argv in before] == after


@pytest.mark.slow
@pytest.mark.parametrize("quoted", [False, True], ids=["bare", "within-bash"])
def test_the_script_of_torch_distributed_launch_gets_the_same_arguments(tmp_path, quoted):
    (tmp_path / "t.py").write_text(
        "import os, sys\nos.write(1, f'{os.environ[\"LOCAL_RANK\"]} {sys.argv[1:]}\\n'.encode())\n",
        encoding="utf-8",
    )
    line = "python -m torch.distributed.launch --standalone --nproc_per_node=2 t.py -- a"
    text = f'bash -c "{line}"' if quoted else line
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **{"SAFERUN_PROFILE": "cpu", "SAFERUN_RUN_DIR": str(tmp_path / "runs")},
    }

    def ran(script: str) -> list[str]:
        argv = ["bash", "-c", script]
        done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return sorted(done.stdout.splitlines())

    adopted = adopt(text, "run.sh").text
    assert "saferun --standalone" in adopted
    assert ran(adopted) == ran(text)


# --- the command ---


def ask(place: Path, *argv: str) -> Ended:
    environ = {"HOME": str(place), "PATH": "/usr/bin:/bin"}
    return call("adopt", *argv, environ=environ, cwd=place)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "run.sh"
    path.write_bytes(b"torchrun t.py \xff\r\n")
    path.chmod(0o750)
    return path


def test_the_difference_is_shown_and_nothing_is_written(tmp_path, script):
    done = ask(tmp_path, "run.sh")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n-torchrun t.py" in done.stdout
    assert "\n+saferun t.py" in done.stdout
    assert script.read_bytes().startswith(b"torchrun")


def test_w_writes_it_through_a_link_and_keeps_mode_and_bytes(tmp_path, script):
    (tmp_path / "link.sh").symlink_to("run.sh")
    assert ask(tmp_path, "-w", "link.sh").returncode == 0
    assert (tmp_path / "link.sh").is_symlink()
    assert script.read_bytes() == b"saferun t.py \xff\r\n"
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.sh", "run.sh"]
    again = ask(tmp_path, "-w", "run.sh")
    assert (again.returncode, again.stdout) == (0, "")
    assert "run.sh starts no torchrun: nothing to change" in again.stderr


@pytest.mark.parametrize("name", ["gone.sh", "folder", "binary", "pipe"])
def test_a_file_that_is_no_script_is_named_and_the_others_are_written(tmp_path, script, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\0torchrun t.py")
    os.mkfifo(tmp_path / "pipe")
    done = ask(tmp_path, "-w", name, "run.sh")
    assert done.returncode == 2
    assert f"saferun: {name} cannot be changed: " in done.stderr
    assert script.read_bytes().startswith(b"saferun")
