"""torch.distributed.run of a fake torch; it counts its imports, and does MORE as it is asked."""

import argparse
import os

from torch.distributed.argparse_util import check_env, env

with open(os.environ["STARTS"], "a", encoding="utf-8") as file:
    file.write("started\n")
print("noise on standard output")
assert "SAFERUN_INJECT" not in os.environ


def get_args_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--new-thing", "--new_thing", action=env, default="1")
    parser.add_argument("--flag", action=check_env)
    parser.add_argument("--plain")
    exec(os.environ["MORE"])
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser
