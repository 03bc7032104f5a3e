"""What ranks wrote holds no secrets after an attempt, and nothing is concluded before."""

import json
import os
from pathlib import Path

import pytest
from runs import ran, small_torchrun
from sandbox import text_of, write

from saferun.journal import rank_files
from saferun.system.redact import Masker

TOKEN = "q7Zk29-vbX-Lw83mTr5"
NAME = "a1-r0-rank0-pid10.error.json"
MASKER = Masker({"HF_TOKEN": TOKEN}, ())


def masked(folder: Path, content: bytes, attempt: int = 1) -> bytes:
    (folder / NAME).write_bytes(content)
    rank_files.mask(str(folder), attempt, MASKER.text)
    return (folder / NAME).read_bytes()


def error(text: str) -> bytes:
    return json.dumps({"message": {"message": text, "extraInfo": {"py_callstack": text}}}).encode()


def test_every_text_of_an_error_file_is_masked(tmp_path):
    after = masked(tmp_path, error(f'login "{TOKEN}"\nfailed'))
    assert TOKEN.encode() not in after
    assert json.loads(after)["message"]["message"] == 'login "***"\nfailed'
    for plain in (error("ValueError: x \u00e9"), b'{"torn', b""):
        assert masked(tmp_path, plain) == plain
    assert masked(tmp_path, error(TOKEN), attempt=2) == error(TOKEN)  # another attempt's
    after = masked(tmp_path, error("x" * rank_files.MAX_BYTES + TOKEN))
    assert (TOKEN.encode() in after, len(after) <= rank_files.MAX_BYTES) == (False, True)
    for content in (b'{"message": "', b"[" * 100_000, b"\xff"):  # masked as text, or removed
        (tmp_path / NAME).write_bytes(content + TOKEN.encode())
        rank_files.mask(str(tmp_path), 1, MASKER.text)
        left = (tmp_path / NAME).read_bytes() if (tmp_path / NAME).exists() else b""
        assert TOKEN.encode() not in left


def test_a_planted_link_is_neither_read_nor_followed_but_removed(tmp_path):
    (tmp_path / "mine").write_bytes(error(TOKEN))
    os.symlink(tmp_path / "mine", tmp_path / NAME)
    assert [found.message for found in rank_files.failures(str(tmp_path), 1)] == [""]
    rank_files.mask(str(tmp_path), 1, MASKER.text)
    assert not (tmp_path / NAME).is_symlink()
    assert (tmp_path / "mine").read_bytes() == error(TOKEN)


# receipts, requests, trials

LINE = '{"v":1,"pid":7,"hook":"bootstrap"}'  # without blanks, as a rank writes its first


@pytest.mark.parametrize("name", ["a1-r0-rank0-pid7.jsonl", "a1-r0-ranknone-pid7.recycle.json"])
def test_what_a_rank_wrote_is_masked_line_by_line(tmp_path, name):
    lines = [LINE, json.dumps({"error": f'E: "{TOKEN}"\n'}), LINE, f'{{"cut": "{TOKEN}']
    write(tmp_path / name, "\n".join(lines))
    rank_files.mask(str(tmp_path), 1, MASKER.text)
    assert text_of(tmp_path / name).split("\n") == [
        LINE,
        '{"error": "E: \\"***\\"\\n"}',
        LINE,
        '{"cut": "***',
    ]


def test_each_attempts_trials_are_masked_once(tmp_path):
    asked = []

    def masked(text: str) -> str:
        asked.append(text)
        return MASKER.text(text)

    trials, end = tmp_path / "trials.jsonl", 0
    for attempt in (1, 2):
        with trials.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"attempt": attempt, "cause": f"key {TOKEN}"}) + "\n")
        end = rank_files.mask_trials(str(tmp_path), masked, end)
        assert end == trials.stat().st_size
    expected = [{"attempt": attempt, "cause": "key ***"} for attempt in (1, 2)]
    assert [json.loads(line) for line in text_of(trials).splitlines()] == expected
    assert sum(text == f"key {TOKEN}" for text in asked) == 2
    assert rank_files.mask_trials(str(tmp_path), masked, end) == end


JOB = """
import os, threading
one, two = os.environ["HF_TOKEN"], os.environ["MY_SECRET"]
def say(): raise OSError("no login with " + one + " and " + two)
import torch
import torch.distributed.distributed_c10d
thread = threading.Thread(target=say)
thread.start()
thread.join()
raise RuntimeError("login failed with " + one + " and " + two)
"""


def test_no_file_of_a_run_holds_a_secret_of_its_ranks(tmp_path):
    """The one is exported, the other is in a profile, which saferun alone has read."""
    write(tmp_path / "job.py", JOB)
    profile = f"schema: 1\nextends: [cpu]\nenv: {{MY_SECRET: {TOKEN[::-1]}}}\n"
    write(tmp_path / "p.yaml", profile)
    group = tmp_path / "torch" / "distributed" / "distributed_c10d.py"  # of a rank that joined one
    group.parent.mkdir(parents=True)
    for package in group.parents[:2]:
        (package / "__init__.py").touch()
    write(group, "is_initialized = lambda: True\nget_rank = lambda: 0\n")
    errors = str(tmp_path / "error.json")  # as the real torchrun sets it
    environ = {**small_torchrun(tmp_path), "HF_TOKEN": TOKEN, "TORCHELASTIC_ERROR_FILE": errors}
    one = ran(tmp_path, "--profile=./p.yaml", "job.py", env=environ, status=1)
    assert TOKEN in one.err  # the job's own bytes pass
    written = {p: p.read_bytes() for p in one.journal.rglob("*") if p.is_file()}
    assert any(path.name.endswith(".error.json") for path in written)
    (ended,) = one.events("ended")
    lines = [text for path, text in written.items() if path.suffix == ".jsonl"]
    assert b"OSError: no login with ***" in b"".join(lines)
    assert "RuntimeError: login failed with ***" in ended["root_line"]
    for path, content in written.items():
        for secret in (TOKEN, TOKEN[::-1]):
            assert secret.encode() not in content, path


REPORT = {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "T", "time_s": 5}}}


def write_error_file(folder: Path, name: str, content: str | None = None) -> None:
    path = folder / name
    write(path, json.dumps(REPORT) if content is None else content)


def test_error_files_are_read_those_of_the_last_restart_only(tmp_path):
    write_error_file(tmp_path, "a1-r0-rank0-pid10.error.json")
    write_error_file(tmp_path, "a2-r0-rank0-pid20.error.json")
    write_error_file(tmp_path, "a2-r1-rank1-pid21.error.json")
    found = rank_files.failures(str(tmp_path), 2)
    assert [(f.rank, f.time_s, f.message) for f in found] == [(1, 5.0, "ValueError: x")]
    for content in ("", "{", "[]", '{"message": 3}'):
        write_error_file(tmp_path, "a3-r0-rank4-pid1.error.json", content)
        (found,) = rank_files.failures(str(tmp_path), 3)
        assert (found.rank, found.traceback) == (4, "")
    for directory in (None, "/nowhere"):
        assert rank_files.failures(directory, 1) == ()
        assert rank_files.mask_trials(directory, pytest.fail, 0) == 0
