/* A libcuda.so.1 without a card: as much of the driver API as muxk calls, by the rules that cuda.h documents.
 *
 * It keeps real sets of SMs, so that overlap can be seen; it knows which streams and contexts live, which were
 * destroyed in the wrong order and which with work on them; it fails, lies or lacks functions when told to.
 * A process is told by environment variables before it starts (FAKE_CUDA_*, read once at load) and later by
 * fake_set; fake_get and fake_shared answer the test. One lock around every call.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100,
    INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
    CONTEXT_IS_DESTROYED = 709, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801, INVALID_RESOURCE_TYPE = 914,
    INVALID_RESOURCE_CONFIGURATION = 915, STREAM_DETACHED = 917, UNKNOWN = 999
};
enum { TYPE_INVALID = 0, TYPE_SM = 1 };
enum { SMS_MAX = 256, WORDS = SMS_MAX / 64, STACK_MAX = 16, MIB = 1 << 20 };
enum { PRIMARY_BYTES = 480 * MIB, GREEN_BYTES = 4 * MIB, GREEN_FLAG = 1, NON_BLOCKING = 1, BACKFILL = 1 };
enum { LEAST = 0, GREATEST = -5 };

typedef struct { uint64_t words[WORDS]; } SmSet;

/* As cuda.h 13 lays it out; what the driver keeps for itself is the set and whether it may be split. */
typedef struct {
    int type;
    union {
        unsigned char padding[92];
        struct { uint32_t unaligned[1]; uint32_t splittable; uint32_t split; uint32_t words[2 * WORDS]; } own;
    };
    union {
        struct { uint32_t count, minimum, alignment, flags, locality; } sm;
        unsigned char bytes[40];
    };
    void *next;
} Resource;
_Static_assert(sizeof(Resource) == 144 && offsetof(Resource, sm) == 96, "CUdevResource of cuda.h 13");

typedef struct { uint32_t count, coscheduled, preferred, flags, locality, reserved[11]; } GroupParams;
_Static_assert(sizeof(GroupParams) == 64, "CU_DEV_SM_RESOURCE_GROUP_PARAMS of cuda.h 13");

/* Every handle is one of these; freed ones stay in the list, so that a stale handle is found out. */
typedef enum { PRIMARY, GREEN, STREAM, EVENT, DESCRIPTION, KINDS } Kind;
typedef struct Object {
    struct Object *next;
    Kind kind;
    int alive, device, priority, flags, busy, failed, recorded;
    SmSet sms;
    struct Object *context;
} Object;

static struct {
    long sms, major, minor, driver, devices, total, fields, green;
    long lie, round, refuse_structured, overlap;
    long fail_at, fail_code;
    long calls, live[KINDS], retained, made_streams, made_greens, splits, structured;
    long out_of_order, destroyed_busy, released_early;
    char name[256], missing[1024], fail_call[64];
    int initialised;
    Object *objects, *primary;
} state;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread Object *stack[STACK_MAX];
static __thread int depth;

/* ---- telling it, asking it ---- */

static const struct { const char *key; long *value, initial; } SETTINGS[] = {
    {"SMS", &state.sms, 132}, {"MAJOR", &state.major, 9}, {"MINOR", &state.minor, 0},
    {"DRIVER", &state.driver, 13010}, {"DEVICES", &state.devices, 1}, {"MEMORY_MIB", &state.total, 144384},
    {"FIELDS", &state.fields, 1}, {"GREEN", &state.green, 1}, {"LIE", &state.lie, 0}, {"ROUND", &state.round, 0},
    {"REFUSE_STRUCTURED", &state.refuse_structured, 0}, {"OVERLAP", &state.overlap, 0},
    {"FAIL_AT", &state.fail_at, 0}, {"FAIL_CODE", &state.fail_code, OUT_OF_MEMORY},
};
static const struct { const char *key; long *value; } FIGURES[] = {
    {"calls", &state.calls}, {"primaries", &state.retained}, {"greens", &state.live[GREEN]},
    {"streams", &state.live[STREAM]}, {"events", &state.live[EVENT]}, {"made_streams", &state.made_streams},
    {"made_greens", &state.made_greens}, {"splits", &state.splits}, {"structured", &state.structured},
    {"out_of_order", &state.out_of_order}, {"destroyed_busy", &state.destroyed_busy},
    {"released_early", &state.released_early},
};
#define LENGTH(array) (sizeof(array) / sizeof(*(array)))

