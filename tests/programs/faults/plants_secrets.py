"""A script with the secret PLANTED in every text that it leaves; its second attempt fails."""

import json
import os
import sys
import threading

secret = os.environ["PLANTED"]
print("to stdout", secret, flush=True)
print("--hf-token", secret, file=sys.stderr, flush=True)


def fail():
    raise ValueError("w " * 1000 + secret)


thread = threading.Thread(target=fail, name=secret)
thread.start()
thread.join()
receipts = json.loads(os.environ["SAFERUN_INJECT"])["receipts"]
attempt, pid = os.environ["SAFERUN_ATTEMPT"], os.getpid()
base = f"{receipts}/a{attempt}-r0-ranknone-pid{pid}"
with open(base + ".jsonl", "w", encoding="utf-8") as file:
    for text in (secret, "x" * 180 + " " + secret):
        line = {"v": 1, "at": 1.0, "pid": pid, "rank": None, "hook": "init", "outcome": "failed"}
        file.write(json.dumps({**line, "error": text, secret: text}) + "\n")
with open(base + ".recycle.json", "w", encoding="utf-8") as file:
    json.dump({"why": "w " * 140 + secret, "kind": "", "progress": 1}, file)
with open(
    os.path.join(os.path.dirname(receipts), "state", "trials.jsonl"), "a", encoding="utf-8"
) as file:
    params = {"token": secret, secret: 1}
    trial = {"number": 1, "study": secret, "state": "FAIL", "cause": secret, "params": params}
    file.write(json.dumps(trial) + "\n")
sys.exit(77) if attempt == "1" else None
raise RuntimeError(f"{'long ' * int(sys.argv[1])}bad token {secret}")
