/* A fake libnvidia-ml.so.1: GPUs, and memory that belongs to real processes.
 *
 * What it plays is read, at each nvmlInit, from the file beside it with ".txt" behind its own name. One fact a line:
 *
 *   driver VERSION | cuda NUMBER | release_ms NUMBER
 *   gpu INDEX TOTAL RESERVED MINOR BUS NAME...                 bytes; the name may hold spaces
 *   set INDEX WHAT NUMBER                                      ecc pending failed recovery reasons width mode private; mig: instances
 *   hold INDEX LISTED_PID BYTES KIND KEEPER:START[,...]        compute, graphics or mps; counts while one of the keepers lives,
 *                                                              and release_ms longer; START is field 22 of its stat; BYTES of 2^64-1
 *                                                              are listed so and count nothing; KIND/N belongs to MIG instance N,
 *                                                              and is hidden from the whole GPU's list where `private` is set
 *   unowned INDEX BYTES                                        memory that no process holds
 *   p2p FROM TO STATUS
 *   fail FUNCTION INDEX CODE | hang FUNCTION INDEX SECONDS | crash FUNCTION INDEX 0       INDEX -1: any GPU
 *
 * Compiled with -DOLD it lacks what drivers before branch 510 lack: memory version 2 and the newer process lists. With -DWIDE its
 * lists of version 3 have the lines of drivers 535.43 to 535.86. With -DNAME=hidden it lacks the function NAME.
 * With -DLOUD it writes to stdout and stderr, as some builds of drivers do.
 * Layouts and numbers are those of NVIDIA's nvml.h.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, TOO_SMALL = 7 };
enum { RECOVERY_FIELD = 230 };                   /* NVML_FI_DEV_GET_GPU_RECOVERY_ACTION */
enum { GPUS = 64, HOLDS = 4096, FACTS = 256, KEEPERS = 4096 };
typedef unsigned long long u64;

typedef struct { int there, minor, bus; u64 total, reserved, unowned; char name[96]; u64 ecc, pending, failed, recovery, reasons, width, mig, mode, private; } Gpu;
typedef struct { int gpu, pid, instance; u64 bytes; char kind[16], keepers[KEEPERS]; } Hold;
typedef struct { char what[8], function[64]; int gpu, number; } Fault;

static Gpu gpus[GPUS];
static Hold *holds;
static Fault faults[FACTS];
static int links[GPUS][GPUS];
static int n_gpus, n_holds, n_faults, cuda = 13000, release_ms, started;
static char driver[64] = "580.65.06", here[4000];

static u64 start_of(int pid)                     /* 0: it has ended, a zombie included */
{
    char path[64], text[1024], *at;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    size_t got = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[got] = 0;
    at = strrchr(text, ')');
    if (!at || at[2] == 'Z' || at[2] == 'X') return 0;
    for (int field = 2; field < 22 && at; field++) at = strchr(at + 1, ' ');
    return at ? strtoull(at, 0, 10) : 0;
}

static int alive(const char *keepers)
{
    char copy[KEEPERS], *save = 0;
    strcpy(copy, keepers);
    for (char *one = strtok_r(copy, ",", &save); one; one = strtok_r(0, ",", &save)) {
        int pid = 0;
        u64 start = 0;
        if (sscanf(one, "%d:%llu", &pid, &start) == 2 && start_of(pid) == start) return 1;
    }
    return 0;
}

static int counts(Hold *hold)                    /* while somebody lives, and release_ms after that was first seen to be over */
{
    char path[4200];
    struct stat at;
    struct timespec now;
    if (alive(hold->keepers)) return 1;
    snprintf(path, sizeof path, "%s.gone.%d.%d.%.32s", here, hold->gpu, hold->pid, hold->keepers);
    int file = open(path, O_CREAT | O_EXCL | O_WRONLY, 0644);
    if (file >= 0) close(file);
    if (stat(path, &at)) return 0;
    clock_gettime(CLOCK_REALTIME, &now);
    double ms = (now.tv_sec - at.st_mtim.tv_sec) * 1e3 + (now.tv_nsec - at.st_mtim.tv_nsec) / 1e6;
    return ms < release_ms;
}

