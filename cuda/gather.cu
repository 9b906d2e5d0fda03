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
// with cache hints, on shuffles of a warp, and on the coherence of L1 (loads of peers' data bypass
// it, `cg`).

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
// Where source and target are apart, a thread has registers for two, and for what follows them.
constexpr int AT_ONCE = 4, APART_AT_ONCE = 2;

#ifdef __CUDACC_RTC__
// What the next thread of the warp has; all threads of the warp call it, and those that the last warp
// of a block lacks count as exited.  The host shim has a CPU's.
static __device__ uint4 of_next_lane(uint4 own) {
    const unsigned int all = 0xffffffffu;
    return {__shfl_down_sync(all, own.x, 1), __shfl_down_sync(all, own.y, 1),
            __shfl_down_sync(all, own.z, 1), __shfl_down_sync(all, own.w, 1)};
}
#endif

// The 16 bytes that begin `apart` bytes behind the start of `low`, of `low` and what follows it.
static __device__ uint4 straddling(uint4 low, uint4 high, unsigned int apart) {
    const bool by_8 = apart & 8, by_4 = apart & 4;
    const unsigned int a = by_8 ? low.z : low.x, b = by_8 ? low.w : low.y, c = by_8 ? high.x : low.z;
    const unsigned int d = by_8 ? high.y : low.w, e = by_8 ? high.z : high.x, f = by_8 ? high.w : high.y;
    const unsigned int v = by_4 ? b : a, w = by_4 ? c : b, x = by_4 ? d : c, y = by_4 ? e : d, z = by_4 ? f : e;
    const unsigned int bits = 8 * (apart % 4);
    return {__funnelshift_r(v, w, bits), __funnelshift_r(w, x, bits), __funnelshift_r(x, y, bits),
            __funnelshift_r(y, z, bits)};
}

// Copy 16 bytes at a time between places that are equally far from a 16-byte boundary.  A block's
// accesses are neighbours, so that it reads and writes memory page by page.
static __device__ void copy_together(const uint4* source, uint4* target, Size wides) {
    const Size part = AT_ONCE * blockDim.x;
    for (Size start = blockIdx.x * part; start < wides; start += gridDim.x * part) {
        const Size first = start + threadIdx.x;
        if (start + part <= wides) {
            uint4 read[AT_ONCE];
            for (int k = 0; k < AT_ONCE; ++k) read[k] = __ldcg(source + first + k * blockDim.x);
            for (int k = 0; k < AT_ONCE; ++k) __stcg(target + first + k * blockDim.x, read[k]);
        } else {
            for (Size next = first; next < wides; next += blockDim.x) __stcg(target + next, __ldcg(source + next));
        }
    }
}

// The same where what is copied begins `apart` bytes behind the boundary `from`: each thread loads the
// 16 bytes from the boundary before, and has what follows from the next thread; the last of a warp
// loads that too.  So peers' memory is read 16 bytes at a time, and but for those once.  All threads
// of a block make equally many turns.
static __device__ void copy_apart(const uint4* from, unsigned int apart, uint4* target, Size wides) {
    const Size stride = (Size)gridDim.x * blockDim.x;
    const bool is_last = threadIdx.x % 32 == 31 || threadIdx.x == blockDim.x - 1;
    for (Size start = (Size)blockIdx.x * blockDim.x; start < wides; start += APART_AT_ONCE * stride) {
        uint4 low[APART_AT_ONCE], high[APART_AT_ONCE];
        for (int k = 0; k < APART_AT_ONCE; ++k) {
            const Size at = start + threadIdx.x + k * stride;
            low[k] = high[k] = uint4{};
            if (at <= wides) low[k] = __ldcg(from + at);
            if (is_last && at < wides) high[k] = __ldcg(from + at + 1);
        }
        for (int k = 0; k < APART_AT_ONCE; ++k) {
            const Size at = start + threadIdx.x + k * stride;
            const uint4 next = of_next_lane(low[k]);
            if (at < wides) __stcg(target + at, straddling(low[k], is_last ? high[k] : next, apart));
        }
    }
}

// Copy one shard with all threads along x, 16 bytes at a time between boundaries of the target.
// Nothing beside the source is read.  What was gathered is left in L2 for the computation that waits
// for it.
static __device__ void copy_shard(const char* source, char* target, Size bytes) {
    Size head = (16 - (Size)target % 16) % 16;
    const unsigned int apart = (Size)(source + head) % 16;
    if (head < apart) head += 16;
    if (head > bytes) head = bytes;
    Size wides = (bytes - head) / 16;
    if (apart == 0) {
        copy_together((const uint4*)(source + head), (uint4*)(target + head), wides);
    } else {
        if (wides > 0 && (bytes - head) % 16 < 16 - apart) --wides;
        copy_apart((const uint4*)(source + head - apart), apart, (uint4*)(target + head), wides);
    }

    // Two bytes at a time before and behind.
    const Size first = (Size)blockIdx.x * blockDim.x + threadIdx.x;
    const Size stride = (Size)gridDim.x * blockDim.x;
    for (Size i = 2 * first; i < bytes - 16 * wides; i += 2 * stride) {
        const Size at = i < head ? i : i + 16 * wides;
        __stcg((unsigned short*)(target + at), __ldcg((const unsigned short*)(source + at)));
    }
}

// Launch: any grid and any block along x are right, since every loop strides.  Fast: block
// (256, 1), grid (ceil(bytes / 16384), peers): blocks begin in the order of their numbers, and so peer
// by peer in the rotated order.  A launch that must leave multiprocessors to others has as many blocks
// along x as they run, and grid y = 1.  No shared memory, no includes under NVRTC.  Time is bound by
// bytes: each read once and written once.
// Widths: 16 bytes, but for fewer than 32 before and behind, wherever source and target begin: a
// shard that is not a multiple of 16 bytes is at another distance from a boundary in `out` than in
// its window for all peers but a few.

extern "C" __global__ void __launch_bounds__(256, 4)
    gather(const char* const* windows, Size offset, Size bytes, Size peers, Size rank, char* out) {
    for (Size turn = blockIdx.y; turn < peers; turn += gridDim.y) {
        const Size peer = (rank + 1 + turn) % peers;
        copy_shard(windows[peer] + offset, out + peer * bytes, bytes);
    }
}
