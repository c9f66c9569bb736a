#pragma once
// The program of decoder_step.cu, what its blocks share, and the threads that copy weights and phases ahead.
#include "common/global_memory.cuh"
#include "common/math.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "decoder/polled.cuh"

enum Kind { EMBED, LINEAR, ATTEND };
enum Norm { NO_NORM, LAYER_NORM, RMS_NORM };

// One step of the program, the same for all blocks. Arrays of states are (groups * ROWS, width); the rows past the texts
// hold zeros or anything: no row depends on another.
struct alignas(16) Phase {
    int kind, norm, activation;
    int rotation;             // the block that takes the first unit of work
    int outputs, inputs;      // LINEAR. EMBED: rows of the table, width
    float eps, scale;         // of the norm; EMBED: of the table; ATTEND: of the products
    const scalar* x;          // LINEAR: input (rows, inputs); ATTEND: queries; EMBED: table
    const scalar* weights;    // LINEAR: packed by pack_weights; EMBED: positions (length, width) or null
    const scalar* residual;   // (rows, outputs), added to the result, or null
    const float* statistics;  // (rows, 2): mean and 1 / deviation of the rows of `residual`, or null: it is added as it is
    const scalar* gain;       // (outputs,), of the norm of `residual`
    const scalar* shift;      // or null
    float* statistics_out;    // LINEAR with a norm: the statistics of x, or null
    scalar* out;              // (rows, outputs)
    scalar* keys;             // ATTEND: (sentences or rows, room, kv_heads, HEAD_DIM)
    scalar* values;
    const int* counts;        // keys of a row, or without `slots` of a sentence
    const short* slots;       // (sentences, beam, room) as in step_attention.cu: own keys, the new one is appended; or null:
                              // keys of a memory, the same for all beams of a sentence
    float2* shares;           // (heads, ROWS): peak and sum of the logits of a share of the keys; see Shares
    int heads, kv_heads, room, stride;  // stride: of the rows of x, in elements. EMBED: room is the number of positions
    int warps;                          // ATTEND: of a row and head; 1, 2, 4 or 8
    int split, split_keys;              // ATTEND, and the LINEAR behind it: 1 << split blocks at most attend for a row and
                                        // head, each to 1 << split_keys keys or more
    float per_beam, per_head, per_kv_head;  // 1 / beam, 1 / heads, kv_heads / heads
};
static_assert(sizeof(Phase) == 176);

constexpr int WARPS = 8, CONSUMERS = 32 * WARPS, THREADS = CONSUMERS + 128;
constexpr int COPY_REGISTERS = 40, REGISTERS = 232;             // with 384 threads a launch gives 168 to each
static_assert(COPY_REGISTERS + 2 * REGISTERS == 3 * 168, "decoder_step.cu: setmaxnreg would wait forever");
constexpr int TILE = 16, DEPTH = 32, PIECE = TILE * DEPTH;      // outputs, inputs and elements of a packed piece
constexpr int TAIL_BYTES = 2 * TILE * 4;                        // sums and offsets behind the pieces of a unit
constexpr int PIECES = ROWS == 32 ? 2 : 4;                      // of a stage for each warp
constexpr int STAGE_BYTES = PIECES * WARPS * PIECE * 2;
constexpr int SLOT_BYTES = STAGE_BYTES + TAIL_BYTES;
constexpr int COLUMNS = ROWS / 8;                               // operands b
constexpr int UNITS = ROWS == 8 ? 4 : 2;                        // whose sums a block adds and stores at a time
// How many stages of weights are loaded at a time: 32 KB, which are one stage, with 32 rows two. More would delay the barrier
// of the grid, see copy_weights; of 1, 2, 3 and 6 stages of 32 KB one was the fastest.
constexpr int LOADING = 32768 / STAGE_BYTES;
constexpr int STATES = ROWS == 8 && !POLLED ? 3 : 2;            // stages of states in registers
constexpr int PITCH = ROWS == 8 ? 8 : ROWS + 8;                 // of partial sums, in floats
constexpr int PARTIAL = WARPS * TILE * PITCH;                   // partial sums of a unit, in floats
constexpr int PHASES = 4;                                       // in shared memory
constexpr int BUFFERS = ROWS == 32 ? UNITS : 2 * UNITS;
constexpr int FIXED_BYTES = BUFFERS * PARTIAL * 4 + WARPS * ROWS * 8 + PHASES * sizeof(Phase) + 512;
constexpr int SHARED_LIMIT = 232448, SLOTS = (SHARED_LIMIT - FIXED_BYTES) / SLOT_BYTES;  // of a block on Hopper
static_assert(2 * (SLOTS + PHASES) * 8 <= 512 && SLOTS >= 4);

