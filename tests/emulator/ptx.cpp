// PTX instructions.
#include "machine.h"
using namespace machine;

static void sometimes_give_way() {  // before an access to memory
    if (!draw(64)) give_way();
}

// ---- warps
static int nothing;
void __syncwarp() { collective("syncwarp", nothing, [](int**) {}); }
u32 shuffle(u32 x, int lane) {
    struct Shuffle { u32 x, y; int from; } s = {x, 0, lane};
    collective("shfl", s, [](Shuffle** all) {
        for (int n = 0; n < 32; ++n) all[n]->y = all[all[n]->from]->x;
    });
    return s.y;
}

u32 __ballot_sync(u32, int x) {
    struct Vote { bool x; u32 all; } v = {x != 0, 0};
    collective("vote", v, [](Vote** all) {
        u32 found = 0;
        for (int n = 0; n < 32; ++n) found |= (u32)all[n]->x << n;
        for (int n = 0; n < 32; ++n) all[n]->all = found;
    });
    return v.all;
}

// Four 8 x 8 matrices of 16-bit numbers: a lane holds numbers 2 (lane % 4) and the next of row lane / 4 of each, and
// gives the address of row lane % 8 of matrix lane / 8.
struct Matrices { u32 address, x[4]; };
static unsigned short half_of(u32 x, int n) { return x >> 16 * n; }
static void store_matrices(Matrices m, bool transposed) {
    sometimes_give_way();
    collective(transposed ? "stmatrix.trans" : "stmatrix", m, [transposed](Matrices** all) {
        for (int lane = 0; lane < 32; ++lane) {
            unsigned short row[8];
            for (int c = 0; c < 8; ++c) {
                const int r = transposed ? c : lane % 8, n = transposed ? lane % 8 : c;
                row[c] = half_of(all[4 * r + n / 2]->x[lane / 8], n % 2);
            }
            me->block->store(*me->warp->lane[lane], all[lane]->address, row, 16);
        }
    });
}
void stmatrix_sync_aligned_m8n8_x4_shared_b16(u32 address, u32 a, u32 b, u32 c, u32 d) {
    store_matrices({address, {a, b, c, d}}, false);
}
void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32 address, u32 a, u32 b, u32 c, u32 d) {
    store_matrices({address, {a, b, c, d}}, true);
}
static Matrices load_matrices(u32 address, bool transposed) {
    sometimes_give_way();
    Matrices m = {address, {}};
    collective(transposed ? "ldmatrix.trans" : "ldmatrix", m, [transposed](Matrices** all) {
        for (int lane = 0; lane < 32; ++lane)
            for (int n = 0; n < 8; ++n) {  // halves
                const int pair = lane % 4 * 2 + n % 2, row = transposed ? pair : lane / 4;
                const int column = transposed ? lane / 4 : pair;
                unsigned short x;
                memcpy(&x, me->block->at(all[n / 2 * 8 + row]->address, 16, 16) + 2 * column, 2);
                all[lane]->x[n / 2] |= (u32)x << 16 * (n % 2);
            }
    });
    return m;
}
void ldmatrix_sync_aligned_m8n8_x4_shared_b16(u32& a, u32& b, u32& c, u32& d, u32 address) {
    const Matrices m = load_matrices(address, false);
    a = m.x[0], b = m.x[1], c = m.x[2], d = m.x[3];
}
void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32& a, u32& b, u32& c, u32& d, u32 address) {
    const Matrices m = load_matrices(address, true);
    a = m.x[0], b = m.x[1], c = m.x[2], d = m.x[3];
}
void movmatrix_sync_aligned_m8n8_trans_b16(u32& y, u32 x) {
    struct Move { u32 x, y; } m = {x, 0};
    collective("movmatrix", m, [](Move** all) {
        for (int lane = 0; lane < 32; ++lane)
            for (int n = 0; n < 2; ++n) {
                const int row = lane % 4 * 2 + n, column = lane / 4;
                all[lane]->y |= (u32)half_of(all[4 * row + column / 2]->x, column % 2) << 16 * n;
            }
    });
    y = m.y;
}

