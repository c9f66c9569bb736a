// The scheduler of blocks and fibers, and shared memory.
#include "machine.h"
#include <cstdarg>
#include <cstdio>
#include <random>

uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace machine {
constexpr u32 FIRST = 1024;     // first address of a block's shared memory
constexpr u32 PADDING = 256;    // before dynamic shared memory, so that its alignment can be chosen
constexpr u32 STATIC = 48 << 10, BESIDE = 1024;  // bytes of a static array alone, and beside dynamic memory
constexpr u32 GUARD = 64 << 10;  // bytes after shared memory, which nothing may change
constexpr size_t STACK = 96 << 10;
constexpr unsigned char UNWRITTEN[] = {0xff, 0xff, 0xff, 0x7f};  // NaN as a float, out of range as an index
constexpr long STEPS = 400000000;  // a launch that takes more is reported as hanging

Thread* me;
static jmp_buf scheduler, failure;
static std::string message;
static std::function<void()> body;
static std::mt19937 numbers;
static std::vector<TaskPtr> tasks;
static std::vector<std::unique_ptr<Block>> blocks;
static std::map<unsigned, Cluster> clusters;
static long steps;
unsigned cluster_size;

unsigned draw(unsigned below) { return numbers() % below; }

void fail(const char* format, ...) {
    char text[2000] = "";
    const int begun = me ? snprintf(text, 100, "block %u, thread %u: ", me->block->number, me->number) : 0;
    va_list list;
    va_start(list, format);
    vsnprintf(text + begun, sizeof text - begun, format, list);
    va_end(list);
    message = text;
    _longjmp(failure, 1);
}

Cluster& cluster() { return clusters[me->block->number / cluster_size]; }
Block& block_of_cluster(unsigned rank) {
    for (auto& block : blocks)
        if (block->number == me->block->number / cluster_size * cluster_size + rank) return *block;
    fail("block %u of its cluster has ended", rank);
}

// ---- fibers
void give_way() {
    if (!_setjmp(me->here)) _longjmp(scheduler, 1);
}
static void fiber() {
    body();
    me->ended = true;
    --me->block->running;
    give_way();
}
static void resume(Thread& t) {
    const unsigned number = t.block->number, line = number / gridDim.x;
    me = &t, threadIdx = {t.number, 0, 0}, blockIdx = {number % gridDim.x, line % gridDim.y, line / gridDim.y};
    if (!_setjmp(scheduler)) {
        if (!t.stack.empty()) _longjmp(t.here, 1);
        t.stack.resize(STACK);
        getcontext(&t.start);
        t.start.uc_stack.ss_sp = t.stack.data(), t.start.uc_stack.ss_size = STACK, t.start.uc_link = nullptr;
        makecontext(&t.start, fiber, 0);
        setcontext(&t.start);
    }
    me = nullptr;
}
static bool run(Warp& w) {  // runs each lane up to its next wait; false if all wait
    const unsigned first = draw(32);
    bool any = false;
    for (unsigned n = first; n < first + 32; ++n) {
        Thread& t = *w.lane[n % 32];
        if (t.ended || (t.ready && !t.ready(t.condition))) continue;
        any = true;
        if (!t.slow || !draw(8)) resume(t);
    }
    if ((steps += any) > STEPS) fail("the launch hangs");
    return any;
}

// ---- tasks
TaskPtr begin(std::vector<std::function<void()>> stages, TaskPtr after) {
    tasks.push_back(std::make_shared<Task>(Task{me->block, std::move(stages), after}));
    return tasks.back();
}
static void advance_one() {
    size_t n = draw(tasks.size());
    while (tasks[n]->after && !tasks[n]->after->finished()) {
        const TaskPtr before = tasks[n]->after;
        for (n = 0; tasks[n] != before;) ++n;
    }
    const TaskPtr task = tasks[n];
    task->stages[task->done++]();
    if (task->finished()) tasks[n] = tasks.back(), tasks.pop_back(), task->after = nullptr;
}

// ---- shared memory
unsigned char* Block::at(u32 address, u32 bytes, u32 alignment) {
    if (address % alignment || address < FIRST || address + bytes > end)
        fail("%u bytes at %u of shared memory, which ends at %u", bytes, address, end);
    return &memory[address];
}
unsigned char* Block::for_hardware(u32 address, u32 bytes) {
    unsigned char* const found = at(address, bytes, 16);
    for (u32 word = address / 4; word < (address + bytes) / 4; ++word)
        if (const unsigned writer = words[word].writer)
            fail("TMA or wgmma meets at %u what thread %u stored without a fence", 4 * word, writer - 1);
    return found;
}
void Block::check_not_read(u32 address, u32 bytes) {
    for (const TaskPtr& task : readers)
        for (auto [from, count] : task->reads)
            if (address < from + count && from < address + bytes)
                fail("changes %u, which a pending copy or wgmma reads", address);
}
void Block::forget_readers() {
    remove_if(readers, [](const TaskPtr& task) { return task->awaited; });
}
void Block::store(Thread& by, u32 address, const void* from, u32 bytes) {
    unsigned char* to = at(address, bytes, bytes);
    for (u32 n = address / 4; n < (address + bytes) / 4; ++n, to += 4, from = (const char*)from + 4) {
        if (memcmp(to, from, 4)) {  // storing an equal value disturbs no reader
            check_not_read(4 * n, 4);
            ++words[n].state, words[n].writer = by.number + 1;
        }
        if (words[n].writer) by.unfenced.push_back({n, words[n].state});
        memcpy(to, from, 4);
    }
}

// ---- launches
static std::unique_ptr<Block> make_block(unsigned number, unsigned threads, size_t shared_bytes) {
    auto b = std::make_unique<Block>();
    b->number = number, b->running = threads;
    b->dynamic = shared_bytes, b->end = FIRST + (shared_bytes ? BESIDE : STATIC);
    b->memory.assign(b->end + PADDING + shared_bytes + GUARD, 0xff);
    for (size_t n = 3; n < b->memory.size(); n += 4) b->memory[n] = UNWRITTEN[3];
    b->words.resize(b->memory.size() / 4);
    b->threads.resize(threads);
    b->warps.resize(threads / 32);
    for (unsigned n = 0; n < threads; ++n) {
        Warp& w = b->warps[n / 32];
        w.number = n / 32, w.slow = !draw(4), w.lane[n % 32] = &b->threads[n];
        Thread& t = b->threads[n];
        t.block = b.get(), t.warp = &w, t.number = n, t.slow = !draw(50);
    }
    return b;
}
static void check_end(Block& b) {
    for (const TaskPtr& task : tasks)
        if (task->block == &b && !(task->stages.size() == 2 && task->done == 1))  // what was read may still be written
            fail("block %u ended while TMA or wgmma uses its shared memory", b.number);
    for (size_t n = b.end; n < b.memory.size(); ++n)
        if (b.memory[n] != UNWRITTEN[n % 4])
            fail("block %u wrote at %zu of shared memory, which ends at %u", b.number, n, b.end);
    if (!b.readers.empty()) fail("block %u ended without a wait for its copies or products", b.number);
    for (Warp& w : b.warps) {
        const long first = b.warps[w.number / 4 * 4].issued;
        if (w.issued != first) fail("warps of a warpgroup issued %ld and %ld wgmma", first, w.issued);
    }
}
static void report_deadlock() {
    std::map<std::string, int> waits;
    for (auto& b : blocks)
        for (Thread& t : b->threads) {
            const std::string warp = "\n  block " + std::to_string(b->number) + " warp " + std::to_string(t.number / 32);
            char text[200] = ": ended";
            if (!t.ended) snprintf(text, sizeof text, " waits: %s (%u, %u)", t.waits_for, t.address, t.value);
            ++waits[warp + text];
        }
    message = "deadlock";
    for (auto& [wait, lanes] : waits) message += wait + ", " + std::to_string(lanes) + " lanes";
    _longjmp(failure, 1);
}
static void run_blocks(unsigned grid, unsigned threads, unsigned resident, size_t shared_bytes) {
    const unsigned choices[] = {2, 20, 500}, laziness = choices[draw(3)];  // how late asynchronous work runs
    for (unsigned started = 0, misses = 0; started < grid || !blocks.empty();) {
        if (blocks.size() + cluster_size <= resident && started < grid)
            for (unsigned rank = 0; rank < cluster_size; ++rank)
                blocks.push_back(make_block(started++, threads, shared_bytes));
        if (!tasks.empty() && !draw(laziness)) advance_one();
        const unsigned n = draw(blocks.size());
        Block& b = *blocks[n];
        Warp& w = b.warps[draw(b.warps.size())];
        if (w.slow && draw(20)) continue;
        if (!run(w)) ++misses; else do misses = 0; while (draw(8) && run(w));
        if (!b.running) {
            check_end(b);
            blocks.erase(blocks.begin() + n);
        } else if (misses > 2 * b.warps.size()) {  // can any thread continue?
            misses = 0;
            bool any = false;
            for (auto& block : blocks)
                for (Warp& each : block->warps) any |= run(each) || !block->running;
            if (!any && tasks.empty()) report_deadlock();
            if (!any) advance_one();
        }
    }
    while (!tasks.empty()) advance_one();
    finish_stores();
}
// Runs a grid, `resident` blocks at a time; returns null or an error message.
const char* launch(uint3 grid, unsigned threads, unsigned size_of_cluster, unsigned resident, size_t shared_bytes,
                   unsigned seed, std::function<void()> kernel) {
    cluster_size = size_of_cluster, clusters.clear();
    body = kernel, gridDim = grid, blockDim = {threads, 1, 1}, steps = 0, me = nullptr;
    numbers.seed(seed);
    tasks.clear(), blocks.clear(), finish_stores();
    if (_setjmp(failure)) return message.c_str();
    run_blocks(grid.x * grid.y * grid.z, threads, resident, shared_bytes);
    return nullptr;
}
}  // namespace machine

