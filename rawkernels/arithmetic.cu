// The sum, the difference or the product of two arrays, element by element, computed in float32 and rounded once. The second
// one may be shorter: it is repeated.
// Constants: scalar = float, f16, bf16; OPERATION = 0, 1, 2 (a + b, a - b, a * b)
// Launch:    grid = (ceil(count / (WIDTH * BLOCK)),), block = (256,). A thread takes 16 bytes of each array.
//            dependent: arithmetic
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/grid_dependency.cuh"
#include "common/pack.cuh"

constexpr int BLOCK = 256, WIDTH = 16 / sizeof(scalar);

__device__ float combined(float a, float b) {
    return OPERATION == 0 ? a + b : OPERATION == 1 ? a - b : a * b;
}

extern "C" __global__ void arithmetic(
    const scalar* a,    // (count,), at a multiple of 16 bytes, like b and out
    const scalar* b,    // (count,) or (WIDTH * period,)
    scalar* out,
    long long count,
    unsigned int period) {  // packs of WIDTH elements of b, if it is repeated, of which a then has less than 2^32; else 0
    grid_dependency_wait();
    const long long pack = (long long)blockIdx.x * BLOCK + threadIdx.x, first = pack * WIDTH;
    const scalar* from = b + (period ? (unsigned int)pack % period * WIDTH : first);
    if (first + WIDTH <= count) {
        float x[WIDTH], y[WIDTH];
        unpack(x, load_pack<WIDTH>(a + first));
        unpack(y, load_pack<WIDTH>(from));
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) x[i] = combined(x[i], y[i]);
        store_pack(out + first, x);
        return;
    }
    for (long long i = first; i < count; ++i) out[i] = (scalar)combined((float)a[i], (float)b[i]);
}
