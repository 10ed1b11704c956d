// See dense.cpp. Included once per instruction set.

// Inner loops are functions of their own, so that their sums stay in registers.
#define SEPARATE __attribute__((noinline))

#include "tiles.h"
#include "dense_tiles.inl"

constexpr int ROWS = HAS_TILES ? 2 * TILE : LANES == 16 ? 8 : 4;  // whose sums are in registers together,
constexpr int VECTORS = HAS_TILES ? 2 : LANES == 16 ? 3 : 2;      // with so many vectors of keys or elements
constexpr int PANEL = VECTORS * LANES;                            // keys of a panel
constexpr int64_t ROW_BLOCK = 96;                             // rows that meet keys while they are in the second cache
constexpr int64_t DEPTH = HAS_TILES ? 1 << 20 : 192;          // words of a panel's keys that fit in the first cache
constexpr int64_t BLOCK_KEYS = (HAS_TILES ? 12 : 8) * PANEL;  // keys whose scores are made together
// Of a column of values: more in a sum would make it less exact. Tiles sum 32 keys by themselves.
constexpr int64_t VALUE_WORDS = HAS_TILES ? BLOCK_KEYS / 2 : 96;
constexpr int64_t WORTH_A_THREAD = 200000;    // multiplications that take as long as waking one
constexpr int64_t TOGETHER = 400000;          // words of keys and values that fit in the second cache
constexpr float LOWEST = -3e38f;              // the reference of a row that has seen nothing
constexpr float MOST = 1e9f;                  // the sum of a row's exponentials, or its reference has to rise
constexpr float LOG2_E = 1.44269504f;

// Keys [start, end) of a block.
struct Range {
    int64_t start, end;
    INLINE bool is_empty() const { return start >= end; }
    INLINE Range part(int64_t from, int64_t to) const { return {std::max(start, from), std::min(end, to)}; }
    INLINE Range with(Range other) const {
        if (other.is_empty()) return *this;
        return is_empty() ? other : Range{std::min(start, other.start), std::max(end, other.end)};
    }
    // Whole multiples of `size`.
    INLINE Range widened(int64_t size) const {
        return {start / size * size, (end + size - 1) / size * size};
    }
};

// Rows that are computed together, with what they see of a block.
struct RowGroup {
    int64_t first, count;
    Range seen;
};

// A block of rows and the block of keys that it meets.
struct Meeting {
    int64_t first_row, num_rows, first_key, num_keys, num_groups;
    const float* packed;  // q, per LANES rows [words][LANES]
    float* scores;        // [ROW_BLOCK][BLOCK_KEYS]
    Range rows[ROW_BLOCK], seen;
    RowGroup groups[ROW_BLOCK / ROWS];
    Tiles* tiles;
};

// Keys and values [first, end), packed.
struct PackedKeys {
    int64_t first, end;
    float *keys, *values;
};

struct DenseHead {
    float *out, *references, *sums;  // of row 0
    PackedKeys packed;
};

// Calls body(a constant, the number of rows that are computed) for `count` rows.
template <typename Body>
static INLINE void with_rows(int64_t count, Body body) {
    if (count > ROWS / 2) body(std::integral_constant<int, ROWS>());
    else if (count > 2) body(std::integral_constant<int, ROWS / 2>());
    else if (count == 2) body(std::integral_constant<int, 2>());
    else body(std::integral_constant<int, 1>());
}

// Calls body(a constant, the number of vectors).
template <typename Body>
static INLINE void with_vectors(int64_t count, Body body) {
    if (count == 3) body(std::integral_constant<int, VECTORS>());
    else if (count == 2) body(std::integral_constant<int, 2>());
    else body(std::integral_constant<int, 1>());
}

// Inputs of type T. PAIRS: a word is two bfloat16 values and is multiplied as such, else a float32.
template <typename T, bool PAIRS>
class DenseRows {
public:
    explicit DenseRows(const DenseArguments& arguments) : a(arguments) {}

