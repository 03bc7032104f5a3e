"""Rank 1 raises; RECORD says whether under torch's decorator."""

import os
import time


def main():
    if os.environ["RANK"] == "1":
        raise ValueError("the root cause")
    time.sleep(60)  # ended by torchrun


if os.environ["RECORD"]:
    from torch.distributed.elastic.multiprocessing.errors import record

    main = record(main)
main()
