// A stand-in for NVIDIA's driver library, libcuda.so.1, for tests on machines without a GPU. It has
// the part of the driver API that ecd and its tests use, with these properties of the real one:
//
// - Work on a stream is done later, by another thread. A copy reads its source when it is done, not
//   when it is asked for, and is done in two halves with a pause between them. A program that does
//   not wait for a copy therefore sees old bytes, or half of the new ones.
// - Device addresses are not host addresses: a CPU that touches one gets SIGSEGV.
// - Physical memory (cuMemCreate) is apart from addresses (cuMemMap). It lives as long as any
//   process holds a handle, a mapping or an exported descriptor of it. All processes with one
//   control page share what a device has.
// - A copy from pageable host memory is staged at once; a copy to it blocks the caller.
// - A copy to or from an address without access fails the context for good (700), as does the loss
//   of the memory's registration or mapping while the copy is under way.
// - The legacy default stream of a device waits for its blocking streams, and they for it. Each
//   thread has a default stream of its own besides, which is a blocking one.
// - Nothing is queued on a stream of a process while it registers host memory.
// - Work on a stream that is being captured is not done, and cannot be waited for. While a thread
//   captures, it and others may make few calls, unless they asked to.
// - A forked child cannot use the driver.
//
// It has no kernels, runs no graphs and has no speed. docs/testing.md says what tests on it do not
// prove.
// Numbers without a name in this file are those of cuda.h.
//
// A file of one page, the control page, lets tests direct and watch processes while they run;
// support/cuda/standin.py writes and reads it. Environment:
//
// CUDA_STANDIN_CONTROL    the control page's path
// CUDA_STANDIN_DEVICES    the number of devices, at most 8 (default 1)
// CUDA_STANDIN_AFTERLIFE  if set, each copy is done by a process that survives a SIGKILL of the one
//                         that asked for it, as the DMA of a GPU may
//
// Build: make build/standin/libcuda.so.1
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default"))) int

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100,
       INVALID_DEVICE = 101, INVALID_CONTEXT = 201, ALREADY_MAPPED = 208, INVALID_HANDLE = 400,
       NOT_READY = 600, ILLEGAL_ADDRESS = 700, CONTEXT_IS_DESTROYED = 709, HOST_REGISTERED = 712,
       HOST_NOT_REGISTERED = 713, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900,
       CAPTURE_INVALIDATED = 901, CAPTURE_UNMATCHED = 903, CAPTURE_UNJOINED = 904,
       CAPTURE_ISOLATION = 905, CAPTURE_IMPLICIT = 906, CAPTURED_EVENT = 907,
       CAPTURE_WRONG_THREAD = 908, UNKNOWN = 999 };
enum { CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED };
enum { MAX_DEVICES = 8, MAX_CURRENT = 16, GRANULARITY = 2 << 20, PAGE = 4096 };
enum { READ = 1, WRITE = 2 };  // bits of CUmemAccess_flags and of /proc's protections
enum { REGISTER_READ_ONLY = 8, REGISTER_FLAGS = 15 };
// The memory on one side of a copy. SPLIT is host memory of which a part is registered, or each
// part by itself.
enum { PAGEABLE, PINNED, ON_DEVICE, SPLIT };

// Words of the control page, which are uint64_t, in the order of standin.py.
enum { ID, DELAY_US, REGISTER_DELAY_US, LOST, DEVICE_BYTES, HOLD };
enum { COPIES = 8, PAGEABLE_COPIES, SPLIT_COPIES, HALFWAY, FINISHED, BYTES_H2D, BYTES_D2H,
       BYTES_D2D, REGISTER_CALLS, REGISTRATIONS, REGISTERED_BYTES, CONTEXTS, STREAMS, EVENTS,
       FAULTS, MAIN_WAITS, OTHER_WAITS, REGISTER_WAITS };
enum { HOLD_START = 1, HOLD_MIDDLE = 2, HOLD_FILLS = 4 };  // bits of HOLD
enum { HELD_AT_MOST_US = 60000000 };  // a bound for copies that outlive a test that was killed
typedef struct {
    uint64_t error;            // 0: the slot is not used
    _Atomic uint64_t passing;  // calls that still succeed
    char name[48];
} Failure;
enum { FAILURES_AT = 1024, FAILURES = 32 };

typedef uint64_t Ptr;
typedef struct Phys {
    struct Phys *next;  // in `handles`, from cuMemCreate or import to cuMemRelease
    int fd, device, is_exportable, references;
    size_t nbytes;
    char *bytes;  // the memory at a host address, for this library alone
} Phys;
typedef struct Range {
    struct Range *next;
    Ptr at;
    size_t nbytes;
    Phys *phys;                    // of a mapping
    unsigned access[MAX_DEVICES];  // of a mapping
    unsigned flags;                // of registered host memory
} Range;
typedef struct { int device; } Context;
typedef struct Capture {  // kept after its end
    int mode, thread, is_broken, is_over;
    struct Stream *origin;
} Capture;
typedef struct Event {
    struct Event *next;  // in `events`, until it is destroyed
    int device, references;
    Capture *capture;         // that it was last recorded in, on a stream of
    struct Stream *captured;  // its own
    uint64_t recorded, completed;  // numbers of the latest cuEventRecord, and of the latest done
} Event;
typedef struct Op {
    struct Op *next;
    enum { COPY, FILL, RECORD, WAIT } kind;
    Ptr to, from;
    size_t nbytes;
    int to_kind, from_kind;  // ON_DEVICE, PINNED or PAGEABLE
    char *staged;            // the bytes of a copy from pageable memory
    unsigned char value;     // to fill with
    Event *event;            // to record or to wait for
    uint64_t number;         // of the event's record
    uint64_t sequence;       // number among all ops of the process
} Op;
typedef struct Stream {
    struct Stream *next;
    pthread_cond_t work;
    Op *first, **last;
    enum { BLOCKING, NON_BLOCKING, LEGACY } kind;  // LEGACY: the device's legacy default stream
    int thread;                                    // whose default stream it is; 0: no thread's
    int device, is_destroyed;
    Capture *capture;  // of which its work is, from cuStreamBeginCapture or a wait on
    int is_joined;     // to the capture's origin
} Stream;
typedef struct { int type, handle_types, where, device; void *win32; unsigned char flags[8]; } Prop;
typedef struct { int where, device, flags; } Access;

