"""The exceptions of ranks hold no secrets after an attempt, and nothing is concluded before."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from runs import run, small_torchrun

from saferun.journal import error_files
from saferun.system.redact import Masker

TOKEN = "q7Zk29-vbX-Lw83mTr5"
NAME = "a1-r0-rank0-pid10.error.json"


def masked(folder: Path, content: bytes, attempt: int = 1) -> bytes:
    (folder / NAME).write_bytes(content)
    error_files.mask(str(folder), attempt, Masker({"HF_TOKEN": TOKEN}, ()).text)
    return (folder / NAME).read_bytes()


def error(text: str) -> bytes:
    return json.dumps({"message": {"message": text, "extraInfo": {"py_callstack": text}}}).encode()


def test_every_text_of_an_error_file_is_masked(tmp_path):
    after = masked(tmp_path, error(f'login "{TOKEN}"\nfailed'))
    assert TOKEN.encode() not in after
    assert json.loads(after)["message"]["message"] == 'login "***"\nfailed'


def test_a_file_without_secrets_is_left_as_it_is(tmp_path):
    before = error("ValueError: x \u00e9")
    assert masked(tmp_path, before) == before


@pytest.mark.parametrize("content", [b'{"message": "', b"[" * 100_000, b"\xff"], ids=range(3))
def test_what_is_no_json_is_masked_as_text_or_removed(tmp_path, content):
    (tmp_path / NAME).write_bytes(content + TOKEN.encode())
    error_files.mask(str(tmp_path), 1, Masker({"HF_TOKEN": TOKEN}, ()).text)
    left = (tmp_path / NAME).read_bytes() if (tmp_path / NAME).exists() else b""
    assert TOKEN.encode() not in left


def test_a_file_beyond_the_bound_is_cut(tmp_path):
    after = masked(tmp_path, error("x" * error_files.MAX_BYTES + TOKEN))
    assert TOKEN.encode() not in after
    assert len(after) <= error_files.MAX_BYTES


def test_another_attempts_files_are_left_alone(tmp_path):
    before = error(TOKEN)
    assert masked(tmp_path, before, attempt=2) == before


def test_a_planted_link_is_removed_and_not_followed(tmp_path):
    (tmp_path / "mine").write_bytes(error(TOKEN))
    os.symlink(tmp_path / "mine", tmp_path / NAME)
    error_files.mask(str(tmp_path), 1, Masker({"HF_TOKEN": TOKEN}, ()).text)
    assert not (tmp_path / NAME).is_symlink()
    assert (tmp_path / "mine").read_bytes() == error(TOKEN)


JOB = """
import os
one, two = os.environ["HF_TOKEN"], os.environ["MY_SECRET"]
raise RuntimeError("login failed with " + one + " and " + two)
"""


def test_no_file_of_a_run_holds_a_secret_of_its_ranks(tmp_path):
    """The one is exported, the other is in a profile, which saferun alone has read."""
    (tmp_path / "job.py").write_text(JOB)
    profile = f"schema: 1\nextends: [cpu]\nenv: {{MY_SECRET: {TOKEN[::-1]}}}\n"
    (tmp_path / "p.yaml").write_text(profile)
    errors = str(tmp_path / "error.json")  # as the real torchrun sets it
    environ = {**small_torchrun(tmp_path), "HF_TOKEN": TOKEN, "TORCHELASTIC_ERROR_FILE": errors}
    with run(tmp_path, "--profile=./p.yaml", "job.py", env=environ) as one:
        assert one.end() == 1
        assert TOKEN in one.err  # the job's own bytes pass
        written = {p: p.read_bytes() for p in one.journal.rglob("*") if p.is_file()}
        assert any(path.name.endswith(".error.json") for path in written)
        (ended,) = one.events("ended")
    assert "RuntimeError: login failed with ***" in ended["root_line"]
    for path, content in written.items():
        for secret in (TOKEN, TOKEN[::-1]):
            assert secret.encode() not in content, path
