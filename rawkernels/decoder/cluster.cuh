#pragma once
// What the blocks of cluster_step.cu share: shapes, the layout of shared memory, weights on their way, exchanges.
#include "common/cluster.cuh"
#include "common/global_memory.cuh"
#include "common/math.cuh"
#include "common/mma_sync.cuh"
#include "common/pack.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "decoder/attended.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int COLUMNS = ROWS / 8;                           // operands b
constexpr int TILE = 16, DEPTH = 32, OWN = 32;              // outputs of a unit, inputs of a piece, columns of a block
constexpr int CLUSTER = WIDTH / OWN;                        // blocks
constexpr int PIECE_BYTES = TILE * DEPTH * 2;
constexpr int PIECES = WIDTH / DEPTH;                       // of a unit, whose inputs are the states
constexpr int SLICE = INNER / CLUSTER;                      // inner columns of a block
constexpr int SHARERS = HEAD_DIM / OWN;                     // blocks of a head; they take its rows in turn
constexpr int TURNS = (ROWS + SHARERS - 1) / SHARERS;       // rows of a block in attention
constexpr int PROJECTED = 6, RESULT = 2, HIDDEN = SLICE / TILE;  // units of a block: queries, keys and values; a result of
                                                                 // OWN columns; the inner columns
static_assert(WIDTH % OWN == 0 && CLUSTER <= 16 && INNER % (CLUSTER * DEPTH) == 0 && HIDDEN <= WARPS);

// A unit of the queries, keys and values, or of the hidden columns, is the work of a warp. The two units of a result are
// divided among the warps by their inputs: PARTS warps of a unit.
__device__ constexpr int parts_of_result() {
    int parts = 1;
    while (2 * parts * RESULT <= WARPS && PIECES % (2 * parts) == 0) parts *= 2;
    return parts;
}
constexpr int PARTS = parts_of_result();

// Pieces of a warp in the products of a layer, in their order: projections, result, queries, result, hidden, and the second
// product of the feed-forward network, of which a block multiplies its SLICE of inputs for all WIDTH outputs. All warps
// load as many, also those that have no unit or part. gpuattn/engine/steps/cluster_step.py packs the weights accordingly.
constexpr int OF_RESULT = PIECES / PARTS, LAST_UNITS = 2 * CLUSTER, LAST_PIECES = SLICE / DEPTH;
constexpr int STREAM = 2 * PIECES + 3 * OF_RESULT + (LAST_UNITS + WARPS - 1) / WARPS * LAST_PIECES;

// Sums and offsets of the units of a block (pack_weights.cu), 2 * TILE floats each, in this order.
constexpr int AT_PROJECTED = 0, AT_OUT = PROJECTED, AT_QUERY = AT_OUT + RESULT, AT_CROSS = AT_QUERY + RESULT;
constexpr int AT_HIDDEN = AT_CROSS + RESULT, AT_LAST = AT_HIDDEN + HIDDEN, TAILS = AT_LAST + RESULT;
constexpr int TAIL_BYTES = TAILS * 2 * TILE * 4;

struct alignas(16) Layer {
    scalar *keys, *values;                       // (rows, room, heads, HEAD_DIM)
    const scalar *memory_keys, *memory_values;   // (sentences, memory_room, heads, HEAD_DIM)
    const scalar* gain[3];                       // of the norms before projections, queries and hidden, if `normed`
    const scalar* shift[3];                      // or null
    int normed[3], unused;
};

constexpr int STATE_BYTES = ROWS * WIDTH * 2, HEAD_BYTES = TURNS * 3 * HEAD_DIM * 2, GAIN_BYTES = 6 * OWN * 2;
constexpr int PITCH = TILE + 4;                             // partial sums of a result (warp, row, output)
constexpr int SPREAD_PITCH = ROWS % 16 == 0 ? ROWS + 8 : ROWS;  // sums of the blocks of the cluster (block, output, row)
constexpr int MERGE = Attended::SIZE;
constexpr int SPREAD_BYTES = CLUSTER * OWN * SPREAD_PITCH * 4;
constexpr int MOST_LAYERS = 24, ROOM = 128;                 // ROOM: keys whose slots are copied to shared memory
// What has been attended is read before the sums of the next product arrive, and they before the next layer attends.
constexpr int AT_X = 0, AT_ATTENDED = AT_X + STATE_BYTES, AT_SPREAD = AT_ATTENDED;
constexpr int AT_INNER = AT_ATTENDED + (STATE_BYTES > SPREAD_BYTES ? STATE_BYTES : SPREAD_BYTES);
constexpr int AT_HEAD = AT_INNER + ROWS * SLICE * 2;        // (TURNS, 3, HEAD_DIM): query, key and value of a head
constexpr int AT_PARTIAL = AT_HEAD + HEAD_BYTES;
constexpr int AT_MERGE = AT_PARTIAL + WARPS * ROWS * PITCH * 4;
constexpr int AT_STATISTICS = AT_MERGE + WARPS * MERGE * 4;    // (ROWS, 2): mean, 1 / deviation
constexpr int AT_SQUARES = AT_STATISTICS + ROWS * 8;           // (PARTS, ROWS, 2): sums, and of squares
constexpr int AT_COUNTS = AT_SQUARES + WARPS * ROWS * 8;       // (2, ROWS): keys of the text and of the source
constexpr int AT_SLOTS = AT_COUNTS + 2 * ROWS * 4;             // (TURNS, ROOM)
constexpr int AT_LAYERS = (AT_SLOTS + TURNS * ROOM * 2 + 15) / 16 * 16;  // (MOST_LAYERS,)
constexpr int AT_TAILS = AT_LAYERS + MOST_LAYERS * sizeof(Layer), AT_GAINS = AT_TAILS + 2 * TAIL_BYTES;  // of two layers
constexpr int AT_BARRIERS = AT_GAINS + 2 * GAIN_BYTES;
constexpr int SHARED_LIMIT = 232448, MOST_SLOTS = 12;
constexpr int AT_RING = (AT_BARRIERS + (6 + WARPS * MOST_SLOTS) * 8 + 127) / 128 * 128;
constexpr int FIT = (SHARED_LIMIT - AT_RING) / (WARPS * PIECE_BYTES);  // pieces of a warp
// Pieces that a warp loads at a time: they divide those of each of its products.
__device__ constexpr bool divides(int n) {
    return PIECES % n == 0 && OF_RESULT % n == 0 && LAST_PIECES % n == 0 && FIT / n >= 4;
}
constexpr int CHUNK = divides(4) ? 4 : divides(2) ? 2 : 1, SLOT_BYTES = CHUNK * PIECE_BYTES;
constexpr int SLOTS = FIT / CHUNK < MOST_SLOTS ? FIT / CHUNK : MOST_SLOTS;
static_assert(SLOTS >= 2, "cluster_step.cu: no room for weights");

