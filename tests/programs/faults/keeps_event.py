"""A command for `notify`: it appends its stdin to a file, and then does as it is told.

keeps_event.py FILE [stay | leave | fail]
"""

import os
import subprocess
import sys
import time
from pathlib import Path

FILE = Path(sys.argv[1])
with FILE.open("a", encoding="utf-8") as file:
    file.write(sys.stdin.read())
print("to nobody", flush=True)
act = sys.argv[2] if len(sys.argv) > 2 else ""
if act == "leave":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(999)"], start_new_session=True)
if act == "stay":
    while os.getpid():
        time.sleep(1)
if act == "fail":
    sys.exit("the address is wrong")
