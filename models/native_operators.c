/* The operators of a decoder that are not matrix products, for the CPU device.
 *
 * Plain C, loaded with ctypes: no torch, no Python.h. Each row's result is computed by the same operations in
 * the same order whatever the batch, the tiling or the number of threads, so it is the same to the last bit.
 * Vectors are GCC/Clang vector types; on x86 every kernel is compiled twice, with and without AVX2 and FMA.
 * Layouts, as in ops.py: keys [pages][kv_heads][dim][PAGE], values [pages][kv_heads][PAGE][dim], all float32.
 */
#include <stdint.h>
#include <string.h>
#include <math.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define VERSION 4        /* of the functions and structs below; native_library.py has the same number */
#define PAGE 16          /* tokens of a KV page: muxk.kernel.work.PAGE_SIZE */
#define LANES 8
#define MAX_DIM 256
#define TILE_ROWS 24     /* query rows that share what they read of the pool */
#define MICRO_ROWS 6     /* rows whose accumulators fit in 16 registers */
#define BLOCK 256        /* tokens between two corrections of the running softmax: 16 pages, 24 KiB of scores */
#define STRIDE 272       /* floats between rows of scratch: at least BLOCK and MAX_DIM, no power of two */
#define PANEL 32         /* outputs whose weights lie together */
#define PACKED_INPUTS 49152 /* inputs of all rows that share what they read of the weights: 192 KiB, */
#define PACKED_WIDTH 1024   /* of each at most, */
#define PACKED_ROWS 84      /* and of so many rows at most; a multiple of MICRO_ROWS */
#define FEW_ROWS 4       /* of a tile whose weights are read as they are stored, */
#define PACKED_FEW 8     /* for at most so many rows */
#define UNPACKED_INPUTS 64 /* of a panel that exist as floats for more rows: 9 KiB */
#define MIN_WORK 1500000 /* multiply-adds that are worth waking other threads for (about 150 us) */

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif
#define LINES __attribute__((aligned(64)))
#define NOT_INLINE __attribute__((noinline))
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float packed __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef int32_t packed_ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

#define LOAD(p) ((vec) * (const packed *)(p))
#define LOAD_INTS(p) ((ivec) * (const packed_ints *)(p))
#define ALL(x) ((vec){0} + (x))
#define STORE(p, v) (*(packed *)(p) = (v))

/* One call's rows of new tokens, each after the tokens before it in its pages. Made once, read by every layer. */
typedef struct {
    int64_t tokens;        /* of all rows */
    int64_t padded_tokens; /* rows of the output; those past `tokens` become 0 */
    int64_t tiles;
    int64_t pages_per_row;
    int64_t heads;
    int64_t kv_heads;
    int64_t dim;           /* a multiple of 8, at most MAX_DIM */
    int64_t work;          /* multiply-adds of one layer's attention, roughly */
    int64_t window;        /* tokens that a query sees at most, itself included */
    float epsilon;         /* of the norms of queries and keys */
    const int32_t *owners;    /* [tokens] the row of each token */
    const int32_t *positions; /* [tokens] its place in the row's context */
    const int32_t *pages;     /* [rows][pages_per_row] */
    const int32_t *tiles_of;  /* [tiles][2] first token and tokens; one row's, at most TILE_ROWS query rows */
    const float *rotation;    /* [tokens][dim / 2][2] cosine and sine of each pair */
} Batch;

/* What one layer adds to a Batch. */
typedef struct {
    float *qkv;              /* [padded_tokens][heads + 2 * kv_heads][dim]; queries and keys are rotated in place */
    const float *query_norm; /* [dim] or NULL */
    const float *key_norm;   /* [dim] or NULL */
    float *keys;
    float *values;
    float *out;              /* [padded_tokens][heads][dim] */
    int64_t threads;
} Layer;

/* How the values of a matrix lie in its panels. Nibble `j` of a word is input `j` of 8, of one output. */
enum { BYTES, NIBBLES, SIGNED_NIBBLES, FLOATS };

#define NIBBLE_SCALE 0x1p-28f /* signed nibbles are read from the top of a word */

/* What an input is multiplied with, so that nibbles need not be shifted into place. */
#define NIBBLE_UNITS ((vec){1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1.0f})

/* A weight [outputs][inputs] as value * scale + offset, with a scale and an offset for each block of inputs.
 * Panels of PANEL outputs, the last one padded, lie one after the other; in them the blocks; in these scales
 * [PANEL], offsets [PANEL] if there are any, and values: int8 [block][PANEL] or words [block / 8][PANEL]. */
typedef struct {
    int64_t outputs;
    int64_t inputs;      /* a multiple of `block` */
    int64_t block;       /* 16 or 32 */
    int64_t format;
    int64_t half;        /* whether scales and offsets are float16, not float32 */
    int64_t offsets;     /* whether there are any */
    int64_t block_bytes;
    int64_t panel_bytes;
    const uint8_t *panels;
    const float *bias;   /* [outputs] or NULL */
} Matrix;

/* The values of one KV head in a block of tokens. */
typedef struct {
    const float *pool;    /* the head's values in page 0 */
    const int32_t *pages;
    int64_t page_size;    /* floats */
    int64_t dim;
    int64_t tokens;
} Values;

