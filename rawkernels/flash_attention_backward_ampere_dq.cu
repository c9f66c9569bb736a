// The gradient of q by mma.sync (sm_80 and up) without atomics: a block keeps OWN queries and visits the keys they see,
// STEP at a time. stats: from flash_attention_backward_ampere.cu.
// Constants: scalar = f16, bf16; HEAD_DIM = 64; OWN = 128; STEP = 128; STAGES = 2; EXTRAS = false
// Constants: scalar = f16, bf16; HEAD_DIM = 64; OWN = 128; STEP = 64; STAGES = 2; EXTRAS = true
// Constants: scalar = bf16; HEAD_DIM = 64; OWN = 64; STEP = 64; STAGES = 2; EXTRAS = false, true
// Constants: scalar = f16, bf16; HEAD_DIM = 128; OWN = 128; STEP = 64; STAGES = 2; EXTRAS = false, true
// Constants: scalar = bf16; HEAD_DIM = 96; OWN = 128; STEP = 64; STAGES = 2; EXTRAS = true
// Constants: scalar = bf16; HEAD_DIM = 192; OWN = 64; STEP = 64; STAGES = 2; EXTRAS = true
// Constants: scalar = f16; HEAD_DIM = 256; OWN = 64; STEP = 64; STAGES = 2; EXTRAS = true
// Constants: scalar = bf16; HEAD_DIM = 128; OWN = 64; STEP = 64; STAGES = 1; EXTRAS = true
// Constants: scalar = bf16; HEAD_DIM = 256; OWN = 32; STEP = 32; STAGES = 1; EXTRAS = true
//   (as in that file)
// Launch:    grid = (ceil(longest queries / OWN) * heads * sequences,), block = (32 WARPS,), shared = DQ_BYTES
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/attention_backward_mma.cuh"

constexpr int WARPS = OWN >= 64 ? 8 : 4, THREADS = 32 * WARPS;
constexpr int OWN_WARPS = OWN >= 64 ? OWN / 32 : 2, STEP_WARPS = WARPS / OWN_WARPS;  // the logits of a step, shared out
constexpr int OWN_16 = OWN / 16 / OWN_WARPS, STEP_16 = STEP / 16 / STEP_WARPS;       // 16s of rows of a warp
constexpr int WIDTH_16 = HEAD_DIM / 16 / STEP_WARPS;                                 // 16s of columns of its dq
constexpr int ROW_BYTES = (HEAD_DIM + 63) / 64 * 128;
constexpr int OWN_BYTES = OWN * ROW_BYTES, STEP_BYTES = STEP * ROW_BYTES, DS_BYTES = OWN * ((STEP + 63) / 64 * 128);
constexpr int DQ_BYTES = 2 * OWN_BYTES + STAGES * 2 * STEP_BYTES + DS_BYTES + OWN * STATS_BYTES;
static_assert(STEP_16 > 0 && STEP_WARPS <= 4 && HEAD_DIM / 16 % STEP_WARPS == 0,
              "flash_attention_backward_ampere_dq.cu: OWN, STEP and WARPS do not share out");

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) flash_attention_dq(
    const Attention a,
    const scalar* __restrict__ q,         // (B, T, H, D), or (tokens, H, D) with cu_q, by strides
    const scalar* __restrict__ k,         // (B, S, Hk, D)
    const scalar* __restrict__ v,         // (B, S, Hk, Dv)
    const scalar* __restrict__ dout,      // (B, T, H, Dv)
    const float* __restrict__ stats,      // as flash_attention_rows leaves them
    long long rows,
    scalar* __restrict__ dq) {            // (B, T, H, D)
    const int tiles = (a.queries + OWN - 1) / OWN, first = blockIdx.x % tiles * OWN, head = blockIdx.x / tiles % a.heads;
    const Sequence s = find_sequence(a, blockIdx.x / tiles / a.heads);
    if (first >= s.queries) return;
    const int kv_head = head / a.group, last = min(first + OWN, s.queries) - 1;
    const int begin = max(0, first + s.offset - a.left) / STEP * STEP, end = min(s.keys, last + s.offset + a.right + 1);
    const int steps = max(0, (end - begin + STEP - 1) / STEP);

    const int warp = threadIdx.x / 32, own = warp / STEP_WARPS * OWN_16 * 16, across = warp % STEP_WARPS;
    const int step_row = across * STEP_16 * 16;
    const u32 q_tile = shared_tiles(), dout_tile = q_tile + OWN_BYTES, k_tiles = dout_tile + OWN_BYTES;
    const u32 v_tiles = k_tiles + STAGES * STEP_BYTES, ds_tile = v_tiles + STAGES * STEP_BYTES;
    const u32 stats_tile = ds_tile + DS_BYTES;

    const auto load_step = [&](int n) {
        const int j = begin + n * STEP, stage = n % STAGES;
        const long long at = s.first_key + j;
        load_tile<STEP, THREADS>(k_tiles + stage * STEP_BYTES, k, a.k, s, at, kv_head, s.keys - j, a.head_dim);
        load_tile<STEP, THREADS>(v_tiles + stage * STEP_BYTES, v, a.v, s, at, kv_head, s.keys - j, a.value_dim);
    };
    const long long at = s.first_query + first;
    load_tile<OWN, THREADS>(q_tile, q, a.q, s, at, head, s.queries - first, a.head_dim);
    load_tile<OWN, THREADS>(dout_tile, dout, a.dout, s, at, head, s.queries - first, a.value_dim);
    load_stats(stats_tile, stats_of(a, s, stats, rows, head, first), OWN, s.queries - first);
    if (STAGES == 2 && steps > 0) load_step(0);
    cp_async_commit();

    const Strides none = {};
    float dq_sum[OWN_16][2 * WIDTH_16][4] = {};
#pragma unroll 1
    for (int n = 0; n < steps; ++n) {
        if (STAGES == 2) cp_async_wait<0>();
        __syncthreads();  // nobody reads the last step's tiles any more
        const int next = n + STAGES - 1;
        if (next < steps) load_step(next);
        cp_async_commit();
        if (STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();
        }
        const int j = begin + n * STEP, stage = n % STAGES;
        const u32 k_tile = k_tiles + stage * STEP_BYTES, v_tile = v_tiles + stage * STEP_BYTES;
        const Logits logits = {a, s, nullptr, none, head, first + own, j + step_row, stats_tile + own * STATS_BYTES};
        float x[OWN_16][2 * STEP_16][4], ds[OWN_16][2 * STEP_16][4];
        logits.compute<OWN, STEP, OWN_16, STEP_16>(
            x, ds, moved<OWN>(straight(q_tile), own, 0), moved<OWN>(straight(dout_tile), own, 0),
            moved<STEP>(crossed(k_tile), step_row, 0), moved<STEP>(crossed(v_tile), step_row, 0),
            logits.partial(OWN, first, STEP, j));
        store_weights<OWN>(ds_tile, own, step_row, ds);
        bar_sync(1 + warp / STEP_WARPS, 32 * STEP_WARPS);   // the warps of the same queries
        add_product<false, STEP, OWN, STEP_WARPS, OWN_16, WIDTH_16>(
            dq_sum, moved<OWN>(straight(ds_tile), own, 0), moved<STEP>(straight(k_tile), 0, 16 * across));
    }

    cp_async_wait<0>();
    __syncthreads();
    put_tile<OWN, STEP_WARPS, OWN_16, WIDTH_16>(q_tile, own, across, a.scale, dq_sum);
    __syncthreads();
    store_tile<OWN, THREADS>(q_tile, dq, a.dq, s, at, head, s.queries - first, a.head_dim);
}
