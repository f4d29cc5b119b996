/* The work of native_operators.c on one thread, included there once for each kind of processor.
 *
 * FN(name) is a function's name with the kind at its end. Types and constants are in native_operators.c.
 */

INLINE vec FN(vmax)(vec a, vec b) {
    ivec greater = a > b;
    return (vec)(((ivec)a & greater) | ((ivec)b & ~greater));
}

INLINE float FN(sum_of)(vec v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

INLINE float FN(max_of)(vec v) {
    float found = v[0];
    for (int i = 1; i < LANES; i++) found = v[i] > found ? v[i] : found;
    return found;
}

/* e^x within 2 units in the last place (Cephes' expf), 0 below -87, e^88 above 88. */
INLINE vec FN(vexp)(vec x) {
    const vec round = ALL(12582912.0f);
    ivec normal = x > ALL(-87.0f);
    vec clamped = FN(vmax)(-FN(vmax)(-x, ALL(-88.0f)), ALL(-87.0f));
    vec power = (clamped * 1.44269504088896341f + round) - round;
    vec r = clamped - power * 0.693359375f - power * -2.12194440e-4f;
    vec p = ALL(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    ivec scale = (__builtin_convertvector(power, ivec) + 127) << 23;
    return (vec)((ivec)(p * (vec)scale) & normal);
}

/* Norm of one row of any width; `x` and `out` may be the same. */
INLINE void FN(norm_row)(const float *x, const float *weight, float epsilon, float *out, int64_t width) {
    vec sums[4] = {{0}};
    float rest = 0.0f;
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES)
        for (int j = 0; j < 4; j++) sums[j] += LOAD(x + i + j * LANES) * LOAD(x + i + j * LANES);
    for (; i + LANES <= width; i += LANES) sums[0] += LOAD(x + i) * LOAD(x + i);
    for (; i < width; i++) rest += x[i] * x[i];
    float mean = (FN(sum_of)((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest) / (float)width;
    float factor = 1.0f / sqrtf(mean + epsilon);
    for (i = 0; i + LANES <= width; i += LANES) STORE(out + i, LOAD(x + i) * factor * LOAD(weight + i));
    for (; i < width; i++) out[i] = x[i] * factor * weight[i];
}

INLINE void FN(add_row)(float *x, const float *added, int64_t width) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) STORE(x + i, LOAD(x + i) + LOAD(added + i));
    for (; i < width; i++) x[i] += added[i];
}

static void FN(add_rows)(float *x, const float *added, int64_t first, int64_t last, int64_t width) {
    for (int64_t row = first; row < last; row++) FN(add_row)(x + row * width, added + row * width, width);
}

static void FN(norm_rows)(float *x, const float *added, const float *weight, float epsilon, float *out, int64_t first,
                      int64_t last, int64_t width) {
    for (int64_t row = first; row < last; row++) {
        if (added) FN(add_row)(x + row * width, added + row * width, width);
        FN(norm_row)(x + row * width, weight, epsilon, out + row * width, width);
    }
}

INLINE vec FN(silu_times)(vec gate, vec up) {
    return gate / (FN(vexp)(-gate) + 1.0f) * up;
}

static void FN(silu_rows)(const float *gate_up, float *out, int64_t first, int64_t last, int64_t width) {
    for (int64_t row = first; row < last; row++) {
        const float *gate = gate_up + row * 2 * width, *up = gate + width;
        float *to = out + row * width;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) STORE(to + i, FN(silu_times)(LOAD(gate + i), LOAD(up + i)));
        if (i < width) {
            float ends[3][LANES] = {{0}};
            memcpy(ends[0], gate + i, (size_t)(width - i) * 4);
            memcpy(ends[1], up + i, (size_t)(width - i) * 4);
            STORE(ends[2], FN(silu_times)(LOAD(ends[0]), LOAD(ends[1])));
            memcpy(to + i, ends[2], (size_t)(width - i) * 4);
        }
    }
}

INLINE void FN(rotate)(float *head, const float *rotation, int64_t dim) {
    for (int64_t i = 0; i < dim; i += 2) {
        float a = head[i], b = head[i + 1], cosine = rotation[i], sine = rotation[i + 1];
        head[i] = a * cosine - b * sine;
        head[i + 1] = a * sine + b * cosine;
    }
}