static void text_setting(const char *variable, char *into, size_t size, const char *otherwise)
{
    const char *given = getenv(variable);
    snprintf(into, size, "%s", given ? given : otherwise);
}

__attribute__((constructor)) static void load(void)
{
    for (size_t i = 0; i < LENGTH(SETTINGS); i++) {
        char variable[64];
        snprintf(variable, sizeof variable, "FAKE_CUDA_%s", SETTINGS[i].key);
        const char *given = getenv(variable);
        *SETTINGS[i].value = given ? atol(given) : SETTINGS[i].initial;
    }
    text_setting("FAKE_CUDA_NAME", state.name, sizeof state.name, "NVIDIA Fake 200");
    text_setting("FAKE_CUDA_MISSING", state.missing, sizeof state.missing, "");
}

int fake_set(const char *key, long value)
{
    for (size_t i = 0; i < LENGTH(SETTINGS); i++)
        if (!strcmp(SETTINGS[i].key, key)) {
            *SETTINGS[i].value = value;
            if (!strcmp(key, "FAIL_AT")) state.calls = 0;
            return 0;
        }
    return -1;
}

/* Only calls of this name count for FAIL_AT; an empty name counts all. */
void fake_fail_call(const char *name) { snprintf(state.fail_call, sizeof state.fail_call, "%s", name); }

long fake_get(const char *key)
{
    for (size_t i = 0; i < LENGTH(FIGURES); i++)
        if (!strcmp(FIGURES[i].key, key)) return *FIGURES[i].value;
    return -1;
}

/* ---- sets of SMs and handles ---- */

static int has(const SmSet *set, int sm) { return set->words[sm / 64] >> (sm % 64) & 1; }
static void add(SmSet *set, int sm) { set->words[sm / 64] |= 1ull << (sm % 64); }
static long count_of(const SmSet *set)
{
    long count = 0;
    for (int i = 0; i < WORDS; i++) count += __builtin_popcountll(set->words[i]);
    return count;
}

static SmSet whole(void)
{
    SmSet set = {{0}};
    for (int sm = 0; sm < state.sms && sm < SMS_MAX; sm++) add(&set, sm);
    return set;
}

/* Moves the first `count` SMs out of a set. */
static SmSet take(SmSet *from, long count)
{
    SmSet taken = {{0}};
    for (int sm = 0; sm < SMS_MAX && count > 0; sm++)
        if (has(from, sm)) {
            add(&taken, sm);
            from->words[sm / 64] &= ~(1ull << (sm % 64));
            count--;
        }
    return taken;
}

static Object *new_object(Kind kind)
{
    Object *object = calloc(1, sizeof *object);
    object->kind = kind;
    object->alive = 1;
    object->next = state.objects;
    state.objects = object;
    state.live[kind]++;
    return object;
}

static void end_object(Object *object)
{
    object->alive = 0;
    state.live[object->kind]--;
}

/* The handle, or NULL if it never was one of this kind. Dead ones are found too. */
static Object *find(const void *handle, Kind kind)
{
    for (Object *object = state.objects; object; object = object->next)
        if (object == handle) return object->kind == kind ? object : NULL;
    return NULL;
}

/* The dead are forgotten once there are many, or 10,000 cycles would take a second each. */
static void forget_the_dead(void)
{
    for (Object **place = &state.objects; *place;) {
        Object *object = *place;
        if (object->alive && object->kind != DESCRIPTION) place = &object->next;
        else {
            *place = object->next;
            free(object);
        }
    }
}

/* ---- entering a call ---- */

static void unlock(int *unused) { (void)unused; pthread_mutex_unlock(&lock); }

static int enter(const char *name)
{
    if (*state.fail_call && strcmp(state.fail_call, name)) return SUCCESS;
    state.calls++;
    return state.fail_at && state.calls == state.fail_at ? (int)state.fail_code : SUCCESS;
}

