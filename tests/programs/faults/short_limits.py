"""Run the program that the arguments name with short limits for what does not end."""

import os
import runpy
import sys

from saferun.keeper import process_tree, protocol

process_tree.UNKILLABLE_S = protocol.HURRIED_DRAIN_S = 0.1
from saferun.supervise.attempt import attempt_life  # noqa: E402 - it reads one of them

attempt_life.KEEPER_GRACE_S = 0.3
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
