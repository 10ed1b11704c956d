// Dense attention: rectangles and causal squares, merged into the running softmax of their rows.
//
// A row is a query head of a token. A head's keys and values are packed once: keys in the lanes of vectors,
// values in columns as wide as what is summed in registers. Then each block of rows walks over them: scores
// are made panel by panel, turned into exponentials, and multiplied with the values. The reference that is
// subtracted before an exponential moves only if scores rise far above it: sums are seldom rescaled.
//
// What is packed are words of 32 bits: a float32, or two bfloat16 that an instruction multiplies at once,
// neighbours in what is summed (elements of a key, and then keys). Sums and exponentials are float32.

#include <cstdint>

namespace {

// See dense.py: attend_. Strides are in elements, `references` and `sums` have rows_per_head per head.
struct DenseArguments {
    int64_t num_kv_heads, dim, v_dim, first_row, num_rows, rows_per_head, rows_per_token, num_keys, is_causal,
        is_bfloat16, products;
    int64_t q_head_stride, q_stride, k_head_stride, k_stride, v_head_stride, v_stride, out_head_stride,
        out_stride, selected_stride;
    const void* q;
    const void* k;
    const void* v;
    float* out;
    float* references;
    float* sums;
    const int64_t* unseen;
    const float* scale;
    const uint64_t* selected;
};

// See dense.py: select_. Strides are in elements.
struct SelectArguments {
    int64_t num_rows, num_indices, num_words, first_key, is_int64, index_stride, selected_stride;
    const void* indices;
    uint64_t* selected;
};

// As dense.py numbers what multiplies bfloat16 as it is, besides the instruction set.
enum Products { WIDENED, PAIRS, TILES, EMULATED_TILES };

}  // namespace

extern "C" int prefold_num_threads();

#define KERNEL_SOURCE "dense.inl"
#define KERNEL_HAS_PAIRS
#define KERNEL_HAS_TILES
#include "instruction_sets.h"

extern "C" void prefold_attend_dense(int set, const DenseArguments* arguments) {
#if defined(__x86_64__)
    if (arguments->products == PAIRS) return avx512_bf16::attend_dense(*arguments);
    if (arguments->products == EMULATED_TILES) return amx_emulated::attend_dense(*arguments);
#endif
#if defined(PREFOLD_HAS_AMX)
    if (arguments->products == TILES) return amx::attend_dense(*arguments);
#endif
    PREFOLD_DISPATCH(set, attend_dense(*arguments));
}

namespace {

template <typename Index> void select_keys(const SelectArguments& a, int64_t row) {
    const Index* indices = (const Index*)a.indices + row * a.index_stride;
    uint64_t* words = a.selected + row * a.selected_stride;
    std::fill(words, words + a.num_words, 0);
    for (int64_t i = 0; i < a.num_indices; i++) {
        const uint64_t key = (uint64_t)indices[i] - (uint64_t)a.first_key;  // what is below is very high
        if (key / 64 < (uint64_t)a.num_words) words[key / 64] |= uint64_t(1) << key % 64;
    }
}

}  // namespace

extern "C" void prefold_select_keys(int, const SelectArguments* arguments) {
    const SelectArguments& a = *arguments;
    const int64_t smallest = 1 + 10000 / (1 + a.num_indices + a.num_words);  // rows that are worth a thread
    portable::parallel_ranges(a.num_rows, smallest, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++)
            a.is_int64 ? select_keys<int64_t>(a, row) : select_keys<int32_t>(a, row);
    });
}