enum Event { STATES, ATTENDED, HEAD, SPREAD, EVENTS };      // barriers of exchanges

struct Shared {
    unsigned char* base;
    u32 address;
    u32 zero;  // unknown_zero()
    int rank, warp, lane;
    u32 peers[(CLUSTER + 3) / 4];  // shared memory of every fourth block, from one on that depends on the lane
    __device__ u32 event(int which) const { return address + AT_BARRIERS + which * 8; }
    __device__ u32 tails_full(int buffer) const { return address + AT_BARRIERS + (EVENTS + buffer) * 8; }
    __device__ u32 full(int slot) const { return address + AT_BARRIERS + (EVENTS + 2 + warp * MOST_SLOTS + slot) * 8; }
    __device__ u32 slot(int n) const { return address + AT_RING + (warp * SLOTS + n) * SLOT_BYTES; }
    template <typename T> __device__ T* at(int offset) const { return reinterpret_cast<T*>(base + offset); }
};

// The weights of a warp for all layers lie in the order in which it multiplies them. It loads them itself, into slots of
// its own: no other warp waits for them.
struct Weights {
    const char *from, *end;  // the next bytes to load
    PipelineState<SLOTS> slot;

    // Loads the next chunk into slot n; lane 0. `loaded`: of what is overwritten.
    __device__ void load(const Shared& shared, int n, u32 loaded) {
        if (from == end) return;
        const u32 full = shared.full(n);
        mbar_expect(full, SLOT_BYTES);
        bulk_load(freed(shared.slot(n), loaded, shared.zero), from, SLOT_BYTES, full);
        from += SLOT_BYTES;
    }
    __device__ void begin(const Shared& shared, const char* packed, int layers) {
        const long long bytes = (long long)layers * STREAM * PIECE_BYTES;
        from = packed + (shared.rank * WARPS + shared.warp) * bytes, end = from + bytes;
        if (shared.lane == 0)
            for (int n = 0; n < SLOTS; ++n) load(shared, n, 0);
    }
    // Passes over pieces that this warp has no use for.
    __device__ void skip(const Shared& shared, int pieces) {
        for (; pieces > 0; pieces -= CHUNK) {
            mbar_wait(shared.full(slot.stage), slot.parity);
            __syncwarp();
            if (shared.lane == 0) load(shared, slot.stage, 0);
            slot.next();
        }
    }
};

// ---- exchanges. What the blocks of a cluster send to one another counts as bytes at an mbarrier of the receiver. A block
// sends for an event only after it received something that every reader of the overwritten memory sent behind its reads.
struct Events {
    u32 parity = 0;
    // All threads. bytes: that this block receives.
    __device__ void wait(const Shared& shared, int which, u32 bytes) {
        if (!bytes) return;
        if (shared.warp == 0 && shared.lane == 0) mbar_expect(shared.event(which), bytes);
        mbar_wait(shared.event(which), parity >> which & 1);
        parity ^= 1 << which;
    }
};
// 16 bytes that four adjacent lanes have, to every block of the cluster.
__device__ void send_to_all(const Shared& shared, int offset, uint4 x, int which) {
#pragma unroll
    for (int i = 0; i < (CLUSTER + 3) / 4; ++i)
        if (CLUSTER % 4 == 0 || shared.lane % 4 + 4 * i < CLUSTER)
            send_shared(shared.peers[i] + offset, x, shared.peers[i] + AT_BARRIERS + which * 8);
}
// The 16 bytes of which four adjacent lanes have a word each, in all of them.
__device__ uint4 gather(u32 word, int lane) {
    const u32 other = __shfl_xor_sync(~0u, word, 1), low = lane & 1 ? other : word, high = lane & 1 ? word : other;
    const u32 far_low = __shfl_xor_sync(~0u, low, 2), far_high = __shfl_xor_sync(~0u, high, 2);
    return lane & 2 ? make_uint4(far_low, far_high, low, high) : make_uint4(low, high, far_low, far_high);
}
// Where the 8 columns from `column` on of a row lie, as operand b: the two halves of 16 bytes belong to two products.
__device__ int place_of(int row, int column) {
    return column / DEPTH * (COLUMNS * 512) + row / 8 * 512 + (row % 8 * 4 + column % DEPTH / 8) * 16;
}
