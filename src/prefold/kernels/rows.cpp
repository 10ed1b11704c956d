// Attention of few queries to rows of the cache, wherever they lie, read once and shared by query heads.
//
// A query's rows are taken in splits of SPLIT rows, whose results are merged in their order: so threads share
// the work, also that of a single query, and their number does not show in a result. Within a split rows are
// copied to a tile of float32 that stays in the first-level cache, where all query heads meet them:
// scores are dot products over the elements, so a vector holds elements of a row, and no row is turned
// around. Only where heads fill vectors each takes a lane (rows_wide.inl), and few heads take rows as they are
// stored. While a tile is computed the rows of the next one are fetched. A score is subtracted a reference
// before its exponential, which moves only if scores rise far above it: sums are seldom rescaled.

#include <cstdint>

#include "replay.h"

namespace {

// See rows.py. `bytes_per_row` are those that queries need. Strides, offsets and steps are in elements, in FP8 of the rows that are stored; `window` is 0
// for none. `slots` say which rows a query attends to, or with a block size `tables`, `lengths` and `blocks`.
struct RowsArguments {
    int64_t num_queries, num_kv_heads, heads_per_kv_head, dim, v_dim;
    int64_t q_stride, q_head_stride, row_stride, out_stride, out_head_stride, lse_stride, lse_head_stride;
    int64_t key_step, value_offset, value_step, bytes_per_element, bytes_per_row, num_scaled, head_dim, num_rotary;
    int64_t num_slots, slots_stride, are_slots_int64, blocks_stride, block_size, window;
    const float* q;
    const void* cache;
    const void* slots;
    const int64_t* blocks;
    const int64_t* tables;
    const int64_t* lengths;
    float* out;
    float* lse;
};

}  // namespace

#define KERNEL_SOURCE "rows.inl"
#include "instruction_sets.h"

extern "C" void prefold_attend_rows(int set, const RowsArguments* arguments, float scale) {
    PREFOLD_DISPATCH(set, attend_rows(*arguments, scale));
}

PREFOLD_REPLAYS(attend_rows)
