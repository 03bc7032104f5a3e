"""Completion of command lines: in real shells, and what the candidates are."""

import os
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator

import pytest
from sandbox import captured, executable, shell
from terminals import Terminal
from user_machine import NOW, UserMachine, finished

from saferun.cli.completion import candidates
from saferun.planning.torchrun.torchrun_args import COMMANDS, OWN

BIN = pathlib.Path(sys.executable).parent
INTERACTIVE = {"bash": ("bash", "--norc", "--noprofile", "-i"), "zsh": ("zsh", "-f", "-i")}
SOURCE = {
    "bash": 'eval "$(_SAFERUN_COMPLETE=bash_source saferun)"',
    "zsh": "zle_highlight=(none); autoload -U compinit; compinit -u -D; "
    'eval "$(_SAFERUN_COMPLETE=zsh_source saferun)"',
}
LINES = [
    ("runs sh", "runs show "),
    ("runs show 2026", "runs show 20260101-101010-7 "),
    ("--profile h100-n", "--profile h100-nanochat "),
    ("--profile=h100-n", "--profile=h100-nanochat "),
    ("--set hooks.shards=e", "--set hooks.shards=error "),
    ("--rdzv_ba", "--rdzv_backend "),
    ("--standalone parts/t", "--standalone parts/tune.py "),
    ("diagnose r", "diagnose runs.log "),
    ("train.py --data some", "train.py --data some.bin "),
    ("help cuda-oom-f", "help cuda-oom-fragmentation "),
]
SCRIPTS = [  # our own code for bash has only what can be a script
    ("--nproc-per-node 2 tr", "--nproc-per-node 2 train.py "),
    ("--standalone pa", "--standalone parts/"),
]


@pytest.fixture
def machine(home: pathlib.Path, tmp_path: pathlib.Path) -> UserMachine:
    made = UserMachine(home, tmp_path)
    (made.cwd / "parts").mkdir()
    # Where the script stands only the first two are candidates.
    for name in ("parts/tune.py", "train.py", "train.log", "parts.txt", "runs.log", "some.bin"):
        (made.cwd / name).touch()
    finished(made.runs, "20260101-101010-7", NOW)
    trap = made.folder / "bin" / "nvidia-smi"
    executable(trap, f"#!/bin/sh\n{shell('touch', made.folder / 'asked')}\n")
    made.environ["PATH"] = f"{BIN}:{made.folder}/bin:/usr/bin:/bin"
    return made


def typed(machine: UserMachine, kind: str, lines: list[tuple[str, str]]) -> Iterator[str]:
    """Type each line and TAB; yield the line as the shell has completed it."""
    terminal = Terminal({**machine.environ, "TERM": "xterm", "COLUMNS": "200"}, INTERACTIVE[kind])
    try:
        terminal.type(
            f"{shell('cd', machine.cwd)}\n{SOURCE[kind]}\necho LOA''DED\n", rb"LOADED", rb"READY\$ "
        )
        for line, whole in lines:
            terminal.type(f"saferun {line}\t")
            shown = terminal.expect(re.escape(f"saferun {whole}".encode())).group()
            terminal.type("\x15")  # Ctrl-U: an empty line
            yield shown.decode()
    finally:
        terminal.end()


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_person_completes_a_line_with_tab(machine, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    lines = LINES + (SCRIPTS if shell == "bash" else [])
    assert list(typed(machine, shell, lines)) == [f"saferun {whole}" for _, whole in lines]
    assert not (machine.folder / "asked").exists()


def test_fish_completes_a_line(machine):
    if shutil.which("fish") is None:
        pytest.skip("no fish on this machine")
    asked = [f"complete -C 'saferun {line}'" for line, _ in LINES]
    code = "\n".join(["_SAFERUN_COMPLETE=fish_source saferun | source", *asked])
    done = machine.ran("fish", "--no-config", "-c", code)
    found = [line.partition("\t")[0] for line in done.stdout.splitlines()]
    assert found == [whole.split()[-1] for _, whole in LINES], done.stderr


# --- the candidates ------------------------------------------------------------------------------


CANDIDATES = {
    "r": ["<script>", "run", "runs"],
    "--standalone t": ["<script>"],
    "--no-python t": ["<file>"],
    "-m t": ["<file>"],
    "--nnod": ["--nnodes"],
    "--run-dir ": ["<dir>"],
    "--max-restarts ": [],
    "--nproc-per-node g": ["gpu"],
    "--nproc_per_node = c": ["cpu"],
    "--set watch.mode = ": ["end", "off", "warn"],
    "--set = watch.mode = w": ["warn"],
    "plan --j": ["--json"],
    "--j": [],
    "gen-shell --sl": ["--slurm"],
    "run plan --pro": ["<file>"],
    "-m train --pro": ["<file>"],
    "profiles sh": ["show"],
    "runs list --j": ["--json"],
    "profiles check x": ["<file>"],
}


def values(machine: UserMachine, *words: str) -> list[str]:
    """The candidates for the last word; <file> stands for the shell's files."""
    environ = {**machine.environ, "COMP_SCRIPTS": "1"}
    found = candidates(words[:-1], words[-1], environ=environ)
    return [item.value if item.type == "plain" else f"<{item.type}>" for item in found]


def test_the_candidates_are_those_of_the_word_in_its_place(machine):
    wrong = {line: values(machine, *line.split(" ")) for line in CANDIDATES}
    assert {line: sorted(found) for line, found in wrong.items()} == CANDIDATES
    assert values(machine, "r") == ["run", "runs", "<script>"]  # commands first
    assert candidates((), "r", environ=machine.environ)[-1].type == "file"  # for click's own code
    assert set(COMMANDS) < set(values(machine, ""))
    assert set(OWN) < set(values(machine, "--"))


def test_what_others_have_named_reaches_no_shell(machine):
    for name in ("$(touch x)", "a b", "a\nplain,b", "\x1b[2J"):
        finished(machine.runs, name, NOW)
    os.environ.update(HOME=machine.environ["HOME"])
    assert values(machine, "runs", "show", "") == ["last", "20260101-101010-7"]


def test_an_unknown_shell_is_refused_and_words_beside_the_variable_count(machine):
    environ = {**machine.environ, "_SAFERUN_COMPLETE": "csh_source"}
    done = captured("saferun", env=environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert "bash_source, zsh_source or fish_source" in done.stderr
    done = captured("saferun", "--version", env=environ)
    assert done.stdout.startswith("saferun ")


def test_completing_loads_no_torch(machine):
    code = "import sys; from saferun.__main__ import main; main([]); print('torch' in sys.modules)"
    asked = {
        "_SAFERUN_COMPLETE": "bash_complete",
        "COMP_WORDS": "saferun --profile ",
        "COMP_CWORD": "2",
    }
    environ = {**machine.environ, **asked}
    done = captured(sys.executable, "-c", code, env=environ, check=True)
    assert "plain,h100\n" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"
