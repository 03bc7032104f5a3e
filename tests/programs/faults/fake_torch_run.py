"""A torch.distributed.run whose `main` does what the file BODY says; it notes its import."""

import os
import sys  # noqa: F401 - for AT_IMPORT

with open(os.environ["ROSTER"], "a", encoding="utf-8") as file:
    file.write(f"imported {os.getpid()}\n")
exec(os.environ.get("AT_IMPORT", ""))


def main():
    with open(os.environ["BODY"], encoding="utf-8") as file:
        exec(compile(file.read(), "body", "exec"), {"__name__": "body"})
