// See rows.cpp. Included once per instruction set.

#include "rows_stored.inl"
#include "rows_tile.inl"
#include "rows_wide.inl"

constexpr int64_t SPLIT = 512;  // rows whose results are summed before they are merged with others

// Whether a value is the beginning of its key.
static INLINE bool is_shared(const RowsArguments& a) {
    return a.value_offset == 0 && (a.num_kv_heads == 1 || a.value_step == a.key_step);
}

// A running softmax of all heads of a query: [heads][v_width], then [heads][LANES] references and sums, of which
// a head's first ones count (see HeadsState for what they are while rows are added).
struct Softmax {
    float* out;
    float* reference;
    float* sum;

    Softmax(float* at, int64_t heads, int64_t v_width)
        : out(at), reference(at + heads * v_width), sum(reference + heads * LANES) {}
    static int64_t size(int64_t heads, int64_t v_width) { return heads * (v_width + 2 * LANES); }
};

// Add what one head got from other rows; both may have seen none.
static INLINE void merge_head(Softmax& into, const Softmax& from, int64_t head, int64_t v_width) {
    const float sum = from.sum[head * LANES], reference = from.reference[head * LANES];
    float &own_sum = into.sum[head * LANES], &own_reference = into.reference[head * LANES];
    if (sum == 0) return;
    const float top = own_sum == 0 ? reference : std::max(own_reference, reference);
    const float share = own_sum == 0 ? 0.0f : exp2(splat(own_reference - top))[0];
    const float other = exp2(splat(reference - top))[0];
    float* out = into.out + head * v_width;
    const float* more = from.out + head * v_width;
    for (int64_t e = 0; e < v_width; e += LANES) store(out + e, load(out + e) * share + load(more + e) * other);
    own_sum = own_sum * share + sum * other;
    own_reference = top;
}

// Which rows a query attends to, in splits.
template <typename T> struct RowsOf {
    const RowsArguments& a;
    int64_t query;

    bool is_paged() const { return a.block_size > 0; }

    // Of the numbers [first, last) that a query's rows have; a window may begin in the middle of a split.
    int64_t first() const {
        return !is_paged() || !a.window ? 0 : std::max<int64_t>(0, a.lengths[query] - a.window);
    }
    int64_t last() const { return is_paged() ? a.lengths[query] : a.num_slots; }
    int64_t first_split() const { return first() / SPLIT; }
    int64_t num_splits() const { return last() > first() ? (last() - 1) / SPLIT + 1 - first_split() : 1; }

    // The rows of a split, and a tile of those behind it, to be fetched. Returns how many are the split's.
    int64_t collect(int64_t split, std::vector<const T*>& rows) const {
        const int64_t start = std::max(first(), split * SPLIT), end = std::min(last(), (split + 1) * SPLIT);
        rows.clear();
        add(start, end, rows);
        const int64_t count = rows.size();
        add(std::max(start, end), std::min(last(), end + MOST_ROWS), rows);
        return count;
    }

    void add(int64_t start, int64_t end, std::vector<const T*>& rows) const {
        const T* cache = (const T*)a.cache;
        if (!is_paged()) {
            for (int64_t at = query * a.slots_stride + start; start < end; start++, at++) {
                const int64_t slot =
                    a.are_slots_int64 ? ((const int64_t*)a.slots)[at] : ((const int32_t*)a.slots)[at];
                if (slot >= 0) rows.push_back(cache + slot * a.row_stride);
            }
            return;
        }
        const int64_t* blocks = a.blocks + a.tables[query] * a.blocks_stride;
        while (start < end) {
            const int64_t block = start / a.block_size, stop = std::min(end, (block + 1) * a.block_size);
            const T* row = cache + (blocks[block] * a.block_size + start % a.block_size) * a.row_stride;
            for (; start < stop; start++, row += a.row_stride) rows.push_back(row);
        }
    }
};