// `big` guards all of the following that is neither atomic nor a thread's own, and all that is
// reached from there. `done` says that an op of any stream is done.
static pthread_mutex_t big = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t done = PTHREAD_COND_INITIALIZER;
static volatile uint64_t *control;
static atomic_int devices, owner, sticky[MAX_DEVICES], retained[MAX_DEVICES];
static int outlives;
static Phys *handles;
static Range *reserved, *mapped, *registered;
static Event *events;
static Stream *streams;
static uint64_t sequence;
static Context contexts[MAX_DEVICES];
static __thread Context *current[MAX_CURRENT + 1];  // the thread's stack of contexts, from 1 on
static __thread int depth;

static void unlock(int *unused) { (void)unused; pthread_mutex_unlock(&big); }
#define LOCKED __attribute__((cleanup(unlock), unused)) int lock_ = pthread_mutex_lock(&big)

// -- the start of every call ----------------------------------------------------------------------

static int planned_failure(const char *function) {
    size_t length = strcspn(function, "_");  // without _v2, _ptsz and _ptds
    Failure *failures = (Failure *)((char *)control + FAILURES_AT);
    for (Failure *each = failures; each < failures + FAILURES; each++) {
        int error = (int)*(volatile uint64_t *)&each->error;
        if (!error || strncmp(each->name, function, length) || each->name[length]) continue;
        uint64_t passing = each->passing;
        while (passing && !atomic_compare_exchange_weak(&each->passing, &passing, passing - 1)) {}
        return passing ? OK : error;
    }
    return OK;
}
static int without_context(const char *function) {
    if (!devices || owner != getpid()) return NOT_INITIALIZED;  // not the owner: a forked child
    return control[LOST] ? (int)control[LOST] : planned_failure(function);
}
static int in_context(const char *function) {
    int error = without_context(function);
    if (error) return error;
    if (!current[depth]) return INVALID_CONTEXT;
    if (!retained[current[depth]->device]) return CONTEXT_IS_DESTROYED;
    return sticky[current[depth]->device];
}
#define BEGIN(check) do { int error_ = check(__func__); if (error_) return error_; } while (0)

// While a thread captures a stream, calls that might wait are forbidden to it and, in the global
// mode, to all threads but those that said otherwise: such a call fails, and breaks the captures.
static _Atomic int global_captures;
static __thread int own_captures;  // but relaxed ones
static __thread int capture_mode = CAPTURE_GLOBAL;
static int unless_captured(const char *function) {
    (void)function;
    int is_free = !own_captures && (!global_captures || capture_mode == CAPTURE_THREAD_LOCAL);
    if (is_free || capture_mode == CAPTURE_RELAXED) return OK;
    LOCKED;
    for (Stream *each = streams; each; each = each->next)
        if (each->capture) each->capture->is_broken = 1;
    return CAPTURE_UNSUPPORTED;
}

static void count(int word, uint64_t by) {
    __atomic_add_fetch(control + word, by, __ATOMIC_RELAXED);
}

// While a thread registers host memory, others of the process wait with what they queue on streams.
static atomic_int registering;
static int after_registering(const char *function) {
    (void)function;
    if (registering) count(REGISTER_WAITS, 1);
    while (registering) usleep(50);
    return OK;
}
static void end_registering(int *unused) { (void)unused; registering--; }
#define REGISTERING __attribute__((cleanup(end_registering), unused)) int here_ = registering++

static int failed(int device) { return control[LOST] ? (int)control[LOST] : sticky[device]; }
static int this_device(void) { return current[depth]->device; }
static int is_device(int device) { return device >= 0 && device < devices; }

static uint64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000ULL + now.tv_nsec / 1000;
}
// Sleep for a word of the control page, in us, divided by `divisor`, and while HOLD has one of the
// bits of `hold`. The words are read again and again, so that a test can end the sleep.
static void pause_for(int word, unsigned divisor, unsigned hold) {
    for (uint64_t start = now_us(), passed = 0; !control[LOST]; passed = now_us() - start) {
        uint64_t asked = control[word] / divisor;
        int is_held = (control[HOLD] & hold) && passed < HELD_AT_MOST_US;
        if (passed >= asked && !is_held) break;
        usleep(passed < asked && asked - passed < 500 ? asked - passed : 500);
    }
}

// -- ranges of addresses --------------------------------------------------------------------------

static Range *within(Range *list, Ptr at, size_t nbytes) {
    while (list && !(at >= list->at && at + nbytes <= list->at + list->nbytes)) list = list->next;
    return list;
}
static int overlaps(Range *list, Ptr at, size_t nbytes) {
    while (list && !(at < list->at + list->nbytes && list->at < at + nbytes)) list = list->next;
    return list != NULL;
}
static int is_whole(Range *list, Ptr at, size_t nbytes) {
    Range *range = within(list, at, nbytes);
    return range && range->at == at && range->nbytes == nbytes;
}
static Range *add(Range **list, Ptr at, size_t nbytes) {
    Range *range = calloc(1, sizeof *range);
    *range = (Range){.next = *list, .at = at, .nbytes = nbytes};
    return *list = range;
}
static Range *take(Range **list, Ptr at) {
    while (*list && (*list)->at != at) list = &(*list)->next;
    Range *found = *list;
    if (found) *list = found->next;
    return found;
}

// -- devices and contexts -------------------------------------------------------------------------

