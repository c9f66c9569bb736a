// The gradient of attention on Hopper, second of three launches: dk and dv by key tiles, dq summed in fp32.
// (first and third: flash_attention_backward_hopper_rows.cu; the third is left out if chain > 1)
// Constants: scalar = f16, bf16; WIDTH = 64, 128 (both head sizes rounded up); EXTRAS = false; DROPOUT = false, true;
//            BIASED = false; DETERMINISTIC = false, true (dq summed in the order of the tiles); AHEAD = false
// Constants: scalar = f16, bf16; WIDTH = 128; EXTRAS = true (softcap, any bias, ALiBi); DROPOUT = false; BIASED = false;
//            DETERMINISTIC = false, true; AHEAD = false
// Constants: scalar = f16, bf16; WIDTH = 128; EXTRAS = false; DROPOUT = false; BIASED = true (a bias of 16-bit numbers,
//            loaded by TMA, and nothing else); DETERMINISTIC = false, true; AHEAD = false
// Constants: scalar = f16, bf16; WIDTH = 64; EXTRAS = false; DROPOUT = false, true; BIASED = false; DETERMINISTIC = false;
//            AHEAD = true (sequences are neither packed nor of unequal lengths, and queries see each tile)
// Launch:    grid = (min(key tiles / chain, SMs),), block = (384,), shared = SHARED bytes
// Arch: sm_90a
//
// A persistent block takes tiles of BN keys of one KV head from a counter, longest first. Keys and values stay in shared
// memory; queries, dout, lse and delta are streamed. Two producer threads load, up to the next tile; one warp adds dq to
// global memory by TMA. Two consumer warpgroups of 64 keys compute, everything transposed:
//   S^T = K Q^T,  dP^T = V dO^T,  P^T = exp2(S^T c - lse),  dS^T = P^T (dP^T - delta),
//   dV += P^T dO and dK += dS^T Q from registers,  dQ = dS K by way of shared memory.
// Overlap: dP^T runs during the exponentials, dV during the computation of dS^T, and S^T of the next step while dQ is passed
// to the warp that adds it. dQ needs dS^T of both warpgroups: they alternate at it, so that neither waits for the other, and
// one computes exponentials while the products of the other run.
// Dropout: the signs of P^T, set during the exponentials, hold the mask. dS^T is in units of 1 / (1 - p): delta comes in these
// units, and dK and dQ are scaled at the end, so the inner loop needs no factor.
// AHEAD: the next tile's keys are in a second buffer before a tile ends, so its first S^T runs beside the last dQ, and values
// are loaded from the last dP^T on.
#include "attention/common/attention_backward_hopper.cuh"
#include "attention/common/backward_pipeline_hopper.cuh"
#include "attention/common/backward_sums_hopper.cuh"

static_assert(WIDTH <= 128, "flash_attention_backward_hopper.cu: WIDTH is 64 or 128");
static_assert(!EXTRAS || (WIDTH == 128 && !DROPOUT), "flash_attention_backward_hopper.cu: too few registers");
static_assert(!BIASED || (WIDTH == 128 && !DROPOUT), "flash_attention_backward_hopper.cu: too little shared memory");
constexpr int HALVES = BM / 64;
[[maybe_unused]] constexpr int SHARED =
    2048 + 2 * STAGES * (Q_BYTES + ROWS_BYTES) + 2 * K_BYTES + 2 * DS_BYTES + 2 * SUM_BYTES + MORE_KEY_BYTES
    + (BIASED ? STAGES * BIAS_BYTES : 0) + (DROPOUT ? STAGES * (WORD_BYTES + KEY_WORD_BYTES) : 0);
// Registers suffice for S^T together with both halves of dQ.
constexpr bool ROOM = WIDTH == 64;

// Both warpgroups run the same code, for the instruction cache. At WIDTH = 128 this was slower, and EXTRAS spill.
constexpr bool ONE_CODE = WIDTH == 64;

