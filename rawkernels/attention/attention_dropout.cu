// Samples the random words of attention's dropout: Philox numbers in two tables (gpuattn/ops/attention/dropout.py).
// Launch:    grid = (ceil(8 * heads * (query_rows + key_rows) / 256),), block = (256,)
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "attention/common/dropout_words.cuh"

// Eight threads sample a row. Sequences follow each other, each starts a new row, and rows past the end belong to the last
// sequence.
extern "C" __global__ void attention_dropout_words(
    uint4* words,                            // (heads, query_rows, 33) of queries, then (heads, key_rows, 16) of keys
    const int* cu_q, const int* cu_k,        // (sequences + 1,), or null: sequences of `queries` and `keys` tokens
    int sequences, int heads, int query_rows, int key_rows, int queries, int keys, unsigned int threshold,
    unsigned int seed_low, unsigned int seed_high, unsigned int stream, unsigned int step,
    const unsigned int* device_step) {
    const u32 before = heads * query_rows, lines = before + heads * key_rows, lane = threadIdx.x % 8;
    const u32 at = (blockIdx.x * 256ll + threadIdx.x) / 8, line = min(at, lines - 1);
    const bool of_keys = line >= before;
    const u32 rows = of_keys ? key_rows : query_rows, within = of_keys ? line - before : line, head = within / rows;
    const u32 row = within % rows, length = of_keys ? keys : queries;
    const int* const cu = of_keys ? cu_k : cu_q;
    const auto first_row = [&](u32 number) { return (cu ? cu[number] : number * length) / 16 + number; };
    u32 number = 0, last = sequences - 1;
    while (number < last) {
        const u32 middle = (number + last + 1) / 2;
        if (first_row(middle) <= row) number = middle; else last = middle - 1;
    }
    const PhiloxKey key = philox_key(seed_low, seed_high, stream, step, device_step);
    const u32 block = row - first_row(number), sheet = number * heads + head;
    uint4* const to = words + before * (of_keys ? 33ll : 0) + within * (of_keys ? 16ll : 33ll);
    const bool there = at < lines;
    u32 point = 0;
    for (u32 draw = lane; draw < (of_keys ? 16 : 32); draw += 8) {
        const uint4 drawn = sample_words(key, block, draw, sheet, of_keys, point);
        if (there) to[draw] = drawn;
    }
#pragma unroll
    for (int n = 1; n < 8; n *= 2) point |= __shfl_xor_sync(~0u, point, n);
    if (of_keys || lane || !there) return;
    to[32] = make_uint4(round_bounds(point, threshold), 0, 0, 0);
}
