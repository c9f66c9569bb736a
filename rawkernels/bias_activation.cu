// y = f(x + bias), and its gradient with the first stage of the bias gradient.
// Constants: scalar = float, f16, bf16; ACTIVATION = 0, 1, 2, 3 (none, relu, gelu by tanh, gelu by
//   erf); BLOCK = 128
// Launch:    grid = (ceil(cols / BLOCK), ceil(rows / chunk)), block = (BLOCK,). A thread owns one
//            column of `chunk` rows, so its sum over them has a fixed order.
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100

static_assert(ACTIVATION >= 0 && ACTIVATION <= 3, "bias_activation.cu: ACTIVATION is 0, 1, 2 or 3");

constexpr float TANH_INNER = 0.7978845608f;  // sqrt(2 / pi)
constexpr float TANH_CUBIC = 0.044715f;
constexpr float SQRT_HALF = 0.7071067812f;
constexpr float DENSITY = 0.3989422804f;  // 1 / sqrt(2 pi)

__device__ float activate(float z) {
    if constexpr (ACTIVATION == 0) return z;
    if constexpr (ACTIVATION == 1) return z > 0.f || z != z ? z : 0.f;
    if constexpr (ACTIVATION == 2) return 0.5f * z * (1.f + tanhf(TANH_INNER * z * (1.f + TANH_CUBIC * z * z)));
    return 0.5f * z * (1.f + erff(SQRT_HALF * z));
}

__device__ float slope(float z) {
    if constexpr (ACTIVATION == 0) return 1.f;
    if constexpr (ACTIVATION == 1) return z > 0.f ? 1.f : 0.f;
    if constexpr (ACTIVATION == 2) {
        float t = tanhf(TANH_INNER * z * (1.f + TANH_CUBIC * z * z));
        return 0.5f * (1.f + t) + 0.5f * z * (1.f - t * t) * TANH_INNER * (1.f + 3.f * TANH_CUBIC * z * z);
    }
    return 0.5f * (1.f + erff(SQRT_HALF * z)) + z * DENSITY * expf(-0.5f * z * z);
}

extern "C" __global__ void bias_activation_forward(
    const scalar* x,                   // (rows, cols)
    const scalar* __restrict__ bias,   // (cols,) or null
    scalar* y,                         // (rows, cols), may be x
    long long rows,
    long long cols,
    long long chunk) {
    const long long col = blockIdx.x * (long long)BLOCK + threadIdx.x;
    if (col >= cols) return;
    const long long first = blockIdx.y * chunk, last = first + chunk < rows ? first + chunk : rows;
    const float shift = bias ? (float)bias[col] : 0.f;
    for (long long row = first; row < last; ++row)
        y[row * cols + col] = (scalar)activate((float)x[row * cols + col] + shift);
}

extern "C" __global__ void bias_activation_backward(
    const scalar* __restrict__ x,      // (rows, cols); unused without an activation
    const scalar* __restrict__ bias,   // (cols,) or null
    const scalar* __restrict__ dy,     // (rows, cols)
    scalar* __restrict__ dx,           // (rows, cols) or null
    float* __restrict__ partial,       // (gridDim.y, cols) or null: sums of dx over `chunk` rows
    long long rows,
    long long cols,
    long long chunk) {
    const long long col = blockIdx.x * (long long)BLOCK + threadIdx.x;
    if (col >= cols) return;
    const long long first = blockIdx.y * chunk, last = first + chunk < rows ? first + chunk : rows;
    const float shift = bias ? (float)bias[col] : 0.f;
    float sum = 0.f;
    for (long long row = first; row < last; ++row) {
        float gradient = (float)dy[row * cols + col];
        if constexpr (ACTIVATION != 0) gradient *= slope((float)x[row * cols + col] + shift);
        if (dx) dx[row * cols + col] = (scalar)gradient;
        sum += gradient;
    }
    if (partial) partial[blockIdx.y * cols + col] = sum;
}
