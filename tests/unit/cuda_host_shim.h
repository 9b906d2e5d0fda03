// Runs CUDA kernels on CPU threads, as far as their logic goes.
//
// A block's threads run at once, one std::thread each; blocks run one after the other, so a kernel
// in which blocks wait for one another would hang.  Several launches, say of several ranks, may run
// at once.  Accesses with cache hints and vector adds check their alignment, as a GPU does, and are
// counted.

#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(threads, blocks)

struct dim3 { unsigned int x = 1, y = 1, z = 1; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct alignas(8) ushort4 { unsigned short x, y, z, w; };
struct alignas(4) ushort2 { unsigned short x, y; };

inline thread_local dim3 blockIdx, threadIdx, gridDim, blockDim;

// ---- What the kernels did ------------------------------------------------------------------------

struct Counters {
    std::atomic<std::uint64_t> stored_bytes{0};   // all stores with a cache hint
    std::atomic<std::uint64_t> vector_stores{0};  // of more than 4 bytes
    std::atomic<std::uint64_t> misaligned{0};     // loads, stores and adds that would fault on a GPU
    std::atomic<std::uint64_t> wide_stores{0};    // of 16 bytes
    std::atomic<std::uint64_t> adds{0};           // of one float, atomically
    std::atomic<std::uint64_t> vector_adds{0};    // of four
};
inline Counters counters;

// Where peers' memory was first touched, in order, while `remembering`: loads past L1, and adds.
inline std::atomic<bool> remembering{false};
inline std::mutex remembered_mutex;
inline std::vector<std::uint64_t> remembered;

template <typename T> void access(const T* address, bool of_peer) {
    const std::uint64_t place = reinterpret_cast<std::uintptr_t>(address);
    if (place % sizeof(T) != 0) ++counters.misaligned;
    if (!of_peer || !remembering) return;
    const std::lock_guard<std::mutex> guard(remembered_mutex);
    remembered.push_back(place);
}

// ---- Loads and stores ----------------------------------------------------------------------------

inline unsigned int __float_as_uint(float value) {
    unsigned int bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float __uint_as_float(unsigned int bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int bits) {
    return (unsigned int)((((std::uint64_t)high << 32) | low) >> (bits % 32));
}

template <typename T> T load(const T* address, bool of_peer) {
    access(address, of_peer);
    T value;
    std::memcpy(&value, static_cast<const void*>(address), sizeof value);
    return value;
}

template <typename T> T __ldcs(const T* address) { return load(address, false); }
template <typename T> T __ldcg(const T* address) { return load(address, true); }

template <typename T> void __stcg(T* address, T value) {
    access(address, false);
    if (sizeof value > 4) ++counters.vector_stores;
    if (sizeof value == 16) ++counters.wide_stores;
    counters.stored_bytes += sizeof value;
    std::memcpy(static_cast<void*>(address), &value, sizeof value);
}

// ---- Between ranks: what the kernels say in PTX for a GPU ----------------------------------------

inline void add_atomically(float* target, float value) {
    std::uint32_t* word = reinterpret_cast<std::uint32_t*>(target);
    std::uint32_t old = __atomic_load_n(word, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(word, &old, __float_as_uint(__uint_as_float(old) + value), true,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

inline void add_system(float* target, float value) {
    access(target, true);
    ++counters.adds;
    add_atomically(target, value);
}

// Four single adds: a GPU's vector add is not one atomic operation either.
inline void add_system(float4* target, float4 value) {
    access(target, true);
    ++counters.vector_adds;
    float* const targets = reinterpret_cast<float*>(target);
    add_atomically(targets, value.x);
    add_atomically(targets + 1, value.y);
    add_atomically(targets + 2, value.z);
    add_atomically(targets + 3, value.w);
}

typedef unsigned long long Word;
inline void store_release(Word* flag, Word value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
inline Word load_acquire(const Word* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }

inline Word nanoseconds() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}
inline void __nanosleep(unsigned int time_ns) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(time_ns));
}

// ---- Launches ------------------------------------------------------------------------------------

inline thread_local pthread_barrier_t* block_barrier;
inline void __syncthreads() { pthread_barrier_wait(block_barrier); }

// What each thread of the block hands to its neighbour.
inline thread_local std::vector<uint4>* block_values;

// All threads of the block call it at once.
inline uint4 of_next_lane(uint4 own) {
    (*block_values)[threadIdx.x] = own;
    __syncthreads();
    const bool has_next = threadIdx.x % 32 != 31 && threadIdx.x + 1 < blockDim.x;
    const uint4 next = has_next ? (*block_values)[threadIdx.x + 1] : own;
    __syncthreads();
    return next;
}

template <typename Kernel> void launch_block(dim3 grid, dim3 block, dim3 index, const Kernel& kernel) {
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, nullptr, block.x);
    std::vector<uint4> values(block.x);
    std::vector<std::thread> threads;
    for (unsigned int tx = 0; tx < block.x; ++tx)
        threads.emplace_back([&, tx] {
            gridDim = grid;
            blockDim = block;
            blockIdx = index;
            threadIdx = {tx, 0, 0};
            block_barrier = &barrier;
            block_values = &values;
            kernel();
        });
    for (std::thread& thread : threads) thread.join();
    pthread_barrier_destroy(&barrier);
}

template <typename Kernel> void launch(dim3 grid, dim3 block, const Kernel& kernel) {
    for (unsigned int by = 0; by < grid.y; ++by)
        for (unsigned int bx = 0; bx < grid.x; ++bx) launch_block(grid, block, {bx, by, 0}, kernel);
}

// Run `rank(0)`, ..., `rank(number - 1)` at once; each launches its kernels.
template <typename Rank> void at_once(Word number, const Rank& rank) {
    std::vector<std::thread> threads;
    for (Word r = 0; r < number; ++r) threads.emplace_back([&rank, r] { rank(r); });
    for (std::thread& thread : threads) thread.join();
}

// ---- Face to Python ------------------------------------------------------------------------------

// Read the counters, in the order of their declaration, and begin again at 0.
extern "C" void take_counters(Word* out) {
    for (auto* counter : {&counters.stored_bytes, &counters.vector_stores, &counters.misaligned,
                          &counters.wide_stores, &counters.adds, &counters.vector_adds})
        *out++ = counter->exchange(0);
}

// Begin to remember (room = 0), or stop and return how many addresses were remembered.
extern "C" Word remember(Word* out, Word room) {
    remembering = room == 0;
    const std::lock_guard<std::mutex> guard(remembered_mutex);
    const Word number = remembered.size();
    for (Word i = 0; i < number && i < room; ++i) out[i] = remembered[i];
    remembered.clear();
    return number;
}
