// The exponential moving average of a flat buffer: average += (x - average) * share.
// Constants: scalar = float, f16, bf16
// Launch:    grid = (up to ceil(size / BLOCK),), block = (BLOCK,)
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
constexpr int BLOCK = 256;

extern "C" __global__ void __launch_bounds__(BLOCK) moving_average(
    float* __restrict__ average,    // (size,)
    const scalar* __restrict__ x,   // (size,)
    const float* share,             // ()
    long long size) {
    const float weight = *share;
#pragma unroll 4
    for (long long i = (long long)blockIdx.x * BLOCK + threadIdx.x; i < size; i += (long long)gridDim.x * BLOCK)
        average[i] += __fmul_rn((float)x[i] - average[i], weight);  // each step rounded, as NumPy does
}
