/* A stand-in for libnccl.so.2: the calls that CuPy makes, between processes of one machine, on host memory, without a GPU.

   What it keeps of NCCL: calls return once they are enqueued; a stream works in order, one thread each; the operations of a
   communicator run in the order of their calls whatever their streams; a device does only so many at once (`Device`); a group's
   operations make progress together; a send ends only when its receiver has taken it (NCCL may buffer small ones:
   `SENDS_ARE_BUFFERED`); sums are in the order of a ring, not of the ranks; making a communicator blocks until all ranks have
   come, without a limit; an operation that waits for a peer that has aborted or died fails with a remote error, or waits on
   (`SILENT_LOSSES`, as between GPUs of one machine), until `ncclCommAbort`, which acts on this rank alone; a communicator that
   has failed refuses more operations with its error, and no other one. What it adds: faults on request (`standin_set`), and
   streams that tests can make, ask and call back from.
   Memory is shared by one file per communicator, which is unlinked as soon as all have it open. It carries the number of the
   process that made the id, so that what is left where not all came can be found (`helpers.standin.sweep`). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, DTYPES };
enum { SUM, PROD, MAX, MIN, AVG };
enum { SEND, RECV, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER };

#define RING_BYTES (256u << 10)
#define FRAME 16u
#define MAGIC 0x6e63636c7374616eull
#define MAX_OPS 256
#define MAX_RANKS 256

typedef struct { char internal[128]; } ncclUniqueId;

/* -- faults on request, and what has happened */

enum {
    INIT_HANGS, LAUNCHES_UNTIL_ERROR, OPERATIONS_UNTIL_ERROR, DELAY_US, ABORT_TAKES_MS, VERSION, LAUNCH_TAKES_MS, STATUS,
    INIT_STATUS, CALLS_UNTIL_ERROR, SILENT_LOSSES, SENDS_ARE_BUFFERED, SETTINGS
};
enum { LAUNCHED, NATIVE, ALIVE, COUNTS };
static _Atomic long settings[SETTINGS] = {[VERSION] = 22907, [STATUS] = SYSTEM_ERROR};
static _Atomic long counts[COUNTS];

void standin_set(int what, long value) { settings[what] = value; }
long standin_count(int what) { return counts[what]; }

static int counts_down(int what) { /* true for the call that takes a positive setting to 0 */
    long left = settings[what];
    while (left > 0)
        if (atomic_compare_exchange_weak(&settings[what], &left, left - 1)) return left == 1;
    return 0;
}

static void rest(int turn) { /* the machine may have few cores: do not spin for long */
    if (turn < 20) { sched_yield(); return; }
    struct timespec t = {0, turn < 200 ? 20000 : 200000};
    nanosleep(&t, NULL);
}

static void sleep_ms(long ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}

/* -- communicators */

typedef struct {
    _Atomic uint64_t written; char apart[56];
    _Atomic uint64_t read; char apart2[56];
    char data[RING_BYTES];
} Ring;

typedef struct {
    _Atomic int attached; char apart[60];
    _Atomic char left[MAX_RANKS]; /* whether a rank has ended its communicator */
    Ring rings[];
} Shared;

enum { HERE, DESTROYED, ABORTED };

typedef struct Comm {
    int size, rank, file;
    Shared *shared; size_t bytes;
    char path[128]; long number; /* the same on all ranks */
    _Atomic int aborted, error;
    _Atomic long tickets, serving; /* operations run in the order of their calls */
} Comm;

static Ring *ring(Comm *c, int from, int to) { return &c->shared->rings[from * c->size + to]; }

int ncclGetVersion(int *version) { *version = (int)settings[VERSION]; return OK; }

int ncclGetUniqueId(ncclUniqueId *id) {
    unsigned char noise[16];
    if (counts_down(CALLS_UNTIL_ERROR)) return (int)settings[STATUS];
    if (getrandom(noise, sizeof noise, 0) != sizeof noise) return SYSTEM_ERROR;
    memset(id, 0, sizeof *id);
    char *at = id->internal + sprintf(id->internal, "nccl-standin-%d-", (int)getpid());
    for (size_t i = 0; i < sizeof noise; i++) at += sprintf(at, "%02x", noise[i]);
    return OK;
}

