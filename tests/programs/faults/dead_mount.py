"""A file system in user space (FUSE) that answers until a file is open, and then never again.

`dead_mount.py DIRECTORY [taken]` needs root and /dev/fuse, no library: it speaks the kernel's
protocol (linux/fuse.h, 7.31) itself. The directory has one file, `data`. After the mount it writes
a line. With `taken` it takes the read and does not answer it: then no signal ends who reads, not
even SIGKILL.
"""

import ctypes
import os
import signal
import struct
import sys

LOOKUP, GETATTR, OPEN, READ, INIT, FLUSH, OPENDIR = 1, 3, 14, 15, 26, 25, 27
ROOT, FILE = 1, 2
NO_FLUSH = 1 << 5  # else who is killed waits for the answer to its close (Linux 5.16)


def attributes(node: int) -> bytes:
    mode = 0o40755 if node == ROOT else 0o100644
    return struct.pack("<6Q10I", node, 4096, 8, *3 * [0], *3 * [0], mode, 1, *2 * [0], 0, 4096, 0)


def answer(operation: int, node: int) -> bytes | int:
    if operation == INIT:
        return struct.pack("<4I2H2I2H8I", 7, 31, 4096, 0, 12, 9, 4096, 1, 256, 0, *8 * [0])[:64]
    if operation == LOOKUP:
        return struct.pack("<4Q2I", FILE, 0, 60, 60, 0, 0) + attributes(FILE)
    if operation == GETATTR:
        return struct.pack("<Q2I", 60, 0, 0) + attributes(node)
    if operation in (OPEN, OPENDIR):
        return struct.pack("<QII", 1, 0 if taken else NO_FLUSH, 0)
    return 38  # ENOSYS


taken = sys.argv[2:] == ["taken"]
device = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"dead", os.fsencode(sys.argv[1]), b"fuse", 0, options):
    sys.exit(os.strerror(ctypes.get_errno()))
print("mounted", flush=True)
while True:
    request = os.read(device, 1 << 17)
    _, operation, unique, node = struct.unpack_from("<IIQQ", request)
    if operation == READ and taken:
        signal.pause()
    reply = answer(operation, node)
    body, error = (reply, 0) if isinstance(reply, bytes) else (b"", -reply)
    os.write(device, struct.pack("<IiQ", 16 + len(body), error, unique) + body)
    if operation == OPEN and not taken:
        signal.pause()