    // One head after the other on each thread, or, if heads do not go round, each head on all threads.
    void attend() const {
        const int64_t threads = prefold_num_threads();
        const int64_t work = a.num_keys * (a.dim + a.v_dim) * (a.num_rows + ROWS);  // multiplications of a head
        if (a.num_kv_heads % threads == 0 || a.num_kv_heads >= 4 * threads || a.num_rows <= ROW_BLOCK)
            parallel_ranges(a.num_kv_heads, 1 + WORTH_A_THREAD / work, [&](int64_t first, int64_t last) {
                for (int64_t head = first; head < last; head++) attend_head(head);
            });
        else
            for (int64_t head = 0; head < a.num_kv_heads; head++) attend_head(head);
    }

private:
    static constexpr int STEP = PAIRS ? 2 : 1;                    // elements of a word
    static constexpr int WHOLE = HAS_TILES ? STEP * TILE : STEP;  // products that are summed at once
    const DenseArguments& a;
    const int64_t words = (a.dim + WHOLE - 1) / WHOLE * (WHOLE / STEP);
    const int64_t columns = (a.v_dim + LANES - 1) / LANES * LANES;
    // Keys that are packed at a time, and the words of a column of their values.
    const int64_t span = std::min(std::max<int64_t>(TOGETHER / (words + columns / STEP) / BLOCK_KEYS, 1) * BLOCK_KEYS,
                                  (a.num_keys + PANEL - 1) / PANEL * PANEL);
    const int64_t num_pairs = span / STEP;
    const int64_t depth = (words + (words + DEPTH - 1) / DEPTH - 1) / ((words + DEPTH - 1) / DEPTH);

    void attend_head(int64_t head) const {
        static thread_local Buffer packed;
        float* keys = packed.get(span * words + num_pairs * columns);
        for (int64_t first = 0; first < a.num_keys; first += span)
            attend_keys(head, {first, std::min(first + span, a.num_keys), keys, keys + span * words});
    }

    void attend_keys(int64_t head, const PackedKeys& packed) const {
        parallel_for((packed.end - packed.first + PANEL - 1) / PANEL, [&](int64_t i) { pack(head, i * PANEL, packed); });
        const int64_t blocks = (a.num_rows + ROW_BLOCK - 1) / ROW_BLOCK;
        parallel_for(blocks, [&](int64_t i) {
            static thread_local Buffer scratch;
            NoDenormals while_here;
            // Late rows of a causal square see more: each thread has some of them, and early ones.
            const int64_t row = (i % 2 ? blocks - 1 - i / 2 : i / 2) * ROW_BLOCK;
            const int64_t last_token = (std::min(row + ROW_BLOCK, a.num_rows) - 1) / a.rows_per_token;
            if (a.is_causal && last_token < packed.first) return;
            attend_rows(head, row, packed, scratch.get(ROW_BLOCK * (words + BLOCK_KEYS)));
        });
    }

    // ------------------------------------------------------------------ packing

    // panel[d][j]: word d of row j < count <= width, and 0 for the others.
    void pack_rows(const T* rows, int64_t stride, int64_t count, int64_t width, float* panel) const {
        for (int64_t first = 0; first < width; first += LANES) {
            const int64_t present = std::min<int64_t>(std::max<int64_t>(count - first, 0), LANES);
            int64_t d = 0;
            for (; (d + LANES) * STEP <= a.dim; d += LANES) {
                Floats square[LANES];
                for (int i = 0; i < LANES; i++)
                    square[i] = i < present ? load_words(rows + (first + i) * stride + d * STEP) : Floats{};
                transpose(square);
                for (int i = 0; i < LANES; i++) store(panel + (d + i) * width + first, square[i]);
            }
            for (; d < words; d++)
                for (int i = 0; i < LANES; i++)
                    panel[d * width + first + i] =
                        i < present ? word(rows + (first + i) * stride + d * STEP, a.dim - d * STEP) : 0.0f;
        }
    }

    static INLINE Floats load_words(const T* from) {
        if constexpr (!PAIRS) return load(from);
        Floats words;
        std::memcpy(&words, from, sizeof words);
        return words;
    }

