/*
 * A libdcgm.so.4 without GPUs: it answers what a script file says, through the
 * functions and structs that DCGM's own headers declare. It knows just enough
 * of a host engine to be strict about how it is used: values exist only while
 * they are watched, watches die with their connection, two calls at once end
 * the process.
 *
 * The script is read again on each call, so a test changes the node's state by
 * writing the file. Its language is documented in fakedcgm.go.
 */
#define _GNU_SOURCE
#define DCGM_API_EXPORT

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "dcgm_agent.h"
#include "dcgm_fields.h"
#include "dcgm_structs.h"

#define FIELD_COMPUTE_PIDS 221 /* DCGM_FI_DEV_COMPUTE_PIDS in dcgm_fields_internal.hpp */

enum { MAX_VALUES = 4096, MAX_MIG = 64, MAX_PIDS = 256, MAX_RULES = 64, MAX_GPUS = 32 };
enum { MAX_GROUPS = 64, MAX_FIELD_GROUPS = 64, MAX_WATCHES = 8192, MAX_MEMBERS = 256 };

static void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("fake libdcgm: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    abort();
}

/* ---- the script ---- */

struct value {
    unsigned group, id, field;
    char type;
    int status;
    int absolute;     /* when is a stamp, not an age */
    long long when;   /* microseconds */
    long long i64;
    double dbl;
    char str[128];
};

struct rule { unsigned a, b, c; int rc; };

struct mig { unsigned entity, gpu, instance, profile, slices; char name[64]; };

static struct script {
    unsigned gpus, generation;
    int call, connect, freeze;
    long long delay_ms, skew_us;
    struct value values[MAX_VALUES];
    int nvalues;
    struct mig migs[MAX_MIG];
    int nmigs;
    struct { unsigned gpu, pid; unsigned long long memory; } pids[MAX_PIDS];
    int npids;
    struct rule status[MAX_RULES], blank[MAX_RULES], gone[MAX_RULES], removed[MAX_RULES], unsupported[MAX_RULES], needwatch[MAX_RULES];
    int nstatus, nblank, ngone, nremoved, nunsupported, nneedwatch;
} script;

static struct timespec script_mtime;
static ino_t script_inode;
static off_t script_size = -1;
static long long loaded_at, frozen_at, last_now;

static long long wall_us(void)
{
    struct timeval t;
    gettimeofday(&t, NULL);
    return t.tv_sec * 1000000LL + t.tv_usec;
}

static void number(struct value *v, const char *text)
{
    static const struct { const char *word; int offset; } blanks[] = {
        { "blank", 0 }, { "notfound", 1 }, { "notsupported", 2 }, { "noperm", 3 },
    };
    for (unsigned i = 0; i < sizeof(blanks) / sizeof(*blanks); i++) {
        if (strcmp(text, blanks[i].word) == 0) {
            v->i64 = DCGM_INT64_BLANK + blanks[i].offset;
            v->dbl = DCGM_FP64_BLANK + blanks[i].offset;
            return;
        }
    }
    v->i64 = strtoll(text, NULL, 10);
    v->dbl = strtod(text, NULL);
}

static struct rule *add_rule(struct rule *rules, int *n, const char *line)
{
    if (*n >= MAX_RULES)
        die("too many rules: %s", line);
    return &rules[(*n)++];
}

static void read_line(struct script *s, char *line)
{
    char word[32] = "", text[128] = "", when[48] = "";
    int used = 0;
    struct value v = { 0 };
    unsigned a = 0, b = 0, c = 0;
    int rc = 0;
    unsigned long long memory = 0;

    if (sscanf(line, "%31s %n", word, &used) < 1 || word[0] == '#')
        return;
    const char *rest = line + used;
    if (strcmp(word, "gpus") == 0 && sscanf(rest, "%u", &s->gpus) == 1) {
        if (s->gpus > MAX_GPUS)
            die("%u GPUs; at most %d", s->gpus, MAX_GPUS);
    } else if (strcmp(word, "v") == 0 || strcmp(word, "at") == 0) {
        if (s->nvalues >= MAX_VALUES)
            die("more than %d values", MAX_VALUES);
        if (sscanf(rest, "%u %u %u %c %d %47s %127[^\n]", &v.group, &v.id, &v.field, &v.type, &v.status, when, text) < 7)
            die("bad line: %s", line);
        v.absolute = word[0] == 'a';
        v.when     = when[0] == '@' ? loaded_at + strtoll(when + 1, NULL, 10) : strtoll(when, NULL, 10);
        if (v.type == DCGM_FT_STRING)
            memcpy(v.str, text, sizeof(v.str));
        else
            number(&v, text);
        s->values[s->nvalues++] = v;
    } else if (strcmp(word, "mig") == 0) {
        if (s->nmigs >= MAX_MIG)
            die("more than %d MIG instances", MAX_MIG);
        struct mig *m = &s->migs[s->nmigs++];
        if (sscanf(rest, "%u %u %u %u %u %63s", &m->entity, &m->gpu, &m->instance, &m->profile, &m->slices, m->name) != 6)
            die("bad line: %s", line);
    } else if (strcmp(word, "pid") == 0 && sscanf(rest, "%u %u %llu", &a, &b, &memory) >= 2) {
        if (s->npids >= MAX_PIDS)
            die("more than %d processes", MAX_PIDS);
        s->pids[s->npids].gpu      = a;
        s->pids[s->npids].pid      = b;
        s->pids[s->npids++].memory = memory;
    } else if (strcmp(word, "status") == 0 && sscanf(rest, "%u %d", &a, &rc) == 2) {
        *add_rule(s->status, &s->nstatus, line) = (struct rule) { .a = a, .rc = rc };
    } else if (strcmp(word, "blank") == 0 && sscanf(rest, "%u %u", &a, &b) == 2) {
        *add_rule(s->blank, &s->nblank, line) = (struct rule) { .a = a, .b = b };
    } else if (strcmp(word, "gone") == 0 && sscanf(rest, "%u", &a) == 1) {
        *add_rule(s->gone, &s->ngone, line) = (struct rule) { .a = a };
    } else if (strcmp(word, "rm") == 0 && sscanf(rest, "%u %u %u", &a, &b, &c) == 3) {
        *add_rule(s->removed, &s->nremoved, line) = (struct rule) { .a = a, .b = b, .c = c };
    } else if (strcmp(word, "unsupported") == 0 && sscanf(rest, "%u %d", &a, &rc) == 2) {
        *add_rule(s->unsupported, &s->nunsupported, line) = (struct rule) { .a = a, .rc = rc };
    } else if (strcmp(word, "needwatch") == 0 && sscanf(rest, "%u %d", &a, &rc) == 2) {
        *add_rule(s->needwatch, &s->nneedwatch, line) = (struct rule) { .a = a, .rc = rc };
    } else if (strcmp(word, "call") == 0 && sscanf(rest, "%d", &rc) == 1) {
        s->call = rc;
    } else if (strcmp(word, "connect") == 0 && sscanf(rest, "%d", &rc) == 1) {
        s->connect = rc;
    } else if (strcmp(word, "delay") == 0 && sscanf(rest, "%lld", &s->delay_ms) == 1) {
    } else if (strcmp(word, "skew") == 0 && sscanf(rest, "%lld", &s->skew_us) == 1) {
    } else if (strcmp(word, "generation") == 0 && sscanf(rest, "%u", &s->generation) == 1) {
    } else if (strcmp(word, "freeze") == 0 && sscanf(rest, "%d", &s->freeze) == 1) {
    } else {
        die("bad line: %s", line);
    }
}