int ncclCommInitRankConfig(Comm **out, int size, ncclUniqueId id, int rank, void *config) {
    (void)config;
    if (size < 1 || size > MAX_RANKS || rank < 0 || rank >= size || !strstr(id.internal, "standin")) return INVALID_ARGUMENT;
    for (int turn = 0; settings[INIT_HANGS]; turn++) rest(turn);
    int status = (int)settings[INIT_STATUS];
    if (status != OK && status != IN_PROGRESS) return status;
    char path[128];
    snprintf(path, sizeof path, "/dev/shm/%.100s", id.internal);
    size_t bytes = sizeof(Shared) + sizeof(Ring) * size * size;
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, (off_t)bytes)) return SYSTEM_ERROR;
    Shared *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED || fcntl(file, F_OFD_SETLK, &(struct flock){F_WRLCK, SEEK_SET, rank, 1, 0})) return SYSTEM_ERROR;
    if (atomic_fetch_add(&shared->attached, 1) == size - 1) unlink(path);
    for (int turn = 0; status == OK && shared->attached < size; turn++) rest(turn);
    Comm *c = calloc(1, sizeof *c);
    c->size = size; c->rank = rank; c->file = file; c->shared = shared; c->bytes = bytes; c->error = status;
    memcpy(c->path, path, sizeof path);
    char digits[16] = {0};
    memcpy(digits, strrchr(path, '-') + 1, 15);
    c->number = strtol(digits, NULL, 16);
    counts[ALIVE]++;
    *out = c;
    return status; /* in progress: for ever, there is a communicator all the same, which has to be ended */
}

int ncclCommCount(Comm *c, int *n) { *n = c->size; return OK; }
int ncclCommUserRank(Comm *c, int *rank) { *rank = c->rank; return OK; }
int ncclCommCuDevice(Comm *c, int *device) { (void)c; *device = 0; return OK; }
int ncclCommGetAsyncError(Comm *c, int *error) {
    if (!c) return INVALID_ARGUMENT;
    *error = c->error;
    return OK;
}

const char *ncclGetErrorString(int error) {
    switch (error) {
    case OK: return "no error";
    case SYSTEM_ERROR: return "unhandled system error";
    case INVALID_ARGUMENT: return "invalid argument";
    case INVALID_USAGE: return "invalid usage";
    case REMOTE_ERROR: return "remote process exited or there was a network error";
    case IN_PROGRESS: return "NCCL operation in progress";
    default: return "internal error";
    }
}

/* Raypar makes each communicator from an id of its own, in processes with one device each. */
int ncclCommInitAll(Comm **c, int n, const int *devices) { (void)c; (void)n; (void)devices; return INVALID_USAGE; }
int ncclCommSplit(Comm *c, int color, int key, Comm **out, void *config) {
    (void)c; (void)color; (void)key; (void)out; (void)config;
    return INVALID_USAGE;
}

/* Whether a rank has aborted, or its process has died, which gives its lock back. */
static int is_lost(Comm *c, int rank) {
    if (c->shared->left[rank] != HERE) return c->shared->left[rank] == ABORTED;
    struct flock lock = {F_WRLCK, SEEK_SET, rank, 1, 0};
    return !fcntl(c->file, F_OFD_GETLK, &lock) && lock.l_type == F_UNLCK && c->shared->left[rank] == HERE;
}

static void release(Comm *c) { /* the struct stays: somebody may still ask for its error */
    if (c->shared->attached < c->size) unlink(c->path);
    c->shared->left[c->rank] = c->aborted ? ABORTED : DESTROYED;
    close(c->file);
    munmap(c->shared, c->bytes);
    c->shared = NULL;
    counts[ALIVE]--;
}

int ncclCommDestroy(Comm *c) { /* waits for what is enqueued, like NCCL: for ever, if a peer is gone */
    if (!c) return INVALID_ARGUMENT;
    for (int turn = 0; c->serving != c->tickets; turn++) rest(turn);
    if (c->shared) release(c);
    return OK;
}

