// What lies between matrix products: norms, rotations, gates, the choice of experts; and the experts of few rows.
//
// Each is one pass over its rows, where torch makes several and each costs microseconds of its own. Sums and
// functions are float32; activations are float32 or bfloat16, and are rounded where torch rounds them.

#include <cstdint>

#include "replay.h"

namespace {

// See fused.py. Strides are in elements.
struct NormArguments {
    int64_t num_rows, num_heads, size, x_stride, x_head_stride, residual_stride, out_stride, out_head_stride;
    const void* x;
    void* residual;
    const void* weight;
    void* out;
    float eps;
};

struct RotateArguments {
    int64_t num_rows, num_heads, dim, x_stride, x_head_stride, out_stride, out_head_stride, is_interleaved;
    const void* x;
    const float* angles;
    void* out;
};

struct RouteArguments {
    int64_t num_rows, num_experts, top_k, num_groups, top_groups, is_softmax, sums_two, is_normalised;
    const float* logits;
    const float* bias;
    float* weights;
    int64_t* ids;
    float scale;
};

struct ScoreArguments {
    int64_t num_rows, num_experts, size, x_stride;
    const void* x;
    const float* weight;
    float* scores;
};

struct CopyArguments {
    int64_t num_rows, width, x_stride, out_stride;
    const void* x;
    const int64_t* from;
    const int64_t* to;
    void* out;
};

}  // namespace

#define KERNEL_SOURCE "fused.inl"
#include "instruction_sets.h"

