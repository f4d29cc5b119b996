/* Products with block-quantised weights on one thread, included in native_operators.c as native_kernels.h is.
 *
 * A row's result is the same to the last bit whatever rows it is computed with: within a block of inputs,
 * x * value is added up input by input; then scale * sum and offset * (sum of x) are added to the output.
 */

/* Four vectors of scales or offsets; `at` counts vectors of a panel. */
INLINE vec FN(factors)(const uint8_t *from, int64_t at, int64_t half) {
    if (!half) return LOAD((const float *)from + at * LANES);
#if defined(MUXK_WIDE)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from + at));
#else
    ivec bits = __builtin_convertvector(*((const halves *)from + at), ivec);
    vec size = (vec)((bits & 0x7fff) << 13) * 0x1p112f;
    return (vec)((ivec)size | (bits & 0x8000) << 16);
#endif
}

/* The values of input `j` of 8, of the outputs in one vector. `words` has 8 inputs of each of PANEL outputs. */
INLINE vec FN(nibbles)(const int format, const int j, const int32_t *words) {
    ivec found = LOAD_INTS(words);
    if (format == NIBBLES)
        return __builtin_convertvector(j < 7 ? found & (15 << 4 * (j % 7)) : (ivec)((uvec)found >> 28), vec);
    return __builtin_convertvector((found << (28 - 4 * j)) & (int32_t)0xf0000000, vec);
}

/* The values of one input, of the outputs in one vector. */
INLINE vec FN(bytes)(const int8_t *from) {
#if defined(MUXK_WIDE)
    return __builtin_convertvector((ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)), vec);
#else
    return __builtin_convertvector(*(const bytes *)from, vec);
#endif
}

/* Sum of x * value over the inputs of a block, for `rows` rows and `vectors` vectors of outputs from `at` on. */
INLINE void FN(block_sums)(const int rows, const int vectors, const int format, const uint8_t *values, int64_t at,
                           const float *x, int64_t block, vec sums[MICRO_ROWS][4]) {
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++) sums[i][v] = ALL(0);
    if (format == BYTES) {
        const int8_t *from = (const int8_t *)values + at * LANES;
        for (int64_t k = 0; k < block; k++, from += PANEL, x += rows) {
            vec value[4];
            for (int v = 0; v < vectors; v++) value[v] = FN(bytes)(from + v * LANES);
            for (int i = 0; i < rows; i++)
                for (int v = 0; v < vectors; v++) sums[i][v] += value[v] * x[i];
        }
        return;
    }
    if (format == FLOATS) {
        const float *from = (const float *)values + at * LANES;
        for (int64_t k = 0; k < block; k++, from += PANEL, x += rows)
            for (int i = 0; i < rows; i++)
                for (int v = 0; v < vectors; v++) sums[i][v] += LOAD(from + v * LANES) * x[i];
        return;
    }
    const int32_t *words = (const int32_t *)values + at * LANES;
    for (int64_t k = 0; k < block; k += 8, words += PANEL, x += 8 * rows) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            vec value[4];
            for (int v = 0; v < vectors; v++) value[v] = FN(nibbles)(format, j, words + v * LANES);
            for (int i = 0; i < rows; i++)
                for (int v = 0; v < vectors; v++) sums[i][v] += value[v] * x[j * rows + i];
        }
    }
}

/* Add the products of `rows` rows with some blocks of a panel to `out` [rows][PANEL]. */
INLINE void FN(micro_product)(const int rows, const int vectors, const int format, const Matrix *matrix,
                              const uint8_t *chunk, int64_t blocks, const float *x, const float *totals, float *out) {
    int64_t factor_bytes = PANEL * (matrix->half ? 2 : 4), block = matrix->block;
    for (int64_t b = 0; b < blocks; b++, chunk += matrix->block_bytes, x += block * rows, totals += rows) {
        const uint8_t *offsets = chunk + factor_bytes, *values = offsets + (matrix->offsets ? factor_bytes : 0);
        for (int at = 0; at < PANEL / LANES; at += vectors) {
            vec sums[MICRO_ROWS][4];
            FN(block_sums)(rows, vectors, format, values, at, x, block, sums);
            for (int v = 0; v < vectors; v++) {
                vec scale = FN(factors)(chunk, at + v, matrix->half);
                if (format == SIGNED_NIBBLES) scale *= NIBBLE_SCALE;
                if (!matrix->offsets) {
                    for (int i = 0; i < rows; i++) STORE(out + i * PANEL + (at + v) * LANES,
                                                         LOAD(out + i * PANEL + (at + v) * LANES) + sums[i][v] * scale);
                    continue;
                }
                vec offset = FN(factors)(offsets, at + v, matrix->half);
                for (int i = 0; i < rows; i++) {
                    float *to = out + i * PANEL + (at + v) * LANES;
                    vec scaled = LOAD(to) + sums[i][v] * scale;
                    STORE(to, scaled + offset * totals[i]);
                }
            }
        }
    }
}

