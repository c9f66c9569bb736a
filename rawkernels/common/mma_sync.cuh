#pragma once
// Products of 16-bit numbers by one warp: mma.sync m16n8k16; of f16 on sm_75 two m16n8k8, whose operands are halves of it.
//
// mma: d (16 x 8) += a (16 x 16) b (16 x 8). With g = lane / 4 and t = lane % 4, a lane holds
//   d[0..1] row g, columns 2t, 2t+1;  d[2..3] the same columns of row g + 8
//   a[0] row g, k 2t, 2t+1;  a[1] row g + 8;  a[2] row g, k + 8;  a[3] row g + 8, k + 8
//   b0 column g, k 2t, 2t+1;  b1 the same with k + 8
// so two adjacent 16 x 8 accumulators, packed, are one operand a.

__device__ __forceinline__ void mma(bf16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void mma(f16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
__device__ __forceinline__ void mma_half(float (&d)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b));
}
__device__ __forceinline__ void mma(f16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    mma_half(d, a[0], a[1], b0);
    mma_half(d, a[2], a[3], b1);
}
#endif
