// Vectors of LANES float32, for one instruction set; included by instruction_sets.h.

constexpr int LANES = PREFOLD_LANES;

// Whether an instruction multiplies pairs of bfloat16.
#ifdef PREFOLD_PAIRS
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif

typedef float Floats __attribute__((vector_size(4 * PREFOLD_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * PREFOLD_LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * PREFOLD_LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * PREFOLD_LANES)));

static INLINE Floats load(const float* from) {
    Floats floats;
    std::memcpy(&floats, from, sizeof floats);
    return floats;
}

// A bfloat16 value is the upper half of a float32.
static INLINE Floats load(const uint16_t* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Bits) << 16);
}

// The first `count` elements that there are, and 0.
template <typename T>
static INLINE Floats load_some(const T* from, int64_t count) {
    if (count >= LANES) return load(from);
    T present[LANES] = {};
    std::memcpy(present, from, count * sizeof(T));
    return load(present);
}

static INLINE void store(float* to, Floats floats) { std::memcpy(to, &floats, sizeof floats); }

static INLINE float scalar(float value) { return value; }

static INLINE float scalar(uint16_t bfloat16) {
    uint32_t bits = (uint32_t)bfloat16 << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Subtracting 0 costs nothing; adding it would change -0.0.
static INLINE Floats splat(float value) { return value - Floats{}; }

// Keep what was loaded, instead of loading it again for each use.
static INLINE void keep_in_register(Floats& floats) {
#if defined(__x86_64__)
    asm("" : "+v"(floats));
#else
    (void)floats;
#endif
}

static INLINE Floats maximum(Floats a, Floats b) {
#if PREFOLD_LANES == 16
    return _mm512_max_ps(a, b);
#elif PREFOLD_LANES == 8
    return _mm256_max_ps(a, b);
#else
    return (Floats)(((Bits)a & (Bits)(a > b)) | ((Bits)b & ~(Bits)(a > b)));
#endif
}

// a where the lane's bit is set, else b.
static INLINE Floats choose(uint64_t bits, Floats a, Floats b) {
#if PREFOLD_LANES == 16
    return _mm512_mask_blend_ps((__mmask16)bits, b, a);
#else
    Ints of_lane;
    for (int i = 0; i < LANES; i++) of_lane[i] = 1 << i;
    const Ints chosen = (of_lane & (int32_t)(bits & ((1 << LANES) - 1))) != 0;
    return (Floats)((chosen & (Ints)a) | (~chosen & (Ints)b));
#endif
}

// a[0], b[0], a[1], b[1], ...: of the lower, of the upper halves.
static INLINE Floats zip_low(Floats a, Floats b) {
    Ints from;
    for (int i = 0; i < LANES; i++) from[i] = i / 2 + (i % 2) * LANES;
    return __builtin_shuffle(a, b, from);
}

static INLINE Floats zip_high(Floats a, Floats b) {
    Ints from;
    for (int i = 0; i < LANES; i++) from[i] = (i + LANES) / 2 + (i % 2) * LANES;
    return __builtin_shuffle(a, b, from);
}

// rows[i][j] -> rows[j][i].
static INLINE void transpose(Floats* rows) {
    Floats next[LANES];
#pragma GCC unroll 4
    for (int round = 1; round < LANES; round *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = zip_low(rows[i], rows[i + LANES / 2]);
            next[2 * i + 1] = zip_high(rows[i], rows[i + LANES / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) rows[i] = next[i];
    }
}

// Of a, and of b in lanes whose number has the bit HALF.
template <int HALF>
static INLINE Floats blend(Floats a, Floats b) {
#if PREFOLD_LANES == 16
    // GCC 12 would shuffle halves, which only one port does.
    return _mm512_mask_blend_ps(HALF == 8 ? 0xff00 : HALF == 4 ? 0xf0f0 : HALF == 2 ? 0xcccc : 0xaaaa, a, b);
#else
    Ints from;
    for (int i = 0; i < LANES; i++) from[i] = (i & HALF ? LANES : 0) + i;
    return __builtin_shuffle(a, b, from);
#endif
}

// Sums of lanes that differ in the bit HALF: of a where it is 0, of b where it is 1.
template <int HALF>
static INLINE Floats add_halves(Floats a, Floats b) {
    Ints moves;
    for (int i = 0; i < LANES; i++) moves[i] = (i & HALF ? LANES : 0) + (i ^ HALF);
    return blend<HALF>(a, b) + __builtin_shuffle(a, b, moves);
}

// The sum of each of LANES vectors, in its lane. All are summed in the same order.
template <int HALF = LANES / 2>
static INLINE Floats sums(Floats* vectors) {
#pragma GCC unroll 8
    for (int i = 0; i < HALF; i++) vectors[i] = add_halves<HALF>(vectors[i], vectors[i + HALF]);
    if constexpr (HALF > 1) return sums<HALF / 2>(vectors);
    else return vectors[0];
}

// Whether any lane of a comparison is true.
static INLINE bool any(Ints lanes) {
#if PREFOLD_LANES == 16
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif PREFOLD_LANES == 8
    return !_mm256_testz_si256((__m256i)lanes, (__m256i)lanes);
#else
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= lanes[i];
    return found != 0;
#endif
}

static INLINE float largest(Floats floats) {
    float value = floats[0];
    for (int i = 1; i < LANES; i++) value = floats[i] > value ? floats[i] : value;
    return value;
}

static INLINE float total(Floats floats) {
    float value = 0;
    for (int i = 0; i < LANES; i++) value += floats[i];
    return value;
}

// Lane i takes what is `by` lanes further on. A list of constants, because GCC 12 may put together at run
// time what a loop would fill.
template <int by, int... lane>
static INLINE Floats rotate(Floats floats, std::integer_sequence<int, lane...>) {
    const Ints from = {(lane + by) % LANES...};
    return __builtin_shuffle(floats, from);
}

// All lanes' values as one: those of both halves, then of both halves of what comes out, and so on.
template <int half = LANES / 2, typename Operation>
static INLINE float join(Floats floats, Operation operation) {
    floats = operation(floats, rotate<half>(floats, std::make_integer_sequence<int, LANES>()));
    if constexpr (half > 1) return join<half / 2>(floats, operation);
    return floats[0];
}

// 2^x within 1.5e-7 of its value, or 7.5e-5 if ROUGHLY, for x below 128; 0 instead of a denormal number.
template <bool ROUGHLY = false>
static INLINE Floats exp2(Floats x) {
#if PREFOLD_LANES == 16
    // What lies above the next lower integer; scalef takes that integer for the exponent.
    const Floats fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
#else
    x = maximum(splat(-127.0f), x);
    Ints whole = __builtin_convertvector(x, Ints);
    whole += (Ints)(__builtin_convertvector(whole, Floats) > x);
    const Floats fraction = x - __builtin_convertvector(whole, Floats);
#endif
    // The polynomials with the smallest relative error on [0, 1].
    Floats y = splat(ROUGHLY ? 0.07802452f : 0.0018775767f);
    if (ROUGHLY) {
        y = y * fraction + 0.22606716f;
        y = y * fraction + 0.69583356f;
        y = y * fraction + 0.9999252f;
    } else {
        y = y * fraction + 0.00898934f;
        y = y * fraction + 0.055826318f;
        y = y * fraction + 0.24015361f;
        y = y * fraction + 0.6931531f;
        y = y * fraction + 0.99999994f;
    }
#if PREFOLD_LANES == 16
    return _mm512_scalef_ps(y, x);
#else
    return y * (Floats)((whole + 127) << 23);
#endif
}

// The processor takes denormal numbers for 0 while this exists: one costs as much as a hundred others.
struct NoDenormals {
#if defined(__x86_64__)
    unsigned before;
    INLINE NoDenormals() : before(_mm_getcsr()) { _mm_setcsr(before | 0x8040); }
    INLINE ~NoDenormals() { _mm_setcsr(before); }
#endif
};

// sum + a * b, or, if PAIRS, with the products of the two bfloat16 values in each place of a and b.
template <bool PAIRS>
static INLINE Floats multiply_add(Floats sum, Floats a, Floats b) {
    static_assert(!PAIRS, "not an instruction of this set");
    return sum + a * b;
}

// The values of a, then of b, rounded to bfloat16, in pairs.
template <bool PAIRS>
static INLINE Floats to_pairs(Floats a, Floats b) {
    static_assert(!PAIRS, "not an instruction of this set");
    return a + b;
}

#ifdef PREFOLD_PAIRS
template <>
INLINE Floats multiply_add<true>(Floats sum, Floats a, Floats b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

template <>
INLINE Floats to_pairs<true>(Floats a, Floats b) {
    return (Floats)_mm512_cvtne2ps_pbh(b, a);
}
#endif

// sums[i][c] += sum over d < depth of rows[d * rows_width + i] * panel[d * width + c * LANES ...]: each sum
// in the order of d, one multiply-add after the other, wherever in the panel it stands.
template <bool PAIRS = false, int R, int C>
static INLINE void multiply_panel(const float* rows, int64_t rows_width, const float* panel, int64_t depth,
                                  int64_t width, Floats (&sums)[R][C]) {
    for (int64_t d = 0; d < depth; d++) {
        Floats columns[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) columns[c] = load(panel + d * width + c * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < R; i++) {
            const Floats row = splat(rows[d * rows_width + i]);
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) sums[i][c] = multiply_add<PAIRS>(sums[i][c], row, columns[c]);
        }
    }
}

// panel[d * width + j] = rows[j * stride + d] for j < count <= width, and 0 for the others.
template <typename T>
static INLINE void pack_panel(const T* rows, int64_t stride, int64_t count, int64_t depth, int64_t width,
                              float* panel) {
    for (int64_t first = 0; first < width; first += LANES) {
        const int64_t present = std::min<int64_t>(std::max<int64_t>(count - first, 0), LANES);
        int64_t d = 0;
        for (; d + LANES <= depth; d += LANES) {
            Floats square[LANES];
            for (int i = 0; i < LANES; i++)
                square[i] = i < present ? load(rows + (first + i) * stride + d) : Floats{};
            transpose(square);
            for (int i = 0; i < LANES; i++) store(panel + (d + i) * width + first, square[i]);
        }
        for (; d < depth; d++)
            for (int i = 0; i < LANES; i++)
                panel[d * width + first + i] = i < present ? scalar(rows[(first + i) * stride + d]) : 0.0f;
    }
}
