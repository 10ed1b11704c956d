// Quantised matrices in memory: their values, and products of few float32 rows with them.
//
// Plain C functions, called through ctypes: quantized.py has the contract and says how each format lies in
// memory. A row is decoded in pieces that stay in the first-level cache, and every piece meets all rows of x
// before the next is read: a product reads the codes once. Values are those of the formats' definitions,
// rounded in float32 in the same places, and then to bfloat16 if the matrix asks for it.
//
// One source for all instruction sets, as in bf16.cpp: vectors are GCC's, W floats long. No value depends on
// W: what is added to a product of scale and code below is so short that the product is exact, so it does
// not matter whether the compiler fuses them.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

struct Matrix {
    int64_t columns, format, round;
    int64_t code_stride, scale_stride, group_stride;  // per row; bytes of codes
    int64_t block_rows, block_columns;                // FP8: of a block
    int64_t skip_rows, skip_columns;                  // FP8: of the first block that lie before the matrix
    const uint8_t* codes;
    const float* scales;    // FP8: of blocks; NVFP4: by byte of `groups`
    const uint8_t* groups;  // FP8: whether values of a block may lie halfway between two bfloat16;
                            // NVFP4: a byte per 16 columns
};

enum Format { FP8, NVFP4, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K };

constexpr int64_t PIECE = 1024;  // columns decoded at a time: a multiple of every block
constexpr int64_t SPARE = 32;    // floats that a decoder may write behind the last one
constexpr int64_t AHEAD = 2048;  // bytes: hardware follows a stream only to the end of its page

template <int W> struct Vector {
    typedef float Floats __attribute__((vector_size(4 * W)));
    typedef int32_t Ints __attribute__((vector_size(4 * W)));
    typedef int16_t Shorts __attribute__((vector_size(2 * W)));
    typedef uint8_t Bytes __attribute__((vector_size(W), aligned(1), may_alias));
};

// GCC 12 widens vectors of bytes one at a time, so where there is an instruction for it, it is named.
#if defined(__x86_64__)
#define WIDEN(INSTRUCTION, FROM, TO) \
    if (W > 4) { asm(INSTRUCTION " %1, %0" : "=v"(TO) : "m"(FROM)); return TO; }
#else
#define WIDEN(INSTRUCTION, FROM, TO)
#endif

template <int W> INLINE typename Vector<W>::Ints load_bytes(const uint8_t* from) {
    typename Vector<W>::Ints values;
    WIDEN("vpmovzxbd", *(const typename Vector<W>::Bytes*)from, values)
    for (int i = 0; i < W; i++) values[i] = from[i];
    return values;
}

template <int W> INLINE typename Vector<W>::Ints load_signed(const uint8_t* from) {
    typename Vector<W>::Ints values;
    WIDEN("vpmovsxbd", *(const typename Vector<W>::Bytes*)from, values)
    for (int i = 0; i < W; i++) values[i] = (int8_t)from[i];
    return values;
}

template <int W> INLINE typename Vector<W>::Floats load_floats(const float* from) {
    typename Vector<W>::Floats floats;
    std::memcpy(&floats, from, sizeof floats);
    return floats;
}

// Values, or the nearest bfloat16 to each (even ones at ties) if ROUND.
template <int W, bool ROUND> INLINE typename Vector<W>::Floats rounded(typename Vector<W>::Floats values) {
    typedef typename Vector<W>::Ints Ints;
    if (!ROUND) return values;
    const Ints bits = (Ints)values;
    return (typename Vector<W>::Floats)((bits + 0x7fff + ((bits >> 16) & 1)) & (int32_t)0xffff0000);
}

template <int W> INLINE void store(float* to, typename Vector<W>::Floats values) {
    std::memcpy(to, &values, sizeof values);
}

// A value for each code of four bits.
template <int W> struct Table {
    typename Vector<W>::Floats part[16 / W];
};

// code * scale + offset for the codes from `first` on.
template <int W, bool ROUND> INLINE Table<W> make_table(int first, float scale, float offset) {
    Table<W> table;
    for (int p = 0; p < 16 / W; p++) {
        typename Vector<W>::Floats codes;
        for (int i = 0; i < W; i++) codes[i] = first + p * W + i;
        table.part[p] = rounded<W, ROUND>(codes * scale + offset);
    }
    return table;
}