static void load(void)
{
    const char *path = getenv("FAIRLEAD_FAKEDCGM_SCRIPT");
    struct stat st;
    if (path == NULL)
        die("FAIRLEAD_FAKEDCGM_SCRIPT does not name a script");
    if (stat(path, &st) != 0)
        die("no script at %s", path);
    if (st.st_ino == script_inode && st.st_size == script_size && st.st_mtim.tv_sec == script_mtime.tv_sec
        && st.st_mtim.tv_nsec == script_mtime.tv_nsec)
        return;
    FILE *f = fopen(path, "r");
    if (f == NULL)
        die("cannot read %s", path);
    if (loaded_at == 0)
        loaded_at = wall_us();
    memset(&script, 0, sizeof(script));
    char line[512];
    while (fgets(line, sizeof(line), f) != NULL)
        read_line(&script, line);
    fclose(f);
    script_inode = st.st_ino;
    script_size  = st.st_size;
    script_mtime = st.st_mtim;
    if (!script.freeze)
        frozen_at = 0;
}

/* The host engine's clock. It never says the same twice, as a sample's stamp
 * tells it from the one before. */
static long long now_us(void)
{
    if (script.freeze) {
        if (frozen_at == 0)
            frozen_at = wall_us();
        return frozen_at + script.skew_us;
    }
    long long now = wall_us();
    if (now <= last_now)
        now = last_now + 1;
    last_now = now;
    return now + script.skew_us;
}

static const struct rule *find_rule(const struct rule *rules, int n, unsigned a, unsigned b, unsigned c)
{
    for (int i = 0; i < n; i++)
        if (rules[i].a == a && rules[i].b == b && rules[i].c == c)
            return &rules[i];
    return NULL;
}

/* ---- connections, groups, watches ---- */

static struct { dcgmHandle_t handle; unsigned generation; int alive; } connection;
static struct group { int used; unsigned count; dcgmGroupEntityPair_t members[MAX_MEMBERS]; } groups[MAX_GROUPS];
static struct fields { int used, count; unsigned short ids[DCGM_MAX_FIELD_IDS_PER_FIELD_GROUP]; } field_groups[MAX_FIELD_GROUPS];
static struct watch { unsigned group, id, field; int samples, on, times; } watches[MAX_WATCHES];
static int nwatches, initialised;
static dcgmHandle_t last_handle = 100;
static atomic_int inside;

static void forget_connection(void)
{
    memset(&connection, 0, sizeof(connection));
    memset(groups, 0, sizeof(groups));
    memset(field_groups, 0, sizeof(field_groups));
    for (int i = 0; i < nwatches; i++)
        watches[i].on = watches[i].times = 0;
}

static void enter(void)
{
    if (atomic_fetch_add(&inside, 1) != 0)
        die("two calls at once");
    load();
}

static dcgmReturn_t leave(dcgmReturn_t rc)
{
    atomic_fetch_sub(&inside, 1);
    return rc;
}

/* Enters a call that needs the host engine: it waits as long as the script says
 * (and no longer than a changed script says) and gives the engine's answer. */