// One thread's scratch memory.
template <typename T> struct Scratch {
    std::vector<const T*> rows;
    Buffer buffer;
    float *tile, *values, *scores, *q, *whole, *part;  // tile and values: of Wide its chunks and its strip

    void prepare(const RowsArguments& a, int64_t width, int64_t v_width) {
        const int64_t heads = a.num_kv_heads * a.heads_per_kv_head, size = Softmax::size(heads, v_width);
        const int64_t of_tile = std::max<int64_t>(TILE_ROWS * width, 2 * CHUNK);
        const int64_t of_values = std::max<int64_t>(TILE_ROWS * v_width, MOST_ROWS * STRIP);
        const int64_t of_scores = (MOST_ROWS + 1) * LANES, of_part = std::max(size, heads * width);
        const int64_t sizes[] = {of_tile, of_values, of_scores, heads * width, size, of_part};
        float** parts[] = {&tile, &values, &scores, &q, &whole, &part};
        int64_t total = 0;
        for (const int64_t one : sizes) total += padded(one);
        float* at = buffer.get(total);
        for (int i = 0; i < 6; i++) {
            *parts[i] = at;
            at += padded(sizes[i]);
        }
    }
};

// Rows [first, first + present) of scratch.rows for one KV head, in a tile or as they are stored.
template <typename T>
static INLINE void find_rows(const RowsArguments& a, Scratch<T>& scratch, int64_t first, int64_t present,
                             int64_t kv_head, int64_t width, int64_t v_width, Tile<T>& tile) {
    const int64_t key = kv_head * a.key_step, value = a.value_offset + kv_head * a.value_step;
    const bool shares = is_shared(a);
    tile.keys = scratch.tile;
    tile.values = shares ? scratch.tile : scratch.values;
    tile.value_stride = shares ? width : v_width;
    tile.dim = a.dim;
    for (int64_t j = 0; j < TILE_ROWS; j++) {
        // The scores of rows that are not there are replaced.
        const T* row = scratch.rows[first + std::min(j, present - 1)];
        tile.stored[j] = row + key;
        if constexpr (sizeof(T) == 1) {
            if (j < present) copy_row(a, row, key, a.dim, scratch.tile + j * width);
        } else {
            copy_end(row + key, a.dim, scratch.tile + j * width);
        }
        if (!shares && j < present) copy_row(a, row, value, a.v_dim, scratch.values + j * v_width);
    }
}

template <typename T>
static INLINE void find_rows(const RowsArguments& a, Scratch<T>& scratch, int64_t first, int64_t present,
                             int64_t kv_head, int64_t, int64_t, Wide<T>& wide) {
    wide.chunks = scratch.tile;
    wide.strip = scratch.values;
    wide.key = kv_head * a.key_step;
    wide.value = a.value_offset + kv_head * a.value_step;
    // Of a value that is the beginning of its key, a pair of vectors may have elements behind it.
    wide.value_dim = is_shared(a) ? a.dim : a.v_dim;
    wide.has_factors = sizeof(T) == 1 && is_shared(a) && a.num_kv_heads == 1 && a.num_scaled == a.head_dim &&
                       a.num_scaled % PAIR == 0 && a.v_dim <= a.num_scaled && a.num_scaled <= a.dim;
    wide.num_plain = sizeof(T) > 1 ? std::max(a.dim, a.v_dim) : wide.has_factors ? a.num_scaled : 0;
    for (int64_t j = 0; j < wide.ROWS; j++) {
        // The scores of rows that are not there are replaced.
        wide.rows[j] = scratch.rows[first + std::min(j, present - 1)];
        if constexpr (sizeof(T) == 1) wide.factors[j] = code_factor(wide.rows[j][2 * a.num_rotary + a.num_scaled]);
    }
}

template <typename T>
static INLINE void find_rows(const RowsArguments& a, Scratch<T>& scratch, int64_t first, int64_t present,
                             int64_t kv_head, int64_t, int64_t, Direct<T>& direct) {
    const int64_t key = kv_head * a.key_step, value = a.value_offset + kv_head * a.value_step;
    uint8_t exponents[2][TILE_ROWS];
    const int64_t key_head = a.num_scaled + key / a.head_dim, value_head = a.num_scaled + value / a.head_dim;
    for (int64_t j = 0; j < TILE_ROWS; j++) {
        const T* row = scratch.rows[first + std::min(j, present - 1)];
        direct.keys[j] = row + key;
        direct.values[j] = row + value;
        if constexpr (sizeof(T) == 1) {
            exponents[0][j] = row[key_head];
            exponents[1][j] = row[value_head];
        }
    }
    if constexpr (sizeof(T) == 1) {
        code_factors(exponents[0], direct.key_factors);
        code_factors(exponents[1], direct.value_factors);
    }
}

