#pragma once
// The dropout mask of attention weights; gpuattn/ops/attention/dropout.py explains it. attention_dropout.cu samples the
// tables of random words, to which query_words and key_words of Attention point.
#include "attention/common/attention.cuh"
#include "common/pair.cuh"

// A row of a table has the words of 16 queries or 16 keys. For queries: two factors and two summands for each
// (k % 8, q % 8 / 2), then the bounds. For keys: one word for each (q % 8, k % 8).
constexpr int QUERY_WORDS = 132, KEY_WORDS = 64, BOUNDS = 128;
__device__ __forceinline__ constexpr int query_place(int i, int j) { return j % 8 * 16 + i % 8 / 2 * 4 + i % 2; }
__device__ __forceinline__ constexpr int key_place(int i, int j) { return i % 8 * 8 + j % 8; }

// The first row of a sequence in the table of a head.
__device__ __forceinline__ const unsigned int* query_words(const Attention& a, int number, int head) {
    const int row = (a.cu_q ? a.cu_q[number] : (long long)number * a.queries) / 16 + number;
    return a.query_words + ((long long)head * a.query_rows + row) * QUERY_WORDS;
}
__device__ __forceinline__ const unsigned int* key_words(const Attention& a, int number, int head) {
    const int row = (a.cu_k ? a.cu_k[number] : (long long)number * a.keys) / 16 + number;
    return a.key_words + ((long long)head * a.key_rows + row) * KEY_WORDS;
}

// A word for four weights: the sign bit of a byte is set if the weight is kept. Weight (i, j) has byte
// 2 (i / 8 % 2) + j / 8 % 2.
__device__ __forceinline__ unsigned int kept_bytes(unsigned int factor, unsigned int summand, unsigned int key_word,
                                                   unsigned int bounds) {
    const unsigned int y = factor * key_word + summand;
    return ((y ^ y >> 16) & 0x7f7f7f7f) + bounds;
}
__device__ __forceinline__ bool kept(unsigned int bytes, int byte) { return bytes >> (8 * byte + 7) & 1; }
// The word of weights (i, j), (i + 8, j), (i, j + 8) and (i + 8, j + 8), from the tables.
__device__ __forceinline__ unsigned int kept_bytes(const Attention& a, const Sequence& s, int head, int i, int j) {
    const unsigned int query_row = (a.cu_q ? s.first_query : (long long)s.number * a.queries) / 16 + s.number + i / 16;
    const unsigned int key_row = (a.cu_k ? s.first_key : (long long)s.number * a.keys) / 16 + s.number + j / 16;
    const unsigned int* q = a.query_words + (long long)(head * a.query_rows + query_row) * QUERY_WORDS;
    const unsigned int* k = a.key_words + (long long)(head * a.key_rows + key_row) * KEY_WORDS;
    const int place = query_place(i, j);
    return kept_bytes(__ldg(q + place), __ldg(q + place + 2), __ldg(k + key_place(i, j)), __ldg(q + BOUNDS));
}

// Of 16 x 16 weights in a fragment (rows are queries) a lane has eight: rows i, i + 8 and columns j, j + 1, j + 8, j + 9 with
// even j. Two words hold their mask; byte_of: the byte of the n-th pair of columns in the layout of an operand a.
struct Kept { unsigned int even, odd; };
__device__ __forceinline__ constexpr int byte_of(int n) { return n % 2 * 2 + n / 2; }
__device__ __forceinline__ Kept kept_of_lane(const Attention& a, const Sequence& s, int head, int i, int j) {
    return {kept_bytes(a, s, head, i, j), kept_bytes(a, s, head, i, j + 1)};
}
// The weight with a negative sign if byte n says that it is dropped.
__device__ __forceinline__ float mark_dropped(float weight, unsigned int bytes, int n) {
    return __uint_as_float(__float_as_uint(weight) | (~bytes << (24 - 8 * n) & 0x80000000));
}
// A byte of both words as a bit mask of a packed pair.
__device__ __forceinline__ unsigned int pair_mask(Kept words, int byte) {
    return permute_bytes(words.even, words.odd, 0xCC88 + 0x1111 * byte);
}