static dcgmReturn_t enter_engine(dcgmHandle_t handle)
{
    enter();
    if (!initialised)
        die("a call before dcgmInit");
    long long begin = wall_us();
    while (script.delay_ms > 0 && wall_us() - begin < script.delay_ms * 1000) {
        usleep(2000);
        load();
    }
    if (!connection.alive || handle != connection.handle || connection.generation != script.generation)
        return DCGM_ST_CONNECTION_NOT_VALID;
    return script.call;
}

static dcgmReturn_t connect_engine(dcgmHandle_t *handle)
{
    if (!initialised)
        die("a connection before dcgmInit");
    if (script.connect != DCGM_ST_OK)
        return script.connect;
    forget_connection();
    connection.handle     = ++last_handle;
    connection.generation = script.generation;
    connection.alive      = 1;
    *handle               = connection.handle;
    return DCGM_ST_OK;
}

dcgmReturn_t DCGM_PUBLIC_API dcgmInit(void)
{
    enter();
    initialised = 1;
    return leave(DCGM_ST_OK);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmShutdown(void)
{
    enter();
    initialised = 0;
    forget_connection();
    const char *ended = getenv("FAIRLEAD_FAKEDCGM_ENDED");
    FILE *file        = ended ? fopen(ended, "w") : NULL;
    if (file)
        fclose(file);
    return leave(DCGM_ST_OK);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmStartEmbedded(dcgmOperationMode_t mode, dcgmHandle_t *handle)
{
    enter();
    return leave(mode == DCGM_OPERATION_MODE_AUTO ? connect_engine(handle) : DCGM_ST_BADPARAM);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmStopEmbedded(dcgmHandle_t handle)
{
    enter();
    dcgmReturn_t rc = connection.alive && handle == connection.handle ? DCGM_ST_OK : DCGM_ST_CONNECTION_NOT_VALID;
    forget_connection();
    return leave(rc);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmConnect_v2(const char *address, dcgmConnectV2Params_t *params, dcgmHandle_t *handle)
{
    enter();
    if (params->version != dcgmConnectV2Params_version2)
        return leave(DCGM_ST_VER_MISMATCH);
    if (address == NULL || (address[0] == '/') != (params->addressIsUnixSocket == 1))
        return leave(DCGM_ST_BADPARAM);
    return leave(connect_engine(handle));
}

dcgmReturn_t DCGM_PUBLIC_API dcgmConnect_v3(const char *address, dcgmConnectV3Params_t *params, dcgmHandle_t *handle)
{
    enter();
    if (params->version != dcgmConnectV3Params_version1)
        return leave(DCGM_ST_VER_MISMATCH);
    if (address == NULL || strstr(address, "://") == NULL)
        return leave(DCGM_ST_BADPARAM);
    return leave(connect_engine(handle));
}

dcgmReturn_t DCGM_PUBLIC_API dcgmDisconnect(dcgmHandle_t handle)
{
    enter();
    dcgmReturn_t rc = connection.alive && handle == connection.handle && connection.generation == script.generation
                          ? DCGM_ST_OK
                          : DCGM_ST_CONNECTION_NOT_VALID;
    forget_connection();
    return leave(rc);
}

DCGM_PUBLIC_API const char *errorString(dcgmReturn_t rc)
{
    switch (rc) {
        case DCGM_ST_OK: return "Success";
        case DCGM_ST_BADPARAM: return "Bad parameter passed to function";
        case DCGM_ST_GENERIC_ERROR: return "Generic unspecified error";
        case DCGM_ST_NOT_SUPPORTED: return "This request is not supported";
        case DCGM_ST_TIMEOUT: return "Request timed out";
        case DCGM_ST_VER_MISMATCH: return "API version mismatch";
        case DCGM_ST_UNKNOWN_FIELD: return "Unknown field identifier";
        case DCGM_ST_GPU_IS_LOST: return "GPU is lost";
        case DCGM_ST_CONNECTION_NOT_VALID: return "Host engine connection invalid/disconnected";
        case DCGM_ST_MAX_LIMIT: return "Max limit reached for the object";
        case DCGM_ST_MODULE_NOT_LOADED: return "This request is serviced by a module of DCGM that is not currently loaded";
        case DCGM_ST_PROFILING_NOT_SUPPORTED: return "Profiling is not supported for this group of GPUs or GPU";
        case DCGM_ST_PAUSED: return "The hostengine and all modules are paused";
        case DCGM_ST_NVML_DRIVER_TIMEOUT: return "Cannot perform operation because an NVML driver timeout error was detected";
        case DCGM_ST_GPUS_DETACHED: return "GPUs are detached";
        default: return "Error";
    }
}

static struct group *find_group(dcgmGpuGrp_t id)
{
    return id >= 1 && id <= MAX_GROUPS && groups[id - 1].used ? &groups[id - 1] : NULL;
}

static struct fields *find_fields(dcgmFieldGrp_t id)
{
    return id >= 1 && id <= MAX_FIELD_GROUPS && field_groups[id - 1].used ? &field_groups[id - 1] : NULL;
}

dcgmReturn_t DCGM_PUBLIC_API dcgmGroupCreate(dcgmHandle_t handle, dcgmGroupType_t type, const char *name, dcgmGpuGrp_t *id)
{
    dcgmReturn_t rc = enter_engine(handle);
    if (rc != DCGM_ST_OK)
        return leave(rc);
    if (type != DCGM_GROUP_EMPTY || name == NULL)
        return leave(DCGM_ST_BADPARAM);
    for (int i = 0; i < MAX_GROUPS; i++) {
        if (!groups[i].used) {
            groups[i] = (struct group) { .used = 1 };
            *id       = i + 1;
            return leave(DCGM_ST_OK);
        }
    }
    return leave(DCGM_ST_MAX_LIMIT);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmGroupDestroy(dcgmHandle_t handle, dcgmGpuGrp_t id)
{
    dcgmReturn_t rc = enter_engine(handle);
    if (rc != DCGM_ST_OK)
        return leave(rc);
    struct group *g = find_group(id);
    if (g == NULL)
        return leave(DCGM_ST_NOT_CONFIGURED);
    g->used = 0;
    return leave(DCGM_ST_OK);
}

static int gpu_present(unsigned gpu)
{
    return gpu < script.gpus && find_rule(script.gone, script.ngone, gpu, 0, 0) == NULL;
}

static const struct mig *find_mig(unsigned entity)
{
    for (int i = 0; i < script.nmigs; i++)
        if (script.migs[i].entity == entity)
            return &script.migs[i];
    return NULL;
}

static int present(unsigned group, unsigned id)
{
    if (group == DCGM_FE_GPU)
        return gpu_present(id);
    return group == DCGM_FE_GPU_I && find_mig(id) != NULL;
}

dcgmReturn_t DCGM_PUBLIC_API dcgmGroupAddEntity(dcgmHandle_t handle,
                                                dcgmGpuGrp_t id,
                                                dcgm_field_entity_group_t group,
                                                dcgm_field_eid_t entity)
{
    dcgmReturn_t rc = enter_engine(handle);
    if (rc != DCGM_ST_OK)
        return leave(rc);
    struct group *g = find_group(id);
    if (g == NULL)
        return leave(DCGM_ST_NOT_CONFIGURED);
    if (!present(group, entity) || g->count >= MAX_MEMBERS)
        return leave(DCGM_ST_BADPARAM);
    g->members[g->count++] = (dcgmGroupEntityPair_t) { group, entity };
    return leave(DCGM_ST_OK);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmGroupAddDevice(dcgmHandle_t handle, dcgmGpuGrp_t id, unsigned int gpu)
{
    return dcgmGroupAddEntity(handle, id, DCGM_FE_GPU, gpu);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmFieldGroupCreate(dcgmHandle_t handle,
                                                  int count,
                                                  const unsigned short *ids,
                                                  const char *name,
                                                  dcgmFieldGrp_t *id)
{
    dcgmReturn_t rc = enter_engine(handle);
    if (rc != DCGM_ST_OK)
        return leave(rc);
    if (count < 1 || count > DCGM_MAX_FIELD_IDS_PER_FIELD_GROUP || name == NULL)
        return leave(DCGM_ST_BADPARAM);
    for (int i = 0; i < MAX_FIELD_GROUPS; i++) {
        if (!field_groups[i].used) {
            field_groups[i] = (struct fields) { .used = 1, .count = count };
            memcpy(field_groups[i].ids, ids, count * sizeof(*ids));
            *id = i + 1;
            return leave(DCGM_ST_OK);
        }
    }
    return leave(DCGM_ST_MAX_LIMIT);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmFieldGroupDestroy(dcgmHandle_t handle, dcgmFieldGrp_t id)
{
    dcgmReturn_t rc = enter_engine(handle);
    if (rc != DCGM_ST_OK)
        return leave(rc);
    struct fields *f = find_fields(id);
    if (f == NULL)
        return leave(DCGM_ST_NO_DATA);
    f->used = 0;
    return leave(DCGM_ST_OK);
}

static struct watch *find_watch(unsigned group, unsigned id, unsigned field)
{
    for (int i = 0; i < nwatches; i++)
        if (watches[i].id == id && watches[i].field == field && watches[i].group == group)
            return &watches[i];
    return NULL;
}

dcgmReturn_t DCGM_PUBLIC_API dcgmWatchFields(dcgmHandle_t handle,
                                             dcgmGpuGrp_t group,
                                             dcgmFieldGrp_t fields,
                                             long long period_us,
                                             double keep_age,
                                             int keep_samples)
{
    dcgmReturn_t rc = enter_engine(handle);
    if (rc != DCGM_ST_OK)
        return leave(rc);
    struct group *g  = find_group(group);
    struct fields *f = find_fields(fields);
    if (g == NULL || f == NULL || period_us < 1000 || keep_age < 0)
        return leave(DCGM_ST_BADPARAM);
    if (g->count == 0)
        return leave(DCGM_ST_GROUP_IS_EMPTY);
    for (int i = 0; i < f->count; i++) {
        const struct rule *r = find_rule(script.unsupported, script.nunsupported, f->ids[i], 0, 0);
        if (r != NULL)
            return leave(r->rc);
    }
    for (unsigned m = 0; m < g->count; m++) {
        for (int i = 0; i < f->count; i++) {
            struct watch *w = find_watch(g->members[m].entityGroupId, g->members[m].entityId, f->ids[i]);
            if (w == NULL) {
                if (nwatches >= MAX_WATCHES)
                    die("more than %d watches", MAX_WATCHES);
                w  = &watches[nwatches++];
                *w = (struct watch) { .group = g->members[m].entityGroupId, .id = g->members[m].entityId, .field = f->ids[i] };
            }
            w->on      = 1;
            w->samples = keep_samples;
            w->times++;
        }
    }
    return leave(DCGM_ST_OK);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmUnwatchFields(dcgmHandle_t handle, dcgmGpuGrp_t group, dcgmFieldGrp_t fields)
{
    dcgmReturn_t rc = enter_engine(handle);
    if (rc != DCGM_ST_OK)
        return leave(rc);
    struct group *g  = find_group(group);
    struct fields *f = find_fields(fields);
    if (g == NULL || f == NULL)
        return leave(DCGM_ST_BADPARAM);
    for (unsigned m = 0; m < g->count; m++) {
        for (int i = 0; i < f->count; i++) {
            struct watch *w = find_watch(g->members[m].entityGroupId, g->members[m].entityId, f->ids[i]);
            if (w != NULL)
                w->on = 0;
        }
    }
    return leave(DCGM_ST_OK);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmUpdateAllFields(dcgmHandle_t handle, int wait)
{
    (void)wait;
    return leave(enter_engine(handle));
}

/* ---- values ---- */

static char field_type(unsigned field)
{
    switch (field) {
        case DCGM_FI_DEV_GPU_NAME:
        case DCGM_FI_DEV_GPU_UUID:
        case DCGM_FI_DEV_PCI_BUS_ID:
            return DCGM_FT_STRING;
        case DCGM_FI_DEV_BOARD_POWER_WATTS:
        case DCGM_FI_DEV_BOARD_POWER_RAW_WATTS:
        case DCGM_FI_DEV_FB_USED_RATIO:
            return DCGM_FT_DOUBLE;
        case FIELD_COMPUTE_PIDS:
            return DCGM_FT_BINARY;
        case DCGM_FI_PROF_PCIE_TX_BYTES:
        case DCGM_FI_PROF_PCIE_RX_BYTES:
        case DCGM_FI_PROF_NVLINK_TX_BYTES:
        case DCGM_FI_PROF_NVLINK_RX_BYTES:
            return DCGM_FT_INT64;
    }
    return field >= DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO && field <= DCGM_FI_PROF_FP16_UTIL_RATIO ? DCGM_FT_DOUBLE : DCGM_FT_INT64;
}

static void set_blank(struct value *v, int offset)
{
    v->i64 = DCGM_INT64_BLANK + offset;
    v->dbl = DCGM_FP64_BLANK + offset;
    strcpy(v->str, offset == 2 ? DCGM_STR_NOT_SUPPORTED : DCGM_STR_BLANK);
}

static int has_instances(unsigned gpu)
{
    for (int i = 0; i < script.nmigs; i++)
        if (script.migs[i].gpu == gpu)
            return 1;
    return 0;
}

static void uuid(unsigned gpu, char *to, size_t size)
{
    for (int i = script.nvalues - 1; i >= 0; i--) {
        const struct value *v = &script.values[i];
        if (v->group == DCGM_FE_GPU && v->id == gpu && v->field == DCGM_FI_DEV_GPU_UUID) {
            snprintf(to, size, "%s", v->str);
            return;
        }
    }
    snprintf(to, size, "GPU-fa4e0000-0000-4000-8000-%012u", gpu);
}

/* A GPU that is well and busy. Returns whether the field has a value. */
static int standard(unsigned gpu, unsigned field, struct value *v)
{
    switch (field) {
        case DCGM_FI_DEV_GPU_UUID: uuid(gpu, v->str, sizeof(v->str)); return 1;
        case DCGM_FI_DEV_GPU_NAME: strcpy(v->str, "NVIDIA H100 80GB HBM3"); return 1;
        case DCGM_FI_DEV_MIG_MODE: v->i64 = has_instances(gpu); return 1;
        case DCGM_FI_DEV_FB_TOTAL: v->i64 = 81559; return 1;
        case DCGM_FI_DEV_FB_USED: v->i64 = 75000; return 1;
        case DCGM_FI_DEV_FB_RESERVED: v->i64 = 559; return 1;
        case DCGM_FI_DEV_FB_FREE: v->i64 = 6000; return 1;
        case DCGM_FI_DEV_FB_USED_RATIO: v->dbl = 75000.0 / 81000.0; return 1;
        case DCGM_FI_DEV_GPU_UTIL_RATIO: v->i64 = 80; return !has_instances(gpu);
        case DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO: v->dbl = 0.7; return 1;
        case DCGM_FI_PROF_SM_UTIL_RATIO: v->dbl = 0.5; return 1;
        case DCGM_FI_PROF_TENSOR_UTIL_RATIO: v->dbl = 0.25; return 1;
        case DCGM_FI_PROF_DRAM_UTIL_RATIO: v->dbl = 0.4; return 1;
        case DCGM_FI_PROF_PCIE_TX_BYTES: v->i64 = 1000000000; return 1;
        case DCGM_FI_PROF_PCIE_RX_BYTES: v->i64 = 2000000000; return 1;
        case DCGM_FI_DEV_BOARD_POWER_WATTS: v->dbl = 410; return 1;
        case DCGM_FI_DEV_BOARD_POWER_RAW_WATTS: v->dbl = 420; return 1;
        case DCGM_FI_DEV_GPU_TEMP_MARGIN_CELSIUS: v->i64 = 30; return 1;
        case DCGM_FI_DEV_GPU_TEMP_CELSIUS: v->i64 = 57; return 1;
        case DCGM_FI_DEV_CLOCKS_EVENT_REASONS: v->i64 = 0; return 1;
        /* 420 W in mJ since the library was loaded; microseconds, so that each read sees it move */
        case DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION:
            v->i64 = 1000000000LL + (script.freeze ? frozen_at : wall_us()) - loaded_at;
            return 1;
        case DCGM_FI_DEV_GPU_RECOVERY_ACTION: return 1;
        case DCGM_FI_DEV_ECC_SBE_VOL_TOTAL: return 1;
        case DCGM_FI_DEV_ECC_DBE_VOL_TOTAL: return 1;
        case DCGM_FI_DEV_ROW_REMAP_FAILED: return 1;
        case DCGM_FI_DEV_ROW_REMAP_PENDING: return 1;
        case DCGM_FI_DEV_PCIE_MAX_LINK_GEN: v->i64 = 5; return 1;
        case DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH: v->i64 = 16; return 1;
        case DCGM_FI_DEV_PCIE_LINK_GEN: v->i64 = 5; return 1;
        case DCGM_FI_DEV_PCIE_LINK_WIDTH: v->i64 = 16; return 1;
    }
    return 0;
}

static int standard_instance(const struct mig *m, unsigned field, struct value *v)
{
    switch (field) {
        case DCGM_FI_DEV_GPU_NAME: memcpy(v->str, m->name, sizeof(m->name)); return 1;
        case DCGM_FI_DEV_FB_TOTAL: v->i64 = 9984LL * m->slices; return 1;
        case DCGM_FI_DEV_FB_USED: v->i64 = 9000LL * m->slices; return 1;
        case DCGM_FI_DEV_FB_RESERVED: return 1;
        case DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO: v->dbl = 0.6; return 1;
        case DCGM_FI_PROF_SM_UTIL_RATIO: v->dbl = 0.45; return 1;
        case DCGM_FI_PROF_TENSOR_UTIL_RATIO: v->dbl = 0.2; return 1;
        case DCGM_FI_PROF_DRAM_UTIL_RATIO: v->dbl = 0.35; return 1;
    }
    return 0;
}

/* The cached sample of a field, as the real cache answers: status 0 and the last
 * sample wherever there ever was one, driver errors as blank samples with a
 * fresh stamp. */
static struct value latest(unsigned group, unsigned id, unsigned field, int live)
{
    struct value v = { .group = group, .id = id, .field = field, .type = field_type(field), .status = DCGM_ST_OK };
    const struct watch *w = find_watch(group, id, field);
    if (!live && (w == NULL || !w->on)) {
        set_blank(&v, 0);
        v.status = DCGM_ST_NOT_WATCHED;
        return v;
    }
    v.absolute = 1;
    v.when     = now_us();
    const struct rule *need = find_rule(script.needwatch, script.nneedwatch, field, 0, 0);
    int blank = find_rule(script.blank, script.nblank, group, id, 0) != NULL && field != DCGM_FI_DEV_XID_ERROR;
    if (blank || (need != NULL && w != NULL && w->times < need->rc)) {
        set_blank(&v, 0);
        return v;
    }
    for (int i = script.nvalues - 1; i >= 0; i--) {
        const struct value *s = &script.values[i];
        if (s->group == group && s->id == id && s->field == field) {
            struct value found = *s;
            if (!s->absolute)
                found.when = v.when - s->when;
            return found;
        }
    }
    const struct mig *m = group == DCGM_FE_GPU_I ? find_mig(id) : NULL;
    if (find_rule(script.removed, script.nremoved, group, id, field) != NULL || field == DCGM_FI_DEV_XID_ERROR) {
        set_blank(&v, 0);
        v.status = DCGM_ST_NO_DATA;
        v.when   = 0;
    } else if (!(group == DCGM_FE_GPU ? standard(id, field, &v) : m != NULL && standard_instance(m, field, &v))) {
        set_blank(&v, 2);
    }
    return v;
}

static void store(char *to, const struct value *v)
{
    if (v->type == DCGM_FT_STRING)
        memcpy(to, v->str, sizeof(v->str));
    else if (v->type == DCGM_FT_DOUBLE)
        memcpy(to, &v->dbl, sizeof(v->dbl));
    else
        memcpy(to, &v->i64, sizeof(v->i64));
}

dcgmReturn_t DCGM_PUBLIC_API dcgmEntitiesGetLatestValues(dcgmHandle_t handle,
                                                         dcgmGroupEntityPair_t entities[],
                                                         unsigned int nentities,
                                                         unsigned short ids[],
                                                         unsigned int nids,
                                                         unsigned int flags,
                                                         dcgmFieldValue_v2 values[])
{
    dcgmReturn_t rc = enter_engine(handle);
    if (rc != DCGM_ST_OK)
        return leave(rc);
    unsigned n = 0;
    /* Fields outside, entities backwards: no order is promised. */
    for (unsigned f = 0; f < nids; f++) {
        for (unsigned e = nentities; e-- > 0;) {
            if (!present(entities[e].entityGroupId, entities[e].entityId))
                return leave(DCGM_ST_GENERIC_ERROR);
            struct value v         = latest(entities[e].entityGroupId, entities[e].entityId, ids[f], flags & DCGM_FV_FLAG_LIVE_DATA);
            dcgmFieldValue_v2 *out = &values[n++];
            memset(out, 0, sizeof(*out));
            out->version       = dcgmFieldValue_version2;
            out->entityGroupId = entities[e].entityGroupId;
            out->entityId      = entities[e].entityId;
            out->fieldId       = ids[f];
            out->fieldType     = v.type;
            out->status        = v.status;
            out->ts            = v.when;
            store((char *)&out->value, &v);
        }
    }
    return leave(DCGM_ST_OK);
}

static void to_v1(dcgmFieldValue_v1 *out, const struct value *v)
{
    memset(out, 0, sizeof(*out));
    out->version   = dcgmFieldValue_version1;
    out->fieldId   = v->field;
    out->fieldType = v->type;
    out->status    = v->status;
    out->ts        = v->when;
    store((char *)&out->value, v);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmEntityGetLatestValues(dcgmHandle_t handle,
                                                       dcgm_field_entity_group_t group,
                                                       int id,
                                                       unsigned short ids[],
                                                       unsigned int count,
                                                       dcgmFieldValue_v1 values[])
{
    dcgmReturn_t rc = enter_engine(handle);
    if (rc == DCGM_ST_OK && !present(group, id))
        rc = DCGM_ST_BADPARAM;
    for (unsigned i = 0; rc == DCGM_ST_OK && i < count; i++) {
        struct value v = latest(group, id, ids[i], 0);
        to_v1(&values[i], &v);
    }
    return leave(rc);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmGetLatestValuesForFields(dcgmHandle_t handle,
                                                          int gpu,
                                                          unsigned short ids[],
                                                          unsigned int count,
                                                          dcgmFieldValue_v1 values[])
{
    return dcgmEntityGetLatestValues(handle, DCGM_FE_GPU, gpu, ids, count, values);
}

/* The samples of one entity's field since a moment. Only XIDs and processes
 * have more than one. */
static int samples_since(const struct watch *w, long long since, dcgmFieldValue_v1 *out, int room)
{
    int n = 0;
    if (w->field == FIELD_COMPUTE_PIDS) {
        long long now = now_us();
        for (int i = 0; i < script.npids && n < room; i++) {
            if (w->group != DCGM_FE_GPU || script.pids[i].gpu != w->id || now < since)
                continue;
            struct value v = { .field = w->field, .type = DCGM_FT_BINARY, .when = now + n };
            dcgmRunningProcess_t p
                = { .version = dcgmRunningProcess_version, .pid = script.pids[i].pid, .memoryUsed = script.pids[i].memory };
            to_v1(&out[n], &v);
            memcpy(&out[n++].value, &p, sizeof(p));
        }
        return n;
    }
    if (w->field == DCGM_FI_DEV_XID_ERROR) {
        int of_field = 0, skipped = 0;
        for (int i = 0; i < script.nvalues; i++)
            if (script.values[i].group == w->group && script.values[i].id == w->id && script.values[i].field == w->field)
                of_field++;
        for (int i = 0; i < script.nvalues && n < room; i++) {
            struct value v = script.values[i];
            if (v.group != w->group || v.id != w->id || v.field != w->field)
                continue;
            if (w->samples > 0 && skipped++ < of_field - w->samples)
                continue;
            if (!v.absolute)
                v.when = now_us() - v.when;
            if (v.when >= since)
                to_v1(&out[n++], &v);
        }
        return n;
    }
    struct value v = latest(w->group, w->id, w->field, 0);
    if (v.status == DCGM_ST_OK && v.when >= since && room > 0)
        to_v1(&out[n++], &v);
    return n;
}

dcgmReturn_t DCGM_PUBLIC_API dcgmGetValuesSince_v2(dcgmHandle_t handle,
                                                   dcgmGpuGrp_t group,
                                                   dcgmFieldGrp_t fields,
                                                   long long since,
                                                   long long *next,
                                                   dcgmFieldValueEntityEnumeration_f callback,
                                                   void *user)
{
    enum { ROOM = 256 };
    dcgmReturn_t rc = enter_engine(handle);
    if (rc != DCGM_ST_OK)
        return leave(rc);
    struct group *g  = find_group(group);
    struct fields *f = find_fields(fields);
    if (g == NULL || f == NULL || callback == NULL)
        return leave(DCGM_ST_BADPARAM);
    dcgmFieldValue_v1 *out = calloc(ROOM, sizeof(*out));
    if (out == NULL)
        die("out of memory");
    for (unsigned m = 0; m < g->count; m++) {
        int n = 0;
        for (int i = 0; i < f->count; i++) {
            const struct watch *w = find_watch(g->members[m].entityGroupId, g->members[m].entityId, f->ids[i]);
            if (w != NULL && w->on)
                n += samples_since(w, since, out + n, ROOM - n);
        }
        if (n > 0)
            callback(g->members[m].entityGroupId, g->members[m].entityId, out, n, user);
    }
    free(out);
    *next = now_us();
    return leave(DCGM_ST_OK);
}

/* ---- what there is ---- */

dcgmReturn_t DCGM_PUBLIC_API dcgmGetAllDevices(dcgmHandle_t handle, unsigned int ids[DCGM_MAX_NUM_DEVICES], int *count)
{
    dcgmReturn_t rc = enter_engine(handle);
    *count = 0;
    for (unsigned i = 0; rc == DCGM_ST_OK && i < script.gpus; i++)
        if (gpu_present(i))
            ids[(*count)++] = i;
    return leave(rc);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmGetAllSupportedDevices(dcgmHandle_t handle,
                                                        unsigned int ids[DCGM_MAX_NUM_DEVICES],
                                                        int *count)
{
    return dcgmGetAllDevices(handle, ids, count);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmGetEntityGroupEntities(dcgmHandle_t handle,
                                                        dcgm_field_entity_group_t group,
                                                        dcgm_field_eid_t *ids,
                                                        int *count,
                                                        unsigned int flags)
{
    (void)flags;
    dcgmReturn_t rc = enter_engine(handle);
    if (rc != DCGM_ST_OK)
        return leave(rc);
    int room = *count;
    *count   = 0;
    for (unsigned i = 0; group == DCGM_FE_GPU && i < script.gpus && *count < room; i++)
        if (gpu_present(i))
            ids[(*count)++] = i;
    for (int i = 0; group == DCGM_FE_GPU_I && i < script.nmigs && *count < room; i++)
        ids[(*count)++] = script.migs[i].entity;
    return leave(DCGM_ST_OK);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmGetGpuStatus(dcgmHandle_t handle, unsigned int gpu, DcgmEntityStatus_t *status)
{
    dcgmReturn_t rc = enter_engine(handle);
    if (rc == DCGM_ST_OK && !gpu_present(gpu))
        rc = DCGM_ST_BADPARAM;
    const struct rule *r = find_rule(script.status, script.nstatus, gpu, 0, 0);
    *status = r != NULL ? (DcgmEntityStatus_t)r->rc : DcgmEntityStatusOk;
    return leave(rc);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmGetGpuInstanceHierarchy(dcgmHandle_t handle, dcgmMigHierarchy_v2 *hierarchy)
{
    dcgmReturn_t rc = enter_engine(handle);
    if (rc != DCGM_ST_OK)
        return leave(rc);
    if (hierarchy->version != dcgmMigHierarchy_version2)
        return leave(DCGM_ST_VER_MISMATCH);
    hierarchy->count = 0;
    for (int i = 0; i < script.nmigs; i++) {
        const struct mig *m = &script.migs[i];
        dcgmMigHierarchyInfo_v2 info;
        memset(&info, 0, sizeof(info));
        info.entity = (dcgmGroupEntityPair_t) { DCGM_FE_GPU_I, m->entity };
        info.parent = (dcgmGroupEntityPair_t) { DCGM_FE_GPU, m->gpu };
        uuid(m->gpu, info.info.gpuUuid, sizeof(info.info.gpuUuid));
        info.info.nvmlGpuIndex          = m->gpu;
        info.info.nvmlInstanceId        = m->instance;
        info.info.nvmlComputeInstanceId = -1;
        info.info.nvmlMigProfileId      = m->profile;
        info.info.nvmlProfileSlices     = m->slices;
        hierarchy->entityList[hierarchy->count++] = info;
        info.parent                     = info.entity;
        info.entity                     = (dcgmGroupEntityPair_t) { DCGM_FE_GPU_CI, m->entity };
        info.info.nvmlComputeInstanceId = 0;
        hierarchy->entityList[hierarchy->count++] = info;
    }
    return leave(DCGM_ST_OK);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmGetDeviceAttributes(dcgmHandle_t handle, unsigned int gpu, dcgmDeviceAttributes_t *attributes)
{
    dcgmReturn_t rc = enter_engine(handle);
    if (rc != DCGM_ST_OK)
        return leave(rc);
    if (attributes->version != dcgmDeviceAttributes_version3)
        return leave(DCGM_ST_VER_MISMATCH);
    if (!gpu_present(gpu))
        return leave(DCGM_ST_BADPARAM);
    uuid(gpu, attributes->identifiers.uuid, sizeof(attributes->identifiers.uuid));
    strcpy(attributes->identifiers.deviceName, "NVIDIA H100 80GB HBM3");
    return leave(DCGM_ST_OK);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmGetDeviceTopology(dcgmHandle_t handle, unsigned int gpu, dcgmDeviceTopology_v2 *topology)
{
    (void)gpu;
    (void)topology;
    dcgmReturn_t rc = enter_engine(handle);
    return leave(rc == DCGM_ST_OK ? DCGM_ST_NOT_SUPPORTED : rc);
}

dcgmReturn_t DCGM_PUBLIC_API dcgmProfGetSupportedMetricGroups(dcgmHandle_t handle, dcgmProfGetMetricGroups_t *metric_groups)
{
    dcgmReturn_t rc = enter_engine(handle);
    if (rc == DCGM_ST_OK)
        rc = metric_groups->version == dcgmProfGetMetricGroups_version3 ? DCGM_ST_PROFILING_NOT_SUPPORTED : DCGM_ST_VER_MISMATCH;
    return leave(rc);
}

int DCGM_PUBLIC_API DcgmFieldsInit(void) { return 0; }

int DCGM_PUBLIC_API DcgmFieldsTerm(void) { return 0; }

dcgm_field_meta_p DCGM_PUBLIC_API DcgmFieldGetById(unsigned short field)
{
    static dcgm_field_meta_t meta;
    meta = (dcgm_field_meta_t) { .fieldId = field, .fieldType = field_type(field), .entityLevel = DCGM_FE_GPU };
    return &meta;
}

static dcgmReturn_t version_info(dcgmVersionInfo_t *info)
{
    if (info->version != dcgmVersionInfo_version2)
        return DCGM_ST_VER_MISMATCH;
    strcpy(info->rawBuildInfoString, "version:4.6.0;arch:fake;buildid:0");
    return DCGM_ST_OK;
}

dcgmReturn_t DCGM_PUBLIC_API dcgmVersionInfo(dcgmVersionInfo_t *info)
{
    enter();
    return leave(version_info(info));
}

dcgmReturn_t DCGM_PUBLIC_API dcgmHostengineVersionInfo(dcgmHandle_t handle, dcgmVersionInfo_t *info)
{
    dcgmReturn_t rc = enter_engine(handle);
    return leave(rc == DCGM_ST_OK ? version_info(info) : rc);
}
