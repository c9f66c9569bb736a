#pragma once
// The parameters of attention, shared by all its kernels: the problem, its sequences, and the definition of a logit.

constexpr float INF = -NEG_INF;

struct Strides { long long batch, row, head, column; };  // in elements; packed sequences: batch = 0

// Filled by gpuattn/ops/attention/launch.py (PROBLEM): the same fields in the same order.
struct Attention {
    Strides q, k, v, out, dout, dq, dk, dv, bias;
    long long lse_batch, lse_head;             // strides of lse and delta
    const void* bias_data;                     // (B, H, T, S) by strides
    const int *key_lengths, *cu_q, *cu_k;      // (B,); (B + 1,) where sequences are packed; or null
    const float *slopes, *sink;                // (H,) or (B, H); (H,); or null
    const unsigned int *query_words, *key_words;  // dropout's tables (attention_dropout.cu), or null
    int sequences;
    int heads, group;                          // query heads; query heads per KV head
    int queries, keys;                         // of the longest sequence
    int head_dim, value_dim;
    int left, right, bottom_right;             // the window around the key at a query's position
    int bias_kind;                             // 0 none, 1 bool mask, 2 float, 3 scalar
    int slopes_batch;                          // stride of the ALiBi slopes
    int query_rows, key_rows;                  // rows per head in dropout's tables
    float scale, softcap;                      // softcap 0: none
    float keep_scale;                          // 1 / (1 - p)
};

struct Sequence {
    int number, queries, keys, key_rows, offset;  // keys: those of the key_rows that key_lengths allows
    long long first_query, first_key;
};

__device__ inline Sequence sequence_at(const Attention& a, int number) {
    Sequence s = {number, a.queries, a.keys, a.keys, 0, 0, 0};
    if (a.cu_q) {
        s.first_query = a.cu_q[number];
        s.first_key = a.cu_k[number];
        s.queries = a.cu_q[number + 1] - a.cu_q[number];
        s.key_rows = a.cu_k[number + 1] - a.cu_k[number];
    }
    s.offset = a.bottom_right ? s.key_rows - s.queries : 0;
    s.keys = a.key_lengths ? max(0, min(s.key_rows, a.key_lengths[number])) : s.key_rows;
    return s;
}

__device__ inline const scalar* rows_of(const scalar* x, const Strides& s, int number, long long row, int head) {
    return x + number * s.batch + row * s.row + head * s.head;
}

__device__ inline float slope_of(const Attention& a, int number, int head) {
    return a.slopes ? a.slopes[number * a.slopes_batch + head] : 0.f;
}

// The logit of query i and key j, -inf where masked. `softcap_grad` becomes the derivative of the softcap.
__device__ inline float logit(const Attention& a, const Sequence& s, float dot, int i, int j, int head,
                              float slope, float& softcap_grad) {
    int at = i + s.offset;
    softcap_grad = 1.f;
    if (i >= s.queries || j >= s.keys || j > at + a.right || j < at - a.left) return NEG_INF;
    float x = dot * a.scale;
    if (a.softcap > 0.f) {
        float t = tanhf(x / a.softcap);
        softcap_grad = 1.f - t * t;
        x = a.softcap * t;
    }
    if (a.bias_kind) {
        long long e = s.number * a.bias.batch + head * a.bias.head + i * a.bias.row + j * a.bias.column;
        if (a.bias_kind == 1 && !((const bool*)a.bias_data)[e]) return NEG_INF;
        if (a.bias_kind == 2) x += ((const float*)a.bias_data)[e];
        if (a.bias_kind == 3) x += (float)((const scalar*)a.bias_data)[e];
    }
    return x - slope * (float)abs(at - j);
}
