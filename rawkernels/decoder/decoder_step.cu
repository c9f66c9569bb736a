// One token of each text through a whole decoder in one launch.
//
// Every block stays on its multiprocessor and goes through the same list of phases (gpuattn/engine/steps/decoder_step.py makes
// it); a barrier of the whole grid lies between phases. One thread of a block only copies weights, which no phase writes:
// it runs ahead of the others through all phases, as far as its ring of shared memory allows, so that a barrier does not
// stop the stream of weights. Others copy the phases themselves and prefetch keys and values.
//
// With POLLED there is no barrier of the grid: a phase waits for the numbers that it reads, see polled.cuh. Each phase has an
// array of its own, in two sets: a launch writes one and clears the other one for the next launch. Why no number is wrong:
// - A word is written once in a launch, after the launch before has cleared it, and PTX makes a word whole, so what is not
//   zero is what was written. Nothing else that a block writes is read by another in this launch: new keys and values are
//   taken from the words, caches and logits are for later launches. So no order between two accesses matters.
// - All that is written in a launch is cleared in the next one, by the block that would write it then, whatever the texts.
// Why all blocks come to the end: the launch is cooperative, and a block waits for words of earlier phases only.
//
// Constants: scalar = f16, bf16; ROWS = 8, 16, 32; HEAD_DIM = 32, 64; SHARES = 0; POLLED = 0
// Constants: scalar = f16, bf16; ROWS = 8, 16; HEAD_DIM = 128; SHARES = 0; POLLED = 0
// Constants: scalar = f16, bf16; ROWS = 8; HEAD_DIM = 32, 64, 128; SHARES = 1 (blocks share the keys of a row); POLLED = 0
// Constants: scalar = f16, bf16; ROWS = 8; HEAD_DIM = 32, 64, 128; SHARES = 0; POLLED = 1 (no barrier of the grid)
// Launch:    grid = (multiprocessors, a multiple of 1 << shift,), block = (THREADS,), dynamic shared memory = SHARED_LIMIT
//            cooperative: decoder_step
// Arch: sm_90a
#include "common/compiler.cuh"
#include "decoder/attention.cuh"
#include "decoder/products.cuh"

__device__ void embed(const Phase& phase, const Grid& grid, const Texts& texts) {
    constexpr int WIDTH = 8;
    const int width = phase.inputs;
    for (int row = first_unit(phase); row < texts.rows; row += gridDim.x) {
        const long long token = min(max(texts.tokens[row], 0), phase.outputs - 1);
        const long long position = phase.weights ? min(texts.positions[row], phase.room - 1) : 0;
        for (int column = threadIdx.x * WIDTH; column < width; column += CONSUMERS * WIDTH) {
            float x[WIDTH], place[WIDTH] = {};
            unpack(x, load_pack<WIDTH>(phase.x + token * width + column));
            if (phase.weights) unpack(place, load_pack<WIDTH>(phase.weights + position * width + column));
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) x[i] = x[i] * phase.scale + place[i];
            scalar* out = phase.out + (long long)row * width + column;
            if constexpr (POLLED) {
                hand_on(out + grid.own, x);
                clear_eight(out + grid.other);
            } else store_pack(out, x);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decoder_step(
    const Phase* program,
    const int* tokens,     // (rows,): the last token of each row
    const int* positions,  // (rows,): its position
    int* barrier,          // two zeros, which the launch leaves zero; with POLLED the first one is the number of the set
    int set,               // POLLED: elements of a set of arrays, see Grid
    int phases,
    int rows,
    int beam,              // rows of a sentence
    int shift) {           // 1 << shift groups of ROWS rows
    extern __shared__ __align__(128) unsigned char dynamic[];
    const Shared shared = {dynamic, (u32)__cvta_generic_to_shared(dynamic)};
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; ++slot) {
            mbar_init(shared.full(slot), 1);
            mbar_init(shared.empty(slot), WARPS);
        }
        for (int slot = 0; slot < PHASES; ++slot) {
            mbar_init(shared.phase_full(slot), 1);
            mbar_init(shared.phase_empty(slot), 3);
        }
        mbar_init_done();
    }
    __syncthreads();
    const Texts texts = {tokens, positions, rows, beam, shift};
    if (threadIdx.x >= CONSUMERS) {
        decrease_registers<COPY_REGISTERS>();
        if (threadIdx.x == CONSUMERS) copy_weights(phases, texts, shared);
        if (threadIdx.x == CONSUMERS + 32) copy_phases(program, phases, shared);
        if (threadIdx.x / 32 == WARPS + 2) prefetch_keys(phases, texts, shared);
        return;
    }
    increase_registers<REGISTERS>();
    PipelineState<SLOTS> slot;
    const int own = POLLED ? *barrier * set : 0;
#pragma unroll 1
    for (int i = 0; i < phases; ++i) {
        const PipelineState<PHASES> at(i);
        const Grid grid = {barrier, i * (int)gridDim.x, own, set - own, i + 1 == phases};
        mbar_wait(shared.phase_full(at.stage), at.parity);
        const Phase& phase = shared.phases()[at.stage];
        // opaque: otherwise the addresses of all kinds of phases are in registers from phase to phase
        const Shared own = {opaque(dynamic), opaque(shared.ring)};
        const int thread = opaque((int)threadIdx.x);
        if (phase.kind == LINEAR) multiply(phase, own, grid, slot, texts, thread);
        else if (phase.kind == ATTEND) attend(phase, own, grid, texts, thread);
        else embed(phase, grid, texts);
        if (i + 1 < phases) grid.arrive();
        if (threadIdx.x == 0) mbar_arrive(shared.phase_empty(at.stage));  // after a barrier of all that read it
    }
    if (threadIdx.x == 0 && increment_acq_rel(reinterpret_cast<u32*>(barrier + 1), gridDim.x - 1) == gridDim.x - 1)
        barrier[0] = POLLED ? 1 - barrier[0] : 0;
}
