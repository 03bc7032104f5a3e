/* NVML for tests: it answers what a file says, which lies beside the library as it was found.
 *
 * Each line of `answers` is a GPU's number (* for what is about none), a function without
 * nvmlDevice, and its answer: numbers or a text, !15 for that status, "hang" or "crash". What has no
 * line is not supported; nvmlInit, the counts and the handles work without. The nth process (from
 * 0) reads `answers.n` where there is one; `asked` grows by a byte for each.
 *
 * The structures are nvml.h's of CUDA 13.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef unsigned int u32;
typedef unsigned long long u64;
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, OTHER_VERSION = 25 };
static char path[4096], text[65536];

static void locate(void) {
    Dl_info info;
    char name[4096];
    struct stat seen = {0};
    dladdr((void *)locate, &info);
    snprintf(name, sizeof name, "%s", info.dli_fname);
    *strrchr(name, '/') = 0;
    snprintf(path, sizeof path, "%.4000s/asked", name);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    fstat(file, &seen);
    if (write(file, ".", 1) < 0) abort();
    close(file);
    snprintf(path, sizeof path, "%.4000s/answers.%ld", name, (long)seen.st_size);
    if (access(path, R_OK)) snprintf(path, sizeof path, "%.4000s/answers", name);
}

/* The status of a function for a GPU (-1: for none); `text` is its answer then. */
static int tell(int gpu, const char *function) {
    char start[128], line[sizeof text];
    FILE *file = fopen(path, "r");
    if (gpu < 0) snprintf(start, sizeof start, "* %s ", function);
    else snprintf(start, sizeof start, "%d %s ", gpu, function);
    int status = NOT_SUPPORTED;
    while (file && fgets(line, sizeof line, file)) {
        if (strncmp(line, start, strlen(start))) continue;
        line[strcspn(line, "\n")] = 0;
        strcpy(text, line + strlen(start));
        if (!strcmp(text, "hang")) for (;;) pause();
        if (!strcmp(text, "crash")) abort();
        status = *text == '!' ? atoi(text + 1) : OK;
        break;
    }
    if (file) fclose(file);
    return status;
}

static int number_of(void *device) { return (int)(intptr_t)device - 1; }

/* Read so many numbers of `text`. */
static void numbers(u64 *into, int count) {
    char *rest = text;
    for (int n = 0; n < count; n++) into[n] = strtoull(rest, &rest, 10);
}

static int tell32(void *device, const char *function, int count, u32 **into) {
    u64 found[8] = {0};
    int status = tell(number_of(device), function);
    if (status) return status;
    numbers(found, count);
    for (int n = 0; n < count; n++) *into[n] = (u32)found[n];
    return OK;
}

static int tell_text(int gpu, const char *function, char *into, u32 size) {
    int status = tell(gpu, function);
    if (!status) snprintf(into, size, "%s", text);
    return status;
}

#define NUMBER(NAME) \
    int nvmlDevice##NAME(void *d, u32 *a) { return tell32(d, #NAME, 1, (u32 *[]){a}); }
#define PAIR(NAME) \
    int nvmlDevice##NAME(void *d, u32 *a, u32 *b) { return tell32(d, #NAME, 2, (u32 *[]){a, b}); }
NUMBER(GetPersistenceMode)
NUMBER(GetComputeMode)
NUMBER(GetMaxPcieLinkWidth)
NUMBER(GetCurrPcieLinkWidth)
NUMBER(GetPowerUsage)
NUMBER(GetEnforcedPowerLimit)
NUMBER(GetRetiredPagesPendingStatus)
PAIR(GetMigMode)
PAIR(GetEccMode)
PAIR(GetCudaComputeCapability)

int nvmlDeviceGetTemperature(void *d, int sensor, u32 *a) {
    return sensor ? INVALID : tell32(d, "GetTemperature", 1, (u32 *[]){a});
}

int nvmlDeviceGetClockInfo(void *d, int clock, u32 *a) {
    return clock != 1 ? INVALID : tell32(d, "GetClockInfo", 1, (u32 *[]){a});
}

int nvmlDeviceGetMaxClockInfo(void *d, int clock, u32 *a) {
    return clock != 1 ? INVALID : tell32(d, "GetMaxClockInfo", 1, (u32 *[]){a});
}

