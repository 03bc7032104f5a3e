"""An exception over the network: before the first steps a mistake, after them bad luck."""

from __future__ import annotations

from cases import check_cases
from job_logs import TRACEBACK, diagnose, output

from saferun.diagnosis.evidence import RankFailure

STEPS = output(500)
LOCAL = f"{TRACEBACK}  File \"/w/push.py\", line 3, in push\n    c = connect('127.0.0.1', 6379)\n"
# a service that is down: nobody knows whether it was ever up, until the job has made steps
MAY_PASS = (
    *("ConnectionRefusedError: [Errno 111] Connection refused", "TimeoutError: timed out"),
    *("TimeoutError", "OSError: [Errno 101] Network is unreachable", "socket.timeout: timed out"),
    *("OSError: [Errno 113] No route to host", "OSError: [Errno 112] Host is down"),
    "TimeoutError: [Errno 110] Connection timed out",
    "ConnectionAbortedError: [Errno 103] Software caused connection abort",
    "ssl.SSLEOFError: EOF occurred in violation of protocol (_ssl.c:1007)",
    "urllib.error.URLError: <urlopen error [Errno 111] Connection refused>",
    "http.client.RemoteDisconnected: Remote end closed connection without response",
    *("http.client.BadStatusLine: ", "urllib.error.HTTPError: HTTP Error 502: Bad Gateway"),
    "redis.exceptions.ConnectionError: Error 111 connecting to redis:6379. Connection refused.",
    "redis.exceptions.TimeoutError: Timeout reading from socket",
    "pymongo.errors.ServerSelectionTimeoutError: db:27017: [Errno 111] Connection refused",
    *("pymongo.errors.AutoReconnect: connection closed", "pika.exceptions.AMQPConnectionError"),
    "psycopg2.OperationalError: server closed the connection unexpectedly",
    "pymysql.err.OperationalError: (2013, 'Lost connection to MySQL server during query')",
    *("kafka.errors.NoBrokersAvailable: NoBrokersAvailable", "httpx.ReadError"),
    "aiohttp.client_exceptions.ClientConnectorError: Cannot connect to host localhost:8080",
    *("asyncio.exceptions.TimeoutError", "zmq.error.Again: Resource temporarily unavailable"),
    "mlflow.exceptions.MlflowException: API request failed: Max retries exceeded with url: /api",
    "paramiko.ssh_exception.SSHException: Server connection dropped: ",
    "websockets.exceptions.ConnectionClosedError: no close frame received or sent",
    "pycurl.error: (7, 'Failed to connect to host port 80: Connection refused')",
    "requests.exceptions.ConnectionError: Failed to establish a new connection: [Errno 111]",
)
STAYS = (
    "ssl.SSLCertVerificationError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed",
    "urllib.error.HTTPError: HTTP Error 404: Not Found",
    *("redis.exceptions.AuthenticationError: invalid password", "KeyError: 'timed out'"),
    'psycopg2.OperationalError: password authentication failed for user "me"',
    "subprocess.TimeoutExpired: Command '['x']' timed out after 5 seconds",
    *("ValueError: the connection refused it", "networkx.exception.NetworkXNoPath: no path"),
)


def before_steps(raised: str) -> None:
    assert diagnose(f"{LOCAL}{raised}\n").verdict == "stop-user"
    assert diagnose(f"step 0 loss 2.5\n{LOCAL}{raised}\n", step=None).verdict == "stop-user"


def after_steps(raised: str, verdict: str) -> None:
    assert diagnose(f"{STEPS}{LOCAL}{raised}\n").verdict == verdict
    live = RankFailure(rank=1, traceback=f"{LOCAL}{raised}")
    assert diagnose("", failures=(live,), step=499).verdict == verdict


def test_before_the_first_steps_a_service_that_is_down_stops_the_run():
    check_cases([(raised,) for raised in (*MAY_PASS, *STAYS)], before_steps)


def test_after_steps_it_is_tried_again_unless_the_message_tells_of_a_mistake():
    again, stays = (
        [(r, v) for r in table] for table, v in ((MAY_PASS, "retry"), (STAYS, "stop-user"))
    )
    check_cases([*again, *stays], after_steps)


def test_what_a_peer_saw_of_it_does_not_decide():
    peer = "[rank0]: RuntimeError: [gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:4123\n"
    lost = f"{LOCAL}urllib.error.URLError: <urlopen error [Errno 111] Connection refused>\n"
    assert [diagnose(log).kind for log in (lost + peer, peer + lost)] == ["user-exception"] * 2
    assert diagnose(STEPS + lost + peer).kind == "hub-unavailable"
    assert diagnose(STEPS + lost).decided_by == ("log", "progress, as the log shows it")