// Whether few enough heads share a key for reading it as it is stored, instead of from a tile.
static INLINE bool is_direct(const RowsArguments& a) {
    const int64_t group = a.heads_per_kv_head;
    const bool is_one_group = group == 1 || group == 2 || group == 4 || (group == 8 && LANES >= 8);
    const bool is_aligned = a.dim % PAIR == 0 && a.v_dim % PAIR == 0;
    // Keys and values of a head in FP8 have one exponent.
    const bool has_factors = a.bytes_per_element > 1 || (a.num_rotary == 0 && a.dim <= a.head_dim && a.v_dim <= a.head_dim);
    return !is_shared(a) && is_one_group && is_aligned && has_factors;
}

// Whether heads that share a key fill vectors.
static INLINE bool is_wide(const RowsArguments& a) { return !is_direct(a) && a.heads_per_kv_head % LANES == 0; }

// All heads of a query over rows[0, count): keys and values are parts of a row.
template <typename T, typename Rows>
static void attend_split(const RowsArguments& a, Scratch<T>& scratch, int64_t count, Softmax to, int64_t width,
                         int64_t v_width) {
    const int64_t group = a.heads_per_kv_head, heads = a.num_kv_heads * group;
    std::fill(to.out, to.out + heads * v_width, 0.0f);
    std::fill(to.reference, to.reference + heads * LANES, LOWEST);
    std::fill(to.sum, to.sum + heads * LANES, 0.0f);
    const int64_t last = (int64_t)scratch.rows.size() - 1;
    Rows rows;
    Ahead ahead;
    ahead.num_lines = (a.bytes_per_row + 63) / 64;
    const int64_t pauses = a.num_kv_heads * Rows::num_pauses(group, width, v_width);
    ahead.portion = Rows::ROWS * ahead.num_lines / std::max<int64_t>(pauses, 1) + 1;
    for (int64_t first = 0; first < count; first += Rows::ROWS) {
        const int64_t present = std::min<int64_t>(count - first, Rows::ROWS);
        for (int64_t j = 0; j < Rows::ROWS; j++)
            ahead.rows[j] = (const char*)scratch.rows[std::min(first + Rows::ROWS + j, last)];
        ahead.num_rows = Rows::ROWS;
        ahead.row = first + Rows::ROWS > last ? Rows::ROWS : 0;
        ahead.line = 0;
        for (int64_t kv_head = 0; kv_head < a.num_kv_heads; kv_head++) {
            find_rows(a, scratch, first, present, kv_head, width, v_width, rows);
            const int64_t head = kv_head * group;
            const HeadsState s = {scratch.q + head * width, to.out + head * v_width, scratch.scores,
                                  to.reference + head * LANES, to.sum + head * LANES, width, v_width};
            attend_heads(a, s, group, rows, present, ahead);
        }
    }
    for (int64_t kv_head = 0; kv_head < a.num_kv_heads; kv_head++) {
        const int64_t head = kv_head * group;
        sum_lanes({nullptr, nullptr, nullptr, to.reference + head * LANES, to.sum + head * LANES, 0, 0}, group,
                  std::is_same<Rows, Wide<T>>::value);
    }
}

template <typename T>
static void finish_query(const RowsArguments& a, int64_t query, const Softmax& from, int64_t v_width) {
    const int64_t dim = is_shared(a) ? a.dim : a.v_dim;  // of the vectors that were summed
    for (int64_t head = 0; head < a.num_kv_heads * a.heads_per_kv_head; head++) {
        const float sum = from.sum[head * LANES];
        from_tile<T>(from.out + head * v_width, dim, a.v_dim,
                     sum > 0 || sum != sum ? 1 / sum : 0.0f, a.out + query * a.out_stride + head * a.out_head_stride);
        a.lse[query * a.lse_stride + head * a.lse_head_stride] =
            sum == 0 ? -std::numeric_limits<float>::infinity() : (from.reference[head * LANES] + std::log2(sum)) / LOG2_E;
    }
}

// A split of a query; `stored`: its place among results that another thread merges, or -1.
struct SplitTask {
    int64_t query, split, is_first, is_last, stored;
};