// ---- shared memory
void load(u32 address, void* to, u32 bytes) {
    sometimes_give_way();
    memcpy(to, me->block->at(address, bytes, bytes), bytes);
}
void store(u32 address, const void* from, u32 bytes) {
    sometimes_give_way();
    me->block->store(*me, address, from, bytes);
}
void fence_proxy_async_shared_cta() {
    for (auto [word, state] : me->unfenced)
        if (me->block->words[word].state == state) me->block->words[word].writer = 0;
    me->unfenced.clear();
}

// ---- global memory
void st_global_b32(u64, int) { fail("a wait timed out"); }

static bool is_in(const std::vector<unsigned char>& memory, const void* address) {
    return address >= memory.data() && address < memory.data() + memory.size();
}
void check_global(const void* address) {
    bool shared = is_in(me->block->memory, address);
    for (const auto& [_, memory] : me->block->variables) shared |= is_in(memory, address);
    if (shared) fail("an instruction for global memory has an address of shared memory");
}
void ld_acquire_gpu_global_b32(int& x, const int* from) { give_way(); x = *from; }
void ld_acquire_gpu_global_u32(u32& x, const u32* from) { give_way(); x = *from; }
void red_release_gpu_global_add_s32(int* to) { ++*to; }
// Relaxed stores wait here, each word alone, until they happen, in any order.
static std::map<u32*, u32> late;
static void happen(std::map<u32*, u32>::iterator at) {
    *at->first = at->second;
    late.erase(at);
}
void machine::finish_stores() { while (!late.empty()) happen(late.begin()); }
static void some_happen() {
    give_way();
    for (unsigned n = draw(3) ? 0 : draw(64); n && !late.empty(); --n)
        happen(draw(2) ? std::next(late.begin(), draw(std::min<size_t>(late.size(), 8))) : std::prev(late.end()));
}
void st_relaxed_gpu_global_b32(u32* to, u32 x) {
    if ((u64)to % 4) fail("a word at %p", to);
    some_happen();
    const auto before = late.find(to);
    if (before != late.end()) happen(before);
    late[to] = x;
}
void st_relaxed_gpu_global_v4_b32(u32* to, u32 x, u32 y, u32 z, u32 w) {
    if ((u64)to % 16) fail("four words at %p", to);
    const u32 words[4] = {x, y, z, w};
    for (int i = 0; i < 4; ++i) st_relaxed_gpu_global_b32(to + i, words[i]);
}
void ld_relaxed_gpu_global_b32(u32& x, const u32* from) {
    if ((u64)from % 4) fail("a word at %p", from);
    some_happen();
    x = *from;
}
void ld_relaxed_gpu_global_v4_b32(u32& x, u32& y, u32& z, u32& w, const void* from) {  // in any order
    if ((u64)from % 16) fail("four words at %p", from);
    u32* const words[4] = {&x, &y, &z, &w};
    const unsigned first = draw(4);
    for (unsigned i = 0; i < 4; ++i) {
        const unsigned at = (first + i) % 4;
        ld_relaxed_gpu_global_b32(*words[at], static_cast<const u32*>(from) + at);
    }
}