static u64 used(int gpu)
{
    u64 bytes = gpus[gpu].unowned;
    for (int i = 0; i < n_holds; i++)
        if (holds[i].gpu == gpu && ~holds[i].bytes && counts(&holds[i])) bytes += holds[i].bytes;
    return bytes;
}

static void read_file(void)
{
    static char line[KEEPERS + 256];
    char path[4096], what[16], rest[KEEPERS];
    int a, b, c;
    u64 x, y;
    n_gpus = n_holds = n_faults = 0;
    memset(gpus, 0, sizeof gpus);
    memset(links, 0, sizeof links);
    if (!holds) holds = malloc(HOLDS * sizeof *holds);
    snprintf(path, sizeof path, "%s.txt", here);
    FILE *file = fopen(path, "r");
    if (!file) abort();
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        sscanf(line, "driver %63s", driver);
        sscanf(line, "cuda %d", &cuda);
        sscanf(line, "release_ms %d", &release_ms);
        if (sscanf(line, "gpu %d %llu %llu %d %d %95[^\n]", &a, &x, &y, &b, &c, rest) == 6) {
            gpus[a] = (Gpu){.there = 1, .total = x, .reserved = y, .minor = b, .bus = c, .width = 16};
            snprintf(gpus[a].name, sizeof gpus[a].name, "%.95s", rest);
            n_gpus = a + 1 > n_gpus ? a + 1 : n_gpus;
        } else if (sscanf(line, "set %d %15s %llu", &a, what, &x) == 3) {
            struct { const char *name; u64 *at; } fields[] = {
                {"ecc", &gpus[a].ecc}, {"pending", &gpus[a].pending}, {"failed", &gpus[a].failed}, {"recovery", &gpus[a].recovery},
                {"reasons", &gpus[a].reasons}, {"width", &gpus[a].width}, {"mig", &gpus[a].mig}, {"mode", &gpus[a].mode},
                {"private", &gpus[a].private}};
            for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
                if (!strcmp(fields[i].name, what)) *fields[i].at = x;
        } else if (n_holds < HOLDS && sscanf(line, "hold %d %d %llu %15s %4095s", &a, &b, &x, what, rest) == 5) {
            char *instance = strchr(what, '/');
            holds[n_holds] = (Hold){.gpu = a, .pid = b, .bytes = x, .instance = instance ? atoi(instance + 1) : -1};
            if (instance) *instance = 0;
            strcpy(holds[n_holds].kind, what);
            strcpy(holds[n_holds++].keepers, rest);
        } else if (sscanf(line, "unowned %d %llu", &a, &x) == 2) gpus[a].unowned = x;
        else if (sscanf(line, "p2p %d %d %d", &a, &b, &c) == 3) links[a][b] = c;
        else if (n_faults < FACTS && sscanf(line, "%7s %63s %d %d", faults[n_faults].what, faults[n_faults].function,
                                            &faults[n_faults].gpu, &faults[n_faults].number) == 4) n_faults++;
    }
    fclose(file);
}

static int fault(const char *function, int gpu)  /* what the file says must go wrong with this call */
{
    if (!started) return UNINITIALIZED;
    for (int i = 0; i < n_faults; i++) {
        if (strcmp(faults[i].function, function) || (faults[i].gpu != -1 && faults[i].gpu != gpu)) continue;
        if (faults[i].what[0] == 'h') sleep(faults[i].number);
        if (faults[i].what[0] == 'c') abort();
        if (faults[i].what[0] == 'f') return faults[i].number;
    }
    return OK;
}

/* A device is its index + 1; an instance of it has its own number + 1 in the next byte. */
static int index_of(void *device) { return (int)((long)device & 255) - 1; }
static int instance_of(void *device) { return (int)((long)device >> 8) - 1; }
#define CHECK(gpu) do { int code_ = fault(__func__, gpu); if (code_) return code_; } while (0)