int ncclCommAbort(Comm *c) {
    if (!c) return INVALID_ARGUMENT;
    sleep_ms(settings[ABORT_TAKES_MS]);
    c->aborted = 1;
    return ncclCommDestroy(c);
}

/* -- arithmetic: one rounding for each addition, in the type itself (integers wrap: compile with -fwrapv) */

static float from_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023, bits;
    if (exponent == 31) bits = sign | 0x7f800000 | fraction << 13;
    else if (exponent) bits = sign | (exponent + 112) << 23 | fraction << 13;
    else { float f = (float)fraction * 0x1p-24f; return sign ? -f : f; }
    float f; memcpy(&f, &bits, 4); return f;
}

static uint16_t to_half(float f) {
    uint32_t bits; memcpy(&bits, &f, 4);
    uint16_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x47800000) return sign | 0x7c00;
    if (bits < 0x38800000) { /* subnormal: the hardware rounds to a multiple of 2^-24 */
        float magnitude; memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f; memcpy(&bits, &magnitude, 4);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    bits += 0xfff + (bits >> 13 & 1);
    return sign | (uint16_t)((bits - 0x38000000) >> 13);
}

static float from_bfloat(uint16_t b) { uint32_t bits = (uint32_t)b << 16; float f; memcpy(&f, &bits, 4); return f; }