// Packs P^T. With dropout a dropped weight is negative and becomes zero.
__device__ __forceinline__ void pack_half(u32 (&p)[4][4], const float (&st)[BM / 2], int first) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float x = st[first + 2 * i], y = st[first + 2 * i + 1];
        p[i / 4][i % 4] = DROPOUT ? pack_positive(scalar(), x, y) : pack_pair(scalar(), x, y);
    }
}
// Sets the signs of eight weights, of 16 queries.
__device__ __forceinline__ void mark_weights(float* weight, uint4 words, u32 bounds, uint2 key_words) {
    const u32 kept[2] = {kept_bytes(words.x, words.z, key_words.x, bounds),
                         kept_bytes(words.y, words.w, key_words.y, bounds)};
#pragma unroll
    for (int n = 0; n < 8; ++n) weight[n] = mark_dropped(weight[n], kept[n % 2], n / 2);
}

// A lane's address for ldmatrix_transposed of the bias of 16 queries and 16 keys, from a query of the step and a key of the
// tile on, in the layout of accumulators.
__device__ __forceinline__ u32 bias_address(const Shared& m, const Ring& ring, int query, int key) {
    int lane = threadIdx.x % 32;
    lane = opaque(lane);
    return chunk_address<BM>(m.bias + ring.stage * BIAS_BYTES, query + lane % 8 + lane / 16 * 8, key / 8 + lane / 8 % 2);
}

// Stores 16 columns of packed accumulators to a tile of ROWS rows: part k of store_tile.
template <int ROWS>
__device__ __forceinline__ void store_fragment(u32 tile, int row0, int lane, int k, const u32 (&p)[4]) {
    stmatrix(chunk_address<ROWS>(tile, row0 + (lane & 15), 2 * k + (lane >> 4)), p);
}
// Keeps the compiler from computing all addresses at once or rounding all results late, which would spill.
__device__ __forceinline__ void make_opaque(long long& at, u32& x, u32& y) {
    at = opaque(at);
    x = opaque(x);
    y = opaque(y);
}

