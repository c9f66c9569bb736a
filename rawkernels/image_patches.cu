// Patches of uint8 images as rows of a matrix: a window of each image, at a random place and mirrored or not, is mixed with
// that of another image, normalised, and cut into patches.
// Constants: scalar = float, f16, bf16; PATCH = 16; CHANNELS = 3; PACK = 8; BLOCK = 256
// Constants: scalar = bf16; PATCH = 4; CHANNELS = 1; PACK = 4; BLOCK = 256
// Constants: scalar = float; PATCH = 7; CHANNELS = 3; PACK = 1; BLOCK = 256
// Launch:    grid = (ceil((before + patches) * PATCH * PATCH * CHANNELS / (PACK * BLOCK)), images), block = (BLOCK,).
//            A thread computes PACK adjacent elements of y; they lie in one row of a patch, since PACK divides
//            PATCH * CHANNELS. The random numbers of an image come from one Philox counter.
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/pack.cuh"
#include "common/philox.cuh"

static_assert(PATCH * CHANNELS % PACK == 0, "a pack lies in one row of a patch");
constexpr int ROW = PATCH * CHANNELS, WIDTH = PATCH * ROW;  // of a row of a patch, and of a patch

// A window of an image, `size` on a side, with black around the image.
struct Window {
    const unsigned char* image;
    int top, left;
    bool mirrored;
};

extern "C" __global__ void __launch_bounds__(BLOCK) image_patches(
    const unsigned char* __restrict__ images,  // (images, height, width, CHANNELS)
    const float* __restrict__ mix,             // (images,) share of an image beside the one that mirrors its place, or null
    scalar* __restrict__ y,                    // (images, before + patches, WIDTH)
    int height,
    int width,
    int size,                                  // of a window
    int before,                                // rows of zeros before the patches of an image
    int top,                                   // least place of a window, and how many there are from there on
    int tops,
    int left,
    int lefts,
    int flip,                                  // whether half of the windows are mirrored
    float scale0,                              // of each channel: element * scale + shift
    float scale1,
    float scale2,
    float shift0,
    float shift1,
    float shift2,
    unsigned int seed_low,
    unsigned int seed_high,
    unsigned int stream,
    unsigned int step,
    const unsigned int* __restrict__ device_step) {
    const int across = size / PATCH, rows = before + across * across;
    const int first = (blockIdx.x * BLOCK + threadIdx.x) * PACK;  // of the elements of an image
    if (first >= rows * WIDTH) return;
    scalar* to = y + (long long)blockIdx.y * rows * WIDTH + first;
    float values[PACK] = {};
    const int patch = first / WIDTH - before;
    if (patch < 0) {
        store_pack<PACK>(to, values);
        return;
    }
    const PhiloxKey key = philox_key(seed_low, seed_high, stream, step, device_step);
    const auto window_of = [&](int i) {
        const uint4 words = philox(key, i, 0);
        return Window{images + (long long)i * height * width * CHANNELS,
                      top + (int)(philox_lane(words, 0) * tops >> 16), left + (int)(philox_lane(words, 1) * lefts >> 16),
                      flip && philox_lane(words, 2) < 32768};
    };
    const int inside = first % WIDTH, at = inside % ROW;
    const int row = patch / across * PATCH + inside / ROW, col = patch % across * PATCH;
    const auto pixel = [&](const Window& window, int i) -> float {
        const int x = col + (at + i) / CHANNELS, channel = (at + i) % CHANNELS;
        const int v = window.top + row, u = window.left + (window.mirrored ? size - 1 - x : x);
        if (v < 0 || v >= height || u < 0 || u >= width) return 0.f;
        return window.image[(v * width + u) * CHANNELS + channel];
    };
    const Window own = window_of(blockIdx.y);
#pragma unroll
    for (int i = 0; i < PACK; ++i) values[i] = pixel(own, i);
    if (mix) {
        const Window other = window_of(gridDim.y - 1 - blockIdx.y);
        const float share = mix[blockIdx.y];
#pragma unroll
        for (int i = 0; i < PACK; ++i) values[i] = share * values[i] + (1.f - share) * pixel(other, i);
    }
#pragma unroll
    for (int i = 0; i < PACK; ++i) {
        const int channel = (at + i) % CHANNELS;
        const float scale = channel == 0 ? scale0 : channel == 1 ? scale1 : scale2;
        values[i] = values[i] * scale + (channel == 0 ? shift0 : channel == 1 ? shift1 : shift2);
    }
    store_pack<PACK>(to, values);
}
