"""Read the command lines of stdin with this Python's argparse and torchrun's options."""

import argparse
import json
import sys


class RefusedError(Exception):
    pass


def refuse(message="HELP"):
    raise RefusedError(message)


case = json.load(sys.stdin)
parser = argparse.ArgumentParser(add_help=False)
parser.error = refuse
parser.print_help = refuse
for dest, strings, flag, _ in case["options"]:
    if dest == "help":
        parser.add_argument(*strings, action="help")
    elif flag:
        parser.add_argument(*strings, action="store_const", const="")
    else:
        parser.add_argument(*strings)
parser.add_argument("training_script")
parser.add_argument("training_script_args", nargs=argparse.REMAINDER)


def read(argv):
    try:
        return vars(parser.parse_args(argv))
    except RefusedError as refused:
        return str(refused)


print(json.dumps([[read(argv) for argv in pair] for pair in case["pairs"]]))