#define ENTER_EARLY(name)                                        \
    pthread_mutex_lock(&lock);                                   \
    __attribute__((cleanup(unlock), unused)) int locked = 1;     \
    int failed = enter(name);                                    \
    if (failed) return failed
#define ENTER(name)                                              \
    ENTER_EARLY(name);                                           \
    if (!state.initialised) return NOT_INITIALIZED

static int fake_cuInit(unsigned flags)
{
    ENTER_EARLY("cuInit");
    if (flags) return INVALID_VALUE;
    if (!state.devices) return NO_DEVICE;
    state.initialised = 1;
    return SUCCESS;
}

static int fake_cuDriverGetVersion(int *version)
{
    ENTER_EARLY("cuDriverGetVersion");
    *version = (int)state.driver;
    return SUCCESS;
}

static int fake_cuGetErrorName(int code, const char **text)
{
    *text = code == SUCCESS ? "CUDA_SUCCESS" : "CUDA_ERROR_FAKE";
    return SUCCESS;
}

static int fake_cuGetErrorString(int code, const char **text)
{
    switch (code) {
    case OUT_OF_MEMORY: *text = "out of memory"; return SUCCESS;
    case NO_DEVICE: *text = "no CUDA-capable device is detected"; return SUCCESS;
    case NOT_SUPPORTED: *text = "operation not supported"; return SUCCESS;
    case INVALID_DEVICE: *text = "invalid device ordinal"; return SUCCESS;
    case LAUNCH_FAILED: *text = "unspecified launch failure"; return SUCCESS;
    default: *text = NULL; return INVALID_VALUE;
    }
}

/* ---- devices and the primary context ---- */

static int fake_cuDeviceGetCount(int *count)
{
    ENTER("cuDeviceGetCount");
    *count = (int)state.devices;
    return SUCCESS;
}

static int fake_cuDeviceGet(int *device, int index)
{
    ENTER("cuDeviceGet");
    if (index < 0 || index >= state.devices) return INVALID_DEVICE;
    *device = index;
    return SUCCESS;
}

static int fake_cuDeviceGetName(char *name, int size, int device)
{
    ENTER("cuDeviceGetName");
    if (device < 0 || device >= state.devices) return INVALID_DEVICE;
    snprintf(name, (size_t)size, "%s", state.name);
    return SUCCESS;
}

static int fake_cuDeviceTotalMem(size_t *bytes, int device)
{
    ENTER("cuDeviceTotalMem");
    if (device < 0 || device >= state.devices) return INVALID_DEVICE;
    *bytes = (size_t)state.total * MIB;
    return SUCCESS;
}

static int fake_cuDeviceGetAttribute(int *value, int attribute, int device)
{
    ENTER("cuDeviceGetAttribute");
    if (device < 0 || device >= state.devices) return INVALID_DEVICE;
    switch (attribute) {
    case 16: *value = (int)state.sms; return SUCCESS;
    case 75: *value = (int)state.major; return SUCCESS;
    case 76: *value = (int)state.minor; return SUCCESS;
    default: return INVALID_VALUE;
    }
}

static Object *retain_primary(void)
{
    if (!state.primary) {
        state.primary = new_object(PRIMARY);
        state.primary->sms = whole();
    }
    state.retained++;
    return state.primary;
}

static int fake_cuDevicePrimaryCtxRetain(void **context, int device)
{
    ENTER("cuDevicePrimaryCtxRetain");
    if (device < 0 || device >= state.devices) return INVALID_DEVICE;
    *context = retain_primary();
    return SUCCESS;
}

static int release_primary(void)
{
    if (!state.retained) return INVALID_CONTEXT;
    if (--state.retained) return SUCCESS;
    for (Object *object = state.objects; object; object = object->next)
        if (object->kind == STREAM && object->alive) state.released_early++;
    end_object(state.primary);
    state.primary = NULL;
    if (!state.live[STREAM] && !state.live[EVENT]) forget_the_dead();
    return SUCCESS;
}

