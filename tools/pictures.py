"""The pictures of README.md: one crash under torchrun and under saferun, and a run's report.

    python tools/pictures.py            make docs/pictures again; the report needs a Chromium
    python tools/pictures.py --check    run both again; fail where they print something else

Every line is what the commands have printed here. What is left out is counted, long lines are
wrapped. `make pictures` and `make check-pictures` do it; no test does.
"""

from __future__ import annotations

import argparse
import base64
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
TO = ROOT / "docs" / "pictures"
TRAIN = ROOT / "tools" / "pictures_train.py"
COMMAND = "{} --standalone --nproc-per-node 2 train.py 60 55"
COLUMNS, MOST_LINES = 66, 12
NO_BREAK = "\u00a0"
CHAR, LINE, PAD = 7.8, 20, 16  # pixels
# The lines that are shown of each; a run of the others is one line that counts them.
SHOWN = {
    "torchrun": r"step \d|Fatal Python|Root Cause|^  exitcode .*SIGSEGV",
    "saferun": r"step \d|Fatal Python|^saferun: |resumed",
}
THEMES = {
    "light": ("#f6f8fa", "#1f2328", "#59636e", "#b3261e", "#0a58a6", "#d1d9e0"),
    "dark": ("#151b23", "#e6edf3", "#9198a1", "#ff8a80", "#7db7f5", "#3d444d"),
}


class Scene(NamedTuple):
    """What one command printed."""

    name: str
    lines: list[str]


def run(name: str, argv: str, folder: pathlib.Path) -> tuple[str, int, float]:
    """Return what a command line prints in a folder with the training, its status and its time."""
    shutil.copy(TRAIN, folder / "train.py")
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {"PATH": path, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    environ["CUDA_VISIBLE_DEVICES"] = ""
    began = time.monotonic()
    done = subprocess.run(
        argv.split(), cwd=folder, env=environ, stdout=-1, stderr=subprocess.STDOUT, text=True
    )
    return done.stdout, done.returncode, time.monotonic() - began


def scene(name: str) -> Scene:
    """Run one command and choose the lines that are shown."""
    with tempfile.TemporaryDirectory() as folder:
        command = COMMAND.format(name)
        printed, status, _ = run(name, command, pathlib.Path(folder))
    lines, hidden = [f"$ {command}"], 0
    for line in printed.splitlines():
        if not re.search(SHOWN[name], line):
            hidden += 1
            continue
        if hidden:
            lines.append(left_out(hidden))
        hidden = 0
        lines += textwrap.wrap(line, COLUMNS, subsequent_indent="         ")
    lines += [left_out(hidden)] if hidden else []
    lines += [f"exit status {status}"] if status else []
    if len(lines) > MOST_LINES:
        sys.exit(f"{name}: {len(lines)} lines:\n" + "\n".join(lines))
    return Scene(name, lines)


def left_out(count: int) -> str:
    """Return the line that stands for others."""
    return f"⋮ {count} line{'' if count == 1 else 's'}"


def svg(one: Scene, theme: str) -> str:
    """Return a terminal with these lines."""
    back, text, dim, bad, ours, border = THEMES[theme]
    width, height = round(COLUMNS * CHAR + 2 * PAD), MOST_LINES * LINE + 2 * PAD
    rows, colour = [], text
    for at, line in enumerate(one.lines):
        if not line.startswith("    "):
            colour = dim if line.startswith("⋮") else text
            colour = ours if line.startswith("saferun:") else colour
            colour = bad if re.match("Fatal|Root|  exitcode|exit status [1-9]", line) else colour
        y = PAD + LINE * at + 14
        bold = ' font-weight="700"' if line.startswith("$") else ""
        shown = escape(line).replace(" ", NO_BREAK)  # browsers collapse other spaces
        row = f'<text x="{PAD}" y="{y}" fill="{colour}"{bold}>{shown}</text>'
        rows.append(row)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-size="13" '
            'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, '
            'monospace">',
            f"<title>A crash under {one.name}</title>",
            f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" '
            f'fill="{back}" stroke="{border}"/>',
            *rows,
            "</svg>\n",
        ]
    )


def plain(lines: list[str]) -> list[str]:
    """Return lines without what differs from run to run."""
    return [re.sub(r"[\d.,]+", "0", line) for line in lines]


def drawn(path: pathlib.Path) -> list[str]:
    """Return the lines of a picture."""
    found = re.findall(r"<text [^>]*>(.*)</text>", path.read_text(encoding="utf-8"))
    names = {"&lt;": "<", "&gt;": ">", "&amp;": "&"}
    lines = [line.replace(NO_BREAK, " ") for line in found]
    return [re.sub("&(?:lt|gt|amp);", lambda m: names[m[0]], line) for line in lines]


def report(to: pathlib.Path) -> None:
    """Take a picture of the report of a run with a taken port and two crashes."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from browser import chromium, program  # what the tests of the page use

    path = program()
    if path is None:
        sys.exit("no Chromium (apt-get install chromium): the report's picture is left as it is")
    with tempfile.TemporaryDirectory() as name, socket.create_server(("", 0)) as taken:
        folder = pathlib.Path(name)
        port = taken.getsockname()[1]
        sets = "--set retry.resume.checkpoints=ckpt/step-*.pt --retries 4"
        argv = f"saferun --nproc-per-node 2 --master-port {port} {sets} train.py 300 95,215"
        printed, status, _ = run("report", argv, folder)
        if status:
            sys.exit(printed)
        run("report", "saferun runs report last --html report.html", folder)
        with chromium(path, folder / "browser") as browser:
            for theme in THEMES:
                browser.show_at(1000, theme)
                browser.open((folder / "report.html").as_uri())
                height = browser.evaluate(
                    "document.querySelector('#run').getBoundingClientRect().top"
                )
                clip = {"x": 0, "y": 0, "width": 1000, "height": round(height) - 16, "scale": 1}
                taken_of = browser.ask(
                    "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
                )
                (to / f"report-{theme}.png").write_bytes(base64.b64decode(taken_of["data"]))


def main() -> None:
    """Make the pictures, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    TO.mkdir(exist_ok=True)
    stale = []
    for one in map(scene, SHOWN):
        for theme in THEMES:
            path = TO / f"crash-{one.name}-{theme}.svg"
            if not check:
                path.write_text(svg(one, theme), encoding="utf-8")
            elif not path.exists() or plain(drawn(path)) != plain(one.lines):
                stale.append(f"{path.name} is stale; now:\n" + "\n".join(one.lines))
    if stale:
        sys.exit("\n".join(stale))
    if not check:
        report(TO)


if __name__ == "__main__":
    main()
