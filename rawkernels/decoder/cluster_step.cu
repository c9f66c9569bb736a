// One token of each text through the decoder of a translation model by clusters of blocks.
//
// A cluster has all layers for its rows: no block ever waits for another cluster. A block has 32 columns of the states and
// the rows of a head that it shares with none, or one, or three others; what the others need it sends into their shared
// memory, by stores that count at an mbarrier there. Each warp streams its weights, in the order of its products, through
// slots of its own: they are on their way while blocks wait for one another.
//
// Constants: scalar = f16, bf16; ROWS = 8, 16; WIDTH = 256; INNER = 1024; HEAD_DIM = 64
// Constants: scalar = f16, bf16; ROWS = 8; WIDTH = 512; INNER = 2048; HEAD_DIM = 64
// Constants: scalar = f16, bf16; ROWS = 8, 16; WIDTH = 128; INNER = 256, 512; HEAD_DIM = 32 (multiples of 32 up to 512)
// Launch:    grid = (clusters * WIDTH / 32,), block = (THREADS,), dynamic shared memory = SHARED_LIMIT
//            wide clusters: cluster_step
// Arch: sm_90a
#include "common/compiler.cuh"
#include "decoder/cluster_attention.cuh"
#include "decoder/cluster_products.cuh"

// out = residual + y, for two columns of a row: `residual` as it is, or its norm.
__device__ float2 add_residual(const Shared& shared, float2 y, int row, int column, bool normed, int gains) {
    const int at = place_of(row, shared.rank * OWN + column) + column % 8 * 2;
    float2 x = unpack_pair(scalar(), *shared.at<u32>(AT_X + at));
    if (normed) {
        const float2 known = *(shared.at<float2>(AT_STATISTICS) + row);
        const float2 gain = unpack_pair(scalar(), *shared.at<u32>(gains + column * 2));
        const float2 shift = unpack_pair(scalar(), *shared.at<u32>(gains + (OWN + column) * 2));
        x.x = (x.x - known.x) * known.y * gain.x + shift.x;
        x.y = (x.y - known.x) * known.y * gain.y + shift.y;
    }
    return make_float2(x.x + y.x, x.y + y.y);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1) cluster_step(
    const char* packed,          // (CLUSTER, WARPS, layers, STREAM) pieces
    const char* tails,           // (layers, CLUSTER, TAIL_BYTES)
    const Layer* layers_of,      // (layers,), at most MOST_LAYERS
    const int* tokens,           // (all_rows,): the last token of each row
    const int* positions,        // (all_rows,): its position
    const scalar* table,         // (vocabulary, WIDTH)
    const scalar* places,        // (places_room, WIDTH), or null
    const int* counts,           // (all_rows,): keys of each row, with the new one
    const short* slots,          // (all_rows, room): as in step_attention.cu
    const int* memory_counts,    // (sentences,)
    const scalar* gain,          // (WIDTH,), of the norm behind the last layer
    const scalar* shift,         // (WIDTH,), or null
    scalar* out,                 // (all_rows, WIDTH)
    int layers,
    int all_rows,
    int rows_of_cluster,         // a multiple of beam, at most ROWS
    int beam,                    // rows of a sentence
    int vocabulary,
    int places_room,
    int room,
    int memory_room,
    int own_warps,               // of a row in attention: 1, 2, 4 or 8; if more than 1, all rows of a block have some at once
    int memory_warps,
    int activation,
    int pre_norm,                // whether residuals are added as they are
    float scale,                 // of the table
    float eps) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    Shared shared = {dynamic, (u32)__cvta_generic_to_shared(dynamic), unknown_zero(beam), cluster_rank(),
                     uniform(threadIdx.x / 32), (int)threadIdx.x % 32};
    const int first_row = blockIdx.x / CLUSTER * rows_of_cluster, rows = min(rows_of_cluster, all_rows - first_row);
    const int rank = shared.rank, sharer = rank % SHARERS, thread = threadIdx.x, lane = shared.lane;
