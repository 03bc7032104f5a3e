"""A rank that starts the training its own way: `python_wrapper.py FOLDER HOW PYTHON-ARGUMENTS …`.

HOW is "job": what is given, behind another sitecustomize; "0" or "1": the same in that rank alone;
"fixed": the same, its last word given by this program; "isolated": with -I; "helper": first a
helper with torch behind the other one, then the training as it is.
"""

import os
import subprocess
import sys

folder, how, *argv = sys.argv[1:]
given = os.environ.get("PYTHONPATH", "")
behind = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, given])}
if how in "01" and os.environ["RANK"] != how:
    behind = dict(os.environ)
if how == "helper":
    subprocess.run([sys.executable, "-c", "import torch"], env=behind, check=True)
    behind = dict(os.environ)
if how == "isolated":
    argv.insert(0, "-I")
if how == "fixed":
    argv.append("meet")
log = subprocess.Popen(["sleep", "600"])  # a wrapper may have other children
try:
    sys.exit(subprocess.run([sys.executable, *argv], env=behind).returncode)
finally:
    log.kill()
