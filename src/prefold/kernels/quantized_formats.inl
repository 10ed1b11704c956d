// See quantized.inl: what the codes of each format stand for.

constexpr int64_t AHEAD = 2048;  // bytes: hardware follows a stream only to the end of its page

// A matrix as decoders take it.
struct Prepared : Matrix {
    int64_t ahead;    // bytes from what is decoded to what is to be fetched: the next rows
    bool needs_spare;  // whether decoders write behind the last column though columns are whole SPAREs

    // `tables` has room for 16 floats for each of 256 scales of NVFP4, which come to stand for these.
    Prepared(const Matrix& matrix, float* tables) : Matrix(matrix) {
        ahead = std::max(AHEAD, 4 * code_stride);
        needs_spare = format == FP8 && (block_columns % SPARE || skip_columns % SPARE);
        if (format == NVFP4) {
            tabulate(tables);
            scales = tables;
        }
    }

private:
    void tabulate(float* tables) const {
        const float codes[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};
        for (int s = 0; s < 256; s++, tables += 16)
            for (int i = 0; i < 16; i++) {
                const float value = codes[i] * scales[s];
                uint32_t bits;
                std::memcpy(&bits, &value, sizeof bits);
                if (round) bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
                std::memcpy(tables + i, &bits, sizeof bits);
            }
    }
};

typedef uint8_t Bytes __attribute__((vector_size(PREFOLD_LANES), aligned(1), may_alias));

// GCC 12 widens vectors of bytes one at a time, so where there is an instruction for it, it is named.
#undef WIDEN
#if PREFOLD_LANES > 4
#define WIDEN(INSTRUCTION, FROM, TO) asm(INSTRUCTION " %1, %0" : "=v"(TO) : "m"(*(const Bytes*)(FROM)));
#else
#define WIDEN(INSTRUCTION, FROM, TO) for (int i = 0; i < LANES; i++) TO[i] = (FROM)[i];
#endif

static INLINE Ints load_bytes(const uint8_t* from) {
    Ints values;
    WIDEN("vpmovzxbd", from, values)
    return values;
}

static INLINE Ints load_signed(const int8_t* from) {
    Ints values;
    WIDEN("vpmovsxbd", from, values)
    return values;
}

static INLINE Floats to_floats(Ints values) { return __builtin_convertvector(values, Floats); }

// Values, or the nearest bfloat16 to each (even ones at ties) if ROUND.
template <bool ROUND> static INLINE Floats rounded(Floats values) {
    if (!ROUND) return values;
    const Ints bits = (Ints)values;
    return (Floats)((bits + 0x7fff + ((bits >> 16) & 1)) & (int32_t)0xffff0000);
}

// As `rounded`, for values whose exponent is far from the ends of its range; SHORT: of at most 23 significant
// bits. Added to 2^16 times itself, a value is rounded to multiples of that number's last place, which is the
// last place of its bfloat16. That number is an even multiple if the value's last bit is 0: so ties go where
// they should, and all is right where the sum reaches the next power of two, and has one place less.
template <class Sink, bool ROUND, bool SHORT> static INLINE Floats rounded_quickly(Floats values) {
    if (!ROUND) return values;
    const Floats even = SHORT ? values : (Floats)((Ints)values & ~1);
    const Floats large = even * 65536.0f, nearest = (large + values) - large;
    if (!Sink::KEEPS_SIGNS_OF_ZEROS) return nearest;
    return (Floats)((Ints)nearest | ((Ints)values & INT32_MIN));  // -0 has become 0
}

static INLINE float half(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, sizeof bits);
#if PREFOLD_LANES > 4
    typedef int32_t FourInts __attribute__((vector_size(16)));
    typedef float FourFloats __attribute__((vector_size(16)));
    const FourInts first = {bits};
    FourFloats values;
    asm("vcvtph2ps %1, %0" : "=v"(values) : "v"(first));
    return values[0];
#else
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const uint32_t wide = (exponent == 31 ? 255u : exponent + 112u) << 23 | (uint32_t)mantissa << 13;
    float value = mantissa * 0x1p-24f;
    if (exponent) std::memcpy(&value, &wide, sizeof wide);
    return bits >> 15 ? -value : value;
#endif
}

// As `half`, where six more bytes may be read: from memory the conversion is one instruction.
static INLINE float half_of_eight(const uint8_t* from) {
#if PREFOLD_LANES > 4
    typedef float FourFloats __attribute__((vector_size(16)));
    typedef uint64_t Eight __attribute__((aligned(1), may_alias));
    FourFloats values;
    asm("vcvtph2ps %1, %0" : "=v"(values) : "m"(*(const Eight*)from));
    return values[0];
#else
    return half(from);
#endif
}

// A value for each code of four bits.
struct Table {
    Floats part[16 / LANES];
};

