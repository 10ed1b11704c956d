// What parallel.h needs, outside of all namespaces.

#if defined(_OPENMP)
#include <omp.h>
#endif

// Not 0 where the library has another OpenMP than torch: its pool would know nothing of torch's threads and
// of how many a rank may have.
extern "C" int prefold_is_serial;
