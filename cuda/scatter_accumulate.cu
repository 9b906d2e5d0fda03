// Scatter and accumulate: one rank adds each part of its gradient to the accumulator of the peer
// that owns it; and the owner takes the sum.
//
// Purpose: the reduce-scatter of ODC.  Ranks push when they are ready, in any order, any number of
// times between two meetings, and nobody waits.
//
// Layout: the gradient of a communication group is `peers` shards of `count` elements, fp32 or the
// 16 bits of a bf16; accumulators are fp32, in windows that every peer has mapped:
//
//     accumulators[r][offset .. offset + count)  +=  gradient[r * count .. (r + 1) * count)
//
// for all peers r, in the rotated order rank + 1, rank + 2, ..., rank (see gather.cu), with offset
// and count in elements.  Everything begins at any element.
//
// Two ways to accumulate:
//
//   fast           one accumulator per owner, at the same offset for all ranks.  Sums are taken in
//                  order of arrival, so the last bits differ from run to run.
//   reproducible   `peers` slots of `stride` elements per owner; rank k adds into slot k, by giving
//                  offset + k * stride.  A slot has one writer, whose launches follow one another on
//                  its stream, so a slot's sum is bitwise the same in every run; take_gradient adds
//                  the slots in rank order, so the gradient is too.  The kernels are those with
//                  `alone` in their names: they load, add and store.
//
// Slots rather than turns: with a flag for whose turn it is, every rank would wait for the slowest
// at every micro-batch, which ODC is there to avoid; ranks that do fewer micro-batches would have to
// be known beforehand; and ranks that share a GPU could wait for one that cannot be scheduled.
// Without waiting there is no deadlock.  The price is memory: `peers` accumulators in place of one.
//
// Adds of the fast way are system-scope `red`, so that ranks on several GPUs, and kernels of several
// processes on one, may add at once.  Between GPUs that needs links with native atomics (NVLink),
// which the pair's cudaDevP2PAttrNativeAtomicSupported tells; the reproducible way goes over any.  On
// sm_90 and later four adds go in one instruction.
//
// Atomic adds are faster where they find their places in L2.  So accumulators in this GPU's own memory
// are prefetched into it while the gradient is on its way: for shards of 64 MiB 0.98 of the rate of
// torch's add_, without 0.84 (measured on an H200).  Not those of other GPUs, as that might cross the link.
//
// By the PTX ISA `red.add.f32` takes and leaves subnormal numbers as zero in global memory.
//
// References: PTX ISA, `red` (vectors: ISA 8.1, sm_90) and the memory consistency model; CUDA C++
// Programming Guide, atomicAdd_system; the ODC document for pushing without a rendezvous.

typedef unsigned long long Size;

// ---- Scalar reference: plain C++, one element after the other ------------------------------------

#ifndef __CUDACC_RTC__
#include <cstring>

inline float widen_reference(float value) { return value; }
inline float widen_reference(unsigned short value) {
    const unsigned int bits = (unsigned int)value << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

template <typename T>
void scatter_accumulate_reference(const T* gradient, float* const* accumulators, Size offset, Size count,
                                  Size peers) {
    for (Size r = 0; r < peers; ++r)
        for (Size i = 0; i < count; ++i) accumulators[r][offset + i] += widen_reference(gradient[r * count + i]);
}

inline void take_gradient_reference(float* slots, Size stride, Size number, Size count, float* gradient) {
    for (Size i = 0; i < count; ++i) {
        gradient[i] = slots[i];
        for (Size k = 1; k < number; ++k) gradient[i] += slots[k * stride + i];
        for (Size k = 0; k < number; ++k) slots[k * stride + i] = 0;
    }
}
#endif

// ---- Kernels -------------------------------------------------------------------------------------

// Adds that no other add to the same place can lose; the host shim has a CPU's.  Before sm_90 a warp
// is best served when its threads add to neighbours, so none adds four.
#ifdef __CUDACC_RTC__
static __device__ void add_system(float* target, float value) {
    asm volatile("red.relaxed.sys.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(target)), "f"(value)
                 : "memory");
}

#if __CUDA_ARCH__ >= 900
#define VECTOR_ADDS true
static __device__ void add_system(float4* target, float4 value) {
    asm volatile("red.relaxed.sys.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                     __cvta_generic_to_global(target)),
                 "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
                 : "memory");
}
#else
#define VECTOR_ADDS false
#endif

// Of a sector, the 32 bytes that memory brings at once, one thread asks for all.
static __device__ void prefetch_into_l2(const float4* place) {
    if ((Size)place % 32 == 0)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(place)));
}
#else
#define VECTOR_ADDS true
static __device__ void prefetch_into_l2(const float4*) {}
#endif

