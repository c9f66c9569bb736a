// y = dropout(f(x + bias)), and its gradient with the first stage of the bias gradient.
// Constants: scalar = float, f16, bf16; ACTIVATION = 0, 1, 2, 3, 4, 5 (none, relu, gelu by tanh, gelu by erf, swiglu,
//   silu); VECTOR = true; DROPS = false; BLOCK = 256
// Constants: scalar = bf16; ACTIVATION = 1, 2, 4; VECTOR = false, true; DROPS = true; BLOCK = 256
// Launch:    grid = (slabs * parts,), block = (BLOCK,). `lanes` threads, a power of two, share a row. Each has eight
//            columns, adjacent if VECTOR, else `lanes` apart; together these are a slab. A block takes a slab of `chunk`
//            rows, BLOCK / lanes at a time, so that sums over rows have a fixed order; forward, ROWS per thread.
//            swiglu: rows of x, bias and dx are (gate, up), each of `cols`.
//            dependent: bias_activation_forward, bias_activation_backward
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/grid_dependency.cuh"
#include "common/pack.cuh"
#include "common/philox.cuh"
#include "linear/gelu.cuh"

static_assert(ACTIVATION >= 0 && ACTIVATION <= 5, "bias_activation.cu: ACTIVATION is 0 to 5");

constexpr int PARTS = ACTIVATION == 4 ? 2 : 1;  // parts of a row of x
constexpr int ROWS = 2 / PARTS;                 // rows that a thread reads at a time
// blocks of the gradient per multiprocessor, which limits its registers
constexpr int RESIDENT = VECTOR ? 8 / (int)sizeof(scalar) / PARTS : 1;

// open = 1 / (1 + 2^x) and shut = 1 / (1 + 2^-x), both accurate to the last bits. Where 2^x is infinite `shut` is wrong, but
// it only multiplies 0.
struct Gate { float open, shut; };

__device__ inline Gate gate_of(float x) {
    const float odds = exp2_fast(x), open = reciprocal(1.f + odds);
    return {open, fminf(odds, 1e38f) * open};
}

// The value of f and its derivative; for swiglu, f is the SiLU of the gate.
struct Curve { float value, slope; };

__device__ inline Curve curve(float z) {
    if constexpr (ACTIVATION == 0) return {z, 1.f};
    if constexpr (ACTIVATION == 1) return {z > 0.f || z != z ? z : 0.f, z > 0.f ? 1.f : 0.f};
    if constexpr (ACTIVATION == 2) {  // (1 + tanh(u)) / 2 = sigmoid(2 u)
        const float square = z * z;
        const Gate gate = gate_of(z * (EXPONENT + EXPONENT * TANH_CUBIC * square));
        const float value = z * gate.open;
        const float steepness = 2.f * TANH_INNER * (1.f + 3.f * TANH_CUBIC * fminf(square, 100.f));
        return {value, gate.open + value * gate.shut * steepness};
    }
    if constexpr (ACTIVATION == 3) {
        const Normal at = normal(scalar(), z);
        return {z * at.below, at.below + DENSITY * z * at.bell};
    }
    const Gate gate = gate_of(-LOG2E * z);
    const float value = z * gate.open;
    return {value, gate.open + value * gate.shut};
}

// The columns of a row that this thread has, and which of them exist.
struct Columns {
    long long first, cols;
    int step;

    __device__ Columns(long long cols, int lanes, unsigned int slab) : cols(cols), step(lanes) {
        const int lane = threadIdx.x & (lanes - 1);
        first = slab * 8LL * lanes + (VECTOR ? 8 * lane : lane);
    }
    __device__ long long operator()(int k) const { return first + (VECTOR ? k : k * step); }
    __device__ bool has(int k) const { return VECTOR ? first < cols : (*this)(k) < cols; }
};

using Eight = Pack<scalar, 8>;

// Only called by threads that have columns.
__device__ inline Eight load(const scalar* row, const Columns& columns) {
    if constexpr (VECTOR) return load_pack<8>(row + columns(0));
    Eight pack{};
#pragma unroll
    for (int k = 0; k < 8; ++k)
        if (columns.has(k)) pack.x[k] = row[columns(k)];
    return pack;
}

__device__ inline void store(scalar* row, const Columns& columns, const float (&values)[8]) {
    if constexpr (VECTOR) {
        store_pack<8>(row + columns(0), values);
    } else {
#pragma unroll
        for (int k = 0; k < 8; ++k)
            if (columns.has(k)) row[columns(k)] = (scalar)values[k];
    }
}

struct Dropout {
    PhiloxKey key;
    unsigned int keep_below;  // keep elements whose 16-bit number is below
    float keep_scale;

    // Multiplies values of a row by 0 or keep_scale.
    __device__ void apply(float (&values)[8], long long row, const Columns& columns) const {
        const unsigned long long at = row * columns.cols + columns(0);
        uint4 words;
        if constexpr (VECTOR) words = philox(key, (unsigned int)(at / 8), (unsigned int)(at / 8 >> 32));
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const unsigned int bits = VECTOR ? philox_lane(words, k) : philox_u16(key, at + k * columns.step);
            values[k] *= bits < keep_below ? keep_scale : 0.f;
        }
    }
};

__device__ inline void add_bias(float (&z)[PARTS][8], const Eight (&x)[PARTS], const Eight (&bias)[PARTS]) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        float shift[8];
        unpack(z[part], x[part]);
        unpack(shift, bias[part]);
#pragma unroll
        for (int k = 0; k < 8; ++k) z[part][k] += shift[k];
    }
}

__device__ inline Eight load_bias(const scalar* bias, const Columns& columns) {
    return bias ? load(bias, columns) : Eight{};
}