/* Norm and rotate queries and keys of tokens, and write keys and values into their pages. */
static void FN(append_tokens)(const Batch *batch, const Layer *layer, int64_t first, int64_t last) {
    int64_t heads = batch->heads, kv_heads = batch->kv_heads, dim = batch->dim;
    for (int64_t token = first; token < last; token++) {
        float *head = layer->qkv + token * (heads + 2 * kv_heads) * dim;
        int64_t position = batch->positions[token], offset = position % PAGE;
        int64_t page = batch->pages[batch->owners[token] * batch->pages_per_row + position / PAGE];
        for (int64_t i = 0; i < heads + kv_heads; i++, head += dim) {
            const float *norm = i < heads ? layer->query_norm : layer->key_norm;
            if (norm) FN(norm_row)(head, norm, batch->epsilon, head, dim);
            FN(rotate)(head, batch->rotation + token * dim, dim);
            if (i < heads) continue;
            float *to = layer->keys + (page * kv_heads + i - heads) * dim * PAGE + offset;
            for (int64_t d = 0; d < dim; d++) to[d * PAGE] = head[d];
        }
        for (int64_t i = 0; i < kv_heads; i++, head += dim)
            memcpy(layer->values + ((page * kv_heads + i) * PAGE + offset) * dim, head, (size_t)dim * 4);
    }
}

/* Scores of `rows` queries (a constant after inlining) with one page, unscaled. `next` is read soon. */
INLINE void FN(micro_scores)(const int rows, const float *queries, const float *keys, const float *next, int64_t dim,
                         float *scores) {
    vec sums[MICRO_ROWS][2];
    for (int i = 0; i < rows; i++) sums[i][0] = sums[i][1] = ALL(0);
    for (int64_t d = 0; d < dim; d++) {
        __builtin_prefetch(next + d * PAGE);
        vec low = LOAD(keys + d * PAGE), high = LOAD(keys + d * PAGE + LANES);
        for (int i = 0; i < rows; i++) {
            sums[i][0] += low * queries[i * STRIDE + d];
            sums[i][1] += high * queries[i * STRIDE + d];
        }
    }
    for (int i = 0; i < rows; i++) {
        STORE(scores + i * STRIDE, sums[i][0]);
        STORE(scores + i * STRIDE + LANES, sums[i][1]);
    }
}

/* Add a block's values, weighted, to `rows` outputs of `vectors * LANES` dimensions from `d` on. */
INLINE void FN(micro_values)(const int rows, const int vectors, const float *weights, const Values *values, int64_t d,
                         float *out) {
    vec sums[MICRO_ROWS][4];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) sums[i][j] = LOAD(out + i * STRIDE + j * LANES);
    for (int64_t start = 0; start < values->tokens; start += PAGE, weights += PAGE) {
        int64_t left = values->tokens - start, tokens = left < PAGE ? left : PAGE, page = start / PAGE;
        const float *from = values->pool + values->pages[page] * values->page_size + d;
        const float *next = left > PAGE ? values->pool + values->pages[page + 1] * values->page_size + d : from;
        for (int64_t t = 0; t < tokens; t++, from += values->dim, next += values->dim) {
            vec value[4];
            for (int j = 0; j < vectors; j += 2) __builtin_prefetch(next + j * LANES);
            for (int j = 0; j < vectors; j++) value[j] = LOAD(from + j * LANES);
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < vectors; j++) sums[i][j] += value[j] * weights[i * STRIDE + t];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) STORE(out + i * STRIDE + j * LANES, sums[i][j]);
}

/* Turn one row's scores of a block of `width` tokens into weights; 0 outside what it sees. */
INLINE void FN(soften)(Tile *tile, int64_t row, int64_t start, int64_t width, int64_t dim, float scale) {
    float *scores = tile->scores[row];
    int64_t seen = tile->seen[row] - start, unseen = tile->first[row] - start;
    for (int64_t t = seen < 0 ? 0 : seen; t < width; t++) scores[t] = -INFINITY;
    for (int64_t t = 0; t < unseen && t < width; t++) scores[t] = -INFINITY;
    vec peak = ALL(-INFINITY), total = ALL(0);
    for (int64_t t = 0; t < width; t += LANES) peak = FN(vmax)(peak, LOAD(scores + t));
    float highest = FN(max_of)(peak) * scale, before = tile->highest[row];
    if (highest < before) highest = before;
    if (highest == -INFINITY) { /* the block lies before the row's window */
        memset(scores, 0, (size_t)width * 4);
        return;
    }
    for (int64_t t = 0; t < width; t += LANES) {
        vec weights = FN(vexp)(LOAD(scores + t) * scale - highest);
        STORE(scores + t, weights);
        total += weights;
    }
    if (start > 0) {
        vec kept = FN(vexp)(ALL(before - highest));
        for (int64_t d = 0; d < dim; d += LANES) STORE(tile->out[row] + d, LOAD(tile->out[row] + d) * kept);
        tile->total[row] *= kept[0];
    }
    tile->total[row] += FN(sum_of)(total);
    tile->highest[row] = highest;
}

