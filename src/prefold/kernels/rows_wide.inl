// Rows for groups of as many heads as a vector has lanes: part of rows.cpp, included by rows.inl.
//
// A lane is a head, and a row's elements are broadcast as they are loaded, which costs nothing: no sums over
// lanes. Rows are converted a few elements at a time, once for scores and again for values. As float32 they would
// displace queries and results from the first-level cache, whose lines are needed for what is fetched.

constexpr int SCORE_ROWS = LANES == 16 ? 16 : 8;  // whose scores are in registers at a time
constexpr int SUMMED = 64;                         // products of a score that are summed at a time
constexpr int CHUNK = SCORE_ROWS * PAIR;          // a pair of vectors of each
constexpr int STRIP_PAIRS = LANES == 16 ? 2 : 1;  // of a row's value that are summed in registers
constexpr int STRIP = STRIP_PAIRS * PAIR;

template <typename T> struct Wide {
    static constexpr int ROWS = MOST_ROWS;
    static int64_t num_pauses(int64_t heads, int64_t width, int64_t v_width) {
        return heads / LANES * (ROWS / SCORE_ROWS) * (width / PAIR + 1 + v_width / STRIP * std::max(LANES / 4, 1));
    }
    float* chunks;                  // [2][CHUNK], of keys: what is met, and what comes next
    float* strip;                   // [ROWS][STRIP], of values
    int64_t key, value, value_dim;  // elements of a row where they begin; of a value those that are summed
    int64_t num_plain;              // elements of a row that load_plain gives, whole pairs; a key's or a value's
    bool has_factors;               // in FP8: those have one exponent, and scores and shares its factor
    const T* rows[ROWS];
    float factors[ROWS];
};

template <typename T>
static INLINE void load_plain(const RowsArguments& a, const T* row, int64_t e, Floats (&pair)[2]) {
    load_pair(row + (sizeof(T) == 1 ? 2 * a.num_rotary : 0) + e, pair);
}

// Elements [e, e + PAIR) of the `dim` that begin at `offset`.
template <typename T>
static INLINE void load_any(const RowsArguments& a, const Wide<T>& wide, const T* row, int64_t offset, int64_t dim,
                            int64_t e, Floats (&pair)[2]) {
    if (e + PAIR <= std::min(wide.num_plain, dim)) {
        load_plain(a, row, offset + e, pair);
    } else if (sizeof(T) == 1 && offset + e >= a.num_scaled && e + PAIR <= dim) {
        const uint16_t* rotary = (const uint16_t*)row + offset + e - a.num_scaled;
        pair[0] = load(rotary);
        pair[1] = load(rotary + LANES);
    } else {
        float some[PAIR];
        copy_row(a, row, offset + e, std::min<int64_t>(dim - e, PAIR), some);
        pair[0] = load(some);
        pair[1] = load(some + LANES);
    }
}

// sums[j] += q * row j for a pair of vectors in `chunk`, while those from element e on are copied to `next`.
template <bool COPIES, typename T>
static INLINE void score_pair(const RowsArguments& a, const float* q, const T* const* rows, int64_t e,
                              const float* chunk, float* next, Floats (&sums)[SCORE_ROWS]) {
    for (int half = 0; half < 2; half++, q += LANES * LANES, chunk += SCORE_ROWS * LANES) {
#if defined(__x86_64__)
        asm("" : "+r"(chunk), "+r"(q));  // one register and no index, which would take an instruction of its own
#endif
#pragma GCC unroll 16
        for (int step = 0; step < LANES; step++) {
            if constexpr (COPIES)
                if (step % (2 * LANES / SCORE_ROWS) == 0) {
                    const int j = half * SCORE_ROWS / 2 + step * SCORE_ROWS / (2 * LANES);
                    Floats pair[2];
                    load_plain(a, rows[j], e, pair);
                    store(next + j * LANES, pair[0]);
                    store(next + (SCORE_ROWS + j) * LANES, pair[1]);
                }
            Floats query = load(q + step * LANES);
            keep_in_register(query);
#pragma GCC unroll 16
            for (int j = 0; j < SCORE_ROWS; j++) sums[j] += query * splat(chunk[j * LANES + step]);
        }
    }
}

