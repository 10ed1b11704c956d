// See indexer.cpp. Included once per instruction set.

// Heads and vectors of keys whose sums are in registers together.
constexpr int INDEX_HEADS = LANES == 16 ? 8 : 4;
constexpr int INDEX_VECTORS = LANES == 16 ? 3 : 2;
constexpr int PANEL_KEYS = INDEX_VECTORS * LANES;

constexpr int64_t FEW_QUERIES = 8;  // per thread: fewer are not split over threads, their keys are
// What is worth another thread: multiplications, candidates.
constexpr int64_t INDEX_THREAD_WORK = 1 << 18, FINISH_THREAD_WORK = 1 << 13;

// Floats that order as (score): as integers they compare like the scores, -0.0 like 0.0.
static INLINE Ints ordered(Floats scores) {
    const Ints bits = (Ints)(scores + 0.0f);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

// The `topk`-th largest of orders[0, count), and how many are larger.
static inline int32_t rank_of(const int32_t* orders, int64_t count, int64_t topk, std::vector<uint32_t>& rest,
                              int64_t* larger) {
    rest.resize(std::max<size_t>(rest.size(), count));
    for (int64_t i = 0; i < count; i++) rest[i] = (uint32_t)orders[i] ^ 0x80000000u;
    uint32_t found = 0;
    *larger = 0;
    for (int shift : {21, 10, 0}) {
        const int bits = shift == 21 ? 11 : shift == 10 ? 11 : 10;
        const uint32_t mask = (1u << bits) - 1;
        int32_t counts[2048] = {};
        for (int64_t i = 0; i < count; i++) counts[(rest[i] >> shift) & mask]++;
        uint32_t bucket = mask;
        while (*larger + counts[bucket] < topk) *larger += counts[bucket--];
        found |= bucket << shift;
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++) {
            rest[kept] = rest[i];
            kept += ((rest[i] >> shift) & mask) == bucket;
        }
        count = kept;
    }
    return (int32_t)(found ^ 0x80000000u);
}

// Candidates of one query, by position. Of equal scores the first ones stay, so what comes later must
// have a higher score than the worst of `topk` candidates.
struct Candidates {
    int32_t* orders;
    int32_t* positions;
    int64_t* count;
    int32_t* threshold;

    INLINE void add(Floats scores, int64_t first_position, int64_t visible) const {
        const Ints order = ordered(scores);
#if PREFOLD_LANES == 16
        const __mmask16 present = visible >= LANES ? 0xffff : (1u << visible) - 1;
        const __mmask16 better =
            _mm512_mask_cmpgt_epi32_mask(present, (__m512i)order, _mm512_set1_epi32(*threshold));
        if (!better) return;
        const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const Ints position = lane + (int32_t)first_position;
        // Whole vectors: what is behind the candidates is free.
        _mm512_storeu_si512(orders + *count, _mm512_maskz_compress_epi32(better, (__m512i)order));
        _mm512_storeu_si512(positions + *count, _mm512_maskz_compress_epi32(better, (__m512i)position));
        *count += __builtin_popcount(better);
#else
        for (int i = 0; i < std::min<int64_t>(visible, LANES); i++) {
            orders[*count] = order[i];
            positions[*count] = (int32_t)first_position + i;
            *count += order[i] > *threshold;
        }
#endif
    }

    // Keep the `topk` best, in the order of positions.
    inline void prune(int64_t topk, std::vector<uint32_t>& rest) const {
        if (*count < topk) return;
        int64_t larger, kept = 0;
        const int32_t worst = rank_of(orders, *count, topk, rest, &larger);
        int64_t equal = topk - larger;
        for (int64_t i = 0; i < *count; i++) {
            const int32_t order = orders[i];
            const bool is_equal = order == worst;
            orders[kept] = order;
            positions[kept] = positions[i];
            kept += order > worst || (is_equal && equal > 0);
            equal -= is_equal;
        }
        *count = kept;
        *threshold = worst;
    }
};