// code * scale + offset for the 16 codes from `first` on.
template <class Sink, bool ROUND, bool SHORT>
static INLINE Table make_table(int first, float scale, float offset) {
    Table table;
    for (int p = 0; p < 16 / LANES; p++) {
        Floats codes;
        for (int i = 0; i < LANES; i++) codes[i] = first + p * LANES + i;
        table.part[p] = rounded_quickly<Sink, ROUND, SHORT>(codes * scale + offset);
    }
    return table;
}

// Of codes, only the lower four bits count.
static INLINE Floats look_up(const Table& table, Ints codes) {
#if PREFOLD_LANES == 16
    return __builtin_shuffle(table.part[0], codes);
#elif PREFOLD_LANES == 8
    return __builtin_shuffle(table.part[0], table.part[1], codes);
#else
    float entries[16];
    std::memcpy(entries, &table, sizeof entries);
    Floats values;
    for (int i = 0; i < LANES; i++) values[i] = entries[codes[i] & 15];
    return values;
#endif
}

// COUNT columns whose codes are the lower four bits of bytes, then as many for the upper ones.
template <int COUNT, class Sink>
static INLINE void look_up_both(const uint8_t* codes, const Table& low, const Table& high, int64_t c,
                                Sink& sink) {
    Ints bytes[COUNT / LANES];
    for (int i = 0; i < COUNT; i += LANES) bytes[i / LANES] = load_bytes(codes + i);
    for (int i = 0; i < COUNT; i += LANES) sink(c, i, look_up(low, bytes[i / LANES]));
    for (int i = 0; i < COUNT; i += LANES) sink(c, COUNT + i, look_up(high, bytes[i / LANES] >> 4));
}

// 2 * LANES codes of E4M3 as floats 2^8 times too small. Put where float16 has its own, exponent and mantissa
// are such a float16, subnormal ones included: the two exponents' offsets differ by 8. Not so NaN, which must
// not occur.
static INLINE void load_e4m3(const uint8_t* from, Floats (&values)[2]) {
#if PREFOLD_LANES > 4
    typedef int16_t Shorts __attribute__((vector_size(4 * PREFOLD_LANES)));
    typedef uint8_t Codes __attribute__((vector_size(2 * PREFOLD_LANES), aligned(1), may_alias));
    Shorts all;
    asm("vpmovsxbw %1, %0" : "=v"(all) : "m"(*(const Codes*)from));
    // Seven places left: the sign fills bits 15 and 14, of which 14 is the exponent's.
    all = (all << 7) & (int16_t)0xbfff;
    // From memory, the conversion is one instruction, and from registers two.
    Halves halves[2];
    std::memcpy(halves, &all, sizeof all);
    for (int i = 0; i < 2; i++) asm("vcvtph2ps %1, %0" : "=v"(values[i]) : "m"(halves[i]));
#else
    for (int i = 0; i < 2 * LANES; i++) {
        const int magnitude = from[i] & 127, exponent = magnitude >> 3, mantissa = magnitude & 7;
        const float value = exponent ? (8 + mantissa) * (1 << exponent) * 0x1p-18f : mantissa * 0x1p-17f;
        values[i / LANES][i % LANES] = from[i] & 128 ? -value : value;
    }
#endif
}

// Decoders hand vectors to sink(c, i, values), one after the other: values of columns c + i on, counted from
// the first one decoded.
struct Stores {
    static constexpr bool KEEPS_SIGNS_OF_ZEROS = true, TAKES_ALL_FORMATS = true;
    float* out;
    INLINE void operator()(int64_t c, int i, Floats values) { store(out + c + i, values); }
};

// Products with R rows of x, whose vectors lie side by side: at [c * R] those of column c on. Two sums per row,
// because the next addition to one has to wait for the last.
template <int R>
struct Products {
    static constexpr bool KEEPS_SIGNS_OF_ZEROS = false, TAKES_ALL_FORMATS = R == 1;  // see rows_together
    const float* x;
    Floats sums[2][R];  // of vectors with even, and with odd numbers

    Products() = default;
    Products(const Products& other) { *this = other; }
    // GCC 12 would copy bytes on the stack.
    INLINE Products& operator=(const Products& other) {
        x = other.x;
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 8
            for (int row = 0; row < R; row++) sums[odd][row] = other.sums[odd][row];
        return *this;
    }
    INLINE void operator()(int64_t c, int i, Floats values) {
        const float* at = x + (c + i) * R;
#pragma GCC unroll 8
        for (int row = 0; row < R; row++) sums[i / LANES % 2][row] += load(at + row * LANES) * values;
    }
};

enum Rounding { NONE, NEAREST, TO_EVEN };

