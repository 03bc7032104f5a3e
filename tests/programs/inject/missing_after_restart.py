"""All ranks end with 3; after torchrun's restart rank 1 never comes to its init."""

import os
import sys
import time

import torch.distributed as dist

again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
if again and os.environ["RANK"] == "1":
    time.sleep(600)
dist.init_process_group("gloo")
sys.exit(0 if again else 3)
