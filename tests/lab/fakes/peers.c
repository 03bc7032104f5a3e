/* The CUDA driver of libcuda.c, with what peercheck.py needs beside it: copies between GPUs.
 *
 *   FAKE_CUDA_PEERS     "GPU:GPU:WAY:WHAT,…": what a transfer does; WAY is copy, read or write;
 *                       WHAT a number to return, "hang", "crash", "wrong" (one bit) or "lost"
 *                       (success, and nothing arrives)
 *   FAKE_CUDA_APART     set: no GPU has access to another one's memory
 *   FAKE_CUDA_NO_JIT    set: modules cannot be loaded
 */
#include "libcuda.c"

static struct { uint64_t at; int gpu; } owners[256];
static int owned;

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 75 ? 9 : 0; /* compute capability 9.0, compute mode default */
    return 0;
}

int cuDeviceTotalMem_v2(size_t *total, int device) {
    (void)device;
    *total = (size_t)141 << 30;
    return 0;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) {
    memcpy((void *)(uintptr_t)to, from, size);
    owners[owned].at = to;
    owners[owned++].gpu = current;
    return 0;
}

int cuMemsetD8_v2(uint64_t memory, unsigned char value, size_t size) {
    memset((void *)(uintptr_t)memory, value, size);
    return 0;
}

int cuDeviceCanAccessPeer(int *can, int device, int peer) {
    (void)device, (void)peer;
    *can = getenv("FAKE_CUDA_APART") == NULL;
    return 0;
}

int cuCtxEnablePeerAccess(void *context, unsigned flags) {
    (void)context, (void)flags;
    return 0;
}

static char kept[4 << 20]; /* the target before a transfer */

static int transfer(uint64_t to, uint64_t from, size_t size, int ours, int other, const char *way) {
    char text[512], *rest = text, *entry, wanted[64];
    snprintf(text, sizeof text, "%s", getenv("FAKE_CUDA_PEERS") ? getenv("FAKE_CUDA_PEERS") : "");
    snprintf(wanted, sizeof wanted, "%d:%d:%s:", ours, other, way);
    char *arrived = (char *)(uintptr_t)to;
    memmove(kept, arrived, size);
    memcpy(arrived, (void *)(uintptr_t)from, size);
    while ((entry = strsep(&rest, ",")))
        if (strncmp(entry, wanted, strlen(wanted)) == 0) {
            const char *what = entry + strlen(wanted);
            if (strcmp(what, "wrong") == 0) arrived[4711] ^= 4;
            else if (strcmp(what, "lost") == 0) memcpy(arrived, kept, size);
            else return behave(what);
        }
    return 0;
}

int cuMemcpyPeer(uint64_t to, void *there, uint64_t from, void *here, size_t size) {
    int ours = (int)(intptr_t)here - 1, other = (int)(intptr_t)there - 1;
    return transfer(to, from, size, ours, other, "copy");
}

int cuModuleLoadData(void **module, const void *image) {
    *module = (void *)image;
    return getenv("FAKE_CUDA_NO_JIT") ? 221 : 0;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = module;
    return strcmp(name, "words") == 0 ? 0 : 500;
}

/* Whose memory a source buffer is; a target has none of its own here. */
static int owner(uint64_t at) {
    for (int i = 0; i < owned; i++)
        if (owners[i].at == at) return owners[i].gpu;
    return -1;
}

/* A kernel that reads a peer's source writes into its own target, and one that reads its own
 * source writes into a peer's: which peer's, the target that was cleared last tells. */
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b,
                   unsigned c, unsigned shared, void *stream, void **arguments, void **extra) {
    uint64_t to = *(uint64_t *)arguments[0], from = *(uint64_t *)arguments[1];
    size_t size = 4 * (size_t) * (unsigned *)arguments[2];
    int whose = owner(from);
    (void)function, (void)x, (void)y, (void)z, (void)a, (void)b, (void)c;
    (void)shared, (void)stream, (void)extra;
    if (whose != current) return transfer(to, from, size, current, whose, "read");
    return transfer(to, from, size, current, current == 0, "write"); /* of two GPUs */
}