// Queries whose elements lie as index_scores reads them: per group of INDEX_HEADS heads [dim][INDEX_HEADS]. The
// heads that fill the last group are 0.
struct PackedQueries {
    int64_t first, heads;
    float* q;
    float* weights;

    const float* q_of(int64_t i, int64_t dim) const { return q + (i - first) * heads * dim; }
    const float* weights_of(int64_t i) const { return weights + (i - first) * heads; }
};

// Queries [first, end), in memory of this thread, until it packs others.
static inline PackedQueries pack_queries(const IndexArguments& a, int64_t first, int64_t end) {
    static thread_local Buffer q_buffer, weights_buffer;
    const int64_t heads = (a.num_heads + INDEX_HEADS - 1) / INDEX_HEADS * INDEX_HEADS;
    const PackedQueries packed = {first, heads, q_buffer.get((end - first) * heads * a.dim),
                                  weights_buffer.get((end - first) * heads)};
    for (int64_t i = first; i < end; i++)
        for (int64_t h = 0; h < heads; h++) {
            const bool real = h < a.num_heads;
            const int64_t at = (i - first) * heads + h;
            float* to = packed.q + at / INDEX_HEADS * a.dim * INDEX_HEADS + h % INDEX_HEADS;
            const float* from = a.q + i * a.q_stride + h * a.q_head_stride;
            for (int64_t d = 0; d < a.dim; d++) to[d * INDEX_HEADS] = real ? from[d] : 0.0f;
            packed.weights[at] = real ? a.weights[i * a.weights_stride + h] : 0.0f;
        }
    return packed;
}

// scores[c] = sum over heads of weight * relu(query . key), in the order of the heads.
static __attribute__((noinline)) void index_scores(const float* q, const float* weights, const float* panel,
                                                    int64_t heads, int64_t dim, Floats (&scores)[INDEX_VECTORS]) {
    for (int c = 0; c < INDEX_VECTORS; c++) scores[c] = Floats{};
    for (int64_t h = 0; h < heads; h += INDEX_HEADS) {
        Floats products[INDEX_HEADS][INDEX_VECTORS] = {};
        multiply_panel(q + h * dim, INDEX_HEADS, panel, dim, PANEL_KEYS, products);
#pragma GCC unroll 8
        for (int i = 0; i < INDEX_HEADS; i++)
#pragma GCC unroll 4
            for (int c = 0; c < INDEX_VECTORS; c++)
                scores[c] += weights[h + i] * maximum(products[i][c], Floats{});
    }
}

// The keys from `first` on, of which a panel has as many as there are; in memory of this thread.
template <typename T>
static __attribute__((noinline)) float* packed_panel(const IndexArguments& a, const T* keys, int64_t first) {
    static thread_local Buffer buffer;
    float* panel = buffer.get(a.dim * PANEL_KEYS);
    const int64_t count = std::min<int64_t>(a.num_keys - first, PANEL_KEYS);
    pack_panel(keys + first * a.key_stride, a.key_stride, count, a.dim, PANEL_KEYS, panel);
    return panel;
}

// How many keys of the panel query i sees; not positive if none.
static INLINE int64_t num_visible(const IndexArguments& a, int64_t i, int64_t first) {
    return std::min<int64_t>(std::min<int64_t>(a.limits[i] - a.first_position, a.num_keys) - first, PANEL_KEYS);
}

static __attribute__((noinline)) void add_panel(const IndexArguments& a, int64_t i, int64_t first,
                                                const Floats* scores, std::vector<uint32_t>& rest) {
    const int64_t visible = num_visible(a, i, first);
    const Candidates candidates = {a.orders + i * a.capacity, a.positions + i * a.capacity, a.counts + i,
                                   a.thresholds + i};
    if (*candidates.count + PANEL_KEYS > a.capacity) candidates.prune(a.topk, rest);
    for (int c = 0; c < INDEX_VECTORS && c * LANES < visible; c++)
        candidates.add(scores[c], a.first_position + first + c * LANES, visible - c * LANES);
}

