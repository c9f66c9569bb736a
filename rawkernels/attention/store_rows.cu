// Copies consecutive rows of packed arrays into rows of tables, as keys of prompts into a cache: row starts[i] + t of a source
// becomes row t of entry places[i] of its table. Two arrays at a time.
// Launch:    grid = (entries, count), block = (BLOCK,). A block copies one row of each array.
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
constexpr int BLOCK = 128;

struct Copy {
    char* table;         // (N, room) rows of `bytes`
    const char* source;  // (rows,) of them, `step` bytes apart
    long long step;
    int room, rows, bytes, unused;
};

template <typename Word>
__device__ void copy_words(char* to, const char* from, int bytes) {
    for (int i = threadIdx.x; i < bytes / (int)sizeof(Word); i += BLOCK) ((Word*)to)[i] = ((const Word*)from)[i];
}

extern "C" __global__ void __launch_bounds__(BLOCK) store_rows(
    const Copy one,
    const Copy other,            // no bytes: there is one array
    const int* starts,           // (entries,)
    const int* places) {         // (entries,); two entries may write the same row: either may be there
    const int t = blockIdx.y, start = starts[blockIdx.x];
    const long long place = places[blockIdx.x];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const Copy& copy = i ? other : one;
        const long long row = min(start + t, copy.rows - 1);  // past the end: the last one
        char* to = copy.table + (place * copy.room + t) * copy.bytes;
        const char* from = copy.source + row * copy.step;
        const bool aligned = (((size_t)to | (size_t)from | copy.bytes) & 15) == 0;
        if (aligned) copy_words<uint4>(to, from, copy.bytes);
        else copy_words<unsigned short>(to, from, copy.bytes);
    }
}