static void open_control(void) {
    const char *path = getenv("CUDA_STANDIN_CONTROL");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : memfd_create("cuda-control", MFD_CLOEXEC);
    if (fd < 0 || (!path && ftruncate(fd, PAGE))) goto failed;
    control = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (control == MAP_FAILED) goto failed;
    if (!path) control[DELAY_US] = 1000;
    close(fd);
    return;
failed:
    fprintf(stderr, "CUDA stand-in: no control page %s: %m\n", path ? path : "in memory");
    abort();
}
API cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    // In a forked child, a thread that is not there may hold the lock for ever.
    if (owner && owner != getpid()) return NOT_INITIALIZED;
    LOCKED;
    if (!control) {
        open_control();
        outlives = getenv("CUDA_STANDIN_AFTERLIFE") != NULL;
        for (int i = 0; i < MAX_DEVICES; i++) contexts[i].device = i;
        const char *number = getenv("CUDA_STANDIN_DEVICES");
        int asked = number ? atoi(number) : 1;
        owner = getpid();
        devices = asked < 0 ? 0 : asked > MAX_DEVICES ? MAX_DEVICES : asked;
    }
    return devices ? without_context(__func__) : NO_DEVICE;
}
API cuDriverGetVersion(int *version) { *version = 13000; return OK; }
API cuDeviceGetCount(int *number) {
    BEGIN(without_context);
    *number = devices;
    return OK;
}
API cuDeviceGet(int *device, int ordinal) {
    BEGIN(without_context);
    *device = ordinal;
    return is_device(ordinal) ? OK : INVALID_DEVICE;
}
API cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    BEGIN(without_context);
    if (!is_device(device)) return INVALID_DEVICE;
    memcpy(uuid, "standin-device-", 15);
    uuid[15] = (unsigned char)device;
    return OK;
}
API cuDeviceTotalMem_v2(size_t *nbytes, int device) {
    BEGIN(without_context);
    if (!is_device(device)) return INVALID_DEVICE;
    *nbytes = control[DEVICE_BYTES] ? control[DEVICE_BYTES] : 1UL << 36;
    return OK;
}
API cuDeviceGetAttribute(int *value, int attribute, int device) {
    BEGIN(without_context);
    if (!is_device(device)) return INVALID_DEVICE;
    switch (attribute) {
    case 41:   // unified addressing
    case 91:   // host pointers are used for registered memory
    case 99:   // host memory can be registered
    case 102:  // cuMemCreate, cuMemMap
    case 103:  // export as a descriptor
    case 113:  // registering for reading only
        *value = 1;
        return OK;
    default:
        *value = 0;
        return OK;
    }
}
API cuDevicePrimaryCtxRetain(Context **context, int device) {
    BEGIN(without_context);
    LOCKED;
    if (!is_device(device)) return INVALID_DEVICE;
    if (!retained[device]++) count(CONTEXTS, 1);
    *context = &contexts[device];
    return OK;
}
API cuDevicePrimaryCtxRelease_v2(int device) {  // streams, events and registrations stay
    BEGIN(without_context);
    LOCKED;
    if (!is_device(device)) return INVALID_DEVICE;
    if (!retained[device]) return INVALID_CONTEXT;
    if (!--retained[device]) count(CONTEXTS, -1);
    return OK;
}
static int is_context(Context *context) {
    return context >= contexts && context < contexts + devices;
}
API cuCtxPushCurrent_v2(Context *context) {
    BEGIN(without_context);
    if (!is_context(context) || depth == MAX_CURRENT) return INVALID_CONTEXT;
    current[++depth] = context;
    return OK;
}
API cuCtxPopCurrent_v2(Context **context) {
    BEGIN(without_context);
    if (!depth) return INVALID_CONTEXT;
    if (context) *context = current[depth];
    depth--;
    return OK;
}
API cuCtxSetCurrent(Context *context) {
    BEGIN(without_context);
    if (context && !is_context(context)) return INVALID_CONTEXT;
    if (depth) depth--;
    if (context) current[++depth] = context;
    return OK;
}
API cuCtxGetCurrent(Context **context) {
    BEGIN(without_context);
    *context = current[depth];
    return OK;
}
API cuCtxGetDevice(int *device) {
    BEGIN(in_context);
    *device = this_device();
    return OK;
}

// -- physical memory and addresses: no context is needed ------------------------------------------