extern "C" {

void prefold_multiply(int set, const float* x, int64_t x_stride, const uint16_t* w, int64_t w_stride, float* y,
                      int64_t y_stride, int64_t rows, int64_t columns, int64_t depth);

void prefold_normalise(int set, int is_bfloat16, int64_t num_rows, int64_t num_heads, int64_t size,
                       const void* x, int64_t x_stride, int64_t x_head_stride, void* residual,
                       int64_t residual_stride, const void* weight, void* out, int64_t out_stride,
                       int64_t out_head_stride, float eps) {
    const NormArguments a = {num_rows, num_heads, size, x_stride, x_head_stride, residual_stride, out_stride,
                             out_head_stride, x, residual, weight, out, eps};
    if (is_bfloat16) PREFOLD_DISPATCH(set, normalise<uint16_t>(a));
    else PREFOLD_DISPATCH(set, normalise<float>(a));
}

void prefold_rotate(int set, int is_bfloat16, int64_t num_rows, int64_t num_heads, int64_t dim, const void* x,
                    int64_t x_stride, int64_t x_head_stride, const float* angles, void* out,
                    int64_t out_stride, int64_t out_head_stride, int is_interleaved) {
    const RotateArguments a = {num_rows, num_heads, dim, x_stride, x_head_stride, out_stride, out_head_stride,
                               is_interleaved, x, angles, out};
    if (is_bfloat16) PREFOLD_DISPATCH(set, rotate<uint16_t>(a));
    else PREFOLD_DISPATCH(set, rotate<float>(a));
}

void prefold_gate(int set, int is_bfloat16, void* rows, int64_t stride, int64_t num_rows, int64_t width) {
    if (is_bfloat16) PREFOLD_DISPATCH(set, gate<uint16_t>(rows, stride, num_rows, width));
    else PREFOLD_DISPATCH(set, gate<float>(rows, stride, num_rows, width));
}

void prefold_copy_rows(int set, int from_bfloat16, int to_bfloat16, int64_t num_rows, int64_t width,
                       const void* x, int64_t x_stride, const int64_t* from, void* out, int64_t out_stride,
                       const int64_t* to) {
    const CopyArguments a = {num_rows, width, x_stride, out_stride, x, from, to, out};
    if (from_bfloat16) PREFOLD_DISPATCH(set, copy_rows<uint16_t>(a, to_bfloat16));
    else PREFOLD_DISPATCH(set, copy_rows<float>(a, to_bfloat16));
}

void prefold_scale_add(int set, int is_bfloat16, void* rows, int64_t stride, int64_t num_rows, int64_t width,
                       float scale, const void* bias) {
    if (is_bfloat16)
        PREFOLD_DISPATCH(set, scale_add((uint16_t*)rows, stride, num_rows, width, scale, (const uint16_t*)bias));
    else PREFOLD_DISPATCH(set, scale_add((float*)rows, stride, num_rows, width, scale, (const float*)bias));
}

void prefold_score(int set, int is_bfloat16, int64_t num_rows, int64_t num_experts, int64_t size, const void* x,
                   int64_t x_stride, const float* weight, float* scores) {
    const ScoreArguments a = {num_rows, num_experts, size, x_stride, x, weight, scores};
    if (is_bfloat16) PREFOLD_DISPATCH(set, score<uint16_t>(a));
    else PREFOLD_DISPATCH(set, score<float>(a));
}

void prefold_route(int set, int64_t num_rows, int64_t num_experts, int64_t top_k, int64_t num_groups,
                   int64_t top_groups, int is_softmax, int sums_two, int is_normalised, const float* logits,
                   const float* bias, float* weights, int64_t* ids, float scale) {
    const RouteArguments a = {num_rows, num_experts, top_k, num_groups, top_groups, is_softmax, sums_two,
                              is_normalised, logits, bias, weights, ids, scale};
    PREFOLD_DISPATCH(set, route(a));
}

// Rows of one expert at a time: their products share its weights.
void prefold_experts(int set, int64_t num_rows, int64_t top_k, int64_t hidden, int64_t width, int64_t first,
                     int64_t num_experts, const float* x, int64_t x_stride, const float* weights,
                     int64_t weights_stride, const int64_t* ids, int64_t ids_stride, const uint16_t* gate_up,
                     const uint16_t* down, float* out, int64_t out_stride) {
    static thread_local std::vector<std::vector<int64_t>> pairs_of;
    static thread_local Buffer buffer;
    pairs_of.resize(std::max<size_t>(pairs_of.size(), num_experts));
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t i = 0; i < top_k; i++) {
            const int64_t expert = ids[row * ids_stride + i] - first;
            if (expert >= 0 && expert < num_experts) pairs_of[expert].push_back(row * top_k + i);
        }
    for (int64_t expert = 0; expert < num_experts; expert++) {
        auto& pairs = pairs_of[expert];
        const int64_t count = pairs.size();
        if (count == 0) continue;
        float* rows = buffer.get(count * (2 * hidden + 2 * width));
        float *gated = rows + count * hidden, *result = gated + count * 2 * width;
        for (int64_t i = 0; i < count; i++)
            std::memcpy(rows + i * hidden, x + pairs[i] / top_k * x_stride, sizeof(float) * hidden);
        prefold_multiply(set, rows, hidden, gate_up + expert * 2 * width * hidden, hidden, gated, 2 * width, count,
                         2 * width, hidden);
        prefold_gate(set, 0, gated, 2 * width, count, width);
        prefold_multiply(set, gated, 2 * width, down + expert * hidden * width, width, result, hidden, count,
                         hidden, width);
        for (int64_t i = 0; i < count; i++) {
            const int64_t row = pairs[i] / top_k;
            const float factor = weights[row * weights_stride + pairs[i] % top_k];
            PREFOLD_DISPATCH(set, add_row(out + row * out_stride, result + i * hidden, factor, hidden));
        }
        pairs.clear();
    }
}

// down(silu(gate(x)) * up(x)) of few rows.
void prefold_gated_mlp(int set, int64_t num_rows, int64_t hidden, int64_t width, const float* x,
                       int64_t x_stride, const uint16_t* gate_up, const uint16_t* down, float* out,
                       int64_t out_stride) {
    static thread_local Buffer buffer;
    float* gated = buffer.get(num_rows * 2 * width);
    prefold_multiply(set, x, x_stride, gate_up, hidden, gated, 2 * width, num_rows, 2 * width, hidden);
    prefold_gate(set, 0, gated, 2 * width, num_rows, width);
    prefold_multiply(set, gated, 2 * width, down, width, out, out_stride, num_rows, hidden, width);
}

}  // extern "C"

PREFOLD_REPLAYS(normalise)
PREFOLD_REPLAYS(rotate)
PREFOLD_REPLAYS(gate)
PREFOLD_REPLAYS(copy_rows)
PREFOLD_REPLAYS(scale_add)
PREFOLD_REPLAYS(score)
PREFOLD_REPLAYS(route)
PREFOLD_REPLAYS(experts)
PREFOLD_REPLAYS(gated_mlp)
