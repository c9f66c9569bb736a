// One token of each text through a whole decoder in one launch.
//
// Every block stays on its multiprocessor and goes through the same list of phases (gpuattn/engine/decoder_step.py makes
// it). One thread of a block only copies weights, which no phase writes: it runs ahead of the others through all phases, as
// far as its ring of shared memory allows. Others copy the phases themselves and prefetch keys and values.
//
// Phases hand on states in marked words (words.cuh), without a barrier of the grid or a fence. Why no number is wrong:
// - A word's data and mark are one 64-bit access, which PTX makes whole, so what has the expected mark has the data of the
//   same store. Nothing else that a block writes is read by another in this launch: new keys and values are taken from the
//   words, the caches and logits are for later kernels. So no order between two accesses matters.
// - The mark is that of one phase of one launch: marks used by the launches before + the phase + 1. A word is written in
//   every use of its array, so before that it has the mark of the use before, or zeros from the allocation, and no mark
//   is 0 until 2^32 marks later, when no such zero is left.
// Why all blocks come to the end: the launch is cooperative, a block waits for earlier phases only, and no array is written
// again before its words were read. A unit writes when it has taken all that it reads: a product all of the phase before,
// attention the query, key and value of a row and head, all heads together all of the phase before.
// So if a word of phase w is written, all of phase w - 2 is, and of w - 1 too if w is a product, and those who wrote it have
// read. `_add` in decoder_step.py asserts that no array is written sooner. Were this wrong, a word would have a later mark:
// its reader waits, and faults after seconds.
//
// Constants: scalar = f16, bf16; ROWS = 8, 16, 32; HEAD_DIM = 32, 64, 128
// Launch:    grid = (multiprocessors,), block = (THREADS,), dynamic shared memory = SHARED_LIMIT
//            cooperative: decoder_step
// Arch: sm_90a
#include "decoder/attention.cuh"
#include "decoder/products.cuh"

__device__ void embed(const Phase& phase, const Texts& texts, u32 mark) {
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
            store_eight(words_of(phase.out) + row * width + word_at(column), x, mark);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decoder_step(
    const Phase* program,
    const int* tokens,     // (rows,): the last token of each row
    const int* positions,  // (rows,): its position
    u32* counter,          // marks used so far, at first 0; a zero, which the launch leaves zero
    int phases,
    int rows,              // up to ROWS
    int beam) {            // rows of a sentence
    extern __shared__ __align__(128) unsigned char dynamic[];
    const Shared shared = {dynamic, (u32)__cvta_generic_to_shared(dynamic)};
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; ++slot) {
            mbar_init(shared.full(slot), 1);
            mbar_init(shared.empty(slot), WARPS);
        }
        for (int slot = 0; slot < PHASES; ++slot) {
            mbar_init(shared.phase_full(slot), 1);
            mbar_init(shared.phase_empty(slot), 2 + WARPS);
        }
        mbar_init(shared.numbered(), 1);
        mbar_init_done();
    }
    __syncthreads();
    const Texts texts = {tokens, positions, rows, beam};
    if (threadIdx.x >= CONSUMERS) {
        decrease_registers<COPY_REGISTERS>();
        if (threadIdx.x == CONSUMERS) copy_weights(phases, shared);
        if (threadIdx.x == CONSUMERS + 32) copy_phases(program, phases, shared);
        if (threadIdx.x / 32 == WARPS + 2) prefetch_keys(phases, texts, shared);
        if (threadIdx.x == CONSUMERS + 96) number_marks(counter, phases, shared);
        return;
    }
    increase_registers<REGISTERS>();
    PipelineState<SLOTS> slot;
    u32 turn = 0;  // at the partial sums
    mbar_wait(shared.numbered(), 0);
    const u32 first_mark = *shared.first_mark();
#pragma unroll 1
    for (int i = 0; i < phases; ++i) {
        const PipelineState<PHASES> at(i);
        mbar_wait(shared.phase_full(at.stage), at.parity);
        const Phase& phase = shared.phases()[at.stage];
        if (phase.kind == LINEAR) multiply(phase, shared, texts, first_mark + i, slot, turn);
        else if (phase.kind == ATTEND) attend(phase, shared, texts, first_mark + i, turn);
        else embed(phase, texts, first_mark + i);
        __syncwarp();
        release(shared.phase_empty(at.stage));
    }
}