static void unref(Phys *phys) {
    if (--phys->references) return;
    munmap(phys->bytes, phys->nbytes);
    close(phys->fd);
    free(phys);
}
static int new_phys(Phys **out, int fd, size_t nbytes, int device, int is_exportable) {
    char *bytes = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED) {  // fd may be -1
        if (fd >= 0) close(fd);
        return OUT_OF_MEMORY;
    }
    *out = malloc(sizeof **out);
    **out = (Phys){NULL, fd, device, is_exportable, 1, nbytes, bytes};
    return OK;
}
// Return the bytes of a device that any process with this control page keeps alive, as descriptors
// show: so a killed one gives back what it had.
static size_t used(int device) {
    char wanted[64], name[64];
    const char *format = "/memfd:cuda-standin:%lx:%d:";
    int length = snprintf(wanted, sizeof wanted, format, control[ID], device);
    size_t nbytes = 0, number = 0;
    glob_t found;
    if (glob("/proc/[0-9]*/fd/*", GLOB_NOSORT, NULL, &found)) return 0;
    ino_t *counted = calloc(found.gl_pathc, sizeof *counted);
    for (char **path = found.gl_pathv; *path; path++) {
        struct stat memory;
        if (readlink(*path, name, sizeof name) < length || memcmp(name, wanted, length)) continue;
        if (stat(*path, &memory)) continue;
        size_t at = 0;
        while (at < number && counted[at] != memory.st_ino) at++;
        if (at < number) continue;
        counted[number++] = memory.st_ino;
        nbytes += memory.st_size;
    }
    free(counted);
    globfree(&found);
    return nbytes;
}
static int create(Phys **out, size_t nbytes, int device, int is_exportable) {
    uint64_t limit = control[DEVICE_BYTES];
    int turn = -1, error = OUT_OF_MEMORY;
    if (limit) {  // one process after the other looks what is left, and takes it
        turn = open(getenv("CUDA_STANDIN_CONTROL"), O_RDONLY | O_CLOEXEC);
        flock(turn, LOCK_EX);
    }
    char name[64];  // tells an importer what the memory is, and standin.py whose it is
    snprintf(name, sizeof name, "cuda-standin:%lx:%d:%d", control[ID], device, is_exportable);
    int fd = limit && used(device) + nbytes > limit ? -1 : memfd_create(name, MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, nbytes)) {
        close(fd);
        fd = -1;
    }
    if (fd >= 0) error = new_phys(out, fd, nbytes, device, is_exportable);
    if (limit) {
        flock(turn, LOCK_UN);  // a child that was forked meanwhile has the descriptor, too
        close(turn);
    }
    return error;
}
static Phys **find_handle(Phys *handle) {
    Phys **link = &handles;
    while (*link && *link != handle) link = &(*link)->next;
    return *link ? link : NULL;
}
static int reserve(Ptr *at, size_t nbytes, size_t alignment) {
    size_t all = nbytes + alignment;
    char *start = mmap(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return OUT_OF_MEMORY;
    char *aligned = (char *)(((Ptr)start + alignment - 1) / alignment * alignment);
    if (aligned > start) munmap(start, aligned - start);
    munmap(aligned + nbytes, start + alignment - aligned);
    *at = (Ptr)aligned;
    add(&reserved, *at, nbytes);
    return OK;
}
static void map(Ptr at, Phys *phys) {
    add(&mapped, at, phys->nbytes)->phys = phys;
    phys->references++;
}
static void unmap(Range *range) {
    unref(range->phys);
    free(range);
}
static void free_addresses(Range *range) {
    munmap((void *)range->at, range->nbytes);
    free(range);
}

API cuMemGetAllocationGranularity(size_t *granularity, const Prop *prop, int option) {
    BEGIN(without_context);
    (void)option;
    if (!is_device(prop->device)) return INVALID_DEVICE;
    *granularity = GRANULARITY;
    return OK;
}
API cuMemCreate(Phys **handle, size_t nbytes, const Prop *prop, unsigned long long flags) {
    BEGIN(without_context);
    if (flags || !nbytes || nbytes % GRANULARITY) return INVALID_VALUE;
    if (prop->type != 1 || prop->where != 1) return INVALID_VALUE;
    if (prop->handle_types & ~1) return NOT_SUPPORTED;  // 1: a descriptor
    if (!is_device(prop->device)) return INVALID_DEVICE;
    LOCKED;
    int error = create(handle, nbytes, prop->device, prop->handle_types);
    if (error) return error;
    (*handle)->next = handles;
    handles = *handle;
    return OK;
}
API cuMemExportToShareableHandle(void *out, Phys *handle, int type, unsigned long long flags) {
    BEGIN(without_context);
    LOCKED;
    if (type != 1 || flags || !find_handle(handle) || !handle->is_exportable) return INVALID_VALUE;
    *(int *)out = fcntl(handle->fd, F_DUPFD_CLOEXEC, 0);
    return *(int *)out < 0 ? OUT_OF_MEMORY : OK;
}
API cuMemImportFromShareableHandle(Phys **handle, void *os_handle, int type) {
    BEGIN(without_context);
    int device, is_exportable, fd = (int)(intptr_t)os_handle;
    char path[64], name[128] = "";
    struct stat stat;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (type != 1 || fstat(fd, &stat)) return INVALID_VALUE;
    if (readlink(path, name, sizeof name - 1) < 0) return INVALID_VALUE;
    const char *format = "/memfd:cuda-standin:%*x:%d:%d";
    if (sscanf(name, format, &device, &is_exportable) != 2) return UNKNOWN;  // seen on an H200
    if (!is_device(device)) return INVALID_DEVICE;
    LOCKED;
    fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    int error = new_phys(handle, fd, stat.st_size, device, is_exportable);
    if (error) return error;
    (*handle)->next = handles;
    handles = *handle;
    return OK;
}
API cuMemRelease(Phys *handle) {
    BEGIN(without_context);
    LOCKED;
    Phys **link = find_handle(handle);
    if (!link) return INVALID_VALUE;
    *link = handle->next;
    unref(handle);
    return OK;
}
API cuMemAddressReserve(Ptr *at, size_t nbytes, size_t alignment, Ptr hint,
                        unsigned long long flags) {
    BEGIN(without_context);
    (void)hint;
    if (flags || !nbytes || nbytes % GRANULARITY) return INVALID_VALUE;
    if (alignment & (alignment - 1)) return INVALID_VALUE;
    LOCKED;
    return reserve(at, nbytes, alignment > GRANULARITY ? alignment : GRANULARITY);
}
API cuMemAddressFree(Ptr at, size_t nbytes) {
    BEGIN(without_context);
    LOCKED;
    if (!is_whole(reserved, at, nbytes) || overlaps(mapped, at, nbytes)) return INVALID_VALUE;
    free_addresses(take(&reserved, at));
    return OK;
}
API cuMemMap(Ptr at, size_t nbytes, size_t offset, Phys *handle, unsigned long long flags) {
    BEGIN(without_context);
    LOCKED;
    if (offset || flags || !find_handle(handle) || nbytes != handle->nbytes) return INVALID_VALUE;
    if (!within(reserved, at, nbytes)) return INVALID_VALUE;
    if (overlaps(mapped, at, nbytes)) return ALREADY_MAPPED;
    map(at, handle);
    return OK;
}
API cuMemSetAccess(Ptr at, size_t nbytes, const Access *access, size_t number) {
    BEGIN(without_context);
    LOCKED;
    Range *range = within(mapped, at, nbytes);
    if (!range || !number) return INVALID_VALUE;
    for (size_t i = 0; i < number; i++) {
        int flags = access[i].flags, is_known = !flags || flags == READ || flags == (READ | WRITE);
        if (access[i].where != 1 || !is_known) return INVALID_VALUE;
        if (!is_device(access[i].device)) return INVALID_DEVICE;
    }
    for (size_t i = 0; i < number; i++) range->access[access[i].device] = access[i].flags;
    return OK;
}
API cuMemUnmap(Ptr at, size_t nbytes) {
    BEGIN(without_context);
    LOCKED;
    if (!is_whole(mapped, at, nbytes)) return INVALID_VALUE;
    unmap(take(&mapped, at));
    return OK;
}

// -- how a copy or fill is done -------------------------------------------------------------------

// One half of a copy or fill at host addresses, which stay valid while it holds physical memory.
typedef struct { char *to; const char *from; size_t nbytes; Phys *held[2]; } Half;

// Return the host address of memory, or NULL if the device may not access it so. The caller holds
// `big`, and drops the reference to physical memory, if any, that is put into `held`.
static char *find_bytes(int device, Ptr at, size_t nbytes, int kind, unsigned access, Phys **held) {
    if (kind == PAGEABLE) return (char *)at;
    Range *range = within(kind == PINNED ? registered : mapped, at, nbytes);
    if (!range) return NULL;
    if (kind == PINNED) return (char *)at;
    if (!(range->access[device] & access)) return NULL;
    *held = range->phys;
    range->phys->references++;
    return range->phys->bytes + (at - range->at);
}
static void drop_held(Half *half) {
    for (int i = 0; i < 2; i++) if (half->held[i]) unref(half->held[i]);
}
static void let_go(Half *half) {
    LOCKED;
    drop_held(half);
}
static int find_half(Half *half, int device, const Op *op, int is_second) {
    size_t first = (op->nbytes + 1) / 2, at = is_second ? first : 0;
    *half = (Half){.nbytes = is_second ? op->nbytes - first : first};
    if (!half->nbytes) return 1;
    LOCKED;
    size_t n = half->nbytes;
    half->to = find_bytes(device, op->to + at, n, op->to_kind, WRITE, &half->held[0]);
    if (op->staged) half->from = op->staged + at;
    else if (op->kind == COPY)
        half->from = find_bytes(device, op->from + at, n, op->from_kind, READ, &half->held[1]);
    if (half->to && (half->from || op->kind == FILL)) return 1;
    drop_held(half);
    return 0;
}
static int do_half(const Half *half, const Op *op) {
    if (!half->nbytes) return 1;
    if (op->kind == FILL) {
        memset(half->to, op->value, half->nbytes);
        return 1;
    }
    // The kernel copies, as host memory may have been unmapped: that must not be a SIGSEGV here.
    struct iovec local = {half->to, half->nbytes}, remote = {(void *)half->from, half->nbytes};
    ssize_t moved = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
    if (moved < 0 && errno != EFAULT) {
        fprintf(stderr, "CUDA stand-in: process_vm_readv: %m\n");
        abort();
    }
    return moved == (ssize_t)half->nbytes;
}
static void before_half(const Op *op, int is_second) {
    if (is_second) pause_for(DELAY_US, 2, HOLD_MIDDLE);
    else pause_for(DELAY_US, 1, op->kind == FILL ? HOLD_FILLS : HOLD_START);
}
static void after_half(const Op *op, int is_second) {
    if (op->kind == COPY) count(is_second ? FINISHED : HALFWAY, 1);
}

typedef struct { const Op *op; Half halves[2]; } Afterlife;

static int afterlife(void *argument) {
    const Afterlife *life = argument;
    syscall(SYS_close_range, 0, ~0U, 0);  // descriptors and their locks end with the caller
    syscall(SYS_setsid);                  // a signal to the caller's group does not come here
    for (int i = 0; i < 2; i++) {
        before_half(life->op, i);
        if (control[LOST]) _exit(0);
        if (!do_half(&life->halves[i], life->op)) _exit(1);
        after_half(life->op, i);
    }
    _exit(0);
}
// Have a process without descriptors do the op in this address space, and wait for it. A SIGKILL
// of this process ends neither the other one nor the address space. The op's memory is looked up
// first: the other process cannot take locks, as a thread that holds one may be killed.
static int run_in_afterlife(int device, const Op *op) {
    enum { STACK = 64 << 10 };
    Afterlife life = {.op = op};
    int is_done = 0, status = 1;
    if (!find_half(&life.halves[0], device, op, 0)) return 0;
    if (find_half(&life.halves[1], device, op, 1)) {
        char *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        int child = stack == MAP_FAILED ? -1 : clone(afterlife, stack + STACK, CLONE_VM, &life);
        if (child < 0) {
            fprintf(stderr, "CUDA stand-in: clone: %m\n");
            abort();
        }
        while (waitpid(child, &status, __WALL) < 0 && errno == EINTR) {}
        is_done = status == 0;
        munmap(stack, STACK);
        let_go(&life.halves[1]);
    }
    let_go(&life.halves[0]);
    return is_done;
}
static int run_here(int device, const Op *op) {
    for (int i = 0; i < 2; i++) {
        Half half;
        before_half(op, i);
        if (control[LOST]) return 1;
        if (!find_half(&half, device, op, i)) return 0;
        int is_done = do_half(&half, op);
        let_go(&half);
        if (!is_done) return 0;
        after_half(op, i);
    }
    return 1;
}
static void run(int device, const Op *op) {
    int error = planned_failure(op->kind == COPY ? "copy" : "fill");
    // A copy to pageable memory is done by the process itself, and ends with it.
    int outlives_this = outlives && op->to_kind != PAGEABLE;
    if (!error && !(outlives_this ? run_in_afterlife(device, op) : run_here(device, op)))
        error = ILLEGAL_ADDRESS;
    if (!error) return;
    LOCKED;
    if (!sticky[device]) sticky[device] = error;
    count(FAULTS, 1);
}

// -- streams and events ---------------------------------------------------------------------------

static void drop(Event *event) { if (event && !--event->references) free(event); }

// A device's legacy default stream and its blocking streams wait for one another, in the order in
// which work was asked of them.
static int are_ordered(const Stream *one, const Stream *other) {
    return one->device == other->device && one->kind != other->kind
        && one->kind != NON_BLOCKING && other->kind != NON_BLOCKING;
}
static int is_behind_another(const Stream *stream, const Op *op) {
    for (Stream *each = streams; each; each = each->next)
        if (are_ordered(stream, each) && each->first && each->first->sequence < op->sequence)
            return 1;
    return 0;
}
static void *work(void *argument) {
    Stream *stream = argument;
    LOCKED;
    while (1) {
        while (!stream->first && !stream->is_destroyed) pthread_cond_wait(&stream->work, &big);
        Op *op = stream->first;
        if (!op) break;
        int device = stream->device;
        while ((is_behind_another(stream, op)
                || (op->kind == WAIT && op->event->completed < op->number)) && !sticky[device])
            pthread_cond_wait(&done, &big);
        if ((op->kind == COPY || op->kind == FILL) && !failed(device)) {
            pthread_mutex_unlock(&big);
            run(device, op);
            pthread_mutex_lock(&big);
        }
        // Two streams may have recorded the event, and the later record may be done first.
        if (op->kind == RECORD && op->event->completed < op->number)
            op->event->completed = op->number;
        stream->first = op->next;
        if (!stream->first) stream->last = &stream->first;
        drop(op->event);
        free(op->staged);
        free(op);
        pthread_cond_broadcast(&done);
    }
    Stream **link = &streams;
    while (*link != stream) link = &(*link)->next;
    *link = stream->next;
    pthread_cond_destroy(&stream->work);
    free(stream);
    return NULL;
}
static Stream *new_stream(int device, int kind, int user) {
    Stream *stream = calloc(1, sizeof *stream);
    *stream = (Stream){.next = streams, .device = device, .kind = kind, .thread = user};
    stream->last = &stream->first;
    pthread_cond_init(&stream->work, NULL);
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // the program's signals are for its own threads
    int error = pthread_create(&thread, NULL, work, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        free(stream);
        return NULL;
    }
    pthread_detach(thread);
    return streams = stream;
}
// cuda.h's constants: NULL and 1 are the legacy default stream, and 2 is the thread's own one.
static Stream *default_stream(int is_own) {
    int device = this_device(), thread = is_own ? gettid() : 0;
    for (Stream *each = streams; each; each = each->next)
        if (each->device == device && (is_own ? each->thread == thread : each->kind == LEGACY))
            return each;
    return new_stream(device, is_own ? BLOCKING : LEGACY, thread);
}
#define OWN(handle) ((handle) ? (handle) : (Stream *)2)
static Stream *find_stream(Stream *handle) {
    if ((uintptr_t)handle <= 2) return default_stream((uintptr_t)handle == 2);
    Stream *found = streams;
    while (found && found != handle) found = found->next;
    return found && !found->is_destroyed ? found : NULL;
}
static Event **find_event(Event *event) {
    Event **link = &events;
    while (*link && *link != event) link = &(*link)->next;
    return *link ? link : NULL;
}
static int broken(Capture *capture, int error) {
    capture->is_broken = 1;
    return error;
}
// Return the capture that using a stream would depend on without having asked to, or NULL: each use
// of the legacy default stream is one of all blocking streams.
static Capture *implied(const Stream *stream) {
    for (Stream *each = streams; each && stream->kind == LEGACY; each = each->next)
        if (each->capture && are_ordered(stream, each)) return each->capture;
    return NULL;
}
// Note an op that is part of a graph, and not done.
static int capture(Stream *stream, Op op) {
    Capture *capture = stream->capture;
    if (capture->is_broken) return CAPTURE_INVALIDATED;
    if (op.kind == WAIT && op.event->capture != capture) return broken(capture, CAPTURE_ISOLATION);
    stream->is_joined = 0;
    if (op.kind == RECORD) op.event->capture = capture, op.event->captured = stream;
    for (Stream *each = streams; each && op.kind == WAIT; each = each->next)
        if (stream == capture->origin && each == op.event->captured) each->is_joined = 1;
    return OK;
}
static int put(Stream *stream, Op op) {
    if (implied(stream)) return broken(implied(stream), CAPTURE_IMPLICIT);
    if (op.kind == WAIT && op.event->capture && !stream->capture) {
        if (op.event->capture->is_over) return CAPTURED_EVENT;
        stream->capture = op.event->capture;  // which has a fork now
    }
    if (stream->capture) return capture(stream, op);
    if (op.kind == RECORD) op.event->capture = NULL;
    Op *queued = malloc(sizeof op);
    op.sequence = ++sequence;
    if (op.event) op.event->references++;
    if (op.kind == RECORD) op.event->recorded++;
    if (op.event) op.number = op.event->recorded;
    *queued = op;
    *stream->last = queued;
    stream->last = &queued->next;
    pthread_cond_signal(&stream->work);
    return OK;
}
// Whether a stream has yet to do what was asked until then, or any of the device if it is NULL. The
// legacy default stream stands for the blocking ones, too.
static int is_busy(Stream *only, int device, uint64_t until) {
    for (Stream *each = streams; each; each = each->next) {
        int is_meant = each == only || (only ? only->kind == LEGACY && are_ordered(only, each)
                                             : each->device == device);
        if (is_meant && each->first && each->first->sequence <= until) return 1;
    }
    return 0;
}
static void count_wait(void) { count(gettid() == owner ? MAIN_WAITS : OTHER_WAITS, 1); }

// Block until all is done that was asked of a stream, or, if it is NULL, of this thread's device.
static void wait_for(Stream *only) {
    count_wait();
    uint64_t until = sequence;
    while (is_busy(only, this_device(), until)) pthread_cond_wait(&done, &big);
}

API cuStreamCreate(Stream **stream, unsigned flags) {
    BEGIN(in_context);
    if (flags & ~1U) return INVALID_VALUE;
    LOCKED;
    if (!(*stream = new_stream(this_device(), flags ? NON_BLOCKING : BLOCKING, 0)))
        return OUT_OF_MEMORY;
    count(STREAMS, 1);
    return OK;
}
API cuStreamDestroy_v2(Stream *handle) {  // returns at once; what is queued is still done
    BEGIN(without_context);
    LOCKED;
    Stream *stream = (uintptr_t)handle > 2 ? find_stream(handle) : NULL;
    if (!stream) return INVALID_HANDLE;
    stream->is_destroyed = 1;
    count(STREAMS, -1);
    pthread_cond_signal(&stream->work);
    return OK;
}
API cuStreamSynchronize(Stream *handle) {
    BEGIN(in_context);
    BEGIN(unless_captured);
    LOCKED;
    Stream *stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->capture) return broken(stream->capture, CAPTURE_UNSUPPORTED);
    if (implied(stream)) return broken(implied(stream), CAPTURE_IMPLICIT);
    int device = stream->device;
    wait_for(stream);
    return failed(device);
}
API cuStreamQuery(Stream *handle) {
    BEGIN(in_context);
    BEGIN(unless_captured);
    LOCKED;
    Stream *stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->capture) return broken(stream->capture, CAPTURE_UNSUPPORTED);
    if (implied(stream)) return broken(implied(stream), CAPTURE_IMPLICIT);
    if (sticky[stream->device]) return sticky[stream->device];
    return is_busy(stream, stream->device, sequence) ? NOT_READY : OK;
}
API cuThreadExchangeStreamCaptureMode(int *mode) {
    BEGIN(without_context);
    if (*mode < CAPTURE_GLOBAL || *mode > CAPTURE_RELAXED) return INVALID_VALUE;
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return OK;
}
API cuStreamBeginCapture_v2(Stream *handle, int mode) {
    BEGIN(in_context);
    if (mode < CAPTURE_GLOBAL || mode > CAPTURE_RELAXED) return INVALID_VALUE;
    if ((uintptr_t)handle <= 1) return CAPTURE_UNSUPPORTED;  // the legacy default stream
    LOCKED;
    Stream *stream = find_stream(handle);
    if (!stream || stream->capture) return INVALID_VALUE;
    stream->capture = calloc(1, sizeof *stream->capture);
    *stream->capture = (Capture){.mode = mode, .thread = gettid(), .origin = stream};
    if (mode == CAPTURE_GLOBAL) global_captures++;
    if (mode != CAPTURE_RELAXED) own_captures++;
    return OK;
}
API cuStreamEndCapture(Stream *handle, Capture **graph) {  // which no call takes
    BEGIN(in_context);
    LOCKED;
    *graph = NULL;
    Stream *stream = find_stream(handle);
    Capture *capture = stream ? stream->capture : NULL;
    if (!capture) return INVALID_VALUE;
    if (capture->mode != CAPTURE_RELAXED && capture->thread != gettid()) return CAPTURE_WRONG_THREAD;
    if (capture->origin != stream) return broken(capture, CAPTURE_UNMATCHED);
    int error = capture->is_broken ? CAPTURE_INVALIDATED : OK;
    for (Stream *each = streams; each; each = each->next) {
        if (each->capture != capture) continue;
        if (each != stream && !each->is_joined && !error) error = CAPTURE_UNJOINED;
        each->capture = NULL;
    }
    capture->is_over = 1;
    if (capture->mode == CAPTURE_GLOBAL) global_captures--;
    if (capture->mode != CAPTURE_RELAXED) own_captures--;
    if (!error) *graph = capture;
    return error;
}
API cuStreamIsCapturing(Stream *handle, int *status) {
    BEGIN(in_context);
    LOCKED;
    Stream *stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    if (implied(stream)) return CAPTURE_IMPLICIT;  // which breaks nothing
    *status = !stream->capture ? 0 : stream->capture->is_broken ? 2 : 1;
    return OK;
}
API cuCtxSynchronize(void) {
    BEGIN(in_context);
    BEGIN(unless_captured);
    LOCKED;
    wait_for(NULL);
    return failed(this_device());
}
API cuEventCreate(Event **event, unsigned flags) {
    BEGIN(in_context);
    enum { DISABLE_TIMING = 2, INTERPROCESS = 4, ALL = 7 };
    if (flags & ~ALL || (flags & INTERPROCESS && !(flags & DISABLE_TIMING))) return INVALID_VALUE;
    LOCKED;
    *event = calloc(1, sizeof **event);
    **event = (Event){.next = events, .device = this_device(), .references = 1};
    events = *event;
    count(EVENTS, 1);
    return OK;
}
API cuEventDestroy_v2(Event *event) {
    BEGIN(without_context);
    LOCKED;
    Event **link = find_event(event);
    if (!link) return INVALID_HANDLE;
    *link = event->next;
    drop(event);
    count(EVENTS, -1);
    return OK;
}
API cuEventRecord(Event *event, Stream *handle) {
    BEGIN(in_context);
    BEGIN(after_registering);
    LOCKED;
    Stream *stream = find_stream(handle);
    if (!stream || !find_event(event) || event->device != stream->device) return INVALID_HANDLE;
    return put(stream, (Op){.kind = RECORD, .event = event});
}
API cuStreamWaitEvent(Stream *handle, Event *event, unsigned flags) {
    BEGIN(in_context);
    BEGIN(after_registering);
    if (flags) return INVALID_VALUE;
    LOCKED;
    Stream *stream = find_stream(handle);
    if (!stream || !find_event(event)) return INVALID_HANDLE;
    return put(stream, (Op){.kind = WAIT, .event = event});
}
// Asking for an event that is of a graph breaks the capture, whatever the thread has asked for.
static int asked_of_graph(Event *event) {
    return event->capture ? broken(event->capture, CAPTURED_EVENT) : OK;
}
API cuEventQuery(Event *event) {
    BEGIN(without_context);
    BEGIN(unless_captured);
    LOCKED;
    if (!find_event(event)) return INVALID_HANDLE;
    if (asked_of_graph(event)) return CAPTURED_EVENT;
    if (sticky[event->device]) return sticky[event->device];
    return event->completed >= event->recorded ? OK : NOT_READY;
}
API cuEventSynchronize(Event *event) {
    BEGIN(in_context);
    BEGIN(unless_captured);
    LOCKED;
    if (!find_event(event)) return INVALID_HANDLE;
    if (asked_of_graph(event)) return CAPTURED_EVENT;
    count_wait();
    event->references++;
    uint64_t wanted = event->recorded;
    while (event->completed < wanted) pthread_cond_wait(&done, &big);
    int error = failed(event->device);
    drop(event);
    return error;
}

