// Gather: one rank pulls the shards of all peers out of their windows, in one launch.
//
// Purpose: the all-gather of ODC.  Nobody has to take part but the rank that needs the parameters:
// the shards were published before the last meeting, and only reads follow until the next.
//
// Layout: every peer's window holds its shard at the same place, and
//
//     windows[r][offset .. offset + bytes)  ->  out[r * bytes .. (r + 1) * bytes)    for all peers r
//
// with offset and bytes in bytes and even, so that bf16 and fp32 are the same to this kernel: it
// moves bits.  Windows and out begin at any even address and do not overlap.
//
// Order: rank r reads peer r + 1 first, then r + 2, ..., itself last.  Ranks that start together
// thus read different peers, rather than all of them the memory and the links of peer 0.
//
// References: CUDA C++ Programming Guide on the alignment of vector accesses, on loads and stores
// with cache hints, and on the coherence of L1 (loads of peers' data bypass it, `cg`).

typedef unsigned long long Size;

// ---- Scalar reference: plain C++, one peer after the other ---------------------------------------

#ifndef __CUDACC_RTC__
#include <cstring>

inline void gather_reference(const char* const* windows, Size offset, Size bytes, Size peers, char* out) {
    for (Size r = 0; r < peers; ++r) std::memcpy(out + r * bytes, windows[r] + offset, bytes);
}
#endif

// ---- Kernel --------------------------------------------------------------------------------------

// Loads that a thread has on their way before its first store: one alone would leave the links idle
// for as long as another GPU's memory takes to answer.
constexpr int AT_ONCE = 4;

// Copy one shard with all threads along x, a Wide at a time.  Source and target are equally far
// from a boundary of Wide.  What was gathered is left in L2 for the computation that waits for it.
template <typename Wide> __device__ void copy_shard(const char* source, char* target, Size bytes) {
    const Size first = (Size)blockIdx.x * blockDim.x + threadIdx.x;
    const Size stride = (Size)gridDim.x * blockDim.x;

    Size head = (sizeof(Wide) - (Size)target % sizeof(Wide)) % sizeof(Wide);
    if (head > bytes) head = bytes;
    const Size wides = (bytes - head) / sizeof(Wide);
    const Wide* from = (const Wide*)(source + head);
    Wide* to = (Wide*)(target + head);
    Size next = first;
    for (; next + (AT_ONCE - 1) * stride < wides; next += AT_ONCE * stride) {
        Wide read[AT_ONCE];
        for (int k = 0; k < AT_ONCE; ++k) read[k] = __ldcg(from + next + k * stride);
        for (int k = 0; k < AT_ONCE; ++k) __stcg(to + next + k * stride, read[k]);
    }
    for (; next < wides; next += stride) __stcg(to + next, __ldcg(from + next));

    // Two bytes at a time before and behind.
    const Size wide_bytes = wides * sizeof(Wide);
    for (Size i = 2 * first; i < bytes - wide_bytes; i += 2 * stride) {
        const Size at = i < head ? i : i + wide_bytes;
        __stcg((unsigned short*)(target + at), __ldcg((const unsigned short*)(source + at)));
    }
}

// Launch: any grid and any block along x are right, since every loop strides.  Fast: block
// (256, 1); grid x = ceil(bytes / 16384), but no more than gives each multiprocessor 4 blocks of 256,
// for whose registers it has room; grid y = 1 if that many blocks are to be had, so that all threads follow the rotated order,
// and up to `peers` for small shards, whose launch would otherwise leave multiprocessors idle.  No
// shared memory, no includes under NVRTC.  Time is bound by bytes: each read once and written once.
// Widths: 16 bytes where source and target are equally far from a 16-byte boundary, else 8, 4 or 2;
// shards of a multiple of 16 bytes at a multiple of 16 always go the fast way.

extern "C" __global__ void __launch_bounds__(256, 4)
    gather(const char* const* windows, Size offset, Size bytes, Size peers, Size rank, char* out) {
    for (Size turn = blockIdx.y; turn < peers; turn += gridDim.y) {
        const Size peer = (rank + 1 + turn) % peers;
        const char* source = windows[peer] + offset;
        char* target = out + peer * bytes;
        const Size apart = (Size)source - (Size)target;
        if (apart % 16 == 0)
            copy_shard<uint4>(source, target, bytes);
        else if (apart % 8 == 0)
            copy_shard<uint2>(source, target, bytes);
        else if (apart % 4 == 0)
            copy_shard<unsigned int>(source, target, bytes);
        else
            copy_shard<unsigned short>(source, target, bytes);
    }
}
