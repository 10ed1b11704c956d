// See fused.cpp. Included once per instruction set.

// A vector of the first `count` elements; 0 for the others.
template <typename T> static INLINE Floats load_first(const T* from, int64_t count) {
    if (count >= LANES) return load(from);
    Floats floats = {};
    for (int i = 0; i < count; i++) floats[i] = scalar(from[i]);
    return floats;
}

static INLINE void store_first(float* to, Floats floats, int64_t count) {
    if (count >= LANES) return store(to, floats);
    for (int i = 0; i < count; i++) to[i] = floats[i];
}

// The nearest bfloat16, of two the even one.
static INLINE void store_first(uint16_t* to, Floats floats, int64_t count) {
    const Bits bits = (Bits)floats, is_nan = (Bits)(floats != floats);
    const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Halves halves = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), Halves);
    std::memcpy(to, &halves, 2 * std::min<int64_t>(count, LANES));
}

// As it is stored and read again.
static INLINE Floats rounded_to(const float*, Floats floats) { return floats; }

static INLINE Floats rounded_to(const uint16_t*, Floats floats) {
    uint16_t stored[LANES];
    store_first(stored, floats, LANES);
    return load(stored);
}

// e^x, also far out: 2^integer times e^(what is left of x), which is exact because 0.693359375 has few digits.
static INLINE Floats exponential(Floats x) {
    const Floats limit = splat(87.0f);
    x = maximum(-limit, -maximum(-limit, -x));
    const Floats whole = __builtin_convertvector(__builtin_convertvector(x * 1.44269504f, Ints), Floats);
    const Floats rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    return exp2(rest * 1.44269504f) * exp2(whole);
}

// body(row) for all rows, on several threads where there is enough to do. `size`: elements of a row.
template <typename Body> static inline void for_rows(int64_t num_rows, int64_t size, const Body& body) {
    constexpr int64_t THREAD_ELEMENTS = 65536;  // about 20 us
    parallel_ranges(num_rows, THREAD_ELEMENTS / std::max<int64_t>(size, 1) + 1, [&](int64_t row, int64_t last) {
        for (; row < last; row++) body(row);
    });
}

// residual += x, if there is one; out = that sum, or x, normalised and times weight.
template <typename T>
static void normalise_row(const NormArguments& a, const T* x, T* residual, const T* weight, T* out) {
    Floats squares[4] = {};
    for (int64_t at = 0, i = 0; at < a.size; at += LANES, i = (i + 1) % 4) {
        const int64_t count = a.size - at;
        Floats values = load_first(x + at, count);
        if (residual) {
            values = rounded_to(residual, values + load_first(residual + at, count));
            store_first(residual + at, values, count);
        }
        squares[i] += values * values;
    }
    const float square = total((squares[0] + squares[1]) + (squares[2] + squares[3]));
    const float scale = 1.0f / std::sqrt(square / (float)a.size + a.eps);
    const T* source = residual ? residual : x;
    for (int64_t at = 0; at < a.size; at += LANES) {
        const int64_t count = a.size - at;
        const Floats values = rounded_to(out, load_first(source + at, count) * scale);
        store_first(out + at, values * load_first(weight + at, count), count);
    }
}

template <typename T> static inline void normalise(const NormArguments& a) {
    for_rows(a.num_rows, a.num_heads * a.size, [&](int64_t row) {
        for (int64_t head = 0; head < a.num_heads; head++) {
            const int64_t x_at = row * a.x_stride + head * a.x_head_stride;
            T* residual = a.residual ? (T*)a.residual + row * a.residual_stride : nullptr;
            T* out = (T*)a.out + row * a.out_stride + head * a.out_head_stride;
            normalise_row<T>(a, (const T*)a.x + x_at, residual, (const T*)a.weight, out);
        }
    });
}

// Each element's partner, and its own angle's cosine and sine, from (cos, sin) pairs.
template <typename T>
static INLINE void rotate_interleaved(const T* x, const float* angles, T* out, int64_t dim) {
    Ints partner, even, odd;
    Floats sign;
    for (int i = 0; i < LANES; i++) {
        partner[i] = i ^ 1, even[i] = i & ~1, odd[i] = i | 1;
        sign[i] = i % 2 ? 1.0f : -1.0f;
    }
    for (int64_t at = 0; at < dim; at += LANES) {
        const int64_t count = dim - at;
        const Floats values = load_first(x + at, count), pairs = load_first(angles + at, count);
        const Floats turned = __builtin_shuffle(values, partner) * (__builtin_shuffle(pairs, odd) * sign);
        store_first(out + at, values * __builtin_shuffle(pairs, even) + turned, count);
    }
}