// Of codes, only the lower four bits count.
template <int W> INLINE typename Vector<W>::Floats look_up(const Table<W>& table,
                                                           typename Vector<W>::Ints codes) {
    if constexpr (W == 16) return __builtin_shuffle(table.part[0], codes);
    if constexpr (W == 8) return __builtin_shuffle(table.part[0], table.part[1], codes);
    float entries[16];
    std::memcpy(entries, &table, sizeof entries);
    typename Vector<W>::Floats values;
    for (int i = 0; i < W; i++) values[i] = entries[codes[i] & 15];
    return values;
}

template <int W> INLINE float half(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, sizeof bits);
#if defined(__x86_64__)
    if constexpr (W > 4) {
        typename Vector<4>::Ints first = {bits};
        typename Vector<4>::Floats values;
        asm("vcvtph2ps %1, %0" : "=v"(values) : "v"(first));
        return values[0];
    }
#endif
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    uint32_t wide = (exponent == 31 ? 255u : exponent + 112u) << 23 | (uint32_t)mantissa << 13;
    float value = mantissa * 0x1p-24f;
    if (exponent) std::memcpy(&value, &wide, sizeof wide);
    return bits >> 15 ? -value : value;
}

// E4M3 codes as floats 2^8 times too small. Put where float16 has its own, exponent and mantissa are such a
// float16, subnormal ones included: the two exponents' offsets differ by 8. Not so NaN, which must not occur.
template <int W> INLINE typename Vector<W>::Floats load_e4m3(const uint8_t* from) {
    typename Vector<W>::Floats values;
#if defined(__x86_64__)
    if constexpr (W > 4) {
        typename Vector<W>::Shorts halves;
        asm("vpmovsxbw %1, %0" : "=v"(halves) : "m"(*(const typename Vector<W>::Bytes*)from));
        // Seven places left: the sign fills bits 15 and 14, of which 14 is the exponent's.
        halves = (halves << 7) & (int16_t)0xbfff;
        asm("vcvtph2ps %1, %0" : "=v"(values) : "v"(halves));
        return values;
    }
#endif
    for (int i = 0; i < W; i++) {
        const int magnitude = from[i] & 127, exponent = magnitude >> 3, mantissa = magnitude & 7;
        const float value = exponent ? (8 + mantissa) * (1 << exponent) * 0x1p-18f : mantissa * 0x1p-17f;
        values[i] = from[i] & 128 ? -value : value;
    }
    return values;
}

enum Rounding { NONE, NEAREST, TO_EVEN };

// Columns [c, end) of a row, which share a scale. NEAREST is right where there are no ties.
template <int W, Rounding ROUNDING>
INLINE void fp8_block(const uint8_t* at, int64_t count, float scale, float* out) {
    typedef typename Vector<W>::Ints Ints;
    typedef typename Vector<W>::Floats Floats;
    auto decode = [&](const uint8_t* codes) INLINE_LAMBDA {
        const Floats values = load_e4m3<W>(codes) * scale;
        if (ROUNDING == NEAREST) return (Floats)(((Ints)values + 0x8000) & (int32_t)0xffff0000);
        return rounded<W, ROUNDING == TO_EVEN>(values);
    };
    int64_t c = 0;
    for (; c + 64 <= count; c += 64) {
        __builtin_prefetch(at + c + AHEAD);
        for (int i = 0; i < 64; i += W) store<W>(out + c + i, decode(at + c + i));
    }
    for (; c + W <= count; c += W) store<W>(out + c, decode(at + c));
    if (c < count) {
        uint8_t rest[W] = {};
        std::memcpy(rest, at + c, count - c);
        store<W>(out + c, decode(rest));
    }
}

template <int W, bool ROUND>
INLINE void fp8(const Matrix& m, int64_t row, int64_t from, int64_t to, float* out) {
    const uint8_t* at = m.codes + row * m.code_stride;
    const int64_t block_row = (row + m.skip_rows) / m.block_rows;
    const float* scales = m.scales + block_row * m.scale_stride;
    const uint8_t* ties = m.groups + block_row * m.group_stride;
    for (int64_t c = from, end; c < to; c = end) {
        const int64_t block = (c + m.skip_columns) / m.block_columns;
        end = std::min(to, (block + 1) * m.block_columns - m.skip_columns);
        const float scale = scales[block] * 256;
        if (!ROUND) fp8_block<W, NONE>(at + c, end - c, scale, out + c - from);
        else if (ties[block]) fp8_block<W, TO_EVEN>(at + c, end - c, scale, out + c - from);
        else fp8_block<W, NEAREST>(at + c, end - c, scale, out + c - from);
    }
}

