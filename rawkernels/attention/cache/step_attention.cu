// Attention of one new token of each text over its cache; the kernel also appends the token's key and value. Or, with
// MEMORY, over a memory of its sentence, to which nothing is appended.
// The keys of a sentence are those of all its beams, each read once: with BEAMS there is a list of the different rows of the
// cache that its beams see, each with the columns that see it. A column is a beam and a head of the group of a KV head.
// Logits are products of 16 keys (operand a) and 8 columns (operand b), outputs of values (operand a) and weights; both
// come from global memory in the layout of the operand, without shared memory. Warp w takes the groups of 16 keys
// w, w + WARPS, ..., and the warps are merged at the end: the bits of a sentence hang on its own keys alone.
// PAGE: keys of a page; 0: a row's keys lie side by side. BEAMS: 0: sentences have one beam. LISTS: they have more, and the
// block lists their rows. LISTED: row_embedding.cu has listed them, for up to 8 beams, and a KV head has one head, so that
// columns are beams.
// MODE: APPEND waits for the kernel before it first. SETTLED: what wrote caches, counts, slots, list and page table was over
// before the kernel before this one let it start, so old keys are loaded beside it. MEMORY is SETTLED, too.
// Constants: scalar = f16, bf16; HEAD_DIM = 32, 64; PAGE = 0, 64; BEAMS = 0; WARPS = 2, 4, 8, 16; MODE = 0
// Constants: scalar = f16, bf16; HEAD_DIM = 128; PAGE = 0, 64; BEAMS = 0; WARPS = 4, 8; MODE = 0
// Constants: scalar = f16, bf16; HEAD_DIM = 32, 64, 128; PAGE = 0; BEAMS = 1; WARPS = 1, 2, 4; MODE = 0
// Constants: scalar = bf16; HEAD_DIM = 64; PAGE = 0, 64; BEAMS = 0; WARPS = 2, 4, 16; MODE = 1
// Constants: scalar = bf16; HEAD_DIM = 64; PAGE = 0; BEAMS = 1; WARPS = 1, 2, 4; MODE = 1
// Constants: scalar = bf16; HEAD_DIM = 64; PAGE = 0; BEAMS = 2; WARPS = 1, 2, 4; MODE = 0, 1
// Constants: scalar = f16, bf16; HEAD_DIM = 32, 64, 128; PAGE = 0; BEAMS = 0; WARPS = 1, 2, 4; MODE = 2
// Constants: scalar = f16, bf16; HEAD_DIM = 32, 128; PAGE = 0; BEAMS = 2; WARPS = 2; MODE = 1
// Constants below sm_80: scalar = f16; HEAD_DIM = 32, 64; PAGE = 0, 64; BEAMS = 0; WARPS = 4, 8, 16; MODE = 0
// Constants below sm_80: scalar = f16; HEAD_DIM = 128; PAGE = 0, 64; BEAMS = 0; WARPS = 4, 8; MODE = 0
// Constants below sm_80: scalar = f16; HEAD_DIM = 32, 64, 128; PAGE = 0; BEAMS = 1, 2; WARPS = 1, 2, 4; MODE = 0
// Launch:    grid = (sentences * kv_heads, ceil(beam * heads / kv_heads / 8)), block = (32 * WARPS,),
//            shared = 4 * beam * room bytes with LISTS (at most 8 beams)
//            dependent: step_attention
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "attention/cache/key_groups.cuh"
#include "attention/cache/seen_rows.cuh"
#include "common/global_memory.cuh"
#include "common/grid_dependency.cuh"

