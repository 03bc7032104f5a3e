"""What happens to a job once, whoever starts it: the mark stays in the working directory."""

import os


def healthy():
    """Tell whether this run is to show how long the program takes without its fault."""
    return "WITHOUT_FAULT" in os.environ


def first_time(name="struck"):
    """Tell whether nobody asked before in this directory, and leave the mark."""
    if healthy():
        return False
    try:
        open(name, "x", encoding="utf-8").close()
    except FileExistsError:
        return False
    return True
