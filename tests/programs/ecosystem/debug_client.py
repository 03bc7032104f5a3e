"""A client of debugpy's adapter, as an editor is one: it debugs the ranks of a run.

    debug_client.py LAUNCH SCRIPT LINE

LAUNCH is the configuration in a launch.json, as JSON. The client sets a breakpoint in SCRIPT,
attaches to each process that the adapter announces, prints where a process stops, steps over the
line, and lets it go on. It prints the program's output and exit status, too.
"""

import json
import os
import socket
import subprocess
import sys
import threading

LIMIT_S = 300
launch, script, line = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
over = threading.Event()


class Session:
    """One connection to the adapter; each debugged process has its own."""

    def __init__(self, reads, writes, request, configuration):
        self._reads, self._writes = reads, writes
        self._lock = threading.Lock()
        self._is_first = request == "launch"
        self._answers = {}
        self._count = 0
        threading.Thread(target=self._listen, daemon=True).start()
        self.ask("initialize", clientID="test", adapterID="debugpy", pathFormat="path")
        self._send(request, configuration)

    def _send(self, command, arguments):
        with self._lock:
            self._count += 1
            self._answers[self._count] = answer = [threading.Event(), {}]
            body = {"seq": self._count, "type": "request", "command": command}
            data = json.dumps({**body, "arguments": arguments}).encode()
            self._writes.write(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
            self._writes.flush()
        return answer

    def ask(self, command, **arguments):
        """Send a request and return the body of its response."""
        came, body = self._send(command, arguments)
        assert came.wait(LIMIT_S), command
        return body

    def _listen(self):
        while head := self._reads.readline():
            if not head.startswith(b"Content-Length:"):
                continue
            self._reads.readline()
            message = json.loads(self._reads.read(int(head.split()[1])))
            if message["type"] == "response":
                came, body = self._answers[message["request_seq"]]
                body.update(message.get("body") or {})
                came.set()
            elif message["type"] == "event":
                arguments = (message["event"], message.get("body") or {})
                threading.Thread(target=self._take, args=arguments, daemon=True).start()

    def _take(self, event, body):
        if event == "initialized":
            self.ask("setBreakpoints", source={"path": script}, breakpoints=[{"line": line}])
            self.ask("configurationDone")
        elif event == "debugpyAttach":
            place = body["connect"]
            stream = socket.create_connection((place["host"], place["port"])).makefile("rwb")
            Session(stream, stream, "attach", body)
        elif event == "stopped":
            self._stopped(body["threadId"], body["reason"])
        elif event == "output" and body["category"] in ("stdout", "stderr"):
            os.write(1, body["output"].encode())
        elif event == "exited" and self._is_first:
            show(f"exited {body['exitCode']}")
            over.set()

    def _stopped(self, thread, reason):
        frame = self.ask("stackTrace", threadId=thread, levels=1)["stackFrames"][0]
        rank = "__import__('os').environ['RANK']"
        found = self.ask("evaluate", expression=rank, frameId=frame["id"])["result"]
        show(f"{reason} {os.path.basename(frame['source']['path'])}:{frame['line']} rank {found}")
        self.ask("next" if reason == "breakpoint" else "continue", threadId=thread)


def show(text):
    os.write(1, f"{text}\n".encode())


pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
adapter = subprocess.Popen([sys.executable, "-m", "debugpy.adapter"], **pipes)
try:
    Session(adapter.stdout, adapter.stdin, "launch", launch)
    assert over.wait(LIMIT_S), "the program does not end"
finally:
    adapter.kill()  # it waits for another client
    adapter.wait(LIMIT_S)
