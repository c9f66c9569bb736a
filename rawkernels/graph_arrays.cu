// Copies between the arrays of a call of a CUDA graph and those of the graph, whose addresses every replay repeats. The host
// writes the addresses of a call into a slot of a ring in pinned memory; a count in device memory says which slot is next.
// A block copies the slot to the device first: an access to memory of the host takes 0.9 us, and those of blocks queue up.
// Launch:    grid = (chunks of CHUNK bytes, at most a few per multiprocessor, at least 1,), block = (BLOCK,);
//            graph_slot: one block
//            dependent: graph_copy_in, graph_copy_out
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/grid_dependency.cuh"

constexpr int BLOCK = 256, CHUNK = 4096, MOST = 64, AHEAD = 4;
constexpr u32 SLOTS = 256;

struct Arrays {
    u64 own[MOST];         // addresses of the graph's arrays
    u64 bytes[MOST];       // of each
    u32 before[MOST + 1];  // chunks of the arrays before each one, and of all
    u32 count, first;      // how many arrays; the place of the first one in a slot
    u32 last;              // 1 for the last launch of a graph
};

struct Ring {
    u32 next, unused;  // how many replays have ended
    u64 slots;         // the address of SLOTS slots of `words` addresses, in memory of the host
    u64 words;
    u64 given;         // the address of a copy of the slot of now, on the device
};

template <typename Word>
__device__ void copy_words(char* to, const char* from, int bytes) {
    const int count = bytes / (int)sizeof(Word);
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += AHEAD * BLOCK) {
        Word words[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (i + u * BLOCK < count) words[u] = ((const Word*)from)[i + u * BLOCK];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (i + u * BLOCK < count) ((Word*)to)[i + u * BLOCK] = words[u];
    }
#pragma unroll 1
    for (int i = count * (int)sizeof(Word) + threadIdx.x; i < bytes; i += BLOCK) to[i] = from[i];
}

__device__ void copy_bytes(char* to, const char* from, int bytes) {
    const size_t both = (size_t)to | (size_t)from;
    if (both % 16 == 0) copy_words<uint4>(to, from, bytes);
    else if (both % 4 == 0) copy_words<u32>(to, from, bytes);
    else if (both % 2 == 0) copy_words<unsigned short>(to, from, bytes);
    else copy_words<char>(to, from, bytes);
}

// A block copies adjacent chunks, which may be of several arrays; less than 2 GiB, as a GPU has some hundreds of blocks.
template <bool OUT> __device__ void copy_arrays(const Arrays& arrays, const u64* slot) {
    __shared__ u64 given[MOST];
    const u64 chunks = arrays.before[arrays.count];
    const u32 begin = (u32)(blockIdx.x * chunks / gridDim.x), end = (u32)((blockIdx.x + 1) * chunks / gridDim.x);
    const u32 a = threadIdx.x;
    if (a < arrays.count && arrays.before[a] < end && arrays.before[a + 1] > begin) given[a] = slot[arrays.first + a];
    __syncthreads();
#pragma unroll 1
    for (u32 i = 0; i < arrays.count; ++i) {
        const u32 before = arrays.before[i], from = max(begin, before), to = min(end, arrays.before[i + 1]);
        if (from >= to) continue;
        const u64 start = (u64)(from - before) * CHUNK;
        const u64 stop = min((u64)(to - before) * CHUNK, arrays.bytes[i]);
        char* own = (char*)arrays.own[i] + start;
        char* other = (char*)given[i] + start;
        if (OUT) copy_bytes(other, own, (int)(stop - start));
        else copy_bytes(own, other, (int)(stop - start));
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) graph_slot(Ring* ring) {  // ()
    // volatile: the host writes beside it, and no cache may keep what was there before
    const volatile u64* slot = (const volatile u64*)ring->slots + ring->next % SLOTS * ring->words;
    for (u32 i = threadIdx.x; i < ring->words; i += BLOCK) ((u64*)ring->given)[i] = slot[i];
}

extern "C" __global__ void __launch_bounds__(BLOCK) graph_copy_in(
    const __grid_constant__ Arrays arrays,  // are written
    Ring* ring) {                           // ()
    grid_dependency_wait();
    copy_arrays<false>(arrays, (const u64*)ring->given);
}

extern "C" __global__ void __launch_bounds__(BLOCK) graph_copy_out(
    const __grid_constant__ Arrays arrays,  // are read
    Ring* ring) {                           // ()
    grid_dependency_wait();
    copy_arrays<true>(arrays, (const u64*)ring->given);
    if (arrays.last && blockIdx.x == 0 && threadIdx.x == 0) ++ring->next;  // no launch at the end reads it
}
