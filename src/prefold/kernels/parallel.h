// Work split over torch's threads: the calling thread's number of them, from the one pool that both have.
// Included within a namespace, after openmp.h. Without OpenMP, or with another than torch's, all runs serially.
//
// A result must not depend on the number of threads: split what is written, never what is summed. Scratch
// memory that is `static thread_local` is each thread's own if the body asks for it. So is the processor's
// mode: NoDenormals belongs into the body, and never around it, as threads keep the mode they are born with.

// Threads that a loop would have here; 1 within one.
static inline int64_t parallel_threads() {
#if defined(_OPENMP)
    return prefold_is_serial || omp_in_parallel() ? 1 : omp_get_max_threads();
#else
    return 1;
#endif
}

// body(first, last) for ranges that cover [0, count), one per thread and nearly of one size, of `smallest`
// indices at least. Entering costs 1 to 2 microseconds while the pool is awake, up to 50 when it sleeps.
template <typename Body>
static inline void parallel_ranges(int64_t count, int64_t smallest, const Body& body) {
#if defined(_OPENMP)
    const int64_t threads = std::min(parallel_threads(), count / std::max<int64_t>(smallest, 1));
    if (threads > 1) {
        // Always the whole team, of which some have nothing to do: the pool ends threads that a smaller
        // team has no use for, and the next larger one has to start them again.
#pragma omp parallel
        {
            const int64_t ranges = std::min<int64_t>(omp_get_num_threads(), threads), i = omp_get_thread_num();
            if (i < ranges) body(count * i / ranges, count * (i + 1) / ranges);
        }
        return;
    }
#endif
    if (count > 0) body(0, count);
}

// body(i) for i in [0, count). What is less than some microseconds should not be cut into several.
template <typename Body> static inline void parallel_for(int64_t count, const Body& body) {
    parallel_ranges(count, 1, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) body(i);
    });
}
