// A recording's calls, one after the other.

#include "replay.h"

#include <ctime>

namespace {

struct RecordedCall {
    void (*function)(const Slot*);
    const Slot* slots;
};

}  // namespace

extern "C" {

void prefold_replay(int, const RecordedCall* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) calls[i].function(calls[i].slots);
}

// The time in seconds, by the clock of Python's time.perf_counter.
void prefold_note_time(int, double* at) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *at = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

}  // extern "C"

PREFOLD_REPLAYS(note_time)
