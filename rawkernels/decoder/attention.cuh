#pragma once
// Attention of decoder_step.cu: of a new token to its text, or to a memory.
#include "common/mma_sync.cuh"
#include "decoder/attended.cuh"
#include "decoder/program.cuh"

// The attention of a row and head by phase.warps warps, each with a range of the keys; or by all warps of several blocks,
// of which each then has one row and head alone. Logits are products of 16 keys (operand a) and the query (operand b, the
// same in all 8 columns); a lane has those of the keys g, g + 8, ...
__device__ void attend(const Phase& phase, const Shared& shared, const Grid& grid, const Texts& texts, int thread) {
    constexpr int WIDTH = 8, LANES = HEAD_DIM / WIDTH, GROUPS = 32 / LANES;       // of a value; values of a warp at a time
    constexpr int KEYS = HEAD_DIM == 128 ? 16 : 32, TILES = KEYS / 16, PARTS = HEAD_DIM / DEPTH, VALUES = KEYS / GROUPS;
    const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int group = lane / LANES, column = lane % LANES * WIDTH;
    const int team = WARPS / phase.warps, part = warp & (phase.warps - 1), heads = phase.heads, units = texts.rows * heads;
    const int split = split_of(phase);
    const int key_stride = phase.kv_heads * HEAD_DIM;
    const int row_stride = phase.room * key_stride;
    const bool own = phase.slots != nullptr, shares = own && texts.beam > 1;
    const float per_beam = phase.per_beam, scale = phase.scale * LOG2E;
    float* partial = shared.partial();
    int base = first_unit(phase);
    bool waited = false;
    if (base >= units << split) return grid.wait();
#pragma unroll 1
    for (; base < units << split; base += gridDim.x * team) {
        const int share = base & ((1 << split) - 1);
        const int wanted = (base >> split) + warp / phase.warps * gridDim.x, unit = min(wanted, units - 1);
        const bool mine = wanted == unit;
        const int of_beams = quotient(unit, per_beam);
        const int sentence = quotient(of_beams, phase.per_head), head = of_beams - sentence * heads;
        const int beam_row = unit - of_beams * texts.beam, row = sentence * texts.beam + beam_row;
        const int kv_head = quotient(head, phase.per_kv_head);
        const int to = (row << split) + share;
        scalar* const out = phase.out + ((long long)to * heads + head) * HEAD_DIM + column;
        if (POLLED && mine && part == 0 && group == 0) clear_eight(out + grid.other);
        Attended attended;
        int start = 0, end = 0, last = -1;  // keys of this warp; the new key
        const short* slots = phase.slots + (long long)row * phase.room;
        if (mine) {
            const int count = keys_of(phase, row, sentence);
            const int each = shares_of(phase, count).each;
            start = (share * phase.warps + part) * each, end = min(count, start + each);
            if (split && start - part * each >= count) return grid.wait();  // the whole block: fewer share the keys
            if (own) last = count - 1;
        }
        const long long offset = (own ? sentence * texts.beam : sentence) * (long long)row_stride + kv_head * HEAD_DIM;
        const long long first = offset + (own && !shares ? beam_row * row_stride : 0);
        const scalar *all_keys = phase.keys + first + t * 8, *all_values = phase.values + first + column;
        uint4 k[TILES][2][PARTS], v[VALUES], new_k[PARTS] = {}, new_v = {};
        // Loads have no conditions: instead of a key that is not there the first one is loaded, and not used.
        const int old_end = own ? min(end, last) : end;
        const auto place = [&](int key) {
            const int known = key < old_end ? key : 0;
            int at = known * key_stride;
            if (shares) at += slots[known] * row_stride;
            return at;
        };
        const auto load_keys = [&] {
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) {
                const scalar* from = all_keys + place(start + i * 8 + g);
#pragma unroll
                for (int p = 0; p < PARTS; ++p) k[i / 2][i % 2][p] = load_states(from + p * DEPTH);
            }
        };
        const auto load_values = [&] {
#pragma unroll
            for (int s = 0; s < VALUES; ++s) v[s] = load_states(all_values + place(start + s * GROUPS + group));
        };
        load_keys();
        load_values();
        if (!waited) grid.wait();
        waited = true;
        uint4 q[PARTS] = {};
        if (mine) {
            const scalar* query = phase.x + grid.own + (long long)row * phase.stride;
            const scalar *key = query + (heads + kv_head) * HEAD_DIM, *value = key + key_stride;
            uint4 stored = {};  // the new key, in the order of values
            const long long begin = clock64();
            bool missing;
            do {
                missing = false;
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    q[p] = load_handed(query + head * HEAD_DIM + p * DEPTH + t * 8);
                    if (own) new_k[p] = load_handed(key + p * DEPTH + t * 8);
                }
                if (own) new_v = load_handed(value + column), stored = load_handed(key + column);
                if (!POLLED) break;
#pragma unroll
                for (int p = 0; p < PARTS; ++p) missing |= lacks(q[p]) || (own && lacks(new_k[p]));
                missing |= own && (lacks(new_v) || lacks(stored));
                fault_after_seconds(begin);
            } while (__any_sync(~0u, missing));
            if (own && share == 0 && part == 0 && lane < LANES && head == kv_head * (heads / phase.kv_heads)) {
                const long long at = offset + beam_row * row_stride + last * key_stride + column;
                *reinterpret_cast<uint4*>(phase.keys + at) = stored;
                *reinterpret_cast<uint4*>(phase.values + at) = new_v;
            }
        }