// The first half's elements are partners of the second half's; angles are cosines, then sines.
template <typename T>
static INLINE void rotate_halves(const T* x, const float* angles, T* out, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t at = 0; at < half; at += LANES) {
        const int64_t count = half - at;
        const Floats first = load_first(x + at, count), second = load_first(x + half + at, count);
        const Floats cosine = load_first(angles + at, count), sine = load_first(angles + half + at, count);
        store_first(out + at, first * cosine - second * sine, count);
        store_first(out + half + at, second * cosine + first * sine, count);
    }
}

template <typename T> static inline void rotate(const RotateArguments& a) {
    for_rows(a.num_rows, a.num_heads * a.dim, [&](int64_t row) {
        const float* angles = a.angles + row * a.dim;
        for (int64_t head = 0; head < a.num_heads; head++) {
            const T* x = (const T*)a.x + row * a.x_stride + head * a.x_head_stride;
            T* out = (T*)a.out + row * a.out_stride + head * a.out_head_stride;
            if (a.is_interleaved) rotate_interleaved(x, angles, out, a.dim);
            else rotate_halves(x, angles, out, a.dim);
        }
    });
}

// gate = silu(gate) * up, where up lies beside gate.
template <typename T> static inline void gate_row(T* gate, int64_t width) {
    const T* up = gate + width;
    for (int64_t at = 0; at < width; at += LANES) {
        const int64_t count = width - at;
        const Floats x = load_first(gate + at, count);
        const Floats silu = rounded_to(gate, x / (exponential(-x) + 1.0f));
        store_first(gate + at, silu * load_first(up + at, count), count);
    }
}

template <typename T> static inline void gate(void* rows, int64_t stride, int64_t num_rows, int64_t width) {
    for_rows(num_rows, 4 * width, [&](int64_t row) { gate_row((T*)rows + row * stride, width); });
}

// row += factor * x.
static inline void add_row(float* row, const float* x, float factor, int64_t size) {
    for (int64_t at = 0; at < size; at += LANES) {
        const int64_t count = size - at;
        store_first(row + at, load_first(row + at, count) + load_first(x + at, count) * factor, count);
    }
}

template <typename From, typename To> static inline void copy_rows_to(const CopyArguments& a) {
    for_rows(a.num_rows, a.width, [&](int64_t i) {
        const From* x = (const From*)a.x + (a.from ? a.from[i] : i) * a.x_stride;
        To* out = (To*)a.out + (a.to ? a.to[i] : i) * a.out_stride;
        for (int64_t at = 0; at < a.width; at += LANES)
            store_first(out + at, load_first(x + at, a.width - at), a.width - at);
    });
}

template <typename From> static inline void copy_rows(const CopyArguments& a, bool to_bfloat16) {
    if (to_bfloat16) copy_rows_to<From, uint16_t>(a);
    else copy_rows_to<From, float>(a);
}

// rows = rows * scale + bias; no bias: null.
template <typename T>
static inline void scale_add(T* rows, int64_t stride, int64_t num_rows, int64_t width, float scale, const T* bias) {
    for_rows(num_rows, width, [&](int64_t i) {
        T* row = rows + i * stride;
        for (int64_t at = 0; at < width; at += LANES) {
            const int64_t count = width - at;
            Floats x = load_first(row + at, count);
            if (scale != 1.0f) x = rounded_to(row, x * scale);
            if (bias) x = x + load_first(bias + at, count);
            store_first(row + at, x, count);
        }
    });
}