// A step: a block of queries with the tile's keys. SUMS: this warpgroup computes dQ of the step. begins: it is the tile's first
// step; left: how many are left, with it.
template <bool SUMS>
__device__ __forceinline__ void step(const Shared& m, u32 tile, const Attention& a, int w, int left, int round, bool begins,
                                     Ring& ring, float (&st)[BM / 2], float (&dk_sum)[WIDTH / 2],
                                     float (&dv_sum)[WIDTH / 2], float* dbias, const TensorMap& ds_map, int stores_ds) {
    // opaque, here and below: otherwise the compiler keeps addresses in registers that the accumulators need
    int thread = threadIdx.x % 128;
    if (!EXTRAS) thread = opaque(thread);
    const int warp_row = 64 * w + thread / 32 * 16;
    const float scale_log2 = a.scale * LOG2E;
    const u32 info = step_of<AHEAD>(m, ring);
    const u32 q = m.q + ring.stage * Q_BYTES, lse_rows = m.lse + ring.stage * ROWS_BYTES;
    const u32 grad = m.grad + ring.stage * Q_BYTES, delta_rows = m.delta + ring.stage * ROWS_BYTES;
    const u32 ds_tile = m.ds + ring.stage * DS_BYTES;
    float dst[BM / 2];
    u32 p[HALVES][4][4], ds[HALVES][4][4];
    mbar_wait(m.grad_full + 8 * ring.stage, ring.parity);
    if (!EXTRAS) {
        u32 values = m.v + w * 64 * 128;
        if (DROPOUT || DETERMINISTIC || AHEAD) values = opaque(values);  // otherwise ptxas spills a descriptor
        keep_live(dst); wgmma_fence();
        product<K_MAJOR, K_MAJOR, BN, BM, WIDTH>(dst, values, grad);
        wgmma_commit();
    }

    const u32 column = 8 * (thread % 4);
    const bool masked = field(info, MASKED);
    int low[2], high[2];
    if (masked || EXTRAS) {
        const int first = field(tile, FIRST), keys = field(tile, KEYS), shift = first + field(tile, SHIFT);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = warp_row + thread % 32 / 4 + 8 * r;
            const int at = shift + row - field(info, BLOCK) * BM - 2 * (thread % 4);
            low[r] = at - a.right;
            high[r] = first + row < keys ? at + a.left : -1;
        }
    }
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        if (EXTRAS) {
            const int first = field(tile, FIRST), shift = first + field(tile, SHIFT), head = field(info, STEP_HEAD);
            const int query = field(info, BLOCK) * BM + 2 * (thread % 4), key_at = first + warp_row + thread % 32 / 4;
            const int number = field(tile, NUMBER), queries = field(tile, QUERIES);
            const float slope = slope_of(a, number, head);
            const int room = queries - query, distance = query + first - shift - key_at;
            u32 rounded[4];
            long long at = number * a.bias.batch + head * a.bias.head + (query + 64 * h) * a.bias.row
                           + key_at * a.bias.column;
#pragma unroll
            for (int i = 32 * h; i < 32 * h + 32; i += 4) {
                const float2 x = load_shared_float2(lse_rows + 32 * (i >> 2) + column);
                float weight[4];
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const int r = n / 2, c = 8 * (i >> 2) + n % 2;
                    const bool seen = c >= low[r] && c <= high[r] && c < room;
                    const float penalty = slope * (float)abs(distance + c - 8 * r);
                    float softcap_grad;
                    weight[n] = probability(a, st[i + n], n % 2 ? x.y : x.x, penalty,
                                      at + n % 2 * a.bias.row + 8 * r * a.bias.column, seen, softcap_grad);
                    st[i + n] = weight[n] * softcap_grad;
                }
                rounded[i / 4 % 2 * 2] = pack_pair(scalar(), weight[0], weight[1]);
                rounded[i / 4 % 2 * 2 + 1] = pack_pair(scalar(), weight[2], weight[3]);
                if (i % 8) store_fragment<BN>(ds_tile + h * BN * 128, warp_row, thread % 32, i / 8 % 4, rounded);
#pragma unroll
                for (int n = 0; n < 4; ++n) st[i + n] = opaque(st[i + n]);
                at += 8 * a.bias.row;
                make_opaque(at, rounded[i / 4 % 2 * 2], rounded[i / 4 % 2 * 2 + 1]);
            }
        } else {
            u32 bias[4], bounds;
            uint4 words;
            uint2 key_words;
            if (DROPOUT) {  // the words for queries 2c and 2c + 1 of every 8
                const u32 at = m.key_words + ring.stage * KEY_WORD_BYTES + warp_row * (KEY_WORDS / 4)
                               + (thread % 4 * 16 + thread % 32 / 4) * 4;
                key_words = {load_shared(at), load_shared(at + 32)};
            }
#pragma unroll
            for (int i = 32 * h; i < 32 * h + 32; i += 4) {
                const u32 row = m.words + ring.stage * WORD_BYTES + i / 8 * (4 * QUERY_WORDS);
                if (DROPOUT && i % 8 == 0) {  // for 16 queries, loaded before their exponentials
                    words = load_shared_uint4(row + 16 * (thread % 32));
                    bounds = load_shared(row + 4 * BOUNDS);
                }
                float2 x = load_shared_float2(lse_rows + 32 * (i >> 2) + column), y = x;  // for keys 0 .. 7, 8 .. 15
                if (BIASED) {
                    if (i % 8 == 0) ldmatrix_transposed(bias, bias_address(m, ring, 2 * i, warp_row));
                    const float2 u = unpack_pair(scalar(), bias[i / 2 % 4]);
                    const float2 v = unpack_pair(scalar(), bias[i / 2 % 4 + 1]);
                    y = {x.x - v.x * LOG2E, x.y - v.y * LOG2E};
                    x = {x.x - u.x * LOG2E, x.y - u.y * LOG2E};
                }
                st[i] = exp2_fast(st[i] * scale_log2 - x.x);
                st[i + 1] = exp2_fast(st[i + 1] * scale_log2 - x.y);
                st[i + 2] = exp2_fast(st[i + 2] * scale_log2 - y.x);
                st[i + 3] = exp2_fast(st[i + 3] * scale_log2 - y.y);
                if (DROPOUT && i % 8) mark_weights(&st[i - 4], words, bounds, key_words);
            }
            if (masked) {
#pragma unroll
                for (int i = 32 * h; i < 32 * h + 32; ++i) {
                    const int r = i >> 1 & 1, at = 8 * (i >> 2) + (i & 1);
                    if (at < low[r] || at > high[r]) st[i] = 0.f;
                }
            }
        }
        if (h == 0 && !EXTRAS) {
            pack_half(p[0], st, 0);
            keep_live(dv_sum); keep_live(p[0]); wgmma_fence();
            product<MN_MAJOR, BM>(dv_sum, p[0], grad, true);
            wgmma_commit();
        }
    }
    if (EXTRAS) {  // P^T is in shared memory, in the buffer of dS^T
        fence_async_proxy();
        bar_sync(OWN + w, 128);
        keep_live(dv_sum); wgmma_fence();
        product<K_MAJOR, MN_MAJOR, BN, BM, BM>(dv_sum, ds_tile + w * 64 * 128, grad, true);
        wgmma_commit();
        keep_live(dst); wgmma_fence();  // dP^T only now: its registers were in use
        product<K_MAJOR, K_MAJOR, BN, BM, WIDTH>(dst, opaque(m.v + w * 64 * 128), grad);  // opaque: as above
        wgmma_commit(); wgmma_wait<0>(); keep_live(dst); keep_live(dv_sum);
    } else {
        wgmma_wait<1>(); keep_live(dst);  // dP^T is complete, dV still runs
        if (AHEAD && left == 1) release(m.v_empty);
    }
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        if (h > 0 && !EXTRAS) {
            pack_half(p[h], st, 32 * h);
            keep_live(p[h]); wgmma_fence();
            product<MN_MAJOR, BM>(dv_sum, p[h], grad + h * 64 * 128, true);
            wgmma_commit();
        }
        const int c = (EXTRAS ? field(info, BLOCK) : 0) * BM + 2 * (thread % 4);
        const int head = EXTRAS ? field(info, STEP_HEAD) : 0;
        const int keys = EXTRAS ? field(tile, KEYS) : 0;
        const int key_at = (EXTRAS ? field(tile, FIRST) : 0) + warp_row + thread % 32 / 4;
        const int queries = EXTRAS ? field(tile, QUERIES) : 0, number = EXTRAS ? field(tile, NUMBER) : 0;
        // the element of dbias
        long long at = ((long long)(number * a.heads + head) * a.queries + c + 64 * h) * a.keys + key_at;
