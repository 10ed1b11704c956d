// See fp8.cpp. Included once per instruction set.

constexpr int MIN_EXPONENT = -117, MAX_EXPONENT = 119, BIAS = 127, MANTISSA = 20;
constexpr uint32_t INFINITE = 0x7f800000, NOT_A_NUMBER = 0x7fc00000, SIGN = 0x80000000;
constexpr int64_t THREAD_ELEMENTS = 32768;  // worth another thread

typedef uint8_t Bytes __attribute__((vector_size(PREFOLD_LANES)));

// The compiler's conversions between vectors of different widths are slow.
static INLINE Bits widen(Bytes bytes) {
#if PREFOLD_LANES == 16
    return (Bits)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif PREFOLD_LANES == 8
    return (Bits)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes));
#else
    return __builtin_convertvector(bytes, Bits);
#endif
}

// The upper halves.
static INLINE Halves upper(Bits bits) {
#if PREFOLD_LANES == 16
    return (Halves)_mm512_cvtepi32_epi16((__m512i)(bits >> 16));
#elif PREFOLD_LANES == 8
    const __m256i pairs = _mm256_packus_epi32((__m256i)(bits >> 16), (__m256i)(bits >> 16));
    return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 8));
#else
    return __builtin_convertvector(bits >> 16, Halves);
#endif
}

static INLINE Bytes lowest(Bits bits) {
#if PREFOLD_LANES == 16
    return (Bytes)_mm512_cvtepi32_epi8((__m512i)bits);
#else
    return __builtin_convertvector(bits, Bytes);
#endif
}

static INLINE Bits choose(Bits mask, Bits yes, Bits no) { return (mask & yes) | (~mask & no); }

// 2^exponent for normal numbers.
static INLINE float power_of_two(int exponent) {
    const uint32_t bits = (uint32_t)(exponent + BIAS) << 23;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The nearest bfloat16, of two the even one.
static INLINE uint16_t to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & ~SIGN) > INFINITE) return NOT_A_NUMBER >> 16;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static INLINE Bytes encode_vector(Floats values, float factor) {
    const Bits bits = (Bits)(values * factor), size = bits & ~SIGN;
    const Bits normal = ((size + 0x7ffff + ((size >> MANTISSA) & 1)) >> MANTISSA) - (120 << 3);
    // Steps of 2^-9 below 2^-6: those of a float32 at 2^14.
    const Bits small = (Bits)((Floats)size + 16384.0f) - (Bits)splat(16384.0f);
    const Bits code = choose((Bits)((Floats)size < 0x1p-6f), small, normal);
    const Bits largest = code - code + 0x7e;
    return lowest(choose((Bits)(code > largest), largest, code) | (bits >> 24 & 0x80));
}

// Codes of `count` floats; returns their exponent, biased: 255 if any is not finite.
static inline uint8_t encode_head(const float* from, int64_t count, uint8_t* codes) {
    Ints sizes = {};
    uint32_t largest = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Ints size = (Ints)load(from + i) & 0x7fffffff;
        sizes = (Ints)choose((Bits)(size > sizes), (Bits)size, (Bits)sizes);
    }
    for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, (uint32_t)sizes[lane]);
    Floats rest = {};
    std::memcpy(&rest, from + i, (count - i) * sizeof(float));
    for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, ((Bits)rest)[lane] & ~SIGN);
    if (largest >= INFINITE) {
        std::memset(codes, 0x7f, count);
        return 255;
    }
    // 448 = 1.75 * 2^8 is the largest code.
    int exponent = (int)(largest >> 23) - BIAS - 8 + ((largest & 0x7fffff) > 0x600000);
    exponent = std::min(std::max(exponent, MIN_EXPONENT), MAX_EXPONENT);
    const float factor = power_of_two(-exponent);
    for (i = 0; i + LANES <= count; i += LANES) {
        const Bytes encoded = encode_vector(load(from + i), factor);
        std::memcpy(codes + i, &encoded, sizeof encoded);
    }
    const Bytes encoded = encode_vector(rest, factor);
    std::memcpy(codes + i, &encoded, count - i);
    return (uint8_t)(exponent + BIAS);
}

static INLINE Halves decode_vector(Bytes bytes, float factor) {
    const Bits codes = widen(bytes), size = codes & 0x7f;
    const Bits normal = (size << MANTISSA) + (120u << 23);
    const Bits small = (Bits)(__builtin_convertvector((Ints)size, Floats) * 0x1p-9f);
    Bits bits = choose((Bits)(size < 8), small, normal);
    bits |= (Bits)(size == 0x7f) & NOT_A_NUMBER;
    bits |= (codes & 0x80) << 24;
    return upper((Bits)((Floats)bits * factor));
}

static inline void decode_head(const uint8_t* codes, int64_t count, uint8_t exponent, uint16_t* to) {
    const float factor = exponent == 255 ? std::numeric_limits<float>::quiet_NaN() : power_of_two(exponent - BIAS);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        Bytes bytes;
        std::memcpy(&bytes, codes + i, sizeof bytes);
        const Halves decoded = decode_vector(bytes, factor);
        std::memcpy(to + i, &decoded, sizeof decoded);
    }
    Bytes rest = {};
    std::memcpy(&rest, codes + i, count - i);
    const Halves decoded = decode_vector(rest, factor);
    std::memcpy(to + i, &decoded, (count - i) * sizeof(uint16_t));
}

static inline void encode_row(const FP8Arguments& a, int64_t row) {
    const int64_t num_scaled = a.num_heads * a.head_dim;
    const float* from = a.floats + row * a.rows_stride;
    uint8_t* rotary = a.stored + row * a.stored_stride;
    uint8_t* codes = rotary + 2 * a.rotary_dim;
    for (int64_t i = 0; i < a.rotary_dim; i++) {
        const uint16_t value = to_bfloat16(from[num_scaled + i]);
        std::memcpy(rotary + 2 * i, &value, sizeof value);
    }
    for (int64_t head = 0; head < a.num_heads; head++)
        codes[num_scaled + head] = encode_head(from + head * a.head_dim, a.head_dim, codes + head * a.head_dim);
}

static inline void decode_row(const FP8Arguments& a, int64_t row) {
    const int64_t num_scaled = a.num_heads * a.head_dim;
    const uint8_t* rotary = a.stored + row * a.stored_stride;
    const uint8_t* codes = rotary + 2 * a.rotary_dim;
    uint16_t* to = a.halves + row * a.rows_stride;
    for (int64_t head = 0; head < a.num_heads; head++)
        decode_head(codes + head * a.head_dim, a.head_dim, codes[num_scaled + head], to + head * a.head_dim);
    std::memcpy(to + num_scaled, rotary, 2 * a.rotary_dim);
}

// Rows that are worth another thread.
static inline int64_t thread_rows(const FP8Arguments& a) {
    return THREAD_ELEMENTS / (a.num_heads * a.head_dim + a.rotary_dim + 1);
}

static inline void fp8_encode(const FP8Arguments& a) {
    parallel_ranges(a.num_rows, thread_rows(a), [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) encode_row(a, row);
    });
}

static inline void fp8_decode(const FP8Arguments& a) {
    parallel_ranges(a.num_rows, thread_rows(a), [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) decode_row(a, row);
    });
}
