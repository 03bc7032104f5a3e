"""A script whose processes are started warm or not, and what is installed for it."""

import json
import os
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

from helpers import PROGRAMS, SOURCES, until
from sandbox import SAFERUN, Sandbox, python_program, text_of
from supervised import Supervised, supervised
from terminals import read_all, start

FACTS = (PROGRAMS / "rank_facts.py").read_text(encoding="utf-8")
FAKE_RUN = (PROGRAMS / "fake_torch_run.py").read_text(encoding="utf-8")
WAYS = ("spawn", "warm")
ONCE = ("--set=retry.attempts=1", "--set=watch.silence_s=900")  # saferun is beside it in both ways
# The hooks wait for this module, and it may be any: a process that has it lists its imports.
WATCHED = "torchdata.stateful_dataloader.stateful_dataloader"
HEAD = "import os, signal, sys, successor, threading\n"
DIES = "if 'LEARN' not in os.environ: successor.die()\n"


def says(value: str) -> str:
    """Return a line of a script that prints a value, in one piece: torchrun gives its ranks -u."""
    return f"os.write(1, f'{{{value}}}\\n'.encode())\n"


class WarmJob(Sandbox):
    """A script, run in its folder.

    Args:
        folder: of the script.
        options: saferun's.
        script: its name.

    Attributes:
        ranks: the digits of its ranks.
        warm: what a receipt of a warm start begins with.
        head: what its script imports before all else.
        dies: the script's lines up to which only a process that replaces another one is warm.
        said: the line of a start that is not warm, up to its reason.
    """

    ranks: str
    warm: str
    head: str
    dies = ""
    said: str

    def __init__(self, folder: Path, *options: str, script: str) -> None:
        self._options, self._name = options, script
        self.script = folder / script
        self.installed = folder / "lib" / "site-packages"
        self.installed.mkdir(parents=True)
        super().__init__(folder, PYTHONPATH=f"{self.installed}{os.pathsep}{PROGRAMS}")
        self.cache = self.home / ".cache" / "saferun"

    def package(self, name: str, text: str) -> Path:
        path = self.installed.joinpath(*name.split("."), "__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def command(self, way: str, *words: str) -> list[str]:
        settings = [f"--set=start.ranks={way}", "--set=retry.backoff_s=[0, 0]"]
        return [*SAFERUN, *settings, *self._options, *(words or (self._name,))]

    def run(self, way: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.ran(*self.command(way, *words), env={"WAY": way, **env})

    def _endings(self, *options: str) -> list[tuple[object, ...]]:
        ended = [self.run(way, *options, self._name) for way in WAYS]
        return [(done.returncode, done.stdout, plain(done.stderr)) for done in ended]

    def facts(self, at: str, *words: str) -> list[list[dict[str, Any]]]:
        """Return what each rank sees of its start, of those started and of those warm.

        Args:
            at: what its streams are: "pipes" or "a terminal".
            words: the script's, and its arguments.
        """
        self.script.write_text(FACTS, encoding="utf-8")
        self.learn(*words, FACTS=str(self.folder / "learn"))
        found = []
        for way in WAYS:
            self.environ["FACTS"] = str(self.folder / way)
            if at == "pipes":
                done = self.run(way, *words)
                exits = {f"at exit {rank}" for rank in self.ranks}
                assert (done.returncode, set(done.stdout.splitlines())) == (0, exits), done.stderr
            else:
                assert at_terminal(self, way, "", *words)[0] == 0
            files = [self.folder / f"{way}-{rank}" for rank in self.ranks]
            found.append([_comparable(json.loads(f.read_text(encoding="utf-8"))) for f in files])
        return found

    def write(self, text: str) -> None:
        self.script.write_text(self.head + HEAD + text, encoding="utf-8")

    def learn(self, *words: str, **env: str) -> None:
        """Run it until its end, undisturbed, so that its imports are known."""
        done = self.run("warm", *words, **env, LEARN="1")
        assert done.returncode == 0, done.stderr

    def left(self) -> str:
        """Return the first module that is left to the script's own import; "" for none."""
        return "".join(text_of(note).split("\n")[0] for note in self.cache.glob("imports/*.left"))

    def last(self) -> Path:
        """Return the directory of the last run."""
        return max(self.runs.glob("*/plan.json"), key=os.path.getmtime).parent

    def starts(self) -> list[str]:
        """Return how each process of the last run was started, in the order of attempts."""
        files = sorted((self.last() / "receipts").glob("a*.jsonl"))
        return [
            json.loads(file.read_text(encoding="utf-8").splitlines()[0]).get("start", "")
            for file in files
        ]


class Ranks(WarmJob):
    """A script of two ranks under torchrun."""

    ranks, warm, head = "01", "warm ", "import torch\n"
    said = "saferun: start.ranks is warm, but ranks are started as usual: "

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "--nproc-per-node=2", script="train.py")

    def endings(self, body: str, fails: bool = True) -> list[tuple[object, ...]]:
        """Return how it ends, started and warm, where rank 0 does this and the other one waits."""
        # torchrun ends the other rank where one fails.
        other = "signal.pause()" if fails else "pass"
        indented = textwrap.indent(body, "    ")
        self.write(f"if os.environ['RANK'] == '0':\n{indented}\nelse:\n    {other}\n")
        return self._endings(*ONCE)


class Python(WarmJob):
    """A job of plain python, which dies in its first attempt."""

    ranks, warm, head, dies = "0", "ahead ", f"import {WATCHED}\n", DIES
    said = "saferun: start.ranks is warm, but a process is started as usual: "

    def __init__(self, folder: Path) -> None:
        options = ("--profile=cpu", "--set=launcher=python", "--set=hooks.shards=off")
        super().__init__(folder, *options, script="job.py")
        for name in ("torchdata", "torchdata.stateful_dataloader", WATCHED):
            self.package(name, "")

    def endings(self, body: str, fails: bool = True) -> list[tuple[object, ...]]:
        """Return how it ends, started and warm, where its second process does this."""
        self.write(f"if 'LEARN' in os.environ: sys.exit()\n{DIES}{body}\n")
        self.learn()
        return self._endings("--retries=1")


PROGRAM = """\
import sys
from torch.distributed.run import main
if __name__ == "__main__":
    sys.exit(main())
"""
NOTE = """
import os
with open(os.environ["ROSTER"], "a") as file: file.write(f"job {os.getpid()}\\n")
"""


class QuickLauncher(Sandbox):
    """A fast launcher, under supervision with a warm agent and without."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.torch = folder / "lib" / "torch" / "distributed"
        self.torch.mkdir(parents=True)
        (self.torch / "run.py").write_text(FAKE_RUN, encoding="utf-8")
        for package in (self.torch, self.torch.parent):
            (package / "__init__.py").touch()
        self.body = folder / "body.py"
        self.torchrun = self.program("torchrun", python_program(PROGRAM))

    def run(self, body: str = "", *arguments: str, env: dict[str, str] | None = None, **options):
        self.body.write_text(NOTE + body, encoding="utf-8")
        path = f"{SOURCES}{os.pathsep}{self.torch.parent.parent}"
        popen = options.pop("popen", {})
        popen["env"] = {"PYTHONPATH": path, "BODY": str(self.body), **(env or {})}
        command = options.pop("command", [str(self.torchrun), *arguments])
        return supervised(self.folder, command, popen=popen, **options)

    def both(self, body: str, *arguments: str, **options) -> list:
        """Run it afresh and with a warm agent that waits; return both when they have ended."""
        runs = []
        wanted = {"imports": 1, **options.pop("warm_agent", {})}
        for ahead in ({}, {"warm_agent": wanted}):
            with self.run(body, *arguments, **options, **ahead) as run:
                run.how = run.ended()
                runs.append(run)
        assert used(runs[1])
        return runs

    def endings(self, body: str, fails: bool = True) -> list[tuple[object, ...]]:
        """Return how it ends, afresh and warm, where its body does this."""
        runs = self.both(f"import os, signal, sys, threading\n{body}")
        return [(run.how["wait_status"], run.out, run.err) for run in runs]


def used(run: Supervised) -> bool:
    """Whether the process that imported torch, once and ahead, became the job."""
    return len(run.members("imported")) == 1 and run.members("imported") == run.members("job")


def at_terminal(job: WarmJob, way: str, keys: str, *words: str) -> tuple[int, str]:
    """Run it in a terminal, and press keys once there is a file `press`.

    Returns:
        Its status and what the terminal shows.
    """
    pid, fd = start(job.command(way, *words), job.folder, {**job.environ, "WAY": way})
    press = job.folder / "press"
    if keys:
        until(press.exists)
        press.unlink()
        os.write(fd, keys.encode())
    shown = read_all(fd)
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown


def _comparable(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what a rank sees without what differs between any two."""
    alike = facts["alike"]
    for name in ("FACTS", "WAY"):
        del alike["environ"][name]
    del alike["main"]["__spec__"]  # its repr has an address
    files = alike["descriptors"].items()  # .stacks is opened when torch is imported
    alike["descriptors"] = {
        number: file.rstrip("0123456789") for number, file in files if ".stacks" not in file
    }
    return facts


def plain(text: str) -> str:
    """Return stderr without what differs between two runs of the same job."""
    text = re.sub(r"\(pid:? \d+\)|PID \d+|pid=\d+|pid \d+|process \d+", "PID", text)
    text = re.sub(r"[WE]\d{4} [\d:.]+ \d+", "TIME", text)
    text = re.sub(r"\d{4}-\d\d-\d\d_[\d:]+|\d{8}-\d{6}-\d+|0x[0-9a-f]+|[\d.]+ m?s\b", "TIME", text)
    text = re.sub(r"/.+/(error\.json|site-packages)", r"\1", text)
    text = text.replace("; warm ranks", "").replace("; warm replacements", "")
    # From Python 3.14 on faulthandler shows functions of C, which differ.
    text = re.sub(r"\nCurrent thread's C stack trace.*:\n(?:  .*\n?)*", "\n", text)
    # The frame that faulthandler finds below the script's: docs/warm.md.
    return "\n".join(line for line in text.splitlines() if 'File "<string>"' not in line)
