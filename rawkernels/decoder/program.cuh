#pragma once
// The program of decoder_step.cu, what its blocks share, and the threads that copy weights and phases ahead.
#include "common/global_memory.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"

enum Kind { EMBED, LINEAR, ATTEND };
enum Norm { NO_NORM, LAYER_NORM, RMS_NORM };
enum Activation { NO_ACTIVATION, RELU, GELU };

// One step of the program, the same for all blocks. States are (rows, width), in marked words (words.cuh), and so are the
// statistics of rows; logits, the result of the last phase, are plain.
struct alignas(16) Phase {
    int kind, norm, activation;
    int rotation;             // the block that takes the first unit of work
    int outputs, inputs;      // LINEAR. EMBED: rows of the table, width
    float eps, scale;         // of the norm; EMBED: of the table; ATTEND: of the products
    const scalar* x;          // LINEAR: input (rows, inputs), ATTEND: queries, both of the phase before; EMBED: table
    const scalar* weights;    // LINEAR: packed by pack_weights; EMBED: positions (length, width) or null
    const scalar* residual;   // (rows, outputs), added to the result, or null
    const u64* statistics;    // (rows, 2): mean and 1 / deviation of the rows of `residual`, or null: it is added as it is
    const scalar* gain;       // (outputs,), of the norm of `residual`
    const scalar* shift;      // or null
    u64* statistics_out;      // LINEAR with a norm: the statistics of x, or null
    scalar* out;              // (rows, outputs)
    scalar* keys;             // ATTEND: (sentences or rows, room, kv_heads, HEAD_DIM)
    scalar* values;
    const int* counts;        // keys of a row, or without `slots` of a sentence
    const short* slots;       // (sentences, beam, room) as in step_attention.cu: own keys, the new one is appended; or null:
                              // keys of a memory, the same for all beams of a sentence
    int heads, kv_heads, room, stride;  // stride: of the rows of x, in elements. EMBED: room is the number of positions
    int warps;                          // ATTEND: of a row and head; 1, 2, 4 or 8
    float per_beam, per_head, per_kv_head;  // 1 / beam, 1 / heads, kv_heads / heads
    int residual_age, statistics_age;       // how many phases before this one they are written
    int marked, unused;                     // whether `out` has marked words
};
static_assert(sizeof(Phase) == 176);

constexpr int WARPS = 8, CONSUMERS = 32 * WARPS, THREADS = CONSUMERS + 128;
constexpr int COPY_REGISTERS = 40, REGISTERS = 232;             // with 384 threads a launch gives 168 to each
static_assert(COPY_REGISTERS + 2 * REGISTERS == 3 * 168, "decoder_step.cu: setmaxnreg would wait forever");
constexpr int TILE = 16, DEPTH = 32, PIECE = TILE * DEPTH;      // outputs, inputs and elements of a packed piece
constexpr int TAIL_BYTES = 2 * TILE * 4;                        // sums and offsets behind the pieces of a unit
constexpr int PIECES = ROWS == 32 ? 2 : 4;                      // of a stage for each warp
constexpr int STAGE_DEPTH = PIECES * WARPS * DEPTH, STAGE_BYTES = STAGE_DEPTH * TILE * 2;
constexpr int STEP = ROWS == 32 ? 1 : PIECES, STEPS = PIECES / STEP;  // pieces whose states a warp loads at a time
constexpr int SLOT_BYTES = STAGE_BYTES + TAIL_BYTES;
constexpr int COLUMNS = ROWS / 8;                               // operands b
constexpr int UNITS = 2;                                        // that a block multiplies at a time
constexpr int PITCH = ROWS == 8 ? 8 : ROWS + 8;                 // of partial sums, in floats
constexpr int PARTIAL = WARPS * TILE * PITCH;                   // partial sums of a unit, in floats
constexpr int PHASES = 4;                                       // in shared memory
constexpr int HALVES = ROWS == 32 ? 1 : 2;                      // that hold partial sums in turn
constexpr int ROW_SUMS = WARPS * ROWS * 2;                      // in floats
constexpr int FIXED_BYTES = HALVES * (UNITS * PARTIAL + ROW_SUMS) * 4 + PHASES * sizeof(Phase) + 512;
constexpr int SHARED_LIMIT = 232448, SLOTS = (SHARED_LIMIT - FIXED_BYTES) / SLOT_BYTES;  // of a block on Hopper
static_assert((2 * (SLOTS + PHASES) + 2) * 8 <= 512 && SLOTS >= 4);
static_assert(WARPS * (HEAD_DIM + 8) <= UNITS * PARTIAL, "decoder_step.cu: attention has its partial sums there");