enum { APPEND, SETTLED, MEMORY };
enum { LISTS = 1, LISTED };
static_assert(HEAD_DIM == 32 || HEAD_DIM == 64 || HEAD_DIM == 128, "step_attention.cu: HEAD_DIM is 32, 64 or 128");
// Warps of a multiprocessor, with 255, 168, 128, 96 or 80 registers a lane. The same instructions take more registers on some
// architectures.
constexpr bool MORE_REGISTERS = HEAD_DIM == 64 && __CUDA_ARCH__ > 800 && __CUDA_ARCH__ != 900;
constexpr int WARPS_AT_ONCE = HEAD_DIM == 128                ? BEAMS ? 8 : 12
                              : BEAMS                        ? MORE_REGISTERS && MODE == SETTLED ? 12 : 16
                              : MORE_REGISTERS || WARPS <= 2 ? 20
                                                             : 24;
constexpr int BLOCKS_AT_ONCE = WARPS < WARPS_AT_ONCE ? WARPS_AT_ONCE / WARPS : 1, THREADS = 32 * WARPS;
constexpr int PARTS = HEAD_DIM / 32;                      // of a key: in each a lane has 8 elements
constexpr int WORDS = HEAD_DIM / 16;                      // pairs of elements of a value that a lane has
constexpr int RUN = HEAD_DIM == 32 ? 4 : 8;               // elements of them that are adjacent
constexpr int PITCH = HEAD_DIM / 2 + 4;                   // pairs of elements from column to column
constexpr int KEYS = PAGE ? PAGE : 1;                     // of a page, a divisor that is never 0
constexpr bool APPENDS = MODE != MEMORY;
static_assert(COLUMNS == LISTED_BEAMS);

// Keys and values are read once a step, or by several texts at the same time: they leave the caches first.
template <typename T> __device__ T load(const scalar* from) { return __ldcs(reinterpret_cast<const T*>(from)); }

__device__ void load_value(u32 (&words)[WORDS], const scalar* from) {
    if constexpr (RUN == 4) {
        const uint2 x = load<uint2>(from);
        words[0] = x.x, words[1] = x.y;
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            const uint4 x = load<uint4>(from + i * 16);
            words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
        }
    }
}

__device__ void store_value(scalar* to, const u32 (&words)[WORDS]) {
    if constexpr (RUN == 4) {
        *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4)
            *reinterpret_cast<uint4*>(to + i * 16) = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
    }
}

// As add() for all words, with only those values in a column's sum that it sees: a bit of columns_of(value).
template <typename F> __device__ void add_seen(
    float (&acc)[WORDS][4], const u32 (&values)[4][WORDS], const u32 (&weights)[2], F columns_of) {
    const int t = threadIdx.x % 4;
#pragma unroll 1
    for (int pair = 0; pair < COLUMNS / 2; ++pair) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            bool sees[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) sees[i] = columns_of(i) >> (2 * pair + c) & 1;
#pragma unroll
            for (int w = 0; w < WORDS; ++w) {
                float more[4] = {};
                u32 own[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) own[i] = sees[i] ? values[i][w] : 0;
                add(more, own, weights);
                if (pair == t) acc[w][c] += more[c], acc[w][c + 2] += more[c + 2];
            }
        }
    }
}
// Whether all sums of the warp are finite.
__device__ bool finite(const float (&acc)[WORDS][4]) {
    float zero = 0;
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
#pragma unroll
        for (int i = 0; i < 4; ++i) zero = fmaf(acc[w][i], 0.f, zero);
    return __ballot_sync(~0u, zero != 0) == 0;  // NaN is not 0
}

// The columns of a block, `count` from `first` on of the beam * group of a sentence.
struct Columns {
    int first, count, group;
    __device__ int beam(int column) const { return (first + column) / group; }
    // A bit for each column of a beam.
    __device__ u32 of(int beam) const {
        const int start = max(beam * group - first, 0), end = min((beam + 1) * group - first, count);
        return (1u << end) - (1u << start);
    }
};

