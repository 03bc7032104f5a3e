"""The recipes for `notify` in docs/watching.md: profiles that saferun reads, commands that work."""

import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from repo import ROOT
from sandbox import shell, text_of, write

from saferun.profile.yaml_reader import parse

TEXT = 'saferun: train.py on gpu7: failed, "it\'s" $HOME `x`: ünd'
EVENT = json.dumps({"schema": 1, "event": "failed", "text": TEXT}) + "\n"
PAGE = text_of(ROOT / "docs" / "watching.md")
SECTION = PAGE.partition("## Be told of failures")[2].partition("\n## ")[0]
RECIPES = re.findall(r"```yaml\n(notify:.*?)```", SECTION, re.DOTALL)
SLACK, NTFY, MAIL = range(3)
Posted = tuple[str, dict[str, str], bytes]


def command(which: int) -> list[str]:
    leaves = parse(f"schema: 1\n{RECIPES[which]}", "p.yaml").leaves
    words = leaves["notify.command"].value
    assert isinstance(words, tuple)
    return list(map(str, words))


@pytest.fixture
def posted(tmp_path: Path) -> Iterator[list[Posted]]:
    """A local web server; each request to it is one (path, headers, body)."""
    found: list[Posted] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.append((self.path, dict(self.headers), body))
            self.send_response(404 if self.path == "/gone" else 200)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        for name in (".slack-webhook", ".ntfy"):
            write(tmp_path / name, f'url = "http://127.0.0.1:{server.server_port}/{name}"\n')
        yield found
        server.shutdown()
        thread.join()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
@pytest.mark.parametrize("which", [SLACK, NTFY])
def test_slack_and_ntfy_get_the_text(posted, tmp_path, which):
    environ = {**os.environ, "HOME": str(tmp_path), "no_proxy": "127.0.0.1"}
    done = subprocess.run(
        command(which), input=EVENT.encode(), env=environ, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    ((path, headers, body),) = posted
    if which == SLACK:
        assert (path, headers["Content-Type"]) == ("/.slack-webhook", "application/json")
        assert json.loads(body) == {"text": TEXT}
    else:
        assert (path, headers["Title"]) == ("/.ntfy", "saferun")
        assert body.decode().strip() == TEXT


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_a_webhook_that_refuses_is_a_failure(posted, tmp_path):
    place = tmp_path / ".slack-webhook"
    write(place, text_of(place).replace("/.slack-webhook", "/gone"))
    environ = {**os.environ, "HOME": str(tmp_path), "no_proxy": "127.0.0.1"}
    done = subprocess.run(
        command(SLACK), input=EVENT.encode(), env=environ, capture_output=True, check=False
    )
    assert (bool(done.returncode), b"curl" in done.stderr, len(posted)) == (True, True, 1)


def test_mail_gets_the_event(tmp_path):
    program = tmp_path / "mail"
    write(program, f'#!/bin/sh\ncd {shell(tmp_path)}\necho "$@" > to\ncat > body\n')
    program.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(command(MAIL), input=EVENT.encode(), env=environ, check=True)
    assert text_of(tmp_path / "to") == "-s saferun me@example.org\n"
    assert text_of(tmp_path / "body") == EVENT
