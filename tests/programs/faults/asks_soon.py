"""Run saferun with a watch for slow ranks that asks within seconds: `asks_soon.py ARGUMENTS`.

Each answer adds a line to the file that ASKED names: the ranks that have answered.
"""

import os
import runpy
from pathlib import Path

from saferun.supervise.watch import slow_watch

slow_watch.FIRST_S, slow_watch.EVERY_S, slow_watch.CONFIRM_S = 12.0, 12.0, 8.0
take = slow_watch._take


def noted(asked):
    times = take(asked)
    with Path(os.environ["ASKED"]).open("a", encoding="utf-8") as file:
        file.write(f"{sorted(times)}\n")
    return times


slow_watch._take = noted
runpy.run_module("saferun", run_name="__main__", alter_sys=True)
