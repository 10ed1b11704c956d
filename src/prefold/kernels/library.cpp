// What library.py asks of the library as a whole.

#include <algorithm>
#include <cstdint>

#include "openmp.h"
#include "prefold_sources.h"  // made by setup.py

namespace {

#include "parallel.h"

// As instruction_sets.h and INSTRUCTION_SETS in library.py number them.
enum InstructionSet { PORTABLE, AVX2, AVX512 };

}  // namespace

extern "C" {

int prefold_is_serial = 0;

// The best instruction set that this processor has.
int prefold_instruction_set() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return PORTABLE;
}

// By which library.py knows whether the library is that of the sources beside it.
const char* prefold_sources() { return PREFOLD_SOURCES; }

// Whether it multiplies pairs of bfloat16, besides AVX512.
int prefold_has_pairs() {
#if defined(__x86_64__)
    return prefold_instruction_set() == AVX512 && __builtin_cpu_supports("avx512bf16");
#else
    return 0;
#endif
}

// Whether it does so at the full rate, twice that of float32. Intel's processors do at half of it.
int prefold_has_fast_pairs() {
#if defined(__x86_64__)
    return prefold_has_pairs() && !__builtin_cpu_is("intel");
#else
    return 0;
#endif
}

// Threads that kernels take when the calling thread calls them: torch's number, or 1 without OpenMP.
int prefold_num_threads() { return (int)parallel_threads(); }

}  // extern "C"
