"""Write ten bytes at a time, and note in SEEN whether the error file was there before each."""

import os

write = os.write


def slow(file, data):
    there = os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"])
    with open(os.environ["SEEN"], "a", encoding="utf-8") as seen:
        seen.write("y" if there else "n")
    return write(file, data[:10])


os.write = slow
raise ValueError("x" * 50)
