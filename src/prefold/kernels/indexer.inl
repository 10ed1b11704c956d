// See indexer.cpp. Included once per instruction set.

// Heads and vectors of keys whose sums are in registers together.
constexpr int INDEX_HEADS = LANES == 16 ? 8 : 4;
constexpr int INDEX_VECTORS = LANES == 16 ? 3 : 2;
constexpr int PANEL_KEYS = INDEX_VECTORS * LANES;

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

// q -> per group of INDEX_HEADS heads [dim][INDEX_HEADS]; the heads that fill the last group are 0.
static inline void pack_queries(const IndexArguments& a, float* packed, float* weights, int64_t heads) {
    for (int64_t i = 0; i < a.num_queries; i++)
        for (int64_t h = 0; h < heads; h++) {
            const bool real = h < a.num_heads;
            float* to = packed + ((i * heads + h) / INDEX_HEADS * a.dim) * INDEX_HEADS + h % INDEX_HEADS;
            const float* from = a.q + i * a.q_stride + h * a.q_head_stride;
            for (int64_t d = 0; d < a.dim; d++) to[d * INDEX_HEADS] = real ? from[d] : 0.0f;
            weights[i * heads + h] = real ? a.weights[i * a.weights_stride + h] : 0.0f;
        }
}

// scores[c] = sum over heads of weight * relu(query . key), in the order of the heads.
static INLINE void index_scores(const float* q, const float* weights, const float* panel, int64_t heads,
                                int64_t dim, Floats (&scores)[INDEX_VECTORS]) {
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

template <typename T> static inline void index_tile_of(const IndexArguments& a, const T* keys) {
    static thread_local Buffer packed_buffer, weights_buffer, panel_buffer;
    static thread_local std::vector<uint32_t> rest;
    const int64_t heads = (a.num_heads + INDEX_HEADS - 1) / INDEX_HEADS * INDEX_HEADS;
    float* packed = packed_buffer.get(a.num_queries * heads * a.dim);
    float* weights = weights_buffer.get(a.num_queries * heads);
    float* panel = panel_buffer.get(a.dim * PANEL_KEYS);
    pack_queries(a, packed, weights, heads);
    for (int64_t first = 0; first < a.num_keys; first += PANEL_KEYS) {
        const int64_t count = std::min<int64_t>(a.num_keys - first, PANEL_KEYS);
        pack_panel(keys + first * a.key_stride, a.key_stride, count, a.dim, PANEL_KEYS, panel);
        for (int64_t i = 0; i < a.num_queries; i++) {
            const int64_t visible = std::min<int64_t>(a.limits[i] - a.first_position - first, count);
            if (visible <= 0) continue;
            Floats scores[INDEX_VECTORS];
            index_scores(packed + i * heads * a.dim, weights + i * heads, panel, heads,
                         a.dim, scores);
            const Candidates candidates = {a.orders + i * a.capacity, a.positions + i * a.capacity,
                                           a.counts + i, a.thresholds + i};
            if (*candidates.count + PANEL_KEYS > a.capacity) candidates.prune(a.topk, rest);
            for (int c = 0; c < INDEX_VECTORS && c * LANES < visible; c++)
                candidates.add(scores[c], a.first_position + first + c * LANES, visible - c * LANES);
        }
    }
}

static void index_tile(const IndexArguments& a) {
    if (a.is_bfloat16)
        index_tile_of(a, (const uint16_t*)a.keys);
    else
        index_tile_of(a, (const float*)a.keys);
}

static void index_finish(const IndexArguments& a) {
    std::vector<uint32_t> rest;
    for (int64_t i = 0; i < a.num_queries; i++) {
        const Candidates best = {a.orders + i * a.capacity, a.positions + i * a.capacity, a.counts + i,
                                 a.thresholds + i};
        best.prune(a.topk, rest);
        std::fill(best.orders + *best.count, best.orders + a.topk, std::numeric_limits<int32_t>::min());
        std::fill(best.positions + *best.count, best.positions + a.topk, -1);
    }
}
