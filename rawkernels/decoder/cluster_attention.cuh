#pragma once
// Attention of cluster_step.cu: a block attends for the rows of its turn of one head.
#include "decoder/attended.cuh"
#include "decoder/cluster.cuh"

// The keys of the rows of this block, which are the same in all layers.
struct Keys {
    const int* counts;    // of each row of the cluster
    const short* slots;   // the beam that stored a key: `stride` apart for each turn; null: the row itself did
    int stride, room, first_row, turns, beam;
    int warps;            // of a row, each with a range of its keys; 1, 2, 4 or 8
};
// Of the first lane. It tells ptxas that all lanes have the same.
__device__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }
__device__ float uniform_float(float x) { return __shfl_sync(~0u, x, 0); }

// Rows one after the other, KEYS keys at a time: the next keys and values are on their way, those of the first row since
// `begin`. Logits are products of 16 keys (operand a) and the query (operand b, the same in all 8 columns); a lane has those
// of the keys g, g + 8, ... OWN_TEXT: keys of the row's text, the new one is appended; else of the memory of its sentence.
template <bool OWN_TEXT> struct Attention {
    static constexpr int WIDE = 8, LANES = HEAD_DIM / WIDE, GROUPS = 32 / LANES;  // of a value; values of a warp at a time
    static constexpr int KEYS = 32, TILES = KEYS / 16, HALVES = HEAD_DIM / DEPTH, VALUES = KEYS / GROUPS;

    uint4 k[TILES][2][HALVES], v[VALUES];
    scalar *keys, *values;                                // of this head
    int mine, next;                                       // rows in their turns: the current one, that of the next keys
    int next_start, next_end, next_last, next_from;       // its keys that are left, the new one; element of its sentence
    int offset;                                           // element of key next_start + lane, or -1

    // Goes on to the row in `turn`.
    __device__ void look(const Shared& shared, const Keys& of, int turn) {
        next = turn, next_start = next_end = 0, next_last = -1;
        if (turn >= of.turns) return;
        const int row = turn * SHARERS + shared.rank % SHARERS, sentence = (of.first_row + row) / of.beam;
        const int count = min(max(uniform(of.counts[row]), 1), of.room);
        constexpr int MULTIPLE = 256 / HEAD_DIM;
        const int each = ((count + of.warps - 1) / of.warps + MULTIPLE - 1) & -MULTIPLE;
        next_start = (shared.warp & (of.warps - 1)) * each, next_end = min(count, next_start + each);
        if (OWN_TEXT) next_last = count - 1;
        next_from = (OWN_TEXT ? sentence * of.beam : sentence) * of.room * WIDTH;
    }
    // Loads keys, then values, of up to KEYS keys; those past the middle only if there are some.
    __device__ void load_keys(const Shared& shared, const Keys& of) {
        const int key = next_start + shared.lane, lane = shared.lane;
        offset = -1;
        if (key < next_end && key != next_last) {
            int owner = 0;
            if (OWN_TEXT && of.slots) owner = of.slots[next * of.stride + key];
            offset = next_from + (owner * of.room + key) * WIDTH;
        }
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) {
            if (i == TILES && next_start + KEYS / 2 >= next_end) break;
            const int at = __shfl_sync(~0u, offset, i * 8 + lane / 4);
#pragma unroll
            for (int p = 0; p < HALVES; ++p) {
                k[i / 2][i % 2][p] = make_uint4(0, 0, 0, 0);
                if (at >= 0) k[i / 2][i % 2][p] = *reinterpret_cast<const uint4*>(keys + at + p * DEPTH + lane % 4 * 8);
            }
        }
    }
    __device__ void load_values(const Shared& shared) {
        const int lane = shared.lane;
#pragma unroll
        for (int s = 0; s < VALUES; ++s) {
            if (s == VALUES / 2 && next_start + KEYS / 2 >= next_end) break;
            const int at = __shfl_sync(~0u, offset, s * GROUPS + lane % GROUPS);
            v[s] = make_uint4(0, 0, 0, 0);
            if (at >= 0) v[s] = *reinterpret_cast<const uint4*>(values + at + lane / GROUPS * WIDE);
        }
    }
    // The first loads, for a row of which nothing but its new key is from this step.
    __device__ void begin(const Shared& shared, const Keys& of, scalar* all_keys, scalar* all_values) {
        keys = all_keys + shared.rank / SHARERS * HEAD_DIM, values = all_values + shared.rank / SHARERS * HEAD_DIM;
        look(shared, of, shared.warp / of.warps);
        if (next >= of.turns) return;
        load_keys(shared, of);
        load_values(shared);
    }
    // All rows, when their queries are there.
    __device__ void run(const Shared& shared, const Keys& of) {
        const int lane = shared.lane, g = lane / 4, t = lane % 4, group = lane % GROUPS, column = lane / GROUPS * WIDE;
        const float scale = (HEAD_DIM == 64 ? 0.125f : 0.17677669529663687f) * LOG2E;
        const int teams = WARPS / of.warps, part = shared.warp & (of.warps - 1), sharer = shared.rank % SHARERS;
        uint4 q[HALVES] = {};
        u32 query = 0;
        Attended attended;
        mine = -1;
        const auto send = [&](int row) {  // all groups of lanes have the result
            const float whole = reciprocal(attended.sum);
            const auto pair = [&](int i) {
                return pack_pair(scalar(), attended.acc[i] * whole, attended.acc[i + 1] * whole);
            };
            const int place = AT_ATTENDED + place_of(row, shared.rank / SHARERS * HEAD_DIM + column);
            if (group < 4) send_to_all(shared, place, make_uint4(pair(0), pair(2), pair(4), pair(6)), ATTENDED);
        };
#pragma unroll 1
        while (next < of.turns) {
            if (mine != next) {
                mine = next, attended = {};
                query = shared.address + AT_HEAD + mine * 3 * HEAD_DIM * 2;
#pragma unroll
                for (int p = 0; p < HALVES; ++p) q[p] = load_shared_uint4(query + (p * DEPTH + t * 8) * 2);
                if (OWN_TEXT && part == 0 && group == 0) {
                    const int beam_row = (of.first_row + mine * SHARERS + sharer) % of.beam;
                    const int at = next_from + (beam_row * of.room + next_last) * WIDTH + column;
                    *reinterpret_cast<uint4*>(keys + at) = load_shared_uint4(query + (HEAD_DIM + column) * 2);
                    *reinterpret_cast<uint4*>(values + at) = load_shared_uint4(query + (2 * HEAD_DIM + column) * 2);
                }
            }
            const int start = next_start, end = next_end, last = next_last;
            const bool both = start + KEYS / 2 < end;
            next_start += KEYS;
            if (next_start >= next_end) look(shared, of, mine + teams);
            float logits[2 * TILES], most = attended.peak;
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                logits[2 * i] = logits[2 * i + 1] = NEG_INF;
                if (i && !both) break;
                float d[2][4] = {};
#pragma unroll
                for (int p = 0; p < HALVES; ++p) {
                    uint4 low = k[i][0][p], high = k[i][1][p];
                    if (OWN_TEXT) {
                        const u32 new_key = query + (HEAD_DIM + p * DEPTH + t * 8) * 2;
                        if (start + i * 16 + g == last) low = load_shared_uint4(new_key);
                        if (start + i * 16 + 8 + g == last) high = load_shared_uint4(new_key);
                    }
                    const u32 a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
                    mma(scalar(), d[0], a0, q[p].x, q[p].y);
                    mma(scalar(), d[1], a1, q[p].z, q[p].w);
                }
                if (start + i * 16 + g < end) logits[2 * i] = (d[0][0] + d[1][0]) * scale;
                if (start + i * 16 + 8 + g < end) logits[2 * i + 1] = (d[0][2] + d[1][2]) * scale;
                most = fmaxf(most, fmaxf(logits[2 * i], logits[2 * i + 1]));
            }
            const bool more = next < of.turns;
            if (more) load_keys(shared, of);
            attended.weigh(logits, most);
#pragma unroll
            for (int s = 0; s < VALUES; ++s) {
                if (s == VALUES / 2 && !both) break;
                const int key = start + s * GROUPS + group;
                const float weight = __shfl_sync(~0u, logits[s * GROUPS / 8], (s * GROUPS % 8 + group) * 4);
                if (OWN_TEXT && key == last) v[s] = load_shared_uint4(query + (2 * HEAD_DIM + column) * 2);
                attended.add(weight, v[s]);
            }
            if (more) load_values(shared);
            if (next != mine && of.warps == 1) {
                attended.reduce<1, GROUPS>();
                send(mine * SHARERS + sharer);
            }
        }
        if (of.warps == 1) return;
        float* state = shared.at<float>(AT_MERGE) + shared.warp * MERGE;
        if (mine >= 0) {
            attended.reduce<1, GROUPS>();
            attended.store(state, lane, group, column);
        }
        bar_sync(1, THREADS);
        if (part || mine < 0) return;
        float2 known = {NEG_INF, 0};  // lane w: of warp w of the row
        if (lane < of.warps) known = *reinterpret_cast<const float2*>(state + lane * MERGE + HEAD_DIM);
        float level = known.x;
#pragma unroll
        for (int other = 1; other < WARPS; other <<= 1) level = fmaxf(level, __shfl_xor_sync(~0u, level, other));
        const float weight = exp2_fast(known.x - uniform_float(level));
        attended = {};
        attended.sum = weight * known.y;
#pragma unroll
        for (int other = 1; other < WARPS; other <<= 1) attended.sum += __shfl_xor_sync(~0u, attended.sum, other);
        attended.sum = uniform_float(attended.sum);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            if (w >= of.warps) break;
            attended.add(__shfl_sync(~0u, weight, w), state + w * MERGE, column);
        }
        send(mine * SHARERS + sharer);
    }
};
