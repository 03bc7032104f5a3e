"""saferun, where its first process can fork only once."""

import os
import sys

from saferun.__main__ import main

fork, left, here = os.fork, [1], os.getpid()


def few():
    if os.getpid() == here and not left:
        raise BlockingIOError(11, os.strerror(11))
    if os.getpid() == here:
        left.pop()
    return fork()


os.fork = few
sys.exit(main(sys.argv[1:]))
