// See rows.cpp. Included once per instruction set.

constexpr int TILE_ROWS = 16;
constexpr int PAIR = 2 * LANES;      // elements of a row that are converted together
constexpr float LOG2_E = 1.44269504f;
constexpr float LOWEST = -3e38f;     // the reference before there is a score
constexpr float RISE = 30.0f;        // how far above its reference a score may lie, in powers of two

static INLINE int64_t padded(int64_t elements) { return (elements + PAIR - 1) / PAIR * PAIR; }

// Where a tile has element e of a row. Pairs of bfloat16 become vectors of even and of odd elements by a
// shift and a mask; a last chunk that is not full is in its own order, and zeros fill it.
template <typename T> static INLINE int64_t place(int64_t e, int64_t dim) {
    if (sizeof(T) == 4 || e >= dim / PAIR * PAIR) return e;
    return e / PAIR * PAIR + e % 2 * LANES + e % PAIR / 2;
}

// Elements [e, e + PAIR) of a row, in the tile's order.
static INLINE void load_pair(const float* from, Floats (&to)[2]) {
    to[0] = load(from);
    to[1] = load(from + LANES);
}

static INLINE void load_pair(const uint16_t* from, Floats (&to)[2]) {
    Bits pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    to[0] = (Floats)(pairs << 16);
    to[1] = (Floats)(pairs & 0xffff0000u);
}

// What does not fill a chunk, and the zeros behind it.
template <typename T> static INLINE void copy_end(const T* from, int64_t dim, float* to) {
    const int64_t end = padded(dim);
    for (int64_t e = dim / PAIR * PAIR; e < end; e++) to[e] = e < dim ? scalar(from[e]) : 0.0f;
}

template <typename T> static INLINE void copy_row(const T* from, int64_t dim, float* to) {
    for (int64_t e = 0; e + PAIR <= dim; e += PAIR) {
        Floats pair[2];
        load_pair(from + e, pair);
        store(to + e, pair[0]);
        store(to + e + LANES, pair[1]);
    }
    copy_end(from, dim, to);
}

// The rows of a tile: where they come from, and where those of the next tile are.
template <typename T> struct Sources {
    const T* rows[TILE_ROWS];
    const T* ahead[TILE_ROWS];
    int64_t dim;
};

// A query's heads of one KV head, and their running softmax.
struct HeadsState {
    float* q;          // [heads][width], scaled, places as in the tile
    float* out;        // [heads][v_width]
    float* scores;     // [TILE_ROWS][heads of a group]
    float* reference;  // [heads]
    float* sum;        // [heads]
    int64_t width, v_width;
};

// scores[j * R + i] = q_i . row_j for R heads and the rows of a tile. The first heads of a query fill the
// tile on their way (`sources`), and fetch the next one's rows.
template <int R, bool IS_FIRST, typename T>
static INLINE void score_tile(const float* q, int64_t width, float* tile, int64_t count,
                              const Sources<T>& sources, float* scores) {
    constexpr int K = LANES / R;
    const int64_t end = IS_FIRST ? sources.dim / PAIR * PAIR : 0;
    for (int64_t j = 0; j < count; j += K) {
        Floats products[LANES] = {};
        for (int64_t e = 0; e < width; e += PAIR) {
            Floats rows[K][2];
#pragma GCC unroll 16
            for (int k = 0; k < K; k++) {
                float* own = tile + (j + k) * width + e;
                if (IS_FIRST && e < end) {
                    for (int64_t line = e; line < e + PAIR; line += 64 / sizeof(T))
                        __builtin_prefetch(sources.ahead[j + k] + line, 0, 2);
                    load_pair(sources.rows[j + k] + e, rows[k]);
                    store(own, rows[k][0]);
                    store(own + LANES, rows[k][1]);
                } else {
                    rows[k][0] = load(own);
                    rows[k][1] = load(own + LANES);
                }
            }
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
#pragma GCC unroll 16
                for (int i = 0; i < R; i++) {
                    Floats query = load(q + i * width + e + half * LANES);
                    keep_in_register(query);
#pragma GCC unroll 16
                    for (int k = 0; k < K; k++) products[k * R + i] += query * rows[k][half];
                }
        }
        store(scores + j * R, sums(products));
    }
}