    // The word that begins with from[0], if there are `left` elements.
    static INLINE float word(const T* from, int64_t left) {
        if (left <= 0) return 0.0f;
        if constexpr (!PAIRS) return scalar(*from);
        T elements[2] = {from[0], left > 1 ? from[1] : T(0)};
        float bits;
        std::memcpy(&bits, elements, sizeof bits);
        return bits;
    }

    // Elements [e, e + LANES) of the values in word j.
    INLINE Floats value_words(const T* values, int64_t j, int64_t e) const {
        const T* from = values + j * STEP * a.v_stride + e;
        if constexpr (PAIRS) {
            if (j * STEP >= a.num_keys) return Floats{};
            const Bits low = (Bits)load_some(from, a.v_dim - e) >> 16;
            const bool has_next = j * STEP + 1 < a.num_keys;
            return (Floats)(has_next ? (Bits)load_some(from + a.v_stride, a.v_dim - e) | low : low);
        } else {
            return load_some(from, a.v_dim - e);
        }
    }

    // Vectors of the column of values that begins with element e.
    INLINE int64_t vectors_from(int64_t e) const {
        const int64_t left = (columns - e) / LANES;
        return VECTORS > 2 && left == 4 ? 2 : std::min<int64_t>(left, VECTORS);
    }

    // A panel of keys that begins with key packed.first + `at`, and their values: per column [num_pairs][its
    // vectors].
    void pack(int64_t head, int64_t at, const PackedKeys& packed) const {
        const int64_t key = packed.first + at, count = std::min<int64_t>(packed.end - key, PANEL);
        pack_rows((const T*)a.k + head * a.k_head_stride + key * a.k_stride, a.k_stride, count, PANEL,
                  packed.keys + at * words);
        const T* v = (const T*)a.v + head * a.v_head_stride;
        const int64_t whole_count = (count + WHOLE - 1) / WHOLE * WHOLE;
        for (int64_t e = 0, vectors; e < columns; e += vectors * LANES) {
            vectors = vectors_from(e);
            float* to = packed.values + e * num_pairs + at / STEP * vectors * LANES;
            for (int64_t j = key / STEP; j * STEP < key + whole_count; j++)
                for (int64_t c = 0; c < vectors; c++, to += LANES) store(to, value_words(v, j, e + c * LANES));
        }
    }

    // ------------------------------------------------------------------ rows

    // Rows from `row` on, counted from a.first_row, meet these keys.
    void attend_rows(int64_t head, int64_t row, const PackedKeys& packed, float* own) const {
        const int64_t first = a.first_row + row, place = head * a.rows_per_head + first;
        const DenseHead h = {a.out + head * a.out_head_stride + first * a.out_stride, a.references + place,
                             a.sums + place, packed};
        Tiles tiles;
        Meeting m;
        m.tiles = &tiles;
        m.first_row = row;
        m.num_rows = std::min(a.num_rows - row, ROW_BLOCK);
        m.packed = own;
        m.scores = own + ROW_BLOCK * words;
        const T* q = (const T*)a.q + head * a.q_head_stride + first * a.q_stride;
        for (int64_t r = 0; r < m.num_rows; r += LANES) {
            const int64_t count = std::min<int64_t>(m.num_rows - r, LANES);
            if constexpr (HAS_TILES)
                pack_query_tiles(q + r * a.q_stride, a.q_stride, count, a.dim, words, own + r * words);
            else
                pack_rows(q + r * a.q_stride, a.q_stride, count, LANES, own + r * words);
        }
        for (m.first_key = packed.first; m.first_key < packed.end; m.first_key += BLOCK_KEYS) {
            m.num_keys = std::min(packed.end - m.first_key, BLOCK_KEYS);
            look(m);
            if (m.seen.is_empty()) continue;
            scores(m, h, m.groups, m.groups + m.num_groups);
            for (int64_t g = 0; g < m.num_groups; g++) exponentials(m, h, m.groups[g]);
            sums(m, h);
        }
    }