#pragma unroll
    for (int i = 0; i < (CLUSTER + 3) / 4; ++i) shared.peers[i] = address_in(shared.address, (lane % 4 + 4 * i + rank) % CLUSTER);
    const u32 head_peer = address_in(shared.address, rank - sharer + lane / 4 % SHARERS);  // of the rows lane / 4, + 8, ...
    const auto load_tails = [&](int n, const Layer& of) {  // thread 0: of layer n
        const int buffer = n & 1;
        const u32 full = shared.tails_full(buffer), gains = shared.address + AT_GAINS + buffer * GAIN_BYTES;
        u32 bytes = TAIL_BYTES;
        if (!pre_norm)
            for (int i = 0; i < 3; ++i)
                if (of.normed[i]) bytes += OWN * 2 * (of.shift[i] ? 2 : 1);
        mbar_expect(full, bytes);
        bulk_load(shared.address + AT_TAILS + buffer * TAIL_BYTES, tails + (long long)(n * CLUSTER + rank) * TAIL_BYTES,
                  TAIL_BYTES, full);
        if (!pre_norm)
            for (int i = 0; i < 3; ++i) {
                if (!of.normed[i]) continue;
                bulk_load(gains + i * OWN * 4, of.gain[i] + rank * OWN, OWN * 2, full);
                if (of.shift[i]) bulk_load(gains + i * OWN * 4 + OWN * 2, of.shift[i] + rank * OWN, OWN * 2, full);
            }
    };
    if (lane == 0)
        for (int n = 0; n < SLOTS; ++n) mbar_init(shared.full(n), 1);
    if (thread == 0) {
        for (int n = 0; n < EVENTS; ++n) mbar_init(shared.event(n), 1);
        mbar_init(shared.tails_full(0), 1);
        mbar_init(shared.tails_full(1), 1);
    }
    if (lane == 0) mbar_init_done();
    for (int i = thread; i < 2 * GAIN_BYTES / 4; i += THREADS) *shared.at<u32>(AT_GAINS + i * 4) = 0;  // shifts that are null
    fence_async_proxy();
    __syncthreads();
    Weights weights;
    weights.begin(shared, packed, layers);
    if (thread == 0)
        for (int n = 0; n < min(layers, 2); ++n) load_tails(n, layers_of[n]);
    for (int i = thread; i < layers * (int)sizeof(Layer) / 16; i += THREADS)
        shared.at<uint4>(AT_LAYERS)[i] = reinterpret_cast<const uint4*>(layers_of)[i];
    const int turns = rows > sharer ? (rows - sharer + SHARERS - 1) / SHARERS : 0;  // rows of this block in attention
    for (int row = thread; row < rows; row += THREADS) {
        shared.at<int>(AT_COUNTS)[row] = counts[first_row + row];
        shared.at<int>(AT_COUNTS)[ROWS + row] = memory_counts[(first_row + row) / beam];
    }
    if (beam > 1 && room <= ROOM)
        for (int i = thread; i < turns * room; i += THREADS) {
            const int turn = i / room, key = i - turn * room;
            shared.at<short>(AT_SLOTS)[turn * ROOM + key] = slots[(first_row + turn * SHARERS + sharer) * room + key];
        }
    for (int i = thread; i < rows * (WIDTH / 8); i += THREADS) {
        const int row = i / (WIDTH / 8), column = i % (WIDTH / 8) * 8;
        const long long token = min(max(tokens[first_row + row], 0), vocabulary - 1);
        float x[8], place[8] = {};
        unpack(x, load_pack<8>(table + token * WIDTH + column));
        if (places) {
            const long long position = min(positions[first_row + row], places_room - 1);
            unpack(place, load_pack<8>(places + position * WIDTH + column));
        }
#pragma unroll
        for (int n = 0; n < 8; ++n) x[n] = x[n] * scale + place[n];
        const auto pair = [&](int n) { return pack_pair(scalar(), x[n], x[n + 1]); };
        *shared.at<uint4>(AT_X + place_of(row, column)) = make_uint4(pair(0), pair(2), pair(4), pair(6));
    }
    __syncthreads();
    cluster_arrive();
    cluster_wait();
    Events events;
    const u32 states_bytes = rows * WIDTH * 2;
    const bool copied = room <= ROOM;
    const short* own_slots = copied ? shared.at<short>(AT_SLOTS) : slots + (first_row + sharer) * room;
    const Keys own = {shared.at<int>(AT_COUNTS), beam > 1 ? own_slots : nullptr, copied ? ROOM : SHARERS * room, room,
                      first_row, turns, beam, own_warps};
    const Keys of_memory = {shared.at<int>(AT_COUNTS) + ROWS, nullptr, 0, memory_room, first_row, turns, beam, memory_warps};
    bool sent = false;  // the states are on their way, not those of the beginning
