// Products and sums of single numbers on the device, between kernels that read and write them.
// Launch:    grid = (1,), block = (32,), of which one thread works
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
extern "C" __global__ void scalar_product(
    const float* a,    // ()
    const float* b,    // ()
    float* product) {  // ()
    if (threadIdx.x == 0) *product = *a * *b;
}

extern "C" __global__ void scalar_add_product(
    float* total,      // ()
    const float* a,    // ()
    const float* b) {  // ()
    if (threadIdx.x == 0) *total += __fmul_rn(*a, *b);  // rounded, as where the two are separate operations
}

extern "C" __global__ void scalar_take_mean(
    float* total,  // (), becomes 0
    float* mean,   // ()
    float count) {
    if (threadIdx.x == 0) *mean = *total / count, *total = 0.f;
}
