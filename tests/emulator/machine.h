// A GPU with a few multiprocessors, emulated in one host thread: CUDA threads are fibers that switch where they wait.
#pragma once
#include <csetjmp>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <ucontext.h>
#include <vector>
#include "cuda.h"

namespace machine {
struct Block;
struct Warp;

// Asynchronous work of the hardware: a copy or a wgmma. Each of its stages runs at a random moment.
struct Task {
    Block* block;
    std::vector<std::function<void()>> stages;
    std::shared_ptr<Task> after;                  // runs before this one
    size_t done = 0;
    std::vector<std::pair<u32, u32>> reads = {};  // (address, bytes), not to be changed until its thread has waited
    bool awaited = false;
    bool finished() const { return done == stages.size(); }
};
using TaskPtr = std::shared_ptr<Task>;

struct Thread {
    Block* block;
    Warp* warp;
    unsigned number;
    bool slow, ended = false;
    bool (*ready)(void*) = nullptr;  // whether it may continue; called with `condition`
    void* condition;
    const char* waits_for;
    u32 address, value;              // of what it waits for, for error messages
    std::vector<std::pair<u32, u32>> unfenced;        // stores since its last fence: (word, state)
    std::vector<std::vector<TaskPtr>> copies = {{}};  // bulk groups; the last one is open
    std::vector<std::vector<std::function<void()>>> own_copies = {{}};  // groups of cp.async; the last one is open
    long meeting = -1;               // of the cluster: the one it arrived at and has not waited for, or -1
    jmp_buf here;
    ucontext_t start;
    std::vector<char> stack;
};

struct Accumulators {  // of a warp while wgmma runs: the registers hold NaN until a wait
    float* registers[32];
    std::vector<float> value;
    long group;
};
struct Fragments {  // operands in registers, not to be changed until a wait
    const u32* registers[32];
    u32 value[32][4];
    long group;
};
struct Product { long group; TaskPtr task; };

struct Warp {
    unsigned number;
    Thread* lane[32];
    bool slow;
    int arrived = 0;  // lanes that wait at a collective instruction
    const char* instruction;
    void* posted[32];
    long meetings = 0;
    bool fenced = false;  // wgmma.fence since the last wait
    long group = 0;       // wgmma groups committed
    long issued = 0;      // wgmma
    std::vector<std::shared_ptr<Accumulators>> accumulators;
    std::vector<Fragments> fragments;
    std::vector<Product> products;
};

struct Mbarrier { u32 count, pending; long bytes; u32 phase; };
struct NamedBarrier {
    int expected = 0;
    std::set<unsigned> arrived;
    long meetings = 0;
    int found[3] = {};  // counts of barriers that count at the last meeting, this one and the next
};
struct Cluster { unsigned arrived = 0; long meetings = 0; };
struct Word { unsigned writer = 0, state = 0; };  // 1 + the thread of an unfenced store, or 0; changes so far

struct Block {
    unsigned number, running;
    std::vector<unsigned char> memory;  // shared
    u32 dynamic, end;                   // bytes of dynamic shared memory; where all of it ends
    std::vector<Word> words;
    std::map<int, std::vector<unsigned char>> variables;  // shared variables outside of `memory`, by declaration
    std::vector<TaskPtr> readers;  // tasks that read shared memory
    std::map<u32, Mbarrier> mbarriers;
    NamedBarrier named[16];
    std::vector<Thread> threads;
    std::vector<Warp> warps;

    unsigned char* at(u32 address, u32 bytes, u32 alignment);
    unsigned char* for_hardware(u32 address, u32 bytes);  // for TMA and wgmma; fails at an unfenced store
    void store(Thread& by, u32 address, const void* from, u32 bytes);
    void check_not_read(u32 address, u32 bytes);
    void forget_readers();  // those that have been waited for
};

template <typename T, typename F> void remove_if(std::vector<T>& list, F gone) {
    std::vector<T> kept;
    for (T& x : list) if (!gone(x)) kept.push_back(x);
    list = std::move(kept);
}

extern Thread* me;
[[noreturn]] void fail(const char* format, ...);
unsigned draw(unsigned below);  // a random number
void give_way();
void finish_stores();  // those that have not happened yet
TaskPtr begin(std::vector<std::function<void()>> stages, TaskPtr after = nullptr);
Block& block_of_cluster(unsigned rank);  // in the cluster of the running block
Cluster& cluster();
extern unsigned cluster_size;

template <typename F> void wait_until(F condition, const char* what, u32 address = 0, u32 value = 0) {
    me->condition = &condition, me->waits_for = what, me->address = address, me->value = value;
    me->ready = [](void* f) { return (*(F*)f)(); };
    while (!condition()) give_way();
    me->ready = nullptr;
}

// A warp-wide instruction: the last lane to arrive calls together(T* of every lane) for all.
template <typename T, typename F> void collective(const char* instruction, T& mine, F together) {
    Warp& w = *me->warp;
    if (w.arrived && strcmp(w.instruction, instruction))
        fail("lanes of a warp meet at %s and at %s", w.instruction, instruction);
    w.instruction = instruction;
    w.posted[me->number % 32] = &mine;
    if (++w.arrived == 32) {
        w.arrived = 0, ++w.meetings;
        together((T**)w.posted);
    } else {
        wait_until([&w, now = w.meetings] { return w.meetings != now; }, instruction);
    }
}
}  // namespace machine
