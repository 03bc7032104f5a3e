"""Ordinary silences under the watch's own limits, with all of its times divided by one factor.

    python benchmarks/silences.py [--factor 60] [--minutes 40] [--only TEXT] [--peer]

Each program of silent_programs.py runs under saferun with `watch.mode=warn` and is silent for as
long as 40 minutes are, divided by the factor; so are the watch's limits (600 s; of a stall 30 s,
of one that is said 60 s), the time between its looks (10 s) and between questions to nvidia-smi.
Rates (of CPU time, of bytes) are not divided. With `--peer` each is rank 0 of two, and rank 1 waits
for it in a barrier. Prints a table, and ends with 1 where an ordinary program was reported, or was
said to be waited for, or a hang was not reported (with `--peer`: nor noted as a stall). One that
only sleeps is to be said then: nobody can tell it from a hang.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

HERE = pathlib.Path(__file__).resolve().parent
PROGRAM = str(HERE / "silent_programs.py")
SCALED = """
import sys
factor = float(sys.argv.pop(1))
from saferun.diagnosis import silence
from saferun.supervise.watch import hang_watch, weak_activity
for name in ("LEAST_S", "STALL_S", "_LEAST_STALL_S", "LOUD_S", "GONE_S"):
    setattr(silence, name, getattr(silence, name) / factor)
hang_watch._EVERY_S /= factor
hang_watch._TREE_S /= factor
weak_activity.EVERY_S /= factor
from saferun.__main__ import main
sys.exit(main())
"""
WAITS = ("waits for it in", "wait for it in")  # of a line about a rank that others wait for
SLEEPS = ("one long sleep", "polling for a file")
AT_ONCE = 2  # programs; as many as there are cores


def names() -> list[str]:
    code = "import silent_programs as s, json; print(json.dumps([*s.ORDINARY, *s.HANGS]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "x", "0", "x"], cwd=HERE, capture_output=True, check=True
    )
    return list(json.loads(done.stdout))


@contextlib.contextmanager
def reader() -> Iterator[str]:
    """Serve connections whose bytes are read and thrown away; yield the port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = server.accept()
                threading.Thread(target=drain, args=[link], daemon=True).start()

    def drain(link: socket.socket) -> None:
        while link.recv(1 << 20):
            pass

    threading.Thread(target=serve, daemon=True).start()
    yield str(server.getsockname()[1])
    server.close()


def fill(path: str, seconds: float) -> None:
    """Write into a named pipe what a slow disk would give, for so long."""
    file = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(BlockingIOError):
            os.write(file, bytes(32 << 10))
        time.sleep(0.1)  # the rate of a slow disk
    os.close(file)


def processes(pid: int) -> list[int]:
    """Return a process and all below it."""
    below = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in below for one in processes(int(child)))]


def stop_all(pid: int, seconds: float) -> None:
    time.sleep(seconds / 4)  # it is silent by then, and has not ended
    found = processes(pid)
    for one in found:
        os.kill(one, signal.SIGSTOP)
    time.sleep(seconds / 2)  # how long the laptop is closed
    for one in reversed(found):
        os.kill(one, signal.SIGCONT)


class Program:
    """One of the programs, and what happens to it from outside."""

    def __init__(
        self, name: str, folder: str, factor: float, seconds: float, port: str, *, peer: bool
    ) -> None:
        self.errors = pathlib.Path(folder, "stderr")
        self.name, self.seconds = name, seconds * (4 if "loop" in name else 1)
        self.path = port
        if any(word in name for word in ("slow disk", "copy", "pipe")) and "imports" not in name:
            os.mkfifo(path := f"{folder}/pipe")
            self.path = path
        two = peer or any(word in name for word in ("barrier", "peer"))
        words = ["--nproc-per-node=2"] if two else ["--set", "launcher=python"]
        self.command = [sys.executable, "-c", SCALED, str(factor), "--profile=cpu", "--set"]
        self.command += ["watch.mode=warn", "--retries=1", *words]
        self.command += [PROGRAM, name, str(self.seconds), self.path]
        programs = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environ = {**os.environ, "HOME": folder, "OMP_NUM_THREADS": "1", "PATH": programs}
        self.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"

    def run(self) -> int:
        """Run it to its end; return its status."""
        controller, terminal = pty.openpty()
        at_terminal = "person" in self.name
        if self.path.startswith("/") and "pipe" not in self.name:
            filling = threading.Thread(
                target=fill, args=[self.path, self.seconds + 60], daemon=True
            )
            filling.start()
        with (
            open(self.errors, "wb") as errors,
            subprocess.Popen(
                self.command,
                env=self.environ,
                stdin=terminal if at_terminal else subprocess.DEVNULL,
                stdout=terminal if at_terminal else subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            ) as one,
        ):
            if "stopped" in self.name:
                stop_all(one.pid, self.seconds)
            elif at_terminal or "pipe" in self.name:
                time.sleep(self.seconds)
                self._answer(controller if at_terminal else None)
        os.close(controller)
        os.close(terminal)
        return one.returncode

    def _answer(self, terminal: int | None) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK) if terminal is None else terminal
        os.write(file, b"c\n")
        if terminal is None:
            os.close(file)


def run(name: str, factor: float, seconds: float, port: str, *, peer: bool) -> dict[str, object]:
    """Run one program; return what the watch reported of it."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        program = Program(name, folder, factor, seconds, port, peer=peer)
        status = program.run()
        lived = time.monotonic() - began
        (journal,) = pathlib.Path(folder).glob(".local/state/saferun/runs/*/events.jsonl")
        events = [json.loads(line) for line in journal.read_text().splitlines()]
        lines = program.errors.read_text(errors="replace").splitlines()
    alarms = [event for event in events if event["event"] == "hang"]
    found: dict[str, object] = {"name": name, "status": status, "lived_s": lived, "alarms": alarms}
    found["stalls"] = [event for event in events if event["event"] == "stall" and event["line"]]
    return found | {"said": [line for line in lines if any(part in line for part in WAITS)]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--factor", type=float, default=60)
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--only", default="")
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    seconds = options.minutes * 60 / options.factor
    waiting = [name for name in names() if options.only in name]
    print("| program | silent for, min | reported after, min | stalls noted | said |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    wrong: list[str] = []
    total: list[float] = []
    lock = threading.Lock()

    def work(port: str) -> None:
        while waiting:
            one = run(waiting.pop(0), options.factor, seconds, port, peer=options.peer)
            alarms, name = one["alarms"], str(one["name"])
            stalls, said = one["stalls"], one["said"]
            assert isinstance(alarms, list)
            assert isinstance(stalls, list)
            assert isinstance(said, list)
            minutes = [event["silent_s"] * options.factor / 60 for event in alarms]
            told = f"{minutes[0]:.0f}" if minutes else "never"
            lasted = float(str(one["lived_s"])) * options.factor / 60
            with lock:
                print(
                    f"| {name} | {lasted:.0f} | {told} | {len(stalls)} | {len(said)} |", flush=True
                )
                hangs = name.startswith("hang")
                is_found = bool(minutes) or (hangs and options.peer and bool(stalls))
                sleeps = options.peer and name in SLEEPS
                if is_found != hangs or (said and not (hangs or sleeps)) or one["status"]:
                    wrong.append(f"{name} (status {one['status']}, {said})")
                if not name.startswith("hang"):
                    total.append(lasted)

    with reader() as port:
        threads = [threading.Thread(target=work, args=[port]) for _ in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(f"\n{len(total)} ordinary programs, {sum(total) / 60:.1f} h of silence.")
    print(f"Wrong: {', '.join(wrong) or 'none'}.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