static int fake_cuDevicePrimaryCtxRelease(int device)
{
    ENTER("cuDevicePrimaryCtxRelease");
    return device < 0 || device >= state.devices ? INVALID_DEVICE : release_primary();
}

static int fake_cuCtxPushCurrent(void *context)
{
    ENTER("cuCtxPushCurrent");
    Object *object = find(context, PRIMARY);
    if (!object) object = find(context, GREEN);
    if (!object) return INVALID_CONTEXT;
    if (!object->alive) return CONTEXT_IS_DESTROYED;
    if (depth == STACK_MAX) return INVALID_VALUE;
    stack[depth++] = object;
    return SUCCESS;
}

static int fake_cuCtxPopCurrent(void **context)
{
    ENTER("cuCtxPopCurrent");
    if (!depth) return INVALID_CONTEXT;
    *context = stack[--depth];
    return SUCCESS;
}

static int fake_cuCtxGetCurrent(void **context)
{
    ENTER("cuCtxGetCurrent");
    *context = depth ? stack[depth - 1] : NULL;
    return SUCCESS;
}

static int fake_cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER("cuCtxGetStreamPriorityRange");
    if (!depth) return INVALID_CONTEXT;
    *least = LEAST;
    *greatest = GREATEST;
    return SUCCESS;
}

static int fake_cuMemGetInfo(size_t *free_bytes, size_t *total)
{
    ENTER("cuMemGetInfo");
    if (!depth) return INVALID_CONTEXT;
    *total = (size_t)state.total * MIB;
    *free_bytes = *total - PRIMARY_BYTES - (size_t)state.live[GREEN] * GREEN_BYTES;
    return SUCCESS;
}

/* ---- resources ---- */

/* cuda.h 13.0, at cuDevSmResourceSplitByCount. */
static void granularity(long *minimum, long *alignment)
{
    *minimum = state.major >= 9 ? 8 : state.major == 8 ? 4 : 2;
    *alignment = state.major >= 9 ? 8 : 2;
}

static Resource resource_of(SmSet set, int splittable)
{
    Resource resource;
    long minimum, alignment;
    memset(&resource, 0, sizeof resource);
    granularity(&minimum, &alignment);
    resource.type = count_of(&set) ? TYPE_SM : TYPE_INVALID;
    resource.own.splittable = (uint32_t)splittable;
    resource.own.split = (uint32_t)state.splits;
    memcpy(resource.own.words, set.words, sizeof set.words);
    resource.sm.count = (uint32_t)count_of(&set);
    if (state.fields && state.driver >= 13000) {
        resource.sm.minimum = (uint32_t)minimum;
        resource.sm.alignment = (uint32_t)alignment;
    }
    return resource;
}

static SmSet set_of(const Resource *resource)
{
    SmSet set;
    memcpy(set.words, resource->own.words, sizeof set.words);
    return set;
}

static int fake_cuDeviceGetDevResource(int device, Resource *resource, int type)
{
    ENTER("cuDeviceGetDevResource");
    if (device < 0 || device >= state.devices) return INVALID_DEVICE;
    if (!state.green) return NOT_SUPPORTED;
    if (type != TYPE_SM) return INVALID_RESOURCE_TYPE;
    *resource = resource_of(whole(), 1);
    return SUCCESS;
}

static int splittable(const Resource *input)
{
    if (!input) return INVALID_VALUE;
    if (input->type != TYPE_SM) return INVALID_RESOURCE_TYPE;
    return input->own.splittable ? SUCCESS : INVALID_RESOURCE_CONFIGURATION;
}

static int fake_cuDevSmResourceSplitByCount(
    Resource *result, unsigned *groups, const Resource *input, Resource *rest, unsigned flags, unsigned least)
{
    ENTER("cuDevSmResourceSplitByCount");
    long minimum, step;
    int wrong = splittable(input);
    if (wrong) return wrong;
    granularity(&minimum, &step);
    if (flags & 1) minimum = step = 2;
    if (state.round) step = state.round;
    if (!groups || least > input->sm.count) return INVALID_VALUE;
    long size = (long)least < minimum ? minimum : (long)least;
    size = (size + step - 1) / step * step;
    long possible = input->sm.count / size;
    if (result && !possible) return INVALID_RESOURCE_CONFIGURATION;
    if (*groups > possible || !result) *groups = (unsigned)possible;
    state.splits++;
    SmSet left = set_of(input);
    for (unsigned i = 0; result && i < *groups; i++) result[i] = resource_of(take(&left, size), 0);
    if (state.overlap) left = set_of(input);
    if (rest) *rest = resource_of(left, 0);
    return SUCCESS;
}

