// Calls that are recorded once and made again without Python: see recording.py.

#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

// An argument of a recorded call.
union Slot {
    int64_t integer;
    float real;
    void* address;
};

namespace replay {

template <typename T> inline T argument(const Slot& slot) {
    if constexpr (std::is_pointer_v<T>) return static_cast<T>(slot.address);
    else if constexpr (std::is_floating_point_v<T>) return slot.real;
    else return static_cast<T>(slot.integer);
}

template <typename... T, size_t... I>
inline void call(void (*function)(T...), const Slot* slots, std::index_sequence<I...>) {
    function(argument<T>(slots[I])...);
}

template <typename... T> inline void call(void (*function)(T...), const Slot* slots) {
    call(function, slots, std::index_sequence_for<T...>());
}

}  // namespace replay

// prefold_replay_FUNCTION(slots) is prefold_FUNCTION(arguments from slots, in their order).
#define PREFOLD_REPLAYS(FUNCTION)                                    \
    extern "C" void prefold_replay_##FUNCTION(const Slot* slots) {   \
        replay::call(prefold_##FUNCTION, slots);                     \
    }
