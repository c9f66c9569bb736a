#pragma once
// The fields of an optimizer's `state`, in the order of FIELDS in gpuattn/ops/update/gradient_statistics.py.
enum Field {
    LEARNING_RATE, STEP, DIVISOR, LOSS_SCALE, NORM, COEFFICIENT, SKIP, CLEAN_STEPS, SKIPPED, SKIPPED_IN_A_ROW,
    CLAMPED, BLOCKS_DONE
};
__device__ __forceinline__ float number(const unsigned int* state, Field field) { return ((const float*)state)[field]; }