// out[i][e] += sum over rows j of p[j * R + i] * value_j[e], for C vectors of elements.
template <int R, int C>
static INLINE void add_values(const float* p, const float* values, int64_t stride, int64_t count, float* out,
                              int64_t width) {
    // A tile is summed by itself: many small sums have smaller errors than a long one.
    Floats acc[R][C] = {};
    for (int64_t j = 0; j < count; j++) {
        Floats columns[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) columns[c] = load(values + j * stride + c * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < R; i++) {
            const Floats factor = splat(p[j * R + i]);
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) acc[i][c] += factor * columns[c];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            float* to = out + i * width + c * LANES;
            store(to, load(to) + acc[i][c]);
        }
}

// Move the references of heads whose scores lie far above them to the highest score.
template <int R> static inline void raise_references(const HeadsState& s, int64_t head, int64_t count) {
    for (int i = 0; i < R; i++) {
        float top = LOWEST;
        for (int64_t j = 0; j < count; j++) top = std::max(top, s.scores[j * R + i]);
        float& reference = s.reference[head + i];
        if (!(top > reference + RISE) && reference != LOWEST) continue;
        if (reference != LOWEST) {
            const float factor = exp2(splat(reference - top))[0];
            s.sum[head + i] *= factor;
            float* out = s.out + (head + i) * s.v_width;
            for (int64_t e = 0; e < s.v_width; e++) out[e] *= factor;
        }
        reference = top;
    }
}

// Scores -> exp2(score - reference), and their sums.
template <int R> static INLINE void exponentials(const HeadsState& s, int64_t head, int64_t count) {
    const int64_t end = (count * R + LANES - 1) / LANES * LANES;
    for (int64_t at = count * R; at < end; at++) s.scores[at] = -std::numeric_limits<float>::infinity();
    Floats reference, limit, total = {};
    auto spread = [&] {
        for (int i = 0; i < LANES; i++) reference[i] = s.reference[head + i % R];
        limit = reference + RISE;
    };
    spread();
    Ints above = {};
    for (int64_t at = 0; at < end; at += LANES) above |= (Ints)(load(s.scores + at) > limit);
    bool is_above = false;
    for (int i = 0; i < LANES; i++) is_above |= above[i] != 0;
    if (is_above) {
        raise_references<R>(s, head, count);
        spread();
    }
    for (int64_t at = 0; at < end; at += LANES) {
        const Floats p = exp2(load(s.scores + at) - reference);
        total += p;
        store(s.scores + at, p);
    }
    for (int i = 0; i < LANES; i++) s.sum[head + i % R] += total[i];
}

template <int R, typename T>
static INLINE void attend_heads(const HeadsState& s, int64_t head, float* keys, const float* values,
                                int64_t value_stride, int64_t count, const Sources<T>& sources) {
    // As many sums as keep the multipliers busy, and fit into the registers.
    constexpr int C = LANES == 16 ? (R == 8 ? 3 : R == 4 ? 6 : 8) : std::max(8 / R, 1);
    const float* q = s.q + head * s.width;
    if (head == 0) score_tile<R, true>(q, s.width, keys, count, sources, s.scores);
    else score_tile<R, false>(q, s.width, keys, count, sources, s.scores);
    exponentials<R>(s, head, count);
    float* out = s.out + head * s.v_width;
    int64_t e = 0;
    for (; e + C * LANES <= s.v_width; e += C * LANES)
        add_values<R, C>(s.scores, values + e, value_stride, count, out + e, s.v_width);
    for (; e < s.v_width; e += LANES)
        add_values<R, 1>(s.scores, values + e, value_stride, count, out + e, s.v_width);
}

template <typename T>
static inline void attend_tile(const HeadsState& s, int64_t num_heads, float* keys, const float* values,
                               int64_t value_stride, int64_t count, const Sources<T>& sources) {
    for (int64_t head = 0; head < num_heads;) {
        const int64_t left = num_heads - head;
        if (LANES >= 8 && left >= 8) {
            attend_heads<std::min(8, LANES)>(s, head, keys, values, value_stride, count, sources);
            head += 8;
        } else if (left >= 4) {
            attend_heads<4>(s, head, keys, values, value_stride, count, sources);
            head += 4;
        } else if (left >= 2) {
            attend_heads<2>(s, head, keys, values, value_stride, count, sources);
            head += 2;
        } else {
            attend_heads<1>(s, head, keys, values, value_stride, count, sources);
            head += 1;
        }
    }
}