// Lists the rows of the cache that the columns see: old keys in their order, each row once, then the new key of each beam.
// Returns how many, and in `count` the number of keys of a beam. Ends with a barrier. The first slots are loaded before the
// number of keys is known.
__device__ int list_rows(u32* list, const Columns& columns, const short* slots, const int* key_count, int room, int& count) {
    const int first = columns.beam(0), beams = columns.beam(columns.count - 1) - first + 1;
    slots += first * room;
    Holders holders;
    holders.load(slots, beams, room, threadIdx.x);
    count = min(max(*key_count, 1), room);
    int filled = 0;
    for (int start = 0; start < count - 1; start += THREADS) {
        const int key = start + threadIdx.x;
        if (start) holders.load(slots, beams, room, key);
        const auto put = [&](int place, int beam, u32 seeing) {
            u32 seen = 0;
            for (int i = 0; i < beams; ++i) seen |= seeing >> i & 1 ? columns.of(first + i) : 0;
            list[place] = (u32)(beam * room + key) | seen << 24;
        };
        filled = list_rows_of_keys<THREADS>(holders, beams, key < count - 1, filled, start / THREADS, put);
    }
    __syncthreads();
    return filled + beams;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE) step_attention(
    const scalar* q,          // (rows, heads, HEAD_DIM), rows q_stride elements apart
    const scalar* k,          // (rows, kv_heads, HEAD_DIM), rows kv_stride elements apart; null with MEMORY
    const scalar* v,
    scalar* k_cache,          // (rows, room, kv_heads, HEAD_DIM), or (pages, PAGE, kv_heads, HEAD_DIM); a memory:
    scalar* v_cache,          // (sentences, room, kv_heads, HEAD_DIM)
    const int* key_counts,    // (rows,): number of keys, the new one included, which is the last; (sentences,) with MEMORY
    const short* slots,       // (sentences, beam, room): the beam whose row of the cache holds a key; with LISTS
    const u32* rows,          // (sentences, beam * room): the rows of old keys, see seen_rows.cuh; with LISTED
    const int* row_counts,    // (sentences,): how many they are
    const int* page_table,    // (rows, room / PAGE): the pages of a row, in the order of its keys; with PAGE
    scalar* out,              // (rows, heads, HEAD_DIM)
    long long q_stride,
    long long k_stride,
    long long v_stride,
    int heads,
    int kv_heads,
    int beam,
    int room,
    float scale) {
    if (MODE == APPEND) grid_dependency_wait();
    extern __shared__ __align__(16) u32 list[];
    __shared__ float tops[WARPS * COLUMNS];
    __shared__ float sums[WARPS * COLUMNS];
    __shared__ float2 parts[WARPS * COLUMNS * PITCH];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int sentence = blockIdx.x / kv_heads, kv_head = blockIdx.x - sentence * kv_heads;
    const long long first_row = (long long)sentence * beam;
    const int key_stride = kv_heads * HEAD_DIM;
    const int group = BEAMS == LISTED ? 1 : heads / kv_heads, first_column = BEAMS == LISTED ? 0 : blockIdx.y * COLUMNS;
    const Columns columns = {first_column, min(COLUMNS, beam * group - first_column), group};
    const long long first_count = APPENDS ? first_row : sentence;
    if (APPENDS) k += first_row * k_stride + kv_head * HEAD_DIM, v += first_row * v_stride + kv_head * HEAD_DIM;
    k_cache += kv_head * HEAD_DIM, v_cache += kv_head * HEAD_DIM;
    if (BEAMS == LISTED) rows += (long long)sentence * beam * room;
    if (PAGE) {
        page_table += first_row * (room / KEYS);
    } else {
        k_cache += first_count * room * key_stride, v_cache += first_count * room * key_stride;
    }

    uint4 query[PARTS] = {};
    const auto load_query = [&] {
        if (g >= columns.count) return;
        const int beam_of = columns.beam(g), head = first_column + g - beam_of * group + kv_head * group;
        const scalar* from = q + (first_row + beam_of) * q_stride + head * HEAD_DIM + 8 * t;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) query[p] = load<uint4>(from + 32 * p);
    };
    const int first_beam = BEAMS == LISTED ? 0 : columns.beam(0);
    const int beams = BEAMS == LISTED ? beam : columns.beam(columns.count - 1) - first_beam + 1;

    uint4 keys[2][PARTS] = {};
    u32 values[4][WORDS] = {}, seen[2];
    int page = 0;
    u32 entries = 0;
    const int newest_count = BEAMS ? beams : 1;
    const auto load_page = [&](int now) {
        if (PAGE) page = page_table[now * GROUP / KEYS];
    };
    // The entries of group `now` of the list of rows, a lane has one: what is no old item's is not used.
    const auto entries_of = [&](int now) {
        return BEAMS == LISTED ? rows[min(now * GROUP + lane % GROUP, beam * room - 1)] : 0;
    };
    // Loads group `now` of `items`, of which the last ones are new, one for each beam: all, only old or only new ones. Items
    // past the last one are the last, which no column sees there.
    const auto fetch = [&](int now, int items, bool old = true, bool fresh = APPENDS) {
        const scalar *key, *value;
        bool wanted;
        const auto find = [&](int inside) {
            const int item = min(now * GROUP + inside, items - 1), newest = item - items + newest_count;
            const bool is_new = APPENDS && newest >= 0;
            const u32 entry = BEAMS == LISTED ? __shfl_sync(~0u, entries, item % GROUP) : BEAMS && !is_new ? list[item] : item;
            const int row = BEAMS ? entry & ROW : PAGE ? page * PAGE + item % KEYS : item;
            wanted = is_new ? fresh : old;
            const int from = BEAMS ? first_beam + newest : 0;
            key = is_new ? k + from * k_stride : k_cache + (long long)row * key_stride;
            value = is_new ? v + from * v_stride : v_cache + (long long)row * key_stride;
            return is_new ? columns.of(from) : entry >> 24;
        };
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int inside = 8 * half + g;
            const u32 columns_seeing = find(inside);
            seen[half] = now * GROUP + inside >= items ? 0 : BEAMS ? columns_seeing >> 2 * t : 3;
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
                if (wanted) keys[half][p] = load<uint4>(key + 32 * p + 8 * t);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            find(i / 2 * 8 + 2 * t + i % 2);
            if (wanted) load_value(values[i], value + RUN * g);
        }
    };
    int count, items;
    // Writes the new keys and values of group `now`, which has just been fetched, of the beams whose first column is here.
    const auto append = [&](int now) {
        const auto row_of = [&](int inside) {  // of the caches; -1: none
            const int item = now * GROUP + inside, newest = item - items + newest_count;
            const int from = BEAMS ? first_beam + newest : 0;
            if (newest < 0 || item >= items || from * group < first_column) return -1;
            return PAGE ? page * PAGE + item % KEYS : from * room + count - 1;
        };
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (const int row = row_of(8 * half + g); row >= 0)
#pragma unroll
                for (int p = 0; p < PARTS; ++p)
                    *reinterpret_cast<uint4*>(k_cache + (long long)row * key_stride + 32 * p + 8 * t) = keys[half][p];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (const int row = row_of(i / 2 * 8 + 2 * t + i % 2); row >= 0)
                store_value(v_cache + (long long)row * key_stride + RUN * g, values[i]);
    };
    const auto count_items = [&] {
        load_page(min(warp, room / GROUP - 1));  // at the same time as counts
        entries = entries_of(warp);
        if (BEAMS == LISTS) {
            items = list_rows(list, columns, slots + first_row * room, key_counts + first_row, room, count);
        } else {
            items = count = min(max(key_counts[first_count], 1), room);
            if (BEAMS == LISTED) items = min(max(row_counts[sentence], 0), beam * (room - 1)) + beams;
        }
    };
    bool loaded;
    if (MODE == APPEND) {
        // Groups of the first half of the room are loaded before the number of keys is known; again, if the new key is there.
        const bool early = !BEAMS && !PAGE && 2 * (warp + 1) * GROUP <= room;
        if (early) fetch(warp, room + 1);
        if (BEAMS) count_items();
        load_query();
        if (!BEAMS) count_items();
        loaded = early && (warp + 1) * GROUP < count;
    } else {
        // Registers have room for a group; the next one of the warp is on its way to L2 meanwhile.
        const int next = warp + WARPS;
        const u32 next_row = entries_of(next) & ROW;
        count_items();
        loaded = warp * GROUP < items;
        if (loaded) fetch(warp, items, true, false);
        if (BEAMS == LISTED && next * GROUP + lane % GROUP < items - beams)
#pragma unroll
            for (int i = 0; i < HEAD_DIM; i += 64)
                prefetch_to_l2((lane < GROUP ? k_cache : v_cache) + (long long)next_row * key_stride + i);
        grid_dependency_wait();
        // once all blocks of this one have started: row_linear loads its weights beside them
        grid_launch_dependents();
        load_query();
        if (APPENDS && loaded && (warp + 1) * GROUP > items - newest_count) fetch(warp, items, false, true);
    }
    const int groups = (items + GROUP - 1) / GROUP;

    float acc[WORDS][4] = {}, top[2] = {NEG_INF, NEG_INF}, sum[2] = {};
    scale *= LOG2E;
    // A weight of 0 does not hide a value that is not finite. If there is one, all is done again, and each column takes the
    // values that it sees alone.
    bool careful = false;
    int now = warp;