// scores[i, e] = x[i] * weight[e], four rows of the weight at a time. Each sum is made in the same order, however
// many rows there are.
template <typename T> static inline void score(const ScoreArguments& a) {
    constexpr int64_t TOGETHER = 4, THREAD_ELEMENTS = 65536;
    const int64_t blocks = (a.num_experts + TOGETHER - 1) / TOGETHER;
    parallel_ranges(blocks, THREAD_ELEMENTS / (TOGETHER * std::max<int64_t>(a.size, 1)) + 1,
                    [&](int64_t block, int64_t last) {
        for (; block < last; block++) {
            const float* weights[TOGETHER];
            for (int64_t e = 0; e < TOGETHER; e++)
                weights[e] = a.weight + std::min(block * TOGETHER + e, a.num_experts - 1) * a.size;
            for (int64_t i = 0; i < a.num_rows; i++) {
                const T* x = (const T*)a.x + i * a.x_stride;
                Floats sums[2][TOGETHER] = {};
                for (int64_t at = 0; at < a.size; at += LANES) {
                    const Floats values = load_first(x + at, a.size - at);
                    for (int64_t e = 0; e < TOGETHER; e++)
                        sums[at / LANES % 2][e] += values * load_first(weights[e] + at, a.size - at);
                }
                for (int64_t e = 0; e < TOGETHER && block * TOGETHER + e < a.num_experts; e++)
                    a.scores[i * a.num_experts + block * TOGETHER + e] = total(sums[0][e] + sums[1][e]);
            }
        }
    });
}

static INLINE void scores_of(const RouteArguments& a, const float* logits, float* scores) {
    float most = logits[0];
    for (int64_t e = 1; e < a.num_experts; e++) most = std::max(most, logits[e]);
    float sum = 0;
    for (int64_t at = 0; at < a.num_experts; at += LANES) {
        const int64_t count = a.num_experts - at;
        const Floats x = load_first(logits + at, count);
        store_first(scores + at, a.is_softmax ? exponential(x - most) : 1.0f / (exponential(-x) + 1.0f), count);
    }
    if (!a.is_softmax) return;
    for (int64_t e = 0; e < a.num_experts; e++) sum += scores[e];
    for (int64_t e = 0; e < a.num_experts; e++) scores[e] /= sum;
}

// The place of the largest value that is not taken; among equals the first, and one in any case.
static INLINE int64_t best_of(const float* values, const bool* taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

// -inf for the experts outside of the best groups.
static INLINE void mask_groups(const RouteArguments& a, float* choice, float* group_scores, bool* kept) {
    const int64_t size = a.num_experts / a.num_groups;
    for (int64_t g = 0; g < a.num_groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t e = g * size; e < (g + 1) * size; e++) {
            second = std::max(second, std::min(first, choice[e]));
            first = std::max(first, choice[e]);
        }
        group_scores[g] = a.sums_two ? first + second : first;
        kept[g] = false;
    }
    for (int64_t i = 0; i < a.top_groups; i++) kept[best_of(group_scores, kept, a.num_groups)] = true;
    for (int64_t e = 0; e < a.num_experts; e++)
        if (!kept[e / size]) choice[e] = -INFINITY;
}

static inline void route_row(const RouteArguments& a, int64_t row) {
    static thread_local Buffer buffer;
    static thread_local std::vector<char> flags;
    float* scores = buffer.get(3 * a.num_experts);
    float *choice = scores + a.num_experts, *group_scores = choice + a.num_experts;
    flags.resize(std::max<size_t>(flags.size(), a.num_experts));
    bool* taken = (bool*)flags.data();
    scores_of(a, a.logits + row * a.num_experts, scores);
    for (int64_t e = 0; e < a.num_experts; e++) choice[e] = scores[e] + (a.bias ? a.bias[e] : 0.0f);
    if (a.top_groups < a.num_groups) mask_groups(a, choice, group_scores, taken);
    std::fill(taken, taken + a.num_experts, false);
    float* weights = a.weights + row * a.top_k;
    float sum = 0;
    for (int64_t i = 0; i < a.top_k; i++) {
        const int64_t best = best_of(choice, taken, a.num_experts);
        taken[best] = true;
        a.ids[row * a.top_k + i] = best;
        weights[i] = scores[best];
        sum += scores[best];
    }
    const float factor = a.is_normalised ? a.scale / (sum + 1e-20f) : a.scale;
    for (int64_t i = 0; i < a.top_k; i++) weights[i] *= factor;
}

static inline void route(const RouteArguments& a) {
    for_rows(a.num_rows, a.num_experts * (a.top_k + 8), [&](int64_t row) { route_row(a, row); });
}
