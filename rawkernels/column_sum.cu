// Second stage of a column sum: adds the partial sums of each column, in order.
// Constants: scalar = float, f16, bf16 (of the result); BLOCK = 128
// Launch:    grid = (ceil(cols / BLOCK),), block = (BLOCK,). A thread owns one column.
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100

extern "C" __global__ void column_sum(
    const float* __restrict__ partial,  // (parts, cols)
    scalar* __restrict__ out,           // (cols,)
    int parts,
    long long cols,
    bool accumulate) {
    const long long col = blockIdx.x * (long long)BLOCK + threadIdx.x;
    if (col >= cols) return;
    float sum = accumulate ? (float)out[col] : 0.f;
    for (int part = 0; part < parts; ++part) sum += partial[part * cols + col];
    out[col] = (scalar)sum;
}
