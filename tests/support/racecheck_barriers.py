"""Which kernels with bar.arrive racecheck reports; see rawkernels/notes/ampere-backward.md.

    compute-sanitizer --tool racecheck python tests/support/racecheck_barriers.py

Only the kernels with "race" in their name have a race. compute-sanitizer reports these, and falsely
all with "arrive" in their name.
"""

import cupy

SOURCE = r"""
typedef unsigned u32;
__device__ void sync(int id, int n) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(n) : "memory");
}
__device__ void arrive(int id, int n) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(n) : "memory");
}
__device__ void fetch(uint4* to, const uint4* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ u32 matrices(const uint4* row) {  // four 8 x 8 matrices, one row address per lane
    u32 r[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((u32)__cvta_generic_to_shared(row)) : "memory");
    return r[0] + 3 * r[1] + 5 * r[2] + 7 * r[3];
}
// Eight warps. In each step warps 0 to 3 write a tile each, warps 4 to 7 read one each, and all
// read everything that cp.async copied.
extern "C" __global__ void NAME(const uint4* x, u32* out, int steps) {
    __shared__ __align__(128) uint4 ring[2][256];
    __shared__ u32 tiles[4][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = warp % 4;
    const bool makes = warp < 4;
    u32 sum = 0;
    if (RING) fetch(&ring[0][threadIdx.x], x + threadIdx.x);
    if (CYCLE && !makes) arrive(5 + rank, 64);
    for (int n = 0; n < steps; ++n) {
        if (RING) asm volatile("cp.async.wait_group 0;" ::: "memory");
        if (BLOCK) __syncthreads();
        const int next = n + 1;
        if (RING && next < steps) fetch(&ring[next % 2][threadIdx.x], x + next * 256 + threadIdx.x);
        if (TILES && makes) {
            if (CYCLE) sync(5 + rank, 64);  // the tile is empty
            tiles[rank][lane] = sum + n;
            HAND_OVER;
        } else if (TILES) {
            TAKE;
            sum += tiles[rank][lane ^ 1];
            if (CYCLE) arrive(5 + rank, 64);
        }
        if (RING) {
            if (TILES) sync(9 + warp / 4, 128);
            for (int i = 0; i < 8; ++i) sum += matrices(&ring[n % 2][32 * i + lane]);
        }
    }
    out[threadIdx.x] = sum;
}
"""
NOTHING, ARRIVE, SYNC = "", "arrive(1 + rank, 64)", "sync(1 + rank, 64)"
KERNELS = {  # name: (RING, TILES, BLOCK, CYCLE, HAND_OVER, TAKE)
    "ring": (1, 0, 1, 0, NOTHING, NOTHING),
    "tiles_arrive": (0, 1, 1, 0, ARRIVE, SYNC),
    "tiles_sync": (0, 1, 1, 0, SYNC, SYNC),
    "cycle_arrive": (0, 1, 0, 1, ARRIVE, SYNC),
    "ring_tiles_arrive": (1, 1, 1, 0, ARRIVE, SYNC),
    "ring_tiles_sync": (1, 1, 1, 0, SYNC, SYNC),
    "race_ring": (1, 0, 0, 0, NOTHING, NOTHING),
    "race_tiles": (0, 1, 1, 0, NOTHING, NOTHING),
    "race_ring_cycle_arrive": (1, 1, 0, 1, ARRIVE, SYNC),
}
SWITCHES = "RING", "TILES", "BLOCK", "CYCLE", "HAND_OVER", "TAKE"


def run(name, steps=8):
    lines = [f"#define NAME {name}"]
    lines += [f"#define {k} {v}" for k, v in zip(SWITCHES, KERNELS[name], strict=True)]
    kernel = cupy.RawKernel("\n".join([*lines, SOURCE]), name)
    x = cupy.arange(steps * 256 * 4, dtype="u4")
    out = cupy.zeros(256, "u4")
    kernel((2,), (256,), (x, out, steps))
    return int(out.sum(dtype="u8"))


if __name__ == "__main__":
    for name in KERNELS:
        print(f"{name}: {run(name):#x}", flush=True)
