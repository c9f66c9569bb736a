#pragma once
// Shared by the gradients of attention on CUDA cores: tiles by GPU, delta, and the weights of the sums of dk and dv.
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 256, "attention_backward_simt.cuh: HEAD_DIM is 32 .. 256");
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100  // a multiprocessor has 228 KiB of shared memory
constexpr int SPLIT = HEAD_DIM == 128 ? 2 : 1, HELD = 8;
constexpr int R = HEAD_DIM > 128 ? 2 : HEAD_DIM <= 64 && EXTRAS ? 4 : 8, N = HEAD_DIM > 128 ? 2 : 4;
#elif __CUDA_ARCH__ >= 800
constexpr int SPLIT = 1, HELD = 0, R = HEAD_DIM > 128 ? 2 : HEAD_DIM > 64 || EXTRAS ? 4 : 8, N = HEAD_DIM > 128 ? 2 : 4;
#else  // a block has 64 KiB of shared memory
constexpr int SPLIT = 1, HELD = 0, R = HEAD_DIM > 128 ? 1 : HEAD_DIM > 64 ? 2 : HEAD_DIM > 32 || EXTRAS ? 4 : 8;
constexpr int N = HEAD_DIM > 128 ? 1 : HEAD_DIM > 64 ? 2 : 4;
#endif
#include "attention/common/attention_simt.cuh"
#include "common/reduce.cuh"

// Writes delta = rowsum(dout * out) - dlse of `rows` rows, B * T or all tokens, of all heads: a warp for each. 128 threads.
struct DeltaRow { long long number, at; int head; };  // at: the row of its sequence, or of all where packed

__device__ inline bool write_delta(const Attention& a, const scalar* out, const scalar* dout, const float* dlse, float* delta,
                                   long long rows, DeltaRow* place = nullptr) {
    const long long task = blockIdx.x * 4LL + threadIdx.x / 32;
    if (task >= rows * a.heads) return false;
    const long long row = task / a.heads, number = row / a.lse_head, at = row % a.lse_head;
    const int head = (int)(task % a.heads), lane = threadIdx.x % 32;
    out += number * a.out.batch + at * a.out.row + head * a.out.head;
    dout += number * a.dout.batch + at * a.dout.row + head * a.dout.head;
    float sum = 0.f;
    for (int c = lane; c < a.value_dim; c += 32)
        sum += (float)out[c * a.out.column] * (float)dout[c * a.dout.column];
    sum = warp_reduce(sum, Sum{});
    const long long e = number * a.lse_batch + head * a.lse_head + at;
    if (lane == 0) delta[e] = dlse ? sum - dlse[e] : sum;
    if (place) *place = {number, at, head};
    return true;
}

// A row's values for p and ds; a row without keys, or past the end, gets p = 0.
struct RowStats { float lse, delta; };  // lse: times log2(e)

__device__ inline RowStats row_stats(const Attention& a, const Sequence& s, int head, int i, const float* lse,
                                     const float* delta) {
    if (i >= s.queries) return {INF, 0.f};
    const long long e = s.number * a.lse_batch + head * a.lse_head + s.first_query + i;
    return {lse[e] == NEG_INF ? INF : lse[e] * LOG2E, delta[e]};
}

// Turns products of keys (down) and queries, p: of k and q, ds: of v and dout, into the weights of the sums of dv and of dk
// (and, transposed, of dq).
__device__ inline void gradient_weights(const Attention& a, const Sequence& s, int head, Position<true> at, bool unmasked,
                                        const float* __restrict__ lse, const float* __restrict__ delta, float (&p)[R][N],
                                        float (&ds)[R][N]) {
    RowStats stats[N];
#pragma unroll
    for (int n = 0; n < N; ++n) stats[n] = row_stats(a, s, head, at.query(0, n), lse, delta);
    unsigned long long kept = 0;
    const bool drops = EXTRAS && a.query_words;
    if (drops) apply_dropout(a, kept = sample_kept<true>(a, s, head, at), ds);
#pragma unroll
    for (int e = 0; e < R * N; ++e) ds[e / N][e % N] -= stats[e % N].delta;
    apply_logits(a, s, head, at, unmasked, p, ds);
#pragma unroll
    for (int e = 0; e < R * N; ++e) {
        const int r = e / N, n = e % N;
        p[r][n] = exp2_fast(p[r][n] - stats[n].lse);
        ds[r][n] = p[r][n] == 0.f ? 0.f : p[r][n] * ds[r][n];
    }
    if (drops) apply_dropout(a, kept, p);
}

// Queries begin .. end - 1 see some key of a tile; queries unmasked_begin .. unmasked_end - 1 see all its keys.
struct QueryRange { int begin, end, unmasked_begin, unmasked_end; };

__device__ inline QueryRange queries_of(const Attention& a, const Sequence& s, int first) {  // first: of the tile's keys
    const int last = min(first + OWN, s.keys) - 1;
    return {max(0, first - s.offset - a.right) / STEP * STEP,
            first < s.keys ? min(s.queries, last - s.offset + a.left + 1) : 0,
            last - s.offset - a.right,
            first + OWN <= s.keys ? min(s.queries, first - s.offset + a.left + 1) : 0};
}

// Stores what a lane has of dk and dv; its keys are j + 4r.
__device__ inline void store_keys(const Attention& a, int number, int kv_head, int j, scalar* dk, scalar* dv,
                                  const float (&dk_sum)[R][WIDTH], const float (&dv_sum)[R][WIDTH]) {
    const Sequence s = sequence_at(a, opaque(number));  // computed again, to free registers
#pragma unroll
    for (int r = 0; r < R; ++r) {
        if (j + 4 * r >= s.key_rows) continue;
        const long long row = s.first_key + j + 4 * r;
        scalar* dk_row = dk + number * a.dk.batch + row * a.dk.row + kv_head * a.dk.head;
        scalar* dv_row = dv + number * a.dv.batch + row * a.dv.row + kv_head * a.dv.head;
        store_row(dk_row, a.dk.column, a.head_dim, a.scale, dk_sum[r]);
        store_row(dv_row, a.dv.column, a.value_dim, 1.f, dv_sum[r]);
    }
}