// ---- barriers
static Mbarrier& mbarrier(Block& block, u32 address) {
    const auto found = block.mbarriers.find(address);
    if (found == block.mbarriers.end()) fail("no mbarrier at %u", address);
    return found->second;
}
// The phase ends when no arrival and no byte is pending.
static void arrive(Block& block, u32 bar, u32 arrivals, long bytes) {
    Mbarrier& b = mbarrier(block, bar);
    if (arrivals > b.pending) fail("one arrival too many at the mbarrier at %u", bar);
    b.pending -= arrivals, b.bytes -= bytes;
    if (!b.pending && !b.bytes) ++b.phase, b.pending = b.count;
}
void mbarrier_init_shared_cta_b64(u32 bar, u32 arrivals) {
    me->block->at(bar, 8, 8);
    if (me->block->mbarriers.count(bar)) fail("two mbarriers at %u", bar);
    me->block->mbarriers[bar] = {arrivals, arrivals, 0, 0};
}
void mbarrier_arrive_expect_tx_shared_cta_b64(u32 bar, u32 bytes) { arrive(*me->block, bar, 1, -(long)bytes); }
void mbarrier_arrive_shared_cta_b64(u32 bar) {
    sometimes_give_way();
    arrive(*me->block, bar, 1, 0);
}
void mbarrier_try_wait_parity_shared_cta_b64(u32 bar, u32 parity, u32& done) {
    const Mbarrier& b = mbarrier(*me->block, bar);
    wait_until([&b, parity] { return b.phase % 2 != parity; }, "mbarrier and parity", bar, parity);
    done = 1;
}
void mov_u32(int& rank) { rank = me->block->number % cluster_size; }
void mbarrier_arrive_shared_cluster_b64(u32 bar) {
    sometimes_give_way();
    arrive(block_of_cluster((bar >> 24) - 1), bar & 0xffffff, 1, 0);
}
void st_shared_cluster_v2_f32(u32 address, float x, float y) {
    const float v[] = {x, y};
    block_of_cluster((address >> 24) - 1).store(*me, address & 0xffffff, v, 8);
}
void st_shared_cluster_b64(u32 address, u64 x) {
    memcpy(block_of_cluster((address >> 24) - 1).at(address & 0xffffff, 8, 8), &x, 8);
}
void ld_shared_cluster_b64(u64& x, u32 address) {
    memcpy(&x, block_of_cluster((address >> 24) - 1).at(address & 0xffffff, 8, 8), 8);
}
static void send(u32 address, u64 x, u32 bytes, u32 bar) {
    Block* const block = &block_of_cluster((address >> 24) - 1);
    begin({[=] {
        memcpy(block->at(address & 0xffffff, bytes, bytes), &x, bytes);
        arrive(*block, bar & 0xffffff, 0, bytes);
    }})->block = block;
}
void st_async_shared_cluster_mbarrier_complete_tx_bytes_b32(u32 address, u32 x, u32 bar) { send(address, x, 4, bar); }
void st_async_shared_cluster_mbarrier_complete_tx_bytes_v2_f32(u32 address, float x, float y, u32 bar) {
    send(address, (u64)__float_as_uint(y) << 32 | __float_as_uint(x), 8, bar);
}
void st_async_shared_cluster_mbarrier_complete_tx_bytes_v4_b32(u32 address, u32 x, u32 y, u32 z, u32 w, u32 bar) {
    Block* const block = &block_of_cluster((address >> 24) - 1);
    begin({[=] {
        const u32 words[] = {x, y, z, w};
        memcpy(block->at(address & 0xffffff, 16, 16), words, 16);
        arrive(*block, bar & 0xffffff, 0, 16);
    }})->block = block;
}
void barrier_cluster_arrive() {
    sometimes_give_way();
    Cluster& c = cluster();
    if (me->meeting >= 0) fail("arrives twice at the barrier of its cluster");
    me->meeting = c.meetings;
    if (++c.arrived == cluster_size * me->block->threads.size()) c.arrived = 0, ++c.meetings;
}
void barrier_cluster_wait() {
    const Cluster& c = cluster();
    wait_until([&c, now = me->meeting] { return c.meetings != now; }, "barrier of the cluster");
    me->meeting = -1;
}
static void arrive_at_named(int id, int threads) {
    NamedBarrier& b = me->block->named[id];
    if (b.arrived.empty()) b.expected = threads;
    if (b.expected != threads) fail("named barrier %d is for %d threads and for %d", id, b.expected, threads);
    if (!b.arrived.insert(me->number).second) fail("arrives twice at named barrier %d", id);
    if ((int)b.arrived.size() == threads) b.arrived.clear(), ++b.meetings;
}
void bar_arrive(int id, int threads) {
    sometimes_give_way();
    arrive_at_named(id, threads);
}
void bar_sync(int id, int threads) {
    sometimes_give_way();
    const NamedBarrier& b = me->block->named[id];
    const long now = b.meetings;
    arrive_at_named(id, threads);
    wait_until([&b, now] { return b.meetings != now; }, "named barrier and threads", id, threads);
}
static int count_at_barrier(bool x, int id, int threads) {
    NamedBarrier& b = me->block->named[id];
    const long now = b.meetings;
    b.found[now % 3] += x;
    bar_sync(id, threads);
    b.found[(now + 2) % 3] = 0;  // all have read it, and none has arrived for its next use
    return b.found[now % 3];
}
void bar_red_or_pred(u32 x, int id, int threads, u32& any) { any = count_at_barrier(x, id, threads) > 0; }
int __syncthreads_count(int x) { return count_at_barrier(x, 0, me->block->threads.size()); }
void __syncthreads() { bar_sync(0, me->block->threads.size()); }