static uint16_t to_bfloat(float f) {
    uint32_t bits; memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static const size_t item_bytes[DTYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

#define COMBINE(a, b) (op == SUM || op == AVG ? (a) + (b) : op == PROD ? (a) * (b) : op == MAX ? ((a) > (b) ? (a) : (b)) : ((a) < (b) ? (a) : (b)))
#define SAME(x) (x)
#define REDUCE_AS(type, wide, load, store)                                                     \
    {                                                                                          \
        type *total = into; const type *more = part;                                           \
        for (size_t i = 0; i < count; i++) {                                                   \
            wide a = load(total[i]), b = load(more[i]);                                        \
            total[i] = store((wide)COMBINE(a, b));                                             \
        }                                                                                      \
        if (op == AVG && last)                                                                 \
            for (size_t i = 0; i < count; i++) total[i] = store((wide)(load(total[i]) / (wide)size)); \
    }                                                                                          \
    break

static void reduce_into(void *into, const void *part, size_t count, int dtype, int op, int last, int size) {
    switch (dtype) {
    case INT8: REDUCE_AS(int8_t, int8_t, SAME, SAME);
    case UINT8: REDUCE_AS(uint8_t, uint8_t, SAME, SAME);
    case INT32: REDUCE_AS(int32_t, int32_t, SAME, SAME);
    case UINT32: REDUCE_AS(uint32_t, uint32_t, SAME, SAME);
    case INT64: REDUCE_AS(int64_t, int64_t, SAME, SAME);
    case UINT64: REDUCE_AS(uint64_t, uint64_t, SAME, SAME);
    case FLOAT16: REDUCE_AS(uint16_t, float, from_half, to_half);
    case FLOAT32: REDUCE_AS(float, float, SAME, SAME);
    case FLOAT64: REDUCE_AS(double, double, SAME, SAME);
    case BFLOAT16: REDUCE_AS(uint16_t, float, from_bfloat, to_bfloat);
    }
}

/* -- operations, and the tasks that streams carry out */

typedef struct {
    int kind, dtype, reduction, peer;
    Comm *comm;
    const char *from; char *to; size_t count;
    char *scratch; /* [size][bytes of a reduction], a part of each rank */
} Operation;

typedef struct {
    Comm *comm; int sending, from, to, over;
    char *memory; size_t bytes, moved; /* `moved` counts the frame too */
    union { uint64_t words[2]; char raw[FRAME]; } frame;
} Transfer;

typedef struct Stream Stream;

typedef struct Task {
    struct Task *next, *later; /* in its stream; on its device, of those that have no channel yet */
    void (*call)(void *); void *argument;
    int count; Operation *operations; long *tickets;
    Stream *stream; long number; /* its place in the stream */
} Task;

/* A device does so many operations of NCCL at once, whatever their streams: those that could begin, in the order in which they
   were enqueued. Each keeps its channel until it ends, also while it waits for its peers. */
typedef struct {
    long channels, running;
    Task *waiting;
    struct { long communicator, kind; } *log; long logged; /* what was enqueued */
} Device;

struct Stream {
    Device *device; /* may be NULL: no operations of NCCL are counted */
    pthread_t thread; pthread_mutex_t lock; pthread_cond_t changed;
    Task *first, **last; int ending;
    _Atomic long enqueued, completed;
};

static pthread_mutex_t launching = PTHREAD_MUTEX_INITIALIZER; /* guards devices, too */

static size_t bytes_of(const Operation *o) { return o->count * item_bytes[o->dtype]; }

static void add(Transfer *list, int *n, Comm *c, int sending, int peer, const char *memory, size_t bytes) {
    if (!bytes) return; /* like NCCL: nothing is moved, nobody waits */
    Transfer *t = &list[(*n)++];
    memset(t, 0, sizeof *t);
    t->comm = c; t->sending = sending; t->memory = (char *)memory; t->bytes = bytes;
    t->from = sending ? c->rank : peer; t->to = sending ? peer : c->rank;
    t->frame.words[0] = sending ? bytes : 0; t->frame.words[1] = sending ? MAGIC : 0;
}

static void plan(Operation *o, Transfer *list, int *n) {
    Comm *c = o->comm;
    size_t bytes = bytes_of(o);
    if (o->kind == ALL_REDUCE || o->kind == REDUCE || o->kind == REDUCE_SCATTER) o->scratch = malloc(bytes * c->size + 1);
    if (o->kind == SEND) add(list, n, c, 1, o->peer, o->from, bytes);
    else if (o->kind == RECV) add(list, n, c, 0, o->peer, o->to, bytes);
    else for (int peer = 0; peer < c->size; peer++) {
        if (peer == c->rank) continue;
        int sends = 1, takes = 1;
        const char *from = o->from; char *to = o->scratch ? o->scratch + bytes * peer : o->to + bytes * peer;
        if (o->kind == REDUCE) { sends = peer == o->peer; takes = c->rank == o->peer; }
        if (o->kind == BROADCAST) { sends = c->rank == o->peer; takes = peer == o->peer; to = o->to; }
        if (o->kind == REDUCE_SCATTER) from += bytes * peer;
        if (sends) add(list, n, c, 1, peer, from, bytes);
        if (takes) add(list, n, c, 0, peer, to, bytes);
    }
}

static void finish(Operation *o) {
    Comm *c = o->comm;
    size_t bytes = bytes_of(o);
    if (o->kind == ALL_GATHER) memmove(o->to + bytes * c->rank, o->from, bytes);
    if (o->kind == BROADCAST && c->rank == o->peer) memmove(o->to, o->from, bytes);
    if (!o->scratch || (o->kind == REDUCE && c->rank != o->peer)) return;
    memcpy(o->scratch + bytes * c->rank, o->from + (o->kind == REDUCE_SCATTER ? bytes * c->rank : 0), bytes);
    /* A ring starts each slice at another rank: slice s is ((p[s+1] + p[s+2]) + ...) + p[s]. */
    size_t item = item_bytes[o->dtype];
    for (int slice = 0; slice < c->size; slice++) {
        size_t start = o->count * slice / c->size, count = o->count * (slice + 1) / c->size - start;
        for (int turn = 1; turn <= c->size; turn++) {
            const char *part = o->scratch + bytes * ((slice + turn) % c->size) + start * item;
            if (turn == 1 && c->size > 1) memcpy(o->to + start * item, part, count * item);
            else if (c->size == 1) memmove(o->to, part, bytes);
            else reduce_into(o->to + start * item, part, count, o->dtype, o->reduction, turn == c->size, c->size);
        }
    }
}

static size_t copy_out(Ring *r, char *to, size_t most) {
    uint64_t read = r->read;
    size_t there = (size_t)(r->written - read), n = there < most ? there : most;
    for (size_t done = 0; done < n;) {
        size_t at = (read + done) % RING_BYTES, piece = RING_BYTES - at < n - done ? RING_BYTES - at : n - done;
        memcpy(to + done, r->data + at, piece);
        done += piece;
    }
    r->read = read + n;
    return n;
}

static size_t copy_in(Ring *r, const char *from, size_t most) {
    uint64_t written = r->written;
    size_t room = RING_BYTES - (size_t)(written - r->read), n = room < most ? room : most;
    for (size_t done = 0; done < n;) {
        size_t at = (written + done) % RING_BYTES, piece = RING_BYTES - at < n - done ? RING_BYTES - at : n - done;
        memcpy(r->data + at, from + done, piece);
        done += piece;
    }
    r->written = written + n;
    return n;
}

/* Move what can be moved. Returns the bytes moved; -1 when the other end means another message. */
static long advance(Transfer *t) {
    Ring *r = ring(t->comm, t->from, t->to);
    size_t before = t->moved;
    if (t->moved < FRAME) {
        char *frame = t->frame.raw + t->moved;
        t->moved += t->sending ? copy_in(r, frame, FRAME - t->moved) : copy_out(r, frame, FRAME - t->moved);
        if (t->moved == FRAME && !t->sending && (t->frame.words[0] != t->bytes || t->frame.words[1] != MAGIC)) return -1;
    }
    if (t->moved >= FRAME) {
        char *body = t->memory + (t->moved - FRAME);
        size_t left = t->bytes + FRAME - t->moved;
        t->moved += t->sending ? copy_in(r, body, left) : copy_out(r, body, left);
    }
    t->over = t->moved == t->bytes + FRAME && (!t->sending || settings[SENDS_ARE_BUFFERED] || r->read == r->written);
    return (long)(t->moved - before);
}

static int aborted(Task *task) {
    for (int i = 0; i < task->count; i++)
        if (task->operations[i].comm->aborted) return 1;
    return 0;
}

static int is_failure(int status) { return status != OK && status != IN_PROGRESS; }

static int has_its_turn(Task *task) { /* in its stream, and in its communicators */
    for (int i = 0; i < task->count; i++)
        if (task->operations[i].comm->serving < task->tickets[i]) return 0;
    return task->stream->completed == task->number;
}

/* Whether the task got a channel, or need not wait for one any more. */
static int take_channel(Device *d, Task *task, int given_up, int *taken) {
    pthread_mutex_lock(&launching);
    Task **at = &d->waiting;
    int first = 1;
    for (; *at != task; at = &(*at)->later) first &= !has_its_turn(*at);
    *taken = first && !given_up && d->running < d->channels;
    if (*taken || given_up) *at = task->later;
    d->running += *taken;
    pthread_mutex_unlock(&launching);
    return *taken || given_up;
}

static void work(Task *task) {
    Device *device = task->stream->device;
    int taken = 0;
    for (int turn = 0; !has_its_turn(task); turn++) rest(turn);
    for (int turn = 0; device && !take_channel(device, task, aborted(task), &taken); turn++) rest(turn);
    if (counts_down(OPERATIONS_UNTIL_ERROR)) task->operations[0].comm->error = (int)settings[STATUS];
    for (long us = settings[DELAY_US]; us > 0 && !aborted(task); us -= 200) rest(1000);
    int most = 0, n = 0;
    for (int i = 0; i < task->count; i++) most += 2 * task->operations[i].comm->size;
    Transfer *list = malloc(sizeof *list * (most + 1));
    if (!aborted(task))
        for (int i = 0; i < task->count; i++) plan(&task->operations[i], list, &n);
    int left = n, failed = 0;
    for (int turn = 0; !aborted(task) && (left || failed); turn++) {
        for (int i = 0; i < task->count; i++) failed |= is_failure(task->operations[i].comm->error);
        for (int i = 0; i < n && !failed; i++) {
            Transfer *t = &list[i];
            int behind = 0; /* one direction of a pair moves in order */
            for (int j = 0; j < i && !t->over; j++)
                behind |= !list[j].over && list[j].comm == t->comm && list[j].sending == t->sending && list[j].from == t->from && list[j].to == t->to;
            if (t->over || behind) continue;
            long moved = advance(t);
            if (moved < 0) t->comm->error = INVALID_USAGE;
            if (moved > 0) turn = 0;
            left -= t->over;
        }
        if (!failed && !settings[SILENT_LOSSES] && turn >= 20 && turn % 20 == 0)
            for (int i = 0; i < n; i++) {
                Transfer *t = &list[i];
                if (!t->over && is_lost(t->comm, t->sending ? t->to : t->from)) t->comm->error = REMOTE_ERROR;
            }
        rest(turn); /* who has failed waits for `ncclCommAbort`, as NCCL's kernels do */
    }
    for (int i = 0; i < task->count; i++) {
        if (!aborted(task)) finish(&task->operations[i]);
        free(task->operations[i].scratch);
    }
    free(list);
    for (int i = 0; i < task->count; i++) { /* what was in progress is over */
        int status = IN_PROGRESS;
        atomic_compare_exchange_strong(&task->operations[i].comm->error, &status, OK);
    }
    if (taken) {
        pthread_mutex_lock(&launching);
        device->running--;
        pthread_mutex_unlock(&launching);
    }
    /* A communicator's operations of one task have tickets in a row. */
    for (int i = 0; i < task->count; i++) task->operations[i].comm->serving++;
}

static void carry_out(Task *task) {
    if (task->call) task->call(task->argument);
    else work(task);
    free(task->operations);
    free(task->tickets);
    free(task);
}

static void *serve(void *argument) {
    Stream *s = argument;
    for (;;) {
        pthread_mutex_lock(&s->lock);
        while (!s->first && !s->ending) pthread_cond_wait(&s->changed, &s->lock);
        Task *task = s->first;
        if (!task) { pthread_mutex_unlock(&s->lock); return NULL; }
        if (!(s->first = task->next)) s->last = &s->first;
        pthread_mutex_unlock(&s->lock);
        carry_out(task);
        s->completed++;
    }
}

static void enqueue(Stream *s, Task *task) {
    pthread_mutex_lock(&s->lock);
    *s->last = task;
    s->last = &task->next;
    task->stream = s; task->number = s->enqueued++;
    pthread_cond_signal(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

Device *standin_device(long channels) {
    Device *d = calloc(1, sizeof *d);
    d->channels = channels;
    return d;
}

long standin_logged(Device *d) { return d->logged; }
long standin_log_communicator(Device *d, long i) { return d->log[i].communicator; }
long standin_log_kind(Device *d, long i) { return d->log[i].kind; }
long standin_communicator(Comm *c) { return c->number; }

Stream *standin_stream(Device *device) {
    Stream *s = calloc(1, sizeof *s);
    s->device = device;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    s->last = &s->first;
    if (pthread_create(&s->thread, NULL, serve, s)) { free(s); return NULL; }
    return s;
}

void standin_stream_call(Stream *s, void (*call)(void *), void *argument) {
    Task *task = calloc(1, sizeof *task);
    task->call = call; task->argument = argument;
    enqueue(s, task);
}

long standin_stream_enqueued(Stream *s) { return s->enqueued; }
long standin_stream_completed(Stream *s) { return s->completed; }

void standin_stream_end(Stream *s) { /* what is enqueued is still done */
    pthread_mutex_lock(&s->lock);
    s->ending = 1;
    pthread_cond_signal(&s->changed);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    free(s);
}

/* -- groups */

static _Thread_local int depth, grouped, group_error;
static _Thread_local Stream *group_stream;
static _Thread_local Operation group[MAX_OPS];

int ncclGroupStart(void) {
    if (depth++ == 0) { grouped = 0; group_error = OK; group_stream = NULL; }
    return OK;
}

int ncclGroupEnd(void) {
    if (depth == 0) return INVALID_USAGE;
    if (--depth > 0) return OK;
    if (group_error) return group_error;
    if (!grouped) return OK;
    int status = counts_down(LAUNCHES_UNTIL_ERROR) ? (int)settings[STATUS] : OK;
    if (is_failure(status)) return status;
    sleep_ms(settings[LAUNCH_TAKES_MS]);
    Task *task = calloc(1, sizeof *task);
    task->count = grouped;
    task->operations = malloc(sizeof(Operation) * grouped);
    memcpy(task->operations, group, sizeof(Operation) * grouped);
    task->tickets = malloc(sizeof(long) * grouped);
    pthread_mutex_lock(&launching);
    for (int i = 0; i < grouped; i++) {
        Comm *c = group[i].comm;
        task->tickets[i] = c->tickets;
        for (int j = 0; j < i; j++)
            if (group[j].comm == c) { task->tickets[i] = task->tickets[j]; break; } /* they run together */
    }
    for (int i = 0; i < grouped; i++) group[i].comm->tickets++;
    Device *d = group_stream->device;
    if (d) {
        Task **last = &d->waiting;
        while (*last) last = &(*last)->later;
        *last = task;
        if (d->logged % 1024 == 0) d->log = realloc(d->log, (d->logged + 1024) * sizeof *d->log);
        d->log[d->logged].communicator = group[0].comm->number;
        d->log[d->logged++].kind = group[0].kind;
    }
    task->stream = group_stream; task->number = -1; /* until it is in the stream */
    enqueue(group_stream, task);
    pthread_mutex_unlock(&launching);
    counts[LAUNCHED]++;
    return status; /* what is in progress was launched */
}

static int post(Operation o, int peers, Stream *s) {
    ncclGroupStart();
    int before = group_error;
    if (counts_down(CALLS_UNTIL_ERROR)) group_error = (int)settings[STATUS];
    else if (!o.comm || !s || o.dtype < 0 || o.dtype >= DTYPES) group_error = INVALID_ARGUMENT;
    else if (o.comm->aborted || grouped == MAX_OPS || (group_stream && group_stream != s)) group_error = INVALID_USAGE;
    else if (peers && (o.peer < 0 || o.peer >= o.comm->size)) group_error = INVALID_ARGUMENT;
    else if (o.comm->error != OK) group_error = is_failure(o.comm->error) ? o.comm->error : INVALID_ARGUMENT;
    else { group[grouped++] = o; group_stream = s; counts[NATIVE] += o.kind > RECV; }
    int failed = group_error != before ? group_error : OK, ended = ncclGroupEnd();
    return failed ? failed : ended;
}

int ncclSend(const void *from, size_t n, int dtype, int peer, Comm *c, Stream *s) {
    return post((Operation){SEND, dtype, 0, peer, c, from, NULL, n, NULL}, 1, s);
}
int ncclRecv(void *to, size_t n, int dtype, int peer, Comm *c, Stream *s) {
    return post((Operation){RECV, dtype, 0, peer, c, NULL, to, n, NULL}, 1, s);
}
int ncclAllReduce(const void *from, void *to, size_t n, int dtype, int op, Comm *c, Stream *s) {
    return post((Operation){ALL_REDUCE, dtype, op, 0, c, from, to, n, NULL}, 0, s);
}
int ncclReduce(const void *from, void *to, size_t n, int dtype, int op, int root, Comm *c, Stream *s) {
    return post((Operation){REDUCE, dtype, op, root, c, from, to, n, NULL}, 1, s);
}
int ncclBroadcast(const void *from, void *to, size_t n, int dtype, int root, Comm *c, Stream *s) {
    return post((Operation){BROADCAST, dtype, 0, root, c, from, to, n, NULL}, 1, s);
}
int ncclBcast(void *memory, size_t n, int dtype, int root, Comm *c, Stream *s) {
    return ncclBroadcast(memory, memory, n, dtype, root, c, s);
}
int ncclAllGather(const void *from, void *to, size_t n, int dtype, Comm *c, Stream *s) {
    return post((Operation){ALL_GATHER, dtype, 0, 0, c, from, to, n, NULL}, 0, s);
}
int ncclReduceScatter(const void *from, void *to, size_t n, int dtype, int op, Comm *c, Stream *s) {
    return post((Operation){REDUCE_SCATTER, dtype, op, 0, c, from, to, n, NULL}, 0, s);
}
