"""A rank that, asked to end, saves for as long as ROSTER.go is not there."""

import os
import signal

from roster import ROSTER, join, stay, wait_for


def save(number, frame):
    wait_for(ROSTER + ".go")
    join("saved")
    os._exit(0)


signal.signal(signal.SIGTERM, save)
join("rank")
stay()
