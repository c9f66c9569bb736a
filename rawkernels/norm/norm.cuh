#pragma once
// Rows of a norm in the registers of teams of threads, and their statistics. The constants of the including file:
//   TEAM    threads that share a row; a block has BLOCK / TEAM teams
//   VEC     adjacent columns in a pack
//   PACKS   packs in a thread's registers, TEAM * VEC columns apart; 0 for longer rows, which each pass reads again
//   FULL    whether the packs cover the row exactly
//   EARLY   whether vectors such as the weight are loaded to registers together with the row
#include "common/barrier.cuh"
#include "common/cp_async.cuh"
#include "common/pair.cuh"

static_assert(BLOCK % 32 == 0 && BLOCK % TEAM == 0 && (TEAM & (TEAM - 1)) == 0, "norm.cuh: BLOCK and TEAM");

constexpr bool HELD = PACKS > 0;
constexpr int SLOTS = HELD ? PACKS : 1, TEAMS = BLOCK / TEAM;

// The team of a thread in its block, and the thread's number in the team.
__device__ inline int team_of_thread() { return TEAMS == 1 ? 0 : threadIdx.x / TEAM; }
__device__ inline int lane_of_thread() { return TEAMS == 1 ? threadIdx.x : threadIdx.x % TEAM; }

struct alignas(VEC * sizeof(scalar)) Pack {
    scalar x[VEC];
    __device__ float operator[](int i) const { return x[i]; }
};

__device__ inline Pack load_pack(const scalar* from) { return *reinterpret_cast<const Pack*>(from); }

template <typename T, typename P = Pack> __device__ __forceinline__ P round_pack(const float (&values)[VEC]) {
    if constexpr (sizeof(T) == 2 && VEC == 8) {
        const uint4 words = {pack_pair(T(), values[0], values[1]), pack_pair(T(), values[2], values[3]),
                             pack_pair(T(), values[4], values[5]), pack_pair(T(), values[6], values[7])};
        return __builtin_bit_cast(P, words);
    } else {
        P pack;
#pragma unroll
        for (int i = 0; i < VEC; ++i) pack.x[i] = (T)values[i];
        return pack;
    }
}

__device__ inline void store_pack(scalar* to, const Pack& pack) { *reinterpret_cast<Pack*>(to) = pack; }
__device__ inline void store_pack(scalar* to, const float (&values)[VEC]) { store_pack(to, round_pack<scalar>(values)); }

// Calls f(p, j) for each pack of this thread: pack p begins at column j.
template <typename F> __device__ __forceinline__ void each_pack(int cols, F f) {
    const int lane = lane_of_thread();
    if constexpr (HELD) {
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const int j = (p * TEAM + lane) * VEC;
            if (FULL || j < cols) f(p, j);
        }
    } else {
        for (int j = lane * VEC; j < cols; j += TEAM * VEC) f(0, j);
    }
}

// This thread's packs of a vector of the norm; does nothing unless GIVEN.
template <bool GIVEN> struct Vector {
    static constexpr bool HERE = HELD && EARLY;
    const scalar* from;
    Pack held[GIVEN ? SLOTS : 1];

    __device__ __forceinline__ Vector(const scalar* vector, int cols) : from(vector) {
        if constexpr (GIVEN && HERE) each_pack(cols, [&](int p, int j) { held[p] = load_pack(from + j); });
    }
    // scale: values *= vector; shift: values += vector; from column j on
    __device__ __forceinline__ void scale(float (&values)[VEC], int p, int j) const {
        if constexpr (GIVEN) {
            const Pack pack = HERE ? held[p] : load_pack(from + j);
#pragma unroll
            for (int i = 0; i < VEC; ++i) values[i] *= pack[i];
        }
    }
    __device__ __forceinline__ void shift(float (&values)[VEC], int p, int j) const {
        if constexpr (GIVEN) {
            const Pack pack = HERE ? held[p] : load_pack(from + j);
#pragma unroll
            for (int i = 0; i < VEC; ++i) values[i] += pack[i];
        }
    }
};

__device__ inline void team_barrier() {
    if constexpr (TEAM <= 32) __syncwarp();
    else if constexpr (TEAMS == 1) __syncthreads();
    else bar_sync(1 + team_of_thread(), TEAM);
}

