// Sums of few numbers over ranks that share memory, for which Python takes ten times as long.
//
// The protocol is that of distributed/shm.py: a rank writes message s into its slot s % num_slots, publishes s,
// reads the others' messages s, and has then consumed s.

#include <cstdint>
#include <cstring>
#include <ctime>

namespace {

// See shared_sum.py. Places are indices into a header.
struct SumArguments {
    int64_t rank, size, num_slots, published, consumed, slot_sizes, spin_ns, is_bfloat16, count, status;
    int64_t* const* headers;  // [size]
    char* const* slots;       // [size * num_slots], where this process has mapped them
    const int64_t* mapped;    // [size * num_slots], bytes of those
    void* x;
};

// NOTHING was done: somebody may still read the slot, or slots are not mapped. PUBLISHED: the others are late.
enum Status { NOTHING, PUBLISHED, DONE };

int64_t read(const int64_t* counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }

int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

// Whether all ranks' counters reach `least` in time.
bool all_reach(const SumArguments& a, int64_t counter, int64_t least) {
    const int64_t end = nanoseconds() + a.spin_ns;
    for (int64_t rank = 0; rank < a.size;) {
        if (read(a.headers[rank] + counter) >= least) {
            rank++;
            continue;
        }
        for (int i = 0; i < 16; i++) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        if (nanoseconds() > end) return false;
    }
    return true;
}

bool is_mapped(const SumArguments& a, int64_t rank, int64_t slot, int64_t bytes) {
    const int64_t mapped = a.mapped[rank * a.num_slots + slot];
    return mapped >= bytes && read(a.headers[rank] + a.slot_sizes + slot) == mapped;
}

float value(float x) { return x; }

float value(uint16_t bfloat16) {
    const uint32_t bits = (uint32_t)bfloat16 << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

void store(float* to, float x) { *to = x; }

// The nearest bfloat16, of two the even one.
void store(uint16_t* to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    *to = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// In the order of the ranks, so that all of them get the same bits.
template <typename T> void sum(const SumArguments& a, int64_t slot) {
    T* x = (T*)a.x;
    constexpr int64_t BLOCK = 256;
    float total[BLOCK];
    for (int64_t start = 0; start < a.count; start += BLOCK) {
        const int64_t count = a.count - start < BLOCK ? a.count - start : BLOCK;
        for (int64_t rank = 0; rank < a.size; rank++) {
            const T* part = (const T*)a.slots[rank * a.num_slots + slot] + start;
            for (int64_t i = 0; i < count; i++) total[i] = rank == 0 ? value(part[i]) : total[i] + value(part[i]);
        }
        for (int64_t i = 0; i < count; i++) store(x + start + i, total[i]);
    }
}

}  // namespace

extern "C" void prefold_shared_sum(int, SumArguments* arguments) {
    SumArguments& a = *arguments;
    a.status = NOTHING;
    int64_t* own = a.headers[a.rank];
    const int64_t sequence = own[a.published] + 1, slot = sequence % a.num_slots;
    const int64_t bytes = a.count * (a.is_bfloat16 ? 2 : 4);
    if (own[a.consumed] != sequence - 1 || !is_mapped(a, a.rank, slot, bytes)) return;
    if (!all_reach(a, a.consumed, sequence - a.num_slots)) return;
    std::memcpy(a.slots[a.rank * a.num_slots + slot], a.x, bytes);
    __atomic_store_n(own + a.published, sequence, __ATOMIC_RELEASE);
    a.status = PUBLISHED;
    if (!all_reach(a, a.published, sequence)) return;
    for (int64_t rank = 0; rank < a.size; rank++)
        if (!is_mapped(a, rank, slot, bytes)) return;
    if (a.is_bfloat16) sum<uint16_t>(a, slot);
    else sum<float>(a, slot);
    __atomic_store_n(own + a.consumed, sequence, __ATOMIC_RELEASE);
    a.status = DONE;
}
