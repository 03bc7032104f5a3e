"""A script whose processes are started warm or not, and what is installed for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

from helpers import PROGRAMS
from sandbox import SAFERUN, Sandbox

WAYS = ("spawn", "warm")


class WarmJob(Sandbox):
    """A script, run in its folder.

    Args:
        folder: of the script.
        options: saferun's.
        script: its name.
    """

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

    def last(self) -> Path:
        """Return the directory of the last run."""
        return max(path for path in self.runs.iterdir() if path.is_dir())

    def starts(self) -> list[str]:
        """Return how each process of the last run was started, in the order of attempts."""
        files = sorted((self.last() / "receipts").glob("a*.jsonl"))
        return [
            json.loads(file.read_text(encoding="utf-8").splitlines()[0]).get("start", "")
            for file in files
        ]


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