/* Kernels for each number of rows; up to 2 rows need more outputs at once to hide latencies. A function for each
 * format, not inlined: compilers take minutes for all of them in one. */
#define KERNELS(name, format, for_rows) \
    static NOT_INLINE void name(const Matrix *matrix, const uint8_t *chunk, int64_t blocks, int64_t rows, const float *x, \
                                const float *totals, float *out) { \
        for_rows(rows, FN(micro_product)(N, N < 3 ? 4 : 2, format, matrix, chunk, blocks, x, totals, out)) \
    }
KERNELS(FN(product_of_bytes), BYTES, FOR_FEW_ROWS)
KERNELS(FN(product_of_nibbles), NIBBLES, FOR_FEW_ROWS)
KERNELS(FN(product_of_signed_nibbles), SIGNED_NIBBLES, FOR_FEW_ROWS)
KERNELS(FN(product_of_floats), FLOATS, FOR_ROWS)
#undef KERNELS

INLINE void FN(product_of_tile)(const Matrix *matrix, const uint8_t *chunk, int64_t blocks, int64_t rows, const float *x,
                                const float *totals, float *out) {
    switch (matrix->format) {
        case BYTES: FN(product_of_bytes)(matrix, chunk, blocks, rows, x, totals, out); break;
        case NIBBLES: FN(product_of_nibbles)(matrix, chunk, blocks, rows, x, totals, out); break;
        case SIGNED_NIBBLES: FN(product_of_signed_nibbles)(matrix, chunk, blocks, rows, x, totals, out); break;
        default: FN(product_of_floats)(matrix, chunk, blocks, rows, x, totals, out);
    }
}

/* Lay inputs [first, last) of `rows` rows of x side by side, as the kernels read them, with sums over blocks. */
static void FN(pack_inputs)(const Matrix *matrix, const float *x, int64_t rows, int64_t first, int64_t last, float *to,
                            float *totals) {
    int64_t block = matrix->block;
    for (int64_t i = 0; i < rows; i++) {
        const float *from = x + i * matrix->inputs;
        for (int64_t k = first; k < last; k += 8) {
            vec values = LOAD(from + k), packed = matrix->format == NIBBLES ? values * NIBBLE_UNITS : values;
            for (int j = 0; j < 8; j++) to[(k - first + j) * rows + i] = packed[j];
        }
        if (!matrix->offsets) continue;
        for (int64_t start = first; start < last; start += block) {
            vec sums = ALL(0);
            for (int64_t k = start; k < start + block; k += LANES) sums += LOAD(from + k);
            totals[(start - first) / block * rows + i] = FN(sum_of)(sums);
        }
    }
}

/* Some blocks of a panel, as a chunk of format FLOATS. */
static void FN(unpack_chunk)(const Matrix *matrix, const uint8_t *chunk, int64_t blocks, uint8_t *to) {
    int64_t factor_bytes = PANEL * (matrix->half ? 2 : 4), block = matrix->block;
    for (int64_t b = 0; b < blocks; b++, chunk += matrix->block_bytes) {
        const uint8_t *from = chunk;
        for (int64_t part = 0; part < 1 + matrix->offsets; part++, from += factor_bytes)
            for (int64_t at = 0; at < PANEL / LANES; at++, to += 4 * LANES) {
                vec found = FN(factors)(from, at, matrix->half);
                STORE((float *)to, matrix->format == SIGNED_NIBBLES && part == 0 ? found * NIBBLE_SCALE : found);
            }
        for (int64_t k = 0; k < block; k += 8, from += matrix->format == BYTES ? 8 * PANEL : 4 * PANEL)
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++)
                for (int64_t at = 0; at < PANEL / LANES; at++, to += 4 * LANES) {
                    const int32_t *words = (const int32_t *)from + at * LANES;
                    if (matrix->format == BYTES) STORE((float *)to, FN(bytes)((const int8_t *)from + j * PANEL + at * LANES));
                    else if (matrix->format == NIBBLES) STORE((float *)to, FN(nibbles)(NIBBLES, j, words));
                    else STORE((float *)to, FN(nibbles)(SIGNED_NIBBLES, j, words));
                }
    }
}

/* Outputs of a panel, not to be read or written past the last one of the matrix; `begun` from an earlier chunk. */
INLINE void FN(load_outputs)(const Matrix *matrix, int64_t panel, int64_t begun, const float *out, float *to) {
    int64_t wide = matrix->outputs - panel * PANEL;
    const float *from = begun ? out : matrix->bias;
    if (!from) memset(to, 0, PANEL * 4);
    else memcpy(to, from + panel * PANEL, (size_t)(wide < PANEL ? wide : PANEL) * 4);
}

INLINE void FN(store_outputs)(const Matrix *matrix, int64_t panel, const float *from, float *out) {
    int64_t wide = matrix->outputs - panel * PANEL;
    memcpy(out + panel * PANEL, from, (size_t)(wide < PANEL ? wide : PANEL) * 4);
}

