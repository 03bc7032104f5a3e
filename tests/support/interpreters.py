"""Fresh interpreters with the injection in place, and what they leave behind."""

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from sandbox import Sandbox, own_lines, text_of, unquoted, write

from saferun.model import as_tree
from saferun.settings import HookSettings

INJECT = Path(__file__).resolve().parents[2] / "src" / "saferun" / "inject"
SITE = INJECT / "site"
NEUTRAL = {"excepthook": "on"}
QUIET = {
    "init": {"set_device": False, "barrier": "off", "agree": "off", "timeout_s": 30},
    "order": {"mode": "off", "wrap_barrier": False},
    "shards": "off",
}


def changed(hooks: dict[str, Any]) -> dict[str, Any]:
    """The settings of all hooks, as a rank gets them: the defaults with some changes."""
    tree: dict[str, Any] = as_tree(HookSettings())
    for name, value in hooks.items():
        tree[name] = {**tree[name], **value} if isinstance(value, dict) else value
    return tree


class Ran(NamedTuple):
    """One finished interpreter."""

    code: int
    out: str
    err: str
    receipts: list[dict[str, Any]]

    def messages(self) -> list[str]:
        """Return the lines that saferun wrote."""
        return own_lines(self.err)

    def by(self, hook: str, outcome: str | None = None) -> list[dict[str, Any]]:
        return [
            line
            for line in self.receipts
            if line["hook"] == hook and outcome in (None, line["outcome"])
        ]


class Interpreters:
    """Starts Pythons as a launcher would: our site first, a contract in the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sandbox = folder, Sandbox(folder)
        self.receipts = folder / "receipts"

    def environ(self, hooks: dict[str, Any] | None, **extra: str) -> dict[str, str]:
        caches = {"TORCHINDUCTOR_CACHE_DIR": unquoted(self.folder / "inductor")}
        told = {} if hooks is None else {"SAFERUN_INJECT": self.contract(hooks)}
        return {**self.sandbox.environ, **caches, "PYTHONPATH": str(SITE), **told, **extra}

    def contract(self, hooks: dict[str, Any]) -> str:
        return json.dumps(
            {
                "v": 1,
                "run": "test",
                "attempt": 1,
                "hooks": changed({**QUIET, **hooks}),
                "mitigations": [],
                "receipts": str(self.receipts),
            }
        )

    def run(
        self,
        script: str = "",
        *,
        hooks: dict[str, Any] | None = None,
        argv: tuple[str, ...] = (),
        python: str = sys.executable,
        flags: tuple[str, ...] = (),
        environ: dict[str, str] | None = None,
        **extra: str,
    ) -> Ran:
        """Run a script (a file, so that dynamo and inspect find its source) or a command line."""
        if not argv:
            path = self.folder / "script.py"
            write(path, script)
            argv = (str(path),)
        environ = self.environ(hooks, **extra) if environ is None else environ
        done = self.sandbox.ran(python, *flags, *argv, env=environ)
        return Ran(done.returncode, done.stdout, done.stderr, self.read_receipts())

    def read_receipts(self) -> list[dict[str, Any]]:
        files = sorted(self.receipts.glob("*.jsonl")) if self.receipts.is_dir() else []
        files = [file for file in files if not file.is_symlink()]
        return [json.loads(line) for file in files for line in text_of(file).splitlines()]


def other_pythons() -> list[Path]:
    found = Path.home().joinpath(".pyenv/versions").glob("3.*/bin/python")
    wanted = [p for p in found if tuple(map(int, p.parts[-3].split(".")[:2])) >= (3, 9)]
    return sorted(wanted) or [Path(sys.executable)]


def both(*entries: object) -> str:
    return os.pathsep.join(map(str, entries))


def fake_torch(folder: Path, body: str = "") -> Path:
    """A package named torch that costs nothing, for what does not need the real one."""
    package = folder / "fake" / "torch"
    write(
        package / "__init__.py",
        "import sys\ncompile = len\nnow = (__spec__.loader, __loader__)\n" + body,
    )
    return package.parent