// -- host memory ----------------------------------------------------------------------------------

// Return what all pages of a range allow the CPU: READ, WRITE, both or neither.
static int protection(Ptr at, size_t nbytes) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char *line = NULL, flags[8];
    size_t room = 0;
    unsigned long from, to;
    int common = READ | WRITE;
    while (maps && nbytes && getline(&line, &room, maps) > 0) {
        if (sscanf(line, "%lx-%lx %7s", &from, &to, flags) != 3 || to <= at) continue;
        if (from > at) break;
        common &= (flags[0] == 'r' ? READ : 0) | (flags[1] == 'w' ? WRITE : 0);
        size_t here = to - at < nbytes ? to - at : nbytes;
        at += here, nbytes -= here;
    }
    free(line);
    if (maps) fclose(maps);
    return nbytes ? 0 : common;
}
API cuMemHostRegister_v2(void *at, size_t nbytes, unsigned flags) {
    REGISTERING;
    if (devices) count(REGISTER_CALLS, 1);
    BEGIN(in_context);
    BEGIN(unless_captured);
    if (!at || !nbytes || flags & ~REGISTER_FLAGS) return INVALID_VALUE;
    int allowed = protection((Ptr)at, nbytes);
    if (!(allowed & READ) || !(allowed & WRITE || flags & REGISTER_READ_ONLY)) return INVALID_VALUE;
    pause_for(REGISTER_DELAY_US, 1, 0);
    LOCKED;
    if (overlaps(registered, (Ptr)at, nbytes)) return HOST_REGISTERED;
    add(&registered, (Ptr)at, nbytes)->flags = flags;
    count(REGISTRATIONS, 1);
    count(REGISTERED_BYTES, nbytes);
    return OK;
}
API cuMemHostUnregister(void *at) {
    BEGIN(in_context);
    BEGIN(unless_captured);
    LOCKED;
    Range *range = take(&registered, (Ptr)at);
    if (!range) return within(registered, (Ptr)at, 1) ? INVALID_VALUE : HOST_NOT_REGISTERED;
    count(REGISTRATIONS, -1);
    count(REGISTERED_BYTES, -range->nbytes);
    free(range);
    return OK;
}