// ---- copies of single threads: at once or, as often, when the thread waits; until then the destination holds NaN
void copy_later(u32 dst, const void* src, u32 size, u32 bytes) {
    unsigned char* const to = me->block->at(dst, size, size);
    if (bytes && (u64)src % size) fail("cp.async of %u bytes from %p", size, src);
    memset(to, 0xff, size);
    const auto copy = [=] {
        if (bytes) memcpy(to, src, bytes);
        memset(to + bytes, 0, size - bytes);
    };
    if (draw(2)) copy();
    else me->own_copies.back().push_back(copy);
}
void cp_async_commit_group() { me->own_copies.push_back({}); }
void cp_async_wait_group(int pending) {
    auto& groups = me->own_copies;
    for (size_t n = 0; n + 1 + pending < groups.size(); ++n) {
        for (const auto& copy : groups[n]) copy();
        groups[n].clear();
    }
}

// ---- TMA
struct Map {  // written by __init__.py
    unsigned char* pointer;
    long long size[4], step[4], box_rows;  // (columns, rows, heads, batches); steps in bytes
    unsigned char* at(int column, int row, int head, int batch) const {
        const long long place[] = {column, row, head, batch};
        unsigned char* p = pointer;
        for (int n = 0; n < 4; ++n) {
            if (place[n] < 0 || place[n] >= size[n]) return nullptr;
            p += place[n] * step[n];
        }
        return p;
    }
};
static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }
static void expect_later(Block& block, u32 dst, u32 bytes) {
    block.check_not_read(dst, bytes);
    memset(block.for_hardware(dst, bytes), 0xff, bytes);
}
static void load_box(Block* block, u32 dst, const void* map, int column, int row, int head, int batch, u32 bar) {
    const Map m = *(const Map*)map;
    const u32 bytes = m.box_rows * 128;
    if (dst % 1024) fail("a tile at %u, which is no multiple of 1024", dst);
    expect_later(*block, dst, bytes);
    begin({[=] {
        for (int r = 0; r < m.box_rows; ++r)
            for (int c = 0; c < 64; ++c) {
                const unsigned char* const from = m.at(column + c, row + r, head, batch);
                unsigned char* const to = &block->memory[swizzled(dst + 128 * r + 2 * c)];
                if (from) memcpy(to, from, 2); else memset(to, 0, 2);
            }
        arrive(*block, bar, 0, bytes);
    }})->block = block;
}
void cp_async_bulk_tensor_4d_shared_cluster_global_mbarrier_complete_tx_bytes_L2_cache_hint(
    u32 dst, const void* map, int column, int row, int head, int batch, u32 bar, u64) {
    load_box(me->block, dst, map, column, row, head, batch, bar);
}
void cp_async_bulk_tensor_4d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster(
    u32 dst, const void* map, int column, int row, int head, int batch, u32 bar, unsigned short ranks) {
    for (unsigned rank = 0; rank < cluster_size; ++rank)
        if (ranks >> rank & 1) load_box(&block_of_cluster(rank), dst, map, column, row, head, batch, bar);
}
void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(u32 dst, const void* src, u32 bytes, u32 bar) {
    Block* const block = me->block;
    if ((u64)src % 16 || bytes % 16) fail("a bulk copy of %u bytes from %p", bytes, src);
    expect_later(*block, dst, bytes);
    begin({[=] {
        memcpy(&block->memory[dst], src, bytes);
        arrive(*block, bar, 0, bytes);
    }});
}
void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes_L2_cache_hint(
    u32 dst, const void* src, u32 bytes, u32 bar, u64) {
    cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(dst, src, bytes, bar);
}
// There are no caches, but the memory must be readable.
void cp_async_bulk_prefetch_L2_global(const void* src, u32 bytes) {
    if ((u64)src % 16 || bytes % 16) fail("a prefetch of %u bytes from %p", bytes, src);
    for (u32 i = 0; i < bytes; ++i) (void)((const volatile char*)src)[i];
}
// A copy from shared memory, in two stages: read the source, then write the destination.
template <typename F> static void copy_out(u32 src, u32 bytes, F write) {
    Block* const block = me->block;
    block->for_hardware(src, bytes);
    auto data = std::make_shared<std::vector<unsigned char>>();
    const TaskPtr task = begin({
        [=] { const auto* p = block->for_hardware(src, bytes); data->assign(p, p + bytes); },
        [=] { write(data->data()); },
    });
    task->reads = {{src, bytes}};
    block->readers.push_back(task);
    me->copies.back().push_back(task);
}
void cp_async_bulk_tensor_4d_global_shared_cta_bulk_group(
    const void* map, int column, int row, int head, int batch, u32 src) {
    const Map m = *(const Map*)map;
    if (src % 1024) fail("a tile at %u, which is no multiple of 1024", src);
    copy_out(src, m.box_rows * 128, [=](const unsigned char* data) {
        for (int r = 0; r < m.box_rows; ++r)
            for (int c = 0; c < 64; ++c)
                if (unsigned char* const to = m.at(column + c, row + r, head, batch))
                    memcpy(to, data + swizzled(src + 128 * r + 2 * c) - src, 2);
    });
}
void cp_async_bulk_global_shared_cta_bulk_group(void* dst, u32 src, u32 bytes) {
    if ((u64)dst % 16 || bytes % 16) fail("a bulk copy of %u bytes to %p", bytes, dst);
    copy_out(src, bytes, [=](const unsigned char* data) { memcpy(dst, data, bytes); });
}
void cp_reduce_async_bulk_global_shared_cta_bulk_group_add_f32(float* dst, u32 src, u32 bytes) {
    if ((u64)dst % 16 || bytes % 16) fail("a bulk sum of %u bytes to %p", bytes, dst);
    copy_out(src, bytes, [=](const unsigned char* data) {
        for (u32 n = 0; n < bytes / 4; ++n) dst[n] += ((const float*)data)[n];
    });
}
void cp_async_bulk_commit_group() { me->copies.push_back({}); }
static void wait_for_copies(int pending, size_t stages, const char* what) {
    Thread* const t = me;
    std::vector<TaskPtr> awaited;
    for (size_t n = 0; n + 1 + pending < t->copies.size(); ++n)
        awaited.insert(awaited.end(), t->copies[n].begin(), t->copies[n].end());
    wait_until([&] {
        for (const TaskPtr& task : awaited) if (task->done < stages) return false;
        return true;
    }, what);
    for (const TaskPtr& task : awaited) task->awaited = true;
    t->block->forget_readers();
}
void cp_async_bulk_wait_group(int pending) { wait_for_copies(pending, 2, "cp.async.bulk.wait_group"); }
void cp_async_bulk_wait_group_read(int pending) { wait_for_copies(pending, 1, "cp.async.bulk.wait_group.read"); }