// Returns the value of the team's first thread.
__device__ __forceinline__ float team_first(float value) {
    if constexpr (TEAM <= 32) return __shfl_sync(~0u, value, threadIdx.x % 32 / TEAM * TEAM);
    __shared__ __align__(16) float first[TEAMS];
    if (lane_of_thread() == 0) first[team_of_thread()] = value;
    team_barrier();
    return first[team_of_thread()];
}

// Sums over the team in a fixed order; all its threads get the sums. Alternate `slot` between 0 and 1, so that one barrier
// per call is enough.
template <int COUNT> __device__ __forceinline__ void team_sum(float (&values)[COUNT], int slot) {
    constexpr int LANES = TEAM < 32 ? TEAM : 32, WARPS = TEAM / LANES, STEP = WARPS < 4 ? WARPS : 4;
#pragma unroll
    for (int lane = LANES / 2; lane > 0; lane /= 2)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) values[i] += __shfl_xor_sync(~0u, values[i], lane);
    if constexpr (WARPS > 1) {
        struct alignas(STEP * 4) Few { float x[STEP]; };
        __shared__ __align__(16) float partial[2 * TEAMS * WARPS * COUNT];
        float* mine = partial + (slot * TEAMS + team_of_thread()) * (WARPS * COUNT);
        if (threadIdx.x % 32 == 0)
#pragma unroll
            for (int i = 0; i < COUNT; ++i) mine[i * WARPS + lane_of_thread() / 32] = values[i];
        team_barrier();
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            values[i] = 0.f;
#pragma unroll
            for (int warp = 0; warp < WARPS; warp += STEP) {
                const Few few = *reinterpret_cast<const Few*>(mine + i * WARPS + warp);
                if constexpr (COUNT > 2 && STEP == 4) {  // summed pairwise: otherwise the next load waits for its registers
                    values[i] += (few.x[0] + few.x[1]) + (few.x[2] + few.x[3]);
                } else {
#pragma unroll
                    for (int n = 0; n < STEP; ++n) values[i] += few.x[n];
                }
            }
        }
    }
}

// ---- statistics. normalized = (x - pivot - mean) * rstd. LayerNorm subtracts the row's first element, the pivot, before
// it sums: this is exact for a constant row and accurate even if the mean is much larger than the deviation. RMSNorm
// subtracts nothing.
struct RowStatistics {
    float pivot, mean, rstd;

    __device__ float operator()(float x) const { return fmaf(x - pivot, rstd, -mean * rstd); }
};

__device__ inline float row_pivot(const scalar* row) { return RMS ? 0.f : (float)row[0]; }

// pack(p, j) returns the row's pack at column j. Two passes: first the mean, then the squared deviations.
template <typename Source>
__device__ __forceinline__ RowStatistics row_statistics(float pivot, Source pack, int cols, float eps) {
    RowStatistics row{pivot, 0.f, 1.f};
    const float share = 1.f / cols;
    float sum[1] = {0.f};
    if constexpr (!RMS) {
        each_pack(cols, [&](int p, int j) {
            const Pack x = pack(p, j);
#pragma unroll
            for (int i = 0; i < VEC; ++i) sum[0] += x[i] - pivot;
        });
        team_sum(sum, 0);
        row.mean = sum[0] * share;
        sum[0] = 0.f;
    }
    each_pack(cols, [&](int p, int j) {
        const Pack x = pack(p, j);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const float deviation = x[i] - pivot - row.mean;
            sum[0] = fmaf(deviation, deviation, sum[0]);
        }
    });
    team_sum(sum, 1);
    row.rstd = rsqrtf(sum[0] * share + eps);
    return row;
}

// y = normalized * weight + bias
template <typename Source, bool WEIGHTED, bool BIASED>
__device__ __forceinline__ void write_normed(scalar* y, RowStatistics row, Source pack, const Vector<WEIGHTED>& weight,
                                             const Vector<BIASED>& bias, int cols) {
    each_pack(cols, [&](int p, int j) {
        const Pack x = pack(p, j);
        float out[VEC];
#pragma unroll
        for (int i = 0; i < VEC; ++i) out[i] = row(x[i]);
        weight.scale(out, p, j);
        bias.shift(out, p, j);
        store_pack(y + j, out);
    });
}
