"""What torch.utils.cpp_extension does around a build, by forks of one process."""

import contextlib
import json
import os
import signal

from torch.utils.file_baton import FileBaton


def in_a_fork(call):
    if not (pid := os.fork()):
        call()
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def die():
    FileBaton("lock").try_acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def left(content):
    with open("lock", "w", encoding="utf-8") as file:
        file.write(content)
    taken = FileBaton("lock").try_acquire()
    with open("lock", encoding="utf-8") as file:
        return [taken, file.read() == content]


found = {}
found["died"] = [in_a_fork(die), os.path.exists("lock")]
baton = FileBaton("lock")
found["of the dead"] = baton.try_acquire()
found["of the living"] = in_a_fork(lambda: os._exit(FileBaton("lock").try_acquire()))
baton.release()
found["released"] = not os.path.exists("lock")
found["of nobody"] = [left(text) for text in ("", "saferun other-boot pid:[1] pid 1 5", "pid 99 ")]
os.unlink("lock")
in_a_fork(die)
with contextlib.suppress(PermissionError):  # who may not give a file away
    os.chown("lock", 65534, 65534)
    found["of another user"] = FileBaton("lock").try_acquire()
print(json.dumps(found))
