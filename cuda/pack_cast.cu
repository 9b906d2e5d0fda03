// Pack and cast: copies the fp32 shards of a communication group into its window, in compute dtype.
//
// Purpose: a rank publishes its shards so that peers can pull them.  All tensors of a group go in
// one launch, because most are small (biases, norms) and a launch would cost more than their bytes.
//
// Layout: arrays of one entry per segment (tensor), all in device memory.  Segment s is
//
//     sources[s][0 .. counts[s])  ->  window[offsets[s] .. offsets[s] + counts[s])
//
// with offsets and counts in elements.  Segments may be empty and may begin at any element; those
// in the window must not overlap each other or a source.  A bf16 is stored as its 16 bits.
// Rounding is to nearest, ties to even, as in PyTorch; subnormal numbers are kept; every NaN
// becomes the quiet NaN 0x7fc0.  fp32 keeps all its bits.
//
// References: IEEE 754-2019, 4.3.1 (roundTiesToEven); CUDA C++ Programming Guide on the alignment
// of vector accesses and on loads and stores with cache hints.

typedef unsigned long long Size;

// ---- Scalar reference: plain C++, one element after the other ------------------------------------

#ifndef __CUDACC_RTC__
#include <cstring>

inline unsigned short bf16_reference(float value) {
    unsigned int bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fc0;
    const unsigned int kept = bits >> 16;
    const unsigned int rest = bits & 0xffff;  // in units of 2^-16 of the kept part's last place
    const bool up = rest > 0x8000 || (rest == 0x8000 && kept % 2 == 1);
    return (unsigned short)(kept + up);  // magnitudes are ordered as their bits; the last is infinity
}

inline void pack_cast_bf16_reference(const float* const* sources, const Size* offsets, const Size* counts,
                                     Size segments, unsigned short* window) {
    for (Size s = 0; s < segments; ++s)
        for (Size i = 0; i < counts[s]; ++i) window[offsets[s] + i] = bf16_reference(sources[s][i]);
}
#endif

// ---- Kernels -------------------------------------------------------------------------------------

// How a value of type T is made for the window, and four of them at once.
template <typename T> struct Element;

template <> struct Element<float> {
    typedef float4 Four;
    static __device__ float cast(float value) { return value; }
};

template <> struct Element<unsigned short> {
    typedef ushort4 Four;
    // Half a unit in the last kept place, less one where that place is even, carries into it just
    // when the value rounds up.  In integers, so that the very same lines run on a CPU; the few
    // operations hide behind the memory accesses.
    static __device__ unsigned short cast(float value) {
        const unsigned int bits = __float_as_uint(value);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
        return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
};

// Four neighbours in the widest loads that their place allows: of four, of two, or of two between
// two of one.
static __device__ float4 read_four(const float* source) {
    if ((Size)source % 16 == 0) return __ldcs((const float4*)source);
    if ((Size)source % 8 == 0) {
        const float2 low = __ldcs((const float2*)source), high = __ldcs((const float2*)(source + 2));
        return {low.x, low.y, high.x, high.y};
    }
    const float2 middle = __ldcs((const float2*)(source + 1));
    return {__ldcs(source), middle.x, middle.y, __ldcs(source + 3)};
}

// Copy one segment with all threads along x.  Sources are read once, so they are streamed past the
// caches (`cs`); the window is left in L2 (`cg`), where peers will read it.
template <typename T> __device__ void pack_segment(const float* source, T* target, Size count) {
    typedef typename Element<T>::Four Four;
    const Size first = (Size)blockIdx.x * blockDim.x + threadIdx.x;
    const Size stride = (Size)gridDim.x * blockDim.x;

    // Four at a time from the target's first boundary on, whatever the source's alignment: segments lie
    // one behind the other in the window, as what is gathered must, and any of them may be odd.
    Size head = (sizeof(Four) - (Size)target % sizeof(Four)) % sizeof(Four) / sizeof(T);
    if (head > count) head = count;
    const Size fours = (count - head) / 4;
    for (Size i = first; i < fours; i += stride) {
        const float4 in = read_four(source + head + 4 * i);
        const Four out = {Element<T>::cast(in.x), Element<T>::cast(in.y), Element<T>::cast(in.z),
                          Element<T>::cast(in.w)};
        __stcg((Four*)(target + head) + i, out);
    }

    // One at a time before and behind.
    for (Size i = first; i < count - 4 * fours; i += stride) {
        const Size at = i < head ? i : i + 4 * fours;
        __stcg(target + at, Element<T>::cast(__ldcs(source + at)));
    }
}

template <typename T>
__device__ void pack(const float* const* sources, const Size* offsets, const Size* counts, Size segments,
                     T* window) {
    for (Size s = blockIdx.y; s < segments; s += gridDim.y)
        pack_segment(sources[s], window + offsets[s], counts[s]);
}

// Launch: any grid and any block along x are right, since every loop strides.  Fast: block
// (256, 1); grid y = min(segments, 65535); grid x = ceil(longest segment / 1024), but no more than
// gives each multiprocessor its 8 blocks of 256.  No shared memory, no includes under NVRTC.  Time
// is bound by bytes: 4 read and 2 (bf16) or 4 (fp32) written per element.

extern "C" __global__ void __launch_bounds__(256, 8)
    pack_cast_bf16(const float* const* sources, const Size* offsets, const Size* counts, Size segments,
                   unsigned short* window) {
    pack(sources, offsets, counts, segments, window);
}

extern "C" __global__ void __launch_bounds__(256, 8)
    pack_cast_fp32(const float* const* sources, const Size* offsets, const Size* counts, Size segments,
                   float* window) {
    pack(sources, offsets, counts, segments, window);
}
