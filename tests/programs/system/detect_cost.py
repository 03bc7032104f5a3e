"""Detects GPUs on a machine without any, and prints how many files it read."""

import sys

from saferun.system import gpus

reads: list[str] = []
counted = False


def count(event: str, arguments: tuple[object, ...]) -> None:
    """Count what opens a file, lists a directory or starts a process (an audit hook)."""
    if counted and event in ("open", "os.listdir", "os.scandir", "subprocess.Popen"):
        reads.append(f"{event} {arguments[0]}")


sys.addaudithook(count)
counted = True
gpus.detect({"PATH": "/nowhere"}, proc="/nowhere", dev="/nowhere")
counted = False
print(len(reads))
