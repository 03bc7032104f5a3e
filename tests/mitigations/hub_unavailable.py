"""Fetch a model's configuration from a server that may be out of service."""

import sys
import urllib.request

with urllib.request.urlopen(sys.argv[1]) as answer:
    print(f"fetched {answer.read().decode()}", flush=True)
