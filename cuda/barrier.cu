// Barrier: ranks meet, on one GPU or several, and a rank that does not come is named.
//
// Purpose: the two meetings of an ODC step, after publishing and before taking the gradient.  What
// a rank wrote before it came (its window, or into others' accumulators), in this kernel's stream,
// is visible to all who leave.
//
// Layout: every window holds one flag per rank, flags[p][r]: the epoch at which rank r last came to
// peer p's window.  Ranks write into their peers' windows and poll their own, so that waiting puts
// no load on the links.  The epoch is the number of the meeting, 1, 2, ..., the same on all ranks;
// flags begin as 0 and never go back, so nothing is reset between meetings, a rank that was late
// for one is in time for the next, and one that has run ahead to the next has come to this.
//
// Result: seen[q] = the epoch at which rank q was last seen here; status = 0 if all came, otherwise
// 1 + the lowest rank that did not.  All those with seen[q] < epoch did not.  A rank that is gone is
// named by every other after its own timeout, and the others are not: they left their flags.
//
// References: PTX ISA, memory consistency model (release and acquire patterns are cumulative; the
// launches of a stream are ordered) and %globaltimer, whose step depends on the GPU and is small
// beside any useful timeout, which is seconds.

typedef unsigned long long Size;

// ---- Scalar reference: plain C++ -----------------------------------------------------------------

#ifndef __CUDACC_RTC__
// The status for one look at a rank's own flags.
inline Size barrier_reference(const Size* own_flags, Size peers, Size epoch) {
    for (Size q = 0; q < peers; ++q)
        if (own_flags[q] < epoch) return 1 + q;
    return 0;
}
#endif

// ---- Kernel --------------------------------------------------------------------------------------

// Flags between GPUs, and the time; the host shim has a CPU's.
#ifdef __CUDACC_RTC__
static __device__ void store_release(Size* flag, Size value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(flag)), "l"(value)
                 : "memory");
}

static __device__ Size load_acquire(const Size* flag) {
    Size value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
                 : "=l"(value)
                 : "l"(__cvta_generic_to_global(flag))
                 : "memory");
    return value;
}

static __device__ Size nanoseconds() {
    Size now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
#endif

// Return the epoch in a flag, as soon as it is `epoch` or later, or when the time is up.  The time
// is read before the flag: a rank that was itself kept from running looks once more.
static __device__ Size wait_for(const Size* flag, Size epoch, Size deadline_ns) {
    while (true) {
        const bool late = nanoseconds() >= deadline_ns;
        const Size seen = load_acquire(flag);
        if (seen >= epoch || late) return seen;
        __nanosleep(100);
    }
}

// Launch: one block, of any size; fast: one thread per peer, rounded up to a warp.  On the stream of
// the work that the meeting is to order.  The kernel always ends, timeout_ns after it began at the
// latest; the stream goes on, so the host reads the status before it trusts what follows.  Ranks
// that share a GPU meet as well: kernels of several processes take turns, and those of one process
// run side by side, on streams of their own, since a block each leaves room.

extern "C" __global__ void barrier(Size* const* flags, Size peers, Size rank, Size epoch, Size timeout_ns,
                                   Size* seen, Size* status) {
    const Size deadline_ns = nanoseconds() + timeout_ns;
    for (Size q = threadIdx.x; q < peers; q += blockDim.x) store_release(flags[q] + rank, epoch);
    for (Size q = threadIdx.x; q < peers; q += blockDim.x)
        seen[q] = wait_for(flags[rank] + q, epoch, deadline_ns);
    __syncthreads();
    if (threadIdx.x != 0) return;
    Size came = 0;
    while (came < peers && seen[came] >= epoch) ++came;
    store_release(status, came == peers ? 0 : 1 + came);
}