extern "C" __global__ void __launch_bounds__(BLOCK) bias_activation_forward(
    const scalar* x,                   // (rows, PARTS * cols), rows `stride` apart
    const scalar* bias,   // (PARTS * cols,) or null
    scalar* y,                         // (rows, cols), may be x
    long long rows,
    long long cols,
    long long stride,
    unsigned int slabs,
    int lanes,
    unsigned int keep_below,
    float keep_scale,
    unsigned int seed_low,
    unsigned int seed_high,
    unsigned int stream,
    unsigned int step,
    const unsigned int* device_step) {
    grid_dependency_wait();
    const Columns columns(cols, lanes, blockIdx.x % slabs);
    if (!columns.has(0)) return;
    const int teams = BLOCK / lanes;
    const long long first = blockIdx.x / slabs * (long long)(ROWS * teams) + threadIdx.x / lanes;
    Eight shift[PARTS], loaded[ROWS][PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) shift[part] = load_bias(bias ? bias + part * cols : bias, columns);
#pragma unroll
    for (int u = 0; u < ROWS; ++u)
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
            if (first + u * teams < rows) loaded[u][part] = load(x + (first + u * teams) * stride + part * cols, columns);
#pragma unroll
    for (int u = 0; u < ROWS; ++u) {
        const long long row = first + u * teams;
        if (row >= rows) return;
        float z[PARTS][8], value[8];
        add_bias(z, loaded[u], shift);
#pragma unroll
        for (int k = 0; k < 8; ++k) value[k] = curve(z[0][k]).value * (PARTS == 2 ? z[PARTS - 1][k] : 1.f);
        if constexpr (DROPS) {
            const PhiloxKey key = philox_key(seed_low, seed_high, stream, step, device_step);
            Dropout{key, keep_below, keep_scale}.apply(value, row, columns);
        }
        store(y + row * cols, columns, value);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT) bias_activation_backward(
    const scalar* x,      // (rows, PARTS * cols), rows `stride` apart; y for relu; unused without f
    const scalar* bias,   // (PARTS * cols,) or null
    const scalar* dy,     // (rows, cols), rows `dy_stride` apart
    scalar* __restrict__ dx,           // (rows, PARTS * cols) or null
    float* __restrict__ partial,       // (parts, PARTS * cols) or null: sums of dx over `chunk` rows
    long long rows,
    long long cols,
    long long stride,
    long long dy_stride,
    long long chunk,
    unsigned int slabs,
    int lanes,
    unsigned int keep_below,
    float keep_scale,
    unsigned int seed_low,
    unsigned int seed_high,
    unsigned int stream,
    unsigned int step,
    const unsigned int* device_step) {
    grid_dependency_wait();
    const unsigned int slab = blockIdx.x % slabs, rank = blockIdx.x / slabs;
    const Columns columns(cols, lanes, slab);
    const bool mine = columns.has(0);
    const Dropout dropout{philox_key(seed_low, seed_high, stream, step, device_step), keep_below, keep_scale};
    Eight shift[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) shift[part] = load_bias(mine && bias ? bias + part * cols : nullptr, columns);
    float sum[PARTS][8] = {};
    const int team = threadIdx.x / lanes, teams = BLOCK / lanes;
    const long long first = rank * chunk, last = mine ? min(first + chunk, rows) : 0;
    Eight loaded[PARTS], upper;
    const auto fetch = [&](long long row) {
        if (row >= last) return;
        upper = load(dy + row * dy_stride, columns);
        if constexpr (ACTIVATION != 0)
#pragma unroll
            for (int part = 0; part < PARTS; ++part) loaded[part] = load(x + row * stride + part * cols, columns);
    };
    fetch(first + team);
#pragma unroll 1
    for (long long row = first + team; row < last; row += teams) {
        Eight here[PARTS], above = upper;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) here[part] = loaded[part];
        fetch(row + teams);  // the next row's loads overlap with this row's arithmetic
        float gradient[PARTS][8], z[PARTS][8], dropped[8];
        unpack(dropped, above);
        if constexpr (ACTIVATION != 0) add_bias(z, here, shift);
        if constexpr (DROPS && ACTIVATION == 1) {  // y is 0 where dropped, so its slope is 0
#pragma unroll
            for (int k = 0; k < 8; ++k) dropped[k] *= keep_scale;
        } else if constexpr (DROPS) {
            dropout.apply(dropped, row, columns);
        }
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            Curve f{0.f, 1.f};
            if constexpr (ACTIVATION != 0) f = curve(z[0][k]);
            gradient[0][k] = dropped[k] * f.slope;
            if constexpr (PARTS == 2) {
                gradient[0][k] *= z[1][k];
                gradient[1][k] = dropped[k] * f.value;
            }
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            if (dx) store(dx + (row * PARTS + part) * cols, columns, gradient[part]);
#pragma unroll
            for (int k = 0; k < 8; ++k) sum[part][k] += gradient[part][k];
        }
    }
    if (!partial) return;

    // Add the teams' sums, in order.
    __shared__ float sums[8][BLOCK];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 8; ++k) sums[k][threadIdx.x] = sum[part][k];
        __syncthreads();
        for (int i = threadIdx.x; i < 8 * lanes; i += BLOCK) {
            const int lane = VECTOR ? i / 8 : i % lanes, k = VECTOR ? i % 8 : i / lanes;
            float total = 0.f;
            for (int other = lane; other < BLOCK; other += lanes) total += sums[k][other];
            const long long col = slab * 8LL * lanes + i;
            if (col < cols) partial[((long long)rank * PARTS + part) * cols + col] = total;
        }
    }
}