static int fake_cuDevSmResourceSplit(
    Resource *result, unsigned groups, const Resource *input, Resource *rest, unsigned flags, GroupParams *params)
{
    ENTER("cuDevSmResourceSplit");
    long minimum, step;
    int wrong = splittable(input);
    if (wrong) return wrong;
    if (flags || !params || !groups) return INVALID_VALUE;
    if (state.refuse_structured) return INVALID_RESOURCE_CONFIGURATION;
    granularity(&minimum, &step);
    SmSet left = set_of(input);
    state.splits++;
    for (unsigned i = 0; i < groups; i++) {
        long together = params[i].coscheduled ? params[i].coscheduled : step;
        if (!params[i].count) params[i].count = (unsigned)(count_of(&left) / together * together);
        long asked = params[i].count, strict = !(params[i].flags & BACKFILL);
        if (asked % 2 || asked < together || asked > count_of(&left) || (strict && asked % together))
            return INVALID_RESOURCE_CONFIGURATION;
        if (result) result[i] = resource_of(take(&left, asked), 0);
    }
    if (rest) *rest = resource_of(left, 0);
    state.structured++;
    return SUCCESS;
}

static int fake_cuDevResourceGenerateDesc(void **description, Resource *resources, unsigned count)
{
    ENTER("cuDevResourceGenerateDesc");
    if (!resources || !count) return INVALID_VALUE;
    SmSet set = {{0}};
    for (unsigned i = 0; i < count; i++) {
        if (resources[i].type != TYPE_SM) return INVALID_RESOURCE_TYPE;
        if (resources[i].own.split != resources[0].own.split) return INVALID_RESOURCE_CONFIGURATION;
        for (int w = 0; w < WORDS; w++) set.words[w] |= set_of(&resources[i]).words[w];
    }
    Object *object = new_object(DESCRIPTION);
    object->sms = set;
    *description = object;
    return SUCCESS;
}

/* ---- green contexts ---- */

static int fake_cuGreenCtxCreate(void **context, void *description, int device, unsigned flags)
{
    ENTER("cuGreenCtxCreate");
    Object *described = find(description, DESCRIPTION);
    if (device < 0 || device >= state.devices) return INVALID_DEVICE;
    if (!state.green) return NOT_SUPPORTED;
    if (!described || flags != GREEN_FLAG) return INVALID_VALUE;
    Object *object = new_object(GREEN);
    object->sms = described->sms;
    retain_primary();
    state.made_greens++;
    *context = object;
    return SUCCESS;
}

static int fake_cuGreenCtxDestroy(void *context)
{
    ENTER("cuGreenCtxDestroy");
    Object *object = find(context, GREEN);
    if (!object) return INVALID_CONTEXT;
    if (!object->alive) return CONTEXT_IS_DESTROYED;
    for (Object *other = state.objects; other; other = other->next)
        if (other->kind == STREAM && other->alive && other->context == object) {
            state.out_of_order++;
            state.destroyed_busy += other->busy;
        }
    end_object(object);
    return release_primary();
}

static int fake_cuCtxFromGreenCtx(void **context, void *green)
{
    ENTER("cuCtxFromGreenCtx");
    Object *object = find(green, GREEN);
    if (!object || !object->alive) return INVALID_CONTEXT;
    *context = object;
    return SUCCESS;
}

static int fake_cuGreenCtxGetDevResource(void *context, Resource *resource, int type)
{
    ENTER("cuGreenCtxGetDevResource");
    Object *object = find(context, GREEN);
    if (!object || !object->alive) return INVALID_CONTEXT;
    if (type != TYPE_SM) return INVALID_RESOURCE_TYPE;
    *resource = resource_of(object->sms, 1);
    resource->sm.count -= (uint32_t)state.lie;
    return SUCCESS;
}

