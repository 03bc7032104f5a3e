"""What a run learned is kept where it can be; where not, that costs one line and not the run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

from saferun.journal import mitigation_history
from saferun.journal.mitigation_history import Key
from saferun.planning import inputs, request
from saferun.supervise.mitigations import RunMitigations

PLAN = SimpleNamespace(settings=SimpleNamespace(mitigate=SimpleNamespace(remember=True)))


def learn(environ: dict[str, str], monkeypatch) -> None:
    gathered = SimpleNamespace(environ=environ, launcher=None, identity=SimpleNamespace(attempt=1))
    mitigations = RunMitigations(gathered, PLAN, "")
    mitigations.add("autotune-off", "segfault")
    monkeypatch.setattr(mitigations, "_key", lambda gathered: Key("train.py", "", "", ""))
    monkeypatch.setattr(mitigations, "_arguments", lambda gathered: ())
    mitigations.learn(None, PLAN)


def test_what_helped_is_in_the_history(tmp_path, monkeypatch, capsys):
    environ = {"HOME": str(tmp_path)}
    learn(environ, monkeypatch)
    (entry,) = mitigation_history.load(environ)
    assert (entry.mitigation, entry.kind) == ("autotune-off", "segfault")
    assert capsys.readouterr().err == ""


def test_a_history_that_cannot_be_written_costs_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    learn({"HOME": str(tmp_path / "file")}, monkeypatch)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("saferun: what helped is not kept for the next run: ")
    assert line.endswith(": its directory cannot be used")


def gathered_for(folder: Path, *words: str) -> inputs.Gathered:
    environ = {"HOME": str(folder), "PATH": os.environ["PATH"]}
    argv = ["--profile=cpu", "--set=launcher=python", *words]
    return inputs.look(request.read(argv, environ), environ, str(folder))


def test_what_one_run_has_learned_the_next_run_of_the_script_begins_with(tmp_path):
    gathered = gathered_for(tmp_path, "/w/train.py", "--lr", "1")
    first = RunMitigations(gathered, gathered.plan(), "")
    assert first.recall(gathered) == ""
    assert first.usable(gathered, "autotune-off", ())
    first.add("autotune-off", "segfault")
    changed = first.plan(gathered)
    assert changed.mitigations == ("autotune-off",)
    assert "compile.autotune=off; cost:" in first.describe(first.in_force)
    first.learn(gathered, changed)
    (entry,) = mitigation_history.load(gathered.environ)
    assert (entry.key.script, entry.key.gpu) == ("/w/train.py", "")
    second = RunMitigations(gathered, gathered.plan(), "")
    day = time.strftime("%Y-%m-%d", time.localtime(entry.at))
    assert second.recall(gathered) == (
        f"from the history: autotune-off (it helped against segfault on {day}); "
        "`saferun runs mitigations clear` forgets it"
    )
    assert second.plan(gathered).mitigations == ("autotune-off",)
    for words in (
        ["/w/other.py"],
        ["-m", "train"],
        ["--set=mitigate.remember=false", "/w/train.py"],
    ):
        other = gathered_for(tmp_path, *words)
        assert RunMitigations(other, other.plan(), "").recall(other) == ""
