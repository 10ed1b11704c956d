// A thread's eight tiles, of 16 rows of 16 words: float32, or two bfloat16 each. Included after vectors.h, once
// per instruction set: as AMX has them (PREFOLD_TILES 1), emulated in memory for tests (2), or none.

constexpr int TILE = 16;

#if !defined(PREFOLD_TILES)
constexpr bool HAS_TILES = false;
struct Tiles {  // never called
    template <int> void zero() {}
    template <int> void load(const float*, int64_t) {}
    template <int> void store(float*, int64_t) const {}
    template <int, int, int> void multiply() {}
};
#else
constexpr bool HAS_TILES = true;
#endif

#if defined(PREFOLD_TILES) && PREFOLD_TILES == 1

// While it exists, the thread has tiles: the system saves them at each switch, so it must not keep them.
// Tiles are named in the instruction, and strides are in words.
//
// Not by the compiler's intrinsics: those of GCC 12 do not say that they read memory, so that what was written
// before might come too late.
class Tiles {
public:
    INLINE Tiles() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
        } shapes;
        static_assert(sizeof shapes == 64, "as the instruction reads it");
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }
    INLINE ~Tiles() { asm volatile("tilerelease" ::: "memory"); }
    Tiles(const Tiles&) = delete;

    template <int T>
    INLINE void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(T));
    }

    template <int T>
    INLINE void load(const float* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(4 * stride), "i"(T) : "memory");
    }

    template <int T>
    INLINE void store(float* to, int64_t stride) const {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(4 * stride), "i"(T) : "memory");
    }

    // sums[i][j] += the sum over words k of the two products of a[i][k] and b[k][j].
    template <int SUMS, int A, int B>
    INLINE void multiply() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
    }
};

#elif defined(PREFOLD_TILES)

// As the class above. To the bit if the processor takes denormal numbers for 0 (NoDenormals), as tiles do.
class Tiles {
public:
    template <int T>
    void zero() {
        std::memset(tiles_[T], 0, sizeof tiles_[T]);
    }

    template <int T>
    void load(const float* from, int64_t stride) {
        for (int i = 0; i < TILE; i++) std::memcpy(tiles_[T][i], from + i * stride, sizeof tiles_[T][i]);
    }

    template <int T>
    void store(float* to, int64_t stride) const {
        for (int i = 0; i < TILE; i++) std::memcpy(to + i * stride, tiles_[T][i], sizeof tiles_[T][i]);
    }

    template <int SUMS, int A, int B>
    void multiply() {
        multiply(tiles_[SUMS], tiles_[A], tiles_[B]);
    }

private:
    alignas(64) float tiles_[8][TILE][TILE];

    // A word's first elements are summed by themselves, and so are its second, a rounding after each product.
    static __attribute__((noinline)) void multiply(float (*sums)[TILE], const float (*a)[TILE],
                                                   const float (*b)[TILE]) {
        for (int i = 0; i < TILE; i++) {
            Floats firsts = {}, seconds = {};
            for (int k = 0; k < TILE; k++) {
                uint32_t word;
                std::memcpy(&word, &a[i][k], sizeof word);
                const Bits row = word - Bits{}, column = bits(b[k]);
                firsts = _mm512_fmadd_ps((Floats)(row << 16), (Floats)(column << 16), firsts);
                seconds = _mm512_fmadd_ps((Floats)(row & UPPER), (Floats)(column & UPPER), seconds);
            }
            const Floats all = (Floats)bits(sums[i]) + (firsts + seconds);
            std::memcpy(sums[i], &all, sizeof all);
        }
    }

    static Bits bits(const float* from) {
        Bits words;
        std::memcpy(&words, from, sizeof words);
        return words;
    }

    static constexpr uint32_t UPPER = 0xffff0000u;
};

#endif