/* ---- streams and events ---- */

static int new_stream(void **stream, Object *context, unsigned flags, int priority)
{
    Object *object = new_object(STREAM);
    object->context = context;
    object->sms = context->sms;
    object->flags = (int)flags;
    object->priority = priority > LEAST ? LEAST : priority < GREATEST ? GREATEST : priority;
    state.made_streams++;
    *stream = object;
    return SUCCESS;
}

static int fake_cuGreenCtxStreamCreate(void **stream, void *context, unsigned flags, int priority)
{
    ENTER("cuGreenCtxStreamCreate");
    Object *object = find(context, GREEN);
    if (!object || !object->alive) return INVALID_CONTEXT;
    return flags != NON_BLOCKING ? INVALID_VALUE : new_stream(stream, object, flags, priority);
}

static int fake_cuStreamCreateWithPriority(void **stream, unsigned flags, int priority)
{
    ENTER("cuStreamCreateWithPriority");
    return depth ? new_stream(stream, stack[depth - 1], flags, priority) : INVALID_CONTEXT;
}

/* What every call on a stream begins with. */
static int usable(const Object *stream)
{
    if (!stream || !stream->alive) return INVALID_HANDLE;
    if (!stream->context->alive) return STREAM_DETACHED;
    return stream->failed ? LAUNCH_FAILED : SUCCESS;
}

static int fake_cuStreamDestroy(void *stream)
{
    ENTER("cuStreamDestroy");
    Object *object = find(stream, STREAM);
    if (!object || !object->alive) return INVALID_HANDLE;
    if (!depth) return INVALID_CONTEXT;
    state.destroyed_busy += object->busy;
    end_object(object);
    return SUCCESS;
}

static int fake_cuStreamQuery(void *stream)
{
    ENTER("cuStreamQuery");
    Object *object = find(stream, STREAM);
    int wrong = usable(object);
    return wrong ? wrong : object->busy ? NOT_READY : SUCCESS;
}

static int fake_cuStreamSynchronize(void *stream)
{
    ENTER("cuStreamSynchronize");
    Object *object = find(stream, STREAM);
    int wrong = usable(object);
    if (!wrong) object->busy = 0;
    return wrong;
}

static int fake_cuStreamGetPriority(void *stream, int *priority)
{
    ENTER("cuStreamGetPriority");
    Object *object = find(stream, STREAM);
    int wrong = usable(object);
    if (!wrong) *priority = object->priority;
    return wrong;
}

static int fake_cuStreamGetFlags(void *stream, unsigned *flags)
{
    ENTER("cuStreamGetFlags");
    Object *object = find(stream, STREAM);
    int wrong = usable(object);
    if (!wrong) *flags = (unsigned)object->flags;
    return wrong;
}

static int fake_cuStreamGetDevResource(void *stream, Resource *resource, int type)
{
    ENTER("cuStreamGetDevResource");
    Object *object = find(stream, STREAM);
    int wrong = usable(object);
    if (wrong) return wrong;
    if (type != TYPE_SM) return INVALID_RESOURCE_TYPE;
    *resource = resource_of(object->sms, 0);
    return SUCCESS;
}

static int fake_cuEventCreate(void **event, unsigned flags)
{
    ENTER("cuEventCreate");
    if (!depth) return INVALID_CONTEXT;
    (*(Object **)event = new_object(EVENT))->flags = (int)flags;
    return SUCCESS;
}

static int fake_cuEventDestroy(void *event)
{
    ENTER("cuEventDestroy");
    Object *object = find(event, EVENT);
    if (!object || !object->alive) return INVALID_HANDLE;
    end_object(object);
    return SUCCESS;
}

static int fake_cuEventRecord(void *event, void *stream)
{
    ENTER("cuEventRecord");
    Object *object = find(event, EVENT), *on = find(stream, STREAM);
    int wrong = usable(on);
    if (wrong) return wrong;
    if (!object || !object->alive) return INVALID_HANDLE;
    object->context = on;
    object->recorded = 1;
    return SUCCESS;
}