// Tasks of all queries, and which of them each of `num_threads` takes: [i, i + 1) of the bounds. A query that
// several threads share has its results stored: `shared` has the first of each one's.
template <typename T>
static std::vector<SplitTask> plan_tasks(const RowsArguments& a, int64_t num_threads,
                                         std::vector<int64_t>& shared) {
    std::vector<SplitTask> tasks;
    for (int64_t query = 0; query < a.num_queries; query++) {
        const RowsOf<T> rows{a, query};
        const int64_t first = rows.first_split(), count = rows.num_splits();
        for (int64_t i = 0; i < count; i++) tasks.push_back({query, first + i, i == 0, i == count - 1, -1});
    }
    int64_t stored = 0;
    const int64_t count = tasks.size();
    for (int64_t i = 1; i < num_threads; i++) {
        int64_t at = count * i / num_threads;
        if (at == count || tasks[at].is_first || tasks[at].stored >= 0) continue;
        while (!tasks[at].is_first) at--;
        shared.push_back(at);
        do tasks[at].stored = stored++;
        while (!tasks[at++].is_last);
    }
    return tasks;
}

// What one thread does: tasks [first, last).
template <typename T>
static void run_tasks(const RowsArguments& a, float scale, const std::vector<SplitTask>& tasks, int64_t first,
                      int64_t last, float* stored) {
    static thread_local Scratch<T> scratch;
    NoDenormals while_here;
    const int64_t width = padded(a.dim), v_width = padded(a.v_dim), group = a.heads_per_kv_head;
    const int64_t heads = a.num_kv_heads * group, size = Softmax::size(heads, v_width);
    scratch.prepare(a, width, v_width);
    Softmax whole(scratch.whole, heads, v_width);
    for (int64_t i = first; i < last; i++) {
        const SplitTask& task = tasks[i];
        if (i == first || task.is_first) {
            float* plain = is_wide(a) ? scratch.part : scratch.q;
            for (int64_t head = 0; head < heads; head++)
                to_tile<T>(a.q + task.query * a.q_stride + head * a.q_head_stride, a.dim, scale * LOG2_E,
                           plain + head * width);
            if (is_wide(a)) turn_queries(plain, heads, width, scratch.q);
        }
        const int64_t count = RowsOf<T>{a, task.query}.collect(task.split, scratch.rows);
        float* at = task.stored >= 0 ? stored + task.stored * size : task.is_first ? scratch.whole : scratch.part;
        const Softmax to(at, heads, v_width);
        if (is_direct(a)) attend_split<T, Direct<T>>(a, scratch, count, to, width, v_width);
        else if (is_wide(a)) attend_split<T, Wide<T>>(a, scratch, count, to, width, v_width);
        else attend_split<T, Tile<T>>(a, scratch, count, to, width, v_width);
        if (task.stored >= 0) continue;
        if (!task.is_first)
            for (int64_t head = 0; head < heads; head++) merge_head(whole, to, head, v_width);
        if (task.is_last) finish_query<T>(a, task.query, whole, v_width);
    }
}

template <typename T> static void attend_rows_of(const RowsArguments& a, float scale) {
    static thread_local Buffer buffer;
    const int64_t num_threads = parallel_threads(), heads = a.num_kv_heads * a.heads_per_kv_head;
    const int64_t v_width = padded(a.v_dim), size = Softmax::size(heads, v_width);
    std::vector<int64_t> shared;
    const std::vector<SplitTask> tasks = plan_tasks<T>(a, num_threads, shared);
    int64_t num_stored = 0;
    for (const SplitTask& task : tasks) num_stored = std::max(num_stored, task.stored + 1);
    float* stored = buffer.get(num_stored * size);
    const int64_t count = tasks.size();
    parallel_for(num_threads, [&](int64_t i) {
        run_tasks<T>(a, scale, tasks, count * i / num_threads, count * (i + 1) / num_threads, stored);
    });
    if (shared.empty()) return;
    parallel_for(heads, [&](int64_t head) {
        NoDenormals while_here;
        for (const int64_t first : shared) {
            Softmax whole(stored + tasks[first].stored * size, heads, v_width);
            for (int64_t i = first; !tasks[i].is_last; i++)
                merge_head(whole, Softmax(stored + tasks[i + 1].stored * size, heads, v_width), head, v_width);
        }
    });
    for (const int64_t first : shared)
        finish_query<T>(a, tasks[first].query, Softmax(stored + tasks[first].stored * size, heads, v_width), v_width);
}

static void attend_rows(const RowsArguments& a, float scale) {
    if (a.bytes_per_element == 2) attend_rows_of<uint16_t>(a, scale);
    else if (a.bytes_per_element == 4) attend_rows_of<float>(a, scale);
    else attend_rows_of<uint8_t>(a, scale);
}