#ifdef LOUD
__attribute__((constructor)) static void loud(void) { dprintf(1, "NVML says hello\n"); dprintf(2, "and again\n"); }
#endif

int nvmlInit_v2(void)
{
    Dl_info info;
    if (!dladdr((void *)nvmlInit_v2, &info)) abort();
    snprintf(here, sizeof here, "%s", info.dli_fname);
    read_file();
    started = 1;
    CHECK(-1);
    return OK;
}
int nvmlShutdown(void) { started = 0; return OK; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { CHECK(-1); snprintf(text, size, "%s", driver); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { CHECK(-1); *version = cuda; return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { CHECK(-1); *count = n_gpus; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    CHECK((int)index);
    if (index >= (unsigned)n_gpus) return INVALID;
    *device = (void *)(long)(index + 1);
    return OK;
}
int nvmlDeviceGetName(void *device, char *text, unsigned size) { CHECK(index_of(device)); snprintf(text, size, "%s", gpus[index_of(device)].name); return OK; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) { CHECK(index_of(device)); snprintf(text, size, "GPU-fake-%d", index_of(device)); return OK; }
int nvmlDeviceGetMinorNumber(void *device, unsigned *minor) { CHECK(index_of(device)); *minor = gpus[index_of(device)].minor; return OK; }

typedef struct { char old[16]; unsigned domain, bus, device, ids, subsystem; char id[32]; } Pci;
int nvmlDeviceGetPciInfo_v3(void *device, Pci *pci)
{
    CHECK(index_of(device));
    memset(pci, 0, sizeof *pci);
    pci->bus = gpus[index_of(device)].bus;
    snprintf(pci->id, sizeof pci->id, "00000000:%02X:00.0", pci->bus);
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *device, u64 memory[3])     /* total, free, used: what the driver reserves is used */
{
    CHECK(index_of(device));
    Gpu *gpu = &gpus[index_of(device)];
    memory[0] = gpu->total;
    memory[2] = used(index_of(device)) + gpu->reserved;
    memory[1] = gpu->total - memory[2];
    return OK;
}

/* Versions 2 and 3; version 1 ends after bytes, and the last number is there with -DWIDE alone. */
typedef struct { unsigned pid; u64 bytes; unsigned instance, compute; u64 confidential; } Line;
static int list(void *device, const char *kind, unsigned *count, char *lines, size_t size)
{
    unsigned found = 0;
    int gpu = index_of(device), instance = instance_of(device);
    if (gpus[gpu].private && instance < 0) return NO_PERMISSION;
    for (int i = 0; i < n_holds; i++) {
        if (holds[i].gpu != gpu || strcmp(holds[i].kind, kind) || !holds[i].pid || !counts(&holds[i])) continue;
        if (instance >= 0 && holds[i].instance != instance) continue;
        if (found < *count) {
            Line line = {holds[i].pid, holds[i].bytes, holds[i].instance, -1, 0};
            memcpy(lines + found * size, &line, size);
        }
        found++;
    }
    int code = found > *count ? TOO_SMALL : OK;
    *count = found;
    return code;
}
#define LIST(name, kind, size) int name(void *device, unsigned *count, char *lines) \
    { CHECK(index_of(device)); return list(device, kind, count, lines, size); }
LIST(nvmlDeviceGetComputeRunningProcesses, "compute", 16)
LIST(nvmlDeviceGetGraphicsRunningProcesses, "graphics", 16)
#ifndef OLD
#ifdef WIDE
enum { LINE = sizeof(Line) };
int nvmlDeviceGetConfComputeMemSizeInfo(void *device, void *sizes) { (void)device; (void)sizes; return NOT_SUPPORTED; }
#else
enum { LINE = sizeof(Line) - 8 };
#endif
LIST(nvmlDeviceGetComputeRunningProcesses_v2, "compute", sizeof(Line) - 8)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics", sizeof(Line) - 8)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, "mps", sizeof(Line) - 8)
LIST(nvmlDeviceGetComputeRunningProcesses_v3, "compute", LINE)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics", LINE)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps", LINE)
typedef struct { unsigned version; u64 total, reserved, free, used; } Memory;
int nvmlDeviceGetMemoryInfo_v2(void *device, Memory *memory)
{
    CHECK(index_of(device));
    if (memory->version != (sizeof *memory | 2 << 24)) return 25;    /* ARGUMENT_VERSION_MISMATCH */
    Gpu *gpu = &gpus[index_of(device)];
    memory->total = gpu->total;
    memory->reserved = gpu->reserved;
    memory->used = used(index_of(device));
    memory->free = gpu->total - gpu->reserved - memory->used;
    return OK;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *device, u64 *mask) { CHECK(index_of(device)); *mask = gpus[index_of(device)].reasons; return OK; }
#endif
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, u64 *mask) { CHECK(index_of(device)); *mask = gpus[index_of(device)].reasons; return OK; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { CHECK(index_of(device)); *major = 12; *minor = 0; return OK; }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) { (void)sensor; CHECK(index_of(device)); *celsius = 31; return OK; }
int nvmlDeviceGetTotalEccErrors(void *device, int type, int counter, u64 *errors)
{
    CHECK(index_of(device));
    *errors = type == 1 && counter == 0 ? gpus[index_of(device)].ecc : 0;      /* uncorrected, since the driver was loaded */
    return OK;
}
int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
    CHECK(index_of(device));
    *corrected = *uncorrected = 0;
    *pending = gpus[index_of(device)].pending;
    *failed = gpus[index_of(device)].failed;
    return OK;
}
typedef struct { unsigned id, scope; long long time, latency; int type, status; u64 value; } Field;
int nvmlDeviceGetFieldValues(void *device, int count, Field *fields)
{
    CHECK(index_of(device));
    for (int i = 0; i < count; i++) {
        fields[i].status = fields[i].id == RECOVERY_FIELD ? OK : NOT_SUPPORTED;
        fields[i].value = gpus[index_of(device)].recovery;
    }
    return OK;
}
int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned *lanes) { CHECK(index_of(device)); *lanes = gpus[index_of(device)].width; return OK; }
int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned *lanes) { CHECK(index_of(device)); *lanes = 16; return OK; }
int nvmlDeviceGetCurrPcieLinkGeneration(void *device, unsigned *generation) { CHECK(index_of(device)); *generation = 1; return OK; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *device, unsigned *generation) { CHECK(index_of(device)); *generation = 5; return OK; }
int nvmlDeviceGetComputeMode(void *device, unsigned *mode) { CHECK(index_of(device)); *mode = gpus[index_of(device)].mode; return OK; }
int nvmlDeviceGetPersistenceMode(void *device, unsigned *mode) { CHECK(index_of(device)); *mode = 1; return OK; }
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *pending) { CHECK(index_of(device)); *now = *pending = gpus[index_of(device)].mig != 0; return OK; }
int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) { CHECK(index_of(device)); *count = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned number, void **instance)
{
    CHECK(index_of(device));
    if (number >= gpus[index_of(device)].mig) return NOT_FOUND;
    *instance = (void *)((long)device | (long)(number + 1) << 8);
    return OK;
}
int nvmlDeviceGetP2PStatus(void *from, void *to, int capability, unsigned *status)
{
    (void)capability;
    CHECK(index_of(from));
    *status = links[index_of(from)][index_of(to)];
    return OK;
}
int nvmlDeviceGetTopologyCommonAncestor(void *from, void *to, unsigned *level)
{
    CHECK(index_of(from));
    *level = index_of(from) / 4 == index_of(to) / 4 ? 30 : 50;       /* two hosts' bridges of four each */
    return OK;
}