int nvmlDeviceGetRemappedRows(void *d, u32 *a, u32 *b, u32 *c, u32 *e) {
    return tell32(d, "GetRemappedRows", 4, (u32 *[]){a, b, c, e});
}

int nvmlDeviceGetUtilizationRates(void *d, u32 *both) {
    return tell32(d, "GetUtilizationRates", 2, (u32 *[]){both, both + 1});
}

int nvmlDeviceGetRetiredPages(void *d, int cause, u32 *count, u64 *pages) {
    u32 room = pages ? *count : 0;
    int status = tell32(d, "GetRetiredPages", 1, (u32 *[]){count});
    if (status || cause != 1) return status ? status : INVALID;
    return *count > room ? 7 : OK;
}

#define REASONS(NAME) \
    int nvmlDevice##NAME(void *d, u64 *reasons) { \
        int status = tell(number_of(d), #NAME); \
        if (!status) numbers(reasons, 1); \
        return status; \
    }
REASONS(GetCurrentClocksEventReasons)
REASONS(GetCurrentClocksThrottleReasons)

int nvmlDeviceGetMemoryErrorCounter(void *d, int type, int counter, int where, u64 *count) {
    char name[64];
    snprintf(name, sizeof name, "GetMemoryErrorCounter.%d.%d.%d", type, counter, where);
    int status = tell(number_of(d), name);
    if (!status) numbers(count, 1);
    return status;
}

int nvmlDeviceValidateInforom(void *d) { return tell(number_of(d), "ValidateInforom"); }

/* Structures */

#define VERSION(TYPE, NUMBER) (u32)(sizeof(TYPE) | (NUMBER) << 24)

typedef struct { u32 version; u64 total, reserved, free, used; } Memory;
int nvmlDeviceGetMemoryInfo_v2(void *d, Memory *into) {
    if (into->version != VERSION(Memory, 2)) return OTHER_VERSION;
    int status = tell(number_of(d), "GetMemoryInfo_v2");
    if (!status) numbers(&into->total, 4);
    return status;
}

int nvmlDeviceGetMemoryInfo(void *d, u64 *into) {
    int status = tell(number_of(d), "GetMemoryInfo");
    if (!status) numbers(into, 3);
    return status;
}

typedef struct {
    u32 version;
    u64 counts[11]; /* ever: parity, SEC-DED, corrected; since the start: the same; 5 units */
    u32 exceeded;
} Sram;
int nvmlDeviceGetSramEccErrorStatus(void *d, Sram *into) {
    if (into->version != VERSION(Sram, 1)) return OTHER_VERSION;
    u64 found[12];
    int status = tell(number_of(d), "GetSramEccErrorStatus");
    if (status) return status;
    numbers(found, 12);
    memcpy(into->counts, found, sizeof into->counts);
    into->exceeded = (u32)found[11];
    return OK;
}

typedef struct { u32 version, channel, tpc; } Repair;
int nvmlDeviceGetRepairStatus(void *d, Repair *into) {
    if (into->version != VERSION(Repair, 1)) return OTHER_VERSION;
    return tell32(d, "GetRepairStatus", 2, (u32 *[]){&into->channel, &into->tpc});
}

typedef struct { u32 version, sensor; int degrees; } Temperature;
int nvmlDeviceGetTemperatureV(void *d, Temperature *into) {
    if (into->version != VERSION(Temperature, 1)) return OTHER_VERSION;
    if (into->sensor) return INVALID;
    return tell32(d, "GetTemperatureV", 1, (u32 *[]){(u32 *)&into->degrees});
}

typedef struct { u32 version, memory; } Unrepairable;
int nvmlDeviceGetUnrepairableMemoryFlag_v1(void *d, Unrepairable *into) {
    if (into->version != VERSION(Unrepairable, 1)) return OTHER_VERSION;
    return tell32(d, "GetUnrepairableMemoryFlag_v1", 1, (u32 *[]){&into->memory});
}

typedef struct {
    u32 version;
    unsigned char cluster[16];
    u32 status, clique;
    unsigned char state;
    u32 mask;
    unsigned char health;
} Fabric;
int nvmlDeviceGetGpuFabricInfoV(void *d, Fabric *into) { /* "2 …": a driver of version 2 alone */
    u64 found[4];
    int status = tell(number_of(d), "GetGpuFabricInfoV");
    if (status) return status;
    numbers(found, 4);
    u32 known = found[0] == 2 ? 36 | 2 << 24 : VERSION(Fabric, 3);
    if (into->version != known) return OTHER_VERSION;
    into->status = (u32)found[1];
    into->state = (unsigned char)found[2];
    if (found[0] == 3) into->health = (unsigned char)found[3];
    return OK;
}