#pragma unroll
        for (int i = 32 * h; i < 32 * h + 32; i += 4) {
            const float2 x = load_shared_float2(delta_rows + 32 * (i >> 2) + column);
            float y[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float weight = st[i + n], at_row = n % 2 ? x.y : x.x;
                if (DROPOUT) y[n] = __saturatef(weight) * dst[i + n] - fabsf(weight) * at_row;
                else y[n] = weight * (dst[i + n] - at_row);
            }
            ds[h][i / 8 % 4][i / 4 % 2 * 2] = pack_pair(scalar(), y[0], y[1]);
            ds[h][i / 8 % 4][i / 4 % 2 * 2 + 1] = pack_pair(scalar(), y[2], y[3]);
            if (EXTRAS && dbias) {
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    if (c + n % 2 + (i >> 2) * 8 < queries && key_at + n / 2 * 8 < keys)
                        dbias[at + n % 2 * a.keys + n / 2 * 8] = y[n];
                at += 8 * a.keys;
                make_opaque(at, ds[h][i / 8 % 4][i / 4 % 2 * 2], ds[h][i / 8 % 4][i / 4 % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) store_fragment<BN>(ds_tile + h * BN * 128, warp_row, thread % 32, k, ds[h][k]);
        keep_live(ds[h]); wgmma_fence();
        product<MN_MAJOR, BM>(dk_sum, ds[h], q + h * 64 * 128, true);
        wgmma_commit();
    }
    fence_async_proxy();
    if (AHEAD && begins && thread == 0) {  // before fields of the step are loaded, which an arrival could overtake
        bulk_wait_read();  // dK and dV of the previous tile have been stored: dK from dS of the other stage, dV from the keys
        mbar_arrive(m.k_empty + 8 * ((round + 1) & 1));
    }
    float dq[2][32];  // two halves of 64 queries x 64 columns
    const int part = SUMS ? field(info, PART) : 0, block = SUMS && DETERMINISTIC ? field(info, BLOCK) : 0;
    const u32 grad_empty = m.grad_empty + 8 * ring.stage, q_empty = m.q_empty + 8 * ring.stage;
    if (BIASED && thread == 0) bulk_wait_read();  // dS of the other stage has been stored
    if (SUMS) {
        bar_sync(WHOLE + ring.stage, CONSUMERS);
    } else {
        bar_sync(OWN + w, 128);  // all its warps have read dS of the previous dQ
        bar_arrive(WHOLE + ring.stage, CONSUMERS);
    }
    if (BIASED && stores_ds && thread == 0) {
        tma_store(ds_map, ds_tile + w * 64 * 128, field(info, BLOCK) * BM, field(tile, FIRST) + 64 * w,
                  field(info, STEP_HEAD), field(tile, NUMBER));
        bulk_commit();
    }
    if (SUMS) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            keep_live(dq[n]); wgmma_fence();
            if (WIDTH == 64) product<MN_MAJOR, MN_MAJOR, BN, BN, BN>(dq[n], ds_tile + n * BN * 128, keys_of<AHEAD>(m, tile));
            else product<MN_MAJOR, MN_MAJOR, BN, BN, BN>(dq[n], ds_tile, m.k + n * BN * 128);
            wgmma_commit();
            wgmma_wait<1>();
            if (n > 0) break;
#pragma unroll
            for (int h = 0; h < HALVES; ++h) { if (!EXTRAS) keep_live(p[h]); keep_live(ds[h]); }
            if (EXTRAS) release_loaded(q_empty, part | block);  // not NONE; freed would spill
            else release(freed(q_empty, part | block, unknown_zero(a.queries)));
            release(grad_empty);
        }
        if (!ROOM) stage_dq(m, dq[0], 0);
    }
    ring.next();
    // S^T of the next step, which AHEAD may be the next tile's first. After the last step this product is computed and not
    // used: with a branch ptxas would serialize all products.
    bool more = left > 1;
    u32 keys = keys_of<AHEAD>(m, tile);
    if (AHEAD && !more) {
        const u32 next = tile ^ (u32)sizeof(Tile), other = 8 * ((round + 1) & 1), parity = (round + 1) / 2 & 1;
        mbar_wait(m.tile_full + other, parity);
        more = field(next, FIRST) >= 0;
        if (more) mbar_wait(m.k_full + other, parity);
        keys = keys_of<AHEAD>(m, next);
    }
    if (more) mbar_wait(m.q_full + 8 * ring.stage, ring.parity);
    keep_live(st); wgmma_fence();
    product<K_MAJOR, K_MAJOR, BN, BM, WIDTH>(st, keys + w * 64 * 128, more ? m.q + ring.stage * Q_BYTES : m.k);
    wgmma_commit();
    wgmma_wait<1>();  // S^T of the next step still runs
    if (SUMS) {
        if (AHEAD && part & LAST) {
            finish_dq(m, dq, a.scale * a.keep_scale, part & FRESH, w);
        } else {
            if (ROOM) stage_dq(m, dq[0], 0);
            stage_dq(m, dq[1], 1);
        }
        if (thread == 0) {
            store_shared(m.part, (u32)part);
            if (AHEAD) store_shared(m.next, more ? (u32)field(step_of<AHEAD>(m, ring), PART) : NONE);
            if (DETERMINISTIC) {  // tiles of keys add in order, from the first one that sees the block
                tile = opaque(tile);
                const int first = field(tile, FIRST), first_key = max(0, block * BM - field(tile, SHIFT) - a.left);
                store_shared(m.turn, (u32)(first / BN - first_key / BN));
            }
        }
        fence_async_proxy();
        bar_arrive(WRITTEN, 160);
    } else {
#pragma unroll
        for (int h = 0; h < HALVES; ++h) { if (!EXTRAS) keep_live(p[h]); keep_live(ds[h]); }
        release(grad_empty);
        release(q_empty);
    }
    wgmma_wait<0>(); keep_live(st);
}

