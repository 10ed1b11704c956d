// Products of few float32 rows with a bfloat16 matrix that is read once.
//
// Plain C functions over pointers and strides (in elements), called through ctypes: see native.py for
// the contract. With few rows such a product is bound by reading the matrix. A bfloat16 value is the
// upper half of a float32, so a vector of pairs becomes two vectors by a shift and a mask: even elements
// and odd elements. Sums run in float32, in an order that depends on the vector length alone.
//
// One source for all instruction sets: vectors are GCC's, W floats long, and each entry point is compiled
// for a target and picks the one that the processor has.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "openmp.h"
#include "replay.h"

namespace {

#include "parallel.h"

template <int W> struct Vector {
    typedef float Floats __attribute__((vector_size(4 * W)));
    typedef uint32_t Pairs __attribute__((vector_size(4 * W)));
};

#define INLINE inline __attribute__((always_inline))

template <int W> INLINE typename Vector<W>::Pairs load_pairs(const uint16_t* from) {
    typename Vector<W>::Pairs pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    return pairs;
}

template <int W> INLINE typename Vector<W>::Floats load_floats(const float* from) {
    typename Vector<W>::Floats floats;
    std::memcpy(&floats, from, sizeof floats);
    return floats;
}

template <int W> INLINE typename Vector<W>::Floats even(typename Vector<W>::Pairs pairs) {
    return (typename Vector<W>::Floats)(pairs << 16);
}

template <int W> INLINE typename Vector<W>::Floats odd(typename Vector<W>::Pairs pairs) {
    return (typename Vector<W>::Floats)(pairs & 0xffff0000u);
}

template <int W> INLINE float sum(typename Vector<W>::Floats floats) {
    float total = 0;
    for (int i = 0; i < W; i++) total += floats[i];
    return total;
}

INLINE float to_float(uint16_t bf16) {
    uint32_t bits = (uint32_t)bf16 << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// packed: per 2W elements of a row the even ones, then the odd ones; whole chunks only.
template <int W> INLINE void pack(const float* x, int64_t chunks, float* packed) {
    for (int64_t c = 0; c < chunks; c++, x += 2 * W, packed += 2 * W)
        for (int i = 0; i < W; i++) {
            packed[i] = x[2 * i];
            packed[W + i] = x[2 * i + 1];
        }
}

// y[m, n] = sum over k of x[m, k] * w[n, k] for R rows of x and C rows of w.
template <int W, int R, int C>
INLINE void dot_block(const float* packed, int64_t packed_stride, const float* x, int64_t x_stride,
                      const uint16_t* w, int64_t w_stride, float* y, int64_t y_stride, int64_t k) {
    typedef typename Vector<W>::Floats Floats;
    Floats sums[R][C] = {};
    const int64_t chunks = k / (2 * W);
    for (int64_t c = 0; c < chunks; c++) {
        Floats w_even[C], w_odd[C];
        for (int j = 0; j < C; j++) {
            const uint16_t* at = w + j * w_stride + c * 2 * W;
            // The rows after these: hardware follows a stream only to the end of its page.
            __builtin_prefetch(at + C * w_stride);
            auto pairs = load_pairs<W>(at);
            w_even[j] = even<W>(pairs);
            w_odd[j] = odd<W>(pairs);
        }
        for (int i = 0; i < R; i++) {
            const float* at = packed + i * packed_stride + c * 2 * W;
            Floats x_even = load_floats<W>(at), x_odd = load_floats<W>(at + W);
            for (int j = 0; j < C; j++) sums[i][j] += x_even * w_even[j];
            for (int j = 0; j < C; j++) sums[i][j] += x_odd * w_odd[j];
        }
    }
    for (int i = 0; i < R; i++)
        for (int j = 0; j < C; j++) {
            float total = sum<W>(sums[i][j]);
            for (int64_t e = chunks * 2 * W; e < k; e++)
                total += x[i * x_stride + e] * to_float(w[j * w_stride + e]);
            y[i * y_stride + j] = total;
        }
}

template <int W, int C>
INLINE void dot_columns(const float* packed, int64_t packed_stride, const float* x, int64_t x_stride,
                        const uint16_t* w, int64_t w_stride, float* y, int64_t y_stride, int64_t rows,
                        int64_t k) {
    // The matrix rows stay in the first-level cache while all rows of x meet them.
    int64_t m = 0;
    for (; m + 4 <= rows; m += 4)
        dot_block<W, 4, C>(packed + m * packed_stride, packed_stride, x + m * x_stride, x_stride, w, w_stride,
                           y + m * y_stride, y_stride, k);
    for (; m < rows; m++)
        dot_block<W, 1, C>(packed + m * packed_stride, packed_stride, x + m * x_stride, x_stride, w, w_stride,
                           y + m * y_stride, y_stride, k);
}

template <int W>
INLINE void linear(const float* x, int64_t x_stride, const uint16_t* w, int64_t w_stride, float* y,
                   int64_t y_stride, int64_t rows, int64_t columns, int64_t k) {
    const int64_t chunks = k / (2 * W), packed_stride = chunks * 2 * W;
    static thread_local std::vector<float> buffer;
    buffer.resize(std::max<size_t>(buffer.size(), rows * packed_stride));
    for (int64_t m = 0; m < rows; m++) pack<W>(x + m * x_stride, chunks, buffer.data() + m * packed_stride);
    int64_t n = 0;
    for (; n + 4 <= columns; n += 4)
        dot_columns<W, 4>(buffer.data(), packed_stride, x, x_stride, w + n * w_stride, w_stride, y + n,
                          y_stride, rows, k);
    for (; n < columns; n++)
        dot_columns<W, 1>(buffer.data(), packed_stride, x, x_stride, w + n * w_stride, w_stride, y + n,
                          y_stride, rows, k);
}

constexpr int COMBINE_COLUMNS = 256;  // that a block reads of each row, and a thread has at least
constexpr int COMBINE_AHEAD = 8;      // rows: hardware does not follow strides of a row

// y[c] = sum over d of x[d] * w[d, c] for 2W * P columns that are read together.
template <int W, int P>
INLINE void combine_block(const float* x, const uint16_t* w, int64_t w_stride, float* y, int64_t k) {
    typedef typename Vector<W>::Floats Floats;
    Floats evens[P] = {}, odds[P] = {};
    for (int64_t d = 0; d < k; d++) {
        const float factor = x[d];
        for (int p = 0; p < P; p++) {
            const uint16_t* at = w + d * w_stride + p * 2 * W;
            __builtin_prefetch(at + COMBINE_AHEAD * w_stride);
            auto pairs = load_pairs<W>(at);
            evens[p] += even<W>(pairs) * factor;
            odds[p] += odd<W>(pairs) * factor;
        }
    }
    for (int p = 0; p < P; p++)
        for (int i = 0; i < W; i++) {
            y[p * 2 * W + 2 * i] = evens[p][i];
            y[p * 2 * W + 2 * i + 1] = odds[p][i];
        }
}

template <int W>
INLINE void combine(const float* x, int64_t x_stride, const uint16_t* w, int64_t w_stride, float* y,
                    int64_t y_stride, int64_t rows, int64_t columns, int64_t k) {
    // As many sums as half of the registers hold, if those are the largest.
    constexpr int P = W == 16 ? 8 : 4, STEP = 2 * W * P;
    static_assert(COMBINE_COLUMNS % STEP == 0);
    int64_t c = 0;
    for (; c + STEP <= columns; c += STEP)
        for (int64_t m = 0; m < rows; m++)
            combine_block<W, P>(x + m * x_stride, w + c, w_stride, y + m * y_stride + c, k);
    for (; c + 2 * W <= columns; c += 2 * W)
        for (int64_t m = 0; m < rows; m++)
            combine_block<W, 1>(x + m * x_stride, w + c, w_stride, y + m * y_stride + c, k);
    for (; c < columns; c++)
        for (int64_t m = 0; m < rows; m++) {
            float total = 0;
            for (int64_t d = 0; d < k; d++) total += x[m * x_stride + d] * to_float(w[d * w_stride + c]);
            y[m * y_stride + c] = total;
        }
}

#define ARGUMENTS                                                                                       \
    const float *x, int64_t x_stride, const uint16_t *w, int64_t w_stride, float *y, int64_t y_stride, \
        int64_t rows, int64_t columns, int64_t k
#define VALUES x, x_stride, w, w_stride, y, y_stride, rows, columns, k

#define VARIANT(NAME, TARGET, W)                                  \
    TARGET void linear_##NAME(ARGUMENTS) { linear<W>(VALUES); }   \
    TARGET void combine_##NAME(ARGUMENTS) { combine<W>(VALUES); }

VARIANT(portable, , 4)
#if defined(__x86_64__)
VARIANT(avx2, __attribute__((target("avx2,fma"))), 8)
VARIANT(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512"))), 16)
#define VARIANTS(OP) {OP##_portable, OP##_avx2, OP##_avx512}
#else
#define VARIANTS(OP) {OP##_portable}
#endif

typedef void (*Product)(ARGUMENTS);

const Product LINEAR[] = VARIANTS(linear), COMBINE[] = VARIANTS(combine);

struct Batch {
    int64_t size, x_step, w_step, y_step;
};

constexpr int64_t THREAD_WORK = 32768;  // multiplications that are worth another thread

// Every thread computes some of all matrices' columns; `w_column` is from one to the next in w.
void split(Product product, const Batch& batch, int64_t w_column, int64_t columns_together, ARGUMENTS) {
    const int64_t pieces = (columns + columns_together - 1) / columns_together;
    const int64_t piece_work = std::max<int64_t>(columns_together * k * rows, 1);
    parallel_ranges(batch.size * pieces, THREAD_WORK / piece_work, [&](int64_t piece, int64_t last) {
        while (piece < last) {
            const int64_t b = piece / pieces, end = std::min((b + 1) * pieces, last);
            const int64_t from = (piece - b * pieces) * columns_together;
            const int64_t to = std::min((end - b * pieces) * columns_together, columns);
            product(x + b * batch.x_step, x_stride, w + b * batch.w_step + from * w_column, w_stride,
                    y + b * batch.y_step + from, y_stride, rows, to - from, k);
            piece = end;
        }
    });
}

}  // namespace

extern "C" {

void prefold_linear(int set, int64_t batch, int64_t x_batch, int64_t w_batch, int64_t y_batch, ARGUMENTS) {
    split(LINEAR[set], {batch, x_batch, w_batch, y_batch}, w_stride, 4, VALUES);
}

void prefold_combine(int set, int64_t batch, int64_t x_batch, int64_t w_batch, int64_t y_batch, ARGUMENTS) {
    split(COMBINE[set], {batch, x_batch, w_batch, y_batch}, 1, COMBINE_COLUMNS, VALUES);
}

}  // extern "C"

PREFOLD_REPLAYS(linear)
PREFOLD_REPLAYS(combine)