static int fake_cuEventQuery(void *event)
{
    ENTER("cuEventQuery");
    Object *object = find(event, EVENT);
    if (!object || !object->alive) return INVALID_HANDLE;
    return object->recorded && object->context->busy ? NOT_READY : SUCCESS;
}

static int fake_cuStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    ENTER("cuStreamWaitEvent");
    Object *object = find(event, EVENT);
    int wrong = usable(find(stream, STREAM));
    return wrong ? wrong : !object || !object->alive ? INVALID_HANDLE : flags ? INVALID_VALUE : SUCCESS;
}

/* ---- more questions of tests ---- */

/* How many SMs two streams share; -1 if one is none. */
long fake_shared(const void *one, const void *other)
{
    const Object *a = find(one, STREAM), *b = find(other, STREAM);
    if (!a || !b) return -1;
    SmSet both;
    for (int i = 0; i < WORDS; i++) both.words[i] = a->sms.words[i] & b->sms.words[i];
    return count_of(&both);
}

/* Put work on a stream that ends when told so, or that breaks the device. */
int fake_busy(const void *stream, int busy, int failed)
{
    Object *object = find(stream, STREAM);
    if (!object || !object->alive) return -1;
    object->busy = busy;
    object->failed = failed;
    return 0;
}

/* ---- handing out the calls ---- */

static const struct { const char *name; void *function; int since; } CALLS[] = {
#define CALL(name, since) {#name, (void *)fake_##name, since}
    CALL(cuInit, 2000), CALL(cuDriverGetVersion, 2020), CALL(cuGetErrorName, 6000),
    CALL(cuGetErrorString, 6000), CALL(cuDeviceGetCount, 2000), CALL(cuDeviceGet, 2000),
    CALL(cuDeviceGetName, 2000), CALL(cuDeviceTotalMem, 3020), CALL(cuDeviceGetAttribute, 2000),
    CALL(cuDevicePrimaryCtxRetain, 7000), CALL(cuDevicePrimaryCtxRelease, 11000),
    CALL(cuCtxPushCurrent, 4000), CALL(cuCtxPopCurrent, 4000), CALL(cuCtxGetCurrent, 4000),
    CALL(cuCtxGetStreamPriorityRange, 5050), CALL(cuMemGetInfo, 3020),
    CALL(cuDeviceGetDevResource, 12040), CALL(cuDevSmResourceSplitByCount, 12040),
    CALL(cuDevSmResourceSplit, 13010), CALL(cuDevResourceGenerateDesc, 12040),
    CALL(cuGreenCtxCreate, 12040), CALL(cuGreenCtxDestroy, 12040), CALL(cuCtxFromGreenCtx, 12040),
    CALL(cuGreenCtxGetDevResource, 12040), CALL(cuGreenCtxStreamCreate, 12050),
    CALL(cuStreamCreateWithPriority, 5050), CALL(cuStreamDestroy, 4000), CALL(cuStreamQuery, 2000),
    CALL(cuStreamSynchronize, 2000), CALL(cuStreamGetPriority, 5050), CALL(cuStreamGetFlags, 5050),
    CALL(cuStreamGetDevResource, 13010), CALL(cuEventCreate, 2000), CALL(cuEventDestroy, 4000),
    CALL(cuEventRecord, 2000), CALL(cuEventQuery, 2000), CALL(cuStreamWaitEvent, 3020),
};

/* `name` is one of the words of a comma-separated list. */
static int listed(const char *list, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = list; (at = strstr(at, name)); at += length)
        if ((at == list || at[-1] == ',') && (at[length] == ',' || !at[length])) return 1;
    return 0;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    (void)flags;
    *function = NULL;
    if (status) *status = 1;
    for (size_t i = 0; i < LENGTH(CALLS); i++)
        if (!strcmp(CALLS[i].name, name) && CALLS[i].since <= version && CALLS[i].since <= state.driver &&
            !listed(state.missing, name)) {
            *function = CALLS[i].function;
            if (status) *status = 0;
            return SUCCESS;
        }
    return NOT_FOUND;
}
