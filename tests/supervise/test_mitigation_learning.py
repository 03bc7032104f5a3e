"""What a run learned is kept where it can be; where not, that costs one line and not the run."""

from __future__ import annotations

from types import SimpleNamespace

from saferun.journal import mitigation_history
from saferun.journal.mitigation_history import Key
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
