"""saferun on two hosts, started from the first one by pdsh and by parallel-ssh, over real ssh."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest
from helpers import MARK, living, until
from hosts import Host, add_up, meeting, saved
from rights import needs
from sandbox import text_of, write

TOOLS = ("sshd", "ssh-keygen", "pdsh", "parallel-ssh")
ABSENT = [name for name in TOOLS if not shutil.which(name)]
pytestmark = [
    needs("make networks"),
    pytest.mark.skipif(
        bool(ABSENT), reason=f"no {ABSENT} (apt-get install openssh-server pdsh pssh)"
    ),
    pytest.mark.slow,
]
TRUST = "-oStrictHostKeyChecking=no -oUserKnownHostsFile=/dev/null -oLogLevel=ERROR"
STARTERS = {
    "pdsh": ["pdsh", "-R", "ssh", "-w", "h[1-2]"],
    "parallel-ssh": ["parallel-ssh", "-t", "0", "-i", "-H", "h1 h2"],
}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Host]]:
    """Two hosts with an sshd each, and one key for both."""
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    config = tmp_path / "sshd_config"
    rows = [f"HostKey {key}", f"AuthorizedKeysFile {key}.pub", "StrictModes no", "PidFile none"]
    write(config, "\n".join([*rows, "PermitRootLogin yes", "MaxStartups 100", ""]))
    Path("/run/sshd").mkdir(exist_ok=True)
    with hosts.standing(tmp_path, 2) as found:
        for host in found:
            host.do(shutil.which("sshd") or "", "-f", str(config))
        yield found


@pytest.mark.parametrize("starter", STARTERS)
def test_one_line_by_ssh_starts_all_nodes_and_a_failure_is_retried_on_both(pair, tmp_path, starter):
    job = " ".join([sys.executable, "-m", "saferun", *meeting(), *add_up(tmp_path)])
    mark = str(tmp_path)
    path = f"{MARK}={mark} PATH={Path(sys.executable).parent}:$PATH GLOO_SOCKET_IFNAME=eth0"
    options = f"{TRUST} -i {tmp_path / 'key'}"
    environ = {**os.environ, "PDSH_SSH_ARGS_APPEND": options, "HOME": str(pair[0].folder)}
    command = [*STARTERS[starter], *(["-x", options] if starter == "parallel-ssh" else [])]
    with open(tmp_path / "said", "wb") as said:
        started = pair[0].popen(
            *command, f"cd {tmp_path} && {path} exec {job}", env=environ, stdout=said, stderr=said
        )
        saved(tmp_path)
        os.kill(rank_1(mark), signal.SIGKILL)
        assert started.wait() == 0, text_of(tmp_path / "said")
    text = text_of(tmp_path / "said")
    assert "done total=465.0" in text
    assert text.count("saferun: attempt 2 succeeded") == 2, text
    until(lambda: not living(mark), f"{living(mark)} still live")


def rank_1(mark: str) -> int:
    """Return the pid of rank 1 of what has a mark in its environment."""
    environs = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in living(mark)}
    return min(pid for pid, environ in environs.items() if b"\0RANK=1\0" in environ)