// Rounds dK or dV.
__device__ __forceinline__ void round_gradient(u32 (&rounded)[WIDTH / 16][4], float (&sum)[WIDTH / 2], float factor) {
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) sum[i] *= factor;
    pack(rounded, sum);
}

// Begins the first S^T of a tile.
__device__ __forceinline__ void first_logits(const Shared& m, int w, float (&st)[BM / 2], u32 q_tile) {
    u32 keys_tile = m.k + w * 64 * 128;
    keys_tile = opaque(keys_tile);
    q_tile = opaque(q_tile);
    keep_live(st); wgmma_fence();
    product<K_MAJOR, K_MAJOR, BN, BM, WIDTH>(st, keys_tile, q_tile);
    wgmma_commit();
}

// Consumer warpgroup w: keys 64 w .. 64 w + 63 of all tiles. W: w, unless ONE_CODE.
template <int W>
__device__ __forceinline__ void consume(const Shared& m, const Attention& a, const TensorMap& dk_map,
                                        const TensorMap& dv_map, scalar* dk, scalar* dv, float* dbias,
                                        const TensorMap& ds_map, int stores_ds) {
    const int w = ONE_CODE ? warpgroup() - 1 : W;
    Ring ring;
    float st[BM / 2];
    if (AHEAD) {  // else the tile's first S^T is computed when the tile before has ended
        mbar_wait(m.k_full, 0);
        mbar_wait(m.q_full, 0);
        first_logits(m, w, st, m.q);
        wgmma_wait<0>(); keep_live(st);
    }
    for (int round = 0;; ++round) {
        const u32 tile = tile_of(m, round);
        mbar_wait(m.tile_full + 8 * (round & 1), round / 2 & 1);
        const int first = field(tile, FIRST), keys = field(tile, KEYS);
        if (first < 0) break;
        if (!AHEAD) mbar_wait(m.k_full, round & 1);
        if ((a.cu_q || a.key_lengths) && first + BN > keys) {
            mbar_wait(m.v_full, round & 1);
            clear_rows(m, keys - first);
        }
        int left = field(tile, BLOCKS) * a.group;
        float dk_sum[WIDTH / 2], dv_sum[WIDTH / 2];
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) dk_sum[i] = dv_sum[i] = 0.f;

        if constexpr (!AHEAD) {
            if (left) mbar_wait(m.q_full + 8 * ring.stage, ring.parity);
            first_logits(m, w, st, left ? m.q + ring.stage * Q_BYTES : m.k);
            if (threadIdx.x % 128 == 0) bulk_wait_read();  // dK and dV of the previous tile have been stored
            bar_sync(OWN + w, 128);
        }
        mbar_wait(m.v_full, round & 1);
        if constexpr (!AHEAD) { wgmma_wait<0>(); keep_live(st); }
        if constexpr (ONE_CODE) {
            bool begins = true;
#pragma unroll 1
            for (; left > 0; --left, begins = false) {
                if (ring.stage == w)
                    step<true>(m, tile, a, w, left, round, begins, ring, st, dk_sum, dv_sum, dbias, ds_map, stores_ds);
                else step<false>(m, tile, a, w, left, round, begins, ring, st, dk_sum, dv_sum, dbias, ds_map, stores_ds);
            }
        } else {
#pragma unroll 1
            for (; left > 0; --left) {
                step<W == 0>(m, tile, a, w, left, round, false, ring, st, dk_sum, dv_sum, dbias, ds_map, stores_ds);
                if (--left == 0) break;
                step<W == 1>(m, tile, a, w, left, round, false, ring, st, dk_sum, dv_sum, dbias, ds_map, stores_ds);
            }
        }

        wgmma_wait<0>(); keep_live(dv_sum); keep_live(dk_sum);
        int thread = threadIdx.x % 128;
        thread = opaque(thread);
        const int warp_row = 64 * w + thread / 32 * 16;
        const int kv_head = field(tile, HEAD), batch = field(tile, BATCH), at = field(tile, KEY_ROW) + 64 * w;
        u32 rounded[WIDTH / 16][4];
        if constexpr (AHEAD) {
            // dV is staged in this warpgroup's part of the keys, dK in its part of dS of the last step
            const u32 to_dv = keys_of<AHEAD>(m, tile), to_dk = m.ds + (ring.stage ^ 1) * DS_BYTES;
            round_gradient(rounded, dv_sum, DROPOUT ? a.keep_scale : 1.f);
            bar_sync(ALL, CONSUMERS);  // no product reads the keys or dS
            store_tile<BN>(to_dv, warp_row, rounded);
            round_gradient(rounded, dk_sum, a.scale * a.keep_scale);
            store_tile<BN>(to_dk, warp_row, rounded);
            fence_async_proxy();
            bar_sync(OWN + w, 128);
            if (thread == 0) {
                tma_store(dv_map, to_dv + w * 64 * 128, 0, at, kv_head, batch);
                tma_store(dk_map, to_dk + w * 64 * 128, 0, at, kv_head, batch);
                bulk_commit();
            }
            continue;
        }
        const int key_rows = field(tile, KEY_ROWS) - field(tile, FIRST);
        __syncwarp();
        // keys and the tile's fields have been read
        release(freed(m.k_empty, kv_head | batch | at | key_rows, unknown_zero(a.queries)));
        // dV is staged in this warpgroup's part of the values, dK in its part of dS
        const bool whole = !a.cu_q || key_rows >= BN;
        round_gradient(rounded, dv_sum, DROPOUT ? a.keep_scale : 1.f);
        if (BIASED && thread == 0) bulk_wait_read();  // dS has been stored
        if (whole) store_tile<BN>(m.v, warp_row, rounded);
        else store_rows(dv + at * a.dv.row + kv_head * a.dv.head, a.dv, key_rows - 64 * w, 0, a.value_dim, rounded);
        fence_async_proxy();
        bar_sync(OWN + w, 128);
        if (thread == 0) {
            for (int c = 0; whole && c < WIDTH / 64; ++c)
                tma_store(dv_map, m.v + c * BN * 128 + w * 64 * 128, 64 * c, at, kv_head, batch);
            bulk_commit();
        }
        round_gradient(rounded, dk_sum, a.scale * a.keep_scale);
        bar_sync(ALL, CONSUMERS);  // no product reads dS
        if (whole) store_tile<BN>(m.ds, warp_row, rounded);
        else store_rows(dk + at * a.dk.row + kv_head * a.dk.head, a.dk, key_rows - 64 * w, 0, a.head_dim, rounded);
        fence_async_proxy();
        bar_sync(OWN + w, 128);
        if (thread == 0) {
            for (int c = 0; whole && c < WIDTH / 64; ++c)
                tma_store(dk_map, m.ds + c * DS_BYTES + w * 64 * 128, 64 * c, at, kv_head, batch);
            bulk_commit();
            bulk_wait_read<1>();  // dV has been stored
            mbar_arrive(m.v_empty);
        }
    }
    if (w == 0) {
        bar_sync(FREE, 160);
        if (threadIdx.x % 128 == 0) store_shared(m.part, NONE);
        bar_arrive(WRITTEN, 160);
    }
    if (threadIdx.x % 128 == 0) bulk_wait();
}

