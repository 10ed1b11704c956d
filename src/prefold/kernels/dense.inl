// See dense.cpp. Included once per instruction set.

constexpr int ROWS = LANES == 16 ? 8 : 4;            // whose sums are in registers together,
constexpr int VECTORS = LANES == 16 ? 3 : 2;         // with so many vectors of keys or elements
constexpr int PANEL = VECTORS * LANES;               // keys of a panel
constexpr int64_t ROW_BLOCK = 96;                    // rows that meet keys while they are in the second cache
constexpr int64_t DEPTH = 192;                       // elements of a panel that fit in the first cache
constexpr int64_t BLOCK_KEYS = 8 * PANEL;            // keys whose scores are made together
constexpr int64_t VALUE_KEYS = 48;                   // keys whose values are summed at a time
constexpr float LOWEST = -3e38f;                     // the reference of a row that has seen nothing
constexpr float RISE = 20.0f;                        // how far above it a score may lie
constexpr float LOG2_E = 1.44269504f;

// Keys [start, end) of a block that a row sees.
struct Visible {
    int64_t start, end;
};

static INLINE Visible visible_of(const DenseArguments& a, int64_t row, int64_t first_key, int64_t num_keys) {
    const int64_t token = row / a.rows_per_token;
    const int64_t end = a.is_causal ? token + 1 - first_key : num_keys;
    const int64_t start = a.unseen ? a.unseen[token] - first_key : 0;
    const int64_t last = std::min(std::max<int64_t>(end, 0), num_keys);
    return {std::min(std::max<int64_t>(start, 0), last), last};
}

// A block of keys of one head, and the rows that meet it now.
struct DenseBlock {
    const float* panels;  // per panel [dim][PANEL]
    const float* values;  // [keys], a.v_stride apart
    const float* packed;  // q of the rows, per LANES [dim][LANES]
    float* scores;        // [ROW_BLOCK][width]
    int64_t first_key, num_keys, width;
};

// Scores of `count` rows with keys [start, end), whole panels.
static inline void dense_scores(const DenseArguments& a, const DenseBlock& b, int64_t count, int64_t start,
                                int64_t end) {
    for (int64_t first = start / PANEL * PANEL; first < end; first += PANEL)
        for (int64_t d = 0; d < a.dim; d += DEPTH) {
            const int64_t depth = std::min(a.dim - d, DEPTH);
            const float* panel = b.panels + first * a.dim + d * PANEL;
            for (int64_t r = 0; r < count; r += ROWS) {
                const float* rows = b.packed + r / LANES * LANES * a.dim + d * LANES + r % LANES;
                float* scores = b.scores + r * b.width + first;
                Floats products[ROWS][VECTORS] = {};
                if (d > 0)
#pragma GCC unroll 8
                    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
                        for (int c = 0; c < VECTORS; c++)
                            products[i][c] = load(scores + i * b.width + c * LANES);
                multiply_panel(rows, LANES, panel, depth, PANEL, products);
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
                    for (int c = 0; c < VECTORS; c++)
                        store(scores + i * b.width + c * LANES, products[i][c]);
            }
        }
}

// Scores [start, end) of a row -> exp(score - reference), and 0 for the other keys of the block of rows.
static inline void dense_exponentials(const DenseArguments& a, float* scores, Visible row, Visible block,
                                      float* reference, float* sum, float* out) {
    const int64_t first = block.start / LANES * LANES;
    const int64_t last = (block.end + LANES - 1) / LANES * LANES;
    const float hidden = -std::numeric_limits<float>::infinity();
    // A row that sees nothing may lie outside.
    std::fill(scores + first, scores + std::clamp(row.start, first, last), hidden);
    std::fill(scores + std::clamp(row.end, first, last), scores + last, hidden);
    Floats most = splat(LOWEST);
    for (int64_t at = first; at < last; at += LANES) most = maximum(load(scores + at), most);
    const float top = largest(most);
    if (top > *reference + RISE || *reference == LOWEST) {
        if (*reference != LOWEST) {
            const float factor = exp2(splat((*reference - top) * LOG2_E))[0];
            *sum *= factor;
            for (int64_t e = 0; e < a.v_dim; e++) out[e] *= factor;
        }
        *reference = top;
    }
    const Floats subtracted = splat(*reference);
    Floats all = {};
    for (int64_t at = first; at < last; at += LANES) {
        // Subtracted first, which is nearly exact: the product's rounding does not grow with the scores.
        const Floats p = exp2((load(scores + at) - subtracted) * LOG2_E);
        all += p;
        store(scores + at, p);
    }
    *sum += total(all);
}

// out[i][e] += sum over keys j of p[i][j] * value_j[e], for R rows and C vectors of elements.
template <int R, int C>
static INLINE void dense_values(const float* p, int64_t width, const float* values, int64_t stride,
                                int64_t count, float* out, int64_t out_stride) {
    Floats acc[R][C] = {};
    for (int64_t j = 0; j < count; j++) {
        Floats columns[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) columns[c] = load(values + j * stride + c * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < R; i++) {
            Floats factor = splat(p[i * width + j]);
            keep_in_register(factor);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) acc[i][c] += factor * columns[c];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            float* to = out + i * out_stride + c * LANES;
            store(to, load(to) + acc[i][c]);
        }
}

