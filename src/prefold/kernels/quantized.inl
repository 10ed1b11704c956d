// See quantized.cpp. Included once per instruction set.

constexpr int64_t PIECE = 1024;  // columns decoded at a time: a multiple of every block
constexpr int64_t SPARE = 32;   // floats that a decoder may write behind the last one

#include "quantized_formats.inl"

constexpr int64_t GROUP = 4;   // rows of the matrix that are decoded together
constexpr int64_t BLOCK = 16;  // rows of the matrix whose sums are kept
constexpr int64_t ROWS = 16;   // rows of x at a time

constexpr int64_t SMALLEST = 1 << 15;  // values that are worth a thread of their own

// decode(matrix, row, from, to, sink): values of columns [from, to) of a row, `from` a multiple of every block.
template <class Sink> using Decode = void (*)(const Prepared&, int64_t, int64_t, int64_t, Sink&);

template <class Sink, bool ROUND, int FORMAT>
static void decode(const Prepared& m, int64_t row, int64_t from, int64_t to, Sink& of_caller) {
    Sink sink = of_caller;  // in registers
    if (FORMAT == FP8) fp8<Sink, ROUND>(m, row, from, to, sink);
    if (FORMAT == NVFP4) nvfp4<Sink, ROUND>(m, row, from, to, sink);
    if (FORMAT == Q8_0) q8_0<Sink, ROUND>(m, row, from, to, sink);
    if (FORMAT == Q4_0) q4_0<Sink, ROUND>(m, row, from, to, sink);
    if (FORMAT == Q4_1) q4_1<Sink, ROUND>(m, row, from, to, sink);
    if (FORMAT == Q4_K) q4_k<Sink, ROUND>(m, row, from, to, sink);
    if (FORMAT == Q6_K) q6_k<Sink, ROUND>(m, row, from, to, sink);
    of_caller = sink;
}

template <class Sink, bool ROUND> static Decode<Sink> rounding_decoder(int64_t format) {
    if constexpr (!Sink::TAKES_ALL_FORMATS) {
        return format == Q8_0 ? decode<Sink, ROUND, Q8_0> : decode<Sink, ROUND, FP8>;
    }
    constexpr Decode<Sink> decoders[] = {decode<Sink, ROUND, FP8>,  decode<Sink, ROUND, NVFP4>,
                                         decode<Sink, ROUND, Q8_0>, decode<Sink, ROUND, Q4_0>,
                                         decode<Sink, ROUND, Q4_1>, decode<Sink, ROUND, Q4_K>,
                                         decode<Sink, ROUND, Q6_K>};
    return decoders[format];
}

template <class Sink> static Decode<Sink> decoder(const Matrix& m) {
    return m.round ? rounding_decoder<Sink, true>(m.format) : rounding_decoder<Sink, false>(m.format);
}

// `count` <= BLOCK sums over the lanes of vectors, which are lost.
static INLINE void store_sums(Floats* vectors, float* to, int64_t count) {
    float results[BLOCK];
    for (int64_t j = 0; j < BLOCK; j += LANES) store(results + j, sums(vectors + j));
    std::memcpy(to, results, count * sizeof(float));
}

// For R rows of x, and GROUP of the matrix: sums[i][j] += x[i] * values[j] of every second vector of columns.
template <int R>
static INLINE void add_products(const float* x, int64_t x_stride, const float (*values)[PIECE + SPARE],
                                int64_t count, Floats (*sums)[BLOCK]) {
    Floats own[R][GROUP];
#pragma GCC unroll 4
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int j = 0; j < GROUP; j++) own[i][j] = sums[i][j];
    int64_t c = 0;
    for (; c + LANES <= count; c += 2 * LANES) {
        Floats columns[GROUP];
#pragma GCC unroll 4
        for (int j = 0; j < GROUP; j++) columns[j] = load(values[j] + c);
#pragma GCC unroll 4
        for (int i = 0; i < R; i++) {
            const Floats at = load(x + i * x_stride + c);
#pragma GCC unroll 4
            for (int j = 0; j < GROUP; j++) own[i][j] += at * columns[j];
        }
    }
    if (c < count)
        for (int i = 0; i < R; i++)
            for (int j = 0; j < GROUP; j++) {
                Floats at = {}, column = {};
                std::memcpy(&at, x + i * x_stride + c, (count - c) * sizeof(float));
                std::memcpy(&column, values[j] + c, (count - c) * sizeof(float));
                own[i][j] += at * column;
            }
#pragma GCC unroll 4
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int j = 0; j < GROUP; j++) sums[i][j] = own[i][j];
}

// Products of `rows` rows of x with `count` rows of the matrix, from `first` on; at most ROWS and BLOCK.
static void multiply_block(const Prepared& m, const float* x, int64_t x_stride, float* y, int64_t y_stride,
                           int64_t rows, int64_t first, int64_t count) {
    constexpr int R = LANES == 16 ? 4 : 2;  // as many as registers hold
    const Decode<Stores> decode = decoder<Stores>(m);
    alignas(64) float values[GROUP][PIECE + SPARE] = {};
    Floats sums_of[2][ROWS][BLOCK];  // of vectors with even, and with odd numbers
    for (int odd = 0; odd < 2; odd++) std::fill(sums_of[odd][0], sums_of[odd][rows], Floats{});
    for (int64_t g = 0; g < count; g += GROUP)
        for (int64_t from = 0; from < m.columns; from += PIECE) {
            const int64_t to = std::min(m.columns, from + PIECE);
            for (int64_t j = 0; j < std::min(GROUP, count - g); j++) {
                Stores to_values = {values[j]};
                decode(m, first + g + j, from, to, to_values);
            }
            for (int odd = 0; odd < 2; odd++) {
                const auto at_odd = (const float(*)[PIECE + SPARE])(values[0] + odd * LANES);
                const float* at = x + from + odd * LANES;
                const int64_t left = to - from - odd * LANES;
                auto sums = (Floats(*)[BLOCK])&sums_of[odd][0][g];
                int64_t i = 0;
                for (; i + R <= rows; i += R)
                    add_products<R>(at + i * x_stride, x_stride, at_odd, left, sums + i);
                for (; i + 2 <= rows; i += 2)
                    add_products<2>(at + i * x_stride, x_stride, at_odd, left, sums + i);
                if (i < rows) add_products<1>(at + i * x_stride, x_stride, at_odd, left, sums + i);
            }
        }
    for (int64_t i = 0; i < rows; i++) {
        for (int j = 0; j < BLOCK; j++) sums_of[0][i][j] += sums_of[1][i][j];
        store_sums(sums_of[0][i], y + i * y_stride + first, count);
    }
}