// `scales` are tables here, see `tabulate`.
template <int W, bool ROUND>
INLINE void nvfp4(const Matrix& m, int64_t row, int64_t from, int64_t to, float* out) {
    const uint8_t* at = m.codes + row * m.code_stride + from / 2;
    const uint8_t* groups = m.groups + row * m.group_stride + from / 16;
    for (int64_t c = from; c < to; c += 32, at += 16, groups += 2, out += 32) {
        __builtin_prefetch(at + AHEAD);
        Table<W> low, high;
        std::memcpy(&low, m.scales + 16 * groups[0], sizeof low);
        std::memcpy(&high, m.scales + 16 * groups[1], sizeof high);
        for (int i = 0; i < 16; i += W) {
            const auto bytes = load_bytes<W>(at + i);
            store<W>(out + i, look_up<W>(low, bytes));
            store<W>(out + 16 + i, look_up<W>(high, bytes >> 4));
        }
    }
}

// NVFP4: the 16 values for each of the 256 scales.
INLINE void tabulate(const float* scales, bool round, float* tables) {
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

template <int W> INLINE typename Vector<W>::Floats to_floats(typename Vector<W>::Ints values) {
    return __builtin_convertvector(values, typename Vector<W>::Floats);
}

template <int W, bool ROUND>
INLINE void q8_0(const Matrix& m, int64_t row, int64_t from, int64_t to, float* out) {
    const uint8_t* at = m.codes + row * m.code_stride + from / 32 * 34;
    for (int64_t c = from; c < to; c += 32, at += 34, out += 32) {
        __builtin_prefetch(at + AHEAD);
        const float scale = half<W>(at);
        for (int i = 0; i < 32; i += W)
            store<W>(out + i, rounded<W, ROUND>(to_floats<W>(load_signed<W>(at + 2 + i)) * scale));
    }
}

template <int W, bool ROUND>
INLINE void q4_0(const Matrix& m, int64_t row, int64_t from, int64_t to, float* out) {
    const uint8_t* at = m.codes + row * m.code_stride + from / 32 * 18;
    for (int64_t c = from; c < to; c += 32, at += 18, out += 32) {
        __builtin_prefetch(at + AHEAD);
        // Not + 0, which would make a zero of -0.
        const auto table = make_table<W, ROUND>(-8, half<W>(at), -0.0f);
        for (int i = 0; i < 16; i += W) {
            const auto bytes = load_bytes<W>(at + 2 + i);
            store<W>(out + i, look_up<W>(table, bytes));
            store<W>(out + 16 + i, look_up<W>(table, bytes >> 4));
        }
    }
}

template <int W, bool ROUND>
INLINE void q4_1(const Matrix& m, int64_t row, int64_t from, int64_t to, float* out) {
    const uint8_t* at = m.codes + row * m.code_stride + from / 32 * 20;
    for (int64_t c = from; c < to; c += 32, at += 20, out += 32) {
        __builtin_prefetch(at + AHEAD);
        const auto table = make_table<W, ROUND>(0, half<W>(at), half<W>(at + 2));
        for (int i = 0; i < 16; i += W) {
            const auto bytes = load_bytes<W>(at + 4 + i);
            store<W>(out + i, look_up<W>(table, bytes));
            store<W>(out + 16 + i, look_up<W>(table, bytes >> 4));
        }
    }
}

// Eight scales and eight minima of six bits in twelve bytes.
INLINE void unpack_k4(const uint8_t* packed, uint8_t* scales, uint8_t* minima) {
    for (int j = 0; j < 4; j++) {
        scales[j] = packed[j] & 63;
        minima[j] = packed[j + 4] & 63;
        scales[j + 4] = (packed[j + 8] & 15) | ((packed[j] >> 6) << 4);
        minima[j + 4] = (packed[j + 8] >> 4) | ((packed[j + 4] >> 6) << 4);
    }
}

template <int W, bool ROUND>
INLINE void q4_k(const Matrix& m, int64_t row, int64_t from, int64_t to, float* out) {
    const uint8_t* at = m.codes + row * m.code_stride + from / 256 * 144;
    for (int64_t c = from; c < to; c += 256, at += 144, out += 256) {
        const float scale = half<W>(at), minimum = half<W>(at + 2);
        uint8_t scales[8], minima[8];
        unpack_k4(at + 4, scales, minima);
        for (int j = 0; j < 4; j++) {
            const uint8_t* codes = at + 16 + 32 * j;
            __builtin_prefetch(codes + AHEAD);
            const int k = 2 * j;
            const auto low = make_table<W, ROUND>(0, scale * scales[k], -(minimum * minima[k]));
            const auto high = make_table<W, ROUND>(0, scale * scales[k + 1], -(minimum * minima[k + 1]));
            for (int i = 0; i < 32; i += W) {
                const auto bytes = load_bytes<W>(codes + i);
                store<W>(out + 64 * j + i, look_up<W>(low, bytes));
                store<W>(out + 64 * j + 32 + i, look_up<W>(high, bytes >> 4));
            }
        }
    }
}

template <int W, bool ROUND>
INLINE void q6_k(const Matrix& m, int64_t row, int64_t from, int64_t to, float* out) {
    const uint8_t* at = m.codes + row * m.code_stride + from / 256 * 210;
    for (int64_t c = from; c < to; c += 256, at += 210, out += 256) {
        const float scale = half<W>(at + 208);
        float scales[16];
        for (int j = 0; j < 16; j++) scales[j] = scale * (float)(int8_t)at[192 + j];
        for (int part = 0; part < 2; part++) {
            const uint8_t *low = at + 64 * part, *high = at + 128 + 32 * part;
            __builtin_prefetch(low + AHEAD);
            __builtin_prefetch(high + AHEAD);
            float* to_part = out + 128 * part;
            for (int i = 0; i < 32; i += W) {
                const auto first = load_bytes<W>(low + i), second = load_bytes<W>(low + 32 + i);
                const auto upper = load_bytes<W>(high + i);
                const float* by = scales + 8 * part + i / 16;
                store<W>(to_part + i, rounded<W, ROUND>(to_floats<W>(((first & 15) | ((upper & 3) << 4)) - 32) * by[0]));
                store<W>(to_part + 32 + i, rounded<W, ROUND>(to_floats<W>(((second & 15) | ((upper & 12) << 2)) - 32) * by[2]));
                store<W>(to_part + 64 + i, rounded<W, ROUND>(to_floats<W>(((first >> 4) | (upper & 48)) - 32) * by[4]));
                store<W>(to_part + 96 + i, rounded<W, ROUND>(to_floats<W>(((second >> 4) | ((upper & 192) >> 2)) - 32) * by[6]));
            }
        }
    }
}

// decode(matrix, row, from, to, out): values of columns [from, to) of a row, `from` a multiple of PIECE.
typedef void (*Decode)(const Matrix&, int64_t, int64_t, int64_t, float*);

// sums[m] += x[m] * values for R rows of x; each sum in the same order whatever R is.
template <int W, int R>
INLINE void add_dots(const float* x, int64_t x_stride, const float* values, int64_t count, float* sums) {
    typedef typename Vector<W>::Floats Floats;
    Floats even[R] = {}, odd[R] = {};
    int64_t c = 0;
    for (; c + 2 * W <= count; c += 2 * W) {
        const Floats first = load_floats<W>(values + c), second = load_floats<W>(values + c + W);
        for (int i = 0; i < R; i++) {
            even[i] += load_floats<W>(x + i * x_stride + c) * first;
            odd[i] += load_floats<W>(x + i * x_stride + c + W) * second;
        }
    }
    for (int i = 0; i < R; i++) {
        const Floats both = even[i] + odd[i];
        float total = 0;
        for (int j = 0; j < W; j++) total += both[j];
        for (int64_t e = c; e < count; e++) total += x[i * x_stride + e] * values[e];
        sums[i] += total;
    }
}

// The matrix that a decoder takes.
INLINE Matrix prepared(Matrix matrix, float* tables) {
    if (matrix.format == NVFP4) {
        tabulate(matrix.scales, matrix.round, tables);
        matrix.scales = tables;
    }
    return matrix;
}

constexpr int64_t ROWS = 16;  // rows of x at a time: so many sums are kept

template <int W>
INLINE void linear(const Matrix& matrix, Decode decode, const float* x, int64_t x_stride, float* y,
                   int64_t y_stride, int64_t rows, int64_t first, int64_t last) {
    alignas(64) float values[PIECE + SPARE], tables[16 * 256];
    float sums[ROWS];
    const Matrix m = prepared(matrix, tables);
    for (int64_t n = first; n < last; n++)
        for (int64_t top = 0; top < rows; top += ROWS) {
            const int64_t height = std::min(ROWS, rows - top);
            std::fill(sums, sums + height, 0.0f);
            for (int64_t from = 0; from < m.columns; from += PIECE) {
                const int64_t to = std::min(m.columns, from + PIECE);
                decode(m, n, from, to, values);
                const float* at = x + top * x_stride + from;
                int64_t i = 0;
                for (; i + 4 <= height; i += 4)
                    add_dots<W, 4>(at + i * x_stride, x_stride, values, to - from, sums + i);
                for (; i < height; i++)
                    add_dots<W, 1>(at + i * x_stride, x_stride, values, to - from, sums + i);
            }
            for (int64_t i = 0; i < height; i++) y[(top + i) * y_stride + n] = sums[i];
        }
}

// Rows [first, last) as float32, or as bfloat16 (of a matrix whose values are rounded to it).
template <int W>
INLINE void expand(const Matrix& matrix, Decode decode, void* out, int64_t out_stride, bool as_bf16, int64_t first,
                   int64_t last) {
    alignas(64) float values[PIECE + SPARE], tables[16 * 256];
    const Matrix m = prepared(matrix, tables);
    for (int64_t n = first; n < last; n++)
        for (int64_t from = 0; from < m.columns; from += PIECE) {
            const int64_t to = std::min(m.columns, from + PIECE), at = (n - first) * out_stride + from;
            decode(m, n, from, to, values);
            if (as_bf16) {
                uint16_t* halves = (uint16_t*)out + at;
                for (int64_t c = 0; c < to - from; c++) {
                    uint32_t bits;
                    std::memcpy(&bits, values + c, sizeof bits);
                    halves[c] = bits >> 16;
                }
            } else {
                std::memcpy((float*)out + at, values, (to - from) * sizeof(float));
            }
        }
}

#define DECODER(NAME, TARGET, W, FORMAT)                                                              \
    TARGET void FORMAT##_##NAME(const Matrix& m, int64_t row, int64_t from, int64_t to, float* out) { \
        if (m.round) FORMAT<W, true>(m, row, from, to, out);                                          \
        else FORMAT<W, false>(m, row, from, to, out);                                                 \
    }

