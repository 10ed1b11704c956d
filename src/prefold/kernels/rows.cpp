// Attention of few queries to rows of the cache that lie anywhere, read once and shared by query heads.
//
// Rows are copied to a tile of float32 that stays in the first-level cache, where all query heads meet them:
// scores are dot products over the elements, so a vector holds elements of a row, and no row is turned
// around. While a tile is computed the rows of the next one are fetched. A score is subtracted a reference
// before its exponential, which moves only if scores rise far above it: sums are seldom rescaled.

#include <cstdint>

namespace {

// See rows.py: attend. Strides, offsets and steps are in elements.
struct RowsArguments {
    int64_t num_queries, num_kv_heads, heads_per_kv_head, dim, v_dim, num_slots;
    int64_t q_stride, q_head_stride, row_stride, slots_stride, out_stride, out_head_stride, lse_stride,
        lse_head_stride;
    int64_t key_offset, key_step, value_offset, value_step, is_bfloat16, are_slots_int64;
    const float* q;
    const void* cache;
    const void* slots;
    float* out;
    float* lse;
};

}  // namespace

#define KERNEL_SOURCE "rows.inl"
#include "instruction_sets.h"

extern "C" void prefold_attend_rows(int set, const RowsArguments* arguments, float scale) {
    PREFOLD_DISPATCH(set, attend_rows(*arguments, scale));
}
