// The gradient of attention in float32 on CUDA cores, without atomics: delta, then dk and dv by key tiles, then dq by query
// tiles. In one launch: flash_attention_backward_simt_whole.cu.
// Constants: scalar = float; HEAD_DIM = 32, 64, 128, 256; EXTRAS = false, true
// Constants: scalar = f16, bf16; HEAD_DIM = 64; EXTRAS = true
//   (both head sizes rounded up; EXTRAS: softcap, bias, slopes or dropout)
// Launch:    delta: grid = (ceil(rows * heads / 4),), block = (128,), one warp per row and head
//            dkv: grid = (ceil(longest keys / OWN) * KV heads * sequences,), block = (THREADS,), shared = SHARED_BYTES
//            dq: grid = (ceil(longest queries / OWN) * heads * sequences,), block = (THREADS,), shared = SHARED_BYTES
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "attention/common/attention_backward_simt.cuh"

constexpr int SHARED_BYTES = 4 * (2 * (OWN + STEP) * PITCH + WEIGHTS);

// delta = rowsum(dout * out) - dlse
extern "C" __global__ void __launch_bounds__(128) flash_attention_delta(
    const Attention a,
    const scalar* __restrict__ out,   // (rows, H, Dv) by strides
    const scalar* __restrict__ dout,  // (rows, H, Dv) by strides
    const float* __restrict__ dlse,   // like delta, or null
    float* __restrict__ delta,        // (B, H, T), or (H, tokens)
    long long rows) {                 // B * T, or tokens
    write_delta(a, out, dout, dlse, delta, rows);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2 / SPLIT) flash_attention_dkv(
    const Attention a,
    const scalar* __restrict__ q,         // (B, T, H, D), or (tokens, H, D) with cu_q, by strides
    const scalar* __restrict__ k,         // (B, S, Hk, D)
    const scalar* __restrict__ v,         // (B, S, Hk, Dv)
    const scalar* __restrict__ dout,      // (B, T, H, Dv)
    const float* __restrict__ lse,        // (B, H, T)
    const float* __restrict__ delta,      // (B, H, T)
    scalar* __restrict__ dk,              // (B, S, Hk, D)
    scalar* __restrict__ dv) {            // (B, S, Hk, Dv)
    extern __shared__ __align__(16) float k_tile[];
    float* v_tile = k_tile + OWN * PITCH;
    float* q_tile = v_tile + OWN * PITCH;
    float* dout_tile = q_tile + STEP * PITCH;
    float* weights = dout_tile + STEP * PITCH;

    const Place place = place_at(a, a.keys, OWN, a.heads / a.group);
    const Sequence s = sequence_at(a, place.number);
    const int kv_head = place.head, first = place.tile * OWN;
    if (first >= s.key_rows) return;
    const int own = lane_own(), j = first + own;  // this lane's keys are j + 4r

    const QueryRange range = queries_of(a, s, first);
    const int begin = range.begin, end = range.end;
    load_tile<OWN>(k_tile, rows_of(k, a.k, s.number, s.first_key + first, kv_head), a.k, s.keys - first, a.head_dim);
    load_tile<OWN>(v_tile, rows_of(v, a.v, s.number, s.first_key + first, kv_head), a.v, s.keys - first, a.value_dim);

    // query tiles of one head after another
    const int tiles = max(0, end - begin + STEP - 1) / STEP, steps = tiles * a.group;
    const auto head_of = [&](int step) { return kv_head * a.group + step / tiles; };
    const auto query_of = [&](int step) { return begin + step % tiles * STEP; };
    const auto load_dout = [&](int step) {
        const int i = query_of(step);
        const scalar* rows = rows_of(dout, a.dout, s.number, s.first_query + i, head_of(step));
        load_tile<STEP>(dout_tile, rows, a.dout, s.queries - i, a.value_dim);
    };
    if (steps > 0) load_dout(0);

    float dk_sum[R][WIDTH] = {}, dv_sum[R][WIDTH] = {};
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const int i = query_of(step), head = head_of(step);
        tiles_ready();
        load_tile<STEP>(q_tile, rows_of(q, a.q, s.number, s.first_query + i, head), a.q, s.queries - i, a.head_dim);

        const Position<true> at = {i + lane_step(), j};
        float p[R][N], ds[R][N];
        multiply(v_tile + own * PITCH, dout_tile + lane_step() * PITCH, ds);
        tiles_ready();
        multiply(k_tile + own * PITCH, q_tile + lane_step() * PITCH, p);
        const bool unmasked = i >= range.unmasked_begin && i + STEP <= range.unmasked_end;
        gradient_weights(a, s, head, at, unmasked, lse, delta, p, ds);
        add_product(p, weights, dout_tile, dv_sum);
        if (step + 1 < steps) {
            __syncthreads();
            load_dout(step + 1);
        }
        add_product(ds, weights, q_tile, dk_sum);
    }

    store_keys(a, s.number, kv_head, j, dk, dv, dk_sum, dv_sum);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2 / SPLIT) flash_attention_dq(
    const Attention a,
    const scalar* __restrict__ q,         // (B, T, H, D), or (tokens, H, D) with cu_q, by strides
    const scalar* __restrict__ k,         // (B, S, Hk, D)
    const scalar* __restrict__ v,         // (B, S, Hk, Dv)
    const scalar* __restrict__ dout,      // (B, T, H, Dv)
    const float* __restrict__ lse,        // (B, H, T)
    const float* __restrict__ delta,      // (B, H, T)
    scalar* __restrict__ dq,              // (B, T, H, D)
    float* __restrict__ dbias) {          // (B, H, T, S) of zeros, or null
    extern __shared__ __align__(16) float q_tile[];
    float* dout_tile = q_tile + OWN * PITCH;
    float* k_tile = dout_tile + OWN * PITCH;
    float* v_tile = k_tile + STEP * PITCH;
    float* weights = v_tile + STEP * PITCH;

    const Place place = place_at(a, a.queries, OWN, a.heads);
    const Sequence s = sequence_at(a, place.number);
    const int head = place.head, kv_head = head / a.group;
    const int first = ((a.queries + OWN - 1) / OWN - 1 - place.tile) * OWN;  // the last tiles have the most keys
    if (first >= s.queries) return;
    const int own = lane_own(), i = first + own;  // this lane's queries are i + 4r

    // some query sees keys begin .. end - 1; all queries see unmasked_begin .. unmasked_end - 1
    const int last = min(first + OWN, s.queries) - 1;
    const int begin = max(0, first + s.offset - a.left) / STEP * STEP;
    const int end = min(s.keys, last + s.offset + a.right + 1);
    const int unmasked_begin = last + s.offset - a.left, unmasked_end = min(s.keys, first + s.offset + a.right + 1);
    const long long at_first = s.first_query + first;
    load_tile<OWN>(q_tile, rows_of(q, a.q, s.number, at_first, head), a.q, s.queries - first, a.head_dim);
    load_tile<OWN>(dout_tile, rows_of(dout, a.dout, s.number, at_first, head), a.dout, s.queries - first, a.value_dim);
    RowStats stats[R];
#pragma unroll
    for (int r = 0; r < R; ++r) stats[r] = row_stats(a, s, head, i + 4 * r, lse, delta);

    const auto load_values = [&](int j) {
        load_tile<STEP>(v_tile, rows_of(v, a.v, s.number, s.first_key + j, kv_head), a.v, s.keys - j, a.value_dim);
    };
    load_values(begin);

    float sum[R][WIDTH] = {};
#pragma unroll 1
    for (int j = begin; j < end; j += STEP) {
        tiles_ready();
        load_tile<STEP>(k_tile, rows_of(k, a.k, s.number, s.first_key + j, kv_head), a.k, s.keys - j, a.head_dim);

        const Position<false> at = {i, j + lane_step()};
        float p[R][N], ds[R][N], softcap_grad[R][N];
        multiply(dout_tile + own * PITCH, v_tile + lane_step() * PITCH, ds);
        tiles_ready();
        if (j + STEP < end) load_values(j + STEP);
        multiply(q_tile + own * PITCH, k_tile + lane_step() * PITCH, p);
        if (EXTRAS && a.query_words) apply_dropout(a, sample_kept<false>(a, s, head, at), ds);
#pragma unroll
        for (int e = 0; e < R * N; ++e) softcap_grad[e / N][e % N] = 1.f;
        apply_logits(a, s, head, at, j >= unmasked_begin && j + STEP <= unmasked_end, p, softcap_grad);
#pragma unroll
        for (int e = 0; e < R * N; ++e) {
            const int r = e / N, n = e % N;
            p[r][n] = exp2_fast(p[r][n] - stats[r].lse);
            ds[r][n] = p[r][n] == 0.f ? 0.f : p[r][n] * (ds[r][n] - stats[r].delta);
        }
        if (EXTRAS && dbias) {
            float* sheet = dbias + ((long long)s.number * a.heads + head) * a.queries * a.keys;
#pragma unroll
            for (int e = 0; e < R * N; ++e) {
                const int r = e / N, n = e % N, query = at.query(r, n), key = at.key(r, n);
                if (query < s.queries && key < s.keys) sheet[(long long)query * a.keys + key] = ds[r][n];
            }
        }
        if (EXTRAS)
#pragma unroll
            for (int e = 0; e < R * N; ++e) ds[e / N][e % N] *= softcap_grad[e / N][e % N];
        add_product(ds, weights, k_tile, sum);
    }

    const Sequence again = sequence_at(a, opaque(s.number));  // computed again, to free registers
#pragma unroll
    for (int r = 0; r < R; ++r) {
        if (i + 4 * r >= again.queries) continue;
        const long long row = again.first_query + i + 4 * r;
        scalar* dq_row = dq + s.number * a.dq.batch + row * a.dq.row + head * a.dq.head;
        store_row(dq_row, a.dq.column, a.head_dim, a.scale, sum[r]);
    }
}
