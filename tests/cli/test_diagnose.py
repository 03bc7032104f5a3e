"""`saferun diagnose`: where a log is read from, and how the diagnosis is shown."""

import io
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from sandbox import captured, write

from saferun.cli import diagnose
from saferun.errors import SaferunError

LOG = (
    "[rank2]: Traceback (most recent call last):\n"
    '[rank2]:   File "train.py", line 3, in <module>\n'
    "[rank2]: FileNotFoundError: [Errno 2] No such file or directory: 'data/träin.bin'\n"
)
KEYS = [
    "schema", "kind", "group", "verdict", "mitigations", "root_line", "root_rank",
    "explanation", "advice", "references", "decided_by", "user_frame", "nearest",
]  # fmt: skip


@pytest.fixture
def log(tmp_path: Path, home: Path) -> str:
    return str(write(tmp_path / "train.log", LOG))


def test_standard_input_is_diagnosed(home, monkeypatch):
    for path in ("-", None):
        stdin = types.SimpleNamespace(buffer=io.BytesIO(LOG.encode()))
        monkeypatch.setattr(sys, "stdin", stdin)
        assert diagnose.run(path, None).kind == "user-missing-file"


def test_a_log_that_a_windows_shell_redirected_is_read(tmp_path, home):
    for encoding in ("utf-16-le", "utf-16-be"):
        path = tmp_path / "out.txt"
        path.write_bytes(("\ufeff" + LOG.replace("\n", "\r\n")).encode(encoding))
        found = diagnose.run(str(path), None)
        assert (found.kind, "träin.bin" in found.root_line) == ("user-missing-file", True)


def test_a_log_that_cannot_be_read_is_an_error_with_a_fix(tmp_path, home):
    for path in (str(tmp_path / "missing"), str(tmp_path)):
        with pytest.raises(SaferunError) as caught:
            diagnose.run(path, None)
        assert (caught.value.where, caught.value.code) == (path, 69)
        assert "standard input" in caught.value.fix


def test_the_json_has_the_keys_that_others_script_against(log):
    shown = json.loads(diagnose.to_json(diagnose.run(log, 1)))
    assert list(shown) == KEYS
    assert (shown["schema"], shown["mitigations"]) == (1, [])
    assert shown["root_line"].startswith("[rank2]: FileNotFoundError")


def test_people_read_what_failed_where_and_what_to_do(log):
    text = diagnose.to_text(diagnose.run(log, 1))
    first, root, *rest = text.splitlines()
    assert first.startswith("user-missing-file (rank 2): do not retry")
    assert "träin.bin" in root
    assert "Check the path" in " ".join(rest)


def test_explain_shows_what_weighed_as_text_and_as_json(log):
    run = [sys.executable, "-m", "saferun", "diagnose", "--explain", log]
    text = captured(*run, check=True).stdout
    assert re.search(r"^ +\d+  user-missing-file  line 3, rank 2: \[rank2\]: File", text, re.M)
    shown = json.loads(subprocess.run([*run, "--json"], capture_output=True, check=True).stdout)
    assert list(shown) == [*KEYS, "explain"]
    assert list(shown["explain"]) == ["lines", "decision", "near"]
    assert shown["explain"]["decision"][-1]["kind"] == shown["kind"] == "user-missing-file"


def test_a_success_was_not_chosen_among_lines(log):
    found, account = diagnose.explained(log, 0)
    assert (found.kind, found.decided_by, account.decision) == (
        "no-failure",
        ("exit status 0",),
        (),
    )
    assert diagnose.to_text(found).startswith("no-failure: nothing failed\n")


def test_people_read_the_mitigations_and_half_an_answer(tmp_path, home):
    path = tmp_path / "a.log"
    path.write_text("RuntimeError: Address already in use\n", encoding="utf-8")
    assert "mitigations, in this order: free-port" in diagnose.to_text(diagnose.run(str(path), 1))
    path.write_text("INFO Failed to open libibverbs.so\n", encoding="utf-8")
    found = diagnose.run(str(path), None)
    shown = json.loads(diagnose.to_json(found))
    assert [near["kind"] for near in shown["nearest"]] == ["nccl-ib-error"]
    assert "nearest is nccl-ib-error; against it: " in diagnose.to_text(found)


def test_an_unusable_home_changes_nothing(log, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert diagnose.run(log, 1).kind == "user-missing-file"


def test_a_long_log_is_read_in_bounded_memory(tmp_path, home):
    path = tmp_path / "long.log"
    row = b"[rank%d]: step %d val_error 2.3 RuntimeError failed signal 3 \r"
    block = b"".join(row % (n % 8, n) + b"\n" * (n % 3 == 0) for n in range(20_000))
    with open(path, "wb") as file:
        for _ in range(50):
            file.write(block)
        file.write(b"KeyError: 'x'\n")
    code = (  # not ru_maxrss: that of the process which started us would count
        "import re, sys; from saferun.cli import diagnose; "
        "line = diagnose.run(sys.argv[1], None).root_line; "
        "print(line, re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    done = captured(sys.executable, "-c", code, str(path), env=os.environ)
    line, kib = done.stdout.rsplit(maxsplit=1)
    assert line == "KeyError: 'x'"
    assert path.stat().st_size > 50 * 2**20
    assert int(kib) < 96 * 1024
