/* A libcuda.so.1 without a GPU: the calls that machine/copies.py makes, over host memory.
 *
 *     cc -shared -fPIC -O1 -o libcuda.so.1 cuda.c
 *
 * FAKE_CUDA is a list of words, separated by blanks. S:D is a directed pair; * stands for any GPU.
 *
 *     gpus=4            how many (2)
 *     memory=BYTES      of each GPU (3 MiB)
 *     init=CODE         cuInit returns it; hang_init=1: it never returns
 *     no_peer=S:D       S may not reach D's memory directly
 *     flip=S:D          a copy changes one bit: byte 5000 of the destination
 *     flip_late=S:D     only from the third copy on
 *     lost=S:D          a copy reports success and leaves the destination as it was
 *     zeros=S:D         the last 64 KiB of a copy arrive as zeros
 *     bad_memory=G      GPU G stores a changed bit of what the host writes
 *     fail=S:D          the copy ends with CUDA_ERROR_LAUNCH_FAILED, as does every call after it
 *     hang=S:D          the copy never ends, SIGTERM or not
 *     crash=S:D         the copy ends the process
 *     slow=MS           each copy takes so many milliseconds
 *     journal=FILE      a line for each cuInit and each copy carried out: "init PID CUDA_DEVICE_ORDER CUDA_VISIBLE_DEVICES" ("-"
 *                       if unset), "copy S D BYTES direct|staged"
 *
 * It is as strict as the driver where a mistake would otherwise go unseen: nothing works before cuInit, or in a process
 * forked after it; a copy is carried out at cuCtxSynchronize and not before; a context must be current; memory has an
 * owner, an end and a limit; peer access can be opened once, and closed once.
 */

#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       PEER_ACCESS_ALREADY_ENABLED = 704, PEER_ACCESS_NOT_ENABLED = 705, LAUNCH_FAILED = 719 };
enum { GPUS = 16, BLOCKS = 64, COPIES = 64 };

struct block { char *at; size_t size; int gpu; };
struct copy { char *to, *from; size_t size; int target, source; };

static pid_t owner;               /* who called cuInit */
static int contexts[GPUS];        /* a context is a pointer to its GPU's entry */
static int *current;
static char opened[GPUS][GPUS];   /* [of][peer] */
static struct block blocks[BLOCKS];
static struct copy queue[COPIES];
static int queued, broken, done;

/* The value of `name` in FAKE_CUDA, into `value`; 0 if it is not there. `from` is where to go on looking. */
static int setting(const char *name, char *value, size_t room, const char **from)
{
    const char *text = from && *from ? *from : getenv("FAKE_CUDA");
    size_t length = strlen(name);
    for (; text && *text; text += strcspn(text, " "), text += strspn(text, " ")) {
        size_t word = strcspn(text, " ");
        if (word <= length || strncmp(text, name, length) || text[length] != '=')
            continue;
        size_t n = word - length - 1 < room - 1 ? word - length - 1 : room - 1;
        memcpy(value, text + length + 1, n);
        value[n] = 0;
        if (from)
            *from = text + word;
        return 1;
    }
    return 0;
}

static long number(const char *name, long otherwise)
{
    char value[64];
    return setting(name, value, sizeof value, NULL) ? atol(value) : otherwise;
}

static int matches(const char *pattern, int gpu) { return *pattern == '*' || atoi(pattern) == gpu; }

/* Whether a directed pair is named by `name=S:D`, which may be there several times. */
static int named(const char *name, int source, int target)
{
    char value[64], *colon;
    const char *from = NULL;
    while (setting(name, value, sizeof value, &from))
        if ((colon = strchr(value, ':')) && matches(value, source) && matches(colon + 1, target))
            return 1;
        else if (!*from)
            return 0;
    return 0;
}

static void journal(const char *format, ...)
{
    char path[512];
    va_list arguments;
    FILE *file;
    if (!setting("journal", path, sizeof path, NULL) || !(file = fopen(path, "a")))
        return;
    va_start(arguments, format);
    vfprintf(file, format, arguments);
    va_end(arguments);
    fclose(file);
}

static void hang(void)
{
    signal(SIGTERM, SIG_IGN);
    for (;;)
        pause();
}

static int ready(void)
{
    if (owner != getpid())
        return NOT_INITIALIZED;
    return broken;
}

static int in_context(void)
{
    int code = ready();
    return code ? code : current ? OK : INVALID_CONTEXT;
}

static int gpu_of(int *context)
{
    return context >= contexts && context < contexts + GPUS ? (int)(context - contexts) : -1;
}

/* The block that holds all of [at, at + size), owned by that GPU. */
static int inside(uint64_t at, size_t size, int gpu)
{
    for (int i = 0; i < BLOCKS; i++) {
        char *start = blocks[i].at;
        if (start && (char *)at >= start && (char *)at + size <= start + blocks[i].size && blocks[i].gpu == gpu)
            return 1;
    }
    return 0;
}

static int carry_out(struct copy copy)
{
    int s = copy.source, t = copy.target;
    int direct = s == t || (opened[s][t] && opened[t][s]);
    if (named("hang", s, t))
        hang();
    if (named("crash", s, t))
        abort();
    if (named("fail", s, t))
        return broken = LAUNCH_FAILED;
    usleep((useconds_t)number("slow", 0) * 1000);
    done++;
    journal("copy %d %d %zu %s\n", s, t, copy.size, direct ? "direct" : "staged");
    if (named("lost", s, t))
        return OK;
    memcpy(copy.to, copy.from, copy.size);
    if (named("flip", s, t) || (named("flip_late", s, t) && done >= 3))
        copy.to[5000] ^= 0x10;
    if (named("zeros", s, t))
        memset(copy.to + copy.size - 65536, 0, 65536);
    return OK;
}