// The dynamic shared memory: a ring of stages, partial sums, sums of rows, a ring of phases, and their barriers.
struct Shared {
    unsigned char* base;
    u32 ring;  // the address of base
    static constexpr int SUMS = SLOTS * SLOT_BYTES, OF_ROWS = SUMS + HALVES * UNITS * PARTIAL * 4;
    static constexpr int PROGRAM = OF_ROWS + HALVES * ROW_SUMS * 4, BARRIERS = PROGRAM + PHASES * sizeof(Phase);
    static constexpr int FIRST_MARK = BARRIERS + (2 * (SLOTS + PHASES) + 1) * 8;
    __device__ float* partial(u32 turn) const {  // UNITS of PARTIAL
        return reinterpret_cast<float*>(base + SUMS) + turn % HALVES * UNITS * PARTIAL;
    }
    __device__ float* rows(u32 turn) const {     // (WARPS, ROWS, 2), of a warp's inputs: sums, and of squares
        return reinterpret_cast<float*>(base + OF_ROWS) + turn % HALVES * ROW_SUMS;
    }
    __device__ u32* first_mark() const { return reinterpret_cast<u32*>(base + FIRST_MARK); }
    __device__ Phase* phases() const { return reinterpret_cast<Phase*>(base + PROGRAM); }
    __device__ u32 full(int slot) const { return ring + BARRIERS + slot * 8; }
    __device__ u32 empty(int slot) const { return full(SLOTS + slot); }
    __device__ u32 phase_full(int slot) const { return full(2 * SLOTS + slot); }
    __device__ u32 phase_empty(int slot) const { return full(2 * SLOTS + PHASES + slot); }
    __device__ u32 numbered() const { return full(2 * (SLOTS + PHASES)); }  // the first mark is there
};
struct Texts {
    const int *tokens, *positions;  // (rows,): the last token of each row, its position
    int rows, beam;                 // beam: rows of a sentence
};

__device__ uint4 load_states(const scalar* from) { return *reinterpret_cast<const uint4*>(from); }
__device__ void sync_consumers() { bar_sync(1, CONSUMERS); }

// Partial sums of a turn are written, then all wait, then they are read. The next turn has the other half, so the wait of
// the turn between two uses of a half lies behind all that read it. Where there is one half, all wait here too.
__device__ void begin_turn() {
    if constexpr (HALVES == 1) sync_consumers();
}

__device__ int first_unit(const Phase& phase) {
    const int unit = blockIdx.x - phase.rotation;
    return unit < 0 ? unit + gridDim.x : unit;
}
__device__ int ceil_div(long long a, int b) { return (a + b - 1) / b; }
__device__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// ---- the threads that copy
// Gives the block the mark of the first phase. `counter`: marks used by the launches before, and a zero. The last block to
// have read it adds those of this launch; what the next launch reads is written then, as it begins when this one has ended.
__device__ void number_marks(u32* counter, int phases, const Shared& shared) {
    *shared.first_mark() = load_relaxed(counter) + 1;
    mbar_arrive(shared.numbered());
    if (increment_acq_rel(counter + 1, gridDim.x - 1) == gridDim.x - 1) *counter += phases;
}

__device__ void copy_phases(const Phase* program, int phases, const Shared& shared) {
    PipelineState<PHASES> slot;
    for (int i = 0; i < phases; ++i, slot.next()) {
        mbar_wait(shared.phase_empty(slot.stage), slot.parity ^ 1);
        const u32 full = shared.phase_full(slot.stage);
        mbar_expect(full, sizeof(Phase));
        bulk_load((u32)__cvta_generic_to_shared(shared.phases() + slot.stage), program + i, sizeof(Phase), full);
    }
}

__device__ void copy_weights(int phases, const Shared& shared) {
    PipelineState<SLOTS> slot;
    PipelineState<PHASES> at;
    for (int i = 0; i < phases; ++i, at.next()) {
        mbar_wait(shared.phase_full(at.stage), at.parity);
        const Phase& phase = shared.phases()[at.stage];
        const int units = phase.kind == LINEAR ? ceil_div(phase.outputs, TILE) : 0;
        const int bytes = phase.inputs * TILE * 2;
        const char* weights = reinterpret_cast<const char*>(phase.weights);
        const int first = first_unit(phase);
        mbar_arrive(shared.phase_empty(at.stage));
        for (int unit = first; unit < units; unit += UNITS * gridDim.x) {
            const int here = unit + gridDim.x < units ? UNITS : 1;
            const char* from = weights + (long long)unit * (bytes + TAIL_BYTES);
            const long long next = (long long)gridDim.x * (bytes + TAIL_BYTES);
            for (int left = bytes; left > 0; left -= STAGE_BYTES, from += STAGE_BYTES)
                for (int u = 0; u < here; ++u, slot.next()) {
                    const u32 size = left <= STAGE_BYTES ? left + TAIL_BYTES : STAGE_BYTES, full = shared.full(slot.stage);
                    mbar_wait(shared.empty(slot.stage), slot.parity ^ 1);
                    mbar_expect(full, size);
                    bulk_load(shared.ring + slot.stage * SLOT_BYTES, from + u * next, size, full);
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
