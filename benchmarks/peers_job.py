"""The job of benchmarks/peers.py: two ranks write numbered lines, then do what is asked.

`crash`: rank 1 dies of SIGSEGV once, and the next start ends well. `stay`: they stay until killed.
`hang`: rank 1 stays away from its 21st all_reduce once, in which the other one waits. What a rank
wrote is counted in a file, so that lines that did not arrive are known.
"""

import os
import signal
import sys
import time

what, lines, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
rank = os.environ["RANK"]
os.write(1, f"first {time.monotonic_ns()}\n".encode())
for number in range(lines):
    os.write(1, f"line {rank} {number} {'x' * 80}\n".encode())  # one write: ranks do not mix lines
with open(f"{folder}/wrote-{rank}", "a") as file:
    file.write(f"{lines}\n")
if what == "hang":
    import torch
    import torch.distributed as dist

    monitor = None
    if "FT_RANK_MONITOR_IPC_SOCKET" in os.environ:  # ft_launcher knows of steps what it is told
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        monitor = RankMonitorClient()
        monitor.init_workload_monitoring()
    dist.init_process_group("gloo")
    for step in range(40):
        if step == 20 and rank == "1" and not os.path.exists(f"{folder}/hung"):
            with open(f"{folder}/hung", "w") as file:
                file.write(str(time.monotonic_ns()))
            time.sleep(3600)
        dist.all_reduce(torch.ones(1))
        if monitor is not None:
            monitor.send_heartbeat()
        time.sleep(0.1)  # the work of a step
    dist.destroy_process_group()
    sys.exit()
if what == "stay":
    while True:
        signal.pause()
if rank == "1" and not os.path.exists(f"{folder}/crashed"):
    while not os.path.exists(f"{folder}/wrote-0"):
        time.sleep(0.01)  # the other is ended with this one, and would not count its lines
    with open(f"{folder}/crashed", "w") as file:
        file.write(str(time.monotonic_ns()))
    os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(0.5)  # the other rank is still at work when rank 1 crashes
