// Products of dense.inl by tiles: sums of up to 2 x 2 tiles at once. Included by it.

// Where tiles lie, in words: rows of one, the one beside it, and the one that is multiplied next.
struct TilePlaces {
    const float* first;
    int64_t row, beside, next;
};

// sums[i][j] += sum over `steps` pairs of tiles, R of a by C of b; or = it, unless they have begun.
template <int R, int C>
static SEPARATE void multiply_tiles(Tiles& tiles, TilePlaces a, TilePlaces b, int64_t steps, float* sums,
                                    int64_t stride, bool has_begun) {
    // Sums in tiles 0 to 3, rows of a in 4 and 5, columns of b in 6 and 7.
    float *const right = sums + TILE, *const below = sums + TILE * stride, *const last = below + TILE;
    if (has_begun) {
        tiles.template load<0>(sums, stride);
        if constexpr (C > 1) tiles.template load<1>(right, stride);
        if constexpr (R > 1) tiles.template load<2>(below, stride);
        if constexpr (R > 1 && C > 1) tiles.template load<3>(last, stride);
    } else {
        tiles.template zero<0>();
        tiles.template zero<1>();
        tiles.template zero<2>();
        tiles.template zero<3>();
    }
    for (; steps > 0; steps--, a.first += a.next, b.first += b.next) {
        tiles.template load<6>(b.first, b.row);
        tiles.template load<4>(a.first, a.row);
        tiles.template multiply<0, 4, 6>();
        if constexpr (C > 1) {
            tiles.template load<7>(b.first + b.beside, b.row);
            tiles.template multiply<1, 4, 7>();
        }
        if constexpr (R > 1) {
            tiles.template load<5>(a.first + a.beside, a.row);
            tiles.template multiply<2, 5, 6>();
        }
        if constexpr (R > 1 && C > 1) tiles.template multiply<3, 5, 7>();
    }
    tiles.template store<0>(sums, stride);
    if constexpr (C > 1) tiles.template store<1>(right, stride);
    if constexpr (R > 1) tiles.template store<2>(below, stride);
    if constexpr (R > 1 && C > 1) tiles.template store<3>(last, stride);
}

// Scores of up to 2 * TILE rows, packed by pack_query_tiles, with a panel of 2 * TILE keys of `words` words.
static void add_score_tiles(Tiles& tiles, const float* q, int64_t num_rows, const float* panel, int64_t words,
                            float* scores, int64_t stride) {
    const TilePlaces a = {q, TILE, TILE * words, TILE * TILE},
                     b = {panel, 2 * TILE, TILE, TILE * 2 * TILE};
    if (num_rows > TILE) multiply_tiles<2, 2>(tiles, a, b, words / TILE, scores, stride, false);
    else multiply_tiles<1, 2>(tiles, a, b, words / TILE, scores, stride, false);
}

// Words of exponentials [num_rows <= 2 * TILE][words], times a column of values [words][columns * TILE], added
// to out [num_rows][elements <= columns * TILE].
static void add_value_tiles(Tiles& tiles, const float* p, int64_t p_stride, int64_t num_rows,
                            const float* values, int64_t columns, int64_t words, int64_t elements, float* out,
                            int64_t out_stride) {
    const TilePlaces a = {p, p_stride, TILE * p_stride, TILE},
                     b = {values, columns * TILE, TILE, columns * TILE * TILE};
    const auto multiply = [&](float* sums, int64_t stride) {
        const int64_t steps = words / TILE;
        if (num_rows > TILE && columns > 1) multiply_tiles<2, 2>(tiles, a, b, steps, sums, stride, true);
        else if (num_rows > TILE) multiply_tiles<2, 1>(tiles, a, b, steps, sums, stride, true);
        else if (columns > 1) multiply_tiles<1, 2>(tiles, a, b, steps, sums, stride, true);
        else multiply_tiles<1, 1>(tiles, a, b, steps, sums, stride, true);
    };
    if (num_rows % TILE == 0 && elements == columns * TILE) return multiply(out, out_stride);
    // Tiles are whole, out is not.
    alignas(64) float sums[2 * TILE][2 * TILE] = {};
    for (int64_t i = 0; i < num_rows; i++) std::memcpy(sums[i], out + i * out_stride, elements * sizeof(float));
    multiply(sums[0], 2 * TILE);
    for (int64_t i = 0; i < num_rows; i++) std::memcpy(out + i * out_stride, sums[i], elements * sizeof(float));
}

// to[word / TILE][row][word % TILE] for TILE rows, 0 for rows and words that there are not.
template <typename T>
static void pack_query_tiles(const T* rows, int64_t stride, int64_t num_rows, int64_t dim, int64_t words, float* to) {
    std::memset(to, 0, TILE * words * sizeof(float));
    for (int64_t i = 0; i < num_rows; i++)
        for (int64_t d = 0; d < dim; d += 2 * TILE)
            std::memcpy(to + d / 2 * TILE + i * TILE, rows + i * stride + d,
                        std::min<int64_t>(dim - d, 2 * TILE) * sizeof(T));
}