// ---- wgmma and mma. For wgmma, each warp computes its 16 rows at some moment before the wait, independently of others.
constexpr u32 IN_FLIGHT = 0x7fdead00;  // a NaN
static float widen(bool is_f16, unsigned short x) { return is_f16 ? widen_f16(x) : __uint_as_float((u32)x << 16); }

// The descriptor of a tile with 128-byte swizzle: byte steps between slabs and between groups of eight lines.
struct Operand {
    u64 descriptor;
    bool mn_major, is_f16;
    u32 start() const { return (descriptor & 0x3fff) << 4; }
    u32 slab() const { return mn_major ? (descriptor >> 16 & 0x3fff) << 4 : 0; }
    u32 group() const { return (descriptor >> 32 & 0x3fff) << 4; }
};
// Eight contiguous numbers, from index `along` of the contiguous axis, at index `across` of the other.
static const unsigned short* chunk(Block& block, Operand o, int along, int across) {
    if (o.descriptor >> 62 != 1 || o.descriptor >> 49 & 7) fail("a descriptor %llx without swizzle", o.descriptor);
    const u32 line = o.start() + along / 64 * o.slab() + across / 8 * o.group() + across % 8 * 128;
    return (const unsigned short*)block.for_hardware(swizzled(line + along % 64 * 2), 16);
}
// Adds the (address, bytes) of 16 x `count` numbers of an operand, from its row or column `first`.
static void add_reads(std::vector<std::pair<u32, u32>>& reads, Operand o, int first, int count) {
    if (!o.mn_major) reads.push_back({(o.start() & ~127) + first / 8 * o.group(), count / 8 * o.group()});
    for (int slab = first / 64; o.mn_major && slab * 64 < first + count; ++slab)
        reads.push_back({o.start() + slab * o.slab(), 2 * o.group()});
}
// Reads them as x[k][n].
template <int MOST> static void read(Block& block, float (&x)[16][MOST], Operand o, int first, int count) {
    for (int k = 0; k < 16; k += o.mn_major ? 1 : 8)
        for (int n = 0; n < count; n += o.mn_major ? 8 : 1) {
            const auto* from = o.mn_major ? chunk(block, o, first + n, k) : chunk(block, o, k, first + n);
            for (int e = 0; e < 8; ++e) (o.mn_major ? x[k][n + e] : x[k + e][n]) = widen(o.is_f16, from[e]);
        }
}
// The row and column of element i of a lane's fragment.
static int row_of(int lane, int i) { return lane / 4 + 8 * (i >> 1 & 1); }
static int column_of(int lane, int i) { return 8 * (i >> 2) + 2 * (lane % 4) + (i & 1); }