    INLINE Range visible(const Meeting& m, int64_t row) const {
        const int64_t token = row / a.rows_per_token;
        const int64_t end = a.is_causal ? token + 1 - m.first_key : m.num_keys;
        const int64_t start = a.unseen ? a.unseen[token] - m.first_key : 0;
        const Range range = Range{std::max<int64_t>(start, 0), std::max<int64_t>(end, 0)}.part(0, m.num_keys);
        if (!a.selected || range.is_empty()) return range;
        const uint64_t* words = selected(m, row - m.first_row);
        Range found = {0, 0};
        for (int64_t i = 0; i * 64 < m.num_keys; i++)
            if (words[i])
                found = found.with({i * 64 + __builtin_ctzll(words[i]), i * 64 + 64 - __builtin_clzll(words[i])});
        return range.part(found.start, found.end);
    }

    // Bits of the keys from m.first_key on, of which there is a multiple of 64 before, for row r of the block.
    INLINE const uint64_t* selected(const Meeting& m, int64_t r) const {
        static_assert(BLOCK_KEYS % 64 == 0 && 64 % (2 * LANES) == 0);
        const int64_t token = (m.first_row + r) / a.rows_per_token;
        return a.selected + token * a.selected_stride + m.first_key / 64;
    }

    // Who sees what. Groups that see nothing are left out.
    void look(Meeting& m) const {
        m.seen = {0, 0};
        m.num_groups = 0;
        for (int64_t r = 0; r < m.num_rows; r += ROWS) {
            RowGroup group = {r, std::min<int64_t>(m.num_rows - r, ROWS), {0, 0}};
            for (int64_t i = r; i < r + group.count; i++) {
                const bool is_same = i > 0 && (m.first_row + i) % a.rows_per_token;
                m.rows[i] = is_same ? m.rows[i - 1] : visible(m, m.first_row + i);
                group.seen = group.seen.with(m.rows[i]);
            }
            if (group.seen.is_empty()) continue;
            m.seen = m.seen.with(group.seen);
            m.groups[m.num_groups++] = group;
        }
    }

    // Products of q and keys, panel by panel, for some of the groups.
    void scores(const Meeting& m, const DenseHead& h, const RowGroup* groups, const RowGroup* end) const {
        const Range panels = m.seen.widened(PANEL);
        for (int64_t first = panels.start; first < panels.end; first += PANEL)
            for (int64_t d = 0; d < words; d += depth) {
                const float* panel = h.packed.keys + (m.first_key - h.packed.first + first) * words + d * PANEL;
                for (const RowGroup* at = groups; at < end; at++) {
                    const RowGroup& group = *at;
                    if (group.seen.part(first, first + PANEL).is_empty()) continue;
                    const int64_t r = group.first;
                    float* out = m.scores + r * BLOCK_KEYS + first;
                    if constexpr (HAS_TILES) {
                        add_score_tiles(*m.tiles, m.packed + r * words, group.count, panel, words, out, BLOCK_KEYS);
                        continue;
                    }
                    const float* rows = m.packed + r / LANES * LANES * words + d * LANES + r % LANES;
                    with_rows(group.count, [&](auto count) __attribute__((always_inline)) {
                        add_scores<decltype(count)::value>(rows, panel, std::min(words - d, depth), d > 0, out);
                    });
                }
            }
    }

    // Each part of the depth is summed by itself: sums of many terms are less exact.
    template <int R>
    static SEPARATE void add_scores(const float* rows, const float* panel, int64_t count, bool has_begun,
                                    float* scores) {
        Floats products[R][VECTORS] = {};
        multiply_panel<PAIRS>(rows, LANES, panel, count, PANEL, products);
        if (has_begun)
#pragma GCC unroll 8
            for (int i = 0; i < R; i++)
#pragma GCC unroll 4
                for (int c = 0; c < VECTORS; c++) products[i][c] += load(scores + i * BLOCK_KEYS + c * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < R; i++)
#pragma GCC unroll 4
            for (int c = 0; c < VECTORS; c++) store(scores + i * BLOCK_KEYS + c * LANES, products[i][c]);
    }

