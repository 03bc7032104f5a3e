"""Releases of the libraries that the tools look at: fetched with pip, and written as ranges."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Sequence


def fetch(
    project: str, version: str, root: pathlib.Path, wanted: Callable[[str], bool] = bool
) -> None:
    """Unpack a release's wheel, or its sources where it has none; local builds (+cpu) are left out.

    Args:
        project: its name in the registry.
        version: of the release.
        root: where to.
        wanted: returns whether a file of the wheel is needed; by default all are.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--prefer-binary", "-d", str(root), f"{project}==={version}"]
    environ = {**os.environ, "PIP_FIND_LINKS": ""}
    subprocess.run(command, check=True, env=environ)
    for wheel in root.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(root, filter(wanted, archive.namelist()))
        wheel.unlink()
    for sources in root.glob("*.tar.gz"):
        shutil.unpack_archive(sources, root, filter="data")
        sources.unlink()


def ranges(found: Iterable[str], order: Sequence[str]) -> str:
    """Return versions as ranges: "2.4.0..2.6.0,2.8.0..".

    Args:
        found: some of `order`, in that order.
        order: all that were looked at; a range without an end goes on to the last of them.
    """
    runs: list[list[str]] = []
    for each in found:
        previous = order.index(each) - 1
        if runs and previous >= 0 and runs[-1][-1] == order[previous]:
            runs[-1].append(each)
        else:
            runs.append([each])
    return ",".join(f"{run[0]}.." + ("" if run[-1] == order[-1] else run[-1]) for run in runs)