// mma.sync, m16n8k16.
struct Mma { float d[4]; u32 a[4], b[2]; };
static void multiply(float* const (&d)[4], bool is_f16, const u32 (&a)[4], u32 b0, u32 b1) {
    Mma m = {{*d[0], *d[1], *d[2], *d[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    collective(is_f16 ? "mma.f16" : "mma.bf16", m, [is_f16](Mma** all) {
        float x[16][16], y[16][8];  // [row][k], [k][column]
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 8; ++i) {
                x[row_of(lane, i)][column_of(lane, i)] = widen(is_f16, half_of(all[lane]->a[i / 2], i % 2));
                if (i < 4) y[8 * (i / 2) + 2 * (lane % 4) + i % 2][lane / 4] = widen(is_f16, half_of(all[lane]->b[i / 2], i % 2));
            }
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i)
                for (int k = 0; k < 16; ++k) all[lane]->d[i] += x[row_of(lane, i)][k] * y[k][column_of(lane, i)];
    });
    for (int i = 0; i < 4; ++i) *d[i] = m.d[i];
}
void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2,
                                                         u32 a3, u32 b0, u32 b1, float, float, float, float) {
    multiply({&d0, &d1, &d2, &d3}, false, {a0, a1, a2, a3}, b0, b1);
}
void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2,
                                                       u32 a3, u32 b0, u32 b1, float, float, float, float) {
    multiply({&d0, &d1, &d2, &d3}, true, {a0, a1, a2, a3}, b0, b1);
}
// The left half of a, the upper half of b.
void mma_sync_aligned_m16n8k8_row_col_f32_f16_f16_f32(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 b,
                                                      float, float, float, float) {
    multiply({&d0, &d1, &d2, &d3}, true, {a0, a1, 0, 0}, b, 0);
}

