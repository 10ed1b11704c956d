// A tile of rows and the query heads that meet it: part of rows.cpp, included by rows.inl.

constexpr int TILE_ROWS = 16;  // of Tile and Direct
constexpr int MOST_ROWS = 32;  // of any
constexpr float LOG2_E = 1.44269504f;
constexpr float LOWEST = -3e38f;  // the reference before there is a score
constexpr float RISE = 30.0f;     // how far above its reference a score may lie, in powers of two

// Rows that are soon needed: they are brought closer in small portions, while others are computed with.
struct Ahead {
    const char* rows[MOST_ROWS];
    int64_t num_rows;
    int64_t num_lines;  // of a row
    int64_t portion;    // lines at a time
    int64_t row, line;  // the next one

    INLINE void fetch() {
        int64_t at = row, next = line;  // not written to memory each time
        for (int64_t i = 0; i < portion && at < num_rows; i++) {
            __builtin_prefetch(rows[at] + 64 * next, 0, 2);
            if (++next == num_lines) {
                next = 0;
                at++;
            }
        }
        row = at;
        line = next;
    }
};

// A query's heads of one KV head, and their running softmax. A group of R heads has a vector of references
// and one of sums, where lane i is that of head i % R; its sums are those of different rows.
struct HeadsState {
    float* q;          // [heads][width], scaled, in the tile's order; see Wide for its own
    float* out;        // [heads][v_width]
    float* scores;     // [rows][heads of a group]
    float* reference;  // [heads][LANES], of which a group has those of its first head
    float* sum;        // [heads][LANES]
    int64_t width, v_width;
};

// Where a group of heads finds its rows. A tile has keys and values as float32; stored rows are
// read as they are, and those of FP8 times a factor each.
template <typename T> struct Tile {
    static constexpr int ROWS = TILE_ROWS;
    static int64_t num_pauses(int64_t heads, int64_t, int64_t v_width) {
        return heads * v_width / 384 + heads * ROWS / LANES;
    }
    const T* stored[TILE_ROWS];
    float* keys;
    const float* values;
    int64_t value_stride, dim;
};

template <typename T> struct Direct {
    static constexpr int ROWS = TILE_ROWS;
    static int64_t num_pauses(int64_t heads, int64_t, int64_t v_width) {
        return heads * v_width / 384 + heads * ROWS / LANES;
    }
    const T* keys[TILE_ROWS];
    const T* values[TILE_ROWS];
    float key_factors[TILE_ROWS], value_factors[TILE_ROWS];
};

