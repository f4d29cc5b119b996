/* Several layers of a decoder whose weights are in blocks, in one call, included in native_operators.c.
 *
 * The threads of one team go through the operators together. They wait for each other some 8 times a layer, which
 * OpenMP's own barriers are too slow for (50 us where waiting is passive): they spin, and yield if it takes long.
 */
#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() ((void)0)
#endif
#if defined(_WIN32)
#define YIELD() ((void)0)
#else
#include <sched.h>
#define YIELD() sched_yield()
#endif
#if defined(_OPENMP)
extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);
#endif
#define SPINS 4000     /* about 50 us */
#define MLP_ROWS 480   /* rows whose gate and up values exist at once */

typedef struct {
    const float *input_norm;
    const float *query_norm; /* or NULL */
    const float *key_norm;   /* or NULL */
    const float *mlp_norm;
    const Matrix *qkv;
    const Matrix *output;
    const Matrix *gate_up;
    const Matrix *down;
} LayerWeights;

/* One call. The rows of `hidden` are those of its parts, one part after the other. */
typedef struct {
    int64_t layers;
    int64_t parts;       /* attentions of a layer: 1, or 2 in a fused step */
    int64_t rows;
    int64_t width;
    int64_t threads;
    float epsilon;
    const LayerWeights *weights; /* [layers] */
    float *const *keys;          /* [layers] */
    float *const *values;        /* [layers] */
    const Batch *const *batches; /* [layers][parts] */
    float *hidden;               /* [rows][width] */
    float *normed;               /* [rows][width] */
    float *added;                /* [rows][width] */
    float *qkv;                  /* [rows][its outputs] */
    float *attended;             /* [rows][inputs of the output product] */
    float *gate_up;              /* [at most MLP_ROWS][its outputs] */
    float *inner;                /* [at most MLP_ROWS][half of that] */
    int64_t *taken;              /* [layers], zeros: tiles of attention that a thread has begun */
} Stack;

typedef struct {
    int64_t threads;
    int64_t arrived LINES;
    int64_t round LINES;
} Team;

static void meet(Team *team) {
    if (team->threads == 1) return;
    int64_t round = __atomic_load_n(&team->round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == team->threads) {
        __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&team->round, round + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int64_t spins = 0; __atomic_load_n(&team->round, __ATOMIC_ACQUIRE) == round; spins++)
        if (spins < SPINS) RELAX();
        else YIELD();
}

/* This thread's part of [0, count). */
#define SHARE(count) (count) * index / team->threads, (count) * (index + 1) / team->threads

static void share_product(const Matrix *matrix, const float *x, float *out, int64_t rows, Team *team, int64_t index) {
    int64_t panels = (matrix->outputs + PANEL - 1) / PANEL;
    BEST(product_of_panels, matrix, x, out, rows, SHARE(panels));
    meet(team);
}

static void share_norm(const Stack *stack, const float *added, const float *weight, int64_t row, int64_t rows, Team *team,
                       int64_t index) {
    int64_t at = row * stack->width;
    BEST(norm_rows, stack->hidden + at, added ? added + at : added, weight, stack->epsilon, stack->normed + at, SHARE(rows),
         stack->width);
    meet(team);
}

static Layer layer_of_part(const Stack *stack, int64_t at, int64_t first_row) {
    const LayerWeights *weights = stack->weights + at;
    return (Layer){stack->qkv + first_row * weights->qkv->outputs, weights->query_norm, weights->key_norm, stack->keys[at],
                   stack->values[at], stack->attended + first_row * weights->output->inputs, 1};
}

/* All parts append before any attends: each may read what another has written. */
static void share_attention(const Stack *stack, int64_t at, Team *team, int64_t index) {
    const Batch *const *batches = stack->batches + at * stack->parts;
    for (int64_t part = 0, row = 0; part < stack->parts; row += batches[part++]->tokens) {
        Layer layer = layer_of_part(stack, at, row);
        BEST(append_tokens, batches[part], &layer, SHARE(batches[part]->tokens));
    }
    meet(team);
    int64_t next = __atomic_fetch_add(stack->taken + at, 1, __ATOMIC_RELAXED), before = 0;
    for (int64_t part = 0, row = 0; part < stack->parts; row += batches[part++]->tokens) {
        const Batch *batch = batches[part];
        Layer layer = layer_of_part(stack, at, row);
        int64_t items = batch->tiles * batch->kv_heads;
        for (; next < before + items; next = __atomic_fetch_add(stack->taken + at, 1, __ATOMIC_RELAXED))
            BEST(attend_tile, batch, &layer, (next - before) % batch->tiles, (next - before) / batch->tiles);
        before += items;
    }
    meet(team);
}

static void share_mlp(const Stack *stack, const LayerWeights *weights, int64_t row, int64_t rows, Team *team, int64_t index) {
    int64_t at = row * stack->width;
    share_norm(stack, stack->added, weights->mlp_norm, row, rows, team, index);
    share_product(weights->gate_up, stack->normed + at, stack->gate_up, rows, team, index);
    BEST(silu_rows, stack->gate_up, stack->inner, SHARE(rows), weights->down->inputs);
    meet(team);
    share_product(weights->down, stack->inner, stack->added + at, rows, team, index);
}

/* What one thread of the team does. `added` is what a layer's last product adds to `hidden` in the next norm. */
static void share_layers(const Stack *stack, Team *team, int64_t index) {
    for (int64_t at = 0; at < stack->layers; at++) {
        const LayerWeights *weights = stack->weights + at;
        share_norm(stack, at > 0 ? stack->added : NULL, weights->input_norm, 0, stack->rows, team, index);
        share_product(weights->qkv, stack->normed, stack->qkv, stack->rows, team, index);
        share_attention(stack, at, team, index);
        share_product(weights->output, stack->attended, stack->added, stack->rows, team, index);
        for (int64_t row = 0; row < stack->rows; row += MLP_ROWS)
            share_mlp(stack, weights, row, stack->rows - row < MLP_ROWS ? stack->rows - row : MLP_ROWS, team, index);
    }
    BEST(add_rows, stack->hidden, stack->added, SHARE(stack->rows), stack->width);
}

EXPORT void muxk_layers(const Stack *stack) {
    Team team = {1, 0, 0};
#if defined(_OPENMP)
    if (stack->threads > 1) {
#pragma omp parallel num_threads((int)stack->threads)
        {
            /* Fewer than wanted is possible; every thread of the team says the same. */
            __atomic_store_n(&team.threads, omp_get_num_threads(), __ATOMIC_RELAXED);
            share_layers(stack, &team, omp_get_thread_num());
        }
        return;
    }
#endif
    share_layers(stack, &team, 0);
}
