// The indexer of sparse attention: scores of keys, and the best of them, without a matrix of scores.
//
// A score is the sum over heads of weight * relu(query . key). Keys lie in the lanes of vectors, so each
// score is computed by itself: over the dims of a head in their order, then over the heads in
// theirs. It is the same bits wherever its key stands in a tile, whichever keys and queries are beside it.

#include <cstdint>

namespace {

// See native.py: index_tile and index_finish. Strides are in elements.
struct IndexArguments {
    int64_t num_queries, num_heads, dim, num_keys, topk, capacity, first_position;
    int64_t q_stride, q_head_stride, weights_stride, key_stride, is_bfloat16;
    const float* q;
    const float* weights;
    const void* keys;
    const int64_t* limits;
    int32_t* orders;
    int32_t* positions;
    int64_t* counts;
    int32_t* thresholds;
};

}  // namespace

#define KERNEL_SOURCE "indexer.inl"
#include "instruction_sets.h"

extern "C" {

void prefold_index_tile(int set, const IndexArguments* arguments) {
    PREFOLD_DISPATCH(set, index_tile(*arguments));
}

void prefold_index_finish(int set, const IndexArguments* arguments) {
    PREFOLD_DISPATCH(set, index_finish(*arguments));
}

}  // extern "C"
