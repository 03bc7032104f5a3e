"""Write to ANSWERS which signal ties the rank and each process that it starts to their parents.

With an argument it is such a process.
"""

import ctypes
import json
import multiprocessing
import os
import subprocess
import sys
import threading


def asked():  # PR_GET_PDEATHSIG
    number = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    return number.value


def child(queue):
    queue.put(asked())


def start(started):
    command = [sys.executable, __file__, "helper"]
    pipe = subprocess.PIPE
    started["helper"] = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    started["thread"] = threading.get_native_id()


def be_helper():
    print(asked(), flush=True)
    sys.stdin.readline()
    print("still here", flush=True)


def main():
    started = {}
    thread = threading.Thread(target=start, args=(started,))
    thread.start()
    thread.join()
    while os.path.exists(f"/proc/self/task/{started['thread']}"):
        pass
    helper = started["helper"]
    answers = {"rank": asked(), "helper": int(helper.stdout.readline())}
    answers["later"] = helper.communicate("go on\n")[0].strip()
    for method in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        answers[method] = queue.get(timeout=60)
        process.join()
    with open(os.environ["ANSWERS"], "w", encoding="utf-8") as file:
        file.write(json.dumps(answers))


if __name__ == "__main__":
    be_helper() if sys.argv[1:] else main()