/* The query rows of one tile for one KV head, and their running softmax (Milakov and Gimelshein, 2018). */
typedef struct {
    int64_t rows;
    int64_t first[TILE_ROWS]; /* the first token that the row attends to */
    int64_t seen[TILE_ROWS];  /* and the one after the last */
    float highest[TILE_ROWS];
    float total[TILE_ROWS];
    float queries[TILE_ROWS][STRIDE];
    float scores[TILE_ROWS][STRIDE];
    float out[TILE_ROWS][STRIDE];
} Tile;

/* `call` with N, the rows of one micro kernel, as a constant. */
#define FOR_ROWS(rows, call) \
    switch (rows) { \
        case 1: { enum { N = 1 }; call; break; } \
        case 2: { enum { N = 2 }; call; break; } \
        case 3: { enum { N = 3 }; call; break; } \
        case 4: { enum { N = 4 }; call; break; } \
        case 5: { enum { N = 5 }; call; break; } \
        default: { enum { N = 6 }; call; break; } \
    }

#define FOR_FEW_ROWS(rows, call) \
    switch (rows) { \
        case 1: { enum { N = 1 }; call; break; } \
        case 2: { enum { N = 2 }; call; break; } \
        case 3: { enum { N = 3 }; call; break; } \
        default: { enum { N = 4 }; call; break; } \
    }

/* The kernels for any processor and, on x86, for one with AVX2 and FMA. Not by `target` attributes on inlined
 * functions: GCC then handles vectors the way the plain processor needs. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
/* Hardly used on x86, and most of the time that compiling takes. */
#pragma GCC push_options
#pragma GCC optimize("O1")
#define MUXK_FAST_BUILD
#endif
#define FN(name) name##_plain
#include "native_kernels.h"
#include "native_products.h"
#undef FN
#if defined(MUXK_FAST_BUILD)
#pragma GCC pop_options
#endif

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define MUXK_WIDE
#define FN(name) name##_wide
#include "native_kernels.h"
#include "native_products.h"
#undef FN
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
/* Every processor with AVX2 has F16C. */
#define WIDE (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#define BEST(name, ...) (WIDE ? name##_wide(__VA_ARGS__) : name##_plain(__VA_ARGS__))
#else
#define BEST(name, ...) name##_plain(__VA_ARGS__)
#endif

/* Cut [0, rows) into one range a thread. Waking a team costs 50 us, so small work stays on the caller. */
#define IN_RANGES(rows, work, threads, call) \
    if ((threads) > 1 && (work) >= MIN_WORK) { \
        _Pragma("omp parallel for num_threads((int)(threads)) schedule(static)") \
        for (int64_t part = 0; part < (threads); part++) { \
            int64_t first = (rows) * part / (threads), last = (rows) * (part + 1) / (threads); \
            call; \
        } \
    } else { \
        int64_t first = 0, last = (rows); \
        call; \
    }

EXPORT int64_t muxk_version(void) { return VERSION; }

/* out[rows][width] = norm of x; with `added` not NULL, x += added first. */
EXPORT void muxk_rms_norm(float *x, const float *added, const float *weight, float *out, int64_t rows, int64_t width,
                          int64_t threads, float epsilon) {
    IN_RANGES(rows, 2 * rows * width, threads, BEST(norm_rows, x, added, weight, epsilon, out, first, last, width))
}

/* out[rows][width] = silu of the first half of gate_up[rows][2 * width] times the second. */
EXPORT void muxk_silu_mul(const float *gate_up, float *out, int64_t rows, int64_t width, int64_t threads) {
    IN_RANGES(rows, 16 * rows * width, threads, BEST(silu_rows, gate_up, out, first, last, width))
}

/* Norm, rotate, append and attend: everything between the qkv product and the output product of a layer. */
EXPORT void muxk_attend(const Batch *batch, const Layer *layer) {
    int64_t threads = layer->threads, tokens = batch->tokens, items = batch->tiles * batch->kv_heads;
    int64_t row = batch->heads * batch->dim;
    memset(layer->out + tokens * row, 0, (size_t)((batch->padded_tokens - tokens) * row) * 4);
    IN_RANGES(tokens, 8 * tokens * row, threads, BEST(append_tokens, batch, layer, first, last))
    if (threads > 1 && batch->work >= MIN_WORK) {
#pragma omp parallel for num_threads((int)threads) schedule(dynamic)
        for (int64_t item = 0; item < items; item++)
            BEST(attend_tile, batch, layer, item % batch->tiles, item / batch->tiles);
    } else {
        for (int64_t item = 0; item < items; item++)
            BEST(attend_tile, batch, layer, item % batch->tiles, item / batch->tiles);
    }
}

/* out[rows][outputs] of x[rows][inputs]. */
EXPORT void muxk_product(const Matrix *matrix, const float *x, float *out, int64_t rows, int64_t threads) {
    int64_t panels = (matrix->outputs + PANEL - 1) / PANEL;
    IN_RANGES(panels, rows * matrix->inputs * matrix->outputs, threads,
              BEST(product_of_panels, matrix, x, out, rows, first, last))
}

#include "native_layers.h"
