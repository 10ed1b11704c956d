// Rows of the KV cache in FP8: see fp8.py for the format and the contract.

#include <cstdint>

#include "replay.h"

namespace {

// Strides are in elements of the tensors, which are bytes, float32 and bfloat16.
struct FP8Arguments {
    int64_t num_rows, num_heads, head_dim, rotary_dim;
    int64_t stored_stride, rows_stride;
    uint8_t* stored;
    float* floats;
    uint16_t* halves;
};

}  // namespace

#define KERNEL_SOURCE "fp8.inl"
#include "instruction_sets.h"

extern "C" {

void prefold_fp8_encode(int set, const FP8Arguments* arguments) { PREFOLD_DISPATCH(set, fp8_encode(*arguments)); }

void prefold_fp8_decode(int set, const FP8Arguments* arguments) { PREFOLD_DISPATCH(set, fp8_decode(*arguments)); }

}  // extern "C"

PREFOLD_REPLAYS(fp8_encode)