/* Inputs of some rows, side by side in tiles, and what is needed to add their products with a panel. */
typedef struct {
    int64_t rows;
    int64_t tiles;
    int64_t first;  /* input */
    int64_t last;
    float *inputs;  /* of tile after tile: [last - first][rows of the tile] */
    float *totals;  /* [(last - first) / block][rows of the tile] */
} FN(Packed);

INLINE int64_t FN(top)(const FN(Packed) *packed, int64_t tile) {
    return packed->rows * tile / packed->tiles;
}

/* Add products with inputs [first, last) of a panel to sums[rows][PANEL]. */
INLINE void FN(add_chunk)(const Matrix *matrix, const uint8_t *chunk, const FN(Packed) *packed, int64_t first, int64_t last,
                          float *sums) {
    int64_t width = packed->last - packed->first, at = first - packed->first, block = matrix->block;
    for (int64_t tile = 0; tile < packed->tiles; tile++) {
        int64_t top = FN(top)(packed, tile), rows = FN(top)(packed, tile + 1) - top;
        FN(product_of_tile)(matrix, chunk, (last - first) / block, rows, packed->inputs + top * width + at * rows,
                            packed->totals + top * (width / block) + at / block * rows, sums + top * PANEL);
    }
}

/* Products of packed inputs with one panel, unpacked a part at a time if that is worth it. */
static void FN(product_of_panel)(const Matrix *matrix, int64_t panel, const FN(Packed) *packed, float *out) {
    float sums[PACKED_ROWS * PANEL] LINES, unpacked[(UNPACKED_INPUTS + 2 * UNPACKED_INPUTS / 16) * PANEL] LINES;
    int64_t block = matrix->block, outputs = matrix->outputs;
    const uint8_t *blocks = matrix->panels + panel * matrix->panel_bytes;
    for (int64_t i = 0; i < packed->rows; i++)
        FN(load_outputs)(matrix, panel, packed->first > 0, out + i * outputs, sums + i * PANEL);
    if (packed->rows <= PACKED_FEW) {
        FN(add_chunk)(matrix, blocks + packed->first / block * matrix->block_bytes, packed, packed->first, packed->last, sums);
    } else {
        Matrix floats = *matrix;
        floats.format = FLOATS;
        floats.half = 0;
        floats.block_bytes = (block + 1 + matrix->offsets) * PANEL * 4;
        for (int64_t first = packed->first; first < packed->last; first += UNPACKED_INPUTS) {
            int64_t last = first + UNPACKED_INPUTS < packed->last ? first + UNPACKED_INPUTS : packed->last;
            FN(unpack_chunk)(matrix, blocks + first / block * matrix->block_bytes, (last - first) / block, (uint8_t *)unpacked);
            FN(add_chunk)(&floats, (const uint8_t *)unpacked, packed, first, last, sums);
        }
    }
    for (int64_t i = 0; i < packed->rows; i++) FN(store_outputs)(matrix, panel, sums + i * PANEL, out + i * outputs);
}

/* out[rows][outputs], of panels [first_panel, last_panel) only, of x[rows][inputs]. */
static void FN(product_of_panels)(const Matrix *matrix, const float *x, float *out, int64_t rows, int64_t first_panel,
                                  int64_t last_panel) {
    float inputs[PACKED_INPUTS] LINES, totals[PACKED_INPUTS / 16];
    int64_t chunks = (matrix->inputs + PACKED_WIDTH - 1) / PACKED_WIDTH, height;
    int64_t width = (matrix->inputs / chunks + 31) / 32 * 32;
    int64_t most = PACKED_INPUTS / width < PACKED_ROWS ? PACKED_INPUTS / width : PACKED_ROWS;
    int64_t parts = (rows + most - 1) / most, even = (rows / parts + MICRO_ROWS) / MICRO_ROWS * MICRO_ROWS;
    for (int64_t row = 0; row < rows; row += height) {
        height = rows - row <= most ? rows - row : even < most ? even : most;
        int64_t tile_rows = height <= PACKED_FEW ? FEW_ROWS : MICRO_ROWS, last;
        for (int64_t first = 0; first < matrix->inputs; first = last) {
            last = first + width < matrix->inputs ? first + width : matrix->inputs;
            FN(Packed) packed = {height, (height + tile_rows - 1) / tile_rows, first, last, inputs, totals};
            for (int64_t tile = 0; tile < packed.tiles; tile++) {
                int64_t top = FN(top)(&packed, tile);
                FN(pack_inputs)(matrix, x + (row + top) * matrix->inputs, FN(top)(&packed, tile + 1) - top, first, last,
                                inputs + top * (last - first), totals + top * ((last - first) / matrix->block));
            }
            for (int64_t panel = first_panel; panel < last_panel; panel++)
                FN(product_of_panel)(matrix, panel, &packed, out + row * matrix->outputs);
        }
    }
}
