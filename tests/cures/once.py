"""What happens to a job once, whoever starts it: the mark stays in the working directory."""


def first_time(name="struck"):
    """Tell whether nobody asked before in this directory, and leave the mark."""
    try:
        open(name, "x").close()
    except FileExistsError:
        return False
    return True