// -- an engine's own memory, copies and fills -----------------------------------------------------

API cuMemAlloc_v2(Ptr *at, size_t nbytes) {
    BEGIN(in_context);
    BEGIN(unless_captured);
    if (!nbytes) return INVALID_VALUE;
    nbytes = (nbytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    LOCKED;
    Phys *phys;
    int error = create(&phys, nbytes, this_device(), 0);
    if (error) return error;
    error = reserve(at, nbytes, GRANULARITY);
    if (!error) map(*at, phys);
    if (!error) mapped->access[this_device()] = READ | WRITE;
    unref(phys);
    return error;
}
static int was_allocated(Ptr at) {
    Range *range = within(mapped, at, 1);
    return range && range->at == at && is_whole(reserved, at, range->nbytes);
}
API cuMemFree_v2(Ptr at) {
    BEGIN(in_context);
    BEGIN(unless_captured);
    LOCKED;
    if (!was_allocated(at)) return INVALID_VALUE;
    wait_for(NULL);
    if (!was_allocated(at)) return INVALID_VALUE;  // another thread has freed it meanwhile
    unmap(take(&mapped, at));
    free_addresses(take(&reserved, at));
    return failed(this_device());
}
static int kind_of(Ptr at, size_t nbytes) {
    if (overlaps(reserved, at, nbytes)) return ON_DEVICE;
    if (within(registered, at, nbytes)) return PINNED;
    return overlaps(registered, at, nbytes) ? SPLIT : PAGEABLE;
}
// Block as the page "API synchronization behavior" of the driver's documentation has it. Where it
// leaves a choice, for asynchronous copies of pageable memory, stage the source at once and wait
// for the destination.
static int copy(Ptr to, Ptr from, size_t nbytes, Stream *handle, int is_synchronous) {
    if (!nbytes) return OK;
    BEGIN(after_registering);
    LOCKED;
    Stream *stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    int device = stream->device;
    Op op = {.kind = COPY, .to = to, .from = from, .nbytes = nbytes};
    op.to_kind = kind_of(to, nbytes), op.from_kind = kind_of(from, nbytes);
    if (op.to_kind == SPLIT || op.from_kind == SPLIT) {
        count(SPLIT_COPIES, 1);
        return INVALID_VALUE;  // documented: a region is registered as a whole, or not at all
    }
    if (op.to_kind == PINNED && within(registered, to, nbytes)->flags & REGISTER_READ_ONLY)
        return INVALID_VALUE;  // seen on an H200
    int to_host = op.to_kind != ON_DEVICE, from_host = op.from_kind != ON_DEVICE;
    int is_staged = op.from_kind == PAGEABLE, is_pageable = is_staged || op.to_kind == PAGEABLE;
    if (stream->capture || implied(stream)) return put(stream, op);
    count(COPIES, 1);
    count(to_host ? BYTES_D2H : from_host ? BYTES_H2D : BYTES_D2D, nbytes);
    if (is_pageable) count(PAGEABLE_COPIES, 1);
    if (is_synchronous && is_staged) wait_for(stream);
    if (is_staged) {
        op.staged = malloc(nbytes);
        memcpy(op.staged, (void *)from, nbytes);
    }
    put(stream, op);
    if (op.to_kind == PAGEABLE || (to_host && from_host)
        || (is_synchronous && (to_host || op.from_kind == PINNED))) wait_for(stream);
    return failed(device);
}
#define COPY_CALLS(name, version) \
    API name##Async##version(Ptr to, Ptr from, size_t nbytes, Stream *stream) { \
        BEGIN(in_context); \
        return copy(to, from, nbytes, stream, 0); \
    } \
    API name##version(Ptr to, Ptr from, size_t nbytes) { \
        BEGIN(in_context); \
        BEGIN(unless_captured); \
        return copy(to, from, nbytes, NULL, 1); \
    } \
    API name##Async##version##_ptsz(Ptr to, Ptr from, size_t nbytes, Stream *stream) { \
        return name##Async##version(to, from, nbytes, OWN(stream)); \
    } \
    API name##version##_ptds(Ptr to, Ptr from, size_t nbytes) { \
        BEGIN(in_context); \
        BEGIN(unless_captured); \
        return copy(to, from, nbytes, OWN(NULL), 1); \
    }
