"""What the tests of several nodes stand on: hosts that are apart, reach each other, and go."""

import subprocess

import hosts
from helpers import until
from rights import needs

pytestmark = needs("make networks")


def reaches(one: hosts.Host, other: hosts.Host) -> bool:
    """Whether a host opens a connection to a port that the other listens on."""
    ask = f"import socket; socket.create_connection(({other.address!r}, 4000), 0.5)"
    return one.ask("python3", "-c", ask) == 0


def test_hosts_have_names_reach_each_other_and_lose_each_other(pair):
    one, other = pair
    listen = ["import socket; s = socket.create_server(('', 4000)); print('up', flush=True)"]
    listen += ["while True: s.accept()"]
    server = other.popen("python3", "-c", "\n".join(listen), stdout=subprocess.PIPE)
    assert server.stdout.readline() == b"up\n"
    assert one.ask("sh", "-c", "test $(hostname) = h1 && getent hosts h2 | grep -q 10.77.0.2") == 0
    until(lambda: reaches(one, other), "h1 reaches h2")
    other.cut()
    assert not reaches(one, other)
    other.heal()
    until(lambda: reaches(one, other), "h1 reaches h2 again")
    other.kill()
    assert server.wait() != 0
    server.stdout.close()