struct Wgmma { float* d; const u32* a_registers; Operand a, b; bool add; int columns; };
static void multiply(Block& block, int warp, const Wgmma& call, const u32 (&fragment)[32][4], std::vector<float>& d) {
    static float a[16][16], b[16][256], sum[16][256];
    if (!call.a_registers) read(block, a, call.a, 16 * (warp % 4), 16);
    for (int lane = 0; lane < 32 && call.a_registers; ++lane)
        for (int i = 0; i < 8; ++i)
            a[column_of(lane, i)][row_of(lane, i)] = widen(call.a.is_f16, half_of(fragment[lane][i / 2], i % 2));
    read(block, b, call.b, 0, call.columns);
    memset(sum, 0, sizeof sum);
    for (int k = 0; k < 16; ++k)
        for (int row = 0; row < 16; ++row)
            for (int column = 0; column < call.columns; ++column) sum[row][column] += a[k][row] * b[k][column];
    for (int lane = 0, n = 0; lane < 32; ++lane)
        for (int i = 0; i < call.columns / 2; ++i, ++n)
            d[n] = (call.add ? d[n] : 0.f) + sum[row_of(lane, i)][column_of(lane, i)];
}
// The accumulators of a wgmma: those of the wgmma before it, or registers that are filled with NaN until the wait.
static std::shared_ptr<Accumulators> take(Warp& w, Wgmma** all) {
    for (auto& d : w.accumulators)
        if (d->registers[0] == all[0]->d) return d;
    auto d = std::make_shared<Accumulators>();
    const int count = all[0]->columns / 2;
    for (int lane = 0; lane < 32; ++lane) {
        float* const x = d->registers[lane] = all[lane]->d;
        d->value.insert(d->value.end(), x, x + count);
        for (int i = 0; i < count; ++i) memcpy(&x[i], &IN_FLIGHT, 4);
    }
    w.accumulators.push_back(d);
    return d;
}
static void issue(Warp& w, Wgmma** all) {
    if (!w.fenced) fail("wgmma without wgmma.fence since the last wait");
    const auto d = take(w, all);
    d->group = w.group;
    Fragments a = {{}, {}, w.group};
    for (int lane = 0; lane < 32 && all[0]->a_registers; ++lane)
        a.registers[lane] = all[lane]->a_registers, memcpy(a.value[lane], a.registers[lane], sizeof a.value[lane]);
    if (all[0]->a_registers) w.fragments.push_back(a);
    const TaskPtr before = w.products.empty() ? nullptr : w.products.back().task;
    const TaskPtr task = begin({[&block = *me->block, &w, call = *all[0], a, d] {
        multiply(block, w.number, call, a.value, d->value);
    }}, before);
    if (!all[0]->a_registers) add_reads(task->reads, all[0]->a, 16 * (w.number % 4), 16);
    add_reads(task->reads, all[0]->b, 0, all[0]->columns);
    me->block->readers.push_back(task);
    w.products.push_back({w.group, task});
    ++w.issued;
}
void wgmma(int columns, bool is_f16, bool add, float* d, const u32* a, u64 a_tile, u64 b_tile, bool a_mn, bool b_mn) {
    Wgmma call = {d, a, {a_tile, a_mn, is_f16}, {b_tile, b_mn, is_f16}, add, columns};
    collective("wgmma", call, [](Wgmma** all) { issue(*me->warp, all); });
}
void wgmma_fence_sync_aligned() {
    collective("wgmma.fence", nothing, [](int**) { me->warp->fenced = true; });
}
void wgmma_commit_group_sync_aligned() {
    collective("wgmma.commit_group", nothing, [](int**) { ++me->warp->group; });
}
static void finish(Warp& w, long end) {  // groups before `end` are complete: fill their registers
    remove_if(w.products, [end](Product& p) { return p.group < end ? p.task->awaited = true : false; });
    me->block->forget_readers();
    remove_if(w.fragments, [end](Fragments& f) {
        for (int lane = 0; lane < 32 && f.group < end; ++lane)
            if (memcmp(f.registers[lane], f.value[lane], sizeof f.value[lane]))
                fail("an operand in registers was changed while wgmma was in flight");
        return f.group < end;
    });
    remove_if(w.accumulators, [end](std::shared_ptr<Accumulators>& d) {
        const size_t count = d->value.size() / 32;
        for (size_t n = 0; n < d->value.size() && d->group < end; ++n) {
            float& x = d->registers[n / count][n % count];
            if (__float_as_uint(x) != IN_FLIGHT) fail("an accumulator was changed while wgmma was in flight");
            x = d->value[n];
        }
        return d->group < end;
    });
    w.fenced = false;
}
void wgmma_wait_group_sync_aligned(int pending) {
    Warp& w = *me->warp;
    collective("wgmma.wait_group", nothing, [](int**) {});
    const long end = w.group - pending;
    wait_until([&w, end] {
        for (const Product& p : w.products) if (p.group < end && !p.task->finished()) return false;
        return true;
    }, "wgmma.wait_group");
    collective("the end of wgmma.wait_group", nothing, [&w, end](int**) { finish(w, end); });
}