#pragma unroll 1
    while (now < groups) {
        if (!loaded) {
            if (now > warp || careful) load_page(now), entries = entries_of(now);
            fetch(now, items);
        }
        loaded = false;
        if (APPENDS && (now + 1) * GROUP > items - newest_count) append(now);
        float logits[4];
        multiply(logits, keys, query);
#pragma unroll
        for (int i = 0; i < 4; ++i) logits[i] = seen[i / 2] >> i % 2 & 1 ? logits[i] * scale : NEG_INF;
        u32 weights[2];
        weigh(weights, logits, top, sum, acc);
        if (BEAMS && careful) {
            add_seen(acc, values, weights, [&](int i) {
                const int item = min(now * GROUP + i / 2 * 8 + 2 * t + i % 2, items - 1), newest = item - items + newest_count;
                return APPENDS && newest >= 0 ? columns.of(first_beam + newest) : (BEAMS == LISTED ? rows : list)[item] >> 24;
            });
        } else {
            add(acc, values, weights);
        }
        now += WARPS;
        if (BEAMS && now >= groups && !careful && !finite(acc)) {
            careful = true, now = warp;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                top[c] = NEG_INF, sum[c] = 0;
#pragma unroll
                for (int w = 0; w < WORDS; ++w) acc[w][c] = acc[w][c + 2] = 0;
            }
        }
    }

    // ---- merge the warps
    const int mine = warp * COLUMNS + 2 * t;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        sum[c] = sum_of_columns(sum[c]);
        if (g == 0) tops[mine + c] = top[c], sums[mine + c] = sum[c];
        if (2 * t + c < columns.count) {
            float2* part = parts + (mine + c) * PITCH + RUN / 2 * g;
#pragma unroll
            for (int w = 0; w < WORDS; ++w)
                part[w / 4 * 32 + w % 4] = make_float2(acc[w][c], acc[w][c + 2]);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < columns.count * (HEAD_DIM / 2); i += THREADS) {
        const int column = i / (HEAD_DIM / 2), pair = i % (HEAD_DIM / 2);
        float peak = NEG_INF, total = 0, x = 0, y = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) peak = fmaxf(peak, tops[column + w * COLUMNS]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = exp2_fast(tops[column + w * COLUMNS] - peak);
            const float2 part = parts[(column + w * COLUMNS) * PITCH + pair];
            total += weight * sums[column + w * COLUMNS], x += weight * part.x, y += weight * part.y;
        }
        const int of = columns.beam(column), head = first_column + column - of * group + kv_head * group;
        scalar* to = out + ((first_row + of) * heads + head) * HEAD_DIM + 2 * pair;
        *reinterpret_cast<u32*>(to) = pack_pair(scalar(), x / total, y / total);
    }
}