// One query's heads of one KV head over rows[0, count): keys and values are parts of a row.
template <typename T>
static void attend_query(const RowsArguments& a, const HeadsState& s, const T* const* rows, int64_t count,
                         int64_t kv_head, float* tile) {
    const int64_t key = a.key_offset + kv_head * a.key_step, value = a.value_offset + kv_head * a.value_step;
    const bool is_shared = key == value;
    float* values = is_shared ? tile : tile + TILE_ROWS * s.width;
    const int64_t value_stride = is_shared ? s.width : s.v_width;
    Sources<T> sources;
    sources.dim = a.dim;
    for (int64_t first = 0; first < count; first += TILE_ROWS) {
        const int64_t present = std::min<int64_t>(count - first, TILE_ROWS);
        for (int64_t j = 0; j < TILE_ROWS; j++) {
            // The scores of rows that are not there are replaced.
            sources.rows[j] = rows[std::min<int64_t>(first + j, count - 1)] + key;
            sources.ahead[j] = rows[std::min<int64_t>(first + TILE_ROWS + j, count - 1)] + key;
            copy_end(sources.rows[j], a.dim, tile + j * s.width);
            if (!is_shared && j < present)
                copy_row(rows[first + j] + value, a.v_dim, values + j * value_stride);
        }
        attend_tile(s, a.heads_per_kv_head, tile, values, value_stride, present, sources);
    }
}

template <typename T>
static inline void finish_query(const RowsArguments& a, const HeadsState& s, int64_t query, int64_t kv_head) {
    const bool is_shared = a.key_offset == a.value_offset && a.key_step == a.value_step;
    for (int64_t h = 0; h < a.heads_per_kv_head; h++) {
        const int64_t head = kv_head * a.heads_per_kv_head + h;
        const float factor = s.sum[h] > 0 || s.sum[h] != s.sum[h] ? 1 / s.sum[h] : 0.0f;
        float* out = a.out + query * a.out_stride + head * a.out_head_stride;
        for (int64_t e = 0; e < a.v_dim; e++)
            out[e] = s.out[h * s.v_width + place<T>(e, is_shared ? a.dim : a.v_dim)] * factor;
        a.lse[query * a.lse_stride + head * a.lse_head_stride] =
            s.sum[h] == 0 ? -std::numeric_limits<float>::infinity()
                          : (s.reference[h] + std::log2(s.sum[h])) / LOG2_E;
    }
}

template <typename T> static void attend_rows_of(const RowsArguments& a, const T* cache, float scale) {
    static thread_local Buffer buffer;
    static thread_local std::vector<const T*> rows;
    const int64_t heads = a.heads_per_kv_head, width = padded(a.dim), v_width = padded(a.v_dim);
    float* tile = buffer.get(heads * (width + v_width + 2) + TILE_ROWS * (width + v_width + 8) + 2 * LANES);
    float* q = tile + TILE_ROWS * (width + v_width);
    float* scores = q + heads * width;
    float* out = scores + TILE_ROWS * 8;
    const HeadsState s = {q, out, scores, out + heads * v_width, out + heads * (v_width + 1), width, v_width};
    for (int64_t i = 0; i < a.num_queries; i++) {
        rows.clear();
        for (int64_t j = 0; j < a.num_slots; j++) {
            const int64_t at = i * a.slots_stride + j;
            const int64_t slot = a.are_slots_int64 ? ((const int64_t*)a.slots)[at] : ((const int32_t*)a.slots)[at];
            if (slot >= 0) rows.push_back(cache + slot * a.row_stride);
        }
        for (int64_t kv_head = 0; kv_head < a.num_kv_heads; kv_head++) {
            std::fill(q, q + heads * width, 0.0f);
            for (int64_t h = 0; h < heads; h++) {
                const float* from = a.q + i * a.q_stride + (kv_head * heads + h) * a.q_head_stride;
                for (int64_t e = 0; e < a.dim; e++)
                    q[h * width + place<T>(e, a.dim)] = from[e] * (scale * LOG2_E);
            }
            std::fill(out, out + heads * v_width, 0.0f);
            std::fill(s.reference, s.reference + heads, LOWEST);
            std::fill(s.sum, s.sum + heads, 0.0f);
            attend_query(a, s, rows.data(), rows.size(), kv_head, tile);
            finish_query<T>(a, s, i, kv_head);
        }
    }
}

static void attend_rows(const RowsArguments& a, float scale) {
    NoDenormals while_here;
    if (a.is_bfloat16) attend_rows_of(a, (const uint16_t*)a.cache, scale);
    else attend_rows_of(a, (const float*)a.cache, scale);
}
