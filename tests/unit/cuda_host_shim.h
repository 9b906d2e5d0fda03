// Runs CUDA kernels on CPU threads, as far as their logic goes.
//
// A block's threads run at once, one std::thread each; blocks run one after the other, so a kernel
// in which blocks wait for one another would hang.  Loads and stores with cache hints check their
// alignment, as a GPU does, and are counted.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(threads)

struct dim3 { unsigned int x = 1, y = 1, z = 1; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) ushort4 { unsigned short x, y, z, w; };

inline thread_local dim3 blockIdx, threadIdx;
inline dim3 gridDim, blockDim;

struct Counters {
    std::atomic<std::uint64_t> stored_bytes{0};   // all stores
    std::atomic<std::uint64_t> vector_stores{0};  // of more than 4 bytes
    std::atomic<std::uint64_t> misaligned{0};     // loads and stores that would fault on a GPU
};
inline Counters counters;

inline unsigned int __float_as_uint(float value) {
    unsigned int bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

template <typename T> T __ldcs(const T* address) {
    if (reinterpret_cast<std::uintptr_t>(address) % sizeof(T) != 0) ++counters.misaligned;
    T value;
    std::memcpy(&value, static_cast<const void*>(address), sizeof value);
    return value;
}

template <typename T> void __stcg(T* address, T value) {
    if (reinterpret_cast<std::uintptr_t>(address) % sizeof(T) != 0) ++counters.misaligned;
    if (sizeof value > 4) ++counters.vector_stores;
    counters.stored_bytes += sizeof value;
    std::memcpy(static_cast<void*>(address), &value, sizeof value);
}

template <typename Kernel> void launch(dim3 grid, dim3 block, const Kernel& kernel) {
    gridDim = grid;
    blockDim = block;
    for (unsigned int by = 0; by < grid.y; ++by)
        for (unsigned int bx = 0; bx < grid.x; ++bx) {
            std::vector<std::thread> threads;
            for (unsigned int tx = 0; tx < block.x; ++tx)
                threads.emplace_back([&, tx] {
                    blockIdx = {bx, by, 0};
                    threadIdx = {tx, 0, 0};
                    kernel();
                });
            for (std::thread& thread : threads) thread.join();
        }
}
