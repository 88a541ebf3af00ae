// Sum over the tokens of a paged list, split over CTAs; the last to arrive merges. BUG=k plants a bug.
typedef unsigned int uint32_t;
#ifndef BUG
#define BUG 0
#endif
#define PAGE 16
#define DIM 32
#define WARPS 4

struct Params {
  const float* pool;   // [pages][PAGE][DIM]
  const int* table;    // [num_pages of the list]
  float* partial;      // [splits][DIM]
  float* out;          // [DIM]
  uint32_t* counter;
  long long page_stride;  // elements
  int tokens, per_split;
};

extern "C" __global__ void split_sum(const Params p) {
  __shared__ float red[WARPS][DIM];
  __shared__ int pages[WARPS][32];
  __shared__ uint32_t last;
  extern __shared__ __align__(16) float extra[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int begin = blockIdx.x * p.per_split;
  int end = begin + p.per_split;
  if (end > p.tokens && BUG != 1) end = p.tokens;  // 1: unmasked tail
  float sum = 0.f;
  for (int base = begin; base < end; base += 32 * PAGE) {
    // Each lane brings one page number; the others read it.
    const int mine = base / PAGE + lane + (BUG == 2);  // 2: off by one page
    if (mine * PAGE < end || BUG == 3) pages[warp][lane] = p.table[mine];  // 3: reads past the table
#if BUG != 4  // 4: lanes read what other lanes write without __syncwarp
    __syncwarp();
#endif
    for (int t = base + warp; t < end && t < base + 32 * PAGE; t += WARPS) {
      const int page = pages[warp][(t - base) / PAGE];
#if BUG == 5  // offset in 32 bits
      const int offset = page * (int)p.page_stride + t % PAGE * DIM + lane;
#else
      const long long offset = page * p.page_stride + t % PAGE * DIM + lane;
#endif
#if BUG == 6  // misaligned vector
      if (lane == 0) {
        float x, y;
        asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "l"(p.pool + offset + 1));
      }
#endif
      sum += p.pool[offset];
    }
#if BUG != 7  // 7: the next round overwrites page numbers that are still read
    __syncwarp();
#endif
  }
  red[warp][lane] = sum;
#if BUG != 8  // 8: no barrier between writes and reads of the partial sums
  __syncthreads();
#endif
  if (warp == 0) {
    float total = 0.f;
    for (int w = 0; w < WARPS; w++) total += red[w][lane];
    const int slot = BUG == 9 && blockIdx.x ? blockIdx.x - 1 : blockIdx.x;  // 9: two CTAs share a slot
    p.partial[slot * DIM + lane] = total;
#if BUG != 10  // 10: the partial sums are not released before the counter says so
    __threadfence();
#endif
    __syncwarp();
    if (lane == 0) {
      last = atomicAdd(p.counter, 1) + 1 == gridDim.x;
#if BUG != 11  // 11: what the others wrote is not acquired
      __threadfence();
#endif
    }
  }
#if BUG == 12  // a barrier that one warp does not reach
  if (warp != 3) __syncthreads();
#else
  __syncthreads();
#endif
  if (!last) return;
#if BUG == 13  // merges before all have arrived
  const int count = gridDim.x + 1;
#else
  const int count = gridDim.x;
#endif
  if (warp == 0) {
    float total = 0.f;
    for (int s = 0; s < count; s++) {
#if BUG == 14  // non-coherent load of memory that the kernel writes
      float v;
      asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p.partial + s * DIM + lane));
      total += v;
#else
      total += p.partial[s * DIM + lane];
#endif
    }
#if BUG == 15  // shuffle that half the warp does not reach
    if (lane < 16) total += 0.f * __shfl_xor_sync(0xffffffffu, total, 1);
#endif
#if BUG == 16  // more shared memory than was asked for
    extra[lane + 1] = total;
    total = extra[lane + 1];
#endif
    p.out[lane] = total;
#if BUG != 17  // 17: the counter is not reset for the next launch
    if (lane == 0) *p.counter = 0;
#endif
  }
}