#pragma unroll 1
    for (int n = 0; n < layers; ++n) {
        const int buffer = n & 1, tails_at = AT_TAILS + buffer * TAIL_BYTES, gains = AT_GAINS + buffer * GAIN_BYTES;
        mbar_wait(shared.tails_full(buffer), n >> 1 & 1);
        const Layer& layer = shared.at<Layer>(AT_LAYERS)[n];
        const auto tail = [&](int unit) { return tails_at + unit * 2 * TILE * 4; };
        // to the block that has the row in its turn: two columns of a head's queries, keys or values
        const auto send_head = [&](u32 pair, int part, int row, int column) {
            if (row >= rows) return;
            const int place = (row / SHARERS * 3 + part) * HEAD_DIM + sharer * OWN + column;
            send_shared(head_peer + AT_HEAD + place * 2, pair, head_peer + AT_BARRIERS + HEAD * 8);
        };
        const auto add_and_send = [&](float2 y, int unit, int row, int output, int norm) {
            const int column = unit * TILE + output;
            y = add_residual(shared, y, row, column, !pre_norm && layer.normed[norm], gains + norm * OWN * 4);
            const uint4 all = gather(pack_pair(scalar(), y.x, y.y), lane);
            if (row < rows) send_to_all(shared, AT_X + place_of(row, rank * OWN + column / 8 * 8), all, STATES);
        };
        // ---- attention to the text
        {
            Attention<true> attention;
            if (COLUMNS == 1) attention.begin(shared, own, layer.keys, layer.values);
            if (sent) events.wait(shared, STATES, states_bytes);
            multiply_units<PROJECTED>(
                shared, weights, tail(AT_PROJECTED), layer.normed[0], eps, NO_ACTIVATION,
                [&](int unit, int row, int output, u32 pair) { send_head(pair, unit / 2, row, unit % 2 * TILE + output); });
            if (COLUMNS > 1) attention.begin(shared, own, layer.keys, layer.values);
            events.wait(shared, HEAD, turns * 3 * HEAD_DIM * 2);
            attention.run(shared, own);
        }
        {
            Attention<false> attention;
            const auto begin = [&] {
                attention.begin(shared, of_memory, const_cast<scalar*>(layer.memory_keys),
                                const_cast<scalar*>(layer.memory_values));
            };
            if (COLUMNS == 1) begin();
            events.wait(shared, ATTENDED, states_bytes);
            multiply_result<false>(
                shared, weights, AT_ATTENDED, tail(AT_OUT), false, eps,
                [&](int unit, int row, int output, float2 y) { add_and_send(y, unit, row, output, 0); });
            // ---- attention to the source
            events.wait(shared, STATES, states_bytes);
            multiply_result<true>(
                shared, weights, AT_X, tail(AT_QUERY), layer.normed[1], eps, [&](int unit, int row, int output, float2 y) {
                    send_head(pack_pair(scalar(), y.x, y.y), 0, row, unit * TILE + output);
                });
            if (COLUMNS > 1) begin();
            events.wait(shared, HEAD, turns * HEAD_DIM * 2);
            attention.run(shared, of_memory);
        }
        events.wait(shared, ATTENDED, states_bytes);
        multiply_result<false>(
            shared, weights, AT_ATTENDED, tail(AT_CROSS), false, eps,
            [&](int unit, int row, int output, float2 y) { add_and_send(y, unit, row, output, 1); });
        // ---- feed-forward network: the hidden columns of this block, its part of all sums, then all parts of its own
        events.wait(shared, STATES, states_bytes);
        multiply_units<HIDDEN>(
            shared, weights, tail(AT_HIDDEN), layer.normed[2], eps, activation,
            [&](int unit, int row, int output, u32 pair) {
                const int column = unit * TILE + output;
                *shared.at<u32>(AT_INNER + place_of(row, column) + column % 8 * 2) = pair;
            });
        bar_sync(1, THREADS);
#pragma unroll 1
        for (int unit = shared.warp; unit < (LAST_UNITS + WARPS - 1) / WARPS * WARPS; unit += WARPS) {
            if (unit >= LAST_UNITS) {
                weights.skip(shared, LAST_PIECES);
                break;
            }
            Sums none;
            const Sums sums = accumulate<LAST_PIECES, false>(shared, weights, shared.address + AT_INNER, none, false);
            const u32 there = address_in(shared.address, unit / 2), bar = there + AT_BARRIERS + SPREAD * 8;
            const u32 to = there + AT_SPREAD + ((rank * OWN + unit % 2 * TILE + lane / 4) * SPREAD_PITCH + lane % 4 * 2) * 4;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                if (c * 8 + lane % 4 * 2 >= rows) continue;
                send_shared(to + c * 32, make_float2(sums.of[c][0], sums.of[c][1]), bar);
                send_shared(to + (8 * SPREAD_PITCH + c * 8) * 4, make_float2(sums.of[c][2], sums.of[c][3]), bar);
            }
        }
        events.wait(shared, SPREAD, CLUSTER * OWN * 4 * ((rows + 1) & ~1));