// scores[j * R + i] = q_i . row_j for R heads and the rows of a tile, whose elements load(j, e, pair) gives.
template <int R, typename Load>
static INLINE void score_rows(const float* q, int64_t width, int64_t count, Ahead& ahead, float* scores,
                              const Load& load_row) {
    constexpr int K = LANES / R;
    for (int64_t j = 0; j < count; j += K) {
        Floats products[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) products[i] = Floats{};
        ahead.fetch();
        for (int64_t e = 0; e < width; e += PAIR) {
            Floats rows[K][2];
#pragma GCC unroll 16
            for (int k = 0; k < K; k++) load_row(j + k, e, rows[k]);
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

// out[i][e] += sum over rows j of p[j * STEP + i] * value_j[e], for C vectors that load_columns(j, columns) gives.
template <int R, int STEP, int C, typename Load>
static INLINE void add_values(const float* p, int64_t count, float* out, int64_t width, const Load& load_columns) {
    // A tile is summed by itself: many small sums have smaller errors than a long one.
    Floats acc[R][C] = {};
    for (int64_t j = 0; j < count; j++) {
        Floats columns[C];
        load_columns(j, columns);
#pragma GCC unroll 16
        for (int i = 0; i < R; i++) {
            const Floats factor = splat(p[j * STEP + i]);
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
    float *references = s.reference + head * LANES, *lane_sums = s.sum + head * LANES;
    Floats highest = splat(LOWEST);
    for (int64_t at = 0; at < count * R; at += LANES) highest = maximum(load(s.scores + at), highest);
    for (int i = 0; i < R; i++) {
        float top = LOWEST;
        for (int lane = i; lane < LANES; lane += R) top = std::max(top, highest[lane]);
        const float reference = references[i];
        if (!(top > reference + RISE) && reference != LOWEST) continue;
        const float factor = reference == LOWEST ? 1.0f : exp2(splat(reference - top))[0];
        for (int lane = i; lane < LANES; lane += R) {
            references[lane] = top;
            lane_sums[lane] *= factor;
        }
        float* out = s.out + (head + i) * s.v_width;
        if (reference != LOWEST)
            for (int64_t e = 0; e < s.v_width; e++) out[e] *= factor;
    }
}

// Scores -> exp2(score - reference), and their sums.
template <int R> static INLINE void exponentials(const HeadsState& s, int64_t head, int64_t count) {
    const int64_t end = (count * R + LANES - 1) / LANES * LANES;
    for (int64_t at = count * R; at < end; at++) s.scores[at] = -std::numeric_limits<float>::infinity();
    const Floats limit = load(s.reference + head * LANES) + RISE;
    Ints above = {};
    for (int64_t at = 0; at < end; at += LANES) above |= (Ints)(load(s.scores + at) > limit);
    if (any(above)) raise_references<R>(s, head, count);
    const Floats reference = load(s.reference + head * LANES);
    Floats total = load(s.sum + head * LANES);
    for (int64_t at = 0; at < end; at += LANES) {
        const Floats p = exp2(load(s.scores + at) - reference);
        total += p;
        store(s.scores + at, p);
    }
    store(s.sum + head * LANES, total);
}

// The first heads of a KV head fill the tile on their way, unless it is FP8, which is there already.
template <int R, bool IS_FIRST, typename T>
static INLINE void score_tile(const HeadsState& s, int64_t head, const Tile<T>& tile, int64_t count, Ahead& ahead) {
    const int64_t end = IS_FIRST && sizeof(T) > 1 ? tile.dim / PAIR * PAIR : 0;
    score_rows<R>(s.q + head * s.width, s.width, count, ahead, s.scores, [&](int64_t j, int64_t e, Floats (&pair)[2]) {
        float* own = tile.keys + j * s.width + e;
        if (e < end) {
            load_pair(tile.stored[j] + e, pair);
            store(own, pair[0]);
            store(own + LANES, pair[1]);
        } else {
            pair[0] = load(own);
            pair[1] = load(own + LANES);
        }
    });
}

template <int R, typename T>
static INLINE void attend_group(const HeadsState& s, int64_t head, const Tile<T>& tile, int64_t count, Ahead& ahead) {
    if (head == 0) score_tile<R, true>(s, head, tile, count, ahead);
    else score_tile<R, false>(s, head, tile, count, ahead);
    exponentials<R>(s, head, count);
    // As many sums as keep the multipliers busy, and fit into the registers.
    constexpr int C = LANES == 16 ? (R == 8 ? 3 : R == 4 ? 4 : 8) : std::max(8 / R, 1);
    float* out = s.out + head * s.v_width;
    auto add = [&](auto size, int64_t e) {
        constexpr int N = decltype(size)::value;
        add_values<R, R, N>(s.scores, count, out + e, s.v_width, [&](int64_t j, Floats (&columns)[N]) {
#pragma GCC unroll 8
            for (int c = 0; c < N; c++) columns[c] = load(tile.values + j * tile.value_stride + e + c * LANES);
        });
        ahead.fetch();
    };
    int64_t e = 0;
    for (; e + C * LANES <= s.v_width; e += C * LANES) add(std::integral_constant<int, C>(), e);
    for (; e < s.v_width; e += LANES) add(std::integral_constant<int, 1>(), e);
}

// factors[j] for the R scores of row j.
template <int R> static INLINE void scale_rows(float* scores, const float* factors, int64_t count) {
    constexpr int K = LANES / R;  // rows of a vector
    Ints row;
    for (int i = 0; i < LANES; i++) row[i] = i / R;
    for (int64_t j = 0; j < count; j += K) {
        const Floats some = load(factors + j / LANES * LANES);
        store(scores + j * R, load(scores + j * R) * __builtin_shuffle(some, row + (int)(j % LANES)));
    }
}

// The same with rows as they are stored.
template <int R, typename T>
static INLINE void attend_group(const HeadsState& s, int64_t head, const Direct<T>& rows, int64_t count, Ahead& ahead) {
    score_rows<R>(s.q + head * s.width, s.width, count, ahead, s.scores,
                  [&](int64_t j, int64_t e, Floats (&pair)[2]) { load_pair(rows.keys[j] + e, pair); });
    if constexpr (sizeof(T) == 1) scale_rows<R>(s.scores, rows.key_factors, count);
    exponentials<R>(s, head, count);
    if constexpr (sizeof(T) == 1) scale_rows<R>(s.scores, rows.value_factors, count);
    constexpr int PAIRS = LANES == 16 && R <= 4 ? 2 : 1;
    float* out = s.out + head * s.v_width;
    auto add = [&](auto size, int64_t e) {
        constexpr int N = decltype(size)::value;
        add_values<R, R, 2 * N>(s.scores, count, out + e, s.v_width, [&](int64_t j, Floats (&columns)[2 * N]) {
#pragma GCC unroll 2
            for (int n = 0; n < N; n++) {
                Floats pair[2];
                load_pair(rows.values[j] + e + n * PAIR, pair);
                columns[2 * n] = pair[0];
                columns[2 * n + 1] = pair[1];
            }
        });
        ahead.fetch();
    };
    int64_t e = 0;
    for (; e + PAIRS * PAIR <= s.v_width; e += PAIRS * PAIR) add(std::integral_constant<int, PAIRS>(), e);
    for (; e < s.v_width; e += PAIR) add(std::integral_constant<int, 1>(), e);
}

// Heads in groups of 8 and fewer, largest first.
template <typename Rows>
static inline void attend_heads(const RowsArguments&, const HeadsState& s, int64_t num_heads, const Rows& rows,
                                int64_t count, Ahead& ahead) {
    for (int64_t head = 0; head < num_heads;) {
        const int64_t left = num_heads - head;
        if (LANES >= 8 && left >= 8) {
            attend_group<std::min(8, LANES)>(s, head, rows, count, ahead);
            head += 8;
        } else if (left >= 4) {
            attend_group<4>(s, head, rows, count, ahead);
            head += 4;
        } else if (left >= 2) {
            attend_group<2>(s, head, rows, count, ahead);
            head += 2;
        } else {
            attend_group<1>(s, head, rows, count, ahead);
            head += 1;
        }
    }
}

// Sums over lanes, once all rows are in: sum[head] and reference[head] for all heads, at [head * LANES].
static inline void sum_lanes(const HeadsState& s, int64_t num_heads, bool is_wide) {
    for (int64_t head = 0; head < num_heads;) {
        const int64_t left = num_heads - head;
        const int group = is_wide ? LANES : LANES >= 8 && left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        float lane_sums[LANES], references[LANES];
        store(lane_sums, load(s.sum + head * LANES));
        store(references, load(s.reference + head * LANES));
        for (int i = 0; i < group; i++, head++) {
            float total = 0;
            for (int lane = i; lane < LANES; lane += group) total += lane_sums[lane];
            s.sum[head * LANES] = total;
            s.reference[head * LANES] = references[i];
        }
    }
}
