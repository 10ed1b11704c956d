// See panels.cpp. Included once per instruction set.

constexpr int ROWS = LANES == 16 ? 8 : 4;     // whose sums are in registers together,
constexpr int VECTORS = LANES == 16 ? 3 : 2;  // with so many vectors of columns
constexpr int PANEL = VECTORS * LANES;        // columns of a panel
constexpr int64_t DEPTH = 192;                // elements of a panel that fit in the first cache

// sums[R][PANEL] += R rows by a block of a panel.
template <int R>
static inline void multiply_rows(const float* rows, const float* panel, int64_t depth, bool is_first, float* sums) {
    Floats products[R][VECTORS] = {};
    if (!is_first)
#pragma GCC unroll 8
        for (int i = 0; i < R; i++)
#pragma GCC unroll 4
            for (int c = 0; c < VECTORS; c++) products[i][c] = load(sums + i * PANEL + c * LANES);
    multiply_panel(rows, LANES, panel, depth, PANEL, products);
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int c = 0; c < VECTORS; c++) store(sums + i * PANEL + c * LANES, products[i][c]);
}

// What the block after this one will read: hardware follows no stream for so short a way.
static inline void fetch_block(const ProductArguments& a, int64_t column, int64_t d) {
    if (d >= a.depth) d = 0, column += PANEL;
    const int64_t last_column = std::min(column + PANEL, a.columns), bytes = 2 * std::min(DEPTH, a.depth - d);
    for (; column < last_column; column++) {
        const char* at = (const char*)(a.w + column * a.w_stride + d);
        for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(at + byte);
    }
}

// `packed`: per LANES rows [depth][LANES]. Columns from `column` on, one panel's.
static inline void product_columns(const ProductArguments& a, const float* packed, int64_t column) {
    static thread_local Buffer buffer;
    float* panel = buffer.get(DEPTH * PANEL + (a.rows + LANES) * PANEL);
    float* sums = panel + DEPTH * PANEL;
    const int64_t count = std::min<int64_t>(PANEL, a.columns - column);
    for (int64_t d = 0; d < a.depth; d += DEPTH) {
        const int64_t depth = std::min(DEPTH, a.depth - d);
        fetch_block(a, column, d + DEPTH);
        pack_panel(a.w + column * a.w_stride + d, a.w_stride, count, depth, PANEL, panel);
        for (int64_t row = 0; row < a.rows;) {
            const float* rows = packed + row / LANES * LANES * a.depth + d * LANES + row % LANES;
            if (a.rows - row > ROWS / 2) {
                multiply_rows<ROWS>(rows, panel, depth, d == 0, sums + row * PANEL);
                row += ROWS;
            } else {
                multiply_rows<ROWS / 2>(rows, panel, depth, d == 0, sums + row * PANEL);
                row += ROWS / 2;
            }
        }
    }
    for (int64_t row = 0; row < a.rows; row++)
        if (a.depth > 0) std::memcpy(a.y + row * a.y_stride + column, sums + row * PANEL, sizeof(float) * count);
        else std::fill_n(a.y + row * a.y_stride + column, count, 0.0f);
}

static inline void product(const ProductArguments& a) {
    static thread_local Buffer buffer;
    float* packed = buffer.get((a.rows + LANES) * a.depth);
    for (int64_t row = 0; row < a.rows; row += LANES)
        pack_panel(a.x + row * a.x_stride, a.x_stride, a.rows - row, a.depth, LANES, packed + row * a.depth);
    parallel_for((a.columns + PANEL - 1) / PANEL,
                 [&](int64_t panel) { product_columns(a, packed, panel * PANEL); });
}