typedef struct {
    u32 number, scope;
    long long at, took;
    u32 type, status;
    u64 value;
} Value;
int nvmlDeviceGetFieldValues(void *d, int count, Value *into) {
    for (int n = 0; n < count; n++) {
        char name[64];
        snprintf(name, sizeof name, "value.%u", into[n].number);
        into[n].status = (u32)tell(number_of(d), name);
        if (!into[n].status) numbers(&into[n].value, 1);
    }
    return OK;
}

typedef struct { char legacy[16]; u32 ids[5]; char bus[32]; } Pci;
int nvmlDeviceGetPciInfo_v3(void *d, Pci *into) {
    return tell_text(number_of(d), "GetPciInfo_v3", into->bus, sizeof into->bus);
}

typedef struct { u32 pid; u64 used; u32 gi, ci; } Process;
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, u32 *count, Process *into) {
    int status = tell(number_of(d), "GetComputeRunningProcesses_v3");
    char *rest = text, *end = text + strlen(text);
    u32 room = *count;
    *count = 0;
    while (!status && rest < end) { /* "71 1024 72 18446744073709551615": pid and bytes */
        if (*count == room) return 7;
        into[*count].pid = (u32)strtoull(rest, &rest, 10);
        into[(*count)++].used = strtoull(rest, &rest, 10);
    }
    return status;
}

/* What is about no GPU, and about two */

int nvmlInit_v2(void) {
    locate();
    int status = tell(-1, "Init_v2");
    return status == NOT_SUPPORTED ? OK : status;
}

__attribute__((destructor)) static void end(void) {
    if (*path) tell(-1, "end");
}

const char *nvmlErrorString(int status) {
    switch (status) {
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 6: return "Not Found";
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    case 999: return "Unknown Error";
    default: return "Some Error";
    }
}

int nvmlSystemGetDriverVersion(char *into, u32 size) {
    return tell_text(-1, "driver", into, size);
}

int nvmlSystemGetCudaDriverVersion_v2(int *into) {
    u64 found = 0;
    int status = tell(-1, "cuda");
    if (!status) numbers(&found, 1);
    *into = (int)found;
    return status;
}

int nvmlDeviceGetCount_v2(u32 *count) {
    int status = tell(-1, "GetCount_v2");
    u64 found = 0;
    if (!status) numbers(&found, 1);
    *count = (u32)found;
    return status;
}

int nvmlDeviceGetHandleByIndex_v2(u32 index, void **device) {
    *device = (void *)(intptr_t)(index + 1);
    int status = tell((int)index, "GetHandle");
    return status == NOT_SUPPORTED ? OK : status;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    u32 count;
    nvmlDeviceGetCount_v2(&count);
    for (u32 index = 0; index < count; index++) {
        int status = tell((int)index, "GetPciInfo_v3");
        if (!status && !strcasecmp(text + strlen(text) - strlen(bus), bus))
            return nvmlDeviceGetHandleByIndex_v2(index, device);
    }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(void *d, u32 *index) {
    *index = (u32)number_of(d);
    return OK;
}

int nvmlDeviceGetName(void *d, char *into, u32 size) {
    return tell_text(number_of(d), "GetName", into, size);
}

int nvmlDeviceGetUUID(void *d, char *into, u32 size) {
    return tell_text(number_of(d), "GetUUID", into, size);
}

int nvmlDeviceGetNvLinkState(void *d, u32 link, u32 *state) { /* "1 0": the second one is down */
    int status = tell(number_of(d), "GetNvLinkState");
    if (status) return status;
    if (link * 2 >= strlen(text)) return INVALID;
    *state = text[link * 2] == '1';
    return OK;
}

int nvmlDeviceGetP2PStatus(void *a, void *b, int what, u32 *found) {
    char name[64];
    snprintf(name, sizeof name, "GetP2PStatus.%d.%d", number_of(b), what);
    return tell32(a, name, 1, (u32 *[]){found});
}