int cuInit(unsigned flags)
{
    if (flags)
        return INVALID_VALUE;
    const char *order = getenv("CUDA_DEVICE_ORDER"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    journal("init %d %s %s\n", getpid(), order ? order : "-", visible ? visible : "-");
    if (number("hang_init", 0))
        hang();
    int code = (int)number("init", OK);
    if (code == OK)
        owner = getpid();
    return code;
}

int cuGetErrorName(int code, const char **name)
{
    static const struct { int code; const char *name; } names[] = {
        {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"}, {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"}, {100, "CUDA_ERROR_NO_DEVICE"},
        {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"}, {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"},
        {PEER_ACCESS_NOT_ENABLED, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED"}, {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
    };
    *name = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code)
            *name = names[i].name;
    return *name ? OK : INVALID_VALUE;
}

int cuDeviceGetCount(int *count)
{
    *count = (int)number("gpus", 2);
    return ready();
}

int cuDeviceGet(int *device, int ordinal)
{
    if (ordinal < 0 || ordinal >= number("gpus", 2))
        return INVALID_DEVICE;
    *device = 100 + ordinal; /* not the ordinal, so that one taken for the other is seen */
    return ready();
}

int cuDevicePrimaryCtxRetain(int **context, int device)
{
    if (device < 100 || device >= 100 + number("gpus", 2))
        return INVALID_DEVICE;
    *context = &contexts[device - 100];
    return ready();
}

int cuCtxSetCurrent(int *context)
{
    if (context && gpu_of(context) < 0)
        return INVALID_CONTEXT;
    current = context;
    return ready();
}

int cuDeviceCanAccessPeer(int *can, int device, int peer)
{
    if (device < 100 || peer < 100)
        return INVALID_DEVICE;
    *can = device != peer && !named("no_peer", device - 100, peer - 100);
    return ready();
}

int cuCtxEnablePeerAccess(int *peer, unsigned flags)
{
    int code = in_context(), of = gpu_of(current), to = gpu_of(peer);
    if (code)
        return code;
    if (flags || to < 0 || to == of || named("no_peer", of, to))
        return INVALID_VALUE;
    if (opened[of][to])
        return PEER_ACCESS_ALREADY_ENABLED;
    opened[of][to] = 1;
    return OK;
}

int cuCtxDisablePeerAccess(int *peer)
{
    int code = in_context(), of = gpu_of(current), to = gpu_of(peer);
    if (code)
        return code;
    if (to < 0 || !opened[of][to])
        return PEER_ACCESS_NOT_ENABLED;
    opened[of][to] = 0;
    return OK;
}

int cuMemAlloc_v2(uint64_t *at, size_t size)
{
    int code = in_context(), gpu = gpu_of(current), empty = -1;
    size_t used = 0;
    if (code)
        return code;
    for (int i = 0; i < BLOCKS; i++) {
        if (!blocks[i].at)
            empty = i;
        else if (blocks[i].gpu == gpu)
            used += blocks[i].size;
    }
    if (empty < 0 || used + size > (size_t)number("memory", 3 << 20))
        return OUT_OF_MEMORY;
    blocks[empty] = (struct block){calloc(1, size), size, gpu};
    *at = (uint64_t)blocks[empty].at;
    return OK;
}

int cuMemFree_v2(uint64_t at)
{
    int code = in_context();
    if (code)
        return code;
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].at == (char *)at && blocks[i].gpu == gpu_of(current)) {
            free(blocks[i].at);
            blocks[i].at = NULL;
            return OK;
        }
    return INVALID_VALUE;
}

int cuMemsetD32_v2(uint64_t at, unsigned word, size_t words)
{
    int code = in_context();
    if (code)
        return code;
    if (!inside(at, words * 4, gpu_of(current)))
        return INVALID_VALUE;
    for (size_t i = 0; i < words; i++)
        ((unsigned *)at)[i] = word;
    return OK;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size)
{
    int code = in_context();
    if (code)
        return code;
    if (!inside(to, size, gpu_of(current)))
        return INVALID_VALUE;
    memcpy((void *)to, from, size);
    if (number("bad_memory", -1) == gpu_of(current))
        ((char *)to)[77] ^= 1;
    return OK;
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size)
{
    int code = in_context();
    if (code)
        return code;
    if (!inside(from, size, gpu_of(current)))
        return INVALID_VALUE;
    memcpy(to, (void *)from, size);
    return OK;
}

int cuMemcpyPeerAsync(uint64_t to, int *target, uint64_t from, int *source, size_t size, void *stream)
{
    int code = in_context();
    if (code)
        return code;
    if (stream || queued == COPIES || !inside(to, size, gpu_of(target)) || !inside(from, size, gpu_of(source)))
        return INVALID_VALUE;
    queue[queued++] = (struct copy){(char *)to, (char *)from, size, gpu_of(target), gpu_of(source)};
    return OK;
}

int cuCtxSynchronize(void)
{
    int code = in_context();
    for (int i = 0; i < queued && !code; i++)
        code = carry_out(queue[i]);
    queued = 0;
    return code;
}
