// Dense attention: rectangles and causal squares, merged into the running softmax of their rows.
//
// A row is a query head of a token. A head's keys are packed once, with keys in the lanes of vectors; then
// each block of rows walks over them: scores are made panel by panel, turned into exponentials, and
// multiplied with the values as they lie. The reference that is subtracted before an exponential moves only
// if scores rise far above it: sums are seldom rescaled.

#include <cstdint>

namespace {

// See dense.py: attend. Strides are in elements, `references` and `sums` have rows_per_head per head.
struct DenseArguments {
    int64_t num_kv_heads, dim, v_dim, first_row, num_rows, rows_per_head, rows_per_token, num_keys, is_causal;
    int64_t q_head_stride, q_stride, k_head_stride, k_stride, v_head_stride, v_stride, out_head_stride,
        out_stride;
    const float* q;
    const float* k;
    const float* v;
    float* out;
    float* references;
    float* sums;
    const int64_t* unseen;
};

}  // namespace

#define KERNEL_SOURCE "dense.inl"
#include "instruction_sets.h"

extern "C" void prefold_attend_dense(int set, const DenseArguments* arguments) {
    PREFOLD_DISPATCH(set, attend_dense(*arguments));
}