#pragma unroll 1
        for (int item = shared.warp; item < 4 * COLUMNS; item += WARPS) {
            const int eight = item / COLUMNS, row = item % COLUMNS * 8 + lane / 4, output = eight % 2 * 8 + lane % 4 * 2;
            const float* at = shared.at<float>(AT_SPREAD) + (eight / 2 * TILE + output) * SPREAD_PITCH + row;
            float2 y = *shared.at<float2>(tail(AT_LAST + eight / 2) + (TILE + output) * 4);
#pragma unroll
            for (int block = 0; block < CLUSTER; ++block)
                y.x += at[block * OWN * SPREAD_PITCH], y.y += at[(block * OWN + 1) * SPREAD_PITCH];
            add_and_send(y, eight / 2, row, output, 2);
        }
        sent = true;
        bar_sync(1, THREADS);  // all have read the tails of this layer
        if (thread == 0 && n + 2 < layers) load_tails(n + 2, shared.at<Layer>(AT_LAYERS)[n + 2]);
    }
    if (sent) events.wait(shared, STATES, states_bytes);
    // From here on a block may end, without a barrier of the cluster: it has waited for all bytes of every event that others
    // ever send to it, and nobody reads its shared memory. So nothing is on its way to a block that has ended.
    // ---- the norm behind the layers: a row by a warp
#pragma unroll 1
    for (int row = rank + shared.warp * CLUSTER; row < rows; row += CLUSTER * WARPS) {
        constexpr int VECTORS = WIDTH / 8, EACH = (VECTORS + 31) / 32;
        float x[EACH][8], sum = 0, squares = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int vector = shared.lane + i * 32;
#pragma unroll
            for (int k = 0; k < 8; ++k) x[i][k] = 0;
            if (vector < VECTORS) unpack(x[i], *shared.at<Pack<scalar, 8>>(AT_X + place_of(row, vector * 8)));
#pragma unroll
            for (int k = 0; k < 8; ++k) sum += x[i][k];
        }
#pragma unroll
        for (int other = 1; other < 32; other <<= 1) sum += __shfl_xor_sync(~0u, sum, other);
        const float mean = sum * (1.f / WIDTH);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int k = 0; k < 8; ++k)
                if (shared.lane + i * 32 < VECTORS) squares += (x[i][k] - mean) * (x[i][k] - mean);
#pragma unroll
        for (int other = 1; other < 32; other <<= 1) squares += __shfl_xor_sync(~0u, squares, other);
        const float rstd = rsqrtf(squares * (1.f / WIDTH) + eps);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int column = (shared.lane + i * 32) * 8;
            if (column >= WIDTH) break;
            float g[8], s[8] = {};
            unpack(g, load_pack<8>(gain + column));
            if (shift) unpack(s, load_pack<8>(shift + column));
#pragma unroll
            for (int k = 0; k < 8; ++k) x[i][k] = (x[i][k] - mean) * rstd * g[k] + s[k];
            store_pack(out + (long long)(first_row + row) * WIDTH + column, x[i]);
        }
    }
}