COPY_CALLS(cuMemcpy, )
COPY_CALLS(cuMemcpyHtoD, _v2)
COPY_CALLS(cuMemcpyDtoH, _v2)
COPY_CALLS(cuMemcpyDtoD, _v2)

API cuMemsetD8Async(Ptr to, unsigned char value, size_t nbytes, Stream *handle) {
    BEGIN(in_context);
    BEGIN(after_registering);
    LOCKED;
    Stream *stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    int kind = kind_of(to, nbytes);
    if (kind != ON_DEVICE && kind != PINNED) return INVALID_VALUE;
    Op op = {.kind = FILL, .to = to, .nbytes = nbytes, .to_kind = kind, .value = value};
    return put(stream, op);
}

// -- calls for which NULL is the thread's own default stream --------------------------------------

#define OWN_CALL(name, parameters, ...) \
    API name##_ptsz parameters { return name(__VA_ARGS__); }
OWN_CALL(cuStreamSynchronize, (Stream *stream), OWN(stream))
OWN_CALL(cuStreamQuery, (Stream *stream), OWN(stream))
OWN_CALL(cuStreamBeginCapture_v2, (Stream *stream, int mode), OWN(stream), mode)
OWN_CALL(cuStreamEndCapture, (Stream *stream, Capture **graph), OWN(stream), graph)
OWN_CALL(cuStreamIsCapturing, (Stream *stream, int *status), OWN(stream), status)
OWN_CALL(cuStreamWaitEvent, (Stream *stream, Event *event, unsigned flags),
         OWN(stream), event, flags)