    // Scores of a group -> words of exp(score - reference), 0 for what only others of it see. Whether references
    // are high enough shows afterwards, in the sums: hardly ever are scores made anew, to find their maximum.
    void exponentials(const Meeting& m, const DenseHead& h, const RowGroup& group) const {
        bool is_done = true;
        for (int64_t r = group.first; r < group.first + group.count; r++) {
            hide(m, group, r);
            is_done &= h.references[r] != LOWEST;
        }
        float sums[ROWS];
        if (is_done && !(is_done = try_exponentials(m, h, group, sums))) {
            scores(m, h, &group, &group + 1);
            for (int64_t r = group.first; r < group.first + group.count; r++) hide(m, group, r);
        }
        if (!is_done) {
            for (int64_t r = group.first; r < group.first + group.count; r++) raise_reference(m, h, group, r);
            try_exponentials(m, h, group, sums);
        }
        for (int64_t i = 0; i < group.count; i++) h.sums[group.first + i] += sums[i];
    }

    // Whether the sums are below MOST.
    bool try_exponentials(const Meeting& m, const DenseHead& h, const RowGroup& group, float* sums) const {
        bool fits = true;
        for (int64_t i = 0; i < group.count; i++) {
            const int64_t r = group.first + i;
            float* scores = m.scores + r * BLOCK_KEYS;
            const Range keys = group.seen.widened(STEP * LANES);
            sums[i] = a.selected ? exponentials_of_row<true>(scores, keys, h.references[r], selected(m, r))
                                 : exponentials_of_row<false>(scores, keys, h.references[r], nullptr);
            fits &= sums[i] <= MOST;
        }
        return fits;
    }

    template <bool SELECTED>
    float exponentials_of_row(float* scores, Range keys, float reference, const uint64_t* words) const {
        const Floats scale = splat(*a.scale), subtracted = splat(reference);
        const Floats ones = to_pairs<PAIRS>(splat(1.0f), splat(1.0f));
        const auto exponential = [&](int64_t at) __attribute__((always_inline)) {
            // Subtracted first, which is nearly exact: the product's rounding does not grow with the scores.
            Floats x = (load(scores + at) * scale - subtracted) * LOG2_E;
            if constexpr (LANES < 16) x = -maximum(-x, splat(-128.0f));  // 2^128 is infinite
            const Floats p = exp2<PAIRS>(x);
            if constexpr (SELECTED) return choose(words[at / 64] >> at % 64, p, Floats{});
            return p;
        };
        Floats all = {};
        for (int64_t at = keys.start; at < keys.end; at += STEP * LANES) {
            Floats p = exponential(at);
            if constexpr (PAIRS) {
                p = to_pairs<PAIRS>(p, exponential(at + LANES));
                all = multiply_add<PAIRS>(all, p, ones);  // what is summed is what values are multiplied with
            } else {
                all += p;
            }
            store(scores + at / STEP, p);
        }
        return join(all, [](Floats x, Floats y) { return x + y; });
    }

    // What row r does not see, though others of its group do; it may see nothing.
    void hide(const Meeting& m, const RowGroup& group, int64_t r) const {
        const Range whole = group.seen.widened(STEP * LANES), row = m.rows[r];
        if (row.start <= whole.start && row.end >= whole.end) return;
        float* scores = m.scores + r * BLOCK_KEYS;
        const float hidden = -std::numeric_limits<float>::infinity();
        std::fill(scores + whole.start, scores + std::clamp(row.start, whole.start, whole.end), hidden);
        std::fill(scores + std::clamp(row.end, whole.start, whole.end), scores + whole.end, hidden);
    }

