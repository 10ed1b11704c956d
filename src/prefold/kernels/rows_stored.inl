// Stored rows of the cache and how a tile has them: part of rows.cpp, included by rows.inl.

constexpr int PAIR = 2 * LANES;  // elements of a row that are converted together

static INLINE int64_t padded(int64_t elements) { return (elements + PAIR - 1) / PAIR * PAIR; }

// Pairs of bfloat16 become vectors of even and of odd elements by a shift and a mask: that is the order that
// a tile has them in. What does not fill a pair of vectors is in its own order, and zeros fill it.
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

template <typename T> constexpr bool IS_SHUFFLED = sizeof(T) == 2;

static INLINE Floats evens(Floats a, Floats b) {
    Ints from;
    for (int i = 0; i < LANES; i++) from[i] = 2 * i;
    return __builtin_shuffle(a, b, from);
}

static INLINE Floats odds(Floats a, Floats b) {
    Ints from;
    for (int i = 0; i < LANES; i++) from[i] = 2 * i + 1;
    return __builtin_shuffle(a, b, from);
}

// to = from * factor in the tile's order, filled with zeros.
template <typename T> static INLINE void to_tile(const float* from, int64_t dim, float factor, float* to) {
    int64_t e = 0;
    for (; e + PAIR <= dim; e += PAIR) {
        const Floats a = load(from + e) * factor, b = load(from + e + LANES) * factor;
        store(to + e, IS_SHUFFLED<T> ? evens(a, b) : a);
        store(to + e + LANES, IS_SHUFFLED<T> ? odds(a, b) : b);
    }
    for (const int64_t end = padded(dim); e < end; e++) to[e] = e < dim ? from[e] * factor : 0.0f;
}

// to[0, count) = from * factor, where `from` is a vector of `dim` elements in the tile's order.
template <typename T>
static INLINE void from_tile(const float* from, int64_t dim, int64_t count, float factor, float* to) {
    int64_t e = 0;
    for (; e + PAIR <= count; e += PAIR) {
        const Floats a = load(from + e) * factor, b = load(from + e + LANES) * factor;
        store(to + e, IS_SHUFFLED<T> ? zip_low(a, b) : a);
        store(to + e + LANES, IS_SHUFFLED<T> ? zip_high(a, b) : b);
    }
    const bool is_shuffled = IS_SHUFFLED<T> && e + PAIR <= dim;
    for (; e < count; e++)
        to[e] = from[is_shuffled ? e / PAIR * PAIR + e % 2 * LANES + e % PAIR / 2 : e] * factor;
}

// What does not fill a pair of vectors, and the zeros behind it.
template <typename T> static INLINE void copy_end(const T* from, int64_t dim, float* to) {
    const int64_t end = padded(dim);
    for (int64_t e = dim / PAIR * PAIR; e < end; e++) to[e] = e < dim ? scalar(from[e]) : 0.0f;
}

// Elements [offset, offset + dim) of a row, filled with zeros.
template <typename T>
static INLINE void copy_row(const RowsArguments&, const T* row, int64_t offset, int64_t dim, float* to) {
    const T* from = row + offset;
    for (int64_t e = 0; e + PAIR <= dim; e += PAIR) {
        Floats pair[2];
        load_pair(from + e, pair);
        store(to + e, pair[0]);
        store(to + e + LANES, pair[1]);
    }
    copy_end(from, dim, to);
}

typedef uint8_t Codes __attribute__((vector_size(PREFOLD_LANES)));

// Values of e4m3 codes, times 2^-CODE_SCALE.

#if PREFOLD_LANES == 16
constexpr int CODE_SCALE = 8;

// The bits of a code where a float16 has them: right but for the exponents' bias, numbers below 2^-6 included.
static INLINE Floats decode_vector(Codes codes) {
    const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16((__m128i)codes), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16((short)0xbf80)));
}
#else
constexpr int CODE_SCALE = 0;

static INLINE Floats decode_vector(Codes codes) {
#if PREFOLD_LANES == 8
    int64_t eight;
    std::memcpy(&eight, &codes, sizeof eight);
    const Bits wide = (Bits)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(eight));
#else
    const Bits wide = __builtin_convertvector(codes, Bits);
#endif
    const Bits size = wide & 0x7f, is_small = (Bits)(size < 8);
    const Bits small = (Bits)(__builtin_convertvector((Ints)size, Floats) * 0x1p-9f);
    const Bits normal = (size << 20) + (120u << 23);
    return (Floats)((is_small & small) | (~is_small & normal) | (wide & 0x80) << 24);
}
#endif

// What codes with this exponent are multiplied with.
static INLINE float code_factor(uint8_t exponent) {
    const uint32_t bits = exponent == 255 ? 0x7fc00000u : (uint32_t)(exponent + CODE_SCALE) << 23;
    float factor;
    std::memcpy(&factor, &bits, sizeof factor);
    return factor;
}

template <int COUNT> static INLINE void code_factors(const uint8_t (&exponents)[COUNT], float (&factors)[COUNT]) {
    for (int i = 0; i < COUNT; i++) factors[i] = code_factor(exponents[i]);
}

static INLINE void decode_codes(const uint8_t* from, int64_t count, uint8_t exponent, float* to) {
    const Floats factor = splat(code_factor(exponent));
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        Codes codes;
        std::memcpy(&codes, from + i, sizeof codes);
        store(to + i, decode_vector(codes) * factor);
    }
    if (i == count) return;
    Codes codes = {};
    std::memcpy(&codes, from + i, count - i);
    const Floats rest = decode_vector(codes) * factor;
    std::memcpy(to + i, &rest, (count - i) * sizeof(float));
}

// Without their exponent.
static INLINE void load_pair(const uint8_t* from, Floats (&to)[2]) {
#if PREFOLD_LANES == 16
    // Together as far as they can: the conversion is one instruction from memory, and two from registers.
    alignas(64) uint16_t halves[PAIR];
    const __m512i moved = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from)), 7);
    _mm512_store_si512(halves, _mm512_and_si512(moved, _mm512_set1_epi16((short)0xbf80)));
    for (int half = 0; half < 2; half++)
        asm("vcvtph2ps %1, %0" : "=v"(to[half]) : "m"(*(const Halves*)(halves + half * LANES)));
#else
    for (int half = 0; half < 2; half++) {
        Codes codes;
        std::memcpy(&codes, from + half * LANES, sizeof codes);
        to[half] = decode_vector(codes);
    }
#endif
}

// A row in FP8, as fp8.py describes it: rotary elements, which are bfloat16 and the last ones | codes | exponents.
static INLINE void copy_row(const RowsArguments& a, const uint8_t* row, int64_t offset, int64_t dim, float* to) {
    const int64_t end = offset + dim, rotary = a.num_rotary;
    const uint8_t* codes = row + 2 * rotary;
    int64_t e = offset;
    for (int64_t head = e / a.head_dim; e < std::min(end, a.num_scaled); head++) {
        const int64_t stop = std::min(end, (head + 1) * a.head_dim);
        decode_codes(codes + e, stop - e, codes[a.num_scaled + head], to + e - offset);
        e = stop;
    }
    const uint8_t* from = row + 2 * (e - a.num_scaled);
    for (; e + LANES <= end; e += LANES, from += 2 * LANES) store(to + e - offset, load((const uint16_t*)from));
    for (; e < end; e++, from += 2) {
        uint16_t element;
        std::memcpy(&element, from, sizeof element);
        to[e - offset] = scalar(element);
    }
    std::fill(to + dim, to + padded(dim), 0.0f);
}
