// Whether AMX can be compiled: the compiler's own header of it tells, and that its assembler is as new.

#if defined(__x86_64__) && defined(__linux__)
#if __has_include(<amxbf16intrin.h>)
#define PREFOLD_HAS_AMX
#endif
#endif
