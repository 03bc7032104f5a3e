"""Programs and torches in folders, as little of them as a search needs."""

import os
from pathlib import Path

TORCHRUN = "import sys\nfrom torch.distributed.run import main\nsys.exit(main())\n"


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def torch_in(folder: Path, version: str | None) -> None:
    """Put a torch into a folder: as little of it as there must be to be imported."""
    package = folder / "torch"
    package.mkdir(parents=True)
    text = "from .version import __version__\n" if version else "__version__ = 'unknown'\n"
    (package / "__init__.py").write_text(text, encoding="utf-8")
    if version:
        lines = f"from typing import Optional\n__version__ = '{version}'\ndebug = False\n"
        (package / "version.py").write_text(lines, encoding="utf-8")


def path_of(*folders: Path) -> dict[str, str]:
    return {"PATH": os.pathsep.join(map(str, folders)), "HOME": "/nonexistent"}