// Adds where no other thread adds to the same place.  Another GPU reads and zeroes it between two
// meetings, so L1 is bypassed (`cg`).
static __device__ float plus(float a, float b) { return a + b; }
static __device__ float4 plus(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

template <typename Wide> static __device__ void add_alone(Wide* target, Wide value) {
    __stcg(target, plus(__ldcg((const Wide*)target), value));
}

template <bool ALONE, typename Wide> static __device__ void add(Wide* target, Wide value) {
    if constexpr (ALONE)
        add_alone(target, value);
    else
        add_system(target, value);
}

// Gradients are read once, so they are streamed past the caches (`cs`).
static __device__ float widen(float value) { return value; }
static __device__ float widen(unsigned short value) { return __uint_as_float((unsigned int)value << 16); }

// Four neighbours in the widest loads that their place allows: of four, of two, or of one (of fp32, two
// between two of one).
static __device__ float4 load_four(const float* source) {
    if ((Size)source % 16 == 0) return __ldcs((const float4*)source);
    if ((Size)source % 8 == 0) {
        const float2 low = __ldcs((const float2*)source), high = __ldcs((const float2*)(source + 2));
        return {low.x, low.y, high.x, high.y};
    }
    const float2 middle = __ldcs((const float2*)(source + 1));
    return {__ldcs(source), middle.x, middle.y, __ldcs(source + 3)};
}

static __device__ float4 load_four(const unsigned short* source) {
    if ((Size)source % 8 == 0) {
        const ushort4 in = __ldcs((const ushort4*)source);
        return {widen(in.x), widen(in.y), widen(in.z), widen(in.w)};
    }
    if ((Size)source % 4 == 0) {
        const ushort2 low = __ldcs((const ushort2*)source), high = __ldcs((const ushort2*)(source + 2));
        return {widen(low.x), widen(low.y), widen(high.x), widen(high.y)};
    }
    return {widen(__ldcs(source)), widen(__ldcs(source + 1)), widen(__ldcs(source + 2)),
            widen(__ldcs(source + 3))};
}

// Add one shard with all threads along x: four at a time from the target's first 16-byte boundary
// on, whatever the source's alignment, because the adds cost more than the loads.
template <bool ALONE, typename T>
__device__ void add_shard(const T* source, float* target, Size count, bool is_near) {
    constexpr bool VECTORS = ALONE || VECTOR_ADDS;
    const Size first = (Size)blockIdx.x * blockDim.x + threadIdx.x;
    const Size stride = (Size)gridDim.x * blockDim.x;

    Size head = (16 - (Size)target % 16) % 16 / sizeof(float);
    if (head > count || !VECTORS) head = count;
    const Size fours = (count - head) / 4;
    if constexpr (VECTORS)
        for (Size i = first; i < fours; i += stride) {
            float4* const place = (float4*)(target + head) + i;
            if (!ALONE && is_near) prefetch_into_l2(place);
            add<ALONE>(place, load_four(source + head + 4 * i));
        }

    // One at a time before and behind.
    for (Size i = first; i < count - 4 * fours; i += stride) {
        const Size at = i < head ? i : i + 4 * fours;
        add<ALONE>(target + at, widen(__ldcs(source + at)));
    }
}

template <bool ALONE, typename T>
__device__ void scatter_accumulate(const T* gradient, float* const* accumulators, Size offset, Size count,
                                   Size peers, Size rank, Size near) {
    for (Size turn = blockIdx.y; turn < peers; turn += gridDim.y) {
        const Size peer = (rank + 1 + turn) % peers;
        const bool is_near = peer < 64 && (near >> peer & 1);
        add_shard<ALONE>(gradient + peer * count, accumulators[peer] + offset, count, is_near);
    }
}

// Launch: as gather.cu, with grid x = ceil(count / 1024) at most.  No shared memory, no includes
// under NVRTC, C++17.  Bit r of `near` says that the window of peer r < 64 is in this GPU's memory; it
// changes no sum.  Time is bound by bytes: 4 (fp32) or 2 (bf16) read and 4 added per element,
// which `alone` reads and writes.  The accumulators are zero at first; take_gradient leaves them so.

extern "C" __global__ void __launch_bounds__(256, 8)
    scatter_accumulate_fp32(const float* gradient, float* const* accumulators, Size offset, Size count,
                            Size peers, Size rank, Size near) {
    scatter_accumulate<false>(gradient, accumulators, offset, count, peers, rank, near);
}

extern "C" __global__ void __launch_bounds__(256, 8)
    scatter_accumulate_bf16(const unsigned short* gradient, float* const* accumulators, Size offset,
                            Size count, Size peers, Size rank, Size near) {
    scatter_accumulate<false>(gradient, accumulators, offset, count, peers, rank, near);
}

extern "C" __global__ void __launch_bounds__(256, 8)
    scatter_accumulate_alone_fp32(const float* gradient, float* const* accumulators, Size offset, Size count,
                                  Size peers, Size rank, Size near) {
    scatter_accumulate<true>(gradient, accumulators, offset, count, peers, rank, near);
}

extern "C" __global__ void __launch_bounds__(256, 8)
    scatter_accumulate_alone_bf16(const unsigned short* gradient, float* const* accumulators, Size offset,
                                  Size count, Size peers, Size rank, Size near) {
    scatter_accumulate<true>(gradient, accumulators, offset, count, peers, rank, near);
}

// For loops that the compiler would unroll into more registers than eight blocks of a
// multiprocessor have.
#ifdef __CUDACC_RTC__
#define NOT_UNROLLED _Pragma("unroll 1")
#else
#define NOT_UNROLLED
#endif

// Sum the slots in order, store the sum, and zero them backwards.  Peers wrote them, so L1 is bypassed (`cg`).
// In this order: zeros stored while the loads of the same places are on their way take five times as
// long (measured on an H200).
template <typename Wide> __device__ void take(float* slot, Size stride, Size number, float* gradient) {
    Wide sum = __ldcg((const Wide*)slot);
    NOT_UNROLLED
    for (Size k = 1; k < number; ++k) {
        slot += stride;
        sum = plus(sum, __ldcg((const Wide*)slot));
    }
    __stcg((Wide*)gradient, sum);
    NOT_UNROLLED
    for (Size k = 0; k < number; ++k, slot -= stride) __stcg((Wide*)slot, Wide{});
}

// The owner's side, after a meeting: gradient[i] = slots[i] + slots[stride + i] + ... over `number`
// slots, in this order, for i < count; the slots become zero.  The fast way has one slot.
//
// Launch: any grid and any block along x are right.  Fast: block 256, grid x = ceil(count / 1024),
// but no more than gives each multiprocessor its 8 blocks.  4 bytes read and 4 written per element
// and slot, and 4 written.
extern "C" __global__ void __launch_bounds__(256, 8)
    take_gradient(float* slots, Size stride, Size number, Size count, float* gradient) {
    const Size first = (Size)blockIdx.x * blockDim.x + threadIdx.x;
    const Size threads = (Size)gridDim.x * blockDim.x;

    // Four at a time if all slots and the gradient are equally far from a 16-byte boundary.
    Size head = (16 - (Size)gradient % 16) % 16 / sizeof(float);
    const bool apart = (Size)(slots + head) % 16 != 0 || (number > 1 && stride % 4 != 0);
    if (head > count || apart) head = count;
    const Size fours = (count - head) / 4;
    NOT_UNROLLED
    for (Size i = first; i < fours; i += threads)
        take<float4>(slots + head + 4 * i, stride, number, gradient + head + 4 * i);

    // One at a time before and behind.
    NOT_UNROLLED
    for (Size i = first; i < count - 4 * fours; i += threads) {
        const Size at = i < head ? i : i + 4 * fours;
        take<float>(slots + at, stride, number, gradient + at);
    }
}