/* Attention of a tile to tokens [start, end) of its row, at most BLOCK; `pages` begins at `start`. */
INLINE void FN(attend_block)(Tile *tile, const Batch *batch, const Layer *layer, const int32_t *pages, int64_t kv_head,
                         int64_t start, int64_t end) {
    int64_t dim = batch->dim, used = (end - start + PAGE - 1) / PAGE;
    int64_t page_size = batch->kv_heads * dim * PAGE, offset = kv_head * dim * PAGE;
    const float *all_keys = layer->keys + offset, *all_values = layer->values + offset;
    for (int64_t page = 0; page < used; page++) {
        const float *keys = all_keys + pages[page] * page_size;
        const float *next = page + 1 < used ? all_keys + pages[page + 1] * page_size : all_values + pages[0] * page_size;
        for (int64_t row = 0; row < tile->rows; row += MICRO_ROWS)
            FOR_ROWS(tile->rows - row,
                     FN(micro_scores)(N, tile->queries[row], keys, next, dim, tile->scores[row] + page * PAGE))
    }
    for (int64_t row = 0; row < tile->rows; row++) FN(soften)(tile, row, start, used * PAGE, dim, 1.0f / sqrtf((float)dim));
    Values values = {all_values, pages, page_size, dim, end - start};
    int64_t d = 0;
    if (tile->rows <= MICRO_ROWS / 2) /* leaves registers for twice the dimensions */
        for (; d + 4 * LANES <= dim; d += 4 * LANES)
            FOR_ROWS(tile->rows, FN(micro_values)(N, N > 3 ? 2 : 4, tile->scores[0], &values, d, tile->out[0] + d))
    for (; d + 2 * LANES <= dim; d += 2 * LANES)
        for (int64_t row = 0; row < tile->rows; row += MICRO_ROWS)
            FOR_ROWS(tile->rows - row, FN(micro_values)(N, 2, tile->scores[row], &values, d, tile->out[row] + d))
    for (; d < dim; d += LANES)
        for (int64_t row = 0; row < tile->rows; row += MICRO_ROWS)
            FOR_ROWS(tile->rows - row, FN(micro_values)(N, 1, tile->scores[row], &values, d, tile->out[row] + d))
}

/* Attention of the query heads of one KV head, for one tile. */
static void FN(attend_tile)(const Batch *batch, const Layer *layer, int64_t index, int64_t kv_head) {
    int64_t dim = batch->dim, heads = batch->heads, group = heads / batch->kv_heads;
    int64_t first = batch->tiles_of[2 * index], tokens = batch->tiles_of[2 * index + 1];
    const int32_t *pages = batch->pages + batch->owners[first] * batch->pages_per_row;
    int64_t end = batch->positions[first + tokens - 1] + 1;
    int64_t begin = batch->positions[first] + 1 - batch->window;
    /* More query heads than a tile has rows: several passes over the group. */
    for (int64_t past = 0; past < group; past += TILE_ROWS) {
        Tile tile;
        int64_t count = group - past < TILE_ROWS ? group - past : TILE_ROWS;
        tile.rows = tokens * count;
        for (int64_t row = 0; row < tile.rows; row++) {
            int64_t token = first + row / count, query = kv_head * group + past + row % count;
            const float *head = layer->qkv + (token * (heads + 2 * batch->kv_heads) + query) * dim;
            memcpy(tile.queries[row], head, (size_t)dim * 4);
            tile.seen[row] = batch->positions[token] + 1;
            tile.first[row] = tile.seen[row] - batch->window;
            tile.highest[row] = -INFINITY;
            tile.total[row] = 0.0f;
            memset(tile.out[row], 0, (size_t)dim * 4);
        }
        for (int64_t start = begin > 0 ? begin / BLOCK * BLOCK : 0; start < end; start += BLOCK)
            FN(attend_block)(&tile, batch, layer, pages + start / PAGE, kv_head, start, start + BLOCK < end ? start + BLOCK : end);
        for (int64_t row = 0; row < tile.rows; row++) {
            int64_t token = first + row / count, query = kv_head * group + past + row % count;
            vec factor = ALL(1.0f / tile.total[row]);
            for (int64_t d = 0; d < dim; d += LANES)
                STORE(layer->out + (token * heads + query) * dim + d, LOAD(tile.out[row] + d) * factor);
        }
    }
}
