"""Join two network interfaces, late and with losses, as `tc … netem` does where the kernel has it.

    lossy_link.py ONE OTHER DELAY_MS LOSS

Every frame that arrives at one leaves at the other DELAY_MS later, in the same order; of a hundred
frames LOSS are lost, by chance. It says `up` once it does, and ends when an interface has gone.
"""

import collections
import contextlib
import random
import select
import socket
import sys
import time

# linux/if_packet.h: frames come with what the sender left to the card (checksum, segments), and
# leave with it; what this program sends does not come back to it.
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
EVERY_PROTOCOL = 3
FRAME_BYTES = 1 << 17

*names, delay_ms, loss = sys.argv[1:]
ends = []
for name in names:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.bind((name, EVERY_PROTOCOL))
    ends.append(end)
other = dict(zip(ends, reversed(ends), strict=True))
waiting = collections.deque()  # (when it leaves, by which end, the frame)
print("up", flush=True)
with contextlib.suppress(OSError):  # an interface has gone
    while True:
        limit_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], limit_s)[0]:
            frame = end.recv(FRAME_BYTES)
            if random.random() * 100 >= float(loss):
                waiting.append((time.monotonic() + float(delay_ms) / 1000, other[end], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, frame = waiting.popleft()
            end.send(frame)