template <int C>
static INLINE void dense_columns(const DenseArguments& a, const DenseBlock& b, int64_t count, int64_t start,
                                 int64_t end, int64_t e, float* out) {
    const float *p = b.scores + start, *values = b.values + start * a.v_stride + e;
    int64_t r = 0;
    for (; r + ROWS <= count; r += ROWS)
        dense_values<ROWS, C>(p + r * b.width, b.width, values, a.v_stride, end - start,
                              out + r * a.out_stride + e, a.out_stride);
    for (; r < count; r++)
        dense_values<1, C>(p + r * b.width, b.width, values, a.v_stride, end - start,
                           out + r * a.out_stride + e, a.out_stride);
}

static inline void dense_sums(const DenseArguments& a, const DenseBlock& b, int64_t count, Visible block,
                              float* out) {
    for (int64_t start = block.start; start < block.end; start += VALUE_KEYS) {
        const int64_t end = std::min(start + VALUE_KEYS, block.end);
        int64_t e = 0;
        for (int64_t left; (left = (a.v_dim - e) / LANES) > 0;) {
            if (VECTORS > 2 && left != 4 && left >= 3) {
                dense_columns<VECTORS>(a, b, count, start, end, e, out);
                e += VECTORS * LANES;
            } else if (left >= 2) {
                dense_columns<2>(a, b, count, start, end, e, out);
                e += 2 * LANES;
            } else {
                dense_columns<1>(a, b, count, start, end, e, out);
                e += LANES;
            }
        }
        for (; e < a.v_dim; e++)
            for (int64_t r = 0; r < count; r++) {
                float sum = 0;
                for (int64_t j = start; j < end; j++)
                    sum += b.scores[r * b.width + j] * b.values[j * a.v_stride + e];
                out[r * a.out_stride + e] += sum;
            }
    }
}

// Rows [first, first + count), counted from a.first_row, meet a block of keys of one head.
static inline void dense_rows(const DenseArguments& a, const DenseBlock& b, int64_t head, int64_t first,
                              int64_t count) {
    Visible rows[ROW_BLOCK], block = {b.num_keys, 0};
    for (int64_t r = 0; r < count; r++) {
        rows[r] = visible_of(a, first + r, b.first_key, b.num_keys);
        if (rows[r].start == rows[r].end) continue;
        block = {std::min(block.start, rows[r].start), std::max(block.end, rows[r].end)};
    }
    if (block.start >= block.end) return;
    const int64_t row = a.first_row + first;
    dense_scores(a, b, count, block.start, block.end);
    float* out = a.out + head * a.out_head_stride + row * a.out_stride;
    const int64_t place = head * a.rows_per_head + row;
    for (int64_t r = 0; r < count; r++)
        dense_exponentials(a, b.scores + r * b.width, rows[r], block, a.references + place + r,
                           a.sums + place + r, out + r * a.out_stride);
    dense_sums(a, b, count, block, out);
}

static void attend_dense(const DenseArguments& a) {
    NoDenormals while_here;
    static thread_local Buffer buffer;
    const int64_t padded_keys = (a.num_keys + PANEL - 1) / PANEL * PANEL;
    float* panels = buffer.get(padded_keys * a.dim + ROW_BLOCK * (a.dim + BLOCK_KEYS));
    float* packed = panels + padded_keys * a.dim;
    float* scores = packed + ROW_BLOCK * a.dim;
    for (int64_t head = 0; head < a.num_kv_heads; head++) {
        const float *k = a.k + head * a.k_head_stride, *v = a.v + head * a.v_head_stride;
        for (int64_t j = 0; j < a.num_keys; j += PANEL)
            pack_panel(k + j * a.k_stride, a.k_stride, std::min<int64_t>(a.num_keys - j, PANEL), a.dim, PANEL,
                       panels + j * a.dim);
        for (int64_t row = 0; row < a.num_rows; row += ROW_BLOCK) {
            const int64_t count = std::min(a.num_rows - row, ROW_BLOCK);
            const float* q = a.q + head * a.q_head_stride + (a.first_row + row) * a.q_stride;
            for (int64_t r = 0; r < count; r += LANES)
                pack_panel(q + r * a.q_stride, a.q_stride, std::min<int64_t>(count - r, LANES), a.dim, LANES,
                           packed + r * a.dim);
            for (int64_t key = 0; key < a.num_keys; key += BLOCK_KEYS)
                dense_rows(a,
                           {panels + key * a.dim, v + key * a.v_stride, packed, scores, key,
                            std::min(a.num_keys - key, BLOCK_KEYS), BLOCK_KEYS},
                           head, row, count);
        }
    }
}