    // To the highest score that is to come, if it is above: sums are rescaled.
    void raise_reference(const Meeting& m, const DenseHead& h, const RowGroup& group, int64_t r) const {
        const Range whole = group.seen.widened(STEP * LANES);
        const uint64_t* words = a.selected ? selected(m, r) : nullptr;
        Floats most = splat(LOWEST);
        for (int64_t at = whole.start; at < whole.end; at += LANES) {
            Floats scores = load(m.scores + r * BLOCK_KEYS + at);
            if (words) scores = choose(words[at / 64] >> at % 64, scores, splat(LOWEST));
            most = maximum(scores, most);
        }
        float top = join(most, maximum), &reference = h.references[r];
        if (top != LOWEST) top *= *a.scale;
        if (top <= reference) return;
        if (reference != LOWEST) {
            const float factor = exp2(splat((reference - top) * LOG2_E))[0];
            h.sums[r] *= factor;
            for (int64_t e = 0; e < a.v_dim; e++) h.out[r * a.out_stride + e] *= factor;
        }
        reference = top;
    }

    // Of what is multiplied with them.
    static INLINE Range words_of(Range keys) {
        const Range whole = keys.widened(WHOLE);
        return {whole.start / STEP, whole.end / STEP};
    }

    // Exponentials times values, added to out.
    void sums(const Meeting& m, const DenseHead& h) const {
        const Range all = words_of(m.seen);
        for (int64_t first = all.start; first < all.end; first += VALUE_WORDS)
            for (int64_t e = 0, vectors; e < columns; e += vectors * LANES) {
                vectors = vectors_from(e);
                const float* column =
                    h.packed.values + e * num_pairs + (m.first_key - h.packed.first) / STEP * vectors * LANES;
                for (int64_t g = 0; g < m.num_groups; g++) {
                    const RowGroup& group = m.groups[g];
                    const Range seen = words_of(group.seen).part(first, first + VALUE_WORDS);
                    if (seen.is_empty()) continue;
                    const float *p = m.scores + group.first * BLOCK_KEYS + seen.start,
                                *values = column + seen.start * vectors * LANES;
                    float* out = h.out + group.first * a.out_stride + e;
                    if constexpr (HAS_TILES) {
                        add_value_tiles(*m.tiles, p, BLOCK_KEYS, group.count, values, vectors,
                                        seen.end - seen.start, std::min(a.v_dim - e, vectors * LANES), out,
                                        a.out_stride);
                        continue;
                    }
                    with_rows(group.count, [&](auto rows) __attribute__((always_inline)) {
                        with_vectors(vectors, [&](auto width) __attribute__((always_inline)) {
                            add_values<decltype(rows)::value, decltype(width)::value>(p, values, seen.end - seen.start, group.count, a.v_dim - e, out);
                        });
                    });
                }
            }
    }

    // out[i][e] += sum over words j of p[i][j] * value_j[e], for `present` of R rows, and the elements there are.
    template <int R, int C>
    SEPARATE void add_values(const float* p, const float* values, int64_t count, int64_t present, int64_t elements,
                           float* out) const {
        Floats acc[R][C] = {};
        for (int64_t j = 0; j < count; j++) {
            Floats column[C];
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) column[c] = load(values + (j * C + c) * LANES);
#pragma GCC unroll 8
            for (int i = 0; i < R; i++) {
                Floats factor = splat(p[i * BLOCK_KEYS + j]);
                keep_in_register(factor);
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) acc[i][c] = multiply_add<PAIRS>(acc[i][c], factor, column[c]);
            }
        }
        if (present == R && elements >= C * LANES) {
#pragma GCC unroll 8
            for (int i = 0; i < R; i++)
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) {
                    float* to = out + i * a.out_stride + c * LANES;
                    store(to, load(to) + acc[i][c]);
                }
            return;
        }
        float sums[R][C * LANES];
        std::memcpy(sums, acc, sizeof sums);
        for (int64_t i = 0; i < present; i++)
            for (int64_t e = 0; e < std::min<int64_t>(elements, C * LANES); e++) out[i * a.out_stride + e] += sums[i][e];
    }
};

static void attend_dense(const DenseArguments& a) {
    if constexpr (HAS_PAIRS) DenseRows<uint16_t, true>(a).attend();
    else if (a.is_bfloat16) DenseRows<uint16_t, false>(a).attend();
    else DenseRows<float, false>(a).attend();
}

#undef SEPARATE