// The dynamic shared memory: a ring of stages, partial sums, statistics of rows, a ring of phases, and their barriers.
struct Shared {
    unsigned char* base;
    u32 ring;  // the address of base
    static constexpr int SUMS = SLOTS * SLOT_BYTES, ROW_SUMS = SUMS + BUFFERS * PARTIAL * 4;
    static constexpr int PROGRAM = ROW_SUMS + WARPS * ROWS * 8, BARRIERS = PROGRAM + PHASES * sizeof(Phase);
    __device__ float* partial() const { return reinterpret_cast<float*>(base + SUMS); }    // BUFFERS of PARTIAL
    __device__ float* rows() const { return reinterpret_cast<float*>(base + ROW_SUMS); }   // (WARPS, ROWS, 2), of a warp's
                                                                                          // inputs: sums, and of squares
    __device__ Phase* phases() const { return reinterpret_cast<Phase*>(base + PROGRAM); }
    __device__ u32 full(int slot) const { return ring + BARRIERS + slot * 8; }
    __device__ u32 empty(int slot) const { return full(SLOTS + slot); }
    __device__ u32 phase_full(int slot) const { return full(2 * SLOTS + slot); }
    __device__ u32 phase_empty(int slot) const { return full(2 * SLOTS + PHASES + slot); }
};
struct Texts {
    const int *tokens, *positions;  // (rows,): the last token of each row, its position
    int rows, beam, shift;          // beam: rows of a sentence; 1 << shift groups of ROWS rows
    __device__ u32 zero() const { return unknown_zero(beam); }  // for freed; a beam is 1 or more
};

__device__ u32 bits(float2 x) { return __float_as_uint(x.x) | __float_as_uint(x.y); }

__device__ uint4 load_states(const scalar* from) { return *reinterpret_cast<const uint4*>(from); }
// What a phase before this one writes: with POLLED it may be zeros yet.
__device__ uint4 load_handed(const scalar* from) {
    if constexpr (POLLED) return load_relaxed(reinterpret_cast<const uint4*>(from));
    return load_states(from);
}
__device__ void sync_consumers() { bar_sync(1, CONSUMERS); }

// The barrier of the grid: a phase first loads what earlier phases did not write, then waits. With POLLED there is none, and
// what phases hand on is in two sets of arrays, of which launches write one and clear the other one in turn.
struct Grid {
    int *arrived, count;  // count: of the arrivals before this phase
    int own, other;       // from the arrays of the program to those of the set, and of the other one, in elements
    bool last;            // nobody in this launch waits for the results of the phase
    __device__ void arrive() const {
        sync_consumers();
        if (!POLLED && threadIdx.x == 0) increment_release(arrived);
    }
    __device__ void wait() const {
        if (POLLED) return;
        if (threadIdx.x == 0) wait_for_count(arrived, count);
        sync_consumers();
    }
};

__device__ int first_unit(const Phase& phase) {
    const int unit = blockIdx.x - phase.rotation;
    return unit < 0 ? unit + gridDim.x : unit;
}
__device__ int ceil_div(long long a, int b) { return (a + b - 1) / b; }
__device__ int ceil_div(int a, int b) { return (a + b - 1) / b; }
// x / y for 0 <= x < 2^20.
__device__ int quotient(int x, float reciprocal_y) { return (x + 0.5f) * reciprocal_y; }

// ---- the keys of a row and head, shared by several blocks
// With few rows some blocks have no row and head of their own, so several share the keys of one. Share s of a row is row
// (row << split) + s of the output of ATTEND, and so a column of operand b of the next LINEAR, which adds the products of a
// row's shares. That needs no word between the blocks but the barrier that there is, and free columns: 8 rows at most.
struct Shares {
    int count, each;  // blocks; keys of a warp
};
__device__ int split_of(const Phase& phase) { return SHARES ? phase.split : 0; }
__device__ int keys_of(const Phase& phase, int row, int sentence) {
    return min(max(phase.counts[phase.slots ? row : sentence], 1), phase.room);
}
// No share is empty.
__device__ Shares shares_of(const Phase& phase, int keys) {
    constexpr int MULTIPLE = 256 / HEAD_DIM;  // values that a warp loads at a time
    const int split = split_of(phase);
    int count = 1;
    if (split) count = min((keys + (1 << phase.split_keys) - 1) >> phase.split_keys, 1 << split);
    const int warps = count * phase.warps;
    const int each = (quotient(keys + warps - 1, reciprocal(warps)) + MULTIPLE - 1) & -MULTIPLE;
    if (count > 1) count = quotient(keys + each * phase.warps - 1, reciprocal(each * phase.warps));
    return {count, each};
}

