#pragma once
// Which weights of attention are dropped: see gpuattn/ops/attention/dropout.py. The tables are drawn by
// attention_dropout.cu; a is the Attention whose query_words and key_words point at them.
#include "attention/common/attention.cuh"

// Words of a row, for 16 queries or 16 keys. Queries: of every (k % 8, q % 8 / 2) two factors and two summands, then the
// bounds. Keys: of every (q % 8, k % 8) one.
constexpr int QUERY_WORDS = 132, KEY_WORDS = 64, BOUNDS = 128;
__device__ __forceinline__ constexpr int query_place(int i, int j) { return j % 8 * 16 + i % 8 / 2 * 4 + i % 2; }
__device__ __forceinline__ constexpr int key_place(int i, int j) { return i % 8 * 8 + j % 8; }

// A sequence's first row in the table of a head, by its first token.
__device__ __forceinline__ const unsigned int* query_words(const Attention& a, int number, int head) {
    const int row = (a.cu_q ? a.cu_q[number] : (long long)number * a.queries) / 16 + number;
    return a.query_words + ((long long)head * a.query_rows + row) * QUERY_WORDS;
}
__device__ __forceinline__ const unsigned int* key_words(const Attention& a, int number, int head) {
    const int row = (a.cu_k ? a.cu_k[number] : (long long)number * a.keys) / 16 + number;
    return a.key_words + ((long long)head * a.key_rows + row) * KEY_WORDS;
}

// Four logits: the signs of the bytes say which are kept. Byte 2 (i / 8 % 2) + j / 8 % 2 is of logit (i, j).
__device__ __forceinline__ unsigned int kept_bytes(unsigned int factor, unsigned int summand, unsigned int key_word,
                                                   unsigned int bounds) {
    const unsigned int y = factor * key_word + summand;
    return ((y ^ y >> 16) & 0x7f7f7f7f) + bounds;
}
__device__ __forceinline__ bool kept(unsigned int bytes, int byte) { return bytes >> (8 * byte + 7) & 1; }
// The same, read from the tables: of logit (i, j) and those 8 further down, across, and both.
__device__ __forceinline__ unsigned int kept_bytes(const Attention& a, const Sequence& s, int head, int i, int j) {
    const unsigned int query_row = (a.cu_q ? s.first_query : (long long)s.number * a.queries) / 16 + s.number + i / 16;
    const unsigned int key_row = (a.cu_k ? s.first_key : (long long)s.number * a.keys) / 16 + s.number + j / 16;
    const unsigned int* q = a.query_words + (long long)(head * a.query_rows + query_row) * QUERY_WORDS;
    const unsigned int* k = a.key_words + (long long)(head * a.key_rows + key_row) * KEY_WORDS;
    const int place = query_place(i, j);
    return kept_bytes(__ldg(q + place), __ldg(q + place + 2), __ldg(k + key_place(i, j)), __ldg(q + BOUNDS));
}

// Of 16 x 16 logits in fragments (queries down) a lane has eight: rows i and i + 8, columns j, j + 1, j + 8 and j + 9, j
// being even. Two words say which are kept; byte_of: of the n-th pair of columns in the order of an operand a.
struct Kept { unsigned int even, odd; };
__device__ __forceinline__ constexpr int byte_of(int n) { return n % 2 * 2 + n / 2; }
__device__ __forceinline__ Kept kept_of_lane(const Attention& a, const Sequence& s, int head, int i, int j) {
    return {kept_bytes(a, s, head, i, j), kept_bytes(a, s, head, i, j + 1)};
}
// A weight whose sign is what byte n says: positive, or negative if it is dropped.
__device__ __forceinline__ float mark_dropped(float weight, unsigned int bytes, int n) {
    return __uint_as_float(__float_as_uint(weight) | (~bytes << (24 - 8 * n) & 0x80000000));
}
// The signs of a byte of both words as masks of a packed pair.
__device__ __forceinline__ unsigned int pair_mask(Kept words, int byte) {
    unsigned int mask;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(mask) : "r"(words.even), "r"(words.odd), "r"(0xCC88 + 0x1111 * byte));
    return mask;
}