extern "C" __global__ void __launch_bounds__(384, 1) flash_attention_backward(
    const __grid_constant__ TensorMap q_map,     // (B, T, H, D) or (tokens, H, D); boxes of BM rows
    const __grid_constant__ TensorMap dout_map,  // (B, T, H, Dv); boxes of BM rows
    const __grid_constant__ TensorMap k_map,     // (B, S, Hk, D); boxes of BN rows
    const __grid_constant__ TensorMap v_map,     // (B, S, Hk, Dv); boxes of BN rows
    const __grid_constant__ TensorMap dk_map,    // like k; boxes of 64 rows
    const __grid_constant__ TensorMap dv_map,    // like v; boxes of 64 rows
    const __grid_constant__ TensorMap dq_map,    // like q; boxes of BM rows; unused unless AHEAD and chain > 1
    const __grid_constant__ Attention a,
    const float* lse,                            // (H, row_blocks, BM), times log2(e); inf for rows without keys or queries
    const float* delta,                          // (H, row_blocks, BM)
    float* dq_sum,                               // (H, row_blocks, BM * WIDTH) in the order of fragments: zeros; anything
                                                 // if chain > 1, where dq is complete, too
    scalar* dk,                                  // the array of dk_map
    scalar* dv,
    const Tile* plan,                            // (tiles + 1,)
    float* dbias,                                // (B, H, T, S) of zeros, or null; not with softcap
    int* turns,                                  // (H, row_blocks, 2) of zeros
    int* counter,                                // the next tile, or chain of tiles
    int tiles,
    int row_blocks,
    const __grid_constant__ TensorMap bias_map,  // BIASED: (B, T, H, S), or 1 for B and H; boxes of BM rows
    const __grid_constant__ TensorMap ds_map,    // the gradient of all logits, (B, S, H, T); boxes of 64 rows
    int stores_ds,                               // 0: not wanted
    int chain) {                                 // AHEAD: tiles that a block takes in turn; 1, or all of a head
    const Shared m = shared_layout();
    // AHEAD, a warpgroup frees keys when the dV staged there has been stored; else warps do, and the second producer
    init_barriers(m, AHEAD ? 3 : CONSUMERS / 32 + 1, AHEAD ? CONSUMERS / 32 : 2);

    if (warpgroup() == 0) {  // ---- producer
        decrease_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            load_all<true, DETERMINISTIC, BIASED, DROPOUT, AHEAD>(m, a, q_map, lse, k_map, plan, counter, tiles, row_blocks,
                                                                  bias_map, chain);
        } else if (threadIdx.x == 32) {
            load_all<false, DETERMINISTIC, false, DROPOUT, AHEAD>(m, a, dout_map, delta, v_map, plan, counter, tiles,
                                                                  row_blocks, bias_map);
        } else if (threadIdx.x / 32 == 2) {  // dq
            sum_dq(m, a, dq_map, dq_sum, turns, row_blocks, chain);
        }
    } else {  // ---- consumers
        increase_registers<CONSUMER_REGISTERS>();
        if (ONE_CODE || warpgroup() == 1) consume<0>(m, a, dk_map, dv_map, dk, dv, dbias, ds_map, stores_ds);
        else consume<1>(m, a, dk_map, dv_map, dk, dv, dbias, ds_map, stores_ds);
    }
}