// ---- the threads that copy
__device__ void copy_phases(const Phase* program, int phases, const Shared& shared) {
    PipelineState<PHASES> slot;
    for (int i = 0; i < phases; ++i, slot.next()) {
        mbar_wait(shared.phase_empty(slot.stage), slot.parity ^ 1);
        const u32 full = shared.phase_full(slot.stage);
        mbar_expect(full, sizeof(Phase));
        bulk_load((u32)__cvta_generic_to_shared(shared.phases() + slot.stage), program + i, sizeof(Phase), full);
    }
}

// What is read and written for a barrier of the grid waits behind the weights on their way to the multiprocessor, so
// LOADING stages of them are loaded at a time; SLOTS where a phase takes so long that its barrier does not matter.
__device__ void copy_weights(int phases, const Texts& texts, const Shared& shared) {
    const int shift = texts.shift;
    PipelineState<SLOTS> slot, oldest;  // oldest: of the stages on their way
    PipelineState<PHASES> at;
    int loading = 0;
    for (int i = 0; i < phases; ++i, at.next()) {
        mbar_wait(shared.phase_full(at.stage), at.parity);
        const Phase& phase = shared.phases()[at.stage];
        const int units = phase.kind == LINEAR ? ceil_div(phase.outputs, TILE) << shift : 0;
        const int bytes = phase.inputs * TILE * 2, most = units > 2 * UNITS * gridDim.x ? SLOTS : LOADING;
        const char* weights = reinterpret_cast<const char*>(phase.weights);
        const int first = first_unit(phase);
        mbar_arrive(freed(shared.phase_empty(at.stage), units | bytes | first | (u32)(size_t)weights, texts.zero()));
        for (int unit = first; unit < units; unit += gridDim.x) {
            const char* from = weights + (long long)(unit >> shift) * (bytes + TAIL_BYTES);
            for (int left = bytes; left > 0; left -= STAGE_BYTES, from += STAGE_BYTES, slot.next()) {
                const u32 size = left <= STAGE_BYTES ? left + TAIL_BYTES : STAGE_BYTES, full = shared.full(slot.stage);
                mbar_wait(shared.empty(slot.stage), slot.parity ^ 1);
                for (; loading >= most; --loading, oldest.next()) mbar_wait(shared.full(oldest.stage), oldest.parity);
                ++loading;
                mbar_expect(full, size);
                bulk_load(shared.ring + slot.stage * SLOT_BYTES, from, size, full, L2_EVICT_FIRST);  // read once a launch
            }
        }
    }
}

// Prefetches the keys and values of the next attention to L2: all that the rows have, since beams share them.
__device__ void prefetch_keys(int phases, const Texts& texts, const Shared& shared) {
    constexpr int BYTES = 8192;
    PipelineState<PHASES> at;
    for (int i = 0; i < phases; ++i, at.next()) {
        mbar_wait(shared.phase_full(at.stage), at.parity);
        const Phase& phase = shared.phases()[at.stage];
        if (phase.kind == ATTEND) {
            const long long key_bytes = phase.kv_heads * HEAD_DIM * 2, row_bytes = phase.room * key_bytes;
            const int texts_there = phase.slots ? texts.rows : texts.rows / texts.beam, parts = ceil_div(row_bytes, BYTES);
            for (int n = blockIdx.x + threadIdx.x % 32 * gridDim.x; n < texts_there * parts * 2; n += 32 * gridDim.x) {
                const int row = n / (2 * parts), part = n / 2 % parts;
                const long long left = min(phase.counts[row], phase.room) * key_bytes - part * BYTES;
                const scalar* store = n % 2 ? phase.values : phase.keys;
                if (left > 0)
                    bulk_prefetch(reinterpret_cast<const char*>(store) + row * row_bytes + part * BYTES,
                                  left < BYTES ? left : BYTES);
            }
        }
        __syncwarp();
        release(shared.phase_empty(at.stage));
    }
}
