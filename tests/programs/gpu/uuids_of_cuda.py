import ctypes

cuda = ctypes.CDLL("libcuda.so.1")
count = ctypes.c_int(0)
if cuda.cuInit(0) == 0:
    cuda.cuDeviceGetCount(ctypes.byref(count))
for device in range(count.value):
    raw = (ctypes.c_ubyte * 16)()
    cuda.cuDeviceGetUuid_v2(raw, device)
    h = bytes(raw).hex()
    print("GPU-" + "-".join([h[:8], h[8:12], h[12:16], h[16:20], h[20:]]))