using namespace machine;
long long clock64() { return 2000 * steps; }  // waits of 4 million steps time out
void* dynamic_shared_memory(size_t alignment) {
    const u32 start = FIRST + BESIDE + alignment;
    me->block->end = std::max(me->block->end, start + me->block->dynamic);
    return &me->block->memory[start];
}
void* static_shared_memory() { return &me->block->memory[FIRST]; }
void* shared_variable(int site, size_t bytes, size_t alignment) {
    auto& memory = me->block->variables[site];
    if (memory.empty()) memory.resize(bytes + 3 * alignment, 0xff);  // NaN
    return memory.data() + alignment + -(size_t)memory.data() % (2 * alignment);
}
size_t __cvta_generic_to_shared(const void* p) { return (unsigned char*)p - me->block->memory.data(); }

// What g++ calls, with -fsanitize=alignment, before an access whose address its type does not allow.
struct Mismatch {
    struct { const char* file; u32 line, column; } place;
    const struct { unsigned short kind, info; char name[1]; }& type;
    unsigned char alignment, access;  // alignment: its logarithm
};
extern "C" void __ubsan_handle_type_mismatch_v1(const Mismatch* found, size_t address) {
    const u32 needed = 1u << found->alignment;
    fail("access to %s at an address that is %zu modulo %u", found->type.name, address % needed, needed);
}
