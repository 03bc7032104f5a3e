"""Write to a database; the first time another process has its lock."""

import sqlite3
import subprocess
import sys

from once import first_time

HOLD = """
import sqlite3
connection = sqlite3.connect("counts.db")
connection.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
input()
"""

if first_time():
    pipe = subprocess.PIPE
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdin=pipe, stdout=pipe)
    holder.stdout.readline()
with sqlite3.connect("counts.db", timeout=0.1) as connection:
    connection.execute("CREATE TABLE IF NOT EXISTS counts (value INTEGER)")
print("counted", flush=True)
