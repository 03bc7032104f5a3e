"""Which variables a job's own code names: its script, and the modules beside it."""

import os
import pathlib

from cases import check_cases
from requested import requested

from saferun.audit import source_scan
from saferun.model import Request

NAME = "TORCHINDUCTOR_OUR_SWITCH"
READS = f"import os\nos.environ.get({NAME!r})\n"


def line(script: str | None, module: bool = False) -> Request:
    return requested(script, **({"module": "x"} if module else {}))


def write(root: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


FOUND = {
    "script": ({"t.py": READS}, line("t.py")),
    "beside it": ({"t.py": "", "model.py": READS}, line("t.py")),
    "in the project": ({"scripts/t.py": "", "src/ours/a/b.py": READS}, line("scripts/t.py")),
    "package": ({"ours/train.py": "", "ours/model.py": READS}, line("ours.train", module=True)),
    "module": ({"train.py": READS}, line("train", module=True)),
    "no .py": ({"train": READS}, line("train")),
    "env of RL": ({"t.py": "", "env/atari.py": READS}, line("t.py")),
}


def test_a_name_is_found_in_the_jobs_code(tmp_path):
    def check(files, given):
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        write(place, files)
        assert source_scan.search([NAME, "NCCL_OTHER"], given, str(place)) == ({NAME}, True)

    check_cases(FOUND, check)


def test_modules_beside_the_script_are_searched_wherever_the_job_starts(tmp_path):
    write(tmp_path, {"project/t.py": "", "project/model.py": READS, "elsewhere/x.py": ""})
    given = line(str(tmp_path / "project" / "t.py"))
    assert source_scan.search([NAME], given, str(tmp_path / "elsewhere")) == ({NAME}, True)


def test_what_is_not_code_of_the_job_is_not_searched(tmp_path):
    others = ("env/lib/m.py", "lib/site-packages/torch/m.py", ".git/m.py", "a/m.py")
    write(tmp_path, {"t.py": "", "run.sh": f"export {NAME}=1\n", "env/pyvenv.cfg": ""})
    write(tmp_path, {**dict.fromkeys(others, READS), "a/m.py": "\0\xff"})
    (tmp_path / "a" / "back").symlink_to(tmp_path)
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.py")
    assert source_scan.search([NAME], line("t.py"), str(tmp_path)) == (frozenset(), True)


def test_code_that_is_not_here_makes_the_search_incomplete(tmp_path):
    for given in (line(None), line("nowhere.py"), line("torchtitan.train", module=True)):
        assert source_scan.search([NAME], given, str(tmp_path)) == (frozenset(), False)


def test_a_search_that_is_cut_off_is_incomplete(tmp_path, monkeypatch):
    write(tmp_path, {"t.py": "", "m.py": READS})
    monkeypatch.setattr(source_scan, "SECONDS", -1)
    assert source_scan.search([NAME], line("t.py"), str(tmp_path)) == (frozenset(), False)
    (tmp_path / "t.py").write_text(READS, encoding="utf-8")
    assert source_scan.search([NAME], line("t.py"), str(tmp_path)) == ({NAME}, True)
