// Compiles the file KERNEL_SOURCE once per instruction set, each into a namespace of its own.
//
// A kernel is written once, with the vectors of vectors.h and the loops of parallel.h; entry points pick a
// namespace with PREFOLD_DISPATCH. Everything that is included from here must come without includes of its own.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "amx.h"
#include "openmp.h"

#define INLINE inline __attribute__((always_inline))

// As prefold_instruction_set and INSTRUCTION_SETS in library.py number them.
enum InstructionSet { PORTABLE, AVX2, AVX512 };

// Scratch memory that begins with a cache line. Contents are lost when it grows.
class Buffer {
public:
    float* get(size_t count) {
        if (floats_.size() < count + 16) floats_ = std::vector<float>(count + 16);
        const auto misplaced = reinterpret_cast<uintptr_t>(floats_.data()) % 64;
        return floats_.data() + (misplaced ? (64 - misplaced) / sizeof(float) : 0);
    }

private:
    std::vector<float> floats_;
};

#define PREFOLD_LANES 4
namespace portable {
namespace {
#include "vectors.h"
#include "parallel.h"
#include KERNEL_SOURCE
}
}
#undef PREFOLD_LANES

#if defined(__x86_64__)

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define PREFOLD_LANES 8
namespace avx2 {
namespace {
#include "vectors.h"
#include "parallel.h"
#include KERNEL_SOURCE
}
}
#undef PREFOLD_LANES
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512")
#define PREFOLD_LANES 16
namespace avx512 {
namespace {
#include "vectors.h"
#include "parallel.h"
#include KERNEL_SOURCE
}
}
#undef PREFOLD_LANES
#pragma GCC pop_options

// AVX512 with products of bfloat16 pairs, for kernels that ask for it.
#if defined(KERNEL_HAS_PAIRS)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,prefer-vector-width=512")
#define PREFOLD_LANES 16
#define PREFOLD_PAIRS
namespace avx512_bf16 {
namespace {
#include "vectors.h"
#include "parallel.h"
#include KERNEL_SOURCE
}
}
#undef PREFOLD_PAIRS
#undef PREFOLD_LANES
#pragma GCC pop_options
#endif

// That with tiles of AMX, and with emulated ones, for kernels that ask for them.
#if defined(KERNEL_HAS_TILES)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,prefer-vector-width=512")
#define PREFOLD_LANES 16
#define PREFOLD_PAIRS
#if defined(PREFOLD_HAS_AMX)
#define PREFOLD_TILES 1
namespace amx {
namespace {
#include "vectors.h"
#include "parallel.h"
#include KERNEL_SOURCE
}
}
#undef PREFOLD_TILES
#endif
#define PREFOLD_TILES 2
namespace amx_emulated {
namespace {
#include "vectors.h"
#include "parallel.h"
#include KERNEL_SOURCE
}
}
#undef PREFOLD_TILES
#undef PREFOLD_PAIRS
#undef PREFOLD_LANES
#pragma GCC pop_options
#endif

#define PREFOLD_DISPATCH(SET, CALL)            \
    do {                                       \
        if ((SET) == AVX512) avx512::CALL;     \
        else if ((SET) == AVX2) avx2::CALL;    \
        else portable::CALL;                   \
    } while (0)
#else
#define PREFOLD_DISPATCH(SET, CALL) portable::CALL
#endif
