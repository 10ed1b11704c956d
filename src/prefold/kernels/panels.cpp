// Products of tens of float32 rows with a bfloat16 matrix, which is converted where it is multiplied.
//
// A block of the matrix's rows is turned around into a panel that stays in the first-level cache, as float32,
// while all rows meet it; the lines of the next block are fetched meanwhile. Each thread has columns of its own.

#include <cstdint>

#include "replay.h"

namespace {

// See native.py: multiply. Strides are in elements.
struct ProductArguments {
    const float* x;
    int64_t x_stride;
    const uint16_t* w;
    int64_t w_stride;
    float* y;
    int64_t y_stride, rows, columns, depth;
};

}  // namespace

#define KERNEL_SOURCE "panels.inl"
#include "instruction_sets.h"

extern "C" {

void prefold_linear(int set, int64_t batch, int64_t x_batch, int64_t w_batch, int64_t y_batch, const float* x,
                    int64_t x_stride, const uint16_t* w, int64_t w_stride, float* y, int64_t y_stride,
                    int64_t rows, int64_t columns, int64_t k);

void prefold_multiply(int set, const float* x, int64_t x_stride, const uint16_t* w, int64_t w_stride, float* y,
                      int64_t y_stride, int64_t rows, int64_t columns, int64_t depth) {
    constexpr int64_t PANELS_FROM = 24;  // fewer rows do not pay for turning the matrix around
    const ProductArguments a = {x, x_stride, w, w_stride, y, y_stride, rows, columns, depth};
    if (rows >= PANELS_FROM) PREFOLD_DISPATCH(set, product(a));
    else prefold_linear(set, 1, 0, 0, 0, x, x_stride, w, w_stride, y, y_stride, rows, columns, depth);
}

}  // extern "C"

PREFOLD_REPLAYS(multiply)