OWN_CALL(cuEventRecord, (Event *event, Stream *stream), event, OWN(stream))
OWN_CALL(cuMemsetD8Async, (Ptr to, unsigned char value, size_t nbytes, Stream *stream),
         to, value, nbytes, OWN(stream))

// -- names ----------------------------------------------------------------------------------------

API cuGetErrorName(int error, const char **name) {
    static const struct { int error; const char *name; } names[] = {
        {OK, "CUDA_SUCCESS"},
        {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
        {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
        {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
        {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {ALREADY_MAPPED, "CUDA_ERROR_ALREADY_MAPPED"},
        {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
        {NOT_READY, "CUDA_ERROR_NOT_READY"},
        {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED"},
        {HOST_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
        {HOST_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
        {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
        {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
        {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
        {CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"},
        {CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"},
        {CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
        {CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
        {CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT"},
        {CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"},
        {UNKNOWN, "CUDA_ERROR_UNKNOWN"},
    };
    *name = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].error == error) *name = names[i].name;
    return *name ? OK : INVALID_VALUE;
}

// cuda-bindings and libcudart find every other call through this one.
API cuGetProcAddress_v2(const char *symbol, void **found, int version, uint64_t flags,
                        int *status) {
    (void)version;
    enum { LEGACY_STREAM = 1, PER_THREAD_DEFAULT_STREAM = 2, OF_THREAD = 4 };
    static const char *endings[] = {"_v2_ptsz", "_v2_ptds", "_ptsz", "_ptds", "_v2", ""};
    if (flags & ~(LEGACY_STREAM | PER_THREAD_DEFAULT_STREAM)) return INVALID_VALUE;
    Dl_info info;
    char name[128];
    void *self = NULL;
    if (dladdr((void *)cuInit, &info)) self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *found = NULL;
    for (int i = flags & PER_THREAD_DEFAULT_STREAM ? 0 : OF_THREAD; self && !*found && i < 6; i++) {
        snprintf(name, sizeof name, "%s%s", symbol, endings[i]);
        *found = dlsym(self, name);
    }
    if (self) dlclose(self);
    if (status) *status = *found ? 0 : 1;  // 1: CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
    return OK;
}