// scores[j * LANES + i] = q_i . row_j, where q is [width][LANES].
template <typename T>
static INLINE void score_wide(const RowsArguments& a, const float* q, int64_t width, const Wide<T>& wide, int64_t count,
                              Ahead& ahead, float* scores) {
    const int64_t num_plain = std::min(wide.num_plain, a.dim);
    for (int64_t first = 0; first < count; first += SCORE_ROWS) {
        const T* const* rows = wide.rows + first;
        float* sums_so_far = scores + first * LANES;
        std::fill(sums_so_far, sums_so_far + SCORE_ROWS * LANES, 0.0f);
        Floats sums[SCORE_ROWS];
#pragma GCC unroll 16
        for (int j = 0; j < SCORE_ROWS; j++) sums[j] = Floats{};
        for (int64_t e = -PAIR, end = 0; e < width; e += PAIR, end += PAIR) {
            const int64_t is_odd = e / PAIR & 1;
            float *chunk = wide.chunks + is_odd * CHUNK, *next = wide.chunks + (1 - is_odd) * CHUNK;
            const bool copies = e >= 0 && end + PAIR <= num_plain;
            ahead.fetch();
            if (copies) score_pair<true>(a, q + e * LANES, rows, wide.key + end, chunk, next, sums);
            else if (e >= 0) score_pair<false>(a, q + e * LANES, rows, 0, chunk, next, sums);
            const bool is_scaled = sizeof(T) == 1 && wide.has_factors && end == a.num_scaled;
            // Sums of few products, because many small sums have smaller errors than a long one.
            if (end % SUMMED == 0 || is_scaled || end == width)
#pragma GCC unroll 16
                for (int j = 0; j < SCORE_ROWS; j++) {
                    const Floats sum = load(sums_so_far + j * LANES) + sums[j];
                    store(sums_so_far + j * LANES, is_scaled ? sum * splat(wide.factors[first + j]) : sum);
                    sums[j] = Floats{};
                }
            for (int j = 0; j < SCORE_ROWS && !copies && end < width; j++) {
                Floats pair[2];
                load_any(a, wide, rows[j], wide.key, a.dim, end, pair);
                store(next + j * LANES, pair[0]);
                store(next + (SCORE_ROWS + j) * LANES, pair[1]);
            }
        }
    }
}

// Values from element e on, times the shares of H heads at a time, the first of which convert them on their way.
template <int PAIRS, typename T>
static INLINE void add_strip(const RowsArguments& a, const HeadsState& s, int64_t head, const Wide<T>& wide, int64_t e,
                             int64_t count, Ahead& ahead) {
    constexpr int H = std::min(LANES, 4), C = 2 * PAIRS;
    float* out = s.out + head * s.v_width + e;
    const bool is_plain = e + PAIRS * PAIR <= std::min(wide.num_plain, wide.value_dim);
    for (int64_t j = 0; j < count && !is_plain; j++)
        for (int c = 0; c < C; c += 2) {
            Floats pair[2];
            load_any(a, wide, wide.rows[j], wide.value, wide.value_dim, e + c * LANES, pair);
            store(wide.strip + j * STRIP + c * LANES, pair[0]);
            store(wide.strip + j * STRIP + (c + 1) * LANES, pair[1]);
        }
    if (is_plain)
        add_values<H, LANES, C>(s.scores, count, out, s.v_width, [&](int64_t j, Floats (&columns)[C]) {
            if (j % SCORE_ROWS == 0) ahead.fetch();
#pragma GCC unroll 8
            for (int c = 0; c < C; c += 2) {
                Floats pair[2];
                load_plain(a, wide.rows[j], wide.value + e + c * LANES, pair);
                store(wide.strip + j * STRIP + c * LANES, columns[c] = pair[0]);
                store(wide.strip + j * STRIP + (c + 1) * LANES, columns[c + 1] = pair[1]);
            }
        });
    for (int i = is_plain ? H : 0; i < LANES; i += H)
        add_values<H, LANES, C>(s.scores + i, count, out + i * s.v_width, s.v_width,
                                [&](int64_t j, Floats (&columns)[C]) {
                                    if (j % SCORE_ROWS == 0) ahead.fetch();
#pragma GCC unroll 8
                                    for (int c = 0; c < C; c++) columns[c] = load(wide.strip + j * STRIP + c * LANES);
                                });
}

template <typename T>
static INLINE void attend_heads(const RowsArguments& a, const HeadsState& s, int64_t num_heads, const Wide<T>& wide,
                                int64_t count, Ahead& ahead) {
    for (int64_t head = 0; head < num_heads; head += LANES) {
        score_wide(a, s.q + head * s.width, s.width, wide, count, ahead, s.scores);
        exponentials<LANES>(s, head, count);
        if (sizeof(T) == 1 && wide.has_factors) scale_rows<LANES>(s.scores, wide.factors, count);
        int64_t e = 0;
        for (; e + STRIP <= s.v_width; e += STRIP) add_strip<STRIP_PAIRS>(a, s, head, wide, e, count, ahead);
        for (; e < s.v_width; e += PAIR) add_strip<1>(a, s, head, wide, e, count, ahead);
    }
}

// [LANES heads][width] -> [width][LANES], for each group of heads.
static inline void turn_queries(const float* from, int64_t num_heads, int64_t width, float* to) {
    for (int64_t head = 0; head < num_heads; head += LANES)
        for (int64_t e = 0; e < width; e += LANES) {
            Floats square[LANES];
            for (int i = 0; i < LANES; i++) square[i] = load(from + (head + i) * width + e);
            transpose(square);
            for (int i = 0; i < LANES; i++) store(to + head * width + (e + i) * LANES, square[i]);
        }
}
