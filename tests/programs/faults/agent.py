"""An agent as torchrun's is: ranks are sessions; a failure or a signal ends them all, exit 1.

Arguments: the ranks' code and their number.
"""

import os
import signal
import subprocess
import sys
import time

from roster import join

heard = []  # an exception in a handler can leave the lock of Popen.poll behind


def asked(number, frame):
    heard.append(number)


def start(code, rank):
    environ = {**os.environ, "RANK": str(rank)}
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True, env=environ)


def main(code, count):
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):
        number = getattr(signal, name)
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, asked)
    ranks = [start(code, i) for i in range(count)]
    join("agent")
    while not heard:
        codes = [rank.poll() for rank in ranks]
        if any(codes):
            break
        if codes == [0] * count:
            sys.exit(0)
        time.sleep(0.01)
    for number in heard[:1]:
        join(f"heard-{number}")
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(signal.SIGTERM)
    for rank in ranks:
        rank.wait()
    sys.exit(1)


main(sys.argv[1], int(sys.argv[2]))