#pragma unroll 1
        while (start < end) {
            float logits[2 * TILES], most = attended.peak;
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                float d[4] = {};
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    uint4 low = k[i][0][p], high = k[i][1][p];
                    if (start + i * 16 + g == last) low = new_k[p];
                    if (start + i * 16 + 8 + g == last) high = new_k[p];
                    const u32 a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
                    mma(scalar(), d, a0, q[p].x, q[p].y);
                    mma(scalar(), d, a1, q[p].z, q[p].w);
                }
                logits[2 * i] = start + i * 16 + g < end ? d[0] * scale : NEG_INF;
                logits[2 * i + 1] = start + i * 16 + 8 + g < end ? d[2] * scale : NEG_INF;
                most = fmaxf(most, fmaxf(logits[2 * i], logits[2 * i + 1]));
            }
            const int here = start;
            start += KEYS;
            if (start < end) load_keys();
            attended.weigh(logits, most);
#pragma unroll
            for (int s = 0; s < VALUES; ++s) {
                const int key = here + s * GROUPS + group;
                const float weight = __shfl_sync(~0u, logits[s * GROUPS / 8], (s * GROUPS % 8 + group) * 4);
                attended.add(weight, key < old_end ? v[s] : new_v);
            }
            if (start < end) load_values();
        }
        attended.reduce<LANES, 32>();
        if (phase.warps > 1) {
            constexpr int SIZE = Attended::SIZE;
            float* state = partial + warp * SIZE;
            attended.store(state, lane, group, column);
            sync_consumers();
            if (part == 0) {
                float weights[WARPS], sums[WARPS], level = NEG_INF;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    weights[w] = NEG_INF, sums[w] = 0;
                    if (w >= phase.warps) continue;
                    const float2 known = *reinterpret_cast<const float2*>(state + w * SIZE + HEAD_DIM);
                    weights[w] = known.x, sums[w] = known.y;
                    level = fmaxf(level, known.x);
                }
                attended = {};
                attended.peak = level;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    if (w >= phase.warps) continue;
                    const float weight = exp2_fast(weights[w] - level);
                    attended.sum += weight * sums[w];
                    attended.add(weight, state + w * SIZE, column);
                }
            }
            partial = partial == shared.partial() ? shared.partial() + PARTIAL : shared.partial();
        }
        if (part == 0 && group == 0 && mine) {
            const float whole = reciprocal(attended.sum);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) attended.acc[i] *= whole;
            if constexpr (POLLED) hand_on(out + grid.own, attended.acc);
            else store_pack(out, attended.acc);
            if (split && column == 0) phase.shares[head * ROWS + to] = make_float2(attended.peak, attended.sum);
        }
    }
}
