/* A CUDA driver for tests: memory is the host's, and it fails as the environment says.
 *
 *   FAKE_CUDA_GPUS     how many GPUs the machine has (2)
 *   FAKE_CUDA_INIT     what cuInit returns: a number, "hang" or "crash"
 *   FAKE_CUDA_INIT_MS  how long cuInit takes
 *   FAKE_CUDA_LOST     number of a GPU with which cuInit fails: "2:101"
 *   FAKE_CUDA_BAD      "GPU:CALL:WHAT,…": what a call on a GPU does: a number to return, "hang",
 *                      "crash", or for read "garbage"; CALL is context, memory, write, copy, read
 *                      or release
 *   FAKE_CUDA_MIG      set: GPU 0 is a MIG instance
 *   FAKE_CUDA_LOG      a file that gets a line for each process that calls cuInit
 *
 * CUDA_VISIBLE_DEVICES works as in the real one, for numbers and UUIDs.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST 64
static int gpus, shown[MOST], count;
static __thread int current;

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

static int behave(const char *what) {
    if (strcmp(what, "hang") == 0)
        for (;;) pause();
    if (strcmp(what, "crash") == 0) abort();
    return atoi(what);
}

/* What FAKE_CUDA_BAD says of a call on a GPU; "0" for nothing. */
static const char *told(int gpu, const char *call) {
    static __thread char text[512];
    char *entry, *rest = text;
    snprintf(text, sizeof text, "%s", getenv("FAKE_CUDA_BAD") ? getenv("FAKE_CUDA_BAD") : "");
    while ((entry = strsep(&rest, ","))) {
        const char *at = strsep(&entry, ":"), *name = strsep(&entry, ":");
        if (name && entry && atoi(at) == gpu && strcmp(name, call) == 0) return entry;
    }
    return "0";
}

static void uuid_text(int gpu, char *into) {
    int b = 0x11 * (gpu + 1) & 0xff;
    sprintf(into, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
            b, b, b, b, b, b, b, b, b, b, b, b, b, b, b, b);
}

static int find(const char *entry) {
    char own[64];
    if (strncmp(entry, "GPU-", 4) != 0) {
        char *end;
        long n = strtol(entry, &end, 10);
        return end == entry || n < 0 || n >= gpus ? -1 : (int)n;
    }
    for (int gpu = 0; gpu < gpus; gpu++) {
        uuid_text(gpu, own);
        if (strncmp(own, entry, strlen(entry)) == 0) return gpu;
    }
    return -1;
}

static void choose(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    char text[2048], *rest = text, *entry;
    if (!visible) {
        for (; count < gpus && count < MOST; count++) shown[count] = count;
        return;
    }
    snprintf(text, sizeof text, "%s", visible);
    while ((entry = strsep(&rest, ",")) && count < MOST) {
        int gpu = find(entry);
        if (gpu < 0) return;
        shown[count++] = gpu;
    }
}

int cuInit(unsigned flags) {
    const char *init = getenv("FAKE_CUDA_INIT"), *lost = getenv("FAKE_CUDA_LOST");
    const char *log = getenv("FAKE_CUDA_LOG");
    (void)flags;
    if (log) {
        FILE *file = fopen(log, "a");
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        fprintf(file, "%s\n", visible ? visible : "-");
        fclose(file);
    }
    usleep(1000 * number("FAKE_CUDA_INIT_MS", 0));
    gpus = number("FAKE_CUDA_GPUS", 2);
    choose();
    if (init && *init) return behave(init);
    for (int i = 0; lost && i < count; i++)
        if (shown[i] == atoi(lost)) return atoi(strchr(lost, ':') + 1);
    return 0;
}

int cuDriverGetVersion(int *version) { *version = 13000; return 0; }

int cuDeviceGetCount(int *found) {
    *found = gpus > MOST || gpus < 0 ? gpus : count;
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal < count ? shown[ordinal] : -1;
    return *device < 0 ? 101 : 0;
}

int cuDeviceGetName(char *name, int size, int device) {
    int mig = device == 0 && getenv("FAKE_CUDA_MIG");
    snprintf(name, size, "NVIDIA Fake%s", mig ? " MIG 1g.5gb" : "");
    return 0;
}

int cuDeviceGetPCIBusId(char *bus, int size, int device) {
    snprintf(bus, size, "0000:%02X:00.0", 0x1A + device);
    return 0;
}

int cuDeviceGetUuid(unsigned char *uuid, int device) {
    memset(uuid, 0x11 * (device + 1), 16);
    return 0;
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    memset(uuid, device == 0 && getenv("FAKE_CUDA_MIG") ? 0xEE : 0x11 * (device + 1), 16);
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(intptr_t)(device + 1);
    return behave(told(device, "context"));
}

int cuDevicePrimaryCtxRelease_v2(int device) { return behave(told(device, "release")); }

int cuCtxSetCurrent(void *context) { current = (int)(intptr_t)context - 1; return 0; }

int cuCtxSynchronize(void) { return 0; }

int cuMemAlloc_v2(uint64_t *memory, size_t size) {
    *memory = (uint64_t)(uintptr_t)malloc(size);
    return behave(told(current, "memory"));
}

int cuMemFree_v2(uint64_t memory) { free((void *)(uintptr_t)memory); return 0; }

int cuMemsetD32_v2(uint64_t memory, unsigned value, size_t words) {
    uint32_t *at = (uint32_t *)(uintptr_t)memory;
    for (size_t i = 0; i < words; i++) at[i] = value;
    return behave(told(current, "write"));
}

int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t size) {
    memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, size);
    return behave(told(current, "copy"));
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
    const char *what = told(current, "read");
    memcpy(to, (void *)(uintptr_t)from, size);
    if (strcmp(what, "garbage") == 0) {
        ((char *)to)[4711] ^= 4; /* one bit */
        return 0;
    }
    return behave(what);
}

int cuGetErrorName(int code, const char **name) {
    static const struct { int code; const char *name; } known[] = {
        {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {46, "CUDA_ERROR_DEVICE_UNAVAILABLE"},
        {101, "CUDA_ERROR_INVALID_DEVICE"}, {214, "CUDA_ERROR_ECC_UNCORRECTABLE"},
        {719, "CUDA_ERROR_LAUNCH_FAILED"}, {802, "CUDA_ERROR_SYSTEM_NOT_READY"},
        {999, "CUDA_ERROR_UNKNOWN"}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].code == code) { *name = known[i].name; return 0; }
    return 1;
}