// `count` columns that share a scale. NEAREST is right where there are no ties.
template <Rounding ROUNDING, class Sink>
static INLINE void fp8_block(const uint8_t* at, int64_t count, float scale, int64_t ahead, int64_t to,
                             Sink& sink) {
    constexpr int TWO = 2 * LANES;
    auto decode = [&](const uint8_t* codes, int64_t c) __attribute__((always_inline)) {
        Floats values[2];
        load_e4m3(codes, values);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const Floats scaled = values[i] * scale;
            const Ints nearest = ((Ints)scaled + 0x8000) & (int32_t)0xffff0000;
            sink(c, i * LANES, ROUNDING == NEAREST ? (Floats)nearest : rounded<ROUNDING == TO_EVEN>(scaled));
        }
    };
    int64_t c = 0;
    for (; c + 64 <= count; c += 64) {
        __builtin_prefetch(at + c + ahead);
        for (int i = 0; i < 64; i += TWO) decode(at + c + i, to + c + i);
    }
    for (; c + TWO <= count; c += TWO) decode(at + c, to + c);
    if (c < count) {
        uint8_t rest[TWO] = {};
        std::memcpy(rest, at + c, count - c);
        decode(rest, to + c);
    }
}

template <class Sink, bool ROUND>
static INLINE void fp8(const Prepared& m, int64_t row, int64_t from, int64_t to, Sink& sink) {
    const uint8_t* at = m.codes + row * m.code_stride;
    const int64_t block_row = (row + m.skip_rows) / m.block_rows;
    const float* scales = m.scales + block_row * m.scale_stride;
    const uint8_t* ties = m.groups + block_row * m.group_stride;
    for (int64_t c = from, end; c < to; c = end) {
        const int64_t block = (c + m.skip_columns) / m.block_columns;
        end = std::min(to, (block + 1) * m.block_columns - m.skip_columns);
        const float scale = scales[block] * 256;
        if (!ROUND) fp8_block<NONE>(at + c, end - c, scale, m.ahead, c - from, sink);
        else if (ties[block]) fp8_block<TO_EVEN>(at + c, end - c, scale, m.ahead, c - from, sink);
        else fp8_block<NEAREST>(at + c, end - c, scale, m.ahead, c - from, sink);
    }
}

// `scales` are tables here.
template <class Sink, bool ROUND>
static INLINE void nvfp4(const Prepared& m, int64_t row, int64_t from, int64_t to, Sink& sink) {
    const uint8_t* at = m.codes + row * m.code_stride + from / 2;
    const uint8_t* groups = m.groups + row * m.group_stride + from / 16;
    for (int64_t c = from; c < to; c += 32, at += 16, groups += 2) {
        __builtin_prefetch(at + m.ahead);
        Table low, high;
        std::memcpy(&low, m.scales + 16 * groups[0], sizeof low);
        std::memcpy(&high, m.scales + 16 * groups[1], sizeof high);
        look_up_both<16>(at, low, high, c - from, sink);
    }
}

template <class Sink, bool ROUND>
static INLINE void q8_0(const Prepared& m, int64_t row, int64_t from, int64_t to, Sink& sink) {
    const uint8_t* at = m.codes + row * m.code_stride + from / 32 * 34;
    for (int64_t c = from; c < to; c += 32, at += 34) {
        __builtin_prefetch(at + m.ahead);
        const float scale = half_of_eight(at);
#pragma GCC unroll 8
        for (int i = 0; i < 32; i += LANES)
            sink(c - from, i,
                 rounded_quickly<Sink, ROUND, true>(to_floats(load_signed((const int8_t*)at + 2 + i)) * scale));
    }
}

template <class Sink, bool ROUND>
static INLINE void q4_0(const Prepared& m, int64_t row, int64_t from, int64_t to, Sink& sink) {
    const uint8_t* at = m.codes + row * m.code_stride + from / 32 * 18;
    for (int64_t c = from; c < to; c += 32, at += 18) {
        __builtin_prefetch(at + m.ahead);
        // Not + 0, which would make a zero of -0.
        const auto table = make_table<Sink, ROUND, true>(-8, half_of_eight(at), -0.0f);
        look_up_both<16>(at + 2, table, table, c - from, sink);
    }
}

template <class Sink, bool ROUND>
static INLINE void q4_1(const Prepared& m, int64_t row, int64_t from, int64_t to, Sink& sink) {
    const uint8_t* at = m.codes + row * m.code_stride + from / 32 * 20;
    for (int64_t c = from; c < to; c += 32, at += 20) {
        __builtin_prefetch(at + m.ahead);
        const auto table = make_table<Sink, ROUND, false>(0, half_of_eight(at), half_of_eight(at + 2));
        look_up_both<16>(at + 4, table, table, c - from, sink);
    }
}

