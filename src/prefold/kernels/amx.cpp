// Whether this process may use AMX's tiles of bfloat16. See library.py: has_tiles.

#include "amx.h"

#if defined(PREFOLD_HAS_AMX)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Of the processor: AMX-BF16 and AMX-TILE.
bool processor_has_tiles() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
}

// Of the system: it saves tiles (XCR0's bits 17 and 18) when it switches between threads.
bool system_saves_tiles() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;
    asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (a >> 17 & 3) == 3;
}

// Linux makes room for tiles in a process only if it asks: for all its threads, and those that it forks.
bool process_may_use_tiles() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

}  // namespace

extern "C" int prefold_has_tiles() {
    return processor_has_tiles() && system_saves_tiles() && process_may_use_tiles();
}

#else

extern "C" int prefold_has_tiles() { return 0; }

#endif
