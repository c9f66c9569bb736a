// What slices of rows have in common in a cross entropy of products: the share of a row in the loss, and sums over slices.
// Constants: label = int, long long
// Launch:    share: grid = (1,), block = (BLOCK,). add: grid = (1,), block = (32,), of which one thread works.
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
constexpr int BLOCK = 1024;

struct Sums {
    float share;  // 1 over the number of rows that count, or 1
    float scale;  // of the gradient: the share times `dloss`
    float sum;    // of the losses of the slices so far
    float loss;   // the sum times the share
    int right;    // rows whose first maximum is at the label
};

extern "C" __global__ void __launch_bounds__(BLOCK) linear_cross_entropy_share(
    const label* __restrict__ labels,  // (rows,)
    const float* dloss,                // () or null for 1
    Sums* sums,
    long long rows,
    long long ignore_index,
    bool mean) {
    __shared__ unsigned long long total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    unsigned int count = 0;
#pragma unroll 8
    for (long long row = threadIdx.x; row < rows; row += BLOCK) count += labels[row] != ignore_index;
    atomicAdd(&total, (unsigned long long)count);
    __syncthreads();
    if (threadIdx.x > 0) return;
    const float share = mean ? 1.f / fmaxf((float)total, 1.f) : 1.f;
    *sums = {share, dloss ? *dloss * share : share, 0.f, 0.f, 0};
}

extern "C" __global__ void linear_cross_entropy_add(
    Sums* sums,
    const float* loss,   // (), the sum over a slice
    const int* right) {  // () or null
    if (threadIdx.x > 0) return;
    const float sum = sums->sum + *loss;
    sums->sum = sum, sums->loss = sum * sums->share;
    if (right) sums->right += *right;
}
