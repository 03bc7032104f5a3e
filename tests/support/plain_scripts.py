"""Scripts of `gen-shell --plain`, and how their jobs end."""

from __future__ import annotations

from pathlib import Path

from scripts import Machine

SOON = {"SAFERUN_SET": "retry.backoff_s='[0, 0]'"}
SEGFAULT = {"code": "import signal; os.kill(os.getpid(), signal.SIGSEGV)"}
KILLED = {"code": "os.kill(os.getpid(), 9)"}
USER = {
    "stderr": "Traceback (most recent call last):\n  File 'x'\nKeyError: 'label'\n",
    "status": 1,
}


def script(machine: Machine, *argv: str, profile: str = "cpu", **environ: str) -> Path:
    return machine.script("--plain", "--profile", profile, *argv, **{**SOON, **environ})