// Load these again for each use, which repeats one in all lanes for nothing; moving it there from another
// register is an instruction.
static INLINE void keep_in_memory(float (&floats)[16]) {
    asm("" : "+m"(floats));
}

// Eight scales, then eight minima, of six bits in twelve bytes; times `scale` and `minimum`.
static INLINE void unpack_k4(const uint8_t* packed, float scale, float minimum, float (&scales)[16]) {
    uint32_t words[3];
    std::memcpy(words, packed, sizeof words);
    const uint64_t upper_scales = (words[2] & 0x0f0f0f0f) | (words[0] >> 2 & 0x30303030);
    const uint64_t upper_minima = (words[2] >> 4 & 0x0f0f0f0f) | (words[1] >> 2 & 0x30303030);
    const uint64_t unpacked[2] = {(words[0] & 0x3f3f3f3f) | upper_scales << 32,
                                  (words[1] & 0x3f3f3f3f) | upper_minima << 32};
#if PREFOLD_LANES == 16
    const Ints all = (Ints)_mm512_cvtepu8_epi32(_mm_set_epi64x(unpacked[1], unpacked[0]));
    store(scales, to_floats(all) * (Floats)_mm512_mask_blend_ps(0xff00, splat(scale), splat(minimum)));
#else
    for (int j = 0; j < 16; j += LANES)
        store(scales + j, to_floats(load_bytes((const uint8_t*)unpacked + j)) * (j < 8 ? scale : minimum));
#endif
    keep_in_memory(scales);
}

template <class Sink, bool ROUND>
static INLINE void q4_k(const Prepared& m, int64_t row, int64_t from, int64_t to, Sink& sink) {
    const uint8_t* at = m.codes + row * m.code_stride + from / 256 * 144;
    for (int64_t c = from; c < to; c += 256, at += 144) {
        float scales[16];
        unpack_k4(at + 4, half_of_eight(at), -half_of_eight(at + 2), scales);
        for (int j = 0; j < 4; j++) {
            const uint8_t* codes = at + 16 + 32 * j;
            __builtin_prefetch(codes + m.ahead);
            const auto low = make_table<Sink, ROUND, false>(0, scales[2 * j], scales[8 + 2 * j]);
            const auto high = make_table<Sink, ROUND, false>(0, scales[2 * j + 1], scales[9 + 2 * j]);
            look_up_both<32>(codes, low, high, c - from + 64 * j, sink);
        }
    }
}

// 128 codes of six bits, less 32, times 4, from 64 bytes with the lower four bits and 32 with the upper two.
static INLINE void unpack_q6(const uint8_t* low, const uint8_t* high, int8_t* codes) {
    typedef uint32_t Words __attribute__((vector_size(64)));
    Words lower, upper, more;
    std::memcpy(&lower, low, sizeof lower);
#if PREFOLD_LANES == 16
    // By way of memory, a load would wait until two stores have reached the cache.
    upper = (Words)_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)high));
#else
    for (int i = 0; i < 2; i++) std::memcpy((uint8_t*)&upper + 32 * i, high, 32);
#endif
    for (int i = 0; i < 16; i++) more[i] = i < 8 ? 2 : 0;
    // The top bit of six, turned over, is the sign of what is 32 less.
    const Words first = ((lower << 2 & 0x3c3c3c3c) | (upper << more << 4 & 0xc0c0c0c0)) ^ 0x80808080;
    const Words second = ((lower >> 2 & 0x3c3c3c3c) | (upper << more & 0xc0c0c0c0)) ^ 0x80808080;
    std::memcpy(codes, &first, sizeof first);
    std::memcpy(codes + 64, &second, sizeof second);
}

template <class Sink, bool ROUND>
static INLINE void q6_k(const Prepared& m, int64_t row, int64_t from, int64_t to, Sink& sink) {
    const uint8_t* at = m.codes + row * m.code_stride + from / 256 * 210;
    for (int64_t c = from; c < to; c += 256, at += 210) {
        const float scale = half(at + 208) / 4;
        float scales[16];
        for (int j = 0; j < 16; j += LANES)
            store(scales + j, to_floats(load_signed((const int8_t*)at + 192 + j)) * scale);
        keep_in_memory(scales);
        int8_t codes[256];
        for (int part = 0; part < 2; part++) {
            const uint8_t *low = at + 64 * part, *high = at + 128 + 32 * part;
            __builtin_prefetch(low + m.ahead);
            __builtin_prefetch(high + m.ahead);
            unpack_q6(low, high, codes + 128 * part);
        }
        for (int j = 0; j < 16; j += 2)
            for (int i = 0; i < 32; i += LANES)
                sink(c - from + 16 * j, i,
                     rounded_quickly<Sink, ROUND, true>(to_floats(load_signed(codes + 16 * j + i))
                                                        * scales[j + i / 16]));
    }
}
