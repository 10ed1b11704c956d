// Quantised matrices in memory: their values, and products of few float32 rows with them.
//
// See quantized.py for the contract, and how each format lies in memory. Rows are decoded in pieces, four
// rows at a time, into a buffer that stays in the first-level cache, where all rows of x meet them: a product
// reads the codes once. Values are those of the formats' definitions, rounded in float32 in the same places,
// and then to bfloat16 if the matrix asks for it. None depends on the instruction set, nor on whether the
// compiler fuses a multiplication with an addition: products of scale and code are short enough to be exact.

#include <cstdint>

#include "replay.h"

namespace {

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

}  // namespace

#define KERNEL_SOURCE "quantized.inl"
#include "instruction_sets.h"

extern "C" {

// y[i, n] = sum over k of x[i, k] * value[n, k] for n < num_rows.
void prefold_quantized_linear(int set, const Matrix* m, int64_t num_rows, const float* x, int64_t x_stride,
                              float* y, int64_t y_stride, int64_t rows) {
    PREFOLD_DISPATCH(set, linear(*m, num_rows, x, x_stride, y, y_stride, rows));
}

// Rows [first, last) as float32, or as bfloat16 (of a matrix whose values are rounded to it).
void prefold_quantized_expand(int set, const Matrix* m, void* out, int64_t out_stride, int as_bf16,
                              int64_t first, int64_t last) {
    PREFOLD_DISPATCH(set, expand(*m, out, out_stride, as_bf16, first, last));
}

}  // extern "C"

PREFOLD_REPLAYS(quantized_linear)
