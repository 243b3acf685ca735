// The pass over device memory of search.py: indices of the magnitudes above a floor.
//
// `bits` are n floating-point numbers seen as signed integers, `floor` points to one without sign.
// Indices go to `found` in no particular order, as many as it holds; `count` has to begin at zero
// and ends at how many there are, which may be more.

namespace {

constexpr int LOADS = 8;  // under way for each thread, to keep the memory busy

__device__ void append(long long index, long long* found, long long capacity,
                       unsigned long long* count) {
    // one atomic for all threads of a warp that come here together
    const unsigned together = __activemask();
    const unsigned lane = threadIdx.x & 31u;
    const int leader = __ffs(together) - 1;
    const int before = __popc(together & ((1u << lane) - 1u));
    unsigned long long base = 0;
    if (lane == static_cast<unsigned>(leader)) {
        base = atomicAdd(count, static_cast<unsigned long long>(__popc(together)));
    }
    const long long place = static_cast<long long>(__shfl_sync(together, base, leader)) + before;
    if (place < capacity) {
        found[place] = index;
    }
}

template <typename Bits>
__device__ void collect(const Bits* bits, long long n, const Bits* floor, long long* found,
                        long long capacity, unsigned long long* count) {
    const Bits sign = static_cast<Bits>(1ull << (8 * sizeof(Bits) - 1));
    const Bits limit = *floor;
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (long long start = first; start < n; start += LOADS * stride) {
        Bits values[LOADS];
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            const long long i = start + j * stride;
            values[j] = i < n ? static_cast<Bits>(bits[i] & ~sign) : Bits(0);  // 0: not above
        }
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            if (values[j] > limit) {
                append(start + j * stride, found, capacity, count);
            }
        }
    }
}

}  // namespace

#define ABOVE(width, Bits)                                                                     \
    extern "C" __global__ void above_##width(const Bits* bits, long long n, const Bits* floor, \
                                             long long* found, long long capacity,             \
                                             unsigned long long* count) {                      \
        collect(bits, n, floor, found, capacity, count);                                       \
    }

ABOVE(16, short)
ABOVE(32, int)
ABOVE(64, long long)
