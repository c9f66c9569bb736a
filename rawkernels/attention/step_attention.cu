// Attention of one new token of each text over a short cache; the kernel also appends the token's key and value.
// Constants: scalar = f16, bf16; HEAD_DIM = 32, 64, 128; PAGE = 0, 64 (keys of a page; 0: a row's keys lie side by side)
// Launch:    grid = (ceil(rows * heads / WARPS),), block = (32 * WARPS,). One warp per row and head; the warps of the
//            beams of a sentence are adjacent, since they read many of the same keys. With pages a sentence has one beam.
//            dependent: step_attention
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/grid_dependency.cuh"
#include "common/math.cuh"
#include "common/pack.cuh"

constexpr int WARPS = 4, WIDTH = 8;                          // elements of a 16-byte vector
constexpr int LANES = HEAD_DIM / WIDTH, GROUPS = 32 / LANES; // lanes of a key; keys of a warp at a time
constexpr int STAGE = LANES < 8 ? LANES : 8;                 // groups of keys whose loads are in flight together
constexpr int CHUNK = GROUPS * STAGE;                        // keys of a stage, at most one per lane
constexpr int KEYS = PAGE ? PAGE : 1;                        // of a page, a divisor that is never 0
static_assert(CHUNK <= 32 && 32 % LANES == 0, "step_attention.cu: HEAD_DIM is 32, 64 or 128");

__device__ uint4 load(const scalar* from) { return *reinterpret_cast<const uint4*>(from); }

__device__ void floats(float (&values)[WIDTH], const uint4& bits) {
    const u32 pairs[] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_pair(scalar(), pairs[i]);
        values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
    }
}

__device__ float dot(const uint4& bits, const float (&q)[WIDTH]) {
    float k[WIDTH], sum = 0;
    floats(k, bits);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sum += k[i] * q[i];
#pragma unroll
    for (int lane = 1; lane < LANES; lane <<= 1) sum += __shfl_xor_sync(~0u, sum, lane);
    return sum;
}

// Returns the sum over the groups of a warp, in every lane.
__device__ float over_groups(float value) {
#pragma unroll
    for (int lane = LANES; lane < 32; lane <<= 1) value += __shfl_xor_sync(~0u, value, lane);
    return value;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 4) step_attention(
    const scalar* q,          // (rows, heads, HEAD_DIM), rows q_stride elements apart
    const scalar* k,          // (rows, kv_heads, HEAD_DIM), rows kv_stride elements apart
    const scalar* v,
    scalar* k_cache,          // (rows, room, kv_heads, HEAD_DIM), or (pages, PAGE, kv_heads, HEAD_DIM)
    scalar* v_cache,
    const int* key_counts,    // (rows,): number of keys, the new one included, which is the last
    const short* slots,       // (sentences, beam, room): the beam whose row of the cache holds a key; unless PAGE
    const int* page_table,    // (rows, room / PAGE): the pages of a row, in the order of its keys; if PAGE
    scalar* out,              // (rows, heads, HEAD_DIM)
    long long q_stride,
    long long k_stride,
    long long v_stride,
    int rows,
    int heads,
    int kv_heads,
    int beam,
    int room,
    float scale) {
    grid_dependency_wait();
    const int warp = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= rows * heads) return;
    const int sentence = warp / (heads * beam), head = warp / beam % heads, row = sentence * beam + warp % beam;
    const int kv_head = head / (heads / kv_heads), group = lane / LANES, column = lane % LANES * WIDTH;
    const int count = min(max(key_counts[row], 1), room);
    const long long key_stride = (long long)kv_heads * HEAD_DIM, row_stride = (PAGE ? PAGE : room) * key_stride;
    const int inside = kv_head * HEAD_DIM + column;
    k += row * k_stride + inside, v += row * v_stride + inside;
    k_cache += inside, v_cache += inside;
    if (PAGE) {
        page_table += row * (room / KEYS);
    } else {
        slots += (long long)row * room;
    }
    // The row of the cache, or the page, that holds a key which is not the last; and its place there.
    const auto holder = [&](int key) { return PAGE ? page_table[key / KEYS] : sentence * beam + slots[key]; };
    const auto place = [&](int key) { return PAGE ? key % KEYS : key; };

    float query[WIDTH], acc[WIDTH] = {}, peak = NEG_INF, sum = 0;
    floats(query, load(q + row * q_stride + head * HEAD_DIM + column));
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) query[i] *= scale * LOG2E;
    const uint4 new_k = load(k), new_v = load(v);
    if (group == 0 && head % (heads / kv_heads) == 0) {
        const long long at = (PAGE ? holder(count - 1) : row) * row_stride + place(count - 1) * key_stride;
        *reinterpret_cast<uint4*>(k_cache + at) = new_k;
        *reinterpret_cast<uint4*>(v_cache + at) = new_v;
    }

#pragma unroll 1
    for (int first = 0; first < count; first += CHUNK) {
        const int own = first + lane;
        const int owner = lane < CHUNK && own < count - 1 ? holder(own) : row;
        uint4 keys[STAGE], values[STAGE];
#pragma unroll
        for (int s = 0; s < STAGE; ++s) {
            const int key = first + s * GROUPS + group;
            const long long at = __shfl_sync(~0u, owner, s * GROUPS + group) * row_stride + place(key) * key_stride;
            keys[s] = new_k, values[s] = new_v;  // for the last key; keys past it get a weight of 0
            if (key < count - 1) {
                keys[s] = load(k_cache + at);
                values[s] = load(v_cache + at);
            }
        }
        float logits[STAGE], most = peak;
#pragma unroll
        for (int s = 0; s < STAGE; ++s) {
            logits[s] = dot(keys[s], query);
            if (first + s * GROUPS + group >= count) logits[s] = NEG_INF;
            most = fmaxf(most, logits[s]);
        }
#pragma unroll
        for (int other = LANES; other < 32; other <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
        const float base = most == NEG_INF ? 0.f : most, correction = exp2f(peak - base);
        peak = most, sum *= correction;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) acc[i] *= correction;
#pragma unroll
        for (int s = 0; s < STAGE; ++s) {
            const float weight = exp2f(logits[s] - base);
            float value[WIDTH];
            floats(value, values[s]);
            sum += weight;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) acc[i] += weight == 0 ? 0.f : weight * value[i];
        }
    }
    sum = over_groups(sum);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) acc[i] = over_groups(acc[i]) / sum;
    if (group == 0) store_pack(out + ((long long)row * heads + head) * HEAD_DIM + column, acc);
}