#define VARIANT(NAME, TARGET, W)                                                                            \
    DECODER(NAME, TARGET, W, fp8)                                                                           \
    DECODER(NAME, TARGET, W, nvfp4)                                                                         \
    DECODER(NAME, TARGET, W, q8_0)                                                                          \
    DECODER(NAME, TARGET, W, q4_0)                                                                          \
    DECODER(NAME, TARGET, W, q4_1)                                                                          \
    DECODER(NAME, TARGET, W, q4_k)                                                                          \
    DECODER(NAME, TARGET, W, q6_k)                                                                          \
    constexpr Decode DECODERS_##NAME[] = {fp8_##NAME,  nvfp4_##NAME, q8_0_##NAME, q4_0_##NAME,              \
                                          q4_1_##NAME, q4_k_##NAME,  q6_k_##NAME};                          \
    TARGET void linear_##NAME(const Matrix& m, const float* x, int64_t x_stride, float* y,                  \
                              int64_t y_stride, int64_t rows, int64_t first, int64_t last) {                \
        linear<W>(m, DECODERS_##NAME[m.format], x, x_stride, y, y_stride, rows, first, last);               \
    }                                                                                                       \
    TARGET void expand_##NAME(const Matrix& m, void* out, int64_t out_stride, bool as_bf16, int64_t first,  \
                              int64_t last) {                                                               \
        expand<W>(m, DECODERS_##NAME[m.format], out, out_stride, as_bf16, first, last);                     \
    }

#if defined(__x86_64__)
VARIANT(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512"))), 16)
VARIANT(avx2, __attribute__((target("avx2,fma,f16c"))), 8)
#endif
VARIANT(portable, , 4)

enum InstructionSet { PORTABLE, AVX2, AVX512 };

}  // namespace

#if defined(__x86_64__)
#define CALL(OP, ...)                                   \
    if (set == AVX512) return OP##_avx512(__VA_ARGS__); \
    if (set == AVX2) return OP##_avx2(__VA_ARGS__);     \
    OP##_portable(__VA_ARGS__);
#else
#define CALL(OP, ...) OP##_portable(__VA_ARGS__);
#endif

extern "C" {

// y[i, n - first] = sum over k of x[i, k] * value[n, k] for n in [first, last).
void prefold_quantized_linear(int set, const Matrix* m, const float* x, int64_t x_stride, float* y,
                              int64_t y_stride, int64_t rows, int64_t first, int64_t last) {
    CALL(linear, *m, x, x_stride, y - first, y_stride, rows, first, last)
}

void prefold_quantized_expand(int set, const Matrix* m, void* out, int64_t out_stride, int as_bf16,
                              int64_t first, int64_t last) {
    CALL(expand, *m, out, out_stride, as_bf16, first, last)
}

}  // extern "C"