// Queries [begin, end), which share each panel.
template <typename T>
static inline void index_queries(const IndexArguments& a, const T* keys, int64_t begin, int64_t end) {
    static thread_local std::vector<uint32_t> rest;
    const PackedQueries packed = pack_queries(a, begin, end);
    for (int64_t first = 0; first < a.num_keys; first += PANEL_KEYS) {
        const float* panel = packed_panel(a, keys, first);
        for (int64_t i = begin; i < end; i++) {
            if (num_visible(a, i, first) <= 0) continue;
            Floats scores[INDEX_VECTORS];
            index_scores(packed.q_of(i, a.dim), packed.weights_of(i), panel, packed.heads, a.dim, scores);
            add_panel(a, i, first, scores, rest);
        }
    }
}

// Few queries: threads score panels of their own, and then each query takes its candidates in order.
template <typename T> static inline void index_panels(const IndexArguments& a, const T* keys) {
    static thread_local Buffer buffer;
    static thread_local std::vector<uint32_t> rest;
    const PackedQueries packed = pack_queries(a, 0, a.num_queries);
    const int64_t num_panels = (a.num_keys + PANEL_KEYS - 1) / PANEL_KEYS;
    float* all_scores = buffer.get(num_panels * PANEL_KEYS * a.num_queries);
    const int64_t panel_work = std::max<int64_t>(a.num_queries * packed.heads * a.dim * PANEL_KEYS, 1);
    parallel_ranges(num_panels, INDEX_THREAD_WORK / panel_work, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; p++) {
            const float* panel = packed_panel(a, keys, p * PANEL_KEYS);
            for (int64_t i = 0; i < a.num_queries; i++) {
                if (num_visible(a, i, p * PANEL_KEYS) <= 0) continue;
                Floats scores[INDEX_VECTORS];
                index_scores(packed.q_of(i, a.dim), packed.weights_of(i), panel, packed.heads, a.dim, scores);
                std::memcpy(all_scores + (p * a.num_queries + i) * PANEL_KEYS, scores, sizeof scores);
            }
        }
    });
    for (int64_t i = 0; i < a.num_queries; i++)
        for (int64_t p = 0; p < num_panels && num_visible(a, i, p * PANEL_KEYS) > 0; p++) {
            Floats scores[INDEX_VECTORS];
            std::memcpy(scores, all_scores + (p * a.num_queries + i) * PANEL_KEYS, sizeof scores);
            add_panel(a, i, p * PANEL_KEYS, scores, rest);
        }
}

template <typename T> static inline void index_tile_of(const IndexArguments& a, const T* keys) {
    const int64_t threads = parallel_threads();
    if (threads > 1 && a.num_queries < FEW_QUERIES * threads) return index_panels(a, keys);
    parallel_ranges(a.num_queries, 1, [&](int64_t begin, int64_t end) { index_queries(a, keys, begin, end); });
}

static void index_tile(const IndexArguments& a) {
    if (a.is_bfloat16)
        index_tile_of(a, (const uint16_t*)a.keys);
    else
        index_tile_of(a, (const float*)a.keys);
}

static void index_finish(const IndexArguments& a) {
    parallel_ranges(a.num_queries, FINISH_THREAD_WORK / a.capacity, [&](int64_t begin, int64_t end) {
        std::vector<uint32_t> rest;
        for (int64_t i = begin; i < end; i++) {
            const Candidates best = {a.orders + i * a.capacity, a.positions + i * a.capacity, a.counts + i,
                                     a.thresholds + i};
            best.prune(a.topk, rest);
            std::fill(best.orders + *best.count, best.orders + a.topk, std::numeric_limits<int32_t>::min());
            std::fill(best.positions + *best.count, best.positions + a.topk, -1);
        }
    });
}
