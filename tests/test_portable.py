"""Tests pass on a machine that is not ours: the next one of a kind that once did not is found here.

Paths may hold blanks, letters that are not ASCII and any word; who runs the tests may be anybody.
"""

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from repo import ROOT
from sandbox import OWN_GPUS, output, text_of

TESTS = ROOT / "tests"
HERE = Path(__file__).name
GIVES_AWAY = {"chown", "lchown", "mknod", "setuid", "seteuid", "setresuid"}
STREAMS = {"err", "out", "stderr", "stdout"}
PROCESSES = re.compile(r"(?:^|[\s;|&(])(?:pkill|killall|pgrep)\s+-")


def wrong(path: str, source: str) -> Iterator[str]:
    """Yield what in a file of tests holds on some machines only."""
    asks = "rights" in source or path.split("/")[1] in ("programs", "support", "lab")
    for node in ast.walk(ast.parse(source)):
        for why in _wrong(node, asks):
            yield f"{path}:{node.lineno}: {why}"  # type: ignore[attr-defined]  # all have a line


def _wrong(node: ast.AST, asks: bool) -> Iterator[str]:
    match node:
        case (
            ast.Call(func=ast.Attribute(attr="read_text" | "write_text"))
            | ast.Call(func=ast.Name(id="open"))
        ):
            if _is_text_in_the_locales_encoding(node):
                yield 'a file without encoding="utf-8"'
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]) if text.endswith("#!"):
            yield "a path after #!, where blanks and 127 letters end it: sandbox.python_program"
        case ast.Compare(left=ast.Call(func=ast.Attribute(attr="geteuid" | "getuid"))):
            yield "uid 0 is no right: rights.needs"
        case ast.Attribute(value=ast.Name(id="os"), attr=attr) if attr in GIVES_AWAY and not asks:
            yield f"os.{attr} without rights.needs"
        case ast.Compare(
            left=ast.Constant(value="saferun" | "torchrun" | b"saferun" | b"torchrun"),
            ops=[ast.In() | ast.NotIn()],
            comparators=[ast.Attribute(attr=attr)],
        ) if attr in STREAMS:
            yield "a word that is in paths, too: sandbox.own_lines"
        case ast.Constant(value=999999):
            yield "a pid that may live: helpers.NO_PID"
        case ast.Constant(value=str(text)) if PROCESSES.search(text) and "\n" in text:
            yield "procps, which small systems lack"


def _is_text_in_the_locales_encoding(call: ast.Call) -> bool:
    if any(keyword.arg in ("encoding", None) for keyword in call.keywords):
        return False
    if isinstance(call.func, ast.Attribute):
        return len(call.args) <= (call.func.attr == "write_text")
    mode = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "mode")]
    return not mode or (isinstance(mode[0], ast.Constant) and "b" not in str(mode[0].value))


def test_no_test_relies_on_our_machine():
    files = [path for path in sorted(TESTS.rglob("*.py")) if path.name != HERE]
    found = [line for path in files for line in wrong(str(path.relative_to(ROOT)), text_of(path))]
    assert "\n".join(found) == ""


# A shell with conda, in a job of Slurm on a node with GPUs, within a rank of saferun's.
SHELLS = """
    CONDA_PREFIX=/c VIRTUAL_ENV=/v PYTHONPATH=/p PYTHONHASHSEED=1 PYTHONSTARTUP=/s LD_PRELOAD=/no.so
    XDG_STATE_HOME=/x SLURM_JOB_ID=7 SLURM_NTASKS=4 KUBERNETES_SERVICE_HOST=k CI=true COLUMNS=20
    RANK=3 LOCAL_RANK=3 WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=1 PET_NNODES=2 TORCHELASTIC_RUN_ID=r
    NCCL_DEBUG=INFO TORCH_LOGS=+all OMP_NUM_THREADS=99 MKL_NUM_THREADS=9 CUDA_VISIBLE_DEVICES=3
    SAFERUN_PROFILE=h100 SAFERUN_INJECT={} SAFERUN_RETRIES=0 TRITON_CACHE_DIR=/t FORCE_COLOR=1
"""


def test_what_a_shell_has_set_reaches_no_test(tmp_path):
    given = dict(pair.split("=", 1) for pair in SHELLS.split())
    kept = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "https_proxy": "p"}
    code = f"import sys; sys.path[:] = {[str(TESTS), *sys.path]}; import conftest, json, os"
    code += "; print(json.dumps(dict(os.environ)))"
    found = json.loads(output(sys.executable, "-SIc", code, env={**given, **kept}))
    assert {name: found.get(name) for name in kept} == kept
    assert {name: found[name] for name in given if found.get(name)} == {"OMP_NUM_THREADS": "1"}
    assert found[OWN_GPUS] == "3"  # tests of real GPUs choose none that others use
    assert found["TORCHINDUCTOR_CACHE_DIR"].startswith("/tmp/saferun-")  # of this very process


@pytest.mark.parametrize(
    "source",
    [
        "path.write_text(text)",
        "open(path, 'w')",
        'f"#!{sys.executable}"',
        "os.geteuid() != 0",
        "os.chown(path, 0, 0)",
        "'saferun' not in ran.err",
        "holders = [999999]",
        '"#!/bin/sh\\npkill -P 1"',
    ],
)
def test_what_relies_on_our_machine_is_found(source):
    assert len(list(wrong("tests/test_x.py", source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "path.write_text(text, encoding='utf-8')",
        "path.read_text('latin-1')",
        "open(path, 'rb')",
        '"#!/bin/sh"',
        "'saferun: ' in ran.err",
    ],
)
def test_what_holds_everywhere_is_left(source):
    assert list(wrong("tests/test_x.py", source)) == []