// As `multiply_block` for R rows of x in the order of Products, which meet values before they are stored anywhere.
// There may be fewer rows: `rows`, the others are 0.
template <int R>
static void multiply_few(const Prepared& m, const float* x, float* y, int64_t y_stride, int64_t rows, int64_t first,
                         int64_t count) {
    const Decode<Products<R>> decode = decoder<Products<R>>(m);
    Products<R> products[BLOCK] = {};
    for (int64_t from = 0; from < m.columns; from += PIECE)  // of x, this much stays in the first-level cache
        for (int64_t j = 0; j < count; j++) {
            products[j].x = x + from * R;
            decode(m, first + j, from, std::min(m.columns, from + PIECE), products[j]);
        }
    for (int64_t i = 0; i < rows; i++) {
        Floats sums_of[BLOCK];
        for (int j = 0; j < BLOCK; j++) sums_of[j] = products[j].sums[0][i] + products[j].sums[1][i];
        store_sums(sums_of, y + i * y_stride + first, count);
    }
}

// Rows of x in the order of Products<R>.
template <int R>
static const float* interleave(const float* x, int64_t x_stride, int64_t rows, int64_t columns) {
    static thread_local Buffer buffer;
    float* to = buffer.get(R * columns);
    for (int64_t c = 0; c < columns; c += LANES)
        for (int64_t i = 0; i < R; i++, to += LANES) store(to, i < rows ? load(x + i * x_stride + c) : Floats{});
    return to - R * columns;
}

// For how many rows of x there is a `multiply_few` that is faster than `multiply_block`; 0 for none.
static INLINE int64_t rows_together(const Matrix& m, int64_t rows) {
    if (m.columns % SPARE != 0) return 0;
    if (LANES == 16 && m.format == Q8_0 && (rows == 3 || rows == 4)) return 4;
    if (LANES == 16 && (m.format == Q8_0 || m.format == FP8) && (rows == 7 || rows == 8)) return 8;
    return rows == 1;
}

static void linear(const Matrix& matrix, int64_t num_rows, const float* x, int64_t x_stride, float* y,
                   int64_t y_stride, int64_t rows) {
    alignas(64) float tables[16 * 256];
    const Prepared m(matrix, tables);
    const int64_t together = m.needs_spare ? 0 : rows_together(m, rows);
    if (together == 4) x = interleave<4>(x, x_stride, rows, m.columns);
    if (together == 8) x = interleave<8>(x, x_stride, rows, m.columns);
    const int64_t num_blocks = (num_rows + BLOCK - 1) / BLOCK;
    parallel_ranges(num_blocks, SMALLEST / (BLOCK * m.columns), [&](int64_t b, int64_t end) {
        for (; b < end; b++) {
            const int64_t first = b * BLOCK, count = std::min(BLOCK, num_rows - first);
            if (together == 1) multiply_few<1>(m, x, y, y_stride, rows, first, count);
            else if (together == 4) multiply_few<4>(m, x, y, y_stride, rows, first, count);
            else if (together == 8) multiply_few<8>(m, x, y, y_stride, rows, first, count);
            else
                for (int64_t top = 0; top < rows; top += ROWS)
                    multiply_block(m, x + top * x_stride, x_stride, y + top * y_stride, y_stride,
                                   std::min(ROWS, rows - top), first, count);
        }
    });
}

// The upper halves of values that are bfloat16.
static INLINE void store_halves(uint16_t* to, const float* from, int64_t count) {
    for (int64_t c = 0; c < count; c++) {
        uint32_t bits;
        std::memcpy(&bits, from + c, sizeof bits);
        to[c] = bits >> 16;
    }
}

static void expand(const Matrix& matrix, void* out, int64_t out_stride, bool as_bf16, int64_t first,
                   int64_t last) {
    alignas(64) float tables[16 * 256];
    const Prepared m(matrix, tables);
    const Decode<Stores> decode = decoder<Stores>(m);
    parallel_ranges(last - first, SMALLEST / m.columns, [&](int64_t n, int64_t end) {
        alignas(64) float values[PIECE + SPARE];
        for (; n < end; n++)
            for (int64_t from = 0; from < m.columns; from += PIECE) {
                const int64_t to = std::min(m.columns, from + PIECE), at = n * out_stride + from;
                float* floats = as_bf16 || m.needs_spare || (to - from) % SPARE ? values : (float*)out + at;
                Stores to_floats = {floats};
                decode(m, first + n, from, to, to_floats);
                if (as_bf16) store_halves((uint16_t*)out + at, values, to - from);
                else if (floats == values) std::memcpy((float*)out + at, values, (to - from) * sizeof(float));
            }
    });
}
